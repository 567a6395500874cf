"""How long the host takes for a mask it has not met: the runs of its tiles found, and laid on the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formula.tile_ranges import find_runs
from ..problem import pose
from .races import Planning

if TYPE_CHECKING:
    from .device import Device

__all__ = ["timed"]

TILE = (128, 128)  # queries and keys: the forward kernel's on Hopper


def timed(problem: Planning, device: Device, times: int) -> dict[str, list[float]]:
    """Seconds by what was asked, one number for every mask; each is another width, so that none was seen before.

    The problem is posed, its formula's reads are looked at, and its schedule found and sent; a first one, by which the
    device and Python warm up, counts for nothing.

    Raises
    ------
    ValueError
        A schedule has other tiles than the mask; nothing of it is reported.
    """
    import torch

    from ..gpu.launch.schedule import schedule  # which needs torch

    query = torch.empty((), dtype=torch.bfloat16, device=device.device).expand(1, problem.H, problem.n, 1)
    found = []
    for k in range(times + 1):
        mask = problem.mask(problem.width - k).formula(problem.n)
        device.finish()
        started = time.perf_counter()
        posed = pose(query, query, query, mask=mask)
        laid = schedule(posed, *TILE)
        device.finish()
        found.append(time.perf_counter() - started)
        _check(laid, find_runs(mask, posed.extent, *TILE).tiles)
    return {"new mask": found[1:]}


def _check(laid: Any, tiles: dict[str, int]) -> None:
    """Raise unless the runs laid out have as many tiles, full and partial, as the mask; no head is unlike another."""
    rows, pairs = (part.cpu().numpy().reshape(-1, width) for part, width in zip(laid[:2], (3, 2), strict=True))
    until = np.concatenate([[0], (pairs[:, 1] - pairs[:, 0]).cumsum()])  # tiles before each run
    counted = int((until[rows[:, 2]] - until[rows[:, 0]]).sum())
    wanted = tiles["full"] + tiles["partial"]
    if wanted % counted:
        raise ValueError(f"a schedule of {counted} tiles for a mask of {wanted}")
