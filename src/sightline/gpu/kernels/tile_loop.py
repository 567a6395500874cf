"""The loop of a block over the tiles in its schedule row. Full tiles come first, without checks of mask and bounds.

A schedule row serves a block of queries, which visits tiles of keys, or a block of keys, which visits tiles of queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class GpuSchedule(NamedTuple):
    """The tiles that every block visits, as int32 arrays on the device; see `launch.arguments.encode_ranges`."""

    rows: Any  # for each block (start, first partial range, stop): the block visits the ranges start ... stop − 1
    ranges: Any  # for each range (first tile, last tile + 1)
    batch_stride: Any  # schedule rows from one batch to the next; 0 if all batches share their schedule rows
    head_stride: Any  # schedule rows from one head to the next; 0 if all heads share their schedule rows


class ScheduleRow(NamedTuple):
    """The tiles that one block visits."""

    schedule: Any  # a `GpuSchedule`, or None if the block visits all tiles
    b: Any
    h: Any
    block: Any  # index of the block in its head
    length: Any  # number of keys that the tiles divide; of queries for a block of keys
    window: Any  # (first tile, last tile + 1) outside which no tile is visited; None without such a limit
    is_ragged: Any  # True if the block reaches past the last position of its head: all its tiles then count as partial


@triton.jit
def clip_to_window(first, last, window):
    """Return (first tile, last tile + 1) of the part of a tile range that lies in the window."""
    if window is not None:
        first, last = tl.maximum(first, window[0]), tl.minimum(last, window[1])
    return first, last


@triton.jit
def load_range(ranges, index, window):
    """Return (first tile, last tile + 1) of a tile range of the schedule, clipped to the window."""
    return clip_to_window(tl.load(ranges + 2 * index), tl.load(ranges + 2 * index + 1), window)


@triton.jit
def loop_over_tiles(
    state, body, row, TILE: tl.constexpr, EVEN: tl.constexpr, block, formulas, OPTIONS: tl.constexpr, meta
):
    """Return the state after `body` has processed every tile of a schedule row.

    Parameters
    ----------
    body : (state, first tile, last tile + 1, block, formulas, OPTIONS, meta, PARTIAL) → state
    TILE : number of keys in a tile; of queries if the row serves a block of keys
    EVEN : True if `row.length` is known to be a multiple of TILE, and `row.is_ragged` to be False
    block, formulas, OPTIONS, meta : passed to `body`; OPTIONS is a compile-time constant
    """
    if row.schedule is None:
        middle = row.length // TILE
        if not EVEN:
            middle = tl.where(row.is_ragged, 0, middle)
        first, last = clip_to_window(0, middle, row.window)
        if EVEN and row.window is None:
            tl.assume(last > 0)  # ptxas serialises the matrix products of a loop that may have no iteration
        state = body(state, first, last, block, formulas, OPTIONS, meta, False)
        if not EVEN:
            first, last = clip_to_window(middle, tl.cdiv(row.length, TILE), row.window)
            state = body(state, first, last, block, formulas, OPTIONS, meta, True)
    else:
        ranges = row.schedule.ranges
        at = row.schedule.rows + 3 * (row.b * row.schedule.batch_stride + row.h * row.schedule.head_stride + row.block)
        start, middle, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        middle = tl.where(row.is_ragged, start, middle)
        for range_index in range(start, middle):
            first, last = load_range(ranges, range_index, row.window)
            state = body(state, first, last, block, formulas, OPTIONS, meta, False)
        for range_index in range(middle, stop):
            first, last = load_range(ranges, range_index, row.window)
            state = body(state, first, last, block, formulas, OPTIONS, meta, True)
    return state
