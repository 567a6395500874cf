"""The team of threads that runs a kernel.

Every thread calls the kernel once, and the kernel distributes its work items among the threads.

The threads of OpenMP spin for a while after each operation of torch, so a second thread pool would compete with them
for the processors. If the process has loaded an OpenMP runtime, the kernel therefore runs on the runtime's team.
Otherwise the kernel runs on a thread pool of this module. In a forked child the parent's OpenMP threads no longer
exist, and libgomp would wait for them forever, so that the child uses the pool too.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .thread_count import MAX_THREADS

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["call"]


def call(address: int, packed_arguments: Any, threads: int, keep_alive: tuple[Any, ...]) -> None:
    """Call the function void f(void *) at `address` once on each of at most `threads` threads.

    The argument of the function is the address of the array `packed_arguments`. Fewer threads than requested call the
    function if no more are available. `keep_alive` has all arrays that `packed_arguments` points to. The pool's threads
    hold references to `keep_alive` and to the code, so that an exception in the calling thread, such as
    KeyboardInterrupt, cannot free memory that the pool's threads use.
    """
    function, argument = _FUNCTION(address), packed_arguments.ctypes.data
    if threads == 1:
        function(argument)
        return
    threads = min(threads, MAX_THREADS)
    team = _openmp_team()
    if team is not None:
        team(address, argument, threads, 0)  # returns after every thread has returned
        return
    futures = _submit_to_pool(threads - 1, function, argument, (address, packed_arguments, keep_alive))
    function(argument)
    for future in futures:  # a submitted call that has not started would find no work item
        if not future.cancel():
            future.result()


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _submit_to_pool(number: int, function: Any, argument: int, keep_alive: tuple[Any, ...]) -> list[Future[None]]:
    """Submit `number` calls of the function to the pool; fewer if the interpreter is ending or no thread can start."""
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
    """The thread pool of this process, and the OpenMP runtime it has loaded. A kernel that needs them sets them."""

    def __init__(self, is_forked: bool = False) -> None:
        self.is_forked = is_forked
        self.pool: ThreadPoolExecutor | None = None
        self.openmp: Callable[..., None] | None = None  # the runtime's GOMP_parallel; None if no runtime is loaded
        self.modules = -1  # number of loaded Python modules at the last search for OpenMP
        self.is_from_torch = False  # True if torch's own OpenMP was found, so that no further search is needed


def _is_forked_process() -> bool:
    """True if multiprocessing forked this process before this module was imported and set its fork hook."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None:
        return False
    return sys.modules["__main__"].__name__ != "__mp_main__"  # the name of the main module in a spawned process


_teams = Teams(is_forked=_is_forked_process())
# in a forked child, the teams of the parent: the threads of the parent's pool do not exist in the child, so that the
# pool must be neither used nor freed
_parent_teams: list[Teams] = []


def _reset_after_fork() -> None:
    global _teams
    _parent_teams.append(_teams)
    _teams = Teams(is_forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def _pool() -> ThreadPoolExecutor:
    """Return the thread pool of this process. The first call creates the pool."""
    if _teams.pool is None:
        from concurrent.futures import ThreadPoolExecutor

        _teams.pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="sightline")
    return _teams.pool


def _openmp_team() -> Callable[..., None] | None:
    """Return GOMP_parallel(function, data, threads, flags) of the loaded OpenMP runtime.

    Returns None if no runtime is loaded, and in a forked child. The runtimes of GNU, LLVM and Intel have this function.
    """
    teams = _teams
    if teams.is_forked:
        return None
    if not teams.is_from_torch and teams.modules != len(sys.modules):
        teams.modules = len(sys.modules)
        extension = getattr(getattr(sys.modules.get("torch"), "_C", None), "__file__", None)
        team = None if extension is None else _find_gomp_parallel(extension)  # of the runtime torch uses
        teams.is_from_torch = team is not None
        teams.openmp = team or next(filter(None, map(_find_gomp_parallel, _openmp_libraries())), None)
    return teams.openmp


def _find_gomp_parallel(library: str) -> Callable[..., None] | None:
    """Return GOMP_parallel of a loaded library or of its dependencies; None if it is not loaded or has none."""
    try:
        team = ctypes.CDLL(library, mode=getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE).GOMP_parallel
    except (OSError, AttributeError):
        return None
    team.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team


def _openmp_libraries() -> list[str]:
    """Return the paths of the OpenMP runtimes this process has loaded; empty if the system does not list them."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    except OSError:
        return []
    return sorted(path for path in paths if os.path.basename(path).startswith(("libgomp", "libomp", "libiomp5")))
