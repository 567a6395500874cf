"""What each key receives, second pass: a block of keys against the blocks of queries that see it."""

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles
from .observe import folded, join, normaliser, queries_of, weight

__all__ = ["received"]


@triton.jit
def over_queries(
    state,
    first,
    last,
    given,
    k,
    j0,
    b,
    h,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
    LARGEST: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """What the keys have, (keys,) float64, after the blocks of queries `first` to before `last`."""
    query, lse, n, m, H, sign, scale, base, tables = given
    scale, unit = tiles.number(scale, form.total), tiles.number(base, form.total)
    for block in range(first, last):
        i = (block * form.rows + tl.arange(0, form.rows))[:, None]
        q = queries_of(query, b, h, block * form.rows, n, sign, form)
        products = tl.dot(q, k, input_precision=form.precision)
        place = (b, h, tl.minimum(i, n - 1), n, m)
        if PARTIAL:
            s = tiles.scores(products, place, j0, scale, tables, mask_at, score_at, True, form)
        else:  # nothing is hidden, but the keys may end
            s = tiles.scores(products, place, j0, scale, tables, None, score_at, True, form)
        p = weight(s, unit, normaliser(lse, b * H + h, block * form.rows, n, base, form))
        if LARGEST:
            p = tl.where(p == p, p, float("inf"))  # maxima pass NaN over; no weight is above 1
        if PARTIAL:
            p = tl.where(i < n, p, 0.0)
        state = join(state, folded(p, 0, LARGEST).to(tl.float64), LARGEST)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def received(
    query,
    key,
    lse,
    output,
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
    form: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Σ_i P_ij of a block of keys of a head, or the largest.

    Parameters
    ----------
    output : (B, H, m) in the accumulator's type
    blocks : of keys
    schedule : that of blocks of keys, or None where every query sees them
    """
    item = tl.program_id(0)
    position, row = item // blocks, item % blocks
    b, h = position // H, position % H
    j0 = row * form.keys
    k = tiles.keys_of(
        tiles.head_of(key, b, h // group), key, j0, form.keys, m, form.d_k, form.lanes_k, not form.even, form
    )
    given = (query, lse, n, m, H, sign, scale, unit, tables)
    state = tl.zeros((form.keys,), tl.float64)
    if schedule is None:
        whole, every = n // form.rows, tl.cdiv(n, form.rows)
        state = over_queries(state, 0, whole, given, k, j0, b, h, mask_at, score_at, form, LARGEST, False)
        state = over_queries(state, whole, every, given, k, j0, b, h, mask_at, score_at, form, LARGEST, True)
    else:
        runs, at = schedule[1], schedule[0] + 3 * (b * schedule[2] + h * schedule[3] + row)
        start, middle, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        for run in range(start, middle):
            first, last = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
            state = over_queries(state, first, last, given, k, j0, b, h, mask_at, score_at, form, LARGEST, False)
        for run in range(middle, stop):
            first, last = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
            state = over_queries(state, first, last, given, k, j0, b, h, mask_at, score_at, form, LARGEST, True)
    if LARGEST:
        state = tl.where(state == float("inf"), float("nan"), state)
    j = j0 + tl.arange(0, form.keys)
    place = output + tl.cast(position, tl.int64) * m + j
    tl.store(place, state.to(output.dtype.element_ty), mask=j < m)
