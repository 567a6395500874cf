"""What a problem is: a race of contenders, a first call, or a series; what it is held to; what is counted of it.

FLOPs. A multiplication and an addition count as two. With A the allowed pairs (i, j) of a head,

    forward    2 A (d_k + d_v)         S = Q Kᵀ, O = P V
    backward   2 A (3 d_k + 2 d_v)     S once more, dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K, dK = dSᵀ Q

and nothing for the softmax, as is the custom (Dao, "FlashAttention-2", 2023, section 4.1, where the backward pass is
2.5 times the forward). Hidden pairs count nothing, whoever computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..arrays import resolve_dtype
from ..formula.expression import SYMBOLS, Expression
from ..formula.library import bias
from ..formula.render_array import evaluate
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
]

Array = np.ndarray[Any, np.dtype[Any]]

ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes
SEED = 1706
SMALL_LENGTH = 150  # queries and keys of small versions: no whole number of any tile
SMALL_CELLS = 50  # and cells a side: as at full size, all of one size
BEST = "best peer"
CHECKED_GRADIENT_ROWS = 1024  # queries whose part in the gradients is checked
COUNTING_TILE = 64  # queries and keys in the tiles that allowed pairs are counted by


@dataclass(frozen=True)
class Target:
    """One thing a problem is held to.

    Parameters
    ----------
    measure
        "share": of the machine's peak, at least. "faster": another's time over ours, at least. "slower": ours over
        another's, at most. "efficiency": the gain over one thread, over the threads, at least. "seconds": a time, at
        most. "spread": the largest time per token over the smallest, at most. "growth": memory beyond inputs and
        outputs at the last point over that at the first, at most.
    limit : the number that must be reached or kept
    implementation : the one meant: the other one of a ratio, the one whose seconds count; `BEST` is the fastest peer
    """

    measure: Literal["share", "faster", "slower", "efficiency", "seconds", "spread", "growth"]
    limit: float
    implementation: str = "sightline"

    @property
    def at_least(self) -> bool:
        return self.measure in ("share", "faster", "efficiency")

    def is_met(self, value: float) -> bool:
        """Whether the measured value reaches or keeps the limit."""
        return bool(value >= self.limit if self.at_least else value <= self.limit)


ToTable = Callable[[Any], Any]  # makes an array something to be indexed: a table for our symbols, a tensor for others


@dataclass(frozen=True)
class Mask:
    """A mask as every library can take it.

    Parameters
    ----------
    description : what it is called
    make_function : (n, to_table) to a function of (b, h, i, j)
    """

    description: str
    make_function: Callable[[int, ToTable], Callable[..., Any]]

    def formula(self, n: int, to_table: ToTable = Table) -> Expression:
        """The mask in our language."""
        formula: Expression = self.make_function(n, to_table)(*(SYMBOLS[name] for name in "bhij"))
        return formula


@dataclass(frozen=True)
class Score:
    """What becomes of scaled scores, as every library can take it.

    Parameters
    ----------
    description : what it is called
    make_function : (H, to_table) to a function of (s, b, h, i, j)
    """

    description: str
    make_function: Callable[[int, ToTable], Callable[..., Any]]

    def formula(self, H: int, to_table: ToTable = Table) -> Expression:
        """The score in our language."""
        formula: Expression = self.make_function(H, to_table)(*(SYMBOLS[name] for name in "sbhij"))
        return formula


Passes = Literal["forward", "backward", "forward and backward"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Contenders on the same arrays, in turn. Names of axes as in `sightline.problem`; G = 0 means H, m = 0 means n."""

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
    bias: bool = False  # (1, H, n, m) added to the scores, its gradient wanted
    dropout: float = 0.0
    see: tuple[Statistic, ...] = ()  # of forward passes
    peak: str = "float32"  # what a share is taken of: an entry of `peaks.Peaks`; "" where work is not the point
    baselines: tuple[str, ...] = ("torch",)  # peers and variants of our own, by their names in `peers`
    cuda_graph: bool = False  # on a GPU: replayed as a CUDA graph, since the host's share would hide a short call's own
    published: str = ""  # a figure to look at beside, and whose it is

    def __post_init__(self) -> None:
        for name, value in (("G", self.H), ("m", self.n), ("d_v", self.d_k)):
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def description(self) -> str:
        """The shape in one line."""
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
        """The mask in our language."""
        return None if self.mask is None else self.mask.formula(self.n)

    @property
    def score_formula(self) -> Expression | None:
        """The score in our language; the bias is an input."""
        return None if self.score is None else self.score.formula(self.H)

    @cached_property
    def allowed(self) -> int:
        """Pairs the mask allows, over all batches and heads."""
        return allowed_pairs(self.formula, self.extent)

    @property
    def flops(self) -> int:
        """As the head of this file counts them."""
        forward, backward = 2 * (self.d_k + self.d_v), 2 * (3 * self.d_k + 2 * self.d_v)
        each = {"forward": forward, "backward": backward, "forward and backward": forward + backward}
        return self.allowed * each[self.passes]

    @property
    def bytes_moved(self) -> int:
        """Bytes of inputs and outputs, each moved once; gradients have the bytes of what they belong to."""
        queries, keys = self.B * self.H * self.n, self.B * self.G * self.m
        inputs = (queries + keys) * self.d_k + keys * self.d_v + self.bias * self.H * self.n * self.m
        output = queries * self.d_v
        passes = {"forward": inputs + output, "backward": 2 * (inputs + output)}
        return passes.get(self.passes, 2 * inputs + output) * ITEM_SIZES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Bytes of the output and of the statistics."""
        arrays = [array for statistic in self.see for array in statistic.outputs(self._meta_problem)]
        seen = sum(math.prod(shape) * np.dtype(resolve_dtype(np, dtype)).itemsize for shape, dtype in arrays)
        return int(self.B * self.H * self.n * self.d_v * ITEM_SIZES[self.dtype] + seen)

    @property
    def _meta_problem(self) -> Problem:
        """The problem on arrays that have its shapes and take no memory."""
        zero = np.zeros((), resolve_dtype(np, self.dtype))
        shapes = [(self.H, self.n, self.d_k), (self.G, self.m, self.d_k), (self.G, self.m, self.d_v)]
        return make_problem(*(np.broadcast_to(zero, (self.B, *shape)) for shape in shapes))

    def small(self) -> Workload:
        """The same problem on arrays a test can hold; no targets."""
        heads = min(self.H, 4)
        group = self.H // self.G
        n, m = min(self.n, SMALL_LENGTH), min(self.m, SMALL_LENGTH)
        see = tuple(_limit_cells(statistic, SMALL_CELLS) for statistic in self.see)
        return replace(self, targets=(), B=min(self.B, 2), H=heads, G=max(heads // group, 1), n=n, m=m, see=see)


def _limit_cells(statistic: Statistic, max_cells: int) -> Statistic:
    """The statistic with no more cells a side, where it has such."""
    if not isinstance(statistic, Pooled):
        return statistic
    return replace(statistic, down=min(statistic.down, max_cells), across=min(statistic.across, max_cells))


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """The first call of a new problem, in a process that has called another before: compiled, then from the disk."""

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
    """One problem at several points along an axis, for what grows and what must not.

    Parameters
    ----------
    axis : "n", or "allowed": the share of pairs the mask allows
    points : the problem at each point, in order
    """

    name: str
    axis: Literal["n", "allowed"]
    points: tuple[Workload, ...]
    targets: tuple[Target, ...] = ()

    @property
    def description(self) -> str:
        first, last = self.points[0], self.points[-1]
        reach = f"n {first.n:,} to {last.n:,}" if self.axis == "n" else f"n {first.n:,}, {len(self.points)} windows"
        description = f", {first.mask.description}" if self.axis == "n" and first.mask else ""
        return f"{first.B} × {first.H} heads, {reach}, d {first.d_k}{description}"

    def small(self) -> Series:
        points = tuple(
            replace(point.small(), n=size, m=size)
            for point, size in zip(self.points, (64 * (k + 1) for k in range(len(self.points))), strict=True)
        )
        return replace(self, points=points, targets=())


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What the host does for a mask it has not met: the runs of tiles, found and laid on the device."""

    name: str
    mask: Callable[[int], Mask]  # of a width: another width is another mask
    width: int
    n: int
    H: int = 16
    targets: tuple[Target, ...] = ()

    @property
    def description(self) -> str:
        return f"{self.H} heads, n {self.n:,}, {self.mask(self.width).description}, never seen before"

    def small(self) -> Planning:
        return replace(self, n=SMALL_LENGTH, width=SMALL_LENGTH // 4, targets=())


Benchmark = Workload | FirstCall | Planning | Series


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of a race, float32 that hold numbers of its dtype, so that every contender reads the same."""

    query: Array
    key: Array
    value: Array
    d_output: Array | None  # where a backward pass is timed
    bias: Array | None

    @classmethod
    def of(cls, workload: Workload) -> Inputs:
        """Standard normal numbers, the same on every run."""
        rng = np.random.default_rng(SEED)

        def drawn(*shape: int) -> Array:
            return round_to_dtype(rng.standard_normal(shape, np.float32), workload.dtype)

        query, key = (
            drawn(workload.B, workload.H, workload.n, workload.d_k),
            drawn(workload.B, workload.G, workload.m, workload.d_k),
        )
        value = drawn(workload.B, workload.G, workload.m, workload.d_v)
        d_output = drawn(workload.B, workload.H, workload.n, workload.d_v) if workload.passes != "forward" else None
        return cls(query, key, value, d_output, drawn(1, workload.H, workload.n, workload.m) if workload.bias else None)

    @cached_property
    def with_sampled_d_output(self) -> Inputs:
        """The same, with a d_output of some queries alone: as gradients are linear in it, a part of them shows all."""
        if self.d_output is None or self.d_output.shape[-2] <= CHECKED_GRADIENT_ROWS:
            return self
        drawn = np.random.default_rng(SEED).choice(self.d_output.shape[-2], CHECKED_GRADIENT_ROWS, replace=False)
        some = np.zeros_like(self.d_output)
        some[..., drawn, :] = self.d_output[..., drawn, :]
        return replace(self, d_output=some)

    @property
    def score(self) -> Expression | None:
        """The score in our language."""
        return None if self.bias is None else bias(self.bias)


def round_to_dtype(array: Array, dtype: str) -> Array:
    """float32 numbers rounded to those a dtype has."""
    return array if dtype == "float32" else array.astype(resolve_dtype(np, dtype)).astype(np.float32)


def allowed_pairs(mask: Expression | None, extent: tuple[int, int, int, int]) -> int:
    """Pairs a mask allows, over all batches and heads: full tiles by their size, partial ones looked at."""
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
        symbols = {"b": np.asarray(b), "h": np.asarray(h), "i": i, "j": j, "n": n, "m": m}
        seen = evaluate(mask, symbols, xp=np, float_dtype=np.dtype("float64"), like=i)
        count += int(np.broadcast_to(seen, (i.size, j.size)).sum())
    return count * (B // tile_ranges.batches) * (H // tile_ranges.heads)


def _tile_spans(tile_ranges: Any) -> Iterator[tuple[int, tuple[int, int, bool]]]:
    owner = np.repeat(np.arange(tile_ranges.start.size - 1), np.diff(tile_ranges.start))
    for row, first, last, full in zip(owner, tile_ranges.first, tile_ranges.last, tile_ranges.full, strict=True):
        yield int(row), (int(first), int(last), bool(full))
