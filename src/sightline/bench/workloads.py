"""The kinds of benchmarks (workload, first call, series, planning), their targets, inputs and FLOP counts.

FLOPs. A multiplication and an addition count as two. With A the allowed pairs (i, j) of a head,

    forward    2 A (d_k + d_v)         S = Q Kᵀ, O = P V
    backward   2 A (3 d_k + 2 d_v)     S once more, dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K, dK = dSᵀ Q

The softmax counts nothing, as is usual (Dao, "FlashAttention-2", 2023, section 4.1, where the backward pass is 2.5
times the forward). Hidden pairs count nothing, even for a contender that computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..arrays import resolve_dtype
from ..formula.evaluate_array import evaluate
from ..formula.expression import SYMBOLS, Expression
from ..formula.library import bias
from ..formula.tables import Table
from ..formula.tile_ranges import find_tile_ranges
from ..problem import Problem, make_problem
from ..statistics import Pooled, Statistic

__all__ = [
    "BEST",
    "SEED",
    "Benchmark",
    "FirstCall",
    "Inputs",
    "Mask",
    "Passes",
    "Planning",
    "Score",
    "Series",
    "Target",
    "ToTable",
    "Workload",
    "allowed_pairs",
    "evaluate_at",
]

Array = np.ndarray[Any, np.dtype[Any]]

ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes
SEED = 1706
SMALL_LENGTH = 150  # queries and keys of small versions; not a multiple of any tile size
SMALL_CELLS = 50  # pooled cells per side of small versions; all cells have one size, as at full size
BEST = "best peer"
CHECKED_GRADIENT_ROWS = 1024  # queries whose contribution to the gradients is checked
COUNTING_TILE = 64  # side of the tiles in which allowed pairs are counted


@dataclass(frozen=True)
class Target:
    """A limit for one measured quantity of a benchmark.

    Parameters
    ----------
    measure
        Lower limits. "share": the rate over the machine's peak. "faster": another contender's time over Sightline's.
        "efficiency": the speedup over one thread, divided by the number of threads.
        Upper limits. "slower": Sightline's time over another contender's. "seconds": a contender's time. "spread": the
        largest time per token over the smallest. "growth": memory beyond inputs and outputs, last point over first.
    limit : the limit
    implementation : name of the other contender of a ratio, or of the contender whose seconds count; `BEST` is the
        fastest peer
    """

    measure: Literal["share", "faster", "slower", "efficiency", "seconds", "spread", "growth"]
    limit: float
    implementation: str = "sightline"

    @property
    def at_least(self) -> bool:
        return self.measure in ("share", "faster", "efficiency")

    def is_met(self, value: float) -> bool:
        """True if the measured value is within the limit."""
        return bool(value >= self.limit if self.at_least else value <= self.limit)


# Converts a NumPy array for formulas. Sightline's formulas index a Table; FlexAttention's functions index a tensor.
ToTable = Callable[[Any], Any]


@dataclass(frozen=True)
class Mask:
    """A mask as a function that Sightline and FlexAttention accept.

    Parameters
    ----------
    description : name for tables
    make_function : (n, to_table) to a function of (b, h, i, j)
    """

    description: str
    make_function: Callable[[int, ToTable], Callable[..., Any]]

    def formula(self, n: int, to_table: ToTable = Table) -> Expression:
        """Return the mask as a formula."""
        formula: Expression = self.make_function(n, to_table)(*(SYMBOLS[name] for name in "bhij"))
        return formula


@dataclass(frozen=True)
class Score:
    """A change of the scaled scores as a function that Sightline and FlexAttention accept.

    Parameters
    ----------
    description : name for tables
    make_function : (H, to_table) to a function of (s, b, h, i, j)
    """

    description: str
    make_function: Callable[[int, ToTable], Callable[..., Any]]

    def formula(self, H: int, to_table: ToTable = Table) -> Expression:
        """Return the score as a formula."""
        formula: Expression = self.make_function(H, to_table)(*(SYMBOLS[name] for name in "sbhij"))
        return formula


Passes = Literal["forward", "backward", "forward and backward"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A problem that contenders compute, alternating, on the same arrays.

    The names of axes are those of `sightline.problem`. G = 0 means H, m = 0 means n, d_v = 0 means d_k.
    """

    name: str
    targets: tuple[Target, ...] = ()
    passes: Passes = "forward"
    dtype: str = "float32"
    B: int = 1
    H: int = 8
    G: int = 0
    n: int = 4096
    m: int = 0
    d_k: int = 64
    d_v: int = 0
    mask: Mask | None = None
    score: Score | None = None
    bias: bool = False  # (1, H, n, m), added to the scores; backward passes compute its gradient
    dropout: float = 0.0
    see: tuple[Statistic, ...] = ()  # only in forward passes
    peak: str = "float32"  # name of the peak in `peaks.Peaks` that a share refers to; "" for no share
    baselines: tuple[str, ...] = ("torch",)  # names of other contenders: peers, or variants of Sightline
    cuda_graph: bool = False  # on a GPU, time a CUDA graph: the device's time of a short call is below the host's
    published: str = ""  # a published figure to print, with its source

    def __post_init__(self) -> None:
        for name, value in (("G", self.H), ("m", self.n), ("d_v", self.d_k)):
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def description(self) -> str:
        """The shape and options in one line."""
        parts = [f"{self.B} × {self.H} heads" + (f" on {self.G}" if self.G != self.H else "")]
        parts.append(f"n {self.n:,}" + (f", m {self.m:,}" if self.m != self.n else ""))
        parts.append(f"d {self.d_k}" if self.d_k == self.d_v else f"d_k {self.d_k}, d_v {self.d_v}")
        parts += [self.dtype, *(formula.description for formula in (self.mask, self.score) if formula)]
        parts += ["bias"] if self.bias else []
        parts += [f"dropout {self.dropout}"] if self.dropout else []
        return ", ".join([*parts, *(f"see {statistic}" for statistic in self.see)])

    @property
    def extent(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.n, self.m

    @property
    def formula(self) -> Expression | None:
        """The mask as a formula, or None."""
        return None if self.mask is None else self.mask.formula(self.n)

    @property
    def is_causal(self) -> bool:
        """True if the mask is i ≥ j, which peers support without an array."""
        return repr(self.formula) == repr(SYMBOLS["i"] >= SYMBOLS["j"])

    @property
    def needs_mask_array(self) -> bool:
        """True if there is a mask other than i ≥ j."""
        return self.mask is not None and not self.is_causal

    @property
    def score_formula(self) -> Expression | None:
        """The score as a formula, or None; a bias is not part of it."""
        return None if self.score is None else self.score.formula(self.H)

    @cached_property
    def allowed(self) -> int:
        """The number of pairs that the mask allows, over all batches and heads."""
        return allowed_pairs(self.formula, self.extent)

    @property
    def flops(self) -> int:
        """The FLOPs of one call, counted as this module's docstring says."""
        forward, backward = 2 * (self.d_k + self.d_v), 2 * (3 * self.d_k + 2 * self.d_v)
        each = {"forward": forward, "backward": backward, "forward and backward": forward + backward}
        return self.allowed * each[self.passes]

    @property
    def bytes_moved(self) -> int:
        """Bytes of inputs and outputs, each moved once; a gradient has the bytes of its array."""
        queries, keys = self.B * self.H * self.n, self.B * self.G * self.m
        inputs = (queries + keys) * self.d_k + keys * self.d_v + self.bias * self.H * self.n * self.m
        output = queries * self.d_v
        passes = {"forward": inputs + output, "backward": 2 * (inputs + output)}
        return passes.get(self.passes, 2 * inputs + output) * ITEM_SIZES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Bytes of the output and of the statistics."""
        arrays = [array for statistic in self.see for array in statistic.outputs(self._meta_problem)]
        statistics = sum(math.prod(shape) * np.dtype(resolve_dtype(np, dtype)).itemsize for shape, dtype in arrays)
        return int(self.B * self.H * self.n * self.d_v * ITEM_SIZES[self.dtype] + statistics)

    @property
    def _meta_problem(self) -> Problem:
        """The problem with broadcast arrays of its shapes, which take no memory."""
        zero = np.zeros((), resolve_dtype(np, self.dtype))
        shapes = [(self.H, self.n, self.d_k), (self.G, self.m, self.d_k), (self.G, self.m, self.d_v)]
        return make_problem(*(np.broadcast_to(zero, (self.B, *shape)) for shape in shapes))

    def small(self) -> Workload:
        """Return the same problem with small sizes for tests, without targets."""
        heads = min(self.H, 4)
        group = self.H // self.G
        n, m = min(self.n, SMALL_LENGTH), min(self.m, SMALL_LENGTH)
        see = tuple(map(_limit_cells, self.see))
        return replace(self, targets=(), B=min(self.B, 2), H=heads, G=max(heads // group, 1), n=n, m=m, see=see)


def _limit_cells(statistic: Statistic) -> Statistic:
    """Return the statistic; if it is pooled, with at most `SMALL_CELLS` cells per side."""
    if not isinstance(statistic, Pooled):
        return statistic
    return replace(statistic, down=min(statistic.down, SMALL_CELLS), across=min(statistic.across, SMALL_CELLS))


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """The first call of a new problem, in a process that has called another one: compiled, and loaded from disk."""

    name: str
    n: int = 256
    d: int = 64
    targets: tuple[Target, ...] = ()

    @property
    def description(self) -> str:
        return f"8 heads, n {self.n:,}, d {self.d}, float32, causal; fresh processes"

    def small(self) -> FirstCall:
        return replace(self, n=32, targets=())


@dataclass(frozen=True, kw_only=True)
class Series:
    """One problem at several sizes, to measure how time and memory grow.

    Parameters
    ----------
    axis : "n", or "allowed": the share of pairs that the mask allows
    points : the problem at each point, in ascending order
    """

    name: str
    axis: Literal["n", "allowed"]
    points: tuple[Workload, ...]
    targets: tuple[Target, ...] = ()

    @property
    def description(self) -> str:
        first, last = self.points[0], self.points[-1]
        sizes = f"n {first.n:,} to {last.n:,}" if self.axis == "n" else f"n {first.n:,}, {len(self.points)} windows"
        mask = f", {first.mask.description}" if self.axis == "n" and first.mask else ""
        return f"{first.B} × {first.H} heads, {sizes}, d {first.d_k}{mask}"

    def small(self) -> Series:
        points = (replace(point.small(), n=64 * k, m=64 * k) for k, point in enumerate(self.points, 1))
        return replace(self, points=tuple(points), targets=())


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The host's work for a new mask: finding the tile ranges and copying the schedule to the device."""

    name: str
    mask: Callable[[int], Mask]  # from a width; every width gives a different mask
    width: int
    n: int
    H: int = 16
    targets: tuple[Target, ...] = ()

    @property
    def description(self) -> str:
        return f"{self.H} heads, n {self.n:,}, {self.mask(self.width).description}, each mask new"

    def small(self) -> Planning:
        return replace(self, n=SMALL_LENGTH, width=SMALL_LENGTH // 4, targets=())


Benchmark = Workload | FirstCall | Planning | Series


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of a workload: float32 numbers that its dtype represents, so that every contender gets the same."""

    query: Array
    key: Array
    value: Array
    d_output: Array | None  # None in forward passes
    bias: Array | None

    @classmethod
    def of(cls, workload: Workload) -> Inputs:
        """Draw standard normal numbers, the same in every run."""
        rng, dtype = np.random.default_rng(SEED), resolve_dtype(np, workload.dtype)

        def draw(heads: int, *shape: int, B: int = workload.B) -> Array:
            array = rng.standard_normal((B, heads, *shape), np.float32)
            return array if workload.dtype == "float32" else array.astype(dtype).astype(np.float32)

        n, m = workload.n, workload.m
        query, key = draw(workload.H, n, workload.d_k), draw(workload.G, m, workload.d_k)
        value = draw(workload.G, m, workload.d_v)
        d_output = draw(workload.H, n, workload.d_v) if workload.passes != "forward" else None
        return cls(query, key, value, d_output, draw(workload.H, n, m, B=1) if workload.bias else None)

    @cached_property
    def with_sampled_d_output(self) -> Inputs:
        """The inputs with d_output 0 except at random queries, which suffice as gradients are linear in d_output."""
        if self.d_output is None or self.d_output.shape[-2] <= CHECKED_GRADIENT_ROWS:
            return self
        rows = np.random.default_rng(SEED).choice(self.d_output.shape[-2], CHECKED_GRADIENT_ROWS, replace=False)
        sampled = np.zeros_like(self.d_output)
        sampled[..., rows, :] = self.d_output[..., rows, :]
        return replace(self, d_output=sampled)

    @property
    def score(self) -> Expression | None:
        """The bias as a score formula, or None."""
        return None if self.bias is None else bias(self.bias)


def evaluate_at(formula: Expression, n: int, m: int, **symbols: Any) -> Any:
    """Return the formula's values, bool or float64, at arrays of the symbols that broadcast against each other."""
    symbols = {name: np.asarray(value) for name, value in symbols.items()} | {"n": n, "m": m}
    return evaluate(formula, symbols, xp=np, float_dtype=np.dtype("float64"), like=symbols["i"])


def allowed_pairs(mask: Expression | None, extent: tuple[int, int, int, int]) -> int:
    """Return the number of pairs that a mask allows, over all batches and heads.

    A full tile counts by its size; in a partial tile the mask is evaluated.
    """
    B, H, n, m = extent
    if mask is None:
        return B * H * n * m
    tile_ranges = find_tile_ranges(mask, extent, COUNTING_TILE, COUNTING_TILE)
    count = 0
    for row, (first, last, full) in _tile_spans(tile_ranges):
        group, block = divmod(row, tile_ranges.query_blocks)
        b, h = divmod(group, tile_ranges.heads)
        i = np.arange(block * COUNTING_TILE, min((block + 1) * COUNTING_TILE, n))[:, None]
        j = np.arange(first * COUNTING_TILE, min(last * COUNTING_TILE, m))
        if full:
            count += i.size * j.size
            continue
        count += int(np.broadcast_to(evaluate_at(mask, n, m, b=b, h=h, i=i, j=j), (i.size, j.size)).sum())
    return count * (B // tile_ranges.batches) * (H // tile_ranges.heads)


def _tile_spans(tile_ranges: Any) -> Iterator[tuple[int, tuple[int, int, bool]]]:
    """Yield for every range its row of tiles and (first tile, last tile + 1, True if all tiles are full)."""
    owner = np.repeat(np.arange(tile_ranges.start.size - 1), np.diff(tile_ranges.start))
    for row, first, last, full in zip(owner, tile_ranges.first, tile_ranges.last, tile_ranges.full, strict=True):
        yield int(row), (int(first), int(last), bool(full))
