"""The disk cache: the object code of compiled kernels, one file each, in a folder that no other user can write to.

The environment variable SIGHTLINE_CACHE selects the folder, or disables the cache; see `cache_folder`.

A file consists of  MAGIC · sha256(name · code) · code.  The file name is the hash of everything that determines the
code, so a file is never changed, only replaced by an equal file. A file is written under a temporary name and then
renamed, so that no process reads a partial file. A file that another user may have written is not read. If a file
cannot be written, the kernel stays in memory only. `file_name`, `read`, `write` and `state` raise no OSError: the last
such error is in `state().error`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...caching import find_sources, hash_sources
from .cache_folder import PrivateFolder, UntrustedError, cache_folder, open_private_folder

IMPORT_TIME = time.time()  # a source file that changed later may differ from the imported code
MAX_FOLDER_BYTES = 256 << 20  # if the folder is larger, its least recently used files are deleted
MAGIC = b"sightline kernel 1\n"
KERNEL_SUFFIX, PARTIAL_SUFFIX = ".kernel", ".part"  # endings of complete files and of files being written
KERNEL_FILE_PATTERN = re.compile(
    rf"[0-9a-f]{{64}}{re.escape(KERNEL_SUFFIX)}(\.[0-9a-f]{{16}}{re.escape(PARTIAL_SUFFIX)})?"
)
# A partial file of this age is abandoned, and may be deleted. If a complete file of this age is read, its time of
# modification is set to now: `_evict` deletes the files with the oldest times.
STALE_SECONDS = 3600.0
NOT_WRITABLE = "cannot be written to; set SIGHTLINE_CACHE to another folder"

_errors: list[str] = []  # only the most recent error; empty if there was no error
_write_budget: dict[Path, int] = {}  # bytes that may be written before the folder's size is measured again


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
    """Return the file name for a text that determines a kernel's code; None if the disk cache is not used."""
    try:
        cache_folder()
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
        with open_private_folder(cache_folder(), create=False) as folder:
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
    """Store the code under this file name. An OSError is reported in `state().error` and not raised."""
    try:
        with open_private_folder(cache_folder(), create=True) as folder:
            partial_name = f"{name}.{os.urandom(8).hex()}{PARTIAL_SUFFIX}"
            try:
                with folder.open(partial_name, "xb") as stream:
                    stream.write(_add_header(name, code))
                folder.replace(partial_name, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    folder.unlink(partial_name)
                raise
            _evict(folder, len(code))
    except OSError as error:
        _record_error(error)


def state() -> DiskCacheState:
    """Return the current state of the disk cache."""
    path = None
    try:
        path = cache_folder()
        source_hash()
        with open_private_folder(path, create=False) as folder:
            problem = _last_error() if os.access(path, os.W_OK) else f"{path} {NOT_WRITABLE}"
            sizes = [entry.st_size for name, entry in _kernel_files(folder) if name.endswith(KERNEL_SUFFIX)]
    except FileNotFoundError:  # there is no folder until the first kernel is stored
        parent = next((step for step in path.parents if step.exists()), path) if path else None
        writable = parent is None or os.access(parent, os.W_OK)
        return DiskCacheState(path, _last_error()) if writable else DiskCacheState(None, f"{parent} {NOT_WRITABLE}")
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
            raise UntrustedError(f"{file} changed after it was imported; start Python again")
    return hash_sources(package, files)


def _read_file(name: str, folder: PrivateFolder) -> bytes:
    """Return a file's bytes. If the file is older than `STALE_SECONDS`, set its time of modification to now.

    On a read-only disk the time stays unchanged. No file is deleted there either.
    """
    with folder.open(name, "rb") as stream:
        if time.time() - folder.check(stream, name).st_mtime > STALE_SECONDS:
            with contextlib.suppress(OSError):
                folder.touch(name)
        return stream.read()


def _add_header(name: str, code: bytes) -> bytes:
    """Return the content of a cache file: MAGIC, the hash of file name and code, and the code."""
    return MAGIC + hashlib.sha256(name.encode() + code).digest() + code


def _kernel_files(folder: PrivateFolder) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, status) of each cache file in the folder, complete or partial. Other files are ignored."""
    return (file for file in folder.files() if KERNEL_FILE_PATTERN.fullmatch(file[0]))


def _evict(folder: PrivateFolder, written: int) -> None:
    """If the folder is larger than `MAX_FOLDER_BYTES`, delete the least recently used kernels, down to ¾ of this limit.

    Abandoned partial files are deleted too. `written` is the size of a new file. The folder's size is measured at the
    first write of this process, and again when the new files may have filled the rest of `MAX_FOLDER_BYTES`.
    """
    _write_budget[folder.path] = _write_budget.get(folder.path, 0) - written
    if _write_budget[folder.path] > 0:
        return
    files = sorted(_kernel_files(folder), key=lambda file: file[1].st_mtime)
    total = sum(entry.st_size for _, entry in files)
    target_size = MAX_FOLDER_BYTES if total <= MAX_FOLDER_BYTES else MAX_FOLDER_BYTES * 3 // 4
    for name, entry in files:
        stale = name.endswith(PARTIAL_SUFFIX) and time.time() - entry.st_mtime > STALE_SECONDS
        if stale or (total > target_size and name.endswith(KERNEL_SUFFIX)):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows deletes no file that is being read
                folder.unlink(name)
            total -= entry.st_size
    _write_budget[folder.path] = MAX_FOLDER_BYTES - total


def _record_error(error: Any) -> None:
    _errors[:] = [_error_message(error)]


def _last_error() -> str | None:
    return _errors[-1] if _errors else None


def _error_message(error: Any) -> str:
    return f"{error.filename}: {error.strerror}" if getattr(error, "strerror", None) else str(error)
