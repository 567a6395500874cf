"""The team of threads that runs a kernel.

Every thread calls the kernel once, and the kernel distributes its work items among the threads.

The threads of OpenMP spin for a while after each operation of torch, so a second thread pool would compete with them
for the processors. If the process has loaded an OpenMP runtime, the kernel therefore runs on the runtime's threads.
Otherwise the kernel runs on a thread pool of this module. In a forked child the parent's OpenMP threads no longer
exist, and libgomp would wait for them forever, so that the child uses the pool too.

A KeyboardInterrupt can arrive between any two bytecode instructions of the main thread, so that a lock that Python code
takes may stay held. Therefore no code of this module takes a lock: the threads share lists and `queue.SimpleQueue`s,
each of whose methods is one atomic function in C.
"""

from __future__ import annotations

import ctypes
import os
import sys
from _thread import start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ...arrays.operations import numpy_address
from .thread_count import MAX_THREADS


def call(address: int, packed_arguments: Any, threads: int, keep_alive: tuple[Any, ...]) -> None:
    """Call the function void f(void *) at `address` once on each of at most `threads` threads.

    The argument of the function is the address of the array `packed_arguments`. Fewer threads than requested call the
    function if no more are available. `keep_alive` has all arrays that `packed_arguments` points to. The pool's threads
    hold references to `keep_alive` and to the code. So an exception in the calling thread, such as KeyboardInterrupt,
    cannot free memory that the pool's threads use. After an exception, the arrays must not be reused, because threads
    of the pool may still run the kernel.
    """
    function, argument = KERNEL_FUNCTION(address), numpy_address(packed_arguments)
    if threads == 1:
        function(argument)
        return
    threads = min(threads, MAX_THREADS)
    team = _openmp_team()
    if team is not None:
        team(address, argument, threads, 0)  # returns after every thread has returned
        return
    _teams.pool.call(function, argument, threads - 1, (address, packed_arguments, keep_alive))


KERNEL_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# One call of the kernel, which one thread of the pool may make: the function, its argument, the references that keep
# the function's code and the argument's memory alive, and the queue that receives None when the call has returned.
Ticket = tuple[Any, int, tuple[Any, ...], "SimpleQueue[None]"]


class Pool:
    """The pool's threads, which start when a call first needs them, and then wait for calls until the process ends."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[list[Ticket]] = SimpleQueue()  # for each ticket, the list that contains it
        self.threads: list[int] = []  # the identifiers of the started threads
        self.busy: list[None] = []  # one entry for each thread that runs a kernel

    def call(self, function: Any, argument: int, helpers: int, keep_alive: tuple[Any, ...]) -> None:
        """Call the function on this thread, and at the same time on at most `helpers` threads of the pool.

        The pool's threads take tickets from a list. When the function has returned on this thread, no work item is
        left, so that this thread takes back the remaining tickets and waits only for the threads that took one.
        """
        finished: SimpleQueue[None] = SimpleQueue()
        running = self._start_threads(helpers)
        tickets: list[Ticket] = [(function, argument, keep_alive, finished)] * running
        for _ in range(running):
            self.calls.put(tickets)
        function(argument)
        while _take_ticket(tickets) is not None:
            running -= 1
        for _ in range(running):
            finished.get()

    def _start_threads(self, helpers: int) -> int:
        """Start threads until `helpers` threads run no kernel. Return how many threads can help, at most `helpers`.

        Fewer threads start if the pool is full, the interpreter is ending, or the system has no more threads.
        """
        missing = helpers - (len(self.threads) - len(self.busy))
        try:
            while missing > 0 and len(self.threads) < MAX_THREADS:
                self.threads.append(start_new_thread(self._serve, ()))
                missing -= 1
        except RuntimeError:
            pass
        return min(helpers, len(self.threads))

    def _serve(self) -> None:
        """Serve calls. The interpreter does not wait for this thread when the process ends."""
        while True:
            self._help(self.calls.get())

    def _help(self, tickets: list[Ticket]) -> None:
        """Make one call of the kernel, unless the thread that requested the call has taken all tickets back."""
        ticket = _take_ticket(tickets)
        if ticket is None:
            return
        function, argument, keep_alive, finished = ticket
        self.busy.append(None)
        try:
            function(argument)
        finally:
            del ticket, function, keep_alive  # so that memory is free, and the thread not busy, when the call returns
            self.busy.pop()
            finished.put(None)


def _take_ticket(tickets: list[Ticket]) -> Ticket | None:
    """Remove a ticket from the list and return the ticket; None if the list is empty."""
    try:
        return tickets.pop()
    except IndexError:
        return None


class Teams:
    """The thread pool of this process, and the OpenMP runtime that the process has loaded; see `_openmp_team`."""

    def __init__(self, is_forked: bool = False) -> None:
        self.is_forked = is_forked
        self.pool = Pool()
        self.openmp: Callable[..., None] | None = None  # the runtime's GOMP_parallel; None if no runtime is loaded
        self.modules = -1  # number of loaded Python modules at the last search for OpenMP
        self.is_from_torch = False  # True if torch's own OpenMP was found, so that no further search is needed


def _is_forked_process() -> bool:
    """True if multiprocessing forked this process before this module was imported, so that no fork hook has run."""
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


def _openmp_team() -> Callable[..., None] | None:
    """Return GOMP_parallel(function, data, threads, flags) of the loaded OpenMP runtime.

    Returns None if no runtime is loaded, or if this process is a forked child. The OpenMP runtimes of GNU, LLVM and
    Intel have this function.
    """
    teams = _teams
    if teams.is_forked:
        return None
    if not teams.is_from_torch and teams.modules != len(sys.modules):
        modules = len(sys.modules)
        extension = getattr(getattr(sys.modules.get("torch"), "_C", None), "__file__", None)
        team = None if extension is None else _find_gomp_parallel(extension)  # of the runtime torch uses
        teams.is_from_torch = team is not None
        teams.openmp = team or next(filter(None, map(_find_gomp_parallel, _openmp_libraries())), None)
        teams.modules = modules  # set last: another thread or a later call searches too if this search is interrupted
    return teams.openmp


def _find_gomp_parallel(library: str) -> Callable[..., None] | None:
    """Return GOMP_parallel of a library or of its dependencies; None if the library is not loaded or has none."""
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
