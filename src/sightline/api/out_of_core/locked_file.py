"""Files that only one call at a time may write, and whose bytes are allocated on the disk before they are written."""

from __future__ import annotations

import errno
import os
import shutil
from typing import IO, Any

import numpy as np

from ...errors import ParameterError, name_file
from . import file_locks

NOT_SUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # no such operation


class LockedFile:
    """A file that is open for reading and writing, and locked: no other call can open it until it is closed.

    The system releases the lock when the process ends, also after a crash. If the file system has no locks, the file is
    used without a lock.

    Parameters
    ----------
    path : the path of the file, which is created if it does not exist
    argument : the argument of the call that named the file

    Raises
    ------
    ParameterError
        Another call has locked the file, in this process or in another one.
    """

    def __init__(self, path: str | os.PathLike[str], argument: str) -> None:
        self.path, self.argument = os.path.realpath(os.fspath(path)), argument
        self._open()

    def _open(self) -> None:
        while True:
            existed = os.path.exists(self.path)
            file = open(self.path, "r+b", buffering=0, opener=_open_or_create)  # noqa: SIM115
            try:
                self._lock(file)
                if _has_name(file, self.path):
                    self.file: IO[bytes] = file
                    self.existed, self.first_size = existed, os.fstat(file.fileno()).st_size
                    return
            except BaseException:
                file.close()
                raise
            file.close()  # another call has removed the file between `open` and the lock

    def _lock(self, file: IO[bytes]) -> None:
        try:
            file_locks.lock(file)
        except BlockingIOError as error:
            raise ParameterError(
                f"{self.argument}: another call uses {self.path}",
                "one call at a time",
                f"wait until the other call has finished, or give another {self.argument}",
            ) from error
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise

    def is_in_place(self) -> bool:
        """Return False if the file has been removed or another file has its name."""
        return _has_name(self.file, self.path)

    def return_to_place(self, size: int) -> None:
        """If the path no longer names this file, open a file of that name and allocate its first `size` bytes."""
        if not self.is_in_place():
            removed = self.file
            self._open()
            removed.close()
            self.allocate(size)

    def allocate(self, size: int) -> None:
        """Allocate the first `size` bytes of the file on the disk. The bytes of an existing file keep their values.

        Raises
        ------
        OSError
            The disk has no space, or a file may not be so large.
        """
        reserve(self.file, 0, size, self.path, self.argument)

    def write(self, offset: int, values: Any) -> None:
        """Write the bytes of a contiguous array, or a bytes object, to the file from byte `offset` on."""
        data = _bytes_of(values)
        with name_file(self.path):
            self.file.seek(offset)
            while data:
                data = data[self.file.write(data) :]

    def read(self, offset: int, values: Any) -> bool:
        """Fill a contiguous array from byte `offset` of the file on. Return False if the file is too short."""
        data = _bytes_of(values)
        with name_file(self.path):
            self.file.seek(offset)
            while data:
                count = self.file.readinto(data)  # type: ignore[attr-defined]
                if not count:
                    return False
                data = data[count:]
        return True

    def truncate(self, size: int) -> None:
        """Cut the file after `size` bytes."""
        os.ftruncate(self.file.fileno(), size)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with name_file(self.path):
            os.fsync(self.file.fileno())

    def restore_size(self) -> None:
        """Cut the file to the size that it had before it was opened; remove it if it did not exist then."""
        if self.existed:
            self.truncate(self.first_size)
        else:
            self.remove()

    def remove(self) -> None:
        """Remove the file. If another file has its name now, that file is not removed."""
        if not self.file.closed and self.is_in_place():
            if file_locks.fcntl is None:  # Windows, which removes no open file
                self.close()
            os.unlink(self.path)

    def close(self) -> None:
        """Release the lock and close the file.

        A forked process and a memory map of the file have copies of the descriptor. Without the release, the file would
        stay locked until these copies are closed.
        """
        if not self.file.closed:
            try:
                file_locks.unlock(self.file)
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
        self.file.close()


def reserve(file: IO[bytes], start: int, size: int, path: str, what: str) -> None:
    """Allocate `size` bytes of the file from byte `start` on, so that no later write of them fails on a full disk.

    If the file system cannot allocate, `size` is only compared with the free bytes of the disk.

    Raises
    ------
    OSError
        The disk has no space, or a file may not be so large. The message has the bytes needed and the bytes free.
    """
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
    try:
        if _allocate(file, start, size):
            return
        found = os.fstat(file.fileno())
        held = found.st_blocks * 512 if hasattr(found, "st_blocks") else found.st_size  # Windows counts no blocks
        if size - held > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        needed = f"{what} needs {size:,} bytes and {free:,} bytes are free; free some, or choose another disk"
        raise OSError(error.errno, f"{error.strerror}: {needed}", path) from error


def _allocate(file: IO[bytes], start: int, size: int) -> bool:
    """Allocate `size` bytes from byte `start` on. Return False if the system or the file system cannot allocate."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        if size:
            os.posix_fallocate(file.fileno(), start, size)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return False
    return True


def _has_name(file: IO[bytes], path: str) -> bool:
    """True if the open file is the file that the path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


def _bytes_of(values: Any) -> memoryview:
    if isinstance(values, np.ndarray):
        assert values.flags.c_contiguous
        values = values.reshape(-1).view(np.uint8)
    return memoryview(values)
