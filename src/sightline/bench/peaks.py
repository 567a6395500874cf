"""What this machine can do at most, measured by kernels generated for it: the number every share is taken of.

    float32, float64   independent chains of fused multiply-adds in registers, 2 FLOPs a lane
    bfloat16           the same of AVX-512's dot product of pairs, 4 FLOPs a float32 lane; float32's where that is more,
                       since a kernel may widen, and some processors have a quarter of the dot products a cycle
    read               a buffer far larger than the caches, summed

All on as many threads as the contenders get. A peak is the best of all tries of a run, since whatever disturbs a try
only makes it slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..cpu.runtime import thread_team as team

__all__ = ["UNITS", "Peaks", "has_bfloat16_dot"]

TRIES = 7
SECONDS = 0.03  # of one try: longer than threads take to wake, shorter than a scheduler's patience
BUFFER = 1 << 28  # bytes summed: 256 MiB, several times the caches of a processor
PIECE = 1 << 20  # bytes a thread takes at a time
UNROLLED = 4
DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
UNITS = {"float32": "FLOP/s", "float64": "FLOP/s", "bfloat16": "FLOP/s", "read": "B/s"}
UNITS |= {"matmul": "FLOP/s", "copy": "B/s"}  # of a GPU: `cuda`


@dataclass
class Peaks:
    """Peaks of this machine on a number of threads; an entry is measured when first asked for."""

    threads: int = 1
    best: dict[str, float] = field(default_factory=dict)  # in `UNITS`
    _tries: dict[str, Callable[[], float]] = field(default_factory=dict, repr=False)
    names: ClassVar[tuple[str, ...]] = ("float32", "float64", "bfloat16", "read")

    def entry(self, name: str) -> str:
        """The peak that stands for a name: 16-bit formats without a dot product of their own are widened to float32."""
        return "float32" if name == "float16" or (name == "bfloat16" and not has_bfloat16_dot()) else name

    def measure(self, name: str, tries: int = TRIES) -> float:
        """The best so far, after that many more tries."""
        name = self.entry(name)
        if name not in self._tries:
            self._tries[name] = self._prepared(name)
        found = max(self._tries[name]() for _ in range(tries))
        if name == "bfloat16":
            found = max(found, self.measure("float32", tries))
        self.best[name] = max(found, self.best.get(name, 0.0))
        return self.best[name]

    def _prepared(self, name: str) -> Callable[[], float]:
        """One try, ready to be made."""
        return _reading(self.threads) if name == "read" else _computing(name, self.threads)


def has_bfloat16_dot() -> bool:
    """Whether the processor has AVX-512's dot product of bfloat16 pairs."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("avx512bf16"))


def _computing(name: str, threads: int) -> Callable[[], float]:
    """One try of a loop of independent instructions: FLOP/s."""
    from ..cpu.runtime.compile import compile_module
    from ..cpu.runtime.machine import host

    chains = host().registers - 4  # two operands and some room
    if name == "bfloat16":
        module, lanes, flops = _dots(chains), 16, 4
    else:
        lanes, flops = host().width // np.dtype(name).itemsize, 2
        module = _multiply_adds(name, chains, lanes)
    address = compile_module(module, host(), "peak")
    ones = np.ones(64, np.float64)
    sink = np.zeros(64, np.float64)
    words = np.array([1, ones.ctypes.data, sink.ctypes.data], np.int64)

    def once() -> float:
        started = time.perf_counter()
        team.call(address, words, threads, (ones, sink))
        return time.perf_counter() - started

    while once() < SECONDS:
        words[0] *= 2
    return lambda: float(words[0]) * chains * UNROLLED * lanes * flops * threads / once()


