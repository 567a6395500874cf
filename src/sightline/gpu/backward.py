"""The backward kernels: the weights again from the saved normaliser, tile by tile.

    S  = Q Kᵀ, score, mask       P  = 2^(S − lse)        dP = dO Vᵀ        δ = rowsum(dO ∘ O) − dlse
    dS = P ∘ (dP − δ) ∘ d score / d s        dQ = dS K · scale        dK = dSᵀ Q · scale        dV = Pᵀ dO

(Dao, "FlashAttention-2", 2023, algorithm 2, in two passes, so that no two programs add to one number.) `prepare` makes δ
and lse in base 2; a program of `queries` is a block of queries and adds up dQ over its runs of keys; one of `keys` is a
block of keys, and adds up dK and dV over its runs of queries, for the heads of its group in turn. Tiles of the second
are transposed: S there is (keys, rows), so that Pᵀ and dSᵀ are factors as they come.

What a mask hides reaches nothing, NaN and ∞ included: dS is 0 where P is, and programs whose sums are not finite mark
their block, which `careful_queries` and `careful_keys`, launched after them, compute once more: K and Q made finite, for
where they are visible dS shows them, and beside dV which NaN and ∞ of dO the weights other than 0 meet.

`seams` is (mask_at, score_at, slope_at, weights_at, scores_at, gains_at): the formulas of mask and score, d score / d s,
what statistics add to dP and to the gradient of the final score, and what tables gain (see `gains`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import gains, tiles
from .forward import met

__all__ = ["careful_keys", "careful_queries", "keys", "prepare", "queries"]

LOG2_E = tl.constexpr(1.4426950408889634)


# -- a tile ------------------------------------------------------------------------------------------------------------
@triton.jit
def weights_of(products, pairs, inside, lse, numbers, tables, seams, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr):
    """(P, final scores) of a tile from its Q · K; P is 0 and the score −∞ where the pair is hidden.

    Scores are in nats where a formula makes them, else not yet scaled. `lse` is (high, low) in base 2.
    """
    b, h, i, j, n, m = pairs
    scale, unit = numbers
    s = products
    if seams[1] is not None:
        s = tl.broadcast_to(seams[1](s * scale, b, h, i, j, n, m, tables), s.shape)
    if PARTIAL:
        if seams[0] is not None:
            inside = inside & seams[0](b, h, i, j, n, m, tables)
        s = tl.where(inside, s, float("-inf"))
    high, low = lse
    x = tl.fma(s, tl.broadcast_to(unit, s.shape), tl.broadcast_to(-high, s.shape)) - low
    p = tl.exp2(tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))
    if CAREFUL:  # an lse of NaN
        p = tl.where(s == float("-inf"), 0.0, p)
    return p, s


@triton.jit
def of_statistics(formula: tl.constexpr, s, pairs, scale, tables, seams):
    """A formula of the final scores over a tile, 0 where the pair is hidden."""
    b, h, i, j, n, m = pairs
    final = s
    if seams[1] is None:
        final = s * scale
    return tl.where(s == float("-inf"), 0.0, formula(final, b, h, i, j, n, m, tables))


@triton.jit
def slopes_of(
    p, dp, s, products, pairs, delta, numbers, tables, sums, seams, KINDS: tl.constexpr, CHECKED: tl.constexpr
):
    """dS of a tile, the scale not in it, from P and dP; tables gain their shares."""
    b, h, i, j, n, m = pairs
    scale = numbers[0]
    if seams[3] is not None:
        dp += of_statistics(seams[3], s, pairs, scale, tables, seams)
    ds = p * (dp - delta)
    if CHECKED or seams[1] is not None:
        ds = tl.where(p == 0, 0.0, ds)
    if seams[4] is not None:
        ds += of_statistics(seams[4], s, pairs, scale, tables, seams)
    if seams[5] is not None:
        gains.add(ds, products * scale, pairs, tables, sums, seams[5], KINDS)
    if seams[2] is not None:
        ds = tl.where(ds == 0, 0.0, ds * seams[2](products * scale, b, h, i, j, n, m, tables))
    return ds


@triton.jit
def finite(x):
    """The block with 0 for NaN and ∞."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def not_finite(x):
    """1 where a block has NaN or ∞, else 0."""
    return tl.max(tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1), 0)


