"""An emulated processor of another architecture (qemu user mode), as a `Processor` for the library's own code.

A kernel's object code is linked into a shared library. A small program (runner.c), compiled for the architecture and
emulated, maps a file, the arena, into memory. Python maps the same file. For each call, the arrays are copied into the
arena between guard bytes, the addresses in the argument block are translated to the arena, the kernel runs, and changed
arrays are copied back.
"""

from __future__ import annotations

import ctypes
import mmap
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from sightline.cpu.runtime.compile import optimised
from sightline.cpu.runtime.machine import Machine
from sightline.cpu.runtime.processor import Processor
from sightline.reference.testing import GUARD_BYTES

EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
TOOLS = "aarch64-linux-gnu-"
OLDEST = "cortex-a53"  # the emulated processor: the baseline without later extensions
PAGE = 4096
ARENA_BYTES = 1 << 26  # a sparse file: only written pages use disk space
CALL_SECONDS = 120  # time limit of one call


def missing() -> str:
    """Return what the emulation needs and cannot find; empty if nothing is missing."""
    lacks = [] if any(map(shutil.which, EMULATORS)) else [EMULATORS[0]]
    lacks += [TOOLS + tool for tool in ("gcc", "ld") if not shutil.which(TOOLS + tool)]
    if shutil.which(TOOLS + "gcc") and not loader().is_absolute():
        lacks.append("a C library for ARM")
    return " and ".join(lacks)


def loader() -> Path:
    """Return the path of ARM's dynamic loader; only its name if the compiler finds no loader."""
    command = [TOOLS + "gcc", "-print-file-name=ld-linux-aarch64.so.1"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


class Emulator(Processor):
    """A 64-bit ARM processor without optional features.

    Parameters
    ----------
    machine : machine that kernels are compiled for
    folder : folder of the emulator's files
    """

    def __init__(self, machine: Machine, folder: Path) -> None:
        super().__init__(machine)
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        self.folder = folder
        self.kernels: dict[str, tuple[Path, str]] = {}
        self.file = (folder / "arena").open("w+b")
        self.file.truncate(ARENA_BYTES)
        self.arena = np.frombuffer(mmap.mmap(self.file.fileno(), ARENA_BYTES), np.uint8)
        self.runner, self.base = self._start()

    def _start(self) -> tuple[subprocess.Popen[str], int]:
        """Start the emulated program, and return its process and the address of the arena in the program."""
        source, program = Path(__file__).with_name("runner.c"), self.folder / "runner"
        command = [TOOLS + "gcc", "-O1", "-Wl,--no-as-needed", source, "-o", program, "-lm", "-ldl"]
        subprocess.run(command, check=True)
        emulator = next(filter(None, map(shutil.which, EMULATORS)))
        root = loader().resolve().parents[1]
        runner = subprocess.Popen(
            [emulator, "-cpu", OLDEST, "-L", root, program, self.file.name, str(ARENA_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return runner, int(self._answer(runner))

    def _answer(self, runner: subprocess.Popen[str]) -> str:
        """Return the runner's next line. If the runner ended or exceeded the time limit, raise AssertionError."""
        assert runner.stdout is not None
        if not select.select([runner.stdout], [], [], CALL_SECONDS)[0]:
            runner.kill()
        line = runner.stdout.readline()
        if not line:
            _, error = runner.communicate()
            raise AssertionError(f"the emulated kernel ended with {runner.returncode}: {error}")
        return line

    def close(self) -> None:
        self.runner.communicate()
        self.file.close()

    links_parts = False

    def kernel(
        self, key: str, name: str, build_module: Callable[[], Any], common: Any = None, machine: Machine | None = None
    ) -> tuple[Path, str]:
        """Return (shared library with the kernel, the kernel's name)."""
        if key not in self.kernels:
            self.kernels[key] = self.linked(build_module(), name)
        return self.kernels[key]

    def linked(self, module: Any, name: str) -> tuple[Path, str]:
        """Compile and link a module without a cache, and return (shared library, name)."""
        target = llvm.Target.from_triple(self.machine.triple).create_target_machine(
            cpu=self.machine.cpu, features=self.machine.features, opt=3, reloc="pic"
        )
        with (
            optimised(module, self.machine) as (parsed, _),
            tempfile.NamedTemporaryFile(dir=self.folder, suffix=".o", delete=False) as code,
        ):
            code.write(target.emit_object(parsed))
        library = Path(code.name).with_suffix(".so")
        subprocess.run([TOOLS + "ld", "-shared", code.name, "-o", library], check=True)
        return library, name

    def call(self, kernel: tuple[Path, str], packed_arguments: Any, threads: int, keep_alive: tuple[Any, ...]) -> None:
        """Call the kernel once, and raise AssertionError if the kernel wrote to a guard."""
        chunks = list(self._copied_to_arena(keep_alive))
        translated = np.array([self._translated(word, chunks) for word in packed_arguments.tolist()], np.int64)
        start = max((stop for *_, stop in chunks), default=0) + GUARD_BYTES
        self.arena[start : start + translated.nbytes] = translated.view(np.uint8)
        library, name = kernel
        assert self.runner.stdin is not None
        self.runner.stdin.write(f"{library} {name} {start}\n")
        self.runner.stdin.flush()
        self._answer(self.runner)
        for low, size, offset, stop in chunks:
            inside = self.arena[offset : offset + size]
            for guard in (self.arena[offset - GUARD_BYTES : offset], self.arena[offset + size : stop]):
                assert (guard == 0xFF).all(), "written outside an array"
            if inside.tobytes() != ctypes.string_at(low, size):
                ctypes.memmove(low, inside.ctypes.data, size)

    def _copied_to_arena(self, keep_alive: Any) -> Iterator[tuple[int, int, int, int]]:
        """Copy the arrays into the arena, and yield (address, bytes, offset in the arena, end of the guard) per range.

        The offset is equal to the address modulo `PAGE`. Arrays that share memory share memory in the arena too.
        """
        stop = 0
        for low, high in memory_ranges(keep_alive):
            size = high - low
            offset = stop + GUARD_BYTES + (low - stop - GUARD_BYTES) % PAGE
            begin, stop = stop, offset + size + GUARD_BYTES
            assert stop + GUARD_BYTES < ARENA_BYTES, "the arena is too small for these arrays"
            self.arena[begin:stop] = 0xFF
            self.arena[offset : offset + size] = np.frombuffer(ctypes.string_at(low, size), np.uint8)
            yield low, size, offset, stop

    def _translated(self, word: int, chunks: list[tuple[int, int, int, int]]) -> int:
        """Return an address as the runner's address. Any other word is unchanged: no length or stride is an address."""
        for low, size, offset, _ in chunks:
            if low <= word < low + size:
                return self.base + offset + word - low
        return word


def memory_ranges(keep_alive: Any) -> list[tuple[int, int]]:
    """Return (first byte, end) of the memory of all arrays in nested lists and tuples. Adjacent ranges are merged."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(np.lib.array_utils.byte_bounds(array) for array in arrays_in(keep_alive) if array.size):
        if found and low <= found[-1][1]:
            low, high = found[-1][0], max(high, found.pop()[1])
        found.append((low, high))
    return found


def arrays_in(entry: Any) -> Iterator[Any]:
    """Yield the arrays in nested lists and tuples."""
    if isinstance(entry, np.ndarray):
        yield entry
    elif isinstance(entry, list | tuple):
        for part in entry:
            yield from arrays_in(part)
