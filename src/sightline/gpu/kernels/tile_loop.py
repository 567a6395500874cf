"""The walk of a block over the tiles that its row of the schedule lists: full ones first, without mask and bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Row", "Schedule", "walk"]


class Schedule(NamedTuple):
    """Which tiles every block looks at, int32 on the device; see `schedule.words`."""

    rows: Any  # (start, first of the partial ones, stop) of a block's runs
    runs: Any  # (first tile, past the last) of a run
    batch: Any  # rows to the next batch, 0 where all have the same
    head: Any  # likewise


class Row(NamedTuple):
    """The tiles a block looks at: those of its row of the schedule, or all."""

    schedule: Any  # a Schedule, or None for all tiles
    b: Any
    h: Any
    block: Any  # which of its head's
    length: Any  # of what is cut into tiles: keys, or queries
    window: Any  # of tiles, (first, past the last), outside of which none is looked at; None for all
    ragged: Any  # whether the block itself is not full, so that none of its tiles is


@triton.jit
def within(first, last, window):
    """The part of a run that lies in a window."""
    if window is not None:
        first, last = tl.maximum(first, window[0]), tl.minimum(last, window[1])
    return first, last


@triton.jit
def walk(state, body, row, TILE: tl.constexpr, EVEN: tl.constexpr, block, seams, HOW: tl.constexpr, form):
    """The state after `body` has seen every tile of a block's row.

    Parameters
    ----------
    body : (state, first tile, past the last, block, seams, HOW, form, PARTIAL) → state
    TILE, EVEN : positions of a tile, and whether they are known to fill the last
    block, seams, HOW, form : what the body takes; HOW is a constant of its own
    """
    if row.schedule is None:
        middle = tl.where(row.ragged, 0, row.length // TILE)
        first, last = within(0, middle, row.window)
        state = body(state, first, last, block, seams, HOW, form, False)
        if not EVEN:
            first, last = within(middle, tl.cdiv(row.length, TILE), row.window)
            state = body(state, first, last, block, seams, HOW, form, True)
    else:
        runs = row.schedule.runs
        at = row.schedule.rows + 3 * (row.b * row.schedule.batch + row.h * row.schedule.head + row.block)
        start, middle, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        middle = tl.where(row.ragged, start, middle)
        for run in range(start, middle):
            first, last = within(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1), row.window)
            state = body(state, first, last, block, seams, HOW, form, False)
        for run in range(middle, stop):
            first, last = within(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1), row.window)
            state = body(state, first, last, block, seams, HOW, form, True)
    return state
