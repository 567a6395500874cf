"""How long the host takes for a mask it has not met: the runs of its tiles found, and laid on the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formula.tile_ranges import find_tile_ranges
from ..problem import make_problem
from .workloads import Planning

if TYPE_CHECKING:
    from .device import Device

__all__ = ["measure_seconds"]

TILE = (128, 128)  # queries and keys: the forward kernel's on Hopper


def measure_seconds(benchmark: Planning, device: Device, times: int) -> dict[str, list[float]]:
    """Seconds by what was asked, one number for every mask; each is another width, so that none was seen before.

    The problem is posed, its formula's reads are looked at, and its schedule found and sent; a first one, by which the
    device and Python warm up, counts for nothing.

    Raises
    ------
    ValueError
        A schedule has other tiles than the mask; nothing of it is reported.
    """
    import torch

    from ..gpu.launch.schedule import make_schedule  # which needs torch

    query = torch.empty((), dtype=torch.bfloat16, device=device.device).expand(1, benchmark.H, benchmark.n, 1)
    seconds = []
    for k in range(times + 1):
        mask = benchmark.mask(benchmark.width - k).formula(benchmark.n)
        device.synchronize()
        started = time.perf_counter()
        problem = make_problem(query, query, query, mask=mask)
        schedule_arrays = make_schedule(problem, *TILE)
        device.synchronize()
        seconds.append(time.perf_counter() - started)
        _check_tile_count(schedule_arrays, find_tile_ranges(mask, problem.extent, *TILE).tiles)
    return {"new mask": seconds[1:]}


def _check_tile_count(schedule_arrays: Any, tiles: dict[str, int]) -> None:
    """Raise unless the runs laid out have as many tiles, full and partial, as the mask; no head is unlike another."""
    rows, pairs = (
        part.cpu().numpy().reshape(-1, width) for part, width in zip(schedule_arrays[:2], (3, 2), strict=True)
    )
    tiles_before = np.concatenate([[0], (pairs[:, 1] - pairs[:, 0]).cumsum()])  # tiles before each run
    scheduled = int((tiles_before[rows[:, 2]] - tiles_before[rows[:, 0]]).sum())
    expected = tiles["full"] + tiles["partial"]
    if expected % scheduled:
        raise ValueError(f"a schedule of {scheduled} tiles for a mask of {expected}")
