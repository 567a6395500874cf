"""Time the host's work for a new mask: to find its tile ranges, and to copy the kernel's schedule to the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ...formula.tile_ranges import find_tile_ranges
from ...problem.problem import make_problem
from .workloads import Planning

if TYPE_CHECKING:
    from .device import Device

TILE = (128, 128)  # (queries, keys) in a tile of the forward kernel on Hopper GPUs


def measure_seconds(benchmark: Planning, device: Device, times: int) -> dict[str, list[float]]:
    """Return {"new mask": seconds}, a list with one number for each of `times` masks.

    Every mask has a different width, so that no cache has its schedule. The timed work is to make the problem, to
    compute its schedule and to copy the schedule to the device. One more mask comes first as a warm-up; its seconds are
    left out.

    Raises
    ------
    ValueError
        The number of tiles in a schedule differs from the number of tiles of the mask.
    """
    import torch

    from ...gpu.launch.schedule import make_schedule  # needs torch

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
    """Raise ValueError unless the schedule has all full and partial tiles of the mask; `tiles` counts these by kind.

    All heads have the same tiles, so the mask's number of tiles may be a multiple of the schedule's number.
    """
    rows, pairs = (
        part.cpu().numpy().reshape(-1, width) for part, width in zip(schedule_arrays[:2], (3, 2), strict=True)
    )
    tiles_before = np.concatenate([[0], (pairs[:, 1] - pairs[:, 0]).cumsum()])  # number of tiles before each tile range
    scheduled = int((tiles_before[rows[:, 2]] - tiles_before[rows[:, 0]]).sum())
    expected = tiles["full"] + tiles["partial"]
    if expected % scheduled:
        raise ValueError(f"a schedule of {scheduled} tiles for a mask of {expected}")
