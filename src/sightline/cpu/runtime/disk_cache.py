"""Object code on disk, one file a kernel, in a folder that nobody else can write to.

SIGHTLINE_CACHE=off keeps nothing on disk, SIGHTLINE_CACHE=/a/folder moves it; else it is the user's cache folder.

A file is  MAGIC · sha256(name · code) · code.  Its name is the hash of all that decides the code, so files are never
changed, only replaced by the same; each is written under another name and then renamed, so that no process meets half
of one. What cannot be trusted or written is done without: nothing here raises, `error` says why.
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

__all__ = ["CACHE_VARIABLE", "State", "file_name", "read", "state", "write"]

IMPORT_TIME = time.time()  # sources newer than this are not those that run
CACHE_VARIABLE = "SIGHTLINE_CACHE"
MAX_FOLDER_BYTES = 256 << 20  # bytes in the folder; the files used longest ago go
MAGIC = b"sightline kernel 1\n"
KERNEL_SUFFIX, PARTIAL_SUFFIX = ".kernel", ".part"  # endings of whole files and of those being written
KERNEL_FILE_PATTERN = re.compile(
    rf"[0-9a-f]{{64}}{re.escape(KERNEL_SUFFIX)}(\.[0-9a-f]{{16}}{re.escape(PARTIAL_SUFFIX)})?"
)
STALE_SECONDS = 3600.0  # seconds after which nobody is writing a part any more, and a use is worth noting
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_errors: list[str] = []  # why the disk was last done without
_write_budget: dict[Path, int] = {}  # bytes that may be written before the folder is measured again


class UntrustedError(OSError):
    """A folder or file that somebody else may have written."""


@dataclass(frozen=True)
class State:
    """What there is to say of the folder.

    Parameters
    ----------
    folder : where kernels are kept; None where nowhere
    error : why not, or what went wrong last; None where all is well
    kernels, size : how many files and bytes are there
    """

    folder: Path | None
    error: str | None
    kernels: int = 0
    size: int = 0


def file_name(identity: str) -> str | None:
    """The file name for a kernel of this identity; None where disk is not used."""
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
    """The code of that name; None where there is none, or none that is whole and ours."""
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
        _record_error(f"{name} was damaged and is made anew")
        return None
    return code


def write(name: str, code: bytes) -> None:
    """Keep the code under that name."""
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


def state() -> State:
    """The folder as it is now."""
    path = None
    try:
        path = _folder()
        source_hash()
        with _open_folder(create=False) as folder:
            if not os.access(path, os.W_OK):
                raise PermissionError(f"{path} cannot be written to")
            sizes = [entry.st_size for name, entry in _kernel_files(folder) if name.endswith(KERNEL_SUFFIX)]
    except FileNotFoundError:  # it is made with the first kernel
        above = next((step for step in path.parents if step.exists()), path) if path else None
        writable = above is None or os.access(above, os.W_OK)
        return State(path, _last_error()) if writable else State(None, f"{above} cannot be written to")
    except OSError as error:
        return State(None, _error_message(error))
    return State(path, _last_error(), len(sizes), sum(sizes))


@cache
def source_hash() -> str:
    """The hash of the files that decide what code a formula becomes.

    Files that changed after this process read them are not those it runs, so nothing of it may be kept.
    """
    package = Path(__file__).parents[2]
    files = sorted([*(package / "cpu").rglob("*.py"), *(package / "formula").rglob("*.py"), package / "dropout.py"])
    digest = hashlib.sha256()
    for file in files:
        if file.stat().st_mtime > IMPORT_TIME:
            raise UntrustedError(f"{file} changed after it was imported")
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


# -- the folder ----------------------------------------------------------------------------------------------------


def _folder() -> Path:
    """Where files go, by the user's word."""
    setting = os.environ.get(CACHE_VARIABLE, "").strip()
    if setting.lower() == "off":
        raise UntrustedError(f"{CACHE_VARIABLE}=off")
    if not hasattr(os, "geteuid"):
        raise UntrustedError("whose a file is cannot be told on this system")
    if setting:
        path = Path(os.path.expanduser(setting))
    else:
        from platformdirs import user_cache_path

        path = user_cache_path("sightline", appauthor=False)
    if not path.is_absolute():
        raise UntrustedError(f"{CACHE_VARIABLE}={setting} is neither off nor an absolute path")
    return path


@contextlib.contextmanager
def _open_folder(create: bool) -> Iterator[int]:
    """A descriptor of the folder, checked: what is opened through it stays in the folder that was checked."""
    given = _folder()
    path = Path(os.path.realpath(given))
    for step in dict.fromkeys([*reversed(given.parents), given, *reversed(path.parents), path]):
        _check_path_component(step, create)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise UntrustedError(f"{path} belongs to somebody else")
        if found.st_mode & WRITABLE_BY_OTHERS:
            raise UntrustedError(f"others may write to {path} (chmod 700 it)")
        yield folder
    finally:
        os.close(folder)


def _check_path_component(step: Path, create: bool) -> None:
    """Whoever owns a folder or link on the way, or may rename what lies in it, chooses where the way leads."""
    try:
        found = step.lstat()
    except FileNotFoundError:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(step, 0o700)
        return
    if found.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{step} belongs to somebody else")
    # one's own group is often nobody but oneself; the folder at the end of the way is held to more
    others = stat.S_IWOTH if found.st_gid == os.getegid() else WRITABLE_BY_OTHERS
    if stat.S_ISDIR(found.st_mode) and found.st_mode & others and not found.st_mode & stat.S_ISVTX:
        raise UntrustedError(f"others may write to {step}")


def _open_file(name: str, mode: str, folder: int) -> IO[bytes]:
    """A file of the folder itself: no link is followed, and no pipe waited for."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)

    return open(name, mode, opener=opened)


def _read_file(name: str, folder: int) -> bytes:
    """A file's bytes; its time of last use is noted."""
    with _open_file(name, "rb", folder) as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS:
            raise UntrustedError(f"others may have written {name}")
        if time.time() - found.st_mtime > STALE_SECONDS:
            os.utime(stream.fileno())
        return stream.read()


def _add_header(name: str, code: bytes) -> bytes:
    return MAGIC + hashlib.sha256(name.encode() + code).digest() + code


def _kernel_files(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Our own files in the folder, whatever else lies there."""
    with os.scandir(folder) as found:
        for entry in found:
            if KERNEL_FILE_PATTERN.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)


def _evict(folder: int, written: int) -> None:
    """Measure the folder at times, and bring it to ¾ of the limit when it has grown beyond."""
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
