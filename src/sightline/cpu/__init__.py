"""The CPU kernels, generated through LLVM for the processor at hand. llvmlite is imported when a kernel first runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from typing import Any

from ..arrays.layouts import Tensors
from ..call.call_cache import LOOKUP, Entry, Operands
from ..call.kernel import GivenGradients, Gradients, Kernel, Refusal, Result, Tangents, refuse_no_pairs, refuse_sizes
from ..call.problem import Problem
from ..call.request import Request
from ..statistics import Statistic
from .runtime.processor import HOST, Processor

__all__ = ["Cpu"]

# the largest d_k and the largest d_v: each component takes up to 1,280 bytes of a thread's scratch
MAX_HEAD_WIDTH = 1024


class Cpu(Kernel):
    """The kernel `cpu`: forward and backward pass in every dtype, with code generated for the problem's formulas."""

    name = "cpu"
    description = "generated through LLVM for this processor, O(n) memory"

    def __init__(self, processor: Processor = HOST) -> None:
        self.processor = processor

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        if not problem.framework.has_memory:
            yield Refusal(f"arrays of {problem.framework.name}", "convert them by numpy.asarray or torch.from_dlpack")
        elif problem.device != "cpu":
            yield Refusal(f"arrays on {problem.device}", "move them to the CPU")
        yield from refuse_sizes(
            problem, MAX_HEAD_WIDTH, f"use widths up to {MAX_HEAD_WIDTH}; the streaming kernel serves larger widths"
        )
        if importlib.util.find_spec("llvmlite") is None:
            yield Refusal("llvmlite is not installed", "pip install llvmlite")

    def cost(self, problem: Problem) -> float:
        return 1.0

    def cost_reason(self, problem: Problem) -> str:
        if problem.row_formats is None:
            return ""
        from .kernels.decode_rows import find_pairs
        from .launch.product_rates import machine_for

        machine, names = machine_for(self.processor, problem.dtype), {"i16": "int16", "bfloat": "bfloat16"}
        pairs = [find_pairs(problem.dtype, rows, machine) for rows in problem.row_formats]
        kinds = [names.get(str(kind), "float32") for kind in pairs]
        return "few queries are multiplied with keys in {}, weights with values in {}".format(*kinds)

    def describe_statistic(self, problem: Problem, statistic: Statistic) -> str:
        from .launch.weights_pass import MAX_TOP_K, can_serve

        if statistic.fused_role:
            return "computed with the output"
        if can_serve(problem, statistic):
            return "a second pass over the tiles"
        reason = f" (up to k = {MAX_TOP_K}, a second pass)" if statistic.k else ""
        return super().describe_statistic(problem, statistic) + reason

    def run(self, problem: Problem) -> Result:
        from .launch.forward import run

        return run(problem, self.processor)

    def sources(self, problem: Problem) -> dict[str, str]:
        from .launch.forward import source

        return {"forward": source(problem, self.processor)}

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        yield from self.refuses(problem)
        yield from refuse_no_pairs(problem)

    def backward(self, problem: Problem, given: GivenGradients) -> Gradients | None:
        # the backward kernel cannot tell a visible pair whose weight is 0 from a hidden pair
        is_refused = next(self.refuses_backward(problem, given.wanted_tables), None) is not None
        if is_refused or given.statistics.includes_zero_weights:
            return None
        from .launch import backward

        run = backward.backward_in_parts if backward.needs_parts(problem, given) else backward.backward
        return run(problem, given, self.processor)

    def tangent(self, problem: Problem, tangents: Tangents, saved: tuple[Any, Any]) -> tuple[Any, Any] | None:
        if next(self.refuses_backward(problem), None) is not None:
            return None
        from .launch.forward import tangent

        return tangent(problem, tangents, saved, self.processor)


def _make_find_or_run(tensors: Tensors) -> Any:
    from .calls.python_functions import make_find_or_run

    return make_find_or_run(tensors)


def _find_relative(request: Request, operands: Operands) -> Entry | None:
    from .launch.forward_entry import find_relative

    return find_relative(request, operands)


LOOKUP.make_find_or_run, LOOKUP.find_relative = _make_find_or_run, _find_relative
