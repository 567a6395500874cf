"""The backward kernels: the weights again from the saved normaliser, tile by tile.

    S  = Q Kᵀ, score, mask       P  = e^(S − lse)        dP = dO Vᵀ        δ = rowsum(dO ∘ O) − dlse
    dS = P ∘ (dP − δ) ∘ d score / d s        dQ = dS K · scale        dK = dSᵀ Q · scale        dV = Pᵀ dO

(Dao, "FlashAttention-2", 2023, algorithm 2, in two passes, so that no two programs add to one number.) `prepare` makes
δ, and lse in the unit of the scores. A program of `backward_queries` is a block of queries and adds up dQ over its runs
of keys; one of `backward_keys` is a block of keys, and adds up dK and dV over its runs of queries, for the heads of its
group in turn. Tiles of the second are transposed: S there is (keys, rows), so that Pᵀ and dSᵀ are factors as they come.

What a mask hides reaches nothing, NaN and ∞ included: dS is 0 where P is, and programs whose sums are not finite mark
their block. `careful_queries` and `careful_keys`, launched after them, compute those once more: K and Q made finite,
since dS shows where they are visible, and beside dV which NaN and ∞ of dO meet weights other than 0. The host waits for
nothing; whole inputs pay one look at their sums.

`seams` is (mask_at, score_at, slope_at, weights_at, scores_at, gains_at): the formulas of mask and score, d score / ds,
what statistics add to dP and to the gradient of the final score, and what tables gain (see `gains`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import gains, tiles

__all__ = ["finite", "not_finite", "over_runs", "prepare", "row_of", "slopes_of", "weights_of", "write"]

LOG2_E = tl.constexpr(1.4426950408889634)


# -- a tile ------------------------------------------------------------------------------------------------------------
@triton.jit
def weights_of(products, pairs, inside, lse, numbers, tables, seams, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr):
    """(P, final scores) of a tile from its Q · K; P is 0 and the score −∞ where the pair is hidden.

    Scores are in nats where a formula makes them, else not yet scaled. `lse` is (high, low) in the scores' unit.
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
    x = (s - high - low) * unit  # near the maximum exact, however large the scores are
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


@triton.jit
def write(block, target, position, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """A block of rows from `first` on to a contiguous (heads, count, WIDTH)."""
    rows, column = first + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    place = target + (tl.cast(position, tl.int64) * count + rows)[:, None] * WIDTH + column
    tl.store(place, block.to(target.dtype.element_ty), mask=(rows < count)[:, None] & (column < WIDTH))


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
    """Of a block of queries of a head: lse in the unit of its scores, as a sum of two numbers, and δ.

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
    normaliser = tl.where(normaliser == float("-inf"), 0.0, normaliser) * (LOG2_E / tiles.number(unit, tl.float64))
    high = tiles.bounded(normaliser, form)
    low = tiles.bounded(normaliser - high.to(tl.float64), form)
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
