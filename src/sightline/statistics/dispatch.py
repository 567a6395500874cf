"""How kernels compute statistics: from lse alone, in the forward kernel, by another kernel, or by a loop over tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..formula.expression import Expression
from .contexts import accumulate_statistics
from .per_query import TopK
from .reduction import Reduction
from .statistic import Statistic

if TYPE_CHECKING:
    from ..call.problem import Problem


def is_in_weights_pass(statistic: Statistic) -> bool:
    """True if the weights pass of a kernel computes the statistic of every head, unless its sizes are beyond limits."""
    return isinstance(statistic, TopK | Reduction) and statistic.fused_role is None


def cache_key_of(see: Any) -> tuple[tuple[Any, ...], tuple[Statistic, ...]] | None:
    """Return (`cache_key` of the statistics, `Statistic.computed` of each); None if one is never cached."""
    if type(see) not in (list, tuple):
        return None
    computed: tuple[Any, ...] = tuple([getattr(one, "computed", None) for one in see])
    keys = tuple([getattr(one, "cache_key", None) for one in computed])
    return None if None in keys else (keys, computed)


class FusedStatistics:
    """The statistics that a generated forward kernel computes beside the softmax, and their output arrays.

    empty : function of a shape and the name of a dtype that returns a new array; without it there are no arrays

    outputs : (name, dtype) of each output array in the order of a kernel's arguments
        The name is "max_score" for the largest scores and for their keys, "entropy", or `id(statistic)` of a sum.
    arrays : the output arrays
    factors : the factors of the sums
    """

    def __init__(self, problem: Problem, empty: Callable[[tuple[int, ...], str], Any] | None = None) -> None:
        requested = [x for x in problem.see if isinstance(x, Reduction)]
        factors = {id(x): x.factor for x in requested if x.factor is not None}
        names, accumulator = {x.fused_role for x in requested}, problem.accumulator
        outputs = [("max_score", accumulator), ("max_score", "int64"), ("entropy", accumulator)]
        self.outputs: list[tuple[Any, str]] = [output for output in outputs if output[0] in names]
        self.outputs += [(name, accumulator) for name in factors]
        shape = *problem.batch_shape, problem.H, problem.n
        self.arrays = [] if empty is None else [empty(shape, dtype) for _, dtype in self.outputs]
        self.factors = tuple(factors.values())

    def places_of(self, statistic: Statistic | str) -> slice:
        """Return the places of the arrays of a statistic, or of those with a name, among the outputs."""
        name: Any = statistic if isinstance(statistic, str) else statistic.fused_role
        name = id(statistic) if name == "sum" else name
        names = [other for other, _ in self.outputs]
        first = names.index(name) if name in names else 0
        return slice(first, first + names.count(name))

    def arrays_of(self, statistic: Statistic) -> list[Any] | None:
        """Return the arrays of a requested statistic; None if the forward kernel does not compute it."""
        return self.arrays[self.places_of(statistic)] or None


def formulas_of(see: Sequence[Statistic]) -> list[Expression]:
    """Return the formulas of the statistics, also within a mean: those that the forward kernel computes come first."""
    factors, others = [], []
    for statistic in [one.unaveraged for one in see]:
        if isinstance(statistic, Reduction):
            if statistic.factor is not None:
                factors.append(statistic.factor)
            elif statistic.fused_role is None and not statistic.is_plain:
                others.append(statistic.pair_formula)
    return factors + others


def dispatch_statistics(
    problem: Problem,
    lse: Any,
    compute_arrays: Callable[[Statistic], list[Any] | None],
    compute_by_streaming: Callable[[Problem], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Return the result of every statistic of `problem.see`.

    compute_arrays : function that returns a statistic's arrays from a kernel, or None if no kernel computes it
    compute_by_streaming : function that returns the results of all statistics of a problem
        The function is called once, with a problem whose `see` has all statistics that no kernel computes.
    """

    def solve(statistic: Statistic) -> Any:
        if not statistic.num_arrays:
            return accumulate_statistics(problem.with_statistics(statistic), lse, lambda: iter(()))[0]
        arrays = compute_arrays(statistic)
        return None if arrays is None else statistic.build_result(arrays)

    results = [solve(statistic) for statistic in problem.see]
    remaining = [statistic for statistic, result in zip(problem.see, results, strict=True) if result is None]
    rest = iter(compute_by_streaming(problem.with_statistics(*remaining)) if remaining else ())
    return tuple([next(rest) if result is None else result for result in results])
