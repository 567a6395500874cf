"""A GPU to race on: CUDA's events time, torch's allocator counts memory, a matrix product and a copy are the peaks.

ROCm's torch answers to the same names.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from ..errors import DeviceError, MissingExtraError
from ..gpu.tuning import cache
from .cuda_benchmarks import BENCHMARKS
from .cuda_peers import make_peers
from .device import Device
from .implementations import Implementation, PreparedCall, Sightline, WithoutStatistics
from .peaks import Peaks
from .workloads import Workload

__all__ = ["Cuda", "CudaPeaks"]

MATRIX_SIZE = 8192  # rows and columns of the product
COPY_BYTES = 1 << 32  # bytes: far more than any cache
FLUSH_BYTES = 1 << 28  # bytes written before a call, so that its inputs lie in no cache
HEAD_START_FLUSHES = 40  # times that at the start of a turn: some milliseconds in which the host gets ahead
PEAK_REPEATS = 10  # products and copies of one try


class Cuda(Device):
    """torch's current CUDA device.

    Parameters
    ----------
    threads : the host's, for what it computes itself
    device : torch's name of it
    runtime : what stands in for `torch.cuda`, where tensors lie elsewhere
    options : of our own calls: the kernel raced, which is ours even where the planner would hand over to a peer
    """

    benchmarks = BENCHMARKS
    seconds = 2.0

    def __init__(
        self, threads: int, device: str = "cuda", runtime: Any = None, options: dict[str, Any] | None = None
    ) -> None:
        self.threads, self.device, self._runtime = threads, device, runtime
        options = {"kernel": "triton"} if options is None else options
        variants: tuple[Implementation, ...] = (
            Sightline(options=options, device=device),
            Sightline("planned", "Sightline, as planned", device=device),
            WithoutStatistics(options, device),
        )
        self.variants = {each.name: each for each in variants}
        self.peers = make_peers(device)
        self.peaks = CudaPeaks(device=device, time_call=self._time_call)
        self._flush_buffer: Any = None

    @property
    def runtime(self) -> Any:
        """`torch.cuda`, or what stands in for it."""
        if self._runtime is None:
            self._runtime = require_cuda()
        return self._runtime

    def check(self) -> None:
        """Raise where torch sees no device, as `require_cuda` says."""
        self.runtime  # noqa: B018

    @property
    def description(self) -> str:
        return str(self.runtime.get_device_name())

    def time_calls(self, prepared: PreparedCall, repeats: int) -> float:
        """Between CUDA events, after a call that counts for nothing and work that gives the host a lead.

        So what is timed is the device's time, unless a call waits for it: the host's share is hidden, as in a queue.
        """
        time.sleep(self.pause)
        self.synchronize()
        prepared.call(prepared.setup())
        for _ in range(HEAD_START_FLUSHES):
            self._flush()
        pairs = []
        for _ in range(repeats):
            state = prepared.setup()
            self._flush()
            pairs.append(self._record_events(partial(prepared.call, state)))
            del state
        self.synchronize()
        return float(sum(before.elapsed_time(after) for before, after in pairs)) / 1e3 / repeats  # it counts ms

    def memory(self, prepared: PreparedCall) -> int | None:
        """As torch's allocator counts; what a library takes elsewhere is not seen."""
        state = prepared.setup()
        gc.collect()
        self.synchronize()
        self.runtime.reset_peak_memory_stats()
        before = self.runtime.memory_allocated()
        result = prepared.call(state)
        self.synchronize()
        del result
        return max(int(self.runtime.max_memory_allocated()) - int(before), 0)

    def synchronize(self) -> None:
        self.runtime.synchronize()

    def prepare_for_timing(self, prepared: PreparedCall, workload: Workload) -> tuple[PreparedCall, str]:
        """Where the race asks for it, the call as a CUDA graph; a call that cannot be captured stays as it is."""
        if not workload.cuda_graph:
            return prepared, ""
        graph = self.runtime.CUDAGraph()
        try:
            for _ in range(3):  # allocations and compilations that a graph must not see
                prepared.call(prepared.setup())
            self.synchronize()
            with self.runtime.graph(graph):
                output = prepared.call(prepared.setup())
        except Exception as error:  # whatever a library does that a graph cannot hold
            self.synchronize()
            return prepared, f"not as a CUDA graph ({type(error).__name__}), so the host's time counts too"

        def replay(_: Any) -> Any:
            graph.replay()
            return output

        return replace(prepared, call=replay, setup=lambda: None), "as a CUDA graph"

    def properties(self) -> dict[str, Any]:
        """The device, what drives it, and sizes of tiles that were tuned for it."""
        import torch

        cudnn: Any = torch.backends.cudnn
        found = {"device": self.description, "cuda": torch.version.cuda, "hip": torch.version.hip}
        found |= {"cudnn": cudnn.version(), "driver": cache.environment()["driver"]}
        return found | {"tuned": cache.list_entries()}  # sizes that calls of such problems take in place of the table's

    def _record_events(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        before, after = (self.runtime.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        return before, after

    def _time_call(self, call: Callable[[], Any]) -> float:
        """Seconds of one call."""
        before, after = self._record_events(call)
        self.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def _flush(self) -> None:
        """Fill the caches with something else."""
        import torch

        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._flush_buffer.zero_()


@dataclass
class CudaPeaks(Peaks):
    """What the GPU does at most: a large product of bfloat16 matrices of random numbers, and a large copy.

    Zeros would be multiplied faster, since they take less power. A copy's bytes are those read and those written.
    """

    device: str = "cuda"
    time_call: Callable[[Callable[[], Any]], float] = lambda call: 0.0
    names: ClassVar[tuple[str, ...]] = ("matmul", "copy")

    def measured_name(self, name: str) -> str:
        """Itself."""
        return name

    def _prepare_try(self, name: str) -> Callable[[], float]:
        import torch

        if name == "matmul":
            a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=self.device, dtype=torch.bfloat16) for _ in range(2))
            out, work = torch.empty_like(a), 2 * MATRIX_SIZE**3

            def call() -> Any:
                return torch.matmul(a, b, out=out)
        else:
            source = torch.ones(COPY_BYTES, dtype=torch.int8, device=self.device)
            target, work = torch.empty_like(source), 2 * COPY_BYTES

            def call() -> Any:
                return target.copy_(source)

        def once() -> float:
            return PEAK_REPEATS * work / self.time_call(lambda: [call() for _ in range(PEAK_REPEATS)])

        once()
        return once


def require_cuda() -> Any:
    """`torch.cuda`, where there is a device.

    Raises
    ------
    MissingExtraError
        torch is not installed.
    DeviceError
        torch sees no CUDA device.
    """
    if find_spec("torch") is None:
        raise MissingExtraError("--device cuda without torch", "torch built for CUDA or ROCm", "pip install torch")
    import torch

    if not torch.cuda.is_available():
        built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        builds = [f"built for {name} {version}" for name, version in built.items() if version]
        who = f"torch {torch.__version__} ({builds[0] if builds else 'built for processors alone'})"
        raise DeviceError(
            f"--device cuda, and {who} sees no CUDA device",
            "a machine with a GPU and its driver (`nvidia-smi` or `rocm-smi` shows both), and a torch built for it",
            "run the same command on a machine with a GPU"
            if builds
            else "install a torch built for CUDA or ROCm (https://pytorch.org), or leave --device out",
        )
    return torch.cuda
