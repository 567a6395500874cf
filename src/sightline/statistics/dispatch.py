"""How kernels compute statistics: from lse alone, in the forward kernel, by another kernel, or by a loop over tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..formula.expression import Expression
from .contexts import accumulate_statistics
from .per_query import TopK
from .reduction import Reduction
from .statistic import Mean, Statistic, unwrap_mean

if TYPE_CHECKING:
    from ..call.problem import Problem


def is_in_weights_pass(statistic: Statistic) -> bool:
    """True if the weights pass of the CPU computes the statistic of every head, unless its sizes are beyond limits."""
    return isinstance(statistic, TopK | Reduction) and statistic.fused_role is None


def cache_key_of(see: Any) -> tuple[tuple[Any, ...], tuple[Statistic, ...]] | None:
    """Return (classes and parameters of the statistics, statistics); None if a cached call cannot compute one.

    Statistics with equal classes and parameters differ in their formulas alone.
    """
    if type(see) not in (list, tuple):
        return None
    key: list[Any] = []
    for statistic in see:
        kind = type(statistic)
        if kind is Mean and computed_statistic(statistic) is not statistic:
            key += kind, statistic.over_heads, statistic.over_batch, statistic.factors, statistic.sums_batch
            statistic = statistic.of
            kind = type(statistic)
        key.append(kind)
        parameters = [getattr(statistic, name) for name in getattr(kind, "__match_args__", ())]
        if kind is Reduction:
            if not isinstance(statistic.formula, Expression):
                return None
            parameters[0] = statistic.is_plain, statistic.fused_role
        elif not (isinstance(statistic, Statistic) and (statistic.fused_role or is_in_weights_pass(statistic))):
            return None
        key += parameters
    return tuple(key), tuple(see)


class FusedStatistics:
    """The statistics that a generated forward kernel computes beside the softmax, and their output arrays.

    Parameters
    ----------
    empty : function of a shape and the name of a dtype that returns a new array

    Attributes
    ----------
    max_score : the arrays of the largest scores and of their keys; empty if `max_score` is not requested
    entropy : the array in a list; empty if `entropy` is not requested
    sums : the array of each sum with a factor, by `id(statistic)`
    factors : these factors
    """

    def __init__(self, problem: Problem, empty: Callable[[tuple[int, ...], str], Any]) -> None:
        requested = [x for x in map(unwrap_mean, problem.see) if isinstance(x, Reduction)]
        factors = {id(x): x.factor for x in requested if x.factor is not None}
        roles = {x.fused_role for x in requested}
        shape, accumulator = (*problem.batch_shape, problem.H, problem.n), problem.accumulator

        def allocate(role: str, *dtypes: str) -> list[Any]:
            return [empty(shape, dtype) for dtype in dtypes] if role in roles else []

        self.max_score, self.entropy = allocate("max_score", accumulator, "int64"), allocate("entropy", accumulator)
        self.sums, self.factors = {key: empty(shape, accumulator) for key in factors}, tuple(factors.values())

    @property
    def arrays(self) -> list[Any]:
        """The output arrays in the order of a kernel's arguments."""
        return [*self.max_score, *self.entropy, *self.sums.values()]

    def arrays_of(self, statistic: Statistic) -> list[Any] | None:
        """Return the arrays of a requested statistic; None if the forward kernel does not compute it."""
        if id(statistic) in self.sums:
            return [self.sums[id(statistic)]]
        return {"max_score": self.max_score, "entropy": self.entropy}.get(statistic.fused_role or "")


def formulas_of(see: Sequence[Statistic]) -> list[Expression]:
    """Return the formulas of the statistics, also within a mean: those that the forward kernel computes come first."""
    reductions = [x for x in map(unwrap_mean, see) if isinstance(x, Reduction)]
    factors = [x.factor for x in reductions if x.factor is not None]
    return factors + [x.pair_formula for x in reductions if x.fused_role is None and not x.is_plain]


def computed_statistic(statistic: Statistic) -> Statistic:
    """Return the statistic whose arrays a kernel computes: of a mean the averaged statistic, else the statistic itself.

    A mean of weights or scores is returned unchanged, because the matrices of all heads would fill the memory.
    """
    of = unwrap_mean(statistic)
    return of if of.axes else statistic


def dispatch_statistics(
    problem: Problem,
    lse: Any,
    compute_arrays: Callable[[Statistic], list[Any] | None],
    compute_by_streaming: Callable[[Problem], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Return the result of every statistic of `problem.see`.

    Parameters
    ----------
    compute_arrays : function that returns a statistic's arrays from a kernel, or None if no kernel computes it
        The function is called with `computed_statistic` of each statistic. For a mean this is the averaged statistic,
        and `dispatch_statistics` averages the arrays.
    compute_by_streaming : function that returns the results of all statistics of a problem
        The function is called once, with a problem whose `see` has all statistics that no kernel computes.
    """

    def average_arrays(statistic: Statistic) -> list[Any] | None:
        computed = computed_statistic(statistic)
        arrays = compute_arrays(computed)
        if computed is statistic or arrays is None:
            return arrays
        return [statistic.average(array, len(problem.batch_shape)) for array in arrays]

    results: dict[int, Any] = {}
    for index, statistic in enumerate(problem.see):
        if not statistic.reads_tiles:
            (results[index],) = accumulate_statistics(problem.with_statistics(statistic), lse, lambda: iter(()))
        elif (arrays := average_arrays(statistic)) is not None:
            results[index] = statistic.build_result(arrays)
    remaining = [index for index in range(len(problem.see)) if index not in results]
    if remaining:
        answers = compute_by_streaming(problem.with_statistics(*(problem.see[index] for index in remaining)))
        results |= dict(zip(remaining, answers, strict=True))
    return tuple(results[index] for index in range(len(problem.see)))
