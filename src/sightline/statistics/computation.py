"""The dispatch of statistics: each is computed from lse alone, by a kernel, or by streaming."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import accumulate_statistics
from .matrix import Matrix
from .selection import Mean, Statistic, unwrap_mean

if TYPE_CHECKING:
    from ..problem import Problem

__all__ = ["dispatch_statistics"]


def dispatch_statistics(
    problem: Problem,
    lse: Any,
    compute_arrays: Callable[[Statistic], list[Any] | None],
    compute_by_streaming: Callable[[Problem], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Return the result of every statistic of `problem.see`.

    Parameters
    ----------
    compute_arrays : function that computes a statistic's arrays by a kernel; None if no kernel computes the statistic
        A mean of weights or scores is passed as a `Mean`, because the matrices of all heads would fill the memory. For
        any other mean, the statistic that it averages is passed, and the arrays are averaged here.
    compute_by_streaming : function that returns the results of all statistics of a problem
        It is called once, with all statistics that no kernel computes.
    """

    def average_arrays(statistic: Statistic) -> list[Any] | None:
        if not isinstance(statistic, Mean) or isinstance(statistic.of, Matrix):
            return compute_arrays(statistic)
        arrays = compute_arrays(unwrap_mean(statistic))
        return None if arrays is None else [statistic.average(array, problem) for array in arrays]

    results: dict[int, Any] = {}
    for index, statistic in enumerate(problem.see):
        if not statistic.tile_inputs:
            (results[index],) = accumulate_statistics(problem.with_statistics(statistic), lse, lambda: iter(()))
        elif (arrays := average_arrays(statistic)) is not None:
            results[index] = statistic.build_result(arrays)
    remaining = [index for index in range(len(problem.see)) if index not in results]
    if remaining:
        answers = compute_by_streaming(problem.with_statistics(*(problem.see[index] for index in remaining)))
        results |= dict(zip(remaining, answers, strict=True))
    return tuple(results[index] for index in range(len(problem.see)))
