"""The custom call of XLA by which compiled programs run attention on the CPU.

    program  →  XLA  →  handler (generated code)  →  callback (Python)  →  XlaCall  →  kernel
                                                  →  kernel, if the call was run before; see `direct_entries`

A program contains the text that describes a call, and no address, so a program can be stored and loaded by another
process. When the program first runs, `parse_call` makes the `XlaCall` of the text.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import time
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding as llvm

from ..cpu.calls.xla_handler import CALLBACK, CLOSE, INSTALL, build_module
from ..cpu.runtime.processor import HOST
from ..errors import MissingExtraError
from ..problem.kernel import CPU_VARIABLE
from .direct_entries import DirectEntries
from .xla_calls import parse_call

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
def register() -> str:
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
