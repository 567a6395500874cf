"""Kernels in Triton for torch tensors on CUDA and ROCm devices. Importing this module does not import triton."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..call.kernel import GivenGradients, Gradients, Kernel, Refusal, Result
from ..call.problem import Problem
from ..statistics import Statistic, unwrap_mean
from ..statistics.dispatch import computed_statistic
from .refusals import refuse_backward, refuse_forward

__all__ = ["Triton"]


class Triton(Kernel):
    """Compute the forward and the backward pass in every dtype. Mask and score are compiled into the Triton kernels.

    Parameters
    ----------
    architecture : str, optional
        The architecture that tile sizes are chosen for: "sm_90", "gfx942", .... The default is the architecture of the
        tensors' device. Only tests, which compile kernels ahead of time, combine a GPU architecture with tensors on the
        CPU. "interpreter" serves tensors on the CPU, and requires that TRITON_INTERPRET=1 was set before triton was
        imported.
    """

    name = "triton"
    description = "generated through Triton for this device, O(n) memory"

    def __init__(self, architecture: str | None = None) -> None:
        self.architecture = architecture

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        return refuse_forward(problem, self.architecture)

    def cost(self, problem: Problem) -> float:
        return 1.0

    def sources(self, problem: Problem) -> dict[str, str]:
        from .codegen.formula_functions import render_sources

        return render_sources(problem)

    def describe_statistic(self, problem: Problem, statistic: Statistic) -> str:
        from .launch.weights_pass import can_serve

        if unwrap_mean(statistic).fused_role:
            return "computed with the output"
        is_served = can_serve(problem, computed_statistic(statistic))
        return "a second pass over the tiles" if is_served else super().describe_statistic(problem, statistic)

    def run(self, problem: Problem, threads: int | None = None) -> Result:
        from .launch.forward import run

        return run(problem, self.architecture)

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        return refuse_backward(problem, self.architecture, wanted_tables)

    def backward(self, problem: Problem, given: GivenGradients, threads: int | None = None) -> Gradients | None:
        if next(self.refuses_backward(problem, given.wanted_tables), None) is not None:
            return None
        from .launch.backward import backward

        return backward(problem, given, self.architecture)
