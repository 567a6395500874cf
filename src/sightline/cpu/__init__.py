"""The CPU kernels, generated through LLVM for the processor at hand. llvmlite is imported by the first kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from typing import Any

from ..formula.expression import walk
from ..kernel import Gradients, Kernel, Refusal, Result
from ..problem import Problem
from ..statistics import StatisticGradients
from .runtime.processor import HOST, Processor

__all__ = ["Cpu"]


MAX_HEAD_WIDTH = 1024  # of d_k and d_v: their scratch, 256 bytes per component each, is on a thread's stack
MAX_FORMULA_NODES = 400  # of mask and score together: LLVM takes about 10 ms per node


class Cpu(Kernel):
    """Forward and backward pass in every dtype, generated for the problem's formulas."""

    name = "cpu"
    description = "generated through LLVM for this processor, O(n) memory"

    def __init__(self, processor: Processor = HOST) -> None:
        self.processor = processor

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Yield a refusal for another device, too large a width, too large formulas, and if llvmlite is missing."""
        if problem.device != "cpu":
            yield Refusal(f"arrays on {problem.device}", "move them to the CPU")
        if max(problem.d_k, problem.d_v) > MAX_HEAD_WIDTH:
            widths = f"d_k {problem.d_k}, d_v {problem.d_v}"
            yield Refusal(widths, f"widths up to {MAX_HEAD_WIDTH} fit a thread's stack")
        nodes = sum(len(walk(formula)) for formula in (problem.mask, problem.score) if formula is not None)
        if nodes > MAX_FORMULA_NODES:
            yield Refusal(f"formulas of {nodes} nodes take too long to compile", "store their values in a table")
        if importlib.util.find_spec("llvmlite") is None:
            yield Refusal("llvmlite is not installed", "pip install llvmlite")

    def cost(self, problem: Problem) -> float:
        return 1.0

    def run(self, problem: Problem, threads: int | None = None) -> Result:
        from .launch.forward import run

        return run(problem, threads, self.processor)

    def sources(self, problem: Problem) -> dict[str, str]:
        from .launch.forward import source

        return {"forward": source(problem, self.processor)}

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        yield from self.refuses(problem)
        if 0 in problem.extent:
            yield Refusal(f"no pairs: (B, H, n, m) = {problem.extent}", "give at least one batch, head, query and key")

    def backward(
        self,
        problem: Problem,
        d_output: Any,
        d_lse: Any,
        saved: tuple[Any, Any],
        wanted_tables: Collection[int],
        threads: int | None = None,
        statistic_gradients: StatisticGradients | None = None,
    ) -> Gradients | None:
        if next(self.refuses_backward(problem, wanted_tables), None) is not None:
            return None
        statistic_gradients = statistic_gradients or StatisticGradients()
        if statistic_gradients.includes_zero_weights:  # the kernel cannot tell a visible weight of 0 from a hidden pair
            return None
        from .launch.backward import backward

        return backward(problem, d_output, d_lse, saved, wanted_tables, threads, statistic_gradients, self.processor)
