"""The folder of the cache on disk, in which no other user can write.

SIGHTLINE_CACHE=off disables the cache. SIGHTLINE_CACHE=/a/folder selects its folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...errors import name_file

CACHE_VARIABLE = "SIGHTLINE_CACHE"


def cache_setting() -> str:
    """Return the value of SIGHTLINE_CACHE: "off" for "OFF" and "Off" too, and "" if the variable is not set."""
    setting = os.environ.get(CACHE_VARIABLE, "").strip()
    return "off" if setting.lower() == "off" else setting


def cache_folder() -> Path:
    """Return the folder of the cache on disk, which need not exist.

    Raises
    ------
    OSError
        SIGHTLINE_CACHE is "off" or is not an absolute path, or it is not set and the user has no home folder.
    """
    setting = cache_setting()
    if setting == "off":
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


OTHER_FOLDER = "set SIGHTLINE_CACHE to another folder"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# A symbolic link is not followed, and opening a pipe does not block. Windows has neither flag.
OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class UntrustedError(OSError):
    """A folder or file that must not be used, for example because another user may have written it."""


@dataclass(frozen=True)
class PrivateFolder:
    """A folder that `open_private_folder` has checked.

    Parameters
    ----------
    path : the path of the folder, without symbolic links
    descriptor : the file descriptor of the folder, which finds the files even if the path changes; None on Windows,
        where folders have no descriptor
    """

    path: Path
    descriptor: int | None

    def open(self, name: str, mode: str) -> IO[bytes]:
        """Open a file of the folder. A new file belongs to the user alone."""

        def opener(name: str, flags: int) -> int:
            return os.open(name, flags | OPEN_FLAGS, 0o600, dir_fd=self.descriptor)

        return open(self._find(name), mode, opener=opener)

    def check(self, stream: IO[bytes], name: str) -> os.stat_result:
        """Return the status of an open file of this name. Raise UntrustedError if others may have written the file."""
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode) or (self.descriptor is not None and _may_others_write(found)):
            raise UntrustedError(f"other users may have written {name}; delete this file")
        return found

    def touch(self, name: str) -> None:
        os.utime(self._find(name), dir_fd=self.descriptor)

    def replace(self, source: str, target: str) -> None:
        """Rename the file `source` to `target`. An older file `target` is replaced.

        Windows replaces no file that another process has open. The old file `target` then stays, and the file `source`
        is deleted.
        """
        try:
            os.replace(self._find(source), self._find(target), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except PermissionError:
            if self.descriptor is not None or not os.path.exists(self._find(target)):
                raise
            self.unlink(source)

    def unlink(self, name: str) -> None:
        os.unlink(self._find(name), dir_fd=self.descriptor)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield (name, status) of each file of the folder."""
        with os.scandir(self.path if self.descriptor is None else self.descriptor) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)

    def _find(self, name: str) -> str:
        """Return how functions of `os` find a file: by its name in the open folder, or by its path."""
        return name if self.descriptor is not None else str(self.path / name)


@contextlib.contextmanager
def open_private_folder(given: Path, create: bool) -> Iterator[PrivateFolder]:
    """Check the folder and yield it. If `create` is true, a missing folder is created.

    If an OSError of the `with` block names no file, the folder's path becomes its file name.

    Raises
    ------
    UntrustedError
        Another user may write to the folder, or could redirect the path to another folder.
    """
    path = Path(os.path.realpath(given))
    if not hasattr(os, "geteuid"):
        _check_home(path)
        if create:
            os.makedirs(path, mode=0o700, exist_ok=True)
        with name_file(path):
            yield PrivateFolder(path, None)
        return
    for step in dict.fromkeys([*reversed(given.parents), given, *reversed(path.parents), path]):
        _check_path_component(step, create)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise UntrustedError(f"{path} belongs to another user; {OTHER_FOLDER}")
        if found.st_mode & WRITABLE_BY_OTHERS:
            raise UntrustedError(f"other users may write to {path}; chmod 700 {path} prevents this")
        with name_file(path):
            yield PrivateFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _check_home(path: Path) -> None:
    """Raise UntrustedError if the path is not inside the user's home folder."""
    home = Path(os.path.realpath(os.path.expanduser("~")))
    if home not in path.parents:
        raise UntrustedError(
            f"this system does not tell who may write to {path}; set SIGHTLINE_CACHE to a folder inside {home}"
        )


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
        raise UntrustedError(f"{step} belongs to another user; {OTHER_FOLDER}")
    # the user's own group may write, since it often has no other member; the last folder is checked strictly
    others = stat.S_IWOTH if found.st_gid == os.getegid() else WRITABLE_BY_OTHERS
    if stat.S_ISDIR(found.st_mode) and found.st_mode & others and not found.st_mode & stat.S_ISVTX:
        raise UntrustedError(f"other users may write to {step}; {OTHER_FOLDER}")


def _may_others_write(found: os.stat_result) -> bool:
    """True if a file belongs to another user, or other users may write to it."""
    return found.st_uid != os.geteuid() or bool(found.st_mode & WRITABLE_BY_OTHERS)
