"""The CPU kernels, generated through LLVM for the processor at hand. llvmlite is imported when a kernel first runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..call.kernel import GivenGradients, Gradients, Kernel, Refusal, Result, Tangents
from ..call.problem import Problem
from ..statistics import Statistic, TopK, unwrap_mean
from ..statistics.computation import computed_statistic, is_fused
from .refusals import refuse_backward, refuse_forward
from .runtime.processor import HOST, Processor

__all__ = ["Cpu"]


class Cpu(Kernel):
    """The kernel `cpu`: forward and backward pass in every dtype, with code generated for the problem's formulas."""

    name = "cpu"
    description = "generated through LLVM for this processor, O(n) memory"

    def __init__(self, processor: Processor = HOST) -> None:
        self.processor = processor

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        return refuse_forward(problem)

    def cost(self, problem: Problem) -> float:
        return 1.0

    def describe_statistic(self, problem: Problem, statistic: Statistic) -> str:
        from .launch.weights_pass import MAX_TOP_K, can_serve

        if not statistic.has_own_problem and is_fused(unwrap_mean(statistic)):
            return "computed with the output"
        if can_serve(problem, computed_statistic(statistic)):
            return "a second pass over the tiles"
        reason = f" (up to k = {MAX_TOP_K}, a second pass)" if isinstance(statistic, TopK) else ""
        return super().describe_statistic(problem, statistic) + reason

    def run(self, problem: Problem, threads: int | None = None) -> Result:
        from .launch.forward import run

        return run(problem, threads, self.processor)

    def sources(self, problem: Problem) -> dict[str, str]:
        from .launch.forward import source

        return {"forward": source(problem, self.processor)}

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        return refuse_backward(problem)

    def backward(self, problem: Problem, given: GivenGradients, threads: int | None = None) -> Gradients | None:
        # the backward kernel cannot tell a visible pair whose weight is 0 from a hidden pair
        is_refused = next(self.refuses_backward(problem, given.wanted_tables), None) is not None
        if is_refused or given.statistics.includes_zero_weights:
            return None
        from .launch.backward import backward
        from .launch.backward_parts import backward_in_parts, needs_parts

        d_output, d_lse, saved, wanted_tables, statistics = given
        rest = threads, statistics, self.processor
        if needs_parts(problem, wanted_tables, statistics):
            return backward_in_parts(problem, d_output, d_lse, saved, *rest)
        return backward(problem, d_output, d_lse, saved, wanted_tables, *rest)

    def tangent(
        self, problem: Problem, tangents: Tangents, saved: tuple[Any, Any], threads: int | None = None
    ) -> tuple[Any, Any] | None:
        if next(self.refuses_backward(problem), None) is not None:
            return None
        from .launch.tangent import tangent

        return tangent(problem, tangents, saved, threads, self.processor)
