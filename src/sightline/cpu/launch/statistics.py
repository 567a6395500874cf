"""The computation of statistics: fused with the forward pass, by a second pass over the weights, or by `Streaming`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays.operations import convert
from ...call.problem import Problem
from ...formula.expression import Expression
from ...reference.streaming import Streaming
from ...statistics import Statistic
from ...statistics.dispatch import FusedStatistics, computed_statistic, dispatch_statistics, formulas_of
from ..runtime.processor import Processor
from . import weights_pass


class CpuFusedStatistics(FusedStatistics):
    """The statistics that the forward kernel computes, and their output arrays; see `FusedStatisticsCode`.

    `unread` are formulas of the call that the kernel does not read, by default those of the weights passes; see
    `KernelArguments`.
    """

    def __init__(self, problem: Problem, unread: Sequence[Expression] | None = None) -> None:
        super().__init__(problem, np.empty)
        self.unread = formulas_of(problem.see)[len(self.factors) :] if unread is None else unread
        roles = {"max_score": self.max_score[:1], "entropy": self.entropy, "sum": self.sums}
        self.roles = tuple([role for role, arrays in roles.items() for _ in arrays])


def compute_statistics(
    problem: Problem, lse: Any, fused_statistics: CpuFusedStatistics, threads: int | None, processor: Processor
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return two tuples: the result of each statistic of `problem.see`, and the bound weights passes.

    A weights pass is a second kernel, for statistics that the forward kernel does not compute. The kernel `Streaming`
    computes the statistics that no CPU kernel computes, and all that need weights if `is_lse_imprecise` is true.
    """
    is_imprecise = weights_pass.is_lse_imprecise(problem, lse)
    statistics = [computed_statistic(statistic) for statistic in problem.see]
    passes: list[Any] = []
    arrays: dict[int, list[Any]] = {}
    for bound in [] if is_imprecise else weights_pass.bind_passes(problem, statistics, processor):
        found = weights_pass.run_first(problem, lse, bound, threads)
        if found is not None:
            passes.append(bound[1])
            arrays |= {id(statistics[k]): own for k, own in zip(bound[1].indices, found, strict=True)}

    def compute_arrays(statistic: Statistic) -> list[Any] | None:
        fused_arrays = None if is_imprecise else fused_statistics.arrays_of(statistic)
        if fused_arrays is not None:
            return [convert(array, problem.query) for array in fused_arrays]
        return arrays.get(id(statistic))

    seen = dispatch_statistics(problem, lse, compute_arrays, lambda rest: Streaming().run(rest).seen)
    return seen, tuple(passes)
