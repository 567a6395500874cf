"""Statistics of each query made beside the forward kernel's running softmax, at the cost of a few instructions a score.

With x = s − m the power of a weight p = 2^x that is not yet divided by l, and m moving to m':

    max_score   the largest s, and the first key that has it
    entropy     −Σ P ln P = (ln l · Σp − ln 2 · T) / l,    T = Σ p x,    T' = α (T + (m − m') Σp) + ...
    a sum       Σ P f = M / l,    M = Σ p f,    M' = α M + ...    for a formula f of the pair and its final score

A row whose scores have a NaN has NaN here too, as it has in lse. What is not asked for is None and takes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import tile_ops

__all__ = ["begin", "hand_over", "ride"]

LEAST = tl.constexpr(-2048.0)  # powers below it are weights of 0 in every type


@triton.jit
def begin(SUMS: tl.constexpr, form):
    """Nothing seen yet: (largest s, its key, T, Σp, sums), SUMS of the last."""
    none = tl.zeros((form.rows,), form.total)
    top, where, powers, seen = (), (), (), ()
    if form.largest:
        top = tl.full((form.rows,), float("-inf"), form.total)
        where = tl.full((form.rows,), -1, tl.int32)
    if form.entropy:
        powers, seen = none, none
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (none,)  # noqa: RUF005  no stars in Triton
    return top, where, powers, seen, sums


@triton.jit
def ride(riders, s, x, p, added, highest, alpha, moved, first, block, seams, form):
    """The riders after a tile of keys from `first` on.

    Parameters
    ----------
    s, x, p : (rows, keys) scores as `tiles.scores` has them, their powers, weights before dropout
    added, highest : (rows,) Σ p and the largest s of the tile
    alpha, moved : (rows,) m − m' and 2 to it
    """
    top, where, powers, seen, sums = riders
    b, h, i, n, m = block.place
    j = first + tl.arange(0, form.keys)[None, :]
    if form.largest:
        odd = tl.min(tl.where(s != s, j, tile_ops.NO_KEY), 1)  # the first NaN, which is above all
        reached = tl.where(odd < tile_ops.NO_KEY, float("nan"), highest)
        found = tl.where(odd < tile_ops.NO_KEY, odd, tl.min(tl.where(s < highest[:, None], tile_ops.NO_KEY, j), 1))
        above = (reached > top) | ((reached != reached) & (top == top))
        level = (reached == top) | ((reached != reached) & (top != top))
        newer = above | (level & (found < where))  # full tiles come before partial ones to their left
        top, where = tl.where(newer, reached, top), tl.where(newer, found, where)
    if form.entropy:
        powers = (powers + tl.maximum(moved, LEAST) * seen) * alpha + tl.sum(p * tl.maximum(x, LEAST), 1)
        seen = seen * alpha + added
    if seams.sums_at is not None:
        if seams.score_at is None:
            s = s * block.scale
        values = seams.sums_at(s, b, h, i, tl.minimum(j, m - 1), n, m, block.tables)
        new = ()
        for k in tl.static_range(len(sums)):
            new = new + (sums[k] * alpha + tl.sum(share(p, values[k]), 1),)  # noqa: RUF005
        sums = new
    return top, where, powers, seen, sums


@triton.jit
def share(p, value):
    """p · value, which may be a condition; a weight of 0 takes nothing."""
    if value.dtype == tl.int1:
        return tl.where(value, p, 0.0)
    return tl.where(p == 0, 0.0, p * value.to(p.dtype))


@triton.jit
def hand_over(state, to, position, first, n, scale, seams, form):
    """Write a block's statistics to (largest, where, entropy, sums) of `to`, (B, H, n) each.

    0 for queries that saw nothing, but −∞ and −1 for their largest score.
    """
    top, where, powers, seen, sums = state.riders
    total = state.total
    rows = first + tl.arange(0, form.rows)
    at, inside = tl.cast(position, tl.int64) * n + rows, rows < n
    safe = tl.where(total == 0, 1.0, total)
    if form.largest:
        if seams.score_at is None:
            top = top * scale
        tl.store(to[0] + at, top, mask=inside)
        tl.store(to[1] + at, where.to(tl.int64), mask=inside)
    if form.entropy:
        wide = safe.to(tl.float64)
        entropy = (tl.log(wide) * seen.to(tl.float64) - tile_ops.LN_2 * powers.to(tl.float64)) / wide
        tl.store(to[2] + at, entropy.to(form.total), mask=inside)
    for k in tl.static_range(len(sums)):
        tl.store(to[3][k] + at, sums[k] / safe, mask=inside)
