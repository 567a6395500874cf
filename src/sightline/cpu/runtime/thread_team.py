"""How many threads a kernel gets, and whose: every thread calls it once, and the kernel hands out its own work.

A pool of our own beside torch's would fight it for the processors, since OpenMP's threads spin for a while after each
of torch's operations. So where the process has loaded an OpenMP runtime its team is borrowed; elsewhere a small pool
of our own serves. In a forked child the parent's OpenMP team is dead and libgomp would wait for it for ever, so there
too the pool serves.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from ...errors import ParameterError
from ...validation import check_threads

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["THREADS_VARIABLE", "call", "resolve_thread_count", "thread_count", "threads"]

THREADS_VARIABLE = "SIGHTLINE_THREADS"
MAX_THREADS = max(os.cpu_count() or 1, 16)  # more threads than that find no processor

# -- how many ------------------------------------------------------------------------------------------------------

_requested_threads: ContextVar[int | None] = ContextVar("threads", default=None)


def threads(number: int) -> AbstractContextManager[None]:
    """Generated kernels use that many threads within the `with` block, in this Python thread or task.

    Parameters
    ----------
    number : int, at least 1

    Returns
    -------
    context manager
        Blocks nest, the innermost holds. `attention(..., threads=...)` is heard before it, the variable
        SIGHTLINE_THREADS, torch's own setting and the number of processors after it.

    Raises
    ------
    ParameterError
        For what is no whole number of at least 1.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(3, dtype=np.float32)
    >>> with sightline.threads(1):
    ...     out = sightline.attention(x, x, x)
    """
    check_threads("threads", number)
    return _thread_scope(number)


@contextmanager
def _thread_scope(number: int) -> Iterator[None]:
    token = _requested_threads.set(number)
    try:
        yield
    finally:
        _requested_threads.reset(token)


def thread_count(requested: int | None = None) -> int:
    """Threads to use, as `resolve_thread_count` says."""
    return resolve_thread_count(requested)[0]


def resolve_thread_count(requested: int | None = None) -> tuple[int, str]:
    """Threads to use and who said so.

    The argument, else the innermost `with threads(...)`, else SIGHTLINE_THREADS, else torch's own setting where torch
    is loaded, else the processors we may run on.

    Raises
    ------
    ParameterError
        Where SIGHTLINE_THREADS is asked and is no whole number of at least 1.
    """
    if requested is not None:
        return requested, "the argument threads"
    within = _requested_threads.get()
    if within is not None:
        return within, "sightline.threads(...)"
    setting = os.environ.get(THREADS_VARIABLE)
    if setting:
        try:
            number = int(setting)
        except ValueError:
            number = 0
        if not 1 <= number < 2**31:
            raise ParameterError(
                f"{THREADS_VARIABLE}={setting!r}", "a whole number of at least 1", f"unset it, or {THREADS_VARIABLE}=1"
            )
        return number, THREADS_VARIABLE
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads()), "torch.get_num_threads()"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(usable, _cgroup_quota()), 1), "the processors this process may use"


@cache
def _cgroup_quota(path: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Processors' worth of time a container grants, rounded up (Linux, cgroup v2: "quota period" or "max period")."""
    try:
        with open(path) as line:
            quota, period = line.read().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return MAX_THREADS


# -- whose ---------------------------------------------------------------------------------------------------------


def call(address: int, packed_arguments: Any, threads: int, keep_alive: tuple[Any, ...]) -> None:
    """Call void f(void *) at the address with the address of `packed_arguments`, once on each of up to that many threads.

    Fewer may come where no more are to be had. `keep_alive` is all memory the words point to: threads of the pool hold it and
    the code, so that an exception in this one, Ctrl-C say, cannot free what they still use.
    """
    function, argument = _FUNCTION(address), packed_arguments.ctypes.data
    if threads == 1:
        function(argument)
        return
    threads = min(threads, MAX_THREADS)
    team = _openmp_team()
    if team is not None:
        team(address, argument, threads, 0)  # returns when every thread is done
        return
    futures = _submit_to_pool(threads - 1, function, argument, (address, packed_arguments, keep_alive))
    function(argument)
    for future in futures:  # what has not begun by now would find no work
        if not future.cancel():
            future.result()


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _submit_to_pool(number: int, function: Any, argument: int, keep_alive: tuple[Any, ...]) -> list[Future[None]]:
    """The call on that many threads of the pool; on fewer as the interpreter ends or threads run out."""
    futures: list[Future[None]] = []
    try:
        pool = _pool()
        for _ in range(number):
            futures.append(pool.submit(_call_function, function, argument, keep_alive))
    except RuntimeError:
        pass
    return futures


def _call_function(function: Any, argument: int, keep_alive: tuple[Any, ...]) -> None:
    function(argument)


class Teams:
    """What this process has: its pool, once made, and the host's OpenMP, looked for when modules have been loaded."""

    def __init__(self, is_forked: bool = False) -> None:
        self.is_forked = is_forked
        self.pool: ThreadPoolExecutor | None = None
        self.host: Callable[..., None] | None = None
        self.modules = -1  # how many were loaded when last looked
        self.torch = False  # whether the host's team is torch's


def _is_forked_process() -> bool:
    """Whether multiprocessing forked this process before this module was there to be told."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None:
        return False
    return sys.modules["__main__"].__name__ != "__mp_main__"  # its name where the process was spawned


_teams = Teams(is_forked=_is_forked_process())
_parent_teams: list[
    Teams
] = []  # the parent's; its pool's threads are gone, and so nothing of it may be touched or freed


def _reset_after_fork() -> None:
    global _teams
    _parent_teams.append(_teams)
    _teams = Teams(is_forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def _pool() -> ThreadPoolExecutor:
    if _teams.pool is None:
        from concurrent.futures import ThreadPoolExecutor

        _teams.pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="sightline")
    return _teams.pool


def _openmp_team() -> Callable[..., None] | None:
    """GOMP_parallel(function, data, threads, flags) of the host's OpenMP, which LLVM's and Intel's have too."""
    teams = _teams
    if teams.is_forked:
        return None
    if not teams.torch and teams.modules != len(sys.modules):
        teams.modules = len(sys.modules)
        extension = getattr(getattr(sys.modules.get("torch"), "_C", None), "__file__", None)
        team = None if extension is None else _find_gomp_parallel(extension)  # as torch itself finds it
        teams.torch = team is not None
        teams.host = team or next(filter(None, map(_find_gomp_parallel, _openmp_libraries())), None)
    return teams.host


def _find_gomp_parallel(library: str) -> Callable[..., None] | None:
    """GOMP_parallel as the library, which is loaded already, or those it needs have it."""
    try:
        team = ctypes.CDLL(library, mode=getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE).GOMP_parallel
    except (OSError, AttributeError):
        return None
    team.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team


def _openmp_libraries() -> list[str]:
    """Paths of the OpenMP runtimes this process has loaded, where the system lists them."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    except OSError:
        return []
    return sorted(path for path in paths if os.path.basename(path).startswith(("libgomp", "libomp", "libiomp5")))
