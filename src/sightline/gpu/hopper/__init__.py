"""The forward kernel for Hopper's GPUs (sm_90), its warps specialised.

It has never run on one: it compiles for them, and its own code has run on a machine of NumPy
(tests/helpers/gluon_interpreter.py), which knows its barriers and its arithmetic and nothing of its speed. So no plan
takes it by itself; `sightline.tune(..., specialise=True)` tries it, on the machine at hand, and later calls take it
where it was found right and faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...kernel import Refusal
from ...problem import Problem
from ..kernels.meta_parameters import padded_width
from ..tuning.configurations import Configuration
from ..version import triton_version

__all__ = ["candidate_configurations", "refuses"]

MIN_TRITON_VERSION = (3, 9)  # whose Gluon has the words the kernel is written in
TMA_ALIGNMENT = 16  # bytes: what the tensor memory accelerator asks of addresses and steps between rows


def refuses(problem: Problem) -> Iterator[Refusal]:
    """Every reason the kernel cannot serve a problem that the Triton kernel serves; none means that it can."""
    if triton_version() < MIN_TRITON_VERSION:
        found, least = (".".join(map(str, version)) for version in (triton_version(), MIN_TRITON_VERSION))
        yield Refusal(f"triton {found}", f"take triton {least} or later")
    if problem.dtype not in ("bfloat16", "float16"):
        yield Refusal(f"{problem.dtype}", "bfloat16 or float16")
    if padded_width(problem.d_k) != padded_width(problem.d_v) or problem.d_k > 256:
        yield Refusal(f"d_k {problem.d_k}, d_v {problem.d_v}", "widths up to 256 with the same next power of two")
    if problem.d_v % (TMA_ALIGNMENT // 2):
        yield Refusal(f"d_v {problem.d_v}", f"rows of a multiple of {TMA_ALIGNMENT} bytes")
    if not problem.n or not problem.m:
        yield Refusal(f"{problem.n} queries, {problem.m} keys", "one of each at least")
    if problem.scale <= 0:
        yield Refusal(f"scale {problem.scale}", "a scale above 0")
    if problem.dropout:
        yield Refusal("dropout", "dropout=0")
    if problem.see:
        yield Refusal("statistics, which may ride along", "see=()")
    for name in ("query", "key", "value"):
        yield from _tma_refusals(name, getattr(problem, name))


def _tma_refusals(name: str, array: Any) -> Iterator[Refusal]:
    """Why the tensor memory accelerator cannot copy tiles of an array."""
    from ..launch.arguments import to_operand

    _, lengths, strides, *inner = to_operand(array)
    if len(lengths) > 1:
        yield Refusal(f"{name} with leading axes that do not lie one in the other", "one batch axis")
    if inner[-1] != 1 and array.shape[-1] != 1:
        yield Refusal(f"{name} with a step of {inner[-1]} between columns", "columns one beside the other")
    size = array.element_size()
    steps = [*strides, *(step for step, length in zip(inner[:-1], array.shape[-3:-1], strict=True) if length > 1)]
    if array.data_ptr() % TMA_ALIGNMENT or any(step * size % TMA_ALIGNMENT or step <= 0 for step in steps):
        yield Refusal(
            f"{name} of steps {steps} at an address that is {array.data_ptr() % TMA_ALIGNMENT} over a multiple of {TMA_ALIGNMENT}",
            f"an address and steps of multiples of {TMA_ALIGNMENT} bytes, above 0",
        )


def candidate_configurations(problem: Problem) -> tuple[Configuration, ...]:
    """Sizes to choose from, none measured; the first spills least.

    A group's 64 rows of S and O and its weights lie in registers, beside what a score formula needs.
    """
    width, has_score = padded_width(problem.d_k), problem.score is not None
    if width == 256:
        found = [Configuration(128, 64, 4, 2), Configuration(128, 32, 4, 3)]
    elif width == 128:
        found = [Configuration(128, 128, 4, 2), Configuration(128, 64, 4, 3)]
    else:
        return Configuration(128, 128, 4, 3), Configuration(128, 128, 4, 2)
    return tuple(found[::-1] if has_score else found)
