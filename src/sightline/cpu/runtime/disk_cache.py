"""The disk cache: object code, one file per kernel, in a folder that no other user can write to.

The environment variable SIGHTLINE_CACHE selects the folder, or disables the cache; see `sightline.cache_folder`.

A file consists of  MAGIC · sha256(name · code) · code.  The file name is the hash of everything that determines the
code, so a file is never changed, only replaced by an equal file. A file is written under a temporary name and then
renamed, so that no process reads a partial file. A file that cannot be trusted is not read. If a file cannot be
written, the kernel stays in memory only. The functions of this module report an OSError in `state().error` and do not
raise the error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from ...cache_folder import cache_folder
from ...caching import find_sources, hash_sources
from ...errors import name_file

IMPORT_TIME = time.time()  # a source file that changed later may differ from the imported code
MAX_FOLDER_BYTES = 256 << 20  # if the folder is larger, its least recently used files are deleted
MAGIC = b"sightline kernel 1\n"
KERNEL_SUFFIX, PARTIAL_SUFFIX = ".kernel", ".part"  # endings of complete files and of files being written
KERNEL_FILE_PATTERN = re.compile(
    rf"[0-9a-f]{{64}}{re.escape(KERNEL_SUFFIX)}(\.[0-9a-f]{{16}}{re.escape(PARTIAL_SUFFIX)})?"
)
# A partial file older than this is abandoned. Reading a complete file older than this sets its time to now.
STALE_SECONDS = 3600.0
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_errors: list[str] = []  # only the most recent error; empty if there was no error
_write_budget: dict[Path, int] = {}  # bytes that may be written before the folder's size is measured again


class UntrustedError(OSError):
    """A folder or file that the cache must not use, for example because another user may have written it."""


@dataclass(frozen=True)
class DiskCacheState:
    """The state of the disk cache.

    Parameters
    ----------
    folder : the folder of the cache; None if the disk cache is not used
    error : why the disk cache is not used, or else its most recent error; None if there was no error
    kernels, size : number of kernel files in the folder, and their size in bytes together
    """

    folder: Path | None
    error: str | None
    kernels: int = 0
    size: int = 0


def file_name(identity: str) -> str | None:
    """Return the file name of the kernel with this identity; None if the disk cache is not used."""
    try:
        _folder()
        import llvmlite
        import llvmlite.binding as llvm
        import numpy

        versions = (llvmlite.__version__, llvm.llvm_version_info, numpy.__version__, source_hash())
    except OSError as error:
        _record_error(error)
        return None
    return hashlib.sha256(f"{versions}\n{identity}".encode()).hexdigest() + KERNEL_SUFFIX


def read(name: str) -> bytes | None:
    """Return the code stored under this file name; None if the file is missing, damaged or not trusted."""
    try:
        with _open_folder(create=False) as folder:
            content = _read_file(name, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _record_error(error)
        return None
    code = content[len(MAGIC) + 32 :]
    if content != _add_header(name, code):
        _record_error(f"{name} was damaged and is compiled again")
        return None
    return code


def write(name: str, code: bytes) -> None:
    """Store the code under this file name. An error is recorded and not raised."""
    try:
        with _open_folder(create=True) as folder:
            partial_name = f"{name}.{os.urandom(8).hex()}{PARTIAL_SUFFIX}"
            try:
                with _open_file(partial_name, "xb", folder) as stream:
                    stream.write(_add_header(name, code))
                os.replace(partial_name, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial_name, dir_fd=folder)
                raise
            _evict(folder, len(code))
    except OSError as error:
        _record_error(error)


def state() -> DiskCacheState:
    """Return the current state of the disk cache."""
    path = None
    try:
        path = _folder()
        source_hash()
        with _open_folder(create=False) as folder:
            problem = _last_error() if os.access(path, os.W_OK) else f"{path} cannot be written to"
            sizes = [entry.st_size for name, entry in _kernel_files(folder) if name.endswith(KERNEL_SUFFIX)]
    except FileNotFoundError:  # there is no folder until the first kernel is stored
        parent = next((step for step in path.parents if step.exists()), path) if path else None
        writable = parent is None or os.access(parent, os.W_OK)
        return (
            DiskCacheState(path, _last_error()) if writable else DiskCacheState(None, f"{parent} cannot be written to")
        )
    except OSError as error:
        return DiskCacheState(None, _error_message(error))
    return DiskCacheState(path, problem, len(sizes), sum(sizes))


@cache
def source_hash() -> str:
    """Return the hash of the source files that determine the generated code.

    If a source file changed after its import, its hash does not describe the code that this process runs, so that the
    disk cache must not be used.

    Raises
    ------
    UntrustedError
        A source file changed after this module was imported.
    """
    package = Path(__file__).parents[2]
    files = find_sources(package, "cpu", "formula", "reference/dropout.py")
    for file in files:
        if file.stat().st_mtime > IMPORT_TIME:
            raise UntrustedError(f"{file} changed after it was imported")
    return hash_sources(package, files)


# -- the folder ----------------------------------------------------------------------------------------------------


def _folder() -> Path:
    """Return the folder of the cache. Raise OSError if the disk cache is off or cannot be used."""
    path = cache_folder()
    if not hasattr(os, "geteuid"):
        raise UntrustedError("this system does not report the owner of a file")
    return path


@contextlib.contextmanager
def _open_folder(create: bool) -> Iterator[int]:
    """Check the folder and yield its descriptor, through which only files of the checked folder are opened.

    An OSError of the `with` block that names no file names the folder.
    """
    given = _folder()
    path = Path(os.path.realpath(given))
    for step in dict.fromkeys([*reversed(given.parents), given, *reversed(path.parents), path]):
        _check_path_component(step, create)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise UntrustedError(f"{path} belongs to another user")
        if found.st_mode & WRITABLE_BY_OTHERS:
            raise UntrustedError(f"other users may write to {path}; chmod 700 {path} prevents this")
        with name_file(path):
            yield folder
    finally:
        os.close(folder)


def _check_path_component(step: Path, create: bool) -> None:
    """Raise UntrustedError if another user owns the folder or link `step`, or may rename what the folder contains.

    Such a user could redirect the path to another folder. If `create` is true, a missing folder is created.
    """
    try:
        found = step.lstat()
    except FileNotFoundError:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(step, 0o700)
        return
    if found.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{step} belongs to another user")
    # the user's own group may write, since it often has no other member; `_open_folder` checks the last folder strictly
    others = stat.S_IWOTH if found.st_gid == os.getegid() else WRITABLE_BY_OTHERS
    if stat.S_ISDIR(found.st_mode) and found.st_mode & others and not found.st_mode & stat.S_ISVTX:
        raise UntrustedError(f"other users may write to {step}")


def _open_file(name: str, mode: str, folder: int) -> IO[bytes]:
    """Open a file of the folder. A symbolic link is not followed, and opening a pipe does not block."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)

    return open(name, mode, opener=opener)


