"""A GPU as the device of a run: CUDA events time the calls.

torch for ROCm has the functions used here under the names that torch for CUDA gives them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sightline.errors import DeviceError

from .core import Call, Contender, Problem
from .measure import Cpu

MATRIX_SIZE = 8192  # number of rows and of columns of the matrices whose product is the peak in FLOP/s
COPY_BYTES = 1 << 32  # bytes whose copy is the peak in bytes/s, far more than any cache holds
FLUSH_BYTES = 1 << 28  # bytes that a flush writes before a call, so that the inputs of the call are in no cache
HEAD_START_FLUSHES = 40  # flushes at the start of a turn; they take milliseconds, in which the host queues the calls


class Gpu(Cpu):
    """torch's current CUDA device. `device` and `runtime` replace "cuda" and `torch.cuda` in tests on the CPU."""

    pause, seconds = 0.02, 2.0

    def __init__(self, threads: int, device: str = "cuda", runtime: Any = None) -> None:
        super().__init__(threads)
        self.device, self.runtime = device, runtime or require_cuda()
        self._flush_buffer: Any = None

    @property
    def description(self) -> str:
        return str(self.runtime.get_device_name())

    def synchronize(self) -> None:
        self.runtime.synchronize()

    def time(self, call: Call, repeats: int) -> float:
        """Return the mean seconds of one call, each call timed between two CUDA events.

        An untimed call and some flushes of the caches come first. While the device runs the flushes, the host queues
        the timed calls, so the result is the device's time. The host's time is included only if a call waits for the
        device.
        """
        call.run(call.setup())
        for _ in range(HEAD_START_FLUSHES):
            self._flush()
        pairs = []
        for _ in range(repeats):
            state = call.setup()
            self._flush()
            before, after = (self.runtime.Event(enable_timing=True) for _ in range(2))
            before.record()
            call.run(state)
            after.record()
            pairs.append((before, after))
            del state
        self.synchronize()
        milliseconds = float(sum(before.elapsed_time(after) for before, after in pairs))
        return milliseconds / 1e3 / repeats

    def _flush(self) -> None:
        """Replace the contents of the device's caches."""
        import torch

        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._flush_buffer.zero_()

    def memory(self, call: Call) -> None:
        """Return None: the memory on the device is not measured."""


def prepare_peak(problem: Problem, inputs: Any, threads: int) -> Call:
    """Prepare what reaches the peak of the GPU: a product of random bfloat16 matrices, or a copy for bytes/s.

    A product of zeros takes less power and would be faster. A copy counts the bytes read and the bytes written.
    """
    import torch

    if problem.unit == "B/s":
        source = torch.ones(COPY_BYTES, dtype=torch.int8, device=problem.device)
        run, work = partial(torch.empty_like(source).copy_, source), 2 * COPY_BYTES
    else:
        a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=problem.device).bfloat16() for _ in range(2))
        run, work = partial(torch.matmul, a, b), 2 * MATRIX_SIZE**3
    return Call(lambda _: run(), factor=problem.work / work)


PEAK = Contender("peak", prepare_peak, is_checked=False, has_arena=True)


def require_cuda() -> Any:
    """Return `torch.cuda`, or raise an error that says what is missing."""
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip or "built for CPUs only"
        raise DeviceError(
            f"--device cuda, but torch {torch.__version__} ({build}) sees no CUDA device",
            "a machine with a GPU and its driver (`nvidia-smi` or `rocm-smi` shows both), and torch built for the GPU",
            "run the same command on a machine with a GPU, with a torch built for it (https://pytorch.org)",
        )
    return torch.cuda
