"""The lock that llvmlite holds during each call of LLVM: acquired before a fork, released after an interrupt."""

from __future__ import annotations

import sys
from typing import Any

_acquired: list[Any] = []  # the lock, if `acquire` has acquired it and `release` has not released it


def _lock() -> Any:
    """Return llvmlite's lock; None if llvmlite is not loaded."""
    return getattr(getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None), "_lock", None)


def acquire() -> None:
    """Acquire the lock, so that no other thread is inside LLVM. Nothing happens if llvmlite is not loaded."""
    lock = _lock()
    if lock is not None:
        _acquired.append(lock)  # first, so that the lock is released even if an interrupt arrives in the next line
        lock.__enter__()


def release() -> None:
    """Release the lock if `acquire` acquired it."""
    if _acquired:
        _acquired.pop().__exit__(None, None, None)


def repair() -> None:
    """Release the lock if an exception has left this thread as its owner.

    llvmlite takes the lock in Python code. A KeyboardInterrupt can therefore arrive after the lock is taken, but before
    the `with` block that releases the lock has begun. Other threads would then wait for the lock forever.
    """
    lock = _lock()
    if lock is not None:
        while lock._lock._is_owned():  # the reentrant lock inside
            lock._lock.release()
