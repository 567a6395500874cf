"""The kernel of the second pass that sums or maximizes weights over each cell of a grid on the matrix of weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles
from .weights_pass import combine, compute_scores, compute_weights, load_block, reduce


class CellSpan(NamedTuple):
    """The queries, or the keys, whose weights one Triton program pools.

    The axis of queries (or keys) from `start` to `stop` − 1 is divided into cells. A program has some of these cells.
    """

    first: Any  # first position (query or key) of the program
    last: Any  # last position of the program + 1
    cell: Any  # index on the axis of the program's first cell
    start: Any  # first position of the axis
    stop: Any  # last position of the axis + 1
    cells: Any  # number of cells on the axis


@triton.jit
def cell_start(cell, start, stop, cells):
    """Return the first position of the cell with index `cell`, where start ... stop − 1 is divided into cells."""
    return (start + tl.cast(cell, tl.int64) * (stop - start) // cells).to(tl.int32)


@triton.jit
def cell_index(position, start, stop, cells):
    """Return the index of each position's cell, where start ... stop − 1 is divided into cells."""
    return ((tl.cast(position - start + 1, tl.int64) * cells - 1) // (stop - start)).to(tl.int32)


@triton.jit
def cell_indices(position, span):
    """Return the index of each position's cell, counted from the program's first cell; −1 outside `span`."""
    inside = (position >= span.first) & (position < span.last)
    return tl.where(inside, cell_index(position, span.start, span.stop, span.cells) - span.cell, -1)


@triton.jit
def pool_range(state, first, last, block, formulas, USE_MAX: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles `first` ... `last` − 1.

    The state is the sum or maximum of the weights of each cell, (DOWN, ACROSS). The columns of cells that a tile meets
    are updated one after another.
    """
    DOWN: tl.constexpr = state.shape[0]
    ACROSS: tl.constexpr = state.shape[1]
    down, keys = block.extra
    for tile in range(first, last):
        j0 = tile * meta.keys
        p = compute_weights(compute_scores(block, j0, formulas, PARTIAL, meta), block)
        if USE_MAX:
            p = tl.where(p == p, p, float("inf"))  # `tl.max` skips NaN, so ∞ stands for NaN; no weight is above 1
        across = cell_indices(j0 + tl.arange(0, meta.keys), keys)
        start = cell_index(tl.maximum(j0, keys.first), keys.start, keys.stop, keys.cells) - keys.cell
        end = cell_index(tl.minimum(j0 + meta.keys, keys.last) - 1, keys.start, keys.stop, keys.cells) - keys.cell + 1
        for cell in range(start, end):
            column = reduce(tl.where(across[None, :] == cell, p, 0.0), 1, USE_MAX)
            column = reduce(tl.where(down[:, None] == tl.arange(0, DOWN)[None, :], column[:, None], 0.0), 0, USE_MAX)
            inside = tl.arange(0, ACROSS)[None, :] == cell
            state = combine(state, tl.where(inside, column.to(tl.float64)[:, None], 0.0), USE_MAX)
    return state


@triton.jit(
    do_not_specialize=[
        *("n", "m", "H", "group", "i_start", "i_stop", "j_start", "j_stop", "rows", "columns", "down", "across")
    ]
)
def pooled(
    arrays,
    n,
    m,
    H,
    group,
    i_start,
    i_stop,
    j_start,
    j_stop,
    rows,
    columns,
    down,
    across,
    scale: tl.float64,
    formulas,
    meta: tl.constexpr,
    USE_MAX: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Write the sums or maxima of P over some cells of a grid.

    The grid covers the queries i_start ... i_stop − 1 and the keys j_start ... j_stop − 1. Of N queries and R rows of
    cells, row r has the queries ⌊r N / R⌋ ... ⌊(r + 1) N / R⌋ − 1, counted from i_start. The keys are divided into
    columns of cells in the same way. If a block of queries lies in the cells of two programs, both compute its weights.

    Parameters
    ----------
    arrays : `arrays.seen` is an array (B, H, rows, columns) float64
    rows, columns : number of rows and number of columns of cells of the grid
    down, across : number of rows and number of columns of cells of a program, at most DOWN and ACROSS
    """
    item = tl.program_id(0)
    right, below = tl.cdiv(columns, across), tl.cdiv(rows, down)
    c_first, rest = item % right * across, item // right
    r_first, head_index = (below - 1 - rest % below) * down, rest // below
    r_last, c_last = tl.minimum(r_first + down, rows), tl.minimum(c_first + across, columns)
    i_first, i_last = cell_start(r_first, i_start, i_stop, rows), cell_start(r_last, i_start, i_stop, rows)
    j_first, j_last = cell_start(c_first, j_start, j_stop, columns), cell_start(c_last, j_start, j_stop, columns)
    window = (j_first // meta.keys, tl.cdiv(j_last, meta.keys))
    b, h = head_index // H, head_index % H
    queries = CellSpan(i_first, i_last, r_first, i_start, i_stop, rows)
    keys = CellSpan(j_first, j_last, c_first, j_start, j_stop, columns)
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), None)
    cells = tl.zeros((DOWN, ACROSS), tl.float64)
    for row in range(i_first // meta.rows, tl.cdiv(i_last, meta.rows)):
        first = row * meta.rows
        extra = (cell_indices(first + tl.arange(0, meta.rows), queries), keys)
        block = load_block(args, b, h, first, extra, meta)
        schedule_row = ScheduleRow(arrays.schedule, b, h, row, m, window, False)
        cells = loop_over_tiles(cells, pool_range, schedule_row, meta.keys, meta.even, block, formulas, USE_MAX, meta)
    if USE_MAX:
        cells = tl.where(cells == float("inf"), float("nan"), cells)
    r, c = r_first + tl.arange(0, DOWN)[:, None], c_first + tl.arange(0, ACROSS)[None, :]
    pointers = arrays.seen[0] + (tl.cast(head_index, tl.int64) * rows + r) * columns + c
    tl.store(pointers, cells, mask=(r < r_last) & (c < c_last))
