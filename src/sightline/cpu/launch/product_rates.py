"""The choice between two kernels for bfloat16: dot products of bfloat16 pairs, or multiply-adds of float32.

AVX-512's dot product of pairs has two multiply-adds per lane, and most processors make as many dot products as
multiply-adds per cycle. Processors that make fewer than half as many run kernels that widen bfloat16 to float32.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..kernels.rate_loops import NAME, make_product_loop
from ..runtime.machine import Machine
from ..runtime.processor import HOST, Processor
from ..runtime.thread_team import KERNEL_FUNCTION

TRIES = 5  # the highest rate of all tries counts, because a disturbance only makes a try slower
STEPS = 1 << 12  # steps of the loop in a try, which takes about 0.2 ms


def machine_for(processor: Processor, dtype: str) -> Machine:
    """Return the machine for which kernels of this dtype are generated.

    For bfloat16, it has no instruction for dot products of pairs if `prefers_widening`.
    """
    machine = processor.machine
    if dtype == "bfloat16" and processor is HOST and machine.has_bf16_dot and prefers_widening(machine):
        return machine.without_bf16_dot
    return machine


def prefers_widening(machine: Machine) -> bool:
    """True if this processor makes fewer FLOPs per second by dot products of pairs than by multiply-adds.

    The measurement takes about 5 ms, once in a process. If several threads measure at once, the first answer counts for
    all. The answer may differ between processes, and then so may the last bits of bfloat16 results.
    """
    if machine not in _ANSWERS:
        _ANSWERS.setdefault(machine, _measure(machine))  # `setdefault` is atomic
    return _ANSWERS[machine]


_ANSWERS: dict[Machine, bool] = {}


def _measure(machine: Machine) -> bool:
    loops = {dtype: _prepare(dtype, machine) for dtype in ("bfloat16", "float32")}
    rates = {dtype: max(measure() for _ in range(TRIES)) for dtype, measure in loops.items()}
    return bool(rates["bfloat16"] < rates["float32"])


def _prepare(dtype: str, machine: Machine) -> Any:
    """Return a function that makes one try, and returns FLOPs per second."""
    loop = make_product_loop(dtype, machine)
    address = HOST.kernel(f"product loop {dtype}", NAME, lambda: loop.module)
    ones, sums = np.ones(64), np.zeros(64)
    arguments = np.array([STEPS, ones.ctypes.data, sums.ctypes.data], np.int64)
    function = KERNEL_FUNCTION(address)

    def measure(_keep: Any = (address, ones, sums)) -> float:
        started = time.perf_counter()
        function(arguments.ctypes.data)
        return STEPS * loop.flops / (time.perf_counter() - started)

    return measure
