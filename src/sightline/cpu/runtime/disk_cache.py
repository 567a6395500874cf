"""The disk cache: the object code of compiled kernels, one file each, in a folder that no other user can write to.

SIGHTLINE_CACHE=off disables the cache. SIGHTLINE_CACHE=/a/folder selects its folder.

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
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import name_file

CACHE_VARIABLE = "SIGHTLINE_CACHE"
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
OTHER_FOLDER = f"set {CACHE_VARIABLE} to another folder"
NOT_WRITABLE = f"cannot be written to; {OTHER_FOLDER}"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
REPORTS_OWNERS = hasattr(os, "geteuid")  # False on Windows

_errors: list[str] = []  # only the most recent error; empty if there was no error
_write_budget: dict[Path, int] = {}  # bytes that may be written before the folder's size is measured again


class UntrustedError(OSError):
    """A folder or file that must not be used, for example because another user may have written it."""


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
        folder = check_folder(create=False)
        with name_file(folder):
            content = _read_file(folder / name)
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
        folder = check_folder(create=True)
        partial = folder / f"{name}.{os.urandom(8).hex()}{PARTIAL_SUFFIX}"
        with name_file(folder):
            try:
                with open(partial, "xb", opener=_open) as stream:
                    stream.write(_add_header(name, code))
                _rename(partial, folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink()
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
        folder = check_folder(create=False)
        sizes = [status.st_size for file, status in _kernel_files(folder) if file.suffix == KERNEL_SUFFIX]
        problem = _last_error() if os.access(path, os.W_OK) else f"{path} {NOT_WRITABLE}"
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
    package, digest = Path(__file__).parents[2], hashlib.sha256()
    constants = "arrays/layouts.py", "arrays/row_formats.py", "call/gradient_parts.py", "reference/dropout.py"
    writers = [file for folder in ("cpu", "formula") for file in sorted((package / folder).rglob("*.py"))]
    for file in (*writers, *[package / name for name in constants]):  # kernels contain constants of these modules
        if file.stat().st_mtime > IMPORT_TIME:
            raise UntrustedError(f"{file} changed after it was imported; start Python again")
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder that SIGHTLINE_CACHE selects, by default the user's cache folder. It need not exist.

    Raises
    ------
    OSError
        SIGHTLINE_CACHE is "off" or is not an absolute path, or it is not set and the user has no home folder.
    """
    setting = os.environ.get(CACHE_VARIABLE, "").strip()
    if setting.lower() == "off":
        raise OSError(f"{CACHE_VARIABLE}=off")
    if setting:
        path = Path(os.path.expanduser(setting))
        if not path.is_absolute():
            raise OSError(f"{CACHE_VARIABLE}={setting} is neither off nor an absolute path")
        return path
    from platformdirs import user_cache_path

    try:
        path = user_cache_path("sightline", appauthor=False)
    except RuntimeError:  # newer versions of platformdirs raise it, older ones return a path that begins with ~
        path = Path("~")
    if not path.is_absolute():
        raise OSError(f"the user has no home folder; set HOME, or {CACHE_VARIABLE}=/a/folder")
    return path


def check_folder(create: bool) -> Path:
    """Return the path of the cache folder without symbolic links. If `create` is true, a missing folder is created.

    Raises
    ------
    UntrustedError
        Another user may write to the folder, or could redirect the path to another folder.
    """
    configured = cache_folder()
    path = Path(os.path.realpath(configured))
    if not REPORTS_OWNERS:
        home = Path(os.path.realpath(os.path.expanduser("~")))
        if home not in path.parents:
            raise UntrustedError(
                f"this system does not tell who may write to {path}; set {CACHE_VARIABLE} to a folder inside {home}"
            )
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path
    for step in dict.fromkeys([*reversed(configured.parents), configured, *reversed(path.parents), path]):
        _check_path_component(step, create)
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise UntrustedError(f"{path} belongs to another user; {OTHER_FOLDER}")
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise UntrustedError(f"other users may write to {path}; chmod 700 {path} prevents this")
    return path


def _check_path_component(step: Path, create: bool) -> None:
    """Raise UntrustedError if another user owns the folder or link `step`, or may rename what the folder contains.

    Such a user could redirect the path to another folder. If `create` is true, a missing folder is created.
    """
    try:
        status = step.lstat()
    except FileNotFoundError:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(step, 0o700)
        return
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{step} belongs to another user; {OTHER_FOLDER}")
    # the user's own group may write, since it often has no other member; the last folder is checked strictly
    others = stat.S_IWOTH if status.st_gid == os.getegid() else WRITABLE_BY_OTHERS
    if stat.S_ISDIR(status.st_mode) and status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        raise UntrustedError(f"other users may write to {step}; {OTHER_FOLDER}")


def _open(path: str, flags: int) -> int:
    """Open a file. A new file belongs to the user alone, a link is not followed, and opening a pipe does not block."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)


def _read_file(path: Path) -> bytes:
    """Return a file's bytes. If the file is older than `STALE_SECONDS`, set its time of modification to now.

    On a read-only disk the time stays unchanged. No file is deleted there either.

    Raises
    ------
    UntrustedError
        Another user may have written the file.
    """
    with open(path, "rb", opener=_open) as stream:
        status = os.fstat(stream.fileno())
        others = REPORTS_OWNERS and (status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS)
        if others or not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"other users may have written {path.name}; delete this file")
        if time.time() - status.st_mtime > STALE_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(path)
        return stream.read()


def _rename(source: Path, target: Path) -> None:
    """Rename a file. An older file `target` is replaced, unless it is open on Windows; then the new file is deleted."""
    try:
        source.replace(target)
    except PermissionError:
        if not target.exists():
            raise
        source.unlink()


def _add_header(name: str, code: bytes) -> bytes:
    """Return the content of a cache file: MAGIC, the hash of file name and code, and the code."""
    return MAGIC + hashlib.sha256(name.encode() + code).digest() + code


def _kernel_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield (path, status) of each cache file in the folder, complete or partial. Other files are ignored."""
    for file in folder.iterdir():
        if KERNEL_FILE_PATTERN.fullmatch(file.name):
            with contextlib.suppress(FileNotFoundError):
                yield file, file.lstat()


def _evict(folder: Path, written: int) -> None:
    """If the folder is larger than `MAX_FOLDER_BYTES`, delete the least recently used kernels, down to ¾ of this limit.

    Abandoned partial files are deleted too. `written` is the size of a new file. The folder's size is measured at the
    first write of this process, and again when the new files may have filled the rest of `MAX_FOLDER_BYTES`.
    """
    _write_budget[folder] = _write_budget.get(folder, 0) - written
    if _write_budget[folder] > 0:
        return
    files = sorted(_kernel_files(folder), key=lambda file: file[1].st_mtime)
    total = sum(status.st_size for _, status in files)
    target_size = MAX_FOLDER_BYTES if total <= MAX_FOLDER_BYTES else MAX_FOLDER_BYTES * 3 // 4
    for file, status in files:
        stale = file.suffix == PARTIAL_SUFFIX and time.time() - status.st_mtime > STALE_SECONDS
        if stale or (total > target_size and file.suffix == KERNEL_SUFFIX):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows deletes no file that is being read
                file.unlink()
            total -= status.st_size
    _write_budget[folder] = MAX_FOLDER_BYTES - total


def _record_error(error: Any) -> None:
    _errors[:] = [_error_message(error)]


def _last_error() -> str | None:
    return _errors[-1] if _errors else None


def _error_message(error: Any) -> str:
    return f"{error.filename}: {error.strerror}" if getattr(error, "strerror", None) else str(error)
