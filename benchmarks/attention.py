"""Problems of one attention call: their shapes, formulas, inputs and numbers of FLOPs.

A multiplication followed by an addition counts as two FLOPs. With A the number of allowed pairs (i, j), a pass takes

    forward    2 A (d_k + d_v)         S = Q Kᵀ, O = P V
    backward   2 A (3 d_k + 2 d_v)     S once more, dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K, dK = dSᵀ Q

FLOPs. The softmax is not counted, as is usual (Dao, "FlashAttention-2", 2023, section 4.1, where the backward pass has
2.5 times the FLOPs of the forward pass). Hidden pairs are not counted, even if a contender computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sightline.arrays.caching import cached_property
from sightline.arrays.operations import Array, itemsize, resolve_dtype
from sightline.formula.expression import SYMBOLS, Expression
from sightline.formula.tables import Table
from sightline.formula.tile_ranges import count_pairs
from sightline.statistics import Statistic, pooled

from . import check
from .core import SEED, Call, Problem

Passes = Literal["forward", "backward", "forward and backward"]

BOTH: Passes = "forward and backward"
SMALL_LENGTH = 150  # largest number of queries and of keys in a small version; not a multiple of any tile size
SMALL_CELLS = 30  # number of pooled cells per side in a small version; it divides `SMALL_LENGTH`


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask as a function that both Sightline and FlexAttention accept.

    make : function of (n, to_table) that returns the function of (b, h, i, j). `to_table` makes of an array what the
        function can index: a Table for Sightline, a tensor for FlexAttention
    """

    name: str
    make: Callable[[int, Callable[[Any], Any]], Callable[..., Any]]

    def of(self, n: int, to_table: Callable[[Any], Any] = Table) -> Expression:
        """Return the formula in Sightline's language."""
        formula: Expression = self.make(n, to_table)(*(SYMBOLS[name] for name in "bhij"))
        return formula


CAUSAL = Mask("causal", lambda n, to_table: lambda b, h, i, j: i >= j)


