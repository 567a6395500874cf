"""The custom call of XLA by which compiled programs run attention on the CPU.

    program  →  XLA  →  handler (generated code)  →  callback (Python)  →  XlaCall  →  kernel
                                                  →  kernel, if the call was run before; see `DirectEntries`

A program contains the text that describes a call, and no address, so a program can be stored and loaded by another
process. When it first runs, `parse_call` makes the `XlaCall`. Without Python, a call takes 31 to 35 µs less (n 16, 32).
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding as llvm
import numpy as np

from ..call.request import CPU_VARIABLE, machine_setting
from ..cpu.calls.launch_record import FIRST_COMPUTED, FIRST_NUMBER, NUM_VALUES
from ..cpu.calls.xla_handler import CALLBACK, CLOSE, ENTRY_FIELDS, INSTALL, build_module
from ..cpu.codegen.abi import to_word
from ..cpu.runtime.processor import HOST
from ..errors import MissingExtraError
from .options import LSE_INDEX, OUTPUT_INDEX
from .xla_calls import XlaCall, XlaForward, parse_call

MAX_ENTRIES = 1024


class DirectEntries:
    """The entries of this process, each with the objects whose addresses it has. They live as long as the process.

    An entry needs its launch record and its prepared call, which owns tile ranges and machine code. The call cache may
    drop both, and a thread may still read an entry that another one has replaced.

    install : the generated function that stores the entry at an address; see `xla_handler.build_install`
    """

    install: Callable[[int], None]

    def __init__(self) -> None:
        self.entries: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def update(self, text: bytes, call: XlaCall) -> None:
        """Install an entry for a call that ran in Python, if generated code can run the call as a whole."""
        if not isinstance(call, XlaForward) or os.name != "posix":
            return
        prepared = call.find_prepared()
        direct = None if prepared is None else prepared.direct
        if direct is None or direct.run_on_team is not None:
            return
        key = text, machine_setting(), direct.address
        if key not in self.entries:
            if len(self.entries) >= MAX_ENTRIES:
                return
            self.entries[key] = *_make_entry(*key, call, direct.computed), direct.record, prepared
        self.install(self.entries[key][0].ctypes.data)  # also an old one, which a text with the same hash has replaced


def _make_entry(
    text: bytes, setting: bytes | None, record: int, call: XlaForward, computed: Sequence[int]
) -> tuple[Any, ...]:
    """Return the words of an entry, and the arrays to which they point. `record` is the launch record's address."""
    texts = np.frombuffer(text, np.uint8), np.frombuffer((setting or b"") + b"\0", np.uint8)
    values = np.zeros(NUM_VALUES, np.int64)
    values[FIRST_NUMBER : FIRST_NUMBER + len(call.numbers)] = [to_word(number) for number in call.numbers]
    values[FIRST_COMPUTED : FIRST_COMPUTED + len(computed)] = computed
    fields = {
        "text": texts[0].ctypes.data,
        "length": len(text),
        "setting": 0 if setting is None else texts[1].ctypes.data,
        "record": record,
        "num_arguments": len(call.arguments),
        "values": values.ctypes.data,
        "num_rows": math.prod(call.results[OUTPUT_INDEX].shape[:-1]),
        "is_lse_wide": call.results[LSE_INDEX].dtype == "float64",
    }
    return np.array([fields[name] for name in ENTRY_FIELDS], np.int64), values, texts


TARGET = "sightline_attention"
MIN_MINOR, MAX_MINOR = 1, 3  # of XLA's FFI 0.x: the versions whose structs `xla_handler` knows

_code: list[Any] = []  # keeps the handler's code alive: XLA calls it as long as the process runs
_entries = DirectEntries()
_messages: deque[Any] = deque(maxlen=256)  # keeps messages alive until XLA has copied them


def _run_call(text: int, length: int, buffers: int, num_arguments: int, num_results: int) -> int | None:
    """For the handler: run the call whose text has this address; return None, or the address of an error message."""
    try:
        key = ctypes.string_at(text, length)
        call = parse_call(key)
        addresses = (ctypes.c_int64 * (num_arguments + num_results)).from_address(buffers)  # arguments, then results
        call.run(addresses[:num_arguments], addresses[num_arguments:])
        _entries.update(key, call)
    except BaseException as error:
        try:
            message = f"{type(error).__name__}: {error}"
        except Exception:  # the error cannot be written as text
            message = type(error).__name__
        buffer = ctypes.create_string_buffer(message.encode(errors="replace"))
        _messages.append(buffer)
        return ctypes.addressof(buffer)
    return None


_SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)
_callback = _SIGNATURE(_run_call)


def _wait(close: Any) -> None:
    """Wait until no call runs in Python: `close` lets no more calls enter, and returns how many still run there."""
    while close():
        time.sleep(0.001)


@cache
def register_custom_call() -> str:
    """Register the custom call with XLA, once for a process, and return its name."""
    llvm.add_symbol(CALLBACK, ctypes.cast(_callback, ctypes.c_void_p).value)
    version, architecture = _read_version(), HOST.machine.architecture
    key, name = f"{version} {architecture}", "sightline_xla_handler"
    address: Any = HOST.kernel(key, name, lambda: build_module(name, version, architecture, CPU_VARIABLE))
    _code.append(address)
    _entries.install = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address.engine.get_function_address(INSTALL))
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    atexit.register(_wait, ctypes.CFUNCTYPE(ctypes.c_int64)(address.engine.get_function_address(CLOSE)))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    return TARGET


def _read_version() -> tuple[int, int]:
    """Return (major, minor) of XLA's FFI from a header of jaxlib; raise MissingExtraError if it is not supported."""
    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    major, minor = (-1 if match is None else int(match[1]) for match in found)
    if major != 0 or not MIN_MINOR <= minor <= MAX_MINOR:
        raise MissingExtraError(
            f"jax {jax.__version__}, whose XLA FFI (foreign function interface) has the version {major}.{minor}",
            f"the versions 0.{MIN_MINOR} to 0.{MAX_MINOR} of XLA's FFI",
            'pip install "jax>=0.7,<0.11"',
        )
    return major, minor
