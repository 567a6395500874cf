"""The walk of a block over the tiles that its row of the schedule lists: full ones first, without mask and bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Schedule", "ScheduleRow", "loop_over_tiles"]


class Schedule(NamedTuple):
    """Which tiles every block looks at, int32 on the device; see `schedule.words`."""

    rows: Any  # (start, first of the partial ones, stop) of a block's runs
    ranges: Any  # (first tile, past the last) of a run
    batch_stride: Any  # rows to the next batch, 0 where all have the same
    head_stride: Any  # likewise


class ScheduleRow(NamedTuple):
    """The tiles a block looks at: those of its row of the schedule, or all."""

    schedule: Any  # a Schedule, or None for all tiles
    b: Any
    h: Any
    block: Any  # which of its head's
    length: Any  # of what is cut into tiles: keys, or queries
    window: Any  # of tiles, (first, past the last), outside of which none is looked at; None for all
    is_ragged: Any  # whether the block itself is not full, so that none of its tiles is


@triton.jit
def clip_to_window(first, last, window):
    """The part of a run that lies in a window."""
    if window is not None:
        first, last = tl.maximum(first, window[0]), tl.minimum(last, window[1])
    return first, last


@triton.jit
def loop_over_tiles(
    state, body, row, TILE: tl.constexpr, EVEN: tl.constexpr, block, formulas, OPTIONS: tl.constexpr, meta
):
    """The state after `body` has seen every tile of a block's row.

    Parameters
    ----------
    body : (state, first tile, past the last, block, seams, HOW, form, PARTIAL) → state
    TILE, EVEN : positions of a tile, and whether they are known to fill the last
    block, seams, HOW, form : what the body takes; HOW is a constant of its own
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
            first, last = clip_to_window(
                tl.load(ranges + 2 * range_index), tl.load(ranges + 2 * range_index + 1), row.window
            )
            state = body(state, first, last, block, formulas, OPTIONS, meta, False)
        for range_index in range(middle, stop):
            first, last = clip_to_window(
                tl.load(ranges + 2 * range_index), tl.load(ranges + 2 * range_index + 1), row.window
            )
            state = body(state, first, last, block, formulas, OPTIONS, meta, True)
    return state
