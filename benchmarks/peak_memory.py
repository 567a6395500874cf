"""Peak memory of a call, from the peak resident set size of the process, which Linux counts.

Before the call, memory that the allocator keeps without need is returned to the system, and the peak is reset. After
the call the peak is read. The measurement includes the memory that any library allocates, but not memory that a library
reuses from an arena of its own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
MAX_TRIES, MAX_SECONDS = 4, 2.0
PEAK_OF_RESIDENT = "5"  # written to clear_refs, this resets the peak resident set size; see proc(5)


def peak_memory(call: Callable[[Any], Any], setup: Callable[[], Any] = lambda: None) -> int | None:
    """Return the peak bytes of `call(setup())` beyond the memory in use before the call, including the call's result.

    The result is None if the system counts no peak. The bytes are the minimum of up to `MAX_TRIES` tries within
    `MAX_SECONDS`, since pages of code that Linux loads again only add to the bytes of a try.
    """
    if not os.access(CLEAR_REFS, os.W_OK):
        return None
    found: list[int] = []
    deadline = time.perf_counter() + MAX_SECONDS
    while not found or (len(found) < MAX_TRIES and time.perf_counter() < deadline):
        state = setup()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        CLEAR_REFS.write_text(PEAK_OF_RESIDENT)
        before = _resident_bytes("VmRSS")
        result = call(state)
        found.append(max(_resident_bytes("VmHWM") - before, 0))
        del result, state
    return min(found)


def _resident_bytes(name: str) -> int:
    """Return the resident set size of the process, "VmRSS", or its peak, "VmHWM", in bytes."""
    return next(int(line.split()[1]) << 10 for line in STATUS.read_text().splitlines() if line.startswith(name))
