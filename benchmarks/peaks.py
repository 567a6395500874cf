"""The contender "peak": the time that a problem's FLOPs or bytes take at the highest rate of the processor.

    float32    independent chains of fused multiply-adds in registers, 2 FLOPs per lane
    bfloat16   chains of AVX-512's dot product of pairs, 4 FLOPs per float32 lane; the chains of float32 if the
               processor has no such product, or if its products are slower
    bytes      the sum of 256 MiB by torch, in bytes read

A peak is measured with as many threads as the contenders use, and in every round of a problem, because the bandwidth of
a shared machine changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from timeit import repeat
from typing import Any

import numpy as np

from sightline.cpu.launch.product_rates import PRODUCT_LOOP, machine_for, make_product_loop
from sightline.cpu.runtime import thread_team as team
from sightline.cpu.runtime.machine import host
from sightline.cpu.runtime.processor import HOST

from .core import Call, Contender, Problem

SECONDS = 0.03  # shortest time of a loop: longer than threads take to start, shorter than a scheduler's time slice
BUFFER_BYTES = 1 << 28  # size of the buffer that is summed, several times the caches of a processor


def kernel_instructions() -> str:
    """Return the instruction set of generated kernels, which the environment variable SIGHTLINE_CPU may restrict."""
    machine = host()
    name = {64: "AVX-512", 32: "AVX2"}.get(machine.vector_bytes, "SSE2")
    return "NEON" if machine.architecture == "aarch64" else name + "-BF16" * machine.has_bf16_dot


def product_loop(dtype: str, threads: int) -> tuple[Callable[[], Any], float]:
    """Return a function that makes products of a dtype in registers for `SECONDS`, and its FLOPs."""
    has_products = dtype == "bfloat16" and machine_for(HOST, dtype).has_bf16_dot
    factor = "bfloat16" if has_products else "float32"
    module, flops = make_product_loop(factor, host())
    address = HOST.kernel(f"product loop {factor}", PRODUCT_LOOP, lambda: module)
    ones, sink = np.ones(64), np.zeros(64)
    arguments = np.array([1, ones.ctypes.data, sink.ctypes.data], np.int64)
    run = partial(team.call, address, arguments, threads, (ones, sink))
    while min(repeat(run, number=1, repeat=3)) < SECONDS:
        arguments[0] *= 2
    return run, float(arguments[0]) * flops * threads


def prepare_peak(problem: Problem, inputs: Any, threads: int) -> Call:
    """Prepare work at the highest rate, whose time is multiplied by the problem's share of this work."""
    import torch

    buffer: Any = torch.ones(BUFFER_BYTES // 4) if problem.unit == "B/s" else None
    run, work = product_loop(problem.dtype, threads) if buffer is None else (buffer.sum, BUFFER_BYTES)
    return Call(lambda _: run(), factor=problem.work / work)


PEAK = Contender("peak", prepare_peak, is_checked=False, has_arena=True)
