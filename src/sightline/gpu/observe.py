"""The second pass over the tiles: normalised weights from the saved normaliser, each tile handed to a statistic.

    P = 2^((S − lse) · unit), 0 where hidden and in rows that see nothing

The normaliser is brought to the unit of S, a sum of two numbers of the accumulator's type: weights do not take on its
rounding, and the difference is exact where S is near it. Every
number of a result is written by one program alone, in the order of its runs, so that reruns give the same bits. Sums
over many tiles are float64.

A kernel walks its block's runs by `attend` and says by `collect` what becomes of a tile: a function
(state, s, first key, block, extra, how, score_at, form) → state. `block` is (Q, K, where its head starts, place,
normaliser, scale, unit, tables). `received`, by blocks of keys, is in `keywise`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles
from .forward import within

__all__ = ["add_weights", "attend", "block_of", "pooled", "put_scores", "put_weights", "top_k", "weight", "written"]

LOG2_E = tl.constexpr(1.4426950408889634)
NO_KEY = tl.constexpr(2147483647)  # above every key


@triton.jit
def normaliser(lse, position, first, n, unit, form: tl.constexpr):
    """lse of a head's queries from `first` on in the scores' unit, high + low, (rows, 1); 0 where nothing is seen."""
    rows = first + tl.arange(0, form.rows)[:, None]
    x = tl.load(lse + tl.cast(position, tl.int64) * n + rows, mask=rows < n, other=0.0) * (LOG2_E / unit)
    x = tl.where(x == float("-inf"), 0.0, x)
    high = tiles.bounded(x, form)
    return high, tiles.bounded(tl.where(tl.abs(x) < float("inf"), x - high.to(tl.float64), 0.0), form)


@triton.jit
def weight(s, unit, normaliser):
    """P of scores as `tiles.scores` has them."""
    high, low = normaliser
    x = tl.minimum((s - high) - low, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(x * unit)


@triton.jit
def queries_of(query, b, h, first, n, sign, form: tl.constexpr):
    """A head's queries from `first` on, times the sign of the scale: nothing is rounded."""
    q = tiles.rows_of(tiles.head_of(query, b, h), query, first, form.rows, n, form.d_k, form.lanes_k, True, form)
    return (q * tiles.number(sign, form.total)).to(q.dtype)


