"""LLVM in, address out: kernels are kept in memory, then on disk, and compiled once where neither has them.

    key → memory → disk → write() → LLVM's passes → object code → disk → memory → address

llvmlite serves one thread at a time, so kernels that are compiled at once share it call by call, while Python writes
the next. A fork waits for the call that is under way: the child then finds LLVM whole and its lock free.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from . import disk_cache
from .machine import Machine

__all__ = ["Address", "bound_calls", "compile_module", "counts", "get_or_compile", "optimised"]

MAX_KERNELS_IN_MEMORY = 512  # kernels in memory, about 80 KB each
# A kernel is written as it shall run: loops unrolled for the registers, shared parts computed once. What is left to do
# is to inline, to make registers of stack slots, and to turn loops so that they end in one jump; code generation does
# the rest (common parts, hoisting, scheduling). LLVM's whole pipeline took 25 to 50 times as long for the same speed.
PASSES = ("always_inliner", "sroa", "loop_rotate", "simplify_cfg")

counts: Counter[str] = Counter()  # kernels "compiled", "read" from disk


class Address(int):
    """Where a function's code starts. The code stays as long as this object does, so hold it while the code runs."""

    engine: Any

    def __new__(cls, engine: Any, name: str) -> Address:
        self = super().__new__(cls, engine.get_function_address(name))
        self.engine = engine
        return self


class KernelCache:
    """Kernels in memory, the least recently used first, and a lock for each that is being made."""

    def __init__(self) -> None:
        self._kernels: OrderedDict[str, Address] = OrderedDict()
        self.bound_calls: OrderedDict[Any, Any] = OrderedDict()  # calls of them that are ready; see `again`
        self.reset_locks()

    def reset_locks(self) -> None:
        """New locks: in a forked child nobody is left to open those that were closed."""
        self._lock = threading.Lock()
        self._kernel_locks: dict[str, threading.Lock] = {}

    def get(self, identity: str) -> Address | None:
        with self._lock:
            address = self._kernels.get(identity)
            if address is not None:
                self._kernels.move_to_end(identity)
        return address

    def put(self, identity: str, address: Address) -> None:
        with self._lock:
            self._kernels[identity] = address
            evicted = [self._kernels.popitem(last=False) for _ in range(len(self._kernels) - MAX_KERNELS_IN_MEMORY)]
        del evicted  # where nobody runs them their engines end here, outside the lock

    @contextmanager
    def compiling(self, identity: str) -> Iterator[None]:
        """One thread at a time."""
        with self._lock:
            lock = self._kernel_locks.setdefault(identity, threading.Lock())
        with lock:
            try:
                yield
            finally:
                with self._lock:
                    self._kernel_locks.pop(identity, None)


_cache = KernelCache()


def bound_calls() -> OrderedDict[Any, Any]:
    """The calls that were prepared with the kernels now in memory, the least recently used first."""
    return _cache.bound_calls


def get_or_compile(key: str, name: str, build_module: Callable[[], Any], machine: Machine) -> Address:
    """The address of the function `name` of the kernel with this key.

    Parameters
    ----------
    key : str
        All that decides the kernel's code but name and machine, the same in every process: equal key, equal code.
    name : str
        The function's name in the module.
    build_module : function ()
        The module, an llvmlite `ir.Module` or LLVM assembly; called only where the kernel is not kept.
    machine : Machine

    Returns
    -------
    Address
        Hold this very object, not a copy of its number, while the code may run.
    """
    identity = f"{name}\n{machine!r}\n{key}"
    address = _cache.get(identity)
    if address is None:
        with _cache.compiling(identity):
            address = _cache.get(identity)
            if address is None:
                address = _load_or_compile(identity, name, build_module, machine)
                _cache.put(identity, address)
    return address


def _load_or_compile(identity: str, name: str, build_module: Callable[[], Any], machine: Machine) -> Address:
    """From disk, else written and compiled, and kept on disk."""
    _llvm()
    file_name = disk_cache.file_name(identity)
    code = None if file_name is None else disk_cache.read(file_name)
    if code is not None:
        counts["read"] += 1
        return _load_object(code, name, machine)
    code = _compile_object(build_module(), machine)
    counts["compiled"] += 1
    if file_name is not None:
        disk_cache.write(file_name, code)
    return _load_object(code, name, machine)


def compile_module(module: Any, machine: Machine, name: str) -> Address:
    """The address of the module's function `name`, compiled now and kept nowhere."""
    return _load_object(_compile_object(module, machine), name, machine)


def _compile_object(module: Any, machine: Machine) -> bytes:
    """The module's object code, optimised for the machine."""
    with optimised(module, machine) as (parsed, target):
        return bytes(target.emit_object(parsed))


@contextmanager
def optimised(module: Any, machine: Machine) -> Iterator[tuple[Any, Any]]:
    """The module as LLVM's passes leave it for the machine, and LLVM's target that writes its code.

    The module ends with the block, after an error too: held by a traceback until Python collects it as garbage, it
    might end after the context it lies in, which crashes.
    """
    llvm = _llvm()
    target = _target_machine(machine)
    with llvm.parse_assembly(str(module), llvm.create_context()) as parsed:
        parsed.triple = machine.triple
        parsed.data_layout = str(target.target_data)
        parsed.verify()
        pass_builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options())
        passes = llvm.create_new_module_pass_manager()
        for name in PASSES:
            getattr(passes, f"add_{name}_pass")()
        passes.run(parsed, pass_builder)
        yield parsed, target


def _load_object(code: bytes, name: str, machine: Machine) -> Address:
    """The address of `name` in object code. Names it lacks (sinf, memset) are looked up in this process."""
    llvm = _llvm()
    empty = llvm.parse_assembly("", llvm.create_context())
    # its sections in one piece of memory, since they name each other by distances of 32 bits
    engine = llvm.create_mcjit_compiler(empty, _target_machine(machine), use_lmm=True)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Address(engine, name)


def _target_machine(machine: Machine) -> Any:
    target = _llvm().Target.from_triple(machine.triple)
    return target.create_target_machine(cpu=machine.cpu, features=machine.features, opt=3)


@cache
def _llvm() -> Any:
    """llvmlite's binding, ready for this machine."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


# -- forks ---------------------------------------------------------------------------------------------------------


_acquired_locks: list[Any] = []


def _acquire_llvm_lock() -> None:
    """Take the lock llvmlite holds during each call of LLVM."""
    lock = getattr(getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None), "_lock", None)
    if lock is not None:
        lock.__enter__()
        _acquired_locks.append(lock)


def _release_llvm_lock() -> None:
    if _acquired_locks:
        _acquired_locks.pop().__exit__(None, None, None)


def _reset_after_fork() -> None:
    _release_llvm_lock()
    _cache.reset_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_acquire_llvm_lock, after_in_parent=_release_llvm_lock, after_in_child=_reset_after_fork)
