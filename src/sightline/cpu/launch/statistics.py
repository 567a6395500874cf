"""The computation of statistics: fused with the forward pass, by a second pass over the weights, or by streaming."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.operations import convert
from ...problem.problem import Problem
from ...reference.streaming import Streaming
from ...statistics import Entropy, Mass, MaxScore, Statistic, unwrap_mean
from ...statistics.computation import computed_statistic, dispatch_statistics
from ..runtime.processor import Processor
from . import weights_pass


class FusedStatistics:
    """The statistics that the forward kernel computes, and their output arrays; see `FusedStatisticsCode`."""

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
        self.roles = ("max_score",) * bool(self.max_score) + ("entropy",) * bool(self.entropy) + ("sum",) * len(masses)

    @property
    def arrays(self) -> list[Any]:
        """The output arrays in the order of the kernel's arguments."""
        return [*self.max_score, *self.entropy, *self.masses.values()]

    def arrays_of(self, statistic: Statistic) -> list[Any] | None:
        """Return the arrays of a statistic; None if the forward kernel does not compute the statistic."""
        if isinstance(statistic, MaxScore):
            return self.max_score
        if isinstance(statistic, Entropy):
            return self.entropy
        return [self.masses[id(statistic)]] if isinstance(statistic, Mass) else None


def compute_statistics(
    problem: Problem, lse: Any, fused_statistics: FusedStatistics, threads: int | None, processor: Processor
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return two tuples: the result of each statistic of `problem.see`, and the bound weights passes.

    A weights pass computes the statistics that the forward kernel does not compute.

    The kernel `Streaming` computes the statistics that no CPU kernel computes. If `has_nonfinite` is true of lse, then
    `Streaming` computes every statistic that needs weights.
    """
    is_nonfinite = weights_pass.has_nonfinite(problem, lse)
    statistics = [computed_statistic(statistic) for statistic in problem.see]
    passes: list[Any] = []
    arrays: dict[int, list[Any]] = {}
    for bound in [] if is_nonfinite else weights_pass.bind_passes(problem, statistics, processor):
        found = weights_pass.run_first(problem, lse, bound, threads)
        if found is not None:
            passes.append(bound[1])
            arrays |= {id(statistics[k]): own for k, own in zip(bound[1].indices, found, strict=True)}

    def compute_arrays(statistic: Statistic) -> list[Any] | None:
        fused_arrays = None if is_nonfinite else fused_statistics.arrays_of(statistic)
        if fused_arrays is not None:
            return [convert(array, problem.query) for array in fused_arrays]
        return arrays.get(id(statistic))

    seen = dispatch_statistics(problem, lse, compute_arrays, lambda rest: Streaming().run(rest).seen)
    return seen, tuple(passes)