@triton.jit
def block_of(given, b, h, first, form: tl.constexpr):
    """A block of queries: `given` is (query, key, lse, n, m, H, group, sign, scale, unit, tables) of the kernel."""
    query, key, lse, n, m, H, group, sign, scale, unit, tables = given
    place = (b, h, tl.minimum(first + tl.arange(0, form.rows), n - 1)[:, None], n, m)
    numbers = (tiles.number(scale, form.total), tiles.number(unit, form.total))
    start = tiles.head_of(key, b, h // group)
    half = normaliser(lse, b * H + h, first, n, unit, form)
    return queries_of(query, b, h, first, n, sign, form), key, start, place, half, numbers[0], numbers[1], tables


@triton.jit
def over_run(
    state,
    first,
    last,
    block,
    extra,
    collect: tl.constexpr,
    how: tl.constexpr,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """The state after the tiles `first` to before `last`."""
    q, key, start, place, _, scale, _, tables = block
    bound: tl.constexpr = PARTIAL and not form.even
    for tile in range(first, last):
        j0 = tile * form.keys
        k = tiles.keys_of(start, key, j0, form.keys, place[4], form.d_k, form.lanes_k, bound, form)
        products = tl.dot(q, k, input_precision=form.precision)
        s = tiles.scores(products, place, j0, scale, tables, mask_at, score_at, PARTIAL, form)
        state = collect(state, s, j0, block, extra, how, score_at, form)
    return state


@triton.jit
def attend(
    state,
    schedule,
    row,
    window,
    block,
    extra,
    collect: tl.constexpr,
    how: tl.constexpr,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
):
    """The state after all tiles of a block of queries, `row` of its head's schedule, in the window if there is one."""
    b, h, _, _, m = block[3]
    if schedule is None:
        first, last = within(0, m // form.keys, window)
        state = over_run(state, first, last, block, extra, collect, how, mask_at, score_at, form, False)
        if not form.even:
            first, last = within(m // form.keys, m // form.keys + 1, window)
            state = over_run(state, first, last, block, extra, collect, how, mask_at, score_at, form, True)
    else:
        runs, at = schedule[1], schedule[0] + 3 * (b * schedule[2] + h * schedule[3] + row)
        start, middle, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        for run in range(start, middle):
            first, last = within(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1), window)
            state = over_run(state, first, last, block, extra, collect, how, mask_at, score_at, form, False)
        for run in range(middle, stop):
            first, last = within(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1), window)
            state = over_run(state, first, last, block, extra, collect, how, mask_at, score_at, form, True)
    return state


# -- the largest weights of a query ------------------------------------------------------------------------------------


@triton.jit
def keep_largest(state, s, first, block, extra, how: tl.constexpr, score_at: tl.constexpr, form: tl.constexpr):
    """The lists after a tile; state is (scores, keys) (rows, K) in no order, and the least of each row, (rows, 1).

    Of what of the tile beats the least of its list, the best of each row enters in its place, until nothing does.
    """
    values, keys, least, least_key = state
    high = block[4][0]
    j = tl.broadcast_to(first + tl.arange(0, form.keys)[None, :], s.shape)
    s = tl.where((high != high) & (s != float("-inf")), 0.0, s)  # where lse is NaN all weights are: first come
    better = (s > least) | ((s == least) & (j < least_key) & (s > float("-inf")))
    while tl.max(tl.max(better.to(tl.int32), 1), 0) > 0:
        best = tl.max(tl.where(better, s, float("-inf")), 1, keep_dims=True)
        key = tl.min(tl.where(better & (s == best), j, NO_KEY), 1, keep_dims=True)
        enters = (keys == least_key) & (key != NO_KEY)
        values, keys = tl.where(enters, best, values), tl.where(enters, key, keys)
        least = tl.min(values, 1, keep_dims=True)
        least_key = tl.max(tl.where(values == least, keys, -1), 1, keep_dims=True)
        s = tl.where(j == key, float("-inf"), s)
        better = (s > least) | ((s == least) & (j < least_key) & (s > float("-inf")))
    return values, keys, least, least_key


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "k"])
def top_k(
    query,
    key,
    lse,
    output,
    where,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    k: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    tables,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
    K: tl.constexpr,
):
    """The k largest weights of a block of queries and their keys, descending; of equal scores the smaller key first.

    Parameters
    ----------
    output, where : (B, H, n, k), int64 the latter; 0 and −1 past the seen keys, from the Kth on as they are
    K : a power of two, no less than k or m
    """
    item = tl.program_id(0)
    position, row = item // blocks, blocks - 1 - item % blocks
    first = row * form.rows
    given = (query, key, lse, n, m, H, group, sign, scale, unit, tables)
    block = block_of(given, position // H, position % H, first, form)
    values = tl.full((form.rows, K), float("-inf"), form.total)
    keys = tl.full((form.rows, K), NO_KEY, tl.int32) - 1 - tl.arange(0, K)[None, :]  # each once
    least = tl.full((form.rows, 1), float("-inf"), form.total)
    last = tl.full((form.rows, 1), NO_KEY - 1, tl.int32)
    state = (values, keys, least, last)
    state = attend(state, schedule, row, None, block, None, keep_largest, None, mask_at, score_at, form)
    values, keys, least, last = state
    rows = first + tl.arange(0, form.rows)[:, None]
    at, inside = (tl.cast(position, tl.int64) * n + rows) * k, rows < n
    for rank in range(tl.minimum(k, K)):
        best = tl.max(values, 1, keep_dims=True)
        place = tl.min(tl.where(values == best, keys, NO_KEY), 1, keep_dims=True)
        some = best > float("-inf")
        tl.store(output + at + rank, tl.where(some, weight(best, block[6], block[4]), 0.0), mask=inside)
        tl.store(where + at + rank, tl.where(some, place, -1).to(tl.int64), mask=inside)
        values = tl.where(keys == place, float("-inf"), values)


# -- the matrix itself -------------------------------------------------------------------------------------------------


@triton.jit
def entries(first, block, extra, form: tl.constexpr):
    """Where a tile's entries lie in the output, and which of them there are."""
    output, line, row = extra
    n, m = block[3][3], block[3][4]
    down, across = tl.arange(0, form.rows)[:, None], tl.arange(0, form.keys)[None, :]
    corner = output + (tl.cast(line, tl.int64) * n + row) * m + first
    return corner + (tl.cast(down, tl.int64) * m + across), (down < n - row) & (across < m - first)


@triton.jit
def put_weights(state, s, first, block, extra, how: tl.constexpr, score_at: tl.constexpr, form: tl.constexpr):
    """P to its place."""
    places, inside = entries(first, block, extra, form)
    tl.store(places, weight(s, block[6], block[4]).to(extra[0].dtype.element_ty), mask=inside)
    return state


@triton.jit
def add_weights(state, s, first, block, extra, how: tl.constexpr, score_at: tl.constexpr, form: tl.constexpr):
    """P to what is there, which this program alone has written."""
    places, inside = entries(first, block, extra, form)
    held = tl.load(places, mask=inside, other=0.0)
    tl.store(places, held + weight(s, block[6], block[4]), mask=inside)
    return state


@triton.jit
def put_scores(state, s, first, block, extra, how: tl.constexpr, score_at: tl.constexpr, form: tl.constexpr):
    """S in nats to its place."""
    places, inside = entries(first, block, extra, form)
    if score_at is None:
        s = s * block[5]
    tl.store(places, s, mask=inside)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "batches", "heads"])
