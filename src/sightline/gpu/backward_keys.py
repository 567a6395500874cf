"""dK and dV: a program is a block of keys; see `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles
from .backward import finite, not_finite, over_runs, row_of, slopes_of, weights_of, write
from .forward import met

__all__ = ["backward_keys", "careful_keys"]


@triton.jit
def keys_over_run(
    state,
    first,
    last,
    block,
    seams,
    KINDS: tl.constexpr,
    form: tl.constexpr,
    PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """(dK, the scale not in it, dV, marks) after the tiles of queries `first` to before `last` of a head."""
    dk, dv, marks = state
    k, v, query, query_start, d_output, d_output_start, rows, position, place, numbers, kept, random, tables = block
    b, h, j0, n, m = place
    row = tl.arange(0, form.rows)
    j = (j0 + tl.arange(0, form.keys))[:, None]
    for tile in range(first, last):
        i0 = tile * form.rows
        i = i0 + row
        q = tiles.keys_of(query_start, query, i0, form.rows, n, form.d_k, form.lanes_k, PARTIAL, form)
        do = tiles.rows_of(d_output_start, d_output, i0, form.rows, n, form.d_v, form.lanes_v, PARTIAL, form)
        at = tl.cast(position, tl.int64) * n + i0 + row
        if PARTIAL:
            high = tl.load(rows[0] + at, mask=i < n, other=0.0)
            low = tl.load(rows[1] + at, mask=i < n, other=0.0)
            delta = tl.load(rows[2] + at, mask=i < n, other=0.0)
        else:
            high, low, delta = tl.load(rows[0] + at), tl.load(rows[1] + at), tl.load(rows[2] + at)
        pairs = (b, h, tl.minimum(i, n - 1)[None, :], tl.minimum(j, m - 1), n, m)
        lse = (high[None, :], low[None, :])
        products = tl.dot(k, q, input_precision=form.precision)
        p, s = weights_of(products, pairs, (j < m) & (i < n)[None, :], lse, numbers, tables, seams, PARTIAL, CAREFUL)
        dp = tl.dot(v, tl.trans(do), input_precision=form.precision)
        dropped = p
        if random is not None:
            there = (b, h, i[:, None], n, m)
            keep = tl.trans(tiles.keep(random, there, j0, form.rows, form.keys))
            dropped, dp = tl.where(keep, p, 0.0), tl.where(keep, dp * kept, 0.0)
        weights = dropped.to(do.dtype)
        if CAREFUL:
            marks = met(weights, do, marks, form)
            do, q = finite(do), finite(q)
        dv = tl.dot(weights, do, dv, input_precision=form.precision)
        ds = slopes_of(
            *(p, dp, s, products, pairs, delta[None, :], numbers, tables, None, seams, KINDS, PARTIAL or CAREFUL),
        )
        dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=form.precision)
    return dk, dv, marks


@triton.jit
def block_of_keys(given, b, g, first, row, seams, form: tl.constexpr, CAREFUL: tl.constexpr):
    """(dK, dV) of a key head's keys from `first` on, over the query heads of its group in order.

    `given` is (query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables) of
    the kernel.
    """
    query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables = given
    k = tiles.rows_of(tiles.head_of(key, b, g), key, first, form.keys, m, form.d_k, form.lanes_k, True, form)
    k = (k * tiles.number(sign, form.total)).to(k.dtype)  # nothing is rounded
    v = tiles.rows_of(tiles.head_of(value, b, g), value, first, form.keys, m, form.d_v, form.lanes_v, True, form)
    numbers = (tiles.number(scale, form.total), tiles.number(unit, form.total))
    kept = tiles.number(kept, form.total)
    marks = tl.zeros((form.keys, form.lanes_v if CAREFUL else 1), tl.int32)
    state = (
        tl.zeros((form.keys, form.lanes_k), form.total),
        tl.zeros((form.keys, form.lanes_v), form.total),
        marks,
    )
    for h in range(g * group, (g + 1) * group):
        starts = (tiles.head_of(query, b, h), tiles.head_of(d_output, b, h))
        place = (b, h, first, n, m)
        block = (k, v, query, starts[0], d_output, starts[1], rows, b * H + h, place, numbers, kept, random, tables)
        state = over_runs(
            *(state, keys_over_run, schedule, row_of(schedule, b, h, row), first + form.keys > m, n // form.rows),
            *(tl.cdiv(n, form.rows), block, seams, (), form, CAREFUL),
        )
    dk, dv, marks = state
    dv *= kept
    if CAREFUL:
        both = (marks & 6) == 6
        signs = tl.where((marks & 2) != 0, float("inf"), tl.where((marks & 4) != 0, float("-inf"), 0.0))
        dv += tl.where(((marks & 1) != 0) | both, float("nan"), signs)
    return dk * (numbers[0] * tiles.number(sign, form.total)), dv


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def backward_keys(
    query,
    key,
    value,
    d_output,
    rows,
    d_key,
    d_value,
    tainted,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    random,
    kept: tl.float64,
    tables,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    slope_at: tl.constexpr,
    weights_at: tl.constexpr,
    scores_at: tl.constexpr,
    form: tl.constexpr,
):
    """dK and dV of a block of keys of a key head; `schedule` has its runs of blocks of queries, for each query head.

    d_key and d_value are (B, G, m, d_k) and (B, G, m, d_v), contiguous; the rest is as in `backward_queries`. Earlier
    blocks come first, since a causal mask makes those the longest.
    """
    item, heads = tl.program_id(0), H // group
    place, block = item // blocks, item % blocks
    first = block * form.keys
    seams: tl.constexpr = (mask_at, score_at, slope_at, weights_at, scores_at, None)
    given = (query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables)
    dk, dv = block_of_keys(given, place // heads, place % heads, first, block, seams, form, False)
    if tainted is not None:
        tl.store(tainted + item, not_finite(dk) | not_finite(dv))
    write(dk, d_key, place, first, m, form.d_k, form.keys, form.lanes_k)
    write(dv, d_value, place, first, m, form.d_v, form.keys, form.lanes_v)


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "items"])
def careful_keys(
    query,
    key,
    value,
    d_output,
    rows,
    d_key,
    d_value,
    tainted,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    items: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    random,
    kept: tl.float64,
    tables,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    slope_at: tl.constexpr,
    weights_at: tl.constexpr,
    scores_at: tl.constexpr,
    form: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The blocks `backward_keys` marked, in PARTS of form.keys keys each."""
    seams: tl.constexpr = (mask_at, score_at, slope_at, weights_at, scores_at, None)
    heads = H // group
    given = (query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if tl.load(tainted + item) != 0:
            place, block = item // blocks, item % blocks
            for part in range(PARTS):
                first = (block * PARTS + part) * form.keys
                dk, dv = block_of_keys(given, place // heads, place % heads, first, block, seams, form, True)
                write(dk, d_key, place, first, m, form.d_k, form.keys, form.lanes_k)
                write(dv, d_value, place, first, m, form.d_v, form.keys, form.lanes_v)
