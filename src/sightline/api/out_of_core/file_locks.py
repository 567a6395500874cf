"""Locks of open files: `flock` on POSIX, a locked byte on Windows.

A lock belongs to one `open` of a file, so a second `open` in the same process cannot lock the file either. The system
releases a lock when the process ends, also after a crash.
"""

from __future__ import annotations

from importlib import import_module
from typing import IO, Any

LOCKED_BYTE = 1 << 43  # beyond the end of a file, because Windows lets no other process read or write the byte


def _find_module(name: str) -> Any:
    """Return a module of the standard library; None if this system has no such module."""
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl, msvcrt = _find_module("fcntl"), _find_module("msvcrt")


def lock(file: IO[bytes]) -> None:
    """Lock the file, without waiting. A system that has neither `fcntl` nor `msvcrt` has no locks: nothing is done.

    Raises
    ------
    BlockingIOError
        The file is locked already, by another `open` in this process or in another process.
    OSError
        The file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        file.seek(LOCKED_BYTE)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(error.errno, error.strerror) from error


def unlock(file: IO[bytes]) -> None:
    """Release the lock, also for copies of the file descriptor in a forked process or in a memory map."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)
    elif msvcrt is not None:
        file.seek(LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