def written(
    query,
    key,
    lse,
    output,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    batches: tl.int32,
    heads: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    tables,
    collect: tl.constexpr,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
):
    """The tiles of a block of queries put to (..., n, m), of so many batches and heads one after another.

    `output` holds what tiles that are not visited have. One head to a program unless `collect` adds.
    """
    item = tl.program_id(0)
    line, row = item // blocks, blocks - 1 - item % blocks
    across = H // heads  # lines of a batch
    given = (query, key, lse, n, m, H, group, sign, scale, unit, tables)
    extra = (output, line, row * form.rows)
    for turn in range(batches * heads):
        b, h = line // across * batches + turn // heads, line % across * heads + turn % heads
        block = block_of(given, b, h, row * form.rows, form)
        attend((), schedule, row, None, block, extra, collect, None, mask_at, score_at, form)
        tl.debug_barrier()  # the next turn reads what other threads wrote in this one


# -- cells -------------------------------------------------------------------------------------------------------------


@triton.jit
def edge(cell, start, stop, cells):
    """The first position of a cell of a span."""
    return (start + tl.cast(cell, tl.int64) * (stop - start) // cells).to(tl.int32)


@triton.jit
def cell_of(position, start, stop, cells):
    """The cell of positions in a span."""
    return ((tl.cast(position - start + 1, tl.int64) * cells - 1) // (stop - start)).to(tl.int32)


@triton.jit
def join(x, y, LARGEST: tl.constexpr):
    """The sum of weights, or the larger."""
    if LARGEST:
        return tl.maximum(x, y)
    return x + y


@triton.jit
def folded(block, axis: tl.constexpr, LARGEST: tl.constexpr):
    """Weights joined along an axis."""
    if LARGEST:
        return tl.max(block, axis)
    return tl.sum(block, axis)


@triton.jit
def add_cells(state, s, first, block, extra, how: tl.constexpr, score_at: tl.constexpr, form: tl.constexpr):
    """The cells (DOWN, ACROSS) after a tile, one column of them after another."""
    i_first, i_last, r_first, i_start, i_stop, rows = extra[0]
    j_first, j_last, c_first, j_start, j_stop, columns = extra[1]
    DOWN: tl.constexpr = state.shape[0]
    ACROSS: tl.constexpr = state.shape[1]
    i = extra[2] + tl.arange(0, form.rows)
    j = first + tl.arange(0, form.keys)
    down = tl.where((i >= i_first) & (i < i_last), cell_of(i, i_start, i_stop, rows) - r_first, -1)[:, None]
    across = tl.where((j >= j_first) & (j < j_last), cell_of(j, j_start, j_stop, columns) - c_first, -1)[None, :]
    p = weight(s, block[6], block[4])
    if how:
        p = tl.where(p == p, p, float("inf"))  # maxima pass NaN over; no weight is above 1
    start = cell_of(tl.maximum(first, j_first), j_start, j_stop, columns) - c_first
    stop = cell_of(tl.minimum(first + form.keys, j_last) - 1, j_start, j_stop, columns) - c_first + 1
    for cell in range(start, stop):
        line = folded(tl.where(across == cell, p, 0.0), 1, how)[:, None]
        own = folded(tl.where(down == tl.arange(0, DOWN)[None, :], line, 0.0), 0, how)[:, None]
        there = tl.arange(0, ACROSS)[None, :] == cell
        state = join(state, tl.where(there, own.to(tl.float64), 0.0), how)
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
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
    LARGEST: tl.constexpr,
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
    i_first, i_last = edge(r_first, i_start, i_stop, rows), edge(r_last, i_start, i_stop, rows)
    j_first, j_last = edge(c_first, j_start, j_stop, columns), edge(c_last, j_start, j_stop, columns)
    window = (j_first // form.keys, tl.cdiv(j_last, form.keys))
    given = (query, key, lse, n, m, H, group, sign, scale, unit, tables)
    queries = (i_first, i_last, r_first, i_start, i_stop, rows)
    keys = (j_first, j_last, c_first, j_start, j_stop, columns)
    cells = tl.zeros((DOWN, ACROSS), tl.float64)
    for row in range(i_first // form.rows, tl.cdiv(i_last, form.rows)):
        block = block_of(given, position // H, position % H, row * form.rows, form)
        extra = (queries, keys, row * form.rows)
        cells = attend(cells, schedule, row, window, block, extra, add_cells, LARGEST, mask_at, score_at, form)
    if LARGEST:
        cells = tl.where(cells == float("inf"), float("nan"), cells)
    r, c = r_first + tl.arange(0, DOWN)[:, None], c_first + tl.arange(0, ACROSS)[None, :]
    places = output + (tl.cast(position, tl.int64) * rows + r) * columns + c
    tl.store(places, cells, mask=(r < r_last) & (c < c_last))
