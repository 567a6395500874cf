"""The number of threads of a kernel, from the argument, `sightline.threads`, the environment, torch or the machine."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache

from ...call.validation import check_threads
from ...errors import ParameterError, context

THREADS_VARIABLE = "SIGHTLINE_THREADS"
MAX_THREADS = max(os.cpu_count() or 1, 16)  # the most threads of one call; further threads would find no free processor

_requested_threads: ContextVar[int | None] = ContextVar("threads", default=None)


def threads(number: int) -> AbstractContextManager[None]:
    """Set the number of threads of generated CPU kernels within a `with` block, for this Python thread or task.

    Parameters
    ----------
    number : int
        At least 1.

    Returns
    -------
    context manager
        `with` blocks may be nested, and the innermost block applies. The number of threads comes from the first
        available one of: `attention(..., threads=...)`, the innermost `with` block, the environment variable
        SIGHTLINE_THREADS, `torch.get_num_threads()` if torch is loaded, the number of processors.

    Raises
    ------
    ParameterError
        `number` is not a whole number of at least 1.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(3, dtype=np.float32)
    >>> with sightline.threads(1):
    ...     out = sightline.attention(x, x, x)
    """
    check_threads("threads", number)
    return _threads(number)


@context
def _threads(number: int) -> Generator[None]:
    token = _requested_threads.set(number)
    try:
        yield
    finally:
        _requested_threads.reset(token)


def thread_count(requested: int | None = None) -> int:
    """Return the number of threads to use; see `resolve_thread_count`."""
    return resolve_thread_count(requested)[0]


def resolve_thread_count(requested: int | None = None) -> tuple[int, str]:
    """Return the number of threads to use, and the name of the setting that determines the number.

    The first available setting applies: the argument, the innermost `with threads(...)`, SIGHTLINE_THREADS,
    `torch.get_num_threads()` if torch is loaded, `available_processors()`.

    Raises
    ------
    ParameterError
        SIGHTLINE_THREADS applies and is not a whole number of at least 1.
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
    return available_processors(), "the processors this process may use"


def available_processors() -> int:
    """Return the smaller of `usable_processors` and a container's limit of processor time; at least 1."""
    return max(min(usable_processors(), _cgroup_quota()), 1)


def usable_processors() -> int:
    """Return the number of processors on which the system lets this process run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _cgroup_quota(path: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Return how many processors a container may keep busy, rounded up; `MAX_THREADS` if there is no limit.

    On Linux, cgroup v2 stores the limit as "quota period" or "max period".
    """
    try:
        with open(path) as line:
            quota, period = line.read().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return MAX_THREADS