# -- runs --------------------------------------------------------------------------------------------------------------
@triton.jit
def over_runs(
    state,
    body: tl.constexpr,
    schedule,
    row,
    ragged,
    whole,
    count,
    block,
    seams,
    KINDS: tl.constexpr,
    form: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """The state after `body` has seen every tile of a block: those of its row of the schedule, or all there are.

    Full tiles come first, without mask and bounds; none is full where the block itself is ragged. Without a schedule
    the first `whole` of `count` tiles are full.
    """
    if schedule is None:
        middle = tl.where(ragged, 0, whole)
        state = body(state, 0, middle, block, seams, KINDS, form, False, CAREFUL)
        state = body(state, middle, count, block, seams, KINDS, form, True, CAREFUL)
    else:
        runs, at = schedule[1], schedule[0] + 3 * row
        start, middle, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        middle = tl.where(ragged, start, middle)
        for run in range(start, middle):
            first, last = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
            state = body(state, first, last, block, seams, KINDS, form, False, CAREFUL)
        for run in range(middle, stop):
            first, last = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
            state = body(state, first, last, block, seams, KINDS, form, True, CAREFUL)
    return state


@triton.jit
def row_of(schedule, b, h, block):
    """The row of a block in a schedule."""
    row = block
    if schedule is not None:
        row = b * schedule[2] + h * schedule[3] + block
    return row


# -- what rows need ----------------------------------------------------------------------------------------------------
@triton.jit
def weighed_over_run(
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
    """Σⱼ P ∘ what statistics add to dP."""
    q, lse, place, key, key_start, numbers, tables = block
    b, h, i, n, m = place
    for tile in range(first, last):
        j0 = tile * form.keys
        k = tiles.keys_of(key_start, key, j0, form.keys, m, form.d_k, form.lanes_k, PARTIAL, form)
        j = j0 + tl.arange(0, form.keys)[None, :]
        products = tl.dot(q, k, input_precision=form.precision)
        pairs = (b, h, i, tl.minimum(j, m - 1), n, m)
        p, s = weights_of(products, pairs, j < m, lse, numbers, tables, seams, PARTIAL, True)
        state += tl.sum(p * of_statistics(seams[3], s, pairs, numbers[0], tables, seams), 1)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def prepare(
    query,
    key,
    value,
    output,
    d_output,
    d_lse,
    lse,
    rows,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    tables,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    weights_at: tl.constexpr,
    form: tl.constexpr,
):
    """Of a block of queries of a head: lse in base 2 as a sum of two numbers, and δ.

    Parameters
    ----------
    output, d_output : arrays, see `tiles`
    d_lse, lse : float64 (B, H, n), contiguous; d_lse None for 0
    rows : (high, low, δ), each (B, H, n), contiguous; a row that sees nothing has 0 for its lse
    """
    item = tl.program_id(0)
    position, first = item // blocks, item % blocks * form.rows
    b, h = position // H, position % H
    i = first + tl.arange(0, form.rows)
    inside, at = i < n, tl.cast(position, tl.int64) * n + i
    o = tiles.rows_of(tiles.head_of(output, b, h), output, first, form.rows, n, form.d_v, form.lanes_v, True, form)
    do = tiles.rows_of(tiles.head_of(d_output, b, h), d_output, first, form.rows, n, form.d_v, form.lanes_v, True, form)
    delta = tl.sum(o.to(form.total) * do.to(form.total), 1)
    if d_lse is not None:
        delta -= tl.load(d_lse + at, mask=inside, other=0.0).to(form.total)
    normaliser = tl.load(lse + at, mask=inside, other=0.0)
    normaliser = tl.where(normaliser == float("-inf"), 0.0, normaliser) * LOG2_E
    high = normaliser.to(form.total)
    low = (normaliser - high.to(tl.float64)).to(form.total)
    if weights_at is not None:
        q = tiles.rows_of(tiles.head_of(query, b, h), query, first, form.rows, n, form.d_k, form.lanes_k, True, form)
        q = (q * tiles.number(sign, form.total)).to(q.dtype)
        numbers = (tiles.number(scale, form.total), tiles.number(unit, form.total))
        place = (b, h, tl.minimum(i, n - 1)[:, None], n, m)
        given = (q, (high[:, None], low[:, None]), place, key, tiles.head_of(key, b, h // group), numbers, tables)
        seams: tl.constexpr = (mask_at, score_at, None, weights_at, None, None)
        row = row_of(schedule, b, h, item % blocks)
        delta += over_runs(
            *(tl.zeros((form.rows,), form.total), weighed_over_run, schedule, row, False, m // form.keys),
            *(tl.cdiv(m, form.keys), given, seams, (), form, True),
        )
    tl.store(rows[0] + at, high, mask=inside)
    tl.store(rows[1] + at, low, mask=inside)
    tl.store(rows[2] + at, delta, mask=inside)


# -- dQ ----------------------------------------------------------------------------------------------------------------
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
def block_of_queries(
    given, b, h, first, row, seams, KINDS: tl.constexpr, form: tl.constexpr, CAREFUL: tl.constexpr
):
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


@triton.jit
def write(block, target, position, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """A block of rows from `first` on to a contiguous (heads, count, WIDTH)."""
    rows, column = first + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    place = target + (tl.cast(position, tl.int64) * count + rows)[:, None] * WIDTH + column
    tl.store(place, block.to(target.dtype.element_ty), mask=(rows < count)[:, None] & (column < WIDTH))


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "B", "batches", "heads"])
def queries(
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
    """The blocks `queries` marked, in PARTS of form.rows queries each."""
    seams: tl.constexpr = (mask_at, score_at, slope_at, weights_at, scores_at, None)
    given = (query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables, None)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if tl.load(tainted + item) != 0:
            place, block = item // blocks, item % blocks
            for part in range(PARTS):
                first = (block * PARTS + part) * form.rows
                dq = block_of_queries(given, place // H, place % H, first, block, seams, (), form, True)
                write(dq, d_query, place, first, n, form.d_k, form.rows, form.lanes_k)


# -- dK and dV ---------------------------------------------------------------------------------------------------------
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
            high = tl.load(rows[0] + at, mask=i < n, other=float("inf"))  # past the end, so that P = 0
            low = tl.load(rows[1] + at, mask=i < n, other=0.0)
            delta = tl.load(rows[2] + at, mask=i < n, other=0.0)
            i = tl.minimum(i, n - 1)
        else:
            high, low, delta = tl.load(rows[0] + at), tl.load(rows[1] + at), tl.load(rows[2] + at)
        pairs = (b, h, i[None, :], tl.minimum(j, m - 1), n, m)
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
def keys(
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

    d_key and d_value are (B, G, m, d_k) and (B, G, m, d_v), contiguous; the rest is as in `queries`. Earlier blocks come
    first, since a causal mask makes those the longest.
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
    """The blocks `keys` marked, in PARTS of form.keys keys each."""
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
