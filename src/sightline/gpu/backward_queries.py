"""dQ, and what tables gain: a program is a block of queries; see `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles
from .backward import finite, not_finite, over_runs, row_of, slopes_of, weights_of, write

__all__ = ["backward_queries", "careful_queries"]


@triton.jit
def queries_over_run(
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
    """dQ, the scale not in it, after the tiles of keys `first` to before `last`."""
    q, do, lse, delta, place, key, key_start, value, value_start, numbers, kept, random, tables, sums = block
    b, h, i, n, m = place
    bound: tl.constexpr = PARTIAL and not form.even
    for tile in range(first, last):
        j0 = tile * form.keys
        k = tiles.keys_of(key_start, key, j0, form.keys, m, form.d_k, form.lanes_k, bound, form)
        v = tiles.keys_of(value_start, value, j0, form.keys, m, form.d_v, form.lanes_v, bound, form)
        j = j0 + tl.arange(0, form.keys)[None, :]
        at = j
        if bound:
            at = tl.minimum(j, m - 1)
        pairs = (b, h, i, at, n, m)
        products = tl.dot(q, k, input_precision=form.precision)
        p, s = weights_of(products, pairs, j < m, lse, numbers, tables, seams, PARTIAL, CAREFUL)
        dp = tl.dot(do, v, input_precision=form.precision)
        if random is not None:
            dp = tl.where(tiles.keep(random, place, j0, form.rows, form.keys), dp * kept, 0.0)
        ds = slopes_of(
            *(p, dp, s, products, pairs, delta, numbers, tables, sums, seams, KINDS, PARTIAL or CAREFUL),
        )
        if CAREFUL:
            k = finite(k)
        state = tl.dot(ds.to(k.dtype), tl.trans(k), state, input_precision=form.precision)
    return state


@triton.jit
def block_of_queries(given, b, h, first, row, seams, KINDS: tl.constexpr, form: tl.constexpr, CAREFUL: tl.constexpr):
    """dQ of a head's queries from `first` on; `row` is their block's of the head's schedule.

    `given` is (query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables,
    sums) of the kernel.
    """
    query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables, sums = given
    i = first + tl.arange(0, form.rows)
    inside, at = i < n, (tl.cast(b, tl.int64) * H + h) * n + i
    q = tiles.rows_of(tiles.head_of(query, b, h), query, first, form.rows, n, form.d_k, form.lanes_k, True, form)
    q = (q * tiles.number(sign, form.total)).to(q.dtype)  # nothing is rounded
    do = tiles.rows_of(tiles.head_of(d_output, b, h), d_output, first, form.rows, n, form.d_v, form.lanes_v, True, form)
    high = tl.load(rows[0] + at, mask=inside, other=float("inf"))[:, None]  # past the end, so that P = 0
    low = tl.load(rows[1] + at, mask=inside, other=0.0)[:, None]
    delta = tl.load(rows[2] + at, mask=inside, other=0.0)[:, None]
    place = (b, h, tl.minimum(i, n - 1)[:, None], n, m)
    starts = (tiles.head_of(key, b, h // group), tiles.head_of(value, b, h // group))
    numbers = (tiles.number(scale, form.total), tiles.number(unit, form.total))
    kept = tiles.number(kept, form.total)
    block = (q, do, (high, low), delta, place, key, starts[0], value, starts[1], numbers, kept, random, tables, sums)
    dq = over_runs(
        *(tl.zeros((form.rows, form.lanes_k), form.total), queries_over_run, schedule, row_of(schedule, b, h, row)),
        *(False, m // form.keys, tl.cdiv(m, form.keys), block, seams, KINDS, form, CAREFUL),
    )
    return dq * (numbers[0] * tiles.number(sign, form.total))


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "B", "batches", "heads"])
def backward_queries(
    query,
    key,
    value,
    d_output,
    rows,
    d_query,
    tainted,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    B: tl.int32,
    batches: tl.int32,
    heads: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    random,
    kept: tl.float64,
    tables,
    sums,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    slope_at: tl.constexpr,
    weights_at: tl.constexpr,
    scores_at: tl.constexpr,
    gains_at: tl.constexpr,
    KINDS: tl.constexpr,
    TURNS: tl.constexpr,
    form: tl.constexpr,
):
    """dQ of a block of queries of a head, and what tables gain.

    Parameters
    ----------
    query, key, value, d_output : arrays, see `tiles`
    rows : of `prepare`
    d_query : (B, H, n, d_k), contiguous
    tainted : int32, one for each block: whether its dQ is not finite; None where nothing is hidden
    batches, heads : how many of each are worked on apart; with TURNS, one program takes the others in turn, since an
        entry of a table that has one for each pair belongs to the program of the pair
    schedule, random, kept : as in `forward`
    sums, KINDS : see `gains`
    """
    item = tl.program_id(0)
    place, block = item // blocks, blocks - 1 - item % blocks
    first = block * form.rows
    seams: tl.constexpr = (mask_at, score_at, slope_at, weights_at, scores_at, gains_at)
    given = (query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables, sums)
    if TURNS:
        for b in range(place // heads, B, batches):
            for h in range(place % heads, H, heads):
                dq = block_of_queries(given, b, h, first, block, seams, KINDS, form, False)
                if tainted is not None:
                    tl.store(tainted + (b * H + h) * blocks + block, not_finite(dq))
                write(dq, d_query, b * H + h, first, n, form.d_k, form.rows, form.lanes_k)
                tl.debug_barrier()  # the next one's threads read the sums that these have written
    else:
        dq = block_of_queries(given, place // H, place % H, first, block, seams, KINDS, form, False)
        if tainted is not None:
            tl.store(tainted + place * blocks + block, not_finite(dq))
        write(dq, d_query, place, first, n, form.d_k, form.rows, form.lanes_k)


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "items"])
def careful_queries(
    query,
    key,
    value,
    d_output,
    rows,
    d_query,
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
    """The blocks `backward_queries` marked, in PARTS of form.rows queries each."""
    seams: tl.constexpr = (mask_at, score_at, slope_at, weights_at, scores_at, None)
    given = (query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables, None)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if tl.load(tainted + item) != 0:
            place, block = item // blocks, item % blocks
            for part in range(PARTS):
                first = (block * PARTS + part) * form.rows
                dq = block_of_queries(given, place // H, place % H, first, block, seams, (), form, True)
                write(dq, d_query, place, first, n, form.d_k, form.rows, form.lanes_k)
