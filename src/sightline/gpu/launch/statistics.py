"""Which kernel answers a statistic: riding along with the forward pass, a second pass, or the plain tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...problem import Problem
from ...statistics import Entropy, Mass, MaxScore, Mean, Statistic, accumulate_statistics, unwrap_mean
from ...statistics.matrix import Matrix
from ...streaming import TileOps
from ...streaming import compute_statistics as compute_by_streaming
from .arguments import Operands
from .weights_pass import run_weights_pass

__all__ = ["FusedStatistics", "compute_statistics"]


class FusedStatistics:
    """The statistics that ride along with the forward kernel, and the arrays it puts them into; see `riding`."""

    def __init__(self, problem: Problem) -> None:
        requested = [unwrap_mean(statistic) for statistic in problem.see]
        masses = {id(statistic): statistic for statistic in requested if isinstance(statistic, Mass)}
        shape, kind = (*problem.batch_shape, problem.H, problem.n), getattr(torch, problem.accumulator)

        def allocate(is_requested: bool = True, dtype: Any = kind) -> Any:
            return problem.query.new_empty(shape, dtype=dtype) if is_requested else None

        max_score = any(isinstance(statistic, MaxScore) for statistic in requested)
        self.max_score = [allocate(max_score), allocate(max_score, torch.int64)]
        self.entropy = allocate(any(isinstance(statistic, Entropy) for statistic in requested))
        self.sums = {place: allocate() for place in masses}
        self.names = [f"sum_{k}" for k in range(len(masses))]
        self.formulas = [(name, mass.mask, True) for name, mass in zip(self.names, masses.values(), strict=True)]

    def __bool__(self) -> bool:
        return self.max_score[0] is not None or self.entropy is not None or bool(self.sums)

    def arguments(self, operands: Operands, base_arguments: dict[str, Any]) -> dict[str, Any]:
        """The forward kernel's arguments out of those `base_arguments` them; `operands` has their formulas among its others."""
        calls = [f"{name}(s, b, h, i, j, n, m, tables)" for name in self.names]
        return base_arguments | {
            "seen": (*self.max_score, self.entropy, tuple(self.sums.values())),
            "formulas": base_arguments["formulas"]._replace(
                summands_at=operands.combine_functions(self.names, calls, "summands_at")
            ),
            "meta": replace(
                base_arguments["meta"], max_score=self.max_score[0] is not None, entropy=self.entropy is not None
            ),
        }

    def get_outputs(self, statistic: Statistic) -> list[Any] | None:
        """The arrays of a statistic that rides along."""
        if isinstance(statistic, MaxScore):
            return self.max_score
        if isinstance(statistic, Entropy):
            return [self.entropy]
        return [self.sums[id(statistic)]] if isinstance(statistic, Mass) else None


def compute_statistics(
    problem: Problem, lse: Any, fused_statistics: FusedStatistics, architecture: str
) -> tuple[Any, ...]:
    """Every statistic of `problem.see`; by `streaming` those that no kernel answers."""
    found: dict[int, Any] = {}
    if 0 in problem.extent:
        return compute_by_streaming(TileOps(problem), lse)
    for place, statistic in enumerate(problem.see):
        if not statistic.tile_inputs:  # made of the normaliser alone
            (found[place],) = accumulate_statistics(problem.with_statistics(statistic), lse, lambda: iter(()))
            continue
        arrays = _compute_arrays(problem, lse, statistic, fused_statistics, architecture)
        if arrays is not None:
            found[place] = statistic.build_result(arrays)
    rest = [place for place in range(len(problem.see)) if place not in found]
    if rest:
        answers = compute_by_streaming(TileOps(problem.with_statistics(*(problem.see[place] for place in rest))), lse)
        found |= dict(zip(rest, answers, strict=True))
    return tuple(found[place] for place in range(len(problem.see)))


def _compute_arrays(
    problem: Problem, lse: Any, statistic: Statistic, fused_statistics: FusedStatistics, architecture: str
) -> list[Any] | None:
    """A statistic's arrays by the kernels, averaged where it is a mean; None where none has it."""
    if isinstance(statistic, Mean) and isinstance(statistic.of, Matrix):
        return run_weights_pass(problem, lse, statistic, architecture)  # of which all heads' would not be held
    own = unwrap_mean(statistic)
    arrays = fused_statistics.get_outputs(own)
    if arrays is None:
        arrays = run_weights_pass(problem, lse, own, architecture)
    if arrays is None or not isinstance(statistic, Mean):
        return arrays
    return [statistic.average(array, problem) for array in arrays]