def window(width: int) -> Mask:
    """Return a causal window of `width` keys, fewer for n < 1,024, so that small versions hide keys too."""

    def make(n: int, to_table: Any) -> Callable[..., Any]:
        reach = width if n >= 1024 else max(width * n // 4096, 2)
        return lambda b, h, i, j: (i >= j) & (i - j < reach)

    return Mask(f"causal window {width:,}", make)


def document_lengths(count: int, spread: float, n: int) -> Array:
    """Return lengths with the sum n, drawn uniformly from 1 − spread to 1 + spread times their mean."""
    ends = np.cumsum(np.random.default_rng(SEED).uniform(1 - spread, 1 + spread, count))
    return np.diff(np.rint(ends * (n / ends[-1])).astype(np.int64), prepend=0)


def documents(count: int, spread: float = 0.5) -> Mask:
    """Return the mask of packed documents, in which query and key are in the same document."""

    def make(n: int, to_table: Any) -> Callable[..., Any]:
        ids = to_table(np.repeat(np.arange(count), document_lengths(count, spread, n)))
        return lambda b, h, i, j: ids[i] == ids[j]

    return Mask(f"{count} documents", make)


def padding(lengths: Array) -> Mask:
    """Return the mask of texts (B,) that are padded at the end."""
    return Mask("padding", lambda n, to_table: lambda b, h, i, j: j < to_table(lengths)[b])


@dataclass(frozen=True, kw_only=True)
class Attention(Problem):
    """One call. The letters are those of `sightline.call.problem`; by default G is H, m is n and d_v is d_k."""

    passes: Passes = "forward"
    B: int = 1
    H: int = 8
    G: int = 0
    n: int = 4096
    m: int = 0
    d_k: int = 64
    d_v: int = 0
    mask: Mask | None = None
    contiguous: bool = False  # True for arrays of contiguous heads, False for views of (B, n, H d) as models make them
    bias: bool = False  # True adds a (1, H, n, m) bias to the scores; backward passes compute the bias's gradient
    seed: int = SEED  # seed of Sightline's dropout
    see: tuple[Statistic, ...] = ()  # statistics of the forward pass; () if there is a backward pass

    def __post_init__(self) -> None:
        given = {"G": self.G or self.H, "m": self.m or self.n, "d_v": self.d_v or self.d_k}
        vars(self).update(given)  # the dataclass is frozen
        vars(self).update({} if self.table else {"about": self.describe()})

    def describe(self) -> str:
        """Return the shape and the options in one line."""
        parts = [f"{self.B} × {self.H} heads" + (f" on {self.G}" if self.G != self.H else "")]
        parts.append(f"n {self.n:,}" + (f", m {self.m:,}" if self.m != self.n else ""))
        parts.append(f"d {self.d_k}" if self.d_v == self.d_k else f"d_k {self.d_k}, d_v {self.d_v}")
        parts += [self.dtype, *([self.mask.name] if self.mask else [])]
        parts += ["bias"] * self.bias + [f"dropout {self.dropout}"] * bool(self.dropout)
        parts += [f"see {', '.join(statistic.name for statistic in self.see)}"] if self.see else []
        return ", ".join(parts)

    @property
    def extent(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.n, self.m

    @property
    def formula(self) -> Expression | None:
        """The mask as a formula; None if there is no mask."""
        return None if self.mask is None else self.mask.of(self.n)

    @property
    def mask_array(self) -> Array | None:
        """The mask as a bool array that broadcasts to (B, 1, n, m), True for allowed pairs.

        It is None for no mask, and for the causal mask, for which libraries have an option.
        """
        if self.formula is None or self.mask is CAUSAL:
            return None
        reads = self.formula.free_symbols
        B, n = self.B if "b" in reads else 1, self.n if "i" in reads else 1
        allowed = self.formula.array(n, self.m, batch=B)
        return np.array(allowed.reshape(B, 1, n, self.m))  # a writable copy, as torch requires

    @property
    def features(self) -> tuple[str, ...]:
        present = {
            self.dtype: True,
            "backward pass": self.passes != "forward",
            "dropout": bool(self.dropout),
            "bias": self.bias,
            "mask but the causal one": self.mask not in (None, CAUSAL),
            "statistics": bool(self.see),
            "grouped heads": self.G != self.H,
            "d_v ≠ d_k": self.d_v != self.d_k,
        }
        return tuple(name for name, is_present in present.items() if is_present)

    @cached_property
    def allowed(self) -> int:
        """The number of pairs (i, j) that the mask allows, summed over all batches and heads."""
        return math.prod(self.extent) if self.formula is None else count_pairs(self.formula, self.extent)

    @property
    def work(self) -> int:
        """The FLOPs as the docstring of this module counts them, or the bytes of a forward pass's inputs and output."""
        if self.unit == "B/s":
            rows = self.B * (self.H * self.n + self.G * self.m)
            return rows * (self.d_k + self.d_v) * itemsize(self.dtype)
        forward, backward = 2 * (self.d_k + self.d_v), 2 * (3 * self.d_k + 2 * self.d_v)
        return self.allowed * {"forward": forward, "backward": backward, BOTH: forward + backward}[self.passes]

    def inputs(self) -> Any:
        return Inputs.of(self)

    def error(self, call: Call, inputs: Any) -> float:
        return check.error_of(self, inputs, call.results(call.run(call.setup())))

    def small(self) -> Attention:
        heads = min(self.H, 4)
        group = self.H // self.G
        n, m = min(self.n, SMALL_LENGTH), min(self.m, SMALL_LENGTH)
        see = tuple(pooled(SMALL_CELLS, SMALL_CELLS) if each.name == "pooled" else each for each in self.see)
        return replace(self, B=min(self.B, 2), H=heads, G=max(heads // group, 1), n=n, m=m, see=see)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The input arrays of a problem, in float32.

    The problem's dtype represents every number exactly, so that every contender gets equal numbers.
    """

    query: Array
    key: Array
    value: Array
    d_output: Array | None = None  # None if the problem has only a forward pass
    bias: Array | None = None

    @classmethod
    def of(cls, problem: Attention, rng: np.random.Generator | None = None) -> Inputs:
        """Draw the arrays of a problem: standard normal numbers, by default the same in every run."""
        rng, dtype = rng or np.random.default_rng(SEED), resolve_dtype(np, problem.dtype)

        def draw(*shape: int) -> Array:
            array = rng.standard_normal(shape, np.float32)
            return array if problem.dtype == "float32" else array.astype(dtype).astype(np.float32)

        def draw_heads(*shape: int) -> Array:
            array = draw(problem.B, *shape)
            return array if problem.contiguous else np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)

        H, G, n, m = problem.H, problem.G, problem.n, problem.m
        shapes = (H, n, problem.d_k), (G, m, problem.d_k), (G, m, problem.d_v)
        query, key, value = (draw_heads(*shape) for shape in shapes)
        d_output = draw_heads(H, n, problem.d_v) if problem.passes != "forward" else None
        added = draw(1, H, n, m) if problem.bias else None
        return cls(query, key, value, d_output, added)

    def contiguous(self) -> Inputs:
        """Return the same numbers as arrays of contiguous heads."""
        query, key, value = map(np.ascontiguousarray, (self.query, self.key, self.value))
        d_output = None if self.d_output is None else np.ascontiguousarray(self.d_output)
        return replace(self, query=query, key=key, value=value, d_output=d_output)
