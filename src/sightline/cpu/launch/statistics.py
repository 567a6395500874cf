"""Which kernel answers a statistic: riding along with the forward pass, a second pass, or the plain tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import convert
from ...problem import Problem
from ...statistics import (
    Entropy,
    Mass,
    MaxScore,
    Mean,
    Pooled,
    Received,
    Statistic,
    TopK,
    Weights,
    accumulate_statistics,
    unwrap_mean,
)
from ...streaming import Streaming
from ..runtime.processor import Processor
from . import weights_pass

__all__ = ["FusedStatistics", "compute_statistics"]


class FusedStatistics:
    """The statistics that ride along with the forward kernel, and the arrays it puts them into.

    See `FusedStatisticsCode`.
    """

    def __init__(self, problem: Problem) -> None:
        statistics = [unwrap_mean(statistic) for statistic in problem.see]
        masses = [statistic for statistic in statistics if isinstance(statistic, Mass)]
        shape = (*problem.batch_shape, problem.H, problem.n)
        self.formulas = tuple(statistic.mask for statistic in masses)
        self.max_score: list[Any] = []
        self.entropy: list[Any] = []
        if any(isinstance(statistic, MaxScore) for statistic in statistics):
            self.max_score = [np.empty(shape, problem.accumulator), np.empty(shape, np.int64)]
        if any(isinstance(statistic, Entropy) for statistic in statistics):
            self.entropy = [np.empty(shape, problem.accumulator)]
        self.masses = {id(statistic): np.empty(shape, problem.accumulator) for statistic in masses}
        self.roles = ("largest",) * bool(self.max_score) + ("entropy",) * bool(self.entropy) + ("sum",) * len(masses)

    @property
    def arrays(self) -> list[Any]:
        """In the order of the kernel's words."""
        return [*self.max_score, *self.entropy, *self.masses.values()]

    def arrays_of(self, statistic: Statistic) -> list[Any] | None:
        """The arrays of a statistic that rides along."""
        if isinstance(statistic, MaxScore):
            return self.max_score
        if isinstance(statistic, Entropy):
            return self.entropy
        return [self.masses[id(statistic)]] if isinstance(statistic, Mass) else None


def compute_statistics(
    problem: Problem, lse: Any, fused_statistics: FusedStatistics, threads: int | None, processor: Processor
) -> tuple[Any, ...]:
    """Every statistic of `problem.see`; by `streaming` those that no kernel answers.

    NaN and ∞ among the scores show in lse, and are sorted out by `streaming` too.
    """
    is_nonfinite = weights_pass.has_nonfinite(problem, lse)
    results: dict[int, Any] = {}
    for index, statistic in enumerate(problem.see):
        if not statistic.tile_inputs:  # made of the normaliser alone
            (results[index],) = accumulate_statistics(problem.with_statistics(statistic), lse, lambda: iter(()))
        elif not is_nonfinite:
            arrays = _compute_arrays(problem, lse, statistic, fused_statistics, threads, processor)
            if arrays is not None:
                results[index] = statistic.build_result(arrays)
    remaining = [index for index in range(len(problem.see)) if index not in results]
    if remaining:
        answers = Streaming().run(problem.with_statistics(*(problem.see[index] for index in remaining))).seen
        results |= dict(zip(remaining, answers, strict=True))
    return tuple(results[index] for index in range(len(problem.see)))


def _compute_arrays(
    problem: Problem,
    lse: Any,
    statistic: Statistic,
    fused_statistics: FusedStatistics,
    threads: int | None,
    processor: Processor,
) -> list[Any] | None:
    """A statistic's arrays by the generated kernels, averaged where it is a mean; None where none has it."""
    inner_statistic = unwrap_mean(statistic)
    fused_arrays = fused_statistics.arrays_of(inner_statistic)
    if fused_arrays is not None:
        arrays: list[Any] | None = [convert(array, problem.query) for array in fused_arrays]
    elif isinstance(inner_statistic, Weights) and inner_statistic is not statistic:
        return None  # all heads' weights would be held for their mean
    else:
        arrays = _run_weights_pass(problem, lse, inner_statistic, threads, processor)
    if arrays is None or inner_statistic is statistic:
        return arrays
    assert isinstance(statistic, Mean)
    return [statistic.average(array, problem) for array in arrays]


def _run_weights_pass(
    problem: Problem, lse: Any, statistic: Statistic, threads: int | None, processor: Processor
) -> list[Any] | None:
    options: dict[str, Any] = {"threads": threads, "processor": processor}
    if isinstance(statistic, TopK):
        largest_weights = weights_pass.top_k(problem, lse, statistic.k, **options)
        return None if largest_weights is None else list(largest_weights)
    if isinstance(statistic, Received):
        result = weights_pass.received(problem, lse, statistic.how, **options)
    elif isinstance(statistic, Pooled):
        grid = statistic.down, statistic.across, statistic.how, statistic.within
        result = weights_pass.pooled(problem, lse, *grid, **options)
    elif isinstance(statistic, Weights):
        result = weights_pass.weights(problem, lse, **options)
    else:
        return None
    return None if result is None else [result]
