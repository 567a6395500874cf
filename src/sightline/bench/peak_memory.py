"""The most memory a call holds at once, as the kernel of Linux counts it: pages that are really there.

Freed memory that the allocator kept is given back first, the high-water mark is set to the present, and read again
after the call. That sees every library's memory, but not the reuse of an arena a library keeps for itself.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

__all__ = ["can_measure", "peak_memory"]

CLEAR_REFS, STATUS = "/proc/self/clear_refs", "/proc/self/status"
MAX_TRIES, MAX_SECONDS = 4, 2.0
PEAK_OF_RESIDENT = "5"  # proc(5): reset the peak resident set size


def can_measure() -> bool:
    """Whether this system keeps and resets a high-water mark."""
    try:
        _reset_peak()
        _read_resident_bytes()
    except (OSError, KeyError):
        return False
    return True


def peak_memory(call: Callable[[Any], Any], setup: Callable[[], Any] = lambda: None) -> int | None:
    """Bytes a call of what `setup` gives needs at most beyond what lies there before it, its result counted.

    The least of a few tries, as long as they are short: pages of code that Linux had dropped and reads again only add.
    None where it cannot be known.
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
    with open(CLEAR_REFS, "w") as marks:
        marks.write(PEAK_OF_RESIDENT)


def _read_resident_bytes() -> dict[str, int]:
    """VmRSS and VmHWM in bytes."""
    with open(STATUS) as lines:
        parts = [line.split() for line in lines if line.startswith(("VmRSS", "VmHWM"))]
    return {name.rstrip(":"): int(count) * 1024 for name, count, *_ in parts}
