"""The walk of a block over the tiles that its row of the schedule lists: full ones first, without mask and bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Schedule", "row_of", "walk", "within"]


class Schedule(NamedTuple):
    """Which tiles every block looks at, int32 on the device; see `schedule.words`."""

    rows: Any  # (start, first of the partial ones, stop) of a block's runs
    runs: Any  # (first tile, past the last) of a run
    batch: Any  # rows to the next batch, 0 where all have the same
    head: Any  # likewise


@triton.jit
def row_of(schedule, b, h, block):
    """The row of a block in a schedule, if there is one."""
    row = block
    if schedule is not None:
        row = b * schedule.batch + h * schedule.head + block
    return row


@triton.jit
def within(first, last, window):
    """The part of a run that lies in a window of tiles (first, past the last); all of it where there is none."""
    if window is not None:
        first, last = tl.maximum(first, window[0]), tl.minimum(last, window[1])
    return first, last


@triton.jit
def walk(state, body, schedule, row, whole, count, window, ragged, block, seams, HOW: tl.constexpr, form, EVEN):
    """The state after `body` has seen every tile of a block: those of its row of the schedule, or all there are.

    Parameters
    ----------
    body : (state, first tile, past the last, block, seams, HOW, form, PARTIAL) → state
    whole, count : without a schedule the first `whole` of `count` tiles are full; all are where EVEN
    window : of tiles, see `within`, or None
    ragged : whether the block itself is not full, so that none of its tiles is
    """
    if schedule is None:
        middle = tl.where(ragged, 0, whole)
        first, last = within(0, middle, window)
        state = body(state, first, last, block, seams, HOW, form, False)
        if not EVEN:
            first, last = within(middle, count, window)
            state = body(state, first, last, block, seams, HOW, form, True)
    else:
        runs, at = schedule.runs, schedule.rows + 3 * row
        start, middle, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        middle = tl.where(ragged, start, middle)
        for run in range(start, middle):
            first, last = within(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1), window)
            state = body(state, first, last, block, seams, HOW, form, False)
        for run in range(middle, stop):
            first, last = within(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1), window)
            state = body(state, first, last, block, seams, HOW, form, True)
    return state
