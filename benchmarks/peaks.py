"""Peak rates of the host's CPU, measured with generated kernels. A share of a peak is a rate divided by the peak.

    float32, float64   independent chains of fused multiply-adds in registers, 2 FLOPs per lane
    bfloat16           chains of AVX-512's dot product of pairs, 4 FLOPs per float32 lane; the float32 peak if it is
                       higher, since a kernel may widen to float32 and some processors do only a quarter as many dot
                       products as multiply-adds per cycle
    read               the sum of a buffer far larger than the caches, in bytes read

Every peak is measured with as many threads as the contenders use. Tries follow one another without a pause. The fastest
counts, since a disturbance only makes a try slower. In every round of a problem, the rate is divided by the peak that
is measured in that round, because the bandwidth of a shared machine changes. The reported share is the median.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from sightline.cpu.runtime import thread_team as team

TRIES = 7
TRY_SECONDS = 0.03  # shortest time of a try: longer than threads take to start, shorter than a scheduler's time slice
BUFFER_BYTES = 1 << 28  # size of the buffer that is summed: 256 MiB, several times the caches of a processor
PIECE_BYTES = 1 << 20  # size of the piece of the buffer that a thread takes at a time
UNITS = dict.fromkeys(("float32", "float64", "bfloat16", "matmul"), "FLOP/s") | dict.fromkeys(("read", "copy"), "B/s")


@dataclass
class Peaks:
    """The peaks of a device: the highest rates that it reaches with a number of threads.

    Each peak has a name. `measure(name)` measures the peak, and `best` has the rates that were found.
    """

    threads: int = 1
    best: dict[str, float] = field(default_factory=dict)  # highest rate so far, by the name of the peak, in `UNITS`
    _tries: dict[str, Callable[[], float]] = field(default_factory=dict, repr=False)
    names: ClassVar[tuple[str, ...]] = ("float32", "float64", "bfloat16", "read")

    def measured_name(self, name: str) -> str:
        """Return the name of the peak that is measured for the peak `name`.

        This is "float32" for a 16-bit format without a dot product on this machine, since kernels widen the format.
        """
        if name == "bfloat16":
            from sightline.cpu.runtime.machine import host

            return name if host().has_bf16_dot else "float32"
        return "float32" if name == "float16" else name

    def measure(self, name: str, tries: int = TRIES) -> float:
        """Run `tries` more tries of a peak, and return the highest rate of these tries."""
        name = self.measured_name(name)
        if name not in self._tries:
            self._tries[name] = self._prepare_try(name)
        rate = max(self._tries[name]() for _ in range(tries))
        if name == "bfloat16":
            rate = max(rate, self.measure("float32", tries))
        self.best[name] = max(rate, self.best.get(name, 0.0))
        return rate

    def _prepare_try(self, name: str) -> Callable[[], float]:
        """Return a function that makes one try of the peak and returns the try's rate."""
        return _bandwidth_try(self.threads) if name == "read" else _flops_try(name, self.threads)


def kernel_instructions() -> str:
    """Return the instruction set of generated kernels, which the environment variable SIGHTLINE_CPU may restrict."""
    from sightline.cpu.runtime.machine import host

    machine = host()
    name = {64: "AVX-512", 32: "AVX2"}.get(machine.vector_bytes, "SSE2")
    return "NEON" if machine.architecture == "aarch64" else name + "-BF16" * machine.has_bf16_dot


def _flops_try(name: str, threads: int) -> Callable[[], float]:
    """Return a function that makes one try of a loop of independent instructions and returns its rate in FLOP/s."""
    from sightline.cpu.kernels.rate_loops import make_product_loop
    from sightline.cpu.runtime.compile import compile_module
    from sightline.cpu.runtime.machine import host

    loop = make_product_loop(name, host())
    address = compile_module(loop.module, host(), "products")
    ones = np.ones(64, np.float64)
    sink = np.zeros(64, np.float64)
    arguments = np.array([1, ones.ctypes.data, sink.ctypes.data], np.int64)

    def run_once() -> float:
        started = time.perf_counter()
        team.call(address, arguments, threads, (ones, sink))
        return time.perf_counter() - started

    while run_once() < TRY_SECONDS:
        arguments[0] *= 2
    return lambda: float(arguments[0]) * loop.flops * threads / run_once()


def _bandwidth_try(threads: int) -> Callable[[], float]:
    """Return a function that makes one try of summing a large buffer and returns its rate in bytes/s.

    A shared counter tells each thread which piece of the buffer to sum next.
    """
    from sightline.cpu.runtime.compile import compile_module
    from sightline.cpu.runtime.machine import host

    address = compile_module(_sum_loop(host().vector_bytes), host(), "read")
    buffer, counter, sink = np.ones(BUFFER_BYTES // 8), np.zeros(1, np.int64), np.zeros(64)
    arguments = np.array([x.ctypes.data for x in (counter, buffer, sink)] + [BUFFER_BYTES // PIECE_BYTES], np.int64)

    def run_once() -> float:
        counter[0] = 0
        started = time.perf_counter()
        team.call(address, arguments, threads, (buffer, counter, sink))
        return BUFFER_BYTES / (time.perf_counter() - started)

    run_once()
    return run_once


def _sum_loop(width: int) -> Any:
    """Return an LLVM module with the loop: while (k = counter++) < number of pieces, sum piece k of the buffer.

    The threads share the counter. Each sum has 16 independent chains, which hide the latency of an addition.
    `width` is a vector's bytes.
    """
    from sightline.cpu.codegen.builder import Builder, Module, Variable
    from sightline.cpu.codegen.values import FLOAT, INT64, POINTER, vector

    kind, chains = vector(FLOAT, width // 4), 16
    builder = Builder(Module(), "read")
    (arguments,) = builder.arguments
    counter, buffer = arguments.load(POINTER), arguments.at(8).load(POINTER)
    sums = [Variable(builder, kind, 0) for _ in range(chains)]
    with builder.infinite_loop() as break_if:
        piece = builder.atomic_increment(counter)
        break_if(piece >= arguments.at(24).load(INT64))
        start = buffer.at(piece * PIECE_BYTES)
        with builder.loop(0, PIECE_BYTES, chains * width) as at:
            for k, each in enumerate(sums):
                each.set(each.get() + start.at(at + k * width).load(kind))
    total = functools.reduce(operator.add, (each.get() for each in sums))
    arguments.at(16).load(POINTER).store(total)
    builder.finish()
    return builder.module
