"""Workloads: attention of one call, with its shape, formulas, inputs and number of FLOPs; and series of workloads.

A multiplication followed by an addition counts as two FLOPs. With A the number of allowed pairs (i, j), a pass takes

    forward    2 A (d_k + d_v)         S = Q Kᵀ, O = P V
    backward   2 A (3 d_k + 2 d_v)     S once more, dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K, dK = dSᵀ Q

FLOPs. The softmax is not counted, as is usual (Dao, "FlashAttention-2", 2023, section 4.1, where the backward pass has
2.5 times the FLOPs of the forward pass). Hidden pairs are not counted, even if a contender computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from sightline.arrays.operations import itemsize, resolve_dtype
from sightline.caching import cached_property
from sightline.formula.expression import SYMBOLS, Expression
from sightline.formula.tables import Table
from sightline.formula.tile_ranges import count_pairs
from sightline.problem.problem import make_problem
from sightline.statistics import Pooled, Statistic

from .cases import SEED, Case, CaseGroup, Contender, Target, TimedCall
from .check import share_of_budget

Array = np.ndarray[Any, np.dtype[Any]]

SMALL_LENGTH = 150  # largest number of queries and of keys in a small version; not a multiple of any tile size
SMALL_CELLS = 50  # largest number of pooled cells per side in a small version; it divides `SMALL_LENGTH`
CHECKED_GRADIENT_ROWS = 1024  # number of queries whose contributions to the gradients are checked


# A function that converts a NumPy array to what a formula can index: a Table for Sightline, a tensor for FlexAttention.
ToTable = Callable[[Any], Any]


@dataclass(frozen=True)
class NamedFormula:
    """A formula as a function that both Sightline and FlexAttention accept.

    Parameters
    ----------
    description : name of the formula in printed tables
    make_function : a function (size, to_table) that returns the formula as a function of `symbols`
    """

    description: str
    make_function: Callable[[int, ToTable], Callable[..., Any]]
    symbols: ClassVar[str]

    def formula(self, size: int, to_table: ToTable = Table) -> Expression:
        """Return the formula in Sightline's language."""
        formula: Expression = self.make_function(size, to_table)(*(SYMBOLS[name] for name in self.symbols))
        return formula


class Mask(NamedFormula):
    """A mask. Its `make_function` gets n as the size."""

    symbols = "bhij"


class Score(NamedFormula):
    """A change of the scaled scores. Its `make_function` gets H as the size."""

    symbols = "sbhij"


class Documents(Mask):
    """The mask of packed documents, which allows the pairs whose query and key are in the same document.

    The lengths of the documents are drawn uniformly from 1 − spread to 1 + spread times their mean.
    """

    def __init__(self, count: int, spread: float = 0.5) -> None:
        def make_function(n: int, to_table: ToTable) -> Callable[..., Any]:
            ids = to_table(np.repeat(np.arange(count), self.lengths(n)))
            return lambda b, h, i, j: ids[i] == ids[j]

        super().__init__(f"{count} documents", make_function)
        object.__setattr__(self, "ends", np.cumsum(np.random.default_rng(SEED).uniform(1 - spread, 1 + spread, count)))

    def lengths(self, n: int) -> Array:
        """Return the lengths of the documents on an axis of n positions."""
        ends: Array = self.ends  # type: ignore[attr-defined]
        return np.diff(np.rint(ends * (n / ends[-1])).astype(np.int64), prepend=0)


def padding_mask(lengths: Array) -> Mask:
    return Mask("padding", lambda n, to_table: lambda b, h, i, j: j < to_table(lengths)[b])


CAUSAL = Mask("causal", lambda n, to_table: lambda b, h, i, j: i >= j)
Passes = Literal["forward", "backward", "forward and backward"]


