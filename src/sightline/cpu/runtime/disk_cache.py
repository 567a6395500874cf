"""Object code on disk, one file a kernel, in a folder that nobody else can write to.

SIGHTLINE_CACHE=off keeps nothing on disk, SIGHTLINE_CACHE=/a/folder moves it; else it is the user's cache folder.

A file is  MAGIC · sha256(name · code) · code.  Its name is the hash of all that decides the code, so files are never
changed, only replaced by the same; each is written under another name and then renamed, so that no process meets half
of one. What cannot be trusted or written is done without: nothing here raises, `trouble` says why.
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

__all__ = ["VARIABLE", "State", "place", "read", "state", "write"]

LOADED = time.time()  # sources newer than this are not those that run
VARIABLE = "SIGHTLINE_CACHE"
LIMIT = 256 << 20  # bytes in the folder; the files used longest ago go
MAGIC = b"sightline kernel 1\n"
KERNEL, PART = ".kernel", ".part"  # endings of whole files and of those being written
OURS = re.compile(rf"[0-9a-f]{{64}}{re.escape(KERNEL)}(\.[0-9a-f]{{16}}{re.escape(PART)})?")
STALE = 3600.0  # seconds after which nobody is writing a part any more, and a use is worth noting
OTHERS = stat.S_IWGRP | stat.S_IWOTH

_trouble: list[str] = []  # why the disk was last done without
_room: dict[Path, int] = {}  # bytes that may be written before the folder is measured again


class UntrustedError(OSError):
    """A folder or file that somebody else may have written."""


@dataclass(frozen=True)
class State:
    """What there is to say of the folder.

    Parameters
    ----------
    folder : where kernels are kept; None where nowhere
    trouble : why not, or what went wrong last; None where all is well
    kernels, size : how many files and bytes are there
    """

    folder: Path | None
    trouble: str | None
    kernels: int = 0
    size: int = 0


def place(identity: str) -> str | None:
    """The file name for a kernel of this identity; None where disk is not used."""
    try:
        _folder()
        import llvmlite
        import llvmlite.binding as llvm
        import numpy

        made_by = (llvmlite.__version__, llvm.llvm_version_info, numpy.__version__, sources())
    except OSError as error:
        _note(error)
        return None
    return hashlib.sha256(f"{made_by}\n{identity}".encode()).hexdigest() + KERNEL


def read(name: str) -> bytes | None:
    """The code of that name; None where there is none, or none that is whole and ours."""
    try:
        with _opened(create=False) as folder:
            content = _content(name, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _note(error)
        return None
    code = content[len(MAGIC) + 32 :]
    if content != _packed(name, code):
        _note(f"{name} was damaged and is made anew")
        return None
    return code


def write(name: str, code: bytes) -> None:
    """Keep the code under that name."""
    try:
        with _opened(create=True) as folder:
            part = f"{name}.{os.urandom(8).hex()}{PART}"
            try:
                with _file(part, "xb", folder) as stream:
                    stream.write(_packed(name, code))
                os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
            _make_room(folder, len(code))
    except OSError as error:
        _note(error)


def state() -> State:
    """The folder as it is now."""
    path = None
    try:
        path = _folder()
        sources()
        with _opened(create=False) as folder:
            if not os.access(path, os.W_OK):
                raise PermissionError(f"{path} cannot be written to")
            sizes = [entry.st_size for name, entry in _entries(folder) if name.endswith(KERNEL)]
    except FileNotFoundError:  # it is made with the first kernel
        above = next((step for step in path.parents if step.exists()), path) if path else None
        writable = above is None or os.access(above, os.W_OK)
        return State(path, _last()) if writable else State(None, f"{above} cannot be written to")
    except OSError as error:
        return State(None, _said(error))
    return State(path, _last(), len(sizes), sum(sizes))


@cache
def sources() -> str:
    """The hash of the files that decide what code a formula becomes.

    Files that changed after this process read them are not those it runs, so nothing of it may be kept.
    """
    package = Path(__file__).parents[2]
    files = sorted([*(package / "cpu").rglob("*.py"), *(package / "formula").rglob("*.py"), package / "dropout.py"])
    digest = hashlib.sha256()
    for file in files:
        if file.stat().st_mtime > LOADED:
            raise UntrustedError(f"{file} changed after it was imported")
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


# -- the folder ----------------------------------------------------------------------------------------------------


def _folder() -> Path:
    """Where files go, by the user's word."""
    word = os.environ.get(VARIABLE, "").strip()
    if word.lower() == "off":
        raise UntrustedError(f"{VARIABLE}=off")
    if not hasattr(os, "geteuid"):
        raise UntrustedError("whose a file is cannot be told on this system")
    if word:
        path = Path(os.path.expanduser(word))
    else:
        from platformdirs import user_cache_path

        path = user_cache_path("sightline", appauthor=False)
    if not path.is_absolute():
        raise UntrustedError(f"{VARIABLE}={word} is neither off nor an absolute path")
    return path


@contextlib.contextmanager
def _opened(create: bool) -> Iterator[int]:
    """A descriptor of the folder, checked: what is opened through it stays in the folder that was checked."""
    given = _folder()
    path = Path(os.path.realpath(given))
    for step in dict.fromkeys([*reversed(given.parents), given, *reversed(path.parents), path]):
        _check_step(step, create)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise UntrustedError(f"{path} belongs to somebody else")
        if found.st_mode & OTHERS:
            raise UntrustedError(f"others may write to {path} (chmod 700 it)")
        yield folder
    finally:
        os.close(folder)


def _check_step(step: Path, create: bool) -> None:
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
    others = stat.S_IWOTH if found.st_gid == os.getegid() else OTHERS
    if stat.S_ISDIR(found.st_mode) and found.st_mode & others and not found.st_mode & stat.S_ISVTX:
        raise UntrustedError(f"others may write to {step}")


def _file(name: str, mode: str, folder: int) -> IO[bytes]:
    """A file of the folder itself: no link is followed, and no pipe waited for."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)

    return open(name, mode, opener=opened)


def _content(name: str, folder: int) -> bytes:
    """A file's bytes; its time of last use is noted."""
    with _file(name, "rb", folder) as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & OTHERS:
            raise UntrustedError(f"others may have written {name}")
        if time.time() - found.st_mtime > STALE:
            os.utime(stream.fileno())
        return stream.read()


def _packed(name: str, code: bytes) -> bytes:
    return MAGIC + hashlib.sha256(name.encode() + code).digest() + code


def _entries(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Our own files in the folder, whatever else lies there."""
    with os.scandir(folder) as found:
        for entry in found:
            if OURS.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)


def _make_room(folder: int, written: int) -> None:
    """Measure the folder at times, and bring it to ¾ of the limit when it has grown beyond."""
    path = _folder()
    _room[path] = _room.get(path, 0) - written
    if _room[path] > 0:
        return
    files = sorted(_entries(folder), key=lambda file: file[1].st_mtime)
    total = sum(entry.st_size for _, entry in files)
    aim = LIMIT if total <= LIMIT else LIMIT * 3 // 4
    for name, entry in files:
        stale = name.endswith(PART) and time.time() - entry.st_mtime > STALE
        if stale or (total > aim and name.endswith(KERNEL)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            total -= entry.st_size
    _room[path] = LIMIT - total


def _note(trouble: Any) -> None:
    _trouble[:] = [_said(trouble)]


def _last() -> str | None:
    return _trouble[-1] if _trouble else None


def _said(trouble: Any) -> str:
    return f"{trouble.filename}: {trouble.strerror}" if getattr(trouble, "strerror", None) else str(trouble)
