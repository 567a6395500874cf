"""A plugin of pytest that takes away from Python what Linux has and Windows lacks. It must load before Sightline does.

    pytest -p pretended_system tests/cpu/test_systems.py

A program calls `pretend` first. What Windows has in place of POSIX is imitated here as far as Sightline uses it: open
files that cannot be removed, and names of the environment in capital letters. An imitation shows that the
library does not need the names of POSIX. It does not show that the library runs on Windows.
"""

import asyncio  # noqa: F401 - the standard library itself chooses at its import between POSIX and Windows
import builtins
import contextlib
import ctypes
import errno
import multiprocessing.util  # noqa: F401 - likewise
import os
import shutil
import subprocess  # noqa: F401 - likewise
import sys
import tempfile  # noqa: F401 - likewise
from types import SimpleNamespace

POSIX_MODULES = ("fcntl", "grp", "pwd", "resource")
POSIX_NAMES = (
    *("environb", "fork", "forkpty", "getegid", "geteuid", "mkfifo", "posix_fallocate", "register_at_fork"),
    *("sched_getaffinity", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "RTLD_NOLOAD"),
)
LINUX_FOLDERS = ("/proc/", "/sys/")


def pretend():
    """Take the names away from this process, for good."""
    for name in POSIX_MODULES:
        sys.modules[name] = None  # an import raises ImportError
    for name in POSIX_NAMES:
        delattr(os, name)
    os.supports_bytes_environ = shutil._use_fd_functions = False
    os.environ = os._Environ(dict(os.environ), str.upper, str, str, str)  # noqa: B003 - as Windows has it
    for name in ("open", "unlink", "replace", "utime", "scandir", "mkdir"):
        setattr(os, name, _without_descriptors(getattr(os, name)))
    for name in ("unlink", "remove", "replace"):
        setattr(os, name, _refusing_open_files(getattr(os, name)))
    os.fstat = _without_owners(os.fstat)
    builtins.open = _without_linux(builtins.open)
    ctypes.CDLL.__init__ = _with_a_name(ctypes.CDLL.__init__)


def pytest_configure(config):
    pretend()


def _without_descriptors(function):
    """Return the function of `os` for paths alone."""

    def checked(path, *arguments, **options):
        if isinstance(path, int):
            raise TypeError("path should be string, bytes or os.PathLike, not int")
        if any(name.endswith("dir_fd") and value is not None for name, value in options.items()):
            raise NotImplementedError("dir_fd unavailable on this platform")
        return function(path, *arguments, **options)

    return checked


def _refusing_open_files(function):
    """Return the function of `os` that removes or replaces files, for files that this process has not open."""
    fstat, stat, descriptors = os.fstat, os.stat, os.listdir

    def open_files():
        for name in descriptors("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed
                yield fstat(int(name))

    def checked(*paths, **options):
        for path in filter(os.path.exists, paths):
            if any(os.path.samestat(status, stat(path)) for status in open_files()):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return function(*paths, **options)

    return checked


def _without_owners(fstat):
    """Return `fstat` as Windows has it: everybody may write, the owner is 0, and no blocks are counted."""

    def found(descriptor):
        status = fstat(descriptor)
        values = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        del values["st_blocks"]
        return SimpleNamespace(**values | {"st_uid": 0, "st_gid": 0, "st_mode": status.st_mode | 0o666})

    return found


def _without_linux(function):
    """Return `open` for files outside of the folders that only Linux has."""

    def checked(file, *arguments, **options):
        if str(file).startswith(LINUX_FOLDERS):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
        return function(file, *arguments, **options)

    return checked


def _with_a_name(initialise):
    """Return the constructor of ctypes.CDLL, whose name Windows searches for a separator of folders."""

    def checked(self, name, *arguments, **options):
        "/" in name  # noqa: B015 - raises TypeError for None
        initialise(self, name, *arguments, **options)

    return checked