def _multiply_adds(name: str, chains: int, lanes: int) -> Any:
    """for _ in range(words[0]): every chain = chain · x + x, so many times, x read from words[1]."""
    from llvmlite import ir

    from ..cpu.codegen.builder import DOUBLE, FLOAT, INT64, POINTER, Code, Variable, vector

    kind = vector({"float32": FLOAT, "float64": DOUBLE}[name], lanes)
    code = Code(ir.Module("peak"), "peak")
    (words,) = code.arguments
    x = words.at(8).load(POINTER).load(kind)
    sums = [Variable(code, kind, 0) for _ in range(chains)]
    with code.loop(0, words.load(INT64)):
        for _ in range(UNROLLED):
            for each in sums:
                each.set(code.fma(each.get(), x, x))
    total = sums[0].get()
    for each in sums[1:]:
        total = total + each.get()
    words.at(16).load(POINTER).store(total)
    code.finish()
    return code.module


def _dots(chains: int) -> str:
    """The same loop of dot products, as LLVM's text: llvmlite has no type for bfloat."""
    rows, names = [], [f"%s{k}" for k in range(chains)]
    for turn in range(UNROLLED):
        for name in names:
            before = f"{name}.in" if turn == 0 else f"{name}.{turn - 1}"
            rows.append(
                f"  {name}.{turn} = call <16 x float> @{DOT}(<16 x float> {before}, <32 x bfloat> %x, <32 x bfloat> %x)"
            )
    phis = [
        f"  {name}.in = phi <16 x float> [ zeroinitializer, %entry ], [ {name}.{UNROLLED - 1}, %loop ]"
        for name in names
    ]
    total, totals = f"{names[0]}.{UNROLLED - 1}", []
    for name in names[1:]:
        totals.append(f"  {name}.t = fadd <16 x float> {total}, {name}.{UNROLLED - 1}")
        total = f"{name}.t"
    return "\n".join(
        [
            f"declare <16 x float> @{DOT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)",
            "define void @peak(ptr %words) {",
            "entry:",
            "  %count = load i64, ptr %words",
            "  %places = getelementptr i8, ptr %words, i64 8",
            "  %source = load ptr, ptr %places",
            "  %x = load <32 x bfloat>, ptr %source, align 1",
            "  br label %loop",
            "loop:",
            "  %k = phi i64 [ 0, %entry ], [ %next, %loop ]",
            *phis,
            *rows,
            "  %next = add i64 %k, 1",
            "  %more = icmp slt i64 %next, %count",
            "  br i1 %more, label %loop, label %done",
            "done:",
            *totals,
            "  %after = getelementptr i8, ptr %words, i64 16",
            "  %sink = load ptr, ptr %after",
            f"  store <16 x float> {total}, ptr %sink, align 1",
            "  ret void",
            "}",
        ]
    )


def _reading(threads: int) -> Callable[[], float]:
    """One try of summing the buffer, its pieces handed out by a counter: bytes/s."""
    from ..cpu.runtime.compile import compile_module
    from ..cpu.runtime.machine import host

    address = compile_module(_sums(host().width), host(), "read")
    buffer, counter, sink = np.ones(BUFFER // 8), np.zeros(1, np.int64), np.zeros(64)
    words = np.array([x.ctypes.data for x in (counter, buffer, sink)] + [BUFFER // PIECE], np.int64)

    def once() -> float:
        counter[0] = 0
        started = time.perf_counter()
        team.call(address, words, threads, (buffer, counter, sink))
        return BUFFER / (time.perf_counter() - started)

    once()
    return once


def _sums(width: int) -> Any:
    """while (k = counter++) < pieces: add up piece k, in as many sums as hide an addition's latency."""
    from llvmlite import ir

    from ..cpu.codegen.builder import FLOAT, INT64, POINTER, Code, Variable, vector

    kind, chains = vector(FLOAT, width // 4), 16
    code = Code(ir.Module("read"), "read")
    (words,) = code.arguments
    counter, buffer = words.load(POINTER), words.at(8).load(POINTER)
    sums = [Variable(code, kind, 0) for _ in range(chains)]
    with code.forever() as leave:
        piece = code.increment(counter)
        leave(piece >= words.at(24).load(INT64))
        start = buffer.at(piece * PIECE)
        with code.loop(0, PIECE, chains * width) as at:
            for k, each in enumerate(sums):
                each.set(each.get() + start.at(at + k * width).load(kind))
    total = sums[0].get()
    for each in sums[1:]:
        total = total + each.get()
    words.at(16).load(POINTER).store(total)
    code.finish()
    return code.module