@dataclass(frozen=True, kw_only=True)
class Workload(Case):
    """Attention of one call. The contenders compute it in turns, all on equal arrays.

    B, H, G, n, m, d_k and d_v are the lengths of the axes, as in `problem.problem.Problem`. The default of G is H, that
    of m is n, and that of d_v is d_k.
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
    contiguous: bool = False  # True for arrays of contiguous heads, False for views of (B, n, H d) as models make them
    bias: bool = False  # True adds a (1, H, n, m) bias to the scores; backward passes compute the bias's gradient
    dropout: float = 0.0
    seed: int = SEED  # seed of Sightline's dropout
    see: tuple[Statistic, ...] = ()  # statistics of the forward pass; () if there is a backward pass
    tangents: tuple[str, ...] = ()  # the operands that have tangents: "query", "key", "value"; () for no tangent
    peak: str = "float32"  # name in `peaks.Peaks` of the peak by which a contender's rate is divided; "" for none
    ours: Contender | str = "sightline"  # the contender that is compared with the others
    baselines: tuple[Contender | str, ...] = ("torch",)  # the other contenders: peers, or variants of Sightline
    cuda_graph: bool = False
    published: str = ""  # a published figure to print, with its source; "" for none

    def __post_init__(self) -> None:
        for name, value in (("G", self.H), ("m", self.n), ("d_v", self.d_k)):
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def contenders(self) -> tuple[Contender | str, ...]:  # type: ignore[override]
        return (self.ours, *self.baselines)

    @property
    def description(self) -> str:  # type: ignore[override]
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
    def mask_array(self) -> Array | None:
        """The mask as a bool array that broadcasts to (B, 1, n, m), True for allowed pairs.

        The array is None if `needs_mask_array` is False. The masks of the benchmarks do not read h.
        """
        if self.formula is None or not self.needs_mask_array:
            return None
        reads = self.formula.free_symbols
        B, n = self.B if "b" in reads else 1, self.n if "i" in reads else 1
        allowed = self.formula.array(n, self.m, batch=B)
        return np.array(allowed.reshape(B, 1, n, self.m))  # a writable copy, as torch requires

    @property
    def added_mask(self) -> Array | None:
        """`mask_array` as float32 numbers to add to the scores: 0 for allowed pairs, −∞ for hidden pairs."""
        allowed = self.mask_array
        return None if allowed is None else np.where(allowed, np.float32(0), np.float32(-np.inf))

    @property
    def features(self) -> list[str]:
        """The features of the workload that not every library has."""
        present = {
            "backward pass": self.passes != "forward",
            "dropout": bool(self.dropout),
            "score": self.score is not None,
            "bias": self.bias,
            "mask": self.mask is not None,
            "mask but the causal one": self.needs_mask_array,
            "causal mask with m ≠ n": self.is_causal and self.m != self.n,
            "statistics": bool(self.see),
            "grouped heads": self.G != self.H,
            "d_v ≠ d_k": self.d_v != self.d_k,
            "m ≠ n": self.m != self.n,
        }
        return [name for name, is_present in present.items() if is_present]

    @cached_property
    def allowed(self) -> int:
        """The number of pairs (i, j) that the mask allows, summed over all batches and heads."""
        return math.prod(self.extent) if self.formula is None else count_pairs(self.formula, self.extent)

    @property
    def flops(self) -> int:  # type: ignore[override]
        """The number of FLOPs of one call, counted as the docstring of the module `workloads` says."""
        forward, backward = 2 * (self.d_k + self.d_v), 2 * (3 * self.d_k + 2 * self.d_v)
        each = {"forward": forward, "backward": backward, "forward and backward": forward + backward}
        return self.allowed * each[self.passes]

    @property
    def bytes_moved(self) -> int:  # type: ignore[override]
        """The bytes of the inputs and outputs of one call, each array moved once.

        A gradient has as many bytes as the array it belongs to.
        """
        queries, keys = self.B * self.H * self.n, self.B * self.G * self.m
        inputs = (queries + keys) * self.d_k + keys * self.d_v + self.bias * self.H * self.n * self.m
        output = queries * self.d_v
        passes = {"forward": inputs + output, "backward": 2 * (inputs + output)}
        return passes.get(self.passes, 2 * inputs + output) * itemsize(self.dtype)

    @property
    def output_bytes(self) -> int:
        """The bytes of the output and of the statistics together."""
        zero = np.zeros((), resolve_dtype(np, self.dtype))
        shapes = [(self.H, self.n, self.d_k), (self.G, self.m, self.d_k), (self.G, self.m, self.d_v)]
        problem = make_problem(*(np.broadcast_to(zero, (self.B, *shape)) for shape in shapes))  # takes no memory
        arrays = [array for statistic in self.see for array in statistic.outputs(problem)]
        statistics = sum(math.prod(shape) * itemsize(dtype) for shape, dtype in arrays)
        return self.B * self.H * self.n * self.d_v * itemsize(self.dtype) + statistics

    def make_inputs(self) -> Inputs:
        return Inputs.of(self)

    def share_of_budget(self, prepared: TimedCall, inputs: Inputs) -> float:
        """Return the largest share of the rounding-error budget that any result uses.

        If the contender can replace d_output, the results are computed with `inputs.with_sampled_d_output`.
        """
        if prepared.set_d_output is None:
            return share_of_budget(self, inputs, prepared.results(prepared.call(prepared.setup())))
        sampled = inputs.with_sampled_d_output
        prepared.set_d_output(sampled.d_output)
        share = share_of_budget(self, sampled, prepared.results(prepared.call(prepared.setup())))
        prepared.set_d_output(inputs.d_output)
        return share

    def small(self) -> Workload:
        heads = min(self.H, 4)
        group = self.H // self.G
        n, m = min(self.n, SMALL_LENGTH), min(self.m, SMALL_LENGTH)
        see = tuple(map(_limit_cells, self.see))
        name = self.name.replace(f"n {self.n}", f"n {n}")
        sizes: dict[str, Any] = {"B": min(self.B, 2), "H": heads, "G": max(heads // group, 1), "n": n, "m": m}
        return replace(self, name=name, targets=(), see=see, **sizes)


def _limit_cells(statistic: Statistic) -> Statistic:
    """Return the statistic. A pooled statistic is returned with at most `SMALL_CELLS` cells per side."""
    if not isinstance(statistic, Pooled):
        return statistic
    return replace(statistic, down=min(statistic.down, SMALL_CELLS), across=min(statistic.across, SMALL_CELLS))


def series(name: str, axis: Literal["n", "allowed"], *targets: Target, points: Sequence[Workload]) -> CaseGroup:
    """Return a benchmark of one workload at several sizes, which shows how its time and memory grow."""
    first, last = points[0], points[-1]
    sizes = f"n {first.n:,} to {last.n:,}" if axis == "n" else f"n {first.n:,}, {len(points)} windows"
    mask = f", {first.mask.description}" if axis == "n" and first.mask else ""
    description = f"{first.B} × {first.H} heads, {sizes}, d {first.d_k}{mask}"
    return CaseGroup(name=name, group=name, description=description, cases=tuple(points), axis=axis, targets=targets)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The input arrays of a workload, in float32.

    The workload's dtype represents every number exactly, so that every contender gets equal numbers.
    """

    query: Array
    key: Array
    value: Array
    d_output: Array | None  # None if the workload has only a forward pass
    bias: Array | None = None  # None if the workload has no bias
    tangents: tuple[Array, ...] = ()  # those of the workload's `tangents`

    @classmethod
    def of(cls, workload: Workload, rng: np.random.Generator | None = None) -> Inputs:
        """Draw the arrays of a workload: standard normal numbers, by default the same in every run."""
        rng, dtype = rng or np.random.default_rng(SEED), resolve_dtype(np, workload.dtype)

        def draw(*shape: int) -> Array:
            array = rng.standard_normal(shape, np.float32)
            return array if workload.dtype == "float32" else array.astype(dtype).astype(np.float32)

        def draw_heads(*shape: int) -> Array:
            array = draw(workload.B, *shape)
            return array if workload.contiguous else np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)

        H, G, n, m = workload.H, workload.G, workload.n, workload.m
        shapes = {"query": (H, n, workload.d_k), "key": (G, m, workload.d_k), "value": (G, m, workload.d_v)}
        query, key, value = (draw_heads(*shape) for shape in shapes.values())
        d_output = draw_heads(H, n, workload.d_v) if workload.passes != "forward" else None
        added = draw(1, H, n, m) if workload.bias else None
        return cls(query, key, value, d_output, added, tuple(draw_heads(*shapes[name]) for name in workload.tangents))

    @cached_property
    def contiguous(self) -> Inputs:
        """The same numbers as arrays of contiguous heads."""
        query, key, value = map(np.ascontiguousarray, (self.query, self.key, self.value))
        d_output = None if self.d_output is None else np.ascontiguousarray(self.d_output)
        return replace(self, query=query, key=key, value=value, d_output=d_output)

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
