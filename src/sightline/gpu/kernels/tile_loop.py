"""The loop of a block over the tiles in its row of the schedule: full tiles first, without mask and bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Schedule", "ScheduleRow", "loop_over_tiles"]


class Schedule(NamedTuple):
    """The tiles of every block, as int32 arrays on the device; see `launch.schedule.encode_ranges`."""

    rows: Any  # per block: (start, first partial range, stop) of the block's ranges
    ranges: Any  # per range: (first tile, past the last)
    batch_stride: Any  # rows from one batch to the next, 0 if all batches share their rows
    head_stride: Any  # rows from one head to the next, 0 if all heads share their rows


class ScheduleRow(NamedTuple):
    """The tiles of one block."""

    schedule: Any  # a `Schedule`, or None for all tiles
    b: Any
    h: Any
    block: Any  # index of the block in its head
    length: Any  # number of keys, or of queries, that the tiles divide
    window: Any  # only the tiles in (first, past the last) are visited; None for no limit
    is_ragged: Any  # True if the block itself is not full: then all of its tiles count as partial


@triton.jit
def clip_to_window(first, last, window):
    """Return the part of the range `first` ... `last` that lies in the window."""
    if window is not None:
        first, last = tl.maximum(first, window[0]), tl.minimum(last, window[1])
    return first, last


@triton.jit
def load_range(ranges, index, window):
    """Return (first tile, past the last) of a range of the schedule, clipped to the window."""
    return clip_to_window(tl.load(ranges + 2 * index), tl.load(ranges + 2 * index + 1), window)


@triton.jit
def loop_over_tiles(
    state, body, row, TILE: tl.constexpr, EVEN: tl.constexpr, block, formulas, OPTIONS: tl.constexpr, meta
):
    """Return the state after `body` has processed every tile of a schedule row.

    Parameters
    ----------
    body : (state, first tile, past the last, block, formulas, OPTIONS, meta, PARTIAL) → state
    TILE : positions in a tile
    EVEN : True if `row.length` is known to be a multiple of TILE
    block, formulas, OPTIONS, meta : passed to `body`; OPTIONS is a compile-time constant
    """
    if row.schedule is None:
        middle = tl.where(row.is_ragged, 0, row.length // TILE)
        first, last = clip_to_window(0, middle, row.window)
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
