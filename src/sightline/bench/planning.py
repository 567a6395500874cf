"""How long the host takes for a mask it has not met: the runs of its tiles found, and laid on the device."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ..formula.runs import find_runs
from .races import Planning

if TYPE_CHECKING:
    from .device import Device

__all__ = ["timed"]


def timed(problem: Planning, device: Device, times: int) -> dict[str, list[float]]:
    """Seconds by what was asked, one number for every mask; each is another width, so that none was seen before."""
    found = []
    for k in range(times):
        new = replace(problem, width=problem.width - k)
        mask, extent = new.mask(new.width).formula(new.n), (1, new.H, new.n, new.n)
        device.finish()
        started = time.perf_counter()
        find_runs(mask, extent, 128, 128)
        device.finish()
        found.append(time.perf_counter() - started)
    return {"new mask": found}
