"""The kinds of benchmarks (workload, first call, series, planning), their targets, inputs and numbers of FLOPs.

Groups of cases, the fifth kind, are in `cases`.

A multiplication followed by an addition counts as two FLOPs. With A the number of allowed pairs (i, j), a pass takes

    forward    2 A (d_k + d_v)         S = Q Kᵀ, O = P V
    backward   2 A (3 d_k + 2 d_v)     S once more, dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K, dK = dSᵀ Q

FLOPs. The softmax is not counted, as is usual (Dao, "FlashAttention-2", 2023, section 4.1, where the backward pass has
2.5 times the FLOPs of the forward pass). Hidden pairs are not counted, even if a contender computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...arrays.operations import resolve_dtype
from ...caching import cached_property
from ...formula.evaluate_array import evaluate
from ...formula.expression import SYMBOLS, Expression
from ...formula.library import bias
from ...formula.tables import Table
from ...formula.tile_ranges import find_tile_ranges
from ...problem.problem import Problem, make_problem
from ...statistics import Pooled, Statistic
from .cases import CaseGroup

Array = np.ndarray[Any, np.dtype[Any]]

ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes of one number of each dtype
SEED = 1706
SMALL_LENGTH = 150  # largest number of queries and of keys in a small version; not a multiple of any tile size
SMALL_CELLS = 50  # largest number of pooled cells per side in a small version; it divides `SMALL_LENGTH`
BEST = "best peer"
CHECKED_GRADIENT_ROWS = 1024  # number of queries whose contributions to the gradients are checked
COUNTING_TILE = 64  # number of queries and of keys in the tiles in which allowed pairs are counted


@dataclass(frozen=True)
class Target:
    """A limit for one measured quantity of a benchmark.

    Parameters
    ----------
    measure
        The measured quantity. These have a lower limit: "share", the rate over the device's peak; "faster", another
        contender's time over Sightline's; "efficiency", the speedup over one thread, divided by the number of threads.
        These have an upper limit: "slower", Sightline's time over another contender's; "seconds", a contender's time;
        "spread", the largest time per token of a series over the smallest; "growth", the memory beyond inputs and
        outputs at the last point of a series over that at the first point; "extra", the largest memory beyond inputs
        and outputs of a series over that of the outputs.
    limit : the lower or upper limit of the quantity
    implementation : name of the other contender in a ratio, or of the contender whose seconds are limited; `BEST` is
        the fastest peer
    """

    measure: Literal["share", "faster", "slower", "efficiency", "seconds", "spread", "growth", "extra"]
    limit: float
    implementation: str = "sightline"

    @property
    def at_least(self) -> bool:
        return self.measure in ("share", "faster", "efficiency")

    def is_met(self, value: float) -> bool:
        """True if the measured quantity `value` is within the limit."""
        return bool(value >= self.limit if self.at_least else value <= self.limit)


# A function that converts a NumPy array to what a formula can index: a Table for Sightline, a tensor for FlexAttention.
ToTable = Callable[[Any], Any]


@dataclass(frozen=True)
class Mask:
    """A mask as a function that both Sightline and FlexAttention accept.

    Parameters
    ----------
    description : name of the mask in printed tables
    make_function : a function (n, to_table) that returns the mask as a function of (b, h, i, j)
    """

    description: str
    make_function: Callable[[int, ToTable], Callable[..., Any]]

    def formula(self, n: int, to_table: ToTable = Table) -> Expression:
        """Return the mask as a formula of Sightline."""
        formula: Expression = self.make_function(n, to_table)(*(SYMBOLS[name] for name in "bhij"))
        return formula


CAUSAL = Mask("causal", lambda n, to_table: lambda b, h, i, j: i >= j)


@dataclass(frozen=True)
class Score:
    """A change of the scaled scores as a function that both Sightline and FlexAttention accept.

    Parameters
    ----------
    description : name of the change in printed tables
    make_function : a function (H, to_table) that returns the changed score as a function of (s, b, h, i, j)
    """

    description: str
    make_function: Callable[[int, ToTable], Callable[..., Any]]

    def formula(self, H: int, to_table: ToTable = Table) -> Expression:
        """Return the changed score as a formula of Sightline."""
        formula: Expression = self.make_function(H, to_table)(*(SYMBOLS[name] for name in "sbhij"))
        return formula


Passes = Literal["forward", "backward", "forward and backward"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A benchmark problem. The contenders compute it in turns, all on equal arrays.

    The lengths of the axes have the names of `problem.problem`. G = 0 is replaced by H, m = 0 by n, d_v = 0 by d_k.
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
    bias: bool = False  # True adds a (1, H, n, m) bias to the scores; backward passes compute the bias's gradient
    dropout: float = 0.0
    seed: int = SEED  # seed of Sightline's dropout
    see: tuple[Statistic, ...] = ()  # statistics of the forward pass; () if there is a backward pass
    peak: str = "float32"  # name in `peaks.Peaks` of the peak in a share of the peak; "" for no share
    baselines: tuple[str, ...] = ("torch",)  # names of the other contenders: peers, or variants of Sightline
    cuda_graph: bool = False  # True times a CUDA graph on a GPU, since a short call takes the host longer than the GPU
    published: str = ""  # a published figure to print, with its source; "" for none

    def __post_init__(self) -> None:
        for name, value in (("G", self.H), ("m", self.n), ("d_v", self.d_k)):
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def description(self) -> str:
        """The shape and the options of the workload in one line."""
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
        """The mask as a formula; None if the workload has no mask."""
        return None if self.mask is None else self.mask.formula(self.n)

    @property
    def is_causal(self) -> bool:
        """True if the mask is i ≥ j, which peers support without an array."""
        return repr(self.formula) == repr(SYMBOLS["i"] >= SYMBOLS["j"])

    @property
    def needs_mask_array(self) -> bool:
        """True if the workload has a mask other than i ≥ j."""
        return self.mask is not None and not self.is_causal

    @property
    def score_formula(self) -> Expression | None:
        """The changed score as a formula, without the bias; None if the workload has no score."""
        return None if self.score is None else self.score.formula(self.H)

    @cached_property
    def allowed(self) -> int:
        """The number of pairs (i, j) that the mask allows, summed over all batches and heads."""
        return allowed_pairs(self.formula, self.extent)

    @property
    def flops(self) -> int:
        """The number of FLOPs of one call, counted as the docstring of the module `workloads` says."""
        forward, backward = 2 * (self.d_k + self.d_v), 2 * (3 * self.d_k + 2 * self.d_v)
        each = {"forward": forward, "backward": backward, "forward and backward": forward + backward}
        return self.allowed * each[self.passes]

    @property
    def bytes_moved(self) -> int:
        """The bytes of the inputs and outputs of one call, each array moved once.

        A gradient has as many bytes as the array it belongs to.
        """
        queries, keys = self.B * self.H * self.n, self.B * self.G * self.m
        inputs = (queries + keys) * self.d_k + keys * self.d_v + self.bias * self.H * self.n * self.m
        output = queries * self.d_v
        passes = {"forward": inputs + output, "backward": 2 * (inputs + output)}
        return passes.get(self.passes, 2 * inputs + output) * ITEM_SIZES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """The bytes of the output and of the statistics together."""
        arrays = [array for statistic in self.see for array in statistic.outputs(self._meta_problem)]
        statistics = sum(math.prod(shape) * np.dtype(resolve_dtype(np, dtype)).itemsize for shape, dtype in arrays)
        return int(self.B * self.H * self.n * self.d_v * ITEM_SIZES[self.dtype] + statistics)

    @property
    def _meta_problem(self) -> Problem:
        """The workload as a `Problem` whose arrays are one broadcast number, so that they take no memory."""
        zero = np.zeros((), resolve_dtype(np, self.dtype))
        shapes = [(self.H, self.n, self.d_k), (self.G, self.m, self.d_k), (self.G, self.m, self.d_v)]
        return make_problem(*(np.broadcast_to(zero, (self.B, *shape)) for shape in shapes))

    def small(self) -> Workload:
        """Return the workload with small lengths and without targets, for tests."""
        heads = min(self.H, 4)
        group = self.H // self.G
        n, m = min(self.n, SMALL_LENGTH), min(self.m, SMALL_LENGTH)
        see = tuple(map(_limit_cells, self.see))
        return replace(self, targets=(), B=min(self.B, 2), H=heads, G=max(heads // group, 1), n=n, m=m, see=see)


def _limit_cells(statistic: Statistic) -> Statistic:
    """Return the statistic. A pooled statistic is returned with at most `SMALL_CELLS` cells per side."""
    if not isinstance(statistic, Pooled):
        return statistic
    return replace(statistic, down=min(statistic.down, SMALL_CELLS), across=min(statistic.across, SMALL_CELLS))


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """A benchmark of the first call of a new problem, in a process that has computed another problem before.

    The kernel of the new problem is compiled in one measurement and loaded from the disk cache in another.
    """

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
    """A benchmark of one problem at several sizes, to measure how its time and memory grow.

    Parameters
    ----------
    axis : what differs from point to point: "n", or "allowed", the share of pairs that the mask allows
    points : the problem at each point, by ascending n or share
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
    """A benchmark of the host's work for a new mask: to find its tile ranges and to copy the schedule to the device."""

    name: str
    mask: Callable[[int], Mask]  # a function of a width that returns a mask; every width gives a different mask
    width: int
    n: int
    H: int = 16
    targets: tuple[Target, ...] = ()

    @property
    def description(self) -> str:
        return f"{self.H} heads, n {self.n:,}, {self.mask(self.width).description}, each mask new"

    def small(self) -> Planning:
        return replace(self, n=SMALL_LENGTH, width=SMALL_LENGTH // 4, targets=())


Benchmark = Workload | FirstCall | Planning | Series | CaseGroup


@dataclass(frozen=True, eq=False)
class Inputs:
    """The input arrays of a workload, in float32.

    The workload's dtype represents every number exactly, so that every contender gets equal numbers.
    """

    query: Array
    key: Array
    value: Array
    d_output: Array | None  # None if the workload has only a forward pass
    bias: Array | None  # None if the workload has no bias

    @classmethod
    def of(cls, workload: Workload) -> Inputs:
        """Draw the arrays of a workload: standard normal numbers, which are the same in every run."""
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
        """The inputs with d_output set to 0 except at `CHECKED_GRADIENT_ROWS` random queries.

        These queries suffice for a check of the gradients, because gradients are linear in d_output.
        """
        if self.d_output is None or self.d_output.shape[-2] <= CHECKED_GRADIENT_ROWS:
            return self
        rows = np.random.default_rng(SEED).choice(self.d_output.shape[-2], CHECKED_GRADIENT_ROWS, replace=False)
        sampled = np.zeros_like(self.d_output)
        sampled[..., rows, :] = self.d_output[..., rows, :]
        return replace(self, d_output=sampled)

    @property
    def score(self) -> Expression | None:
        """The bias as a score formula; None if there is no bias."""
        return None if self.bias is None else bias(self.bias)


def evaluate_at(formula: Expression, n: int, m: int, **symbols: Any) -> Any:
    """Return an array with what the formula gives, bool or float64.

    `symbols` are arrays of b, h, i, j and s, as far as the formula reads them; they broadcast against each other.
    """
    symbols = {name: np.asarray(value) for name, value in symbols.items()} | {"n": n, "m": m}
    return evaluate(formula, symbols, xp=np, float_dtype=np.dtype("float64"), like=symbols["i"])


def allowed_pairs(mask: Expression | None, extent: tuple[int, int, int, int]) -> int:
    """Return the number of pairs (i, j) that a mask allows, summed over all batches and heads.

    All pairs of a full tile are allowed. In a partial tile the mask is evaluated.
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
    """Yield for every tile range the index of its row of tiles, and (first tile, last tile + 1, are all tiles full)."""
    owner = np.repeat(np.arange(tile_ranges.start.size - 1), np.diff(tile_ranges.start))
    for row, first, last, full in zip(owner, tile_ranges.first, tile_ranges.last, tile_ranges.full, strict=True):
        yield int(row), (int(first), int(last), bool(full))
