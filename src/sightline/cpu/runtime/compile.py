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

__all__ = ["Address", "calls", "compile_module", "counts", "function", "optimised"]

MOST = 512  # kernels in memory, about 80 KB each
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


class Kept:
    """Kernels in memory, the least recently used first, and a lock for each that is being made."""

    def __init__(self) -> None:
        self._kernels: OrderedDict[str, Address] = OrderedDict()
        self.calls: OrderedDict[Any, Any] = OrderedDict()  # calls of them that are ready; see `again`
        self.renew()

    def renew(self) -> None:
        """New locks: in a forked child nobody is left to open those that were closed."""
        self._guard = threading.Lock()
        self._making: dict[str, threading.Lock] = {}

    def get(self, identity: str) -> Address | None:
        with self._guard:
            address = self._kernels.get(identity)
            if address is not None:
                self._kernels.move_to_end(identity)
        return address

    def put(self, identity: str, address: Address) -> None:
        with self._guard:
            self._kernels[identity] = address
            gone = [self._kernels.popitem(last=False) for _ in range(len(self._kernels) - MOST)]
        del gone  # where nobody runs them their engines end here, outside the lock

    @contextmanager
    def making(self, identity: str) -> Iterator[None]:
        """One thread at a time."""
        with self._guard:
            lock = self._making.setdefault(identity, threading.Lock())
        with lock:
            try:
                yield
            finally:
                with self._guard:
                    self._making.pop(identity, None)


_kept = Kept()


def calls() -> OrderedDict[Any, Any]:
    """The calls that were prepared with the kernels now in memory, the least recently used first."""
    return _kept.calls


def function(key: str, name: str, write: Callable[[], Any], machine: Machine) -> Address:
    """The address of the function `name` of the kernel with this key.

    Parameters
    ----------
    key : str
        All that decides the kernel's code but name and machine, the same in every process: equal key, equal code.
    name : str
        The function's name in the module.
    write : function ()
        The module, an llvmlite `ir.Module` or LLVM assembly; called only where the kernel is not kept.
    machine : Machine

    Returns
    -------
    Address
        Hold this very object, not a copy of its number, while the code may run.
    """
    identity = f"{name}\n{machine!r}\n{key}"
    address = _kept.get(identity)
    if address is None:
        with _kept.making(identity):
            address = _kept.get(identity)
            if address is None:
                address = _made(identity, name, write, machine)
                _kept.put(identity, address)
    return address


def _made(identity: str, name: str, write: Callable[[], Any], machine: Machine) -> Address:
    """From disk, else written and compiled, and kept on disk."""
    _llvm()
    place = disk_cache.place(identity)
    code = None if place is None else disk_cache.read(place)
    if code is not None:
        counts["read"] += 1
        return _loaded(code, name, machine)
    code = _object(write(), machine)
    counts["compiled"] += 1
    if place is not None:
        disk_cache.write(place, code)
    return _loaded(code, name, machine)


def compile_module(module: Any, machine: Machine, name: str) -> Address:
    """The address of the module's function `name`, compiled now and kept nowhere."""
    return _loaded(_object(module, machine), name, machine)


def _object(module: Any, machine: Machine) -> bytes:
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
    target = _target(machine)
    with llvm.parse_assembly(str(module), llvm.create_context()) as parsed:
        parsed.triple = machine.triple
        parsed.data_layout = str(target.target_data)
        parsed.verify()
        builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options())
        passes = llvm.create_new_module_pass_manager()
        for name in PASSES:
            getattr(passes, f"add_{name}_pass")()
        passes.run(parsed, builder)
        yield parsed, target


def _loaded(code: bytes, name: str, machine: Machine) -> Address:
    """The address of `name` in object code. Names it lacks (sinf, memset) are looked up in this process."""
    llvm = _llvm()
    empty = llvm.parse_assembly("", llvm.create_context())
    # its sections in one piece of memory, since they name each other by distances of 32 bits
    engine = llvm.create_mcjit_compiler(empty, _target(machine), use_lmm=True)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Address(engine, name)


def _target(machine: Machine) -> Any:
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


_held: list[Any] = []


def _wait_for_llvm() -> None:
    """Take the lock llvmlite holds during each call of LLVM."""
    lock = getattr(getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None), "_lock", None)
    if lock is not None:
        lock.__enter__()
        _held.append(lock)


def _let_go() -> None:
    if _held:
        _held.pop().__exit__(None, None, None)


def _start_child() -> None:
    _let_go()
    _kept.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_llvm, after_in_parent=_let_go, after_in_child=_start_child)
