"""Peak memory of a call, from the peak resident set size of the process, which Linux counts.

Before the call, memory that the allocator keeps without need is returned to the system, and the peak is reset. After
the call the peak is read. The measurement includes the memory that any library allocates, but not memory that a library
reuses from an arena of its own.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

CLEAR_REFS, STATUS = "/proc/self/clear_refs", "/proc/self/status"
MAX_TRIES, MAX_SECONDS = 4, 2.0
PEAK_OF_RESIDENT = "5"  # written to clear_refs, this resets the peak resident set size; see proc(5)


def can_measure() -> bool:
    """Return True if this system counts the peak resident set size of a process and can reset the peak."""
    try:
        _reset_peak()
        _read_resident_bytes()
    except (OSError, KeyError):
        return False
    return True


def peak_memory(call: Callable[[Any], Any], setup: Callable[[], Any] = lambda: None) -> int | None:
    """Return the peak bytes of `call(setup())` beyond the memory in use before the call, including the call's result.

    The result is None if `can_measure()` is False. The bytes are the minimum of up to `MAX_TRIES` tries within
    `MAX_SECONDS`, since pages of code that Linux loads again only add to the bytes of a try.
    """
    if not can_measure():
        return None
    found: list[int] = []
    deadline = time.perf_counter() + MAX_SECONDS
    while not found or (len(found) < MAX_TRIES and time.perf_counter() < deadline):
        found.append(_measure_once(call, setup()))
    return min(found)


def _measure_once(call: Callable[[Any], Any], state: Any) -> int:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _reset_peak()
    before = _read_resident_bytes()["VmRSS"]
    result = call(state)
    after = _read_resident_bytes()["VmHWM"]
    del result
    return max(after - before, 0)


def _reset_peak() -> None:
    with open(CLEAR_REFS, "w") as file:
        file.write(PEAK_OF_RESIDENT)


def _read_resident_bytes() -> dict[str, int]:
    """Return {"VmRSS": the current resident set size, "VmHWM": the peak resident set size} of the process in bytes."""
    with open(STATUS) as lines:
        parts = [line.split() for line in lines if line.startswith(("VmRSS", "VmHWM"))]
    return {name.rstrip(":"): int(count) * 1024 for name, count, *_ in parts}
