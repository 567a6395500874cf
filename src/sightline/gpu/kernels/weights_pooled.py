"""Weights summed, or their maxima, over the cells of a grid laid on the matrix, second pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles
from .weights_pass import combine, compute_scores, load_block, reduce

__all__ = ["pooled"]


class CellSpan(NamedTuple):
    """A program's positions `first` to before `last`, `cell` their first cell, of start ... stop in so many cells."""

    first: Any
    last: Any
    cell: Any
    start: Any
    stop: Any
    cells: Any


@triton.jit
def cell_start(cell, start, stop, cells):
    """The first position of a cell of a span."""
    return (start + tl.cast(cell, tl.int64) * (stop - start) // cells).to(tl.int32)


@triton.jit
def cell_index(position, start, stop, cells):
    """The cell of positions in a span."""
    return ((tl.cast(position - start + 1, tl.int64) * cells - 1) // (stop - start)).to(tl.int32)


@triton.jit
def cell_indices(position, span):
    """Which of its program's cells each position lies in; −1 outside of them."""
    inside = (position >= span.first) & (position < span.last)
    return tl.where(inside, cell_index(position, span.start, span.stop, span.cells) - span.cell, -1)


@triton.jit
def pool_range(state, first, last, block, formulas, USE_MAX: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """The cells (DOWN, ACROSS) after the tiles `first` to before `last`, one column of them after another."""
    DOWN: tl.constexpr = state.shape[0]
    ACROSS: tl.constexpr = state.shape[1]
    down, keys = block.extra
    for tile in range(first, last):
        j0 = tile * meta.keys
        p = tile_ops.weight(compute_scores(block, j0, formulas, PARTIAL, meta), block.unit, block.normaliser)
        if USE_MAX:
            p = tl.where(p == p, p, float("inf"))  # maxima pass NaN over; no weight is above 1
        across = cell_indices(j0 + tl.arange(0, meta.keys), keys)
        start = cell_index(tl.maximum(j0, keys.first), keys.start, keys.stop, keys.cells) - keys.cell
        end = cell_index(tl.minimum(j0 + meta.keys, keys.last) - 1, keys.start, keys.stop, keys.cells) - keys.cell + 1
        for cell in range(start, end):
            line = reduce(tl.where(across[None, :] == cell, p, 0.0), 1, USE_MAX)
            extra = reduce(tl.where(down[:, None] == tl.arange(0, DOWN)[None, :], line[:, None], 0.0), 0, USE_MAX)
            there = tl.arange(0, ACROSS)[None, :] == cell
            state = combine(state, tl.where(there, extra.to(tl.float64)[:, None], 0.0), USE_MAX)
    return state


@triton.jit(
    do_not_specialize=[
        *("n", "m", "H", "group", "i_start", "i_stop", "j_start", "j_stop", "rows", "columns", "down", "across")
    ]
)
def pooled(
    query,
    key,
    lse,
    output,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    i_start: tl.int32,
    i_stop: tl.int32,
    j_start: tl.int32,
    j_stop: tl.int32,
    rows: tl.int32,
    columns: tl.int32,
    down: tl.int32,
    across: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    tables,
    formulas,
    meta: tl.constexpr,
    USE_MAX: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Sums or maxima of P over some cells of a grid laid on queries i_start ... × keys j_start ...

    Cell r of R takes [r N / R, (r + 1) N / R) of N queries, rounded down; likewise of the keys. A block of queries that
    lies in two programs' cells is done in both.

    Parameters
    ----------
    output : (B, H, rows, columns) float64
    rows, columns : cells of the grid
    down, across : cells of a program, DOWN and ACROSS at most
    """
    item = tl.program_id(0)
    right, below = tl.cdiv(columns, across), tl.cdiv(rows, down)
    c_first, rest = item % right * across, item // right
    r_first, position = (below - 1 - rest % below) * down, rest // below
    r_last, c_last = tl.minimum(r_first + down, rows), tl.minimum(c_first + across, columns)
    i_first, i_last = cell_start(r_first, i_start, i_stop, rows), cell_start(r_last, i_start, i_stop, rows)
    j_first, j_last = cell_start(c_first, j_start, j_stop, columns), cell_start(c_last, j_start, j_stop, columns)
    window = (j_first // meta.keys, tl.cdiv(j_last, meta.keys))
    b, h = position // H, position % H
    queries = CellSpan(i_first, i_last, r_first, i_start, i_stop, rows)
    keys = CellSpan(j_first, j_last, c_first, j_start, j_stop, columns)
    cells = tl.zeros((DOWN, ACROSS), tl.float64)
    for row in range(i_first // meta.rows, tl.cdiv(i_last, meta.rows)):
        first = row * meta.rows
        extra = (cell_indices(first + tl.arange(0, meta.rows), queries), keys)
        block = load_block(query, key, lse, b, h, first, n, m, H, group, sign, scale, unit, tables, extra, meta)
        schedule_row = ScheduleRow(schedule, b, h, row, m, window, False)
        cells = loop_over_tiles(cells, pool_range, schedule_row, meta.keys, meta.even, block, formulas, USE_MAX, meta)
    if USE_MAX:
        cells = tl.where(cells == float("inf"), float("nan"), cells)
    r, c = r_first + tl.arange(0, DOWN)[:, None], c_first + tl.arange(0, ACROSS)[None, :]
    pointers = output + (tl.cast(position, tl.int64) * rows + r) * columns + c
    tl.store(pointers, cells, mask=(r < r_last) & (c < c_last))
