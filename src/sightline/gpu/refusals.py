"""The reasons why the Triton kernels refuse the forward or the backward pass of a problem."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

from ..arrays.operations import TORCH
from ..call.kernel import Refusal, refuse_no_pairs, refuse_sizes
from ..call.problem import Problem

MAX_HEAD_WIDTH = 256  # largest d_k and largest d_v: registers and shared memory hold tiles of both widths
MIN_TRITON_VERSION = (3, 5)  # the oldest triton that compiles the kernels
MIN_TRITON_VERSION_BY_DTYPE = {"float64": (3, 8)}  # the oldest triton that multiplies float64 matrices


def refuse_forward(problem: Problem, architecture: str | None) -> Iterator[Refusal]:
    """Yield every reason why the Triton kernels cannot compute the forward pass of a problem.

    The reasons are a framework other than torch, tensors on another device than the kernels need, a GPU that is too
    old, a quantised cache, head widths or formulas that are too large, and a triton that is missing or too old.
    """
    device_type = problem.device.partition(":")[0]
    required = "cpu" if architecture == "interpreter" else "cuda"
    if problem.framework is not TORCH or device_type != required:
        cure = _move_cure(required) if problem.framework is TORCH else f"torch tensors on {required}"
        yield Refusal(f"{problem.framework.name} arrays on {problem.device}", cure)
    elif device_type == "cuda" and _is_too_old(problem.query.device):
        cure = "use a GPU of compute capability 8.0 or later; the streaming kernel serves this GPU"
        yield Refusal("a GPU older than compute capability 8.0", cure)
    if problem.row_formats is not None:
        yield Refusal("a quantised cache", "use a cache of floats on a GPU")
    yield from _size_refusals(problem)
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


def refuse_backward(
    problem: Problem, architecture: str | None, wanted_tables: Collection[int] | None
) -> Iterator[Refusal]:
    """Yield every reason why the Triton kernels cannot compute the backward pass of a problem.

    The reasons are those of `refuse_forward`, a problem without pairs or with d_v = 0, and tables whose gradients the
    kernels cannot sum. If `architecture` is given, the tensors may be on any device, and of the reasons of
    `refuse_forward` only the sizes are checked.
    """
    refusals = list(refuse_forward(problem, None) if architecture is None else _size_refusals(problem))
    refusals += refuse_no_pairs(problem)
    yield from refusals
    if not refusals:
        from .launch.backward import refuse_tables

        yield from refuse_tables(problem, architecture, wanted_tables)


def _size_refusals(problem: Problem) -> Iterator[Refusal]:
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
