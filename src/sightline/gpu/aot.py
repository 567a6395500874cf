"""Kernels compiled for a GPU that is not there: what they take of it, and their text.

    kernels = compile_kernels(lambda: Triton("sm_90").run(problem), "sm_90")

Triton asks a driver which GPU it compiles for, and gives it what it compiled to be loaded and launched. `compile_kernels` puts
a driver in its place that names the GPU asked for and launches nothing, so a call runs as ever, on arrays in the host's
memory, and every kernel it would launch is compiled as it would be there: same choices, same specialisation, sizes of
tiles as the table has them. What the call returns is whatever memory held. `attention` itself takes the kernels of the
processor for such arrays, so the call is that of a `Triton` for the target: its `run` or its `gradients`.
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

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from ..errors import ParameterError
from .launch.launcher import REDUCED_STAGES
from .tuning.configurations import shared_memory_of
from .tuning.selection import try_sizes

__all__ = ["SHARED_MEMORY_BYTES", "TARGETS", "CompiledKernel", "compile_kernels"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
}
SHARED_MEMORY_BYTES = {name: shared_memory_of(name) for name in TARGETS}  # bytes that a block can have


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as a GPU would load it.

    `registers` are those of one thread (AMD's with the accumulators of matrix instructions), `spilled` bytes of a
    thread in memory for what found no register, `shared` bytes of a block. `text` is PTX or AMD's assembly, `remarks`
    what the assembler had to say: ptxas tells there where it had to make wgmma wait for each other.
    """

    name: str
    target: str
    warps: int
    registers: int
    spilled: int
    shared: int
    text: str
    remarks: str

    def __str__(self) -> str:
        return (
            f"{self.name} for {self.target}: {self.registers} registers, {self.spilled} bytes spilled, "
            f"{self.shared} bytes shared, {self.warps} warps"
        )


def compile_kernels(call: Callable[[], object], target: str) -> tuple[CompiledKernel, ...]:
    """The kernels `call()` would launch on a GPU of `target`, in order, each once; none is run.

    Triton's driver is the process's own, so no other thread may launch a kernel meanwhile.

    Raises
    ------
    ParameterError
        `target` is none of `TARGETS`, `call` launched nothing, or kernels of another architecture.
    triton.OutOfResources
        A kernel takes more shared memory than the GPU has.
    """
    if target not in TARGETS:
        raise ParameterError(f"target={target!r}", f"one of {', '.join(map(repr, TARGETS))}", "name one of these")
    kernels: list[CompiledKernel] = []
    log = StringIO()

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
        knobs.cache.dir = scope.enter_context(TemporaryDirectory())  # what lies on disk has lost what ptxas said
        scope.enter_context(_active_driver(_OfflineDriver(target)))
        scope.enter_context(redirect_stdout(log))
        trial = scope.enter_context(try_sizes())
        REDUCED_STAGES.clear()  # what other GPUs had no memory for
        call()
    if other_architectures := trial.architectures - {target}:
        raise ParameterError(
            f"kernels with the sizes of {', '.join(sorted(other_architectures))}, compiled for {target}",
            "one architecture",
            f"Triton({target!r}).run(problem)",
        )
    if not kernels:
        raise ParameterError(
            "a call that launched no kernel of Triton's: `attention` takes the processor's for arrays there",
            "a call of the kernels themselves, where TRITON_INTERPRET is not set",
            f"compile_kernels(lambda: Triton({target!r}).run(problem), {target!r})",
        )
    return tuple(kernel for kernel in kernels if kernel.shared <= SHARED_MEMORY_BYTES[target])


def _read_kernel(metadata: dict[str, Any], files: dict[str, Path], target: str, log: str) -> CompiledKernel:
    text = files[".ptx" if ".ptx" in files else ".amdgcn"].read_text()
    report, registers, spilled = (
        (log, r"Used (\d+) registers", r"(\d+) bytes stack frame")
        if ".ptx" in files
        else (text, r"\.vgpr_count: +(\d+)", r"\.private_segment_fixed_size: +(\d+)")
    )
    return CompiledKernel(
        metadata["name"],
        target,
        metadata["num_warps"],
        _find_number(registers, report),
        _find_number(spilled, report),
        metadata["shared"],
        text,
        log.strip(),
    )


def _find_number(pattern: str, report: str) -> int:
    found = re.findall(pattern, report)
    if len(found) != 1:
        raise AssertionError(f"{pattern!r} stands {len(found)} times in what the compiler said:\n{report[-2000:]}")
    return int(found[0])


@contextmanager
def _active_driver(offline: _OfflineDriver) -> Iterator[None]:
    """Triton with the driver of a GPU that is not there."""
    try:
        previous = driver.active
    except RuntimeError:  # there is no GPU at all
        previous = None
    driver.set_active(offline)
    try:
        yield
    finally:
        driver.set_active(previous)
        for kernel in offline.launched:
            kernel.device_caches.pop(offline, None)


class _OfflineDriver(DriverBase):  # type: ignore[misc]  # triton's types are its own affair
    """The driver of a GPU that is not there: it names its target, loads nothing and launches nothing."""

    def __init__(self, name: str) -> None:
        self.target, self.shared = TARGETS[name], SHARED_MEMORY_BYTES[name]
        self.launched: list[Any] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> _OfflineDriver:
        return self  # Triton keeps kernels by device: none of another's are taken for ours

    def get_current_stream(self, device: object) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: object) -> Callable[..., None]:
        self.launched.append(source.fn)
        return lambda *arguments: None

    def load_binary(self, name: str, binary: bytes, shared: int, device: object) -> tuple[None, None, int, int, int]:
        max_threads = 1024  # of a block, on every GPU there is
        return None, None, 0, 0, max_threads

    def unload_module(self, module: object) -> None:
        pass

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": self.shared}

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError
