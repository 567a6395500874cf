"""Compilation of kernels from LLVM to the address of their code, with caches in memory and on disk, and safe forks.

    key → memory → disk → build_module() → LLVM's passes → object code → disk → memory → address

A kernel may have two parts, one of which is common to many kernels. Each part is stored on disk. The parts are linked
when they are loaded.

llvmlite runs one call of LLVM at a time. If several threads compile kernels, their calls of LLVM alternate, and one
thread can build a module while LLVM works for another thread. A fork waits for the current call of LLVM, so that in the
child LLVM's state is consistent and llvmlite's lock is free. A fork also waits until other threads have finished the
imports of `LAZY_PACKAGES`, which are imported when a function first needs them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from ...arrays.caching import store_entry
from . import disk_cache, llvmlite_lock
from .machine import Machine

MAX_COMMON_CODES = 16  # the most common parts that are kept in memory
MAX_KERNELS_IN_MEMORY = 512  # one kernel takes about 80 KB
# The LLVM passes that each kernel needs. Sightline's generator already unrolls loops for the registers, ends each
# iteration in one jump, and computes the shared parts of formulas once. The passes turn stack slots into registers and
# join basic blocks. LLVM's code generation does the rest: common subexpressions, hoisting, scheduling. LLVM's full
# pipeline took 25 to 50 times as long, and the kernels were equally fast.
LLVM_PASSES = ("sroa", "simplify_cfg")
# packages with modules that a first call imports
LAZY_PACKAGES = {"array_api_compat", "llvmlite", "ml_dtypes", "platformdirs", "sightline"}
MAX_IMPORT_WAITS = 100  # without a limit, a thread that forks inside its own import would wait forever

counts: Counter[str] = Counter()  # number of kernels "compiled", and number "read" from the disk cache


class Address(int):
    """The address of a function's code. The code is freed with this object, so keep a reference while the code runs."""

    engine: Any

    def __new__(cls, engine: Any, name: str) -> Address:
        self = super().__new__(cls, engine.get_function_address(name))
        self.engine = engine
        return self


class KernelCache:
    """The cache in memory: kernels and object codes, the least recently used first, and a lock for each kernel.

    No lock protects the dictionaries, because each of their methods is one atomic function in C. An interrupt or a fork
    could leave a lock held, and every later call would then wait for the lock forever.

    Attributes
    ----------
    kernels : kernels by identity: the name of the function, the machine and the key; see `get_or_compile`
        The code of an evicted kernel is freed if nothing else refers to the kernel.
    common_codes : the object code of common parts, by identity
    locks : the locks of the kernels that are being compiled; the thread that holds a lock compiles the kernel
        A lock is reentrant, because a signal handler that runs while the kernel is compiled may call the kernel too.
    """

    def __init__(self) -> None:
        self.kernels: OrderedDict[str, Address] = OrderedDict()
        self.common_codes: OrderedDict[str, bytes] = OrderedDict()
        self.locks: dict[str, Any] = {}


_cache = KernelCache()


class Part(NamedTuple):
    """A part that many kernels have in common. Its fields have the meaning of the parameters of `get_or_compile`."""

    key: str
    build_module: Callable[[], Any]


def get_or_compile(
    key: str, name: str, build_module: Callable[[], Any], machine: Machine, common: Part | None = None
) -> Address:
    """Return the address of the function `name` of the kernel with this key.

    Parameters
    ----------
    key : str
        A text with everything that determines the kernel's code besides `name` and `machine`. Equal texts mean equal
        code, in different processes too.
    name : str
        The function's name in the module.
    build_module : function ()
        Returns the module, whose `str` is LLVM assembly. The function is called only if neither the memory nor the
        disk has the kernel.
    machine : Machine
        The LLVM target of the kernel.
    common : Part, optional
        A part that contains the function `name`. This function calls functions of the module.

    Returns
    -------
    Address
        Keep a reference to this object, not only its number, while the code may run.
    """
    identity = f"{name}\n{machine!r}\n{key}"
    address = _cache.kernels.get(identity)
    if address is not None:
        with suppress(KeyError):  # another thread has just evicted the kernel
            _cache.kernels.move_to_end(identity)
        return address
    with _cache.locks.setdefault(identity, threading.RLock()):  # the lock is C code; see `llvmlite_lock.repair`
        address = _cache.kernels.get(identity)
        if address is None:
            try:
                address = _load_or_compile(identity, name, build_module, machine, common)
            except BaseException:
                llvmlite_lock.repair()
                raise
            store_entry(_cache.kernels, identity, address, MAX_KERNELS_IN_MEMORY)
    _cache.locks.pop(identity, None)
    return address


def _load_or_compile(
    identity: str, name: str, build_module: Callable[[], Any], machine: Machine, common: Part | None
) -> Address:
    """Return the address of a kernel's function. Its code is read from disk, or compiled and then stored on disk."""
    codes = [_read_or_compile(identity, build_module, machine)]
    if common is not None:
        shared = f"{name}\n{machine!r}\n{common.key}"
        code = _cache.common_codes.get(shared)
        if code is None:
            code = _read_or_compile(shared, common.build_module, machine)
            store_entry(_cache.common_codes, shared, code, MAX_COMMON_CODES)
        codes.append(code)
    return _load_objects(codes, name, machine)


def _read_or_compile(identity: str, build_module: Callable[[], Any], machine: Machine) -> bytes:
    """Return object code from disk, or compile it and store it on disk."""
    file_name = disk_cache.file_name(identity)
    code = None if file_name is None else disk_cache.read(file_name)
    if code is not None:
        counts["read"] += 1
        return code
    code = _compile_object(build_module(), machine)
    counts["compiled"] += 1
    if file_name is not None:
        disk_cache.write(file_name, code)
    return code


def _compile_object(module: Any, machine: Machine) -> bytes:
    """Return the module's object code for the LLVM target `machine`, which need not be the processor at hand."""
    with optimised(module, machine) as (parsed, target):
        return bytes(target.emit_object(parsed))


@contextmanager
def optimised(module: Any, machine: Machine) -> Iterator[tuple[Any, Any]]:
    """Yield the module after LLVM's passes for the machine, and the LLVM target machine that emits its object code.

    The module is freed at the end of the `with` block, also after an error. Otherwise a traceback could keep the module
    alive until garbage collection, and a module that is freed after its context crashes the process.
    """
    llvm = _llvm()
    target = _target_machine(machine)
    with llvm.parse_assembly(str(module), llvm.create_context()) as parsed:
        parsed.triple = machine.triple
        parsed.data_layout = str(target.target_data)
        parsed.verify()
        pass_builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options())
        passes = llvm.create_new_module_pass_manager()
        for name in LLVM_PASSES:
            getattr(passes, f"add_{name}_pass")()
        passes.run(parsed, pass_builder)
        yield parsed, target


def _load_objects(codes: Sequence[bytes], name: str, machine: Machine) -> Address:
    """Link the pieces of object code, and return the address of their function `name`.

    Symbols that no piece defines (sinf, memset) are taken from this process. The engine's empty module is in LLVM's
    global context. Garbage collection could free another context before the engine, which would then end the process.
    """
    llvm = _llvm()
    # use_lmm puts all sections of the code close together, because sections refer to each other by 32-bit offsets
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(machine), use_lmm=True)
    for code in codes:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Address(engine, name)


def _target_machine(machine: Machine) -> Any:
    """Return the object of llvmlite that generates code for the machine.

    Code for x86-64 contains addresses of 64 bits (relocation "static"). By default, LLVM on Windows and macOS would use
    a table of addresses, and llvmlite's memory manager reserves no memory for the table.
    """
    target = _llvm().Target.from_triple(machine.triple)
    relocation = "static" if machine.architecture == "x86_64" else "default"
    return target.create_target_machine(cpu=machine.cpu, features=machine.features, opt=3, reloc=relocation)


@cache
def _llvm() -> Any:
    """Return the module llvmlite.binding, initialised for the processor at hand."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _imports_in_progress() -> list[str]:
    """Return the modules of `LAZY_PACKAGES` that threads are importing. Python has a lock for each such module."""
    locks = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    return [name for name in list(locks) if name.partition(".")[0] in LAZY_PACKAGES]


def _prepare_fork() -> None:
    """Wait until no other thread is inside LLVM or imports a module of `LAZY_PACKAGES`.

    Otherwise the child could wait forever for a lock of LLVM, or for the lock of a module that it imports too.
    """
    for _ in range(MAX_IMPORT_WAITS):
        llvmlite_lock.acquire()
        names = _imports_in_progress()
        if not names:
            return
        llvmlite_lock.release()  # the import of llvmlite calls LLVM
        for name in names:
            with suppress(ImportError):
                import_module(name)  # returns when the other thread has imported the module
    llvmlite_lock.acquire()


def _reset_after_fork() -> None:
    _cache.locks = {}  # a lock that another thread of the parent held is never released
    llvmlite_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_prepare_fork, after_in_parent=llvmlite_lock.release, after_in_child=_reset_after_fork)