def _read_file(name: str, folder: int) -> bytes:
    """Return a file's bytes. If the file is older than `STALE_SECONDS`, set its time of modification to now.

    A disk that is read-only keeps the time. It also keeps the file, because nothing is deleted there.
    """
    with _open_file(name, "rb", folder) as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS:
            raise UntrustedError(f"other users may have written {name}")
        if time.time() - found.st_mtime > STALE_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(stream.fileno())
        return stream.read()


def _add_header(name: str, code: bytes) -> bytes:
    """Return the content of a cache file: MAGIC, the hash of file name and code, and the code."""
    return MAGIC + hashlib.sha256(name.encode() + code).digest() + code


def _kernel_files(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, status) of each cache file in the folder, complete or partial. Other files are ignored."""
    with os.scandir(folder) as found:
        for entry in found:
            if KERNEL_FILE_PATTERN.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)


def _evict(folder: int, written: int) -> None:
    """If the folder is larger than `MAX_FOLDER_BYTES`, delete the least recently used kernels until ¾ of that is left.

    Abandoned partial files are deleted in any case. The folder is measured at the first write of this process, and
    again when as many bytes were written as the last measurement left below the limit.
    """
    path = _folder()
    _write_budget[path] = _write_budget.get(path, 0) - written
    if _write_budget[path] > 0:
        return
    files = sorted(_kernel_files(folder), key=lambda file: file[1].st_mtime)
    total = sum(entry.st_size for _, entry in files)
    target_size = MAX_FOLDER_BYTES if total <= MAX_FOLDER_BYTES else MAX_FOLDER_BYTES * 3 // 4
    for name, entry in files:
        stale = name.endswith(PARTIAL_SUFFIX) and time.time() - entry.st_mtime > STALE_SECONDS
        if stale or (total > target_size and name.endswith(KERNEL_SUFFIX)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            total -= entry.st_size
    _write_budget[path] = MAX_FOLDER_BYTES - total


def _record_error(error: Any) -> None:
    _errors[:] = [_error_message(error)]


def _last_error() -> str | None:
    return _errors[-1] if _errors else None


def _error_message(error: Any) -> str:
    return f"{error.filename}: {error.strerror}" if getattr(error, "strerror", None) else str(error)
