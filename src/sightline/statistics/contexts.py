"""What statistics read and return in a forward and a backward pass, and the passes over all statistics of a problem.

P are the normalised weights before dropout. S are the final masked scores in nats, −∞ where hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.operations import namespace, resolve_dtype
from ..formula.expression import SYMBOLS, Expression, specialize
from ..formula.tables import Table

if TYPE_CHECKING:
    from ..call.problem import Problem
    from .statistic import Statistic

MAX_RESULT_BYTES = 2 << 30  # the default limit of one statistic's result
Outer = tuple[int, ...]  # lengths of the axes before the queries: (*batch_shape, H) without those averaged over


@dataclass(frozen=True)
class Tile:
    """The weights of some queries (`rows`) on some keys (`columns`), before dropout, of shape (..., H, rows, columns).

    Tiles of the same queries follow one another in the order of their keys. Pairs that are in no tile have weight 0.
    """

    rows: slice
    columns: slice
    weights: Any
    scores: Any = None  # the final masked scores, in nats
    lse: Any = None  # (..., H, rows): the lse of these queries


class KeyPart(NamedTuple):
    """A statistic over some of the keys, and the factor by which a merge multiplies the weights of these keys."""

    arrays: Sequence[Any]  # the statistic's arrays over these keys
    total: Any  # (..., H, n): the sum of the weights of these keys, before they are multiplied
    factor: Any  # (..., H, n)


@dataclass(frozen=True)
class ForwardContext:
    """The inputs from which a statistic is computed, besides the tiles.

    `outer` are the lengths of the leading axes. `average` averages the entries of a matrix over those of
    (*batch_shape, H) that `outer` lacks.
    """

    problem: Problem
    lse: Any  # (*batch_shape, H, n) float64
    outer: Outer
    average: Callable[[Any], Any] = lambda entries: entries

    @property
    def xp(self) -> Any:
        return namespace(self.problem.query)

    def full(self, value: float, shape: tuple[int, ...], dtype: str) -> Any:
        xp = self.xp
        return xp.full(shape, value, dtype=resolve_dtype(xp, dtype), device=self.problem.query.device)


@dataclass(frozen=True)
class BackwardContext:
    """The inputs of `Statistic.backward`. Its methods make formulas of b, h, i, j and s; s is the final score."""

    problem: Problem
    lse: Any
    compute: Any  # function that returns the result of another statistic of the problem; see `statistic_gradients`
    gradient: Any  # the gradient of the statistic's first array; its other arrays are integers without gradients
    remaining_axes: str = "bh"  # the leading axes of `gradient`: "bh" without the axes that are averaged over
    arrays: Sequence[Any] = ()  # the statistic's arrays from the forward pass; () if they were not saved

    @property
    def xp(self) -> Any:
        return namespace(self.problem.query)

    def lookup(self, array: Any, *index: Expression, remaining_axes: str = "bh") -> Expression:
        """Return the formula that reads an array (*batch_shape, H, ...) at b, h and the index.

        `remaining_axes` says whether the array has the batch axes and the head axis: "bh", "b", "h" or "".
        """
        problem = self.problem
        lengths = [problem.B] * ("b" in remaining_axes) + [problem.H] * ("h" in remaining_axes)
        own = array.shape[array.ndim - len(index) :]
        return Table(self.xp.reshape(array, (*lengths, *own)))[(*(SYMBOLS[name] for name in remaining_axes), *index)]

    def gradient_at(self, *index: Expression) -> Expression:
        """Return the formula that reads the gradient at b, h and the index."""
        return self.lookup(self.gradient, *index, remaining_axes=self.remaining_axes)


@dataclass(frozen=True)
class StatisticGradients:
    """The terms that the statistics' gradients add: `weights` to dP, `scores` to dS, `lse` to d_lse.

    `weights` and `scores` are formulas of b, h, i, j and s, the final score. They are valid at allowed pairs only. A
    term is None if the statistics add nothing. `weights_sum` is Σⱼ P ∘ weights of every query, None if it is not known.
    """

    weights: Expression | None = None
    scores: Expression | None = None
    lse: Any = None
    weights_sum: Any = None
    includes_zero_weights: bool = False  # True if `scores` must also be added at pairs whose weight underflowed to 0

    @property
    def needs_weights_sum(self) -> bool:
        """True if `weights_sum` must be computed."""
        return self.weights is not None and self.weights_sum is None

    @property
    def formulas(self) -> dict[str, Expression]:
        """A dict of `weights` and `scores`, without those that are None."""
        named = {"weights": self.weights, "scores": self.scores}
        return {name: formula for name, formula in named.items() if formula is not None}

    def multiply(self, factor: Any, factors: Any) -> StatisticGradients:
        """Return the terms times a number per head: `factor` is this number as a formula of h, `factors` as (H, 1)."""
        formulas = {name: formula * factor for name, formula in self.formulas.items()}
        arrays = {name: getattr(self, name) for name in ("lse", "weights_sum")}
        products = {name: array * factors for name, array in arrays.items() if array is not None}
        return replace(self, **formulas, **products)

    def add_to_d_lse(self, d_lse: Any) -> Any:
        """Return d_lse + lse − weights_sum. A term that is None is left out; the result is None if all three are None.

        dP includes `weights`, so δ = rowsum(P ∘ dP) − d_lse must include `weights_sum`. The last term adds it.
        """
        negative_sum = None if self.weights_sum is None else -self.weights_sum
        terms = [term for term in (d_lse, self.lse, negative_sum) if term is not None]
        return reduce(add, terms) if terms else None


def accumulate_statistics(problem: Problem, lse: Any, tiles: Callable[[], Iterator[Tile]]) -> tuple[Any, ...]:
    """Return every statistic of `problem.see`, from lse and at most one pass over the tiles.

    The tiles must include every pair whose weight is not 0.
    """
    context = ForwardContext(problem, lse, (*problem.batch_shape, problem.H))
    with np.errstate(all="ignore"):
        accumulated = [(statistic, statistic.start(context)) for statistic in problem.see]
        for tile in tiles() if any(statistic.num_arrays for statistic in problem.see) else ():
            for statistic, arrays in accumulated:
                if statistic.num_arrays:
                    statistic.add(arrays, tile, context)
        return tuple(statistic.build_result(statistic.finish(arrays, context)) for statistic, arrays in accumulated)


def statistic_gradients(
    problem: Problem,
    lse: Any,
    d_seen: Sequence[Any],
    arrays: Sequence[Sequence[Any]] = (),
    compute: Callable[[Statistic], Any] | None = None,
) -> StatisticGradients:
    """Return the sum of the terms that the statistics' gradients add to dP, dS and d_lse.

    `d_seen` holds, for each statistic, the gradient of the first array of its result; None if that array has no
    gradient. `arrays` holds each statistic's arrays from the forward pass, () if they were not saved.
    `compute(statistic)` returns the result of another statistic of the problem; None if no statistic needs one, see
    `Statistic.backward_computes`.
    """
    requested = zip(problem.see, d_seen, arrays or [()] * len(d_seen), strict=False)
    terms = [
        statistic.backward(BackwardContext(problem, lse, compute, gradient, arrays=own))
        for statistic, gradient, own in requested
        if gradient is not None
    ]

    def total(field: str) -> Any:
        present = [getattr(term, field) for term in terms if getattr(term, field) is not None]
        return reduce(add, present) if present else None

    return StatisticGradients(
        weights=total("weights"),
        scores=total("scores"),
        lse=total("lse"),
        weights_sum=None if any(term.needs_weights_sum for term in terms) else total("weights_sum"),
        includes_zero_weights=any(term.includes_zero_weights for term in terms),
    )


def weigh(factor: Any, array: Any) -> Any:
    """Return factor · array. A factor of 0 gives 0, even if the array has NaN or ∞."""
    return factor * namespace(array).where(factor == 0, 0.0, array)


def arrays_of(result: Any) -> tuple[Any, ...]:
    """Return the arrays of a result of `build_result`."""
    return tuple(result) if isinstance(result, tuple) else (result,)


def literal_text(value: Any) -> str:
    """Return a parameter as a Python literal; torch.compile cannot trace `repr` of a tuple."""
    if isinstance(value, tuple):
        return "(" + "".join([literal_text(entry) + "," for entry in value]) + ")"
    if value in (math.inf, -math.inf):
        return "1e999" if value > 0 else "-1e999"  # `ast.literal_eval` reads no "inf"
    return repr(specialize(value))


def format_axes(axes: str) -> str:
    """Return axes such as "hj" as text: "(h, j)", or "j" for one axis."""
    return axes if len(axes) == 1 else f"({', '.join(axes)})"
