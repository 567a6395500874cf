"""Kernels in Triton for torch tensors on CUDA and ROCm devices. Importing this module does not import triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

from ..arrays.operations import TORCH
from ..call.kernel import GivenGradients, Gradients, Kernel, Refusal, Result, refuse_no_pairs, refuse_sizes
from ..call.problem import Problem
from ..statistics import Statistic

__all__ = ["Triton"]

MAX_HEAD_WIDTH = 256  # largest d_k and largest d_v: registers and shared memory hold tiles of both widths
MIN_TRITON_VERSION = (3, 5)  # the oldest triton that compiles the kernels
MIN_TRITON_VERSION_BY_DTYPE = {"float64": (3, 8)}  # the oldest triton that multiplies float64 matrices


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
        device_type = problem.device.partition(":")[0]
        required = "cpu" if self.architecture == "interpreter" else "cuda"
        if problem.framework is not TORCH or device_type != required:
            cure = _move_cure(required) if problem.framework is TORCH else f"torch tensors on {required}"
            yield Refusal(f"{problem.framework.name} arrays on {problem.device}", cure)
        elif device_type == "cuda" and _is_too_old(problem.query.device):
            cure = "use a GPU of compute capability 8.0 or later; the streaming kernel serves this GPU"
            yield Refusal("a GPU older than compute capability 8.0", cure)
        if problem.row_formats is not None:
            yield Refusal("a quantised cache", "use a cache of floats on a GPU")
        yield from _refuse_large_sizes(problem)
        if device_type != required:
            return
        minimum = MIN_TRITON_VERSION_BY_DTYPE.get(problem.dtype, MIN_TRITON_VERSION)
        if importlib.util.find_spec("triton") is None:
            yield Refusal("triton is not installed", "pip install triton")
        elif triton_version() < minimum:
            yield Refusal(
                f"triton {'.'.join(map(str, triton_version()))} does not compile the kernels in {problem.dtype}",
                f"install triton {'.'.join(map(str, minimum))} or later, which later versions of torch include; "
                "until then the streaming kernel serves this problem",
            )

    def cost(self, problem: Problem) -> float:
        return 1.0

    def sources(self, problem: Problem) -> dict[str, str]:
        from .codegen.formula_functions import render_sources

        return render_sources(problem)

    def describe_statistic(self, problem: Problem, statistic: Statistic) -> str:
        from .launch.weights_pass import can_serve

        if statistic.fused_role:
            return "computed with the output"
        is_served = can_serve(problem, statistic, self.architecture)
        return "a second pass over the tiles" if is_served else super().describe_statistic(problem, statistic)

    def run(self, problem: Problem) -> Result:
        from .launch.forward import run

        return run(problem, self.architecture)

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        # with a given architecture the tensors may be on any device, and only the sizes are checked
        refusals = list(self.refuses(problem) if self.architecture is None else _refuse_large_sizes(problem))
        refusals += refuse_no_pairs(problem)
        yield from refusals
        if not refusals:
            from .launch.backward import refuse_tables

            yield from refuse_tables(problem, self.architecture, wanted_tables)

    def backward(self, problem: Problem, given: GivenGradients) -> Gradients | None:
        if next(self.refuses_backward(problem, given.wanted_tables), None) is not None:
            return None
        from .launch.backward import backward

        return backward(problem, given, self.architecture)


def _refuse_large_sizes(problem: Problem) -> Iterator[Refusal]:
    cure = f"use widths up to {MAX_HEAD_WIDTH}; the streaming kernel serves larger widths"
    return refuse_sizes(problem, MAX_HEAD_WIDTH, cure)


def triton_version() -> tuple[int, ...]:
    """Return the version of the installed triton as (major, minor)."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@lru_cache
def _move_cure(required_device: str) -> str:
    """Return the cure for torch tensors that are not on the device that the kernels need."""
    import torch

    built = required_device == "cpu" or torch.version.cuda or torch.version.hip
    install = "" if built else f"install a torch built for CUDA or ROCm, which {torch.__version__} is not, and "
    return f"{install}move query, key and value: .to({required_device!r})"


@lru_cache
def _is_too_old(device: Any) -> bool:
    """Return True for an NVIDIA GPU of a compute capability below 8.0.

    The matrix units of these GPUs support neither bfloat16 nor float64.
    """
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
