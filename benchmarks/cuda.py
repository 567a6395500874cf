"""The GPU as a benchmark device: CUDA events time the calls, and torch's allocator counts the memory.

The GPU's peaks are the rates of a matrix product and of a copy. torch for ROCm has the functions used here under the
names that torch for CUDA gives them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from sightline.caching import cached_property
from sightline.cli.info_command import DRIVER_VERSION_FILES
from sightline.errors import DeviceError, MissingExtraError

from .cases import Case, Contender, TimedCall
from .contenders import Sightline
from .cuda_problems import BENCHMARKS
from .device import Device
from .peaks import Peaks
from .peers import make_cuda_peers

MATRIX_SIZE = 8192  # number of rows and of columns of the matrices that the peak "matmul" multiplies
COPY_BYTES = 1 << 32  # bytes that the peak "copy" copies, far more than any cache holds
FLUSH_BYTES = 1 << 28  # bytes that a flush writes before a call, so that the inputs of the call are in no cache
HEAD_START_FLUSHES = 40  # flushes at the start of a turn; they take milliseconds, in which the host queues the calls
PEAK_REPEATS = 10  # matrix products or copies in one try of a peak


class CudaDevice(Device):
    """torch's current CUDA device, on which the benchmarks for GPUs run.

    Parameters
    ----------
    threads : number of threads of the host, for work on the CPU
    device : torch's name of the device
    runtime : replacement for `torch.cuda` in tests on the CPU; None means `torch.cuda`
    options : more arguments of `attention`; the default is kernel="triton", Sightline's own kernel, which then runs
        even where `attention` would choose a kernel of torch
    """

    benchmarks = BENCHMARKS
    seconds = 2.0

    def __init__(
        self, threads: int, device: str = "cuda", runtime: Any = None, options: dict[str, Any] | None = None
    ) -> None:
        self.threads, self.device, self.given_runtime = threads, device, runtime
        options = {"kernel": "triton"} if options is None else options
        variants: tuple[Contender, ...] = (
            Sightline(options=options, device=device),
            Sightline("planned", "Sightline, as planned", device=device),
            Sightline("without statistics", "without statistics", options, device, {"see": ()}),
        )
        self.variants = {each.name: each for each in variants}
        self.peers = make_cuda_peers(device)
        self.peaks = CudaPeaks(device=device, time_call=self._time_call)
        self._flush_buffer: Any = None

    @cached_property
    def runtime(self) -> Any:
        """`torch.cuda`, or the replacement that was given."""
        return self.given_runtime or require_cuda()

    def check(self) -> None:
        """Raise the errors of `require_cuda` if torch is not installed or finds no device."""
        self.runtime  # noqa: B018

    @property
    def description(self) -> str:
        return str(self.runtime.get_device_name())

    def time_calls(self, prepared: TimedCall, repeats: int) -> float:
        """Return the mean seconds of one call, each call timed between two CUDA events.

        An untimed call and some flushes of the caches come first. While the device runs the flushes, the host queues
        the timed calls, so the result is the device's time. The host's time is included only if a call waits for the
        device, or if `prepared.includes_host`.
        """
        time.sleep(self.pause)
        self.synchronize()
        prepared.call(prepared.setup())
        if prepared.includes_host:
            return self._time_on_host(prepared, repeats)
        for _ in range(HEAD_START_FLUSHES):
            self._flush()
        pairs = []
        for _ in range(repeats):
            state = prepared.setup()
            self._flush()
            pairs.append(self._record_events(partial(prepared.call, state)))
            del state
        self.synchronize()
        return (
            float(sum(before.elapsed_time(after) for before, after in pairs)) / 1e3 / repeats
        )  # elapsed_time is in ms

    def _time_on_host(self, prepared: TimedCall, repeats: int) -> float:
        """Return the host's seconds per call, from the first call until the device has finished the last."""
        states = [prepared.setup() for _ in range(repeats)]
        self.synchronize()
        started = time.perf_counter()
        for state in states:
            prepared.call(state)
        self.synchronize()
        return (time.perf_counter() - started) / repeats

    def memory(self, prepared: TimedCall) -> int | None:
        """Return a call's peak bytes in torch's allocator. Memory that a library allocates itself is not counted."""
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

    def prepare_for_timing(self, prepared: TimedCall, case: Case) -> tuple[TimedCall, str]:
        """Return the call and a note. The call is replaced by its CUDA graph if the case requests a graph.

        A call that torch cannot capture as a graph is returned unchanged.
        """
        if not case.cuda_graph:
            return prepared, ""
        graph = self.runtime.CUDAGraph()
        try:
            for _ in range(3):  # these calls allocate memory and compile before the capture
                prepared.call(prepared.setup())
            self.synchronize()
            with self.runtime.graph(graph):
                output = prepared.call(prepared.setup())
        except Exception as error:  # libraries raise many kinds of errors during the capture of a CUDA graph
            self.synchronize()
            return prepared, f"not a CUDA graph ({type(error).__name__}): includes time of the host"

        def replay(_: Any) -> Any:
            graph.replay()
            return output

        return replace(prepared, call=replay, setup=lambda: None), "as a CUDA graph"

    def properties(self) -> dict[str, Any]:
        """Return the device's name and the versions of its software."""
        import torch

        cudnn: Any = torch.backends.cudnn
        found = {"device": self.description, "cuda": torch.version.cuda, "hip": torch.version.hip}
        drivers = [path.read_text(errors="replace") for path in DRIVER_VERSION_FILES if path.exists()]
        return found | {"cudnn": cudnn.version(), "driver": "".join(drivers).partition("\n")[0]}

    def _record_events(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        before, after = (self.runtime.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        return before, after

    def _time_call(self, call: Callable[[], Any]) -> float:
        """Return the device's seconds for one call."""
        before, after = self._record_events(call)
        self.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def _flush(self) -> None:
        """Replace the contents of the device's caches by writing `FLUSH_BYTES` bytes."""
        import torch

        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._flush_buffer.zero_()


@dataclass
class CudaPeaks(Peaks):
    """The GPU's peaks: the rates of a large product of random bfloat16 matrices and of a large copy.

    The matrices are random because a product of zeros takes less power and would be faster. The bytes of a copy are the
    bytes read plus the bytes written.
    """

    device: str = "cuda"
    time_call: Callable[[Callable[[], Any]], float] = lambda call: 0.0
    names: ClassVar[tuple[str, ...]] = ("matmul", "copy")

    def measured_name(self, name: str) -> str:
        """Return the name unchanged: each peak of a GPU is measured under its own name."""
        return name

    def _prepare_try(self, name: str) -> Callable[[], float]:
        import torch

        if name == "matmul":
            a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=self.device, dtype=torch.bfloat16) for _ in range(2))
            target, work = torch.empty_like(a), 2 * MATRIX_SIZE**3
            run = partial(torch.matmul, a, b, out=target)
        else:
            source = torch.ones(COPY_BYTES, dtype=torch.int8, device=self.device)
            target, work = torch.empty_like(source), 2 * COPY_BYTES
            run = partial(target.copy_, source)

        def once() -> float:
            return PEAK_REPEATS * work / self.time_call(lambda: [run() for _ in range(PEAK_REPEATS)])

        once()
        return once


def require_cuda() -> Any:
    """Return `torch.cuda` if torch finds a CUDA device.

    Raises
    ------
    MissingExtraError
        torch is not installed.
    DeviceError
        torch finds no CUDA device.
    """
    if find_spec("torch") is None:
        raise MissingExtraError("--device cuda without torch", "torch built for CUDA or ROCm", "pip install torch")
    import torch

    if not torch.cuda.is_available():
        built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        builds = [f"built for {name} {version}" for name, version in built.items() if version]
        installed = f"torch {torch.__version__} ({builds[0] if builds else 'built for CPUs only'})"
        raise DeviceError(
            f"--device cuda, but {installed} sees no CUDA device",
            "a machine with a GPU and its driver (`nvidia-smi` or `rocm-smi` shows both), and torch built for the GPU",
            "run the same command on a machine with a GPU"
            if builds
            else "install a torch built for CUDA or ROCm (https://pytorch.org), or omit --device",
        )
    return torch.cuda
