"""Kernels of another kind of processor, under qemu's user mode: a `Processor` the library's own code can run on.

A kernel's object code is linked into a shared library. A small program (runner.c), compiled for that processor and
emulated, maps one file, the arena, that Python maps too; for each call the arrays are laid out in it between guards,
the argument words are moved to where they lie there, and what the kernel changed is copied back.
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
from sightline.testing import GUARD_BYTES

EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
TOOLS = "aarch64-linux-gnu-"
OLDEST = "cortex-a53"  # the emulated processor: the baseline and nothing younger
PAGE = 4096
ROOM = 1 << 26  # bytes of the arena, which takes no more disk than is written
PATIENCE = 120  # seconds for one call


def missing() -> str:
    """What the emulation needs and does not find; empty if nothing."""
    lacks = [] if any(map(shutil.which, EMULATORS)) else [EMULATORS[0]]
    lacks += [TOOLS + tool for tool in ("gcc", "ld") if not shutil.which(TOOLS + tool)]
    if shutil.which(TOOLS + "gcc") and not loader().is_absolute():
        lacks.append("a C library for ARM")
    return " and ".join(lacks)


def loader() -> Path:
    """What loads dynamically linked programs for ARM; its bare name where the compiler finds none."""
    command = [TOOLS + "gcc", "-print-file-name=ld-linux-aarch64.so.1"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


class Emulator(Processor):
    """A 64-bit ARM processor without options.

    Parameters
    ----------
    machine : what kernels are generated for
    folder : where its files go
    """

    def __init__(self, machine: Machine, folder: Path) -> None:
        super().__init__(machine)
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        self.folder = folder
        self.kernels: dict[str, tuple[Path, str]] = {}
        self.file = (folder / "arena").open("w+b")
        self.file.truncate(ROOM)
        self.arena = np.frombuffer(mmap.mmap(self.file.fileno(), ROOM), np.uint8)
        self.runner, self.base = self._start()

    def _start(self) -> tuple[subprocess.Popen[str], int]:
        """The emulated program and the address it has the arena at."""
        source, program = Path(__file__).with_name("runner.c"), self.folder / "runner"
        command = [TOOLS + "gcc", "-O1", "-Wl,--no-as-needed", source, "-o", program, "-lm", "-ldl"]
        subprocess.run(command, check=True)
        emulator = next(filter(None, map(shutil.which, EMULATORS)))
        root = loader().resolve().parents[1]
        runner = subprocess.Popen(
            [emulator, "-cpu", OLDEST, "-L", root, program, self.file.name, str(ROOM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return runner, int(self._answer(runner))

    def _answer(self, runner: subprocess.Popen[str]) -> str:
        """A line from the runner; its error if it died, or died of waiting."""
        assert runner.stdout is not None
        if not select.select([runner.stdout], [], [], PATIENCE)[0]:
            runner.kill()
        line = runner.stdout.readline()
        if not line:
            _, error = runner.communicate()
            raise AssertionError(f"the emulated kernel ended with {runner.returncode}: {error}")
        return line

    def close(self) -> None:
        self.runner.communicate()
        self.file.close()

    def kernel(self, key: str, name: str, write: Callable[[], Any]) -> tuple[Path, str]:
        """A shared library with the kernel, and the kernel's name."""
        if key not in self.kernels:
            self.kernels[key] = self.linked(write(), name)
        return self.kernels[key]

    def linked(self, module: Any, name: str) -> tuple[Path, str]:
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

    def call(self, kernel: tuple[Path, str], words: Any, threads: int, kept: tuple[Any, ...]) -> None:
        """Call the kernel once, and raise AssertionError where it wrote on a guard."""
        chunks = list(self._laid_out(kept))
        moved = np.array([self._moved(word, chunks) for word in words.tolist()], np.int64)
        start = max((stop for *_, stop in chunks), default=0) + GUARD_BYTES
        self.arena[start : start + moved.nbytes] = moved.view(np.uint8)
        library, name = kernel
        assert self.runner.stdin is not None
        self.runner.stdin.write(f"{library} {name} {start}\n")
        self.runner.stdin.flush()
        self._answer(self.runner)
        for low, size, place, stop in chunks:
            inside = self.arena[place : place + size]
            for guard in (self.arena[place - GUARD_BYTES : place], self.arena[place + size : stop]):
                assert (guard == 0xFF).all(), "written beside an array"
            if inside.tobytes() != ctypes.string_at(low, size):
                ctypes.memmove(low, inside.ctypes.data, size)

    def _laid_out(self, kept: Any) -> Iterator[tuple[int, int, int, int]]:
        """Copy the arrays into the arena: (address here, bytes, place there, end of the guard) of each stretch.

        A place has its address's alignment, and arrays that share memory share it there.
        """
        stop = 0
        for low, high in stretches(kept):
            size = high - low
            place = stop + GUARD_BYTES + (low - stop - GUARD_BYTES) % PAGE
            begin, stop = stop, place + size + GUARD_BYTES
            assert stop + GUARD_BYTES < ROOM, "the arena is too small for these arrays"
            self.arena[begin:stop] = 0xFF
            self.arena[place : place + size] = np.frombuffer(ctypes.string_at(low, size), np.uint8)
            yield low, size, place, stop

    def _moved(self, word: int, chunks: list[tuple[int, int, int, int]]) -> int:
        """An address as the runner has it; any other word as it is, since no length or stride looks like an address."""
        for low, size, place, _ in chunks:
            if low <= word < low + size:
                return self.base + place + word - low
        return word


def stretches(kept: Any) -> list[tuple[int, int]]:
    """The memory of all arrays in nested lists and tuples: first byte and end, what overlaps or touches made one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(np.lib.array_utils.byte_bounds(array) for array in arrays_in(kept) if array.size):
        if found and low <= found[-1][1]:
            low, high = found[-1][0], max(high, found.pop()[1])
        found.append((low, high))
    return found


def arrays_in(kept: Any) -> Iterator[Any]:
    if isinstance(kept, np.ndarray):
        yield kept
    elif isinstance(kept, list | tuple):
        for part in kept:
            yield from arrays_in(part)
