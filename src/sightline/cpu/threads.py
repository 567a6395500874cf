"""Running a kernel on several threads: every thread calls it once, and the kernel hands out its own work.

A pool of our own beside torch's would fight it for the processors, since OpenMP's threads spin for a while after each
of torch's operations. So where torch has loaded an OpenMP runtime, its team is borrowed; elsewhere a small pool serves.
"""

from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

__all__ = ["call", "count"]

MOST = max(os.cpu_count() or 1, 16)  # more threads than that find no processor


def count(asked: int | None = None) -> int:
    """Threads to use: as asked, else torch's own setting where torch is loaded, else every processor we may run on."""
    if asked is not None:
        return asked
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def call(address: int, words: Any, threads: int, kept: tuple[Any, ...]) -> None:
    """Call void f(void *) at the address once on each thread, with the address of `words`.

    `kept` is all memory the words point to: threads of the pool hold it, so that an exception in this one, Ctrl-C say,
    cannot free what they still write.
    """
    function, arguments = _FUNCTION(address), words.ctypes.data
    threads = min(threads, MOST)
    if threads == 1:
        function(arguments)
        return
    team = _host_team() if "torch" in sys.modules else None
    if team is not None:
        team(address, arguments, threads, 0)
        return
    pool = _pool(os.getpid())
    others = [pool.submit(_work, function, arguments, (words, *kept)) for _ in range(threads - 1)]
    function(arguments)
    for other in others:
        other.result()


def _work(function: Any, arguments: int, kept: tuple[Any, ...]) -> None:
    function(arguments)


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The pool of this process; a forked child makes its own."""
    return ThreadPoolExecutor(MOST, thread_name_prefix="sightline")


@cache
def _host_team() -> Any:
    """GOMP_parallel(function, data, threads, flags) of the libgomp torch has loaded; None where there is none."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
        team = ctypes.CDLL(sorted(paths)[0]).GOMP_parallel
    except (OSError, IndexError, AttributeError):
        return None
    team.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team
