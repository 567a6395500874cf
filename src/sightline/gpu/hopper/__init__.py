"""The forward kernel with specialised warps, for Hopper GPUs (sm_90).

The kernel has never run on a GPU. It compiles for Hopper, and its code runs in an interpreter in NumPy
(tests/helpers/gluon_interpreter.py), which models barriers and arithmetic, but not speed. So no plan selects the kernel
by default. `sightline.tune(..., specialised=True)` tries the kernel on the GPU of the process. Later calls use the
kernel for the problems for which it was correct and faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...kernel import Refusal
from ...problem import Problem
from ..kernels.compile_time_constants import padded_width
from ..triton_version import triton_version
from ..tuning.default_configurations import Configuration

__all__ = ["candidate_configurations", "refuses"]

MIN_TRITON_VERSION = (3, 9)  # the first version of triton whose Gluon has what the kernel uses
TMA_ALIGNMENT = 16  # the tensor memory accelerator (TMA) needs addresses and strides that are multiples of 16 bytes


def refuses(problem: Problem) -> Iterator[Refusal]:
    """Yield every reason why the Hopper kernel cannot serve a problem that the ordinary forward kernel serves."""
    if triton_version() < MIN_TRITON_VERSION:
        found, minimum = (".".join(map(str, version)) for version in (triton_version(), MIN_TRITON_VERSION))
        yield Refusal(f"triton {found}", f"install triton {minimum} or later")
    if problem.dtype not in ("bfloat16", "float16"):
        yield Refusal(f"{problem.dtype}", "bfloat16 or float16")
    if padded_width(problem.d_k) != padded_width(problem.d_v) or problem.d_k > 256:
        yield Refusal(f"d_k {problem.d_k}, d_v {problem.d_v}", "widths up to 256 with the same next power of two")
    if problem.d_v % (TMA_ALIGNMENT // 2):
        yield Refusal(f"d_v {problem.d_v}", f"rows of a multiple of {TMA_ALIGNMENT} bytes")
    if not problem.n or not problem.m:
        yield Refusal(f"{problem.n} queries, {problem.m} keys", "at least one of each")
    if problem.scale <= 0:
        yield Refusal(f"scale {problem.scale}", "a scale above 0")
    if problem.dropout:
        yield Refusal("dropout", "dropout=0")
    if problem.see:
        yield Refusal("statistics, some of which the forward kernel computes", "see=()")
    for name in ("query", "key", "value"):
        yield from _tma_refusals(name, getattr(problem, name))


def _tma_refusals(name: str, array: Any) -> Iterator[Refusal]:
    """Yield every reason why the tensor memory accelerator cannot copy tiles of an array."""
    from ..launch.arguments import to_operand

    _, lengths, strides, *inner = to_operand(array)
    if len(lengths) > 1:
        yield Refusal(f"{name} with batch axes that do not merge to one stride", "one batch axis")
    if inner[-1] != 1 and array.shape[-1] != 1:
        yield Refusal(f"{name} with the stride {inner[-1]} between columns", "contiguous columns")
    size = array.element_size()
    strides = [*strides, *(step for step, length in zip(inner[:-1], array.shape[-3:-1], strict=True) if length > 1)]
    offset = array.data_ptr() % TMA_ALIGNMENT
    if offset or any(stride * size % TMA_ALIGNMENT or stride <= 0 for stride in strides):
        given = f"strides {list(strides)} of {size} bytes, and an address of {offset} modulo {TMA_ALIGNMENT}"
        yield Refusal(f"{name} with {given}", f"an address and strides of multiples of {TMA_ALIGNMENT} bytes, above 0")


def candidate_configurations(problem: Problem) -> tuple[Configuration, ...]:
    """Return the configurations of the Hopper kernel that tuning tries, first the one that spills the fewest registers.

    No configuration was measured on a GPU. Registers hold 64 rows of S, O and P for each warpgroup, and the
    intermediate results of a score formula.
    """
    width, has_score = padded_width(problem.d_k), problem.score is not None
    if width == 256:
        found = [Configuration(128, 64, 4, 2), Configuration(128, 32, 4, 3)]
    elif width == 128:
        found = [Configuration(128, 128, 4, 2), Configuration(128, 64, 4, 3)]
    else:
        return Configuration(128, 128, 4, 3), Configuration(128, 128, 4, 2)
    return tuple(found[::-1] if has_score else found)
