"""Compute statistics: in the forward kernel, by a second pass over the weights, or by the module `streaming`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...problem.problem import Problem
from ...reference.streaming import TileOps
from ...reference.streaming import compute_statistics as compute_by_streaming
from ...statistics import Entropy, Mass, MaxScore, Statistic, unwrap_mean
from ...statistics.computation import dispatch_statistics
from .arguments import Operands
from .weights_pass import run_weights_pass


class FusedStatistics:
    """The statistics that the forward kernel computes, and their output arrays; see `kernels.fused_statistics`."""

    def __init__(self, problem: Problem) -> None:
        requested = [unwrap_mean(statistic) for statistic in problem.see]
        masses = {id(statistic): statistic for statistic in requested if isinstance(statistic, Mass)}
        shape, accumulator = (*problem.batch_shape, problem.H, problem.n), getattr(torch, problem.accumulator)

        def allocate(is_requested: bool = True, dtype: Any = accumulator) -> Any:
            return problem.query.new_empty(shape, dtype=dtype) if is_requested else None

        max_score = any(isinstance(statistic, MaxScore) for statistic in requested)
        self.max_score = [allocate(max_score), allocate(max_score, torch.int64)]  # the largest score, and its key
        self.entropy = allocate(any(isinstance(statistic, Entropy) for statistic in requested))
        self.sums = {identity: allocate() for identity in masses}
        self.names = [f"sum_{k}" for k in range(len(masses))]
        self.formulas = [(name, mass.mask, True) for name, mass in zip(self.names, masses.values(), strict=True)]

    def __bool__(self) -> bool:
        return self.max_score[0] is not None or self.entropy is not None or bool(self.sums)

    def arguments(self, operands: Operands, base_arguments: dict[str, Any]) -> dict[str, Any]:
        """Return `base_arguments` with the output arrays, formulas and compile-time constants of the statistics.

        The extra formulas of `operands` must include `self.formulas`.
        """
        calls = [f"{name}(s, b, h, i, j, n, m, tables)" for name in self.names]
        summands_at = operands.combine_functions(self.names, calls, "summands_at")
        flags = {"max_score": self.max_score[0] is not None, "entropy": self.entropy is not None}
        return base_arguments | {
            "seen": (*self.max_score, self.entropy, tuple(self.sums.values())),
            "formulas": base_arguments["formulas"]._replace(summands_at=summands_at),
            "meta": replace(base_arguments["meta"], **flags),
        }

    def arrays_of(self, statistic: Statistic) -> list[Any] | None:
        """Return the arrays of a statistic; None if the forward kernel does not compute the statistic."""
        if isinstance(statistic, MaxScore):
            return self.max_score
        if isinstance(statistic, Entropy):
            return [self.entropy]
        return [self.sums[id(statistic)]] if isinstance(statistic, Mass) else None


def compute_statistics(
    problem: Problem, lse: Any, fused_statistics: FusedStatistics, architecture: str
) -> tuple[Any, ...]:
    """Return the result of every statistic of `problem.see`.

    The forward kernel has computed some of them (`fused_statistics`), and a weights pass computes others. The module
    `streaming` computes the rest.
    """

    def compute_arrays(statistic: Statistic) -> list[Any] | None:
        if 0 in problem.extent:
            return None
        arrays = fused_statistics.arrays_of(statistic)
        return run_weights_pass(problem, lse, statistic, architecture) if arrays is None else arrays

    return dispatch_statistics(problem, lse, compute_arrays, lambda rest: compute_by_streaming(TileOps(rest), lse))
