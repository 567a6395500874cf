"""The choice between two kernels for bfloat16: dot products of bfloat16 pairs, or multiply-adds of float32.

AVX-512's dot product of pairs has two multiply-adds per lane, and most processors make as many dot products as
multiply-adds per cycle. Processors that make fewer than half as many run kernels that widen bfloat16 to float32.
"""

from __future__ import annotations

import functools
import operator
import time

import numpy as np

from ..codegen.builder import Builder, Module, Variable
from ..codegen.register_tile import RegisterTiles
from ..codegen.values import BFLOAT, DOUBLE, FLOAT, INT64, POINTER
from ..runtime.machine import Machine
from ..runtime.processor import HOST, Processor
from ..runtime.thread_team import KERNEL_FUNCTION

PRODUCT_LOOP = "products"  # a function whose arguments are a number of steps, the address of x, and that of the sums
STEPS_PER_ROUND = 4
TRIES = 5  # the highest rate of all tries counts, because a disturbance only makes a try slower
LOOP_STEPS = 1 << 12  # steps of the loop in a try, which takes about 0.2 ms


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
        # `setdefault` is atomic
        _ANSWERS.setdefault(machine, measure_rate("bfloat16", machine) < measure_rate("float32", machine))
    return _ANSWERS[machine]


_ANSWERS: dict[Machine, bool] = {}


def measure_rate(dtype: str, machine: Machine) -> float:
    """Return the FLOPs per second of the product loop, the highest of `TRIES`."""
    module, flops = make_product_loop(dtype, machine)
    address = HOST.kernel(f"product loop {dtype}", PRODUCT_LOOP, lambda: module)
    ones, sums = np.ones(64), np.zeros(64)
    arguments = np.array([LOOP_STEPS, ones.ctypes.data, sums.ctypes.data], np.int64)
    function, seconds = KERNEL_FUNCTION(address), []
    for _ in range(TRIES):
        started = time.perf_counter()
        function(arguments.ctypes.data)
        seconds.append(time.perf_counter() - started)
    return LOOP_STEPS * flops / min(seconds)


def make_product_loop(dtype: str, machine: Machine) -> tuple[Module, int]:
    """Return (module of a loop, FLOPs of a step). The loop makes dot products for bfloat16, else multiply-adds.

    A chain is a vector c, and one step computes c + x · x. Each round makes STEPS_PER_ROUND steps of every chain.
    """
    builder = Builder(Module(), PRODUCT_LOOP)
    chains = machine.vector_registers - 4  # the other registers are for operands
    kind, pairs = DOUBLE if dtype == "float64" else FLOAT, BFLOAT if dtype == "bfloat16" else None
    tiles = RegisterTiles(builder, kind, machine, pairs)
    (arguments,) = builder.arguments
    x = arguments.at(8).load(POINTER).load(tiles.operand_vector)
    sums = [Variable(builder, tiles.sum_vector, 0) for _ in range(chains)]
    with builder.loop(0, arguments.load(INT64)):
        for _ in range(STEPS_PER_ROUND):
            for each in sums:
                each.set(tiles.multiply_add(x, x, each.get()))
    total = functools.reduce(operator.add, (each.get() for each in sums))
    arguments.at(16).load(POINTER).store(total)
    builder.finish()
    return builder.module, chains * STEPS_PER_ROUND * tiles.lanes * tiles.pair_size * 2
