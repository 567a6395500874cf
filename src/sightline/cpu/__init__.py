"""Kernels generated through LLVM for the processor they run on. llvmlite loads when the first one is made."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from typing import Any

from ..formula.expression import walk
from ..kernel import Gradients, Kernel, Refusal, Result
from ..problem import Problem
from ..statistics import Slopes
from .runtime.processor import HOST, Processor

__all__ = ["Cpu"]


WIDEST = 1024  # of d_k and d_v: their scratch, 256 bytes a component each, lies on a thread's stack
LONGEST = 400  # parts of mask and score: LLVM takes about 10 ms for each


class Cpu(Kernel):
    """Forward and backward in every dtype, generated for the formula."""

    name = "cpu"
    describes = "generated through LLVM for this processor, O(n) memory"

    def __init__(self, processor: Processor = HOST) -> None:
        self.processor = processor

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Other devices, rows and formulas too large, and a machine without llvmlite."""
        if problem.device != "cpu":
            yield Refusal(f"arrays on {problem.device}", "move them to the CPU")
        if max(problem.d_k, problem.d_v) > WIDEST:
            yield Refusal(f"d_k {problem.d_k}, d_v {problem.d_v}", f"widths up to {WIDEST} fit a thread's stack")
        parts = sum(len(walk(formula)) for formula in (problem.mask, problem.score) if formula is not None)
        if parts > LONGEST:
            yield Refusal(f"formulas of {parts} parts would compile for long", "put what they compute into a table")
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

    def gradients(
        self,
        problem: Problem,
        d_output: Any,
        d_lse: Any,
        saved: tuple[Any, Any],
        wanted: Collection[int],
        threads: int | None = None,
        slopes: Slopes | None = None,
    ) -> Gradients | None:
        if 0 in problem.extent or next(self.refuses(problem), None) is not None:
            return None
        if slopes is not None and slopes.everywhere:  # the kernel takes a pair of no weight for a hidden one
            return None
        from .launch.backward import gradients

        return gradients(problem, d_output, d_lse, saved, wanted, threads, slopes or Slopes(), self.processor)
