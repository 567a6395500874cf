"""Compile Triton kernels for a GPU that this computer does not have, and report their resource use and assembly.

    kernels = compile_kernels(lambda: Triton("sm_90").run(problem), "sm_90")

Triton's driver names the GPU to compile for, and loads and launches compiled kernels. `compile_kernels` replaces the
driver by a driver that names the requested GPU, loads nothing and launches nothing. So the call runs as usual on arrays
in host memory, and every kernel that the call launches is compiled exactly as on the GPU: with the same compile-time
constants, the same specialisation of arguments, and the tile sizes of the default table. The arrays that the call
returns are uninitialised memory, since no kernel runs. `attention` chooses CPU kernels for arrays in host memory, so
the call must be `run` or `backward` of a `Triton` for the requested GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from sightline.errors import ParameterError
from sightline.gpu import configurations
from sightline.gpu.launch.launches import REDUCED_STAGES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
}
SHARED_MEMORY_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}  # for one block of threads


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel, its resource use, its assembly and its machine code."""

    name: str
    target: str  # a key of `TARGETS`
    registers: int  # registers per thread; on AMD the number includes the accumulators of matrix instructions
    spilled: int  # bytes of memory per thread for numbers that found no register
    shared: int  # bytes of shared memory per block of threads
    text: str  # the assembly of the kernel: PTX for NVIDIA, AMD's assembly language for AMD
    binary: bytes  # the machine code
    remarks: str  # the assembler's log, in which ptxas reports each wgmma instruction that it serialised


def compile_kernels(call: Callable[[], object], target: str) -> tuple[CompiledKernel, ...]:
    """Compile the kernels that `call()` launches on a GPU of `target`. Return each one once, in the order of launches.

    No kernel runs. A process has one Triton driver, so no other thread may launch a kernel before this function
    returns. `triton.OutOfResources` says that a kernel needs more shared memory than the GPU has.
    """
    if target not in TARGETS:
        raise ParameterError(f"target={target!r}", f"one of {', '.join(map(repr, TARGETS))}", "target='sm_90'")
    kernels: list[CompiledKernel] = []
    architectures: set[str] = set()
    find_configuration, log = configurations.find_configuration, StringIO()

    def record(architecture: str, *given: Any) -> configurations.Configuration:
        architectures.add(architecture)
        return find_configuration(architecture, *given)

    def listen(*, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object) -> None:
        files = {Path(path).suffix: Path(path) for path in metadata_group.values()}
        kernels.append(_read_kernel(metadata, files, target, log.getvalue()))
        log.seek(0)
        log.truncate()

    with ExitStack() as scope:
        for settings in (knobs.compilation, knobs.nvidia, knobs.cache):
            scope.enter_context(settings.scope())
        knobs.compilation.listener = listen
        knobs.nvidia.dump_ptxas_log = True
        knobs.cache.dir = scope.enter_context(TemporaryDirectory())  # a kernel from Triton's cache has no ptxas log
        scope.enter_context(_active_driver(_OfflineDriver(target)))
        scope.enter_context(redirect_stdout(log))
        scope.enter_context(mock.patch.object(configurations, "find_configuration", record))
        REDUCED_STAGES.clear()  # its numbers of stages may have been reduced for another target
        call()
    if other_architectures := architectures - {target}:
        raise ParameterError(
            f"kernels with the tile sizes of {', '.join(sorted(other_architectures))}, compiled for {target}",
            f"kernels with the tile sizes of {target}",
            f"Triton({target!r}).run(problem)",
        )
    if not kernels:
        raise ParameterError(
            "a call that launched no kernel of Triton: `attention` chooses CPU kernels for arrays in host memory",
            "a call of a `Triton` kernel, in a process without TRITON_INTERPRET",
            f"compile_kernels(lambda: Triton({target!r}).run(problem), {target!r})",
        )
    # A launch whose kernel exceeds shared memory is repeated with fewer stages. Every attempt compiles a kernel. Only
    # the kernel of the last attempt fits shared memory and is launched.
    return tuple(kernel for kernel in kernels if kernel.shared <= SHARED_MEMORY_BYTES[target])


def _read_kernel(metadata: dict[str, Any], files: dict[str, Path], target: str, log: str) -> CompiledKernel:
    assembly, code = (".ptx", ".cubin") if ".ptx" in files else (".amdgcn", ".hsaco")
    text, binary = files[assembly].read_text(), files[code].read_bytes()
    report, *patterns = (
        (log, r"Used (\d+) registers", r"(\d+) bytes stack frame")
        if ".ptx" in files
        else (text, r"\.vgpr_count: +(\d+)", r"\.private_segment_fixed_size: +(\d+)")
    )
    registers, spilled = (_find_number(pattern, report) for pattern in patterns)
    name, shared = metadata["name"], metadata["shared"]
    return CompiledKernel(name, target, registers, spilled, shared, text, binary, log.strip())


def _find_number(pattern: str, report: str) -> int:
    matches = re.findall(pattern, report)
    if len(matches) != 1:
        raise AssertionError(f"{len(matches)} matches of {pattern!r} in the compiler's report:\n{report[-2000:]}")
    return int(matches[0])


@contextmanager
def _active_driver(offline: _OfflineDriver) -> Iterator[None]:
    """Make `offline` Triton's driver while the context lasts."""
    previous = driver._active  # None before Triton's first launch
    driver.set_active(offline)
    try:
        yield
    finally:
        driver.set_active(previous)
        for kernel in offline.launched:
            kernel.device_caches.pop(offline, None)


class _OfflineDriver(DriverBase):  # type: ignore[misc]  # triton has no type stubs
    """A driver for a GPU that this machine does not have: it names its target, loads nothing and launches nothing."""

    def __init__(self, name: str) -> None:
        self.target, self.shared = TARGETS[name], SHARED_MEMORY_BYTES[name]
        self.launched: list[Any] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> _OfflineDriver:
        return self  # Triton caches compiled kernels by device, and no real device equals this object

    def get_current_stream(self, device: object) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: object) -> Callable[..., None]:
        self.launched.append(source.fn)
        return lambda *arguments: None

    def load_binary(self, name: str, binary: bytes, shared: int, device: object) -> tuple[None, None, int, int, int]:
        max_threads = 1024  # the most threads of a block on every GPU
        return None, None, 0, 0, max_threads

    def unload_module(self, module: object) -> None:
        pass

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": self.shared}

    @classmethod
    def is_active(cls) -> bool:
        return False

    def _is_never_called(self, *arguments: object) -> Any:
        raise NotImplementedError

    map_python_to_cpp_type = get_active_torch_device = get_benchmarker = _is_never_called
