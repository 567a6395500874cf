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

__all__ = ["init", "store", "update"]

MIN_POWER = tl.constexpr(-2048.0)  # powers below it are weights of 0 in every type


@triton.jit
def init(SUMS: tl.constexpr, meta):
    """Nothing seen yet: (largest s, its key, T, Σp, sums), SUMS of the last."""
    none = tl.zeros((meta.rows,), meta.accumulator)
    max_score, max_key, power_sum, mass = (), (), (), ()
    if meta.max_score:
        max_score = tl.full((meta.rows,), float("-inf"), meta.accumulator)
        max_key = tl.full((meta.rows,), -1, tl.int32)
    if meta.entropy:
        power_sum, mass = none, none
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (none,)  # noqa: RUF005  no stars in Triton
    return max_score, max_key, power_sum, mass, sums


@triton.jit
def update(fused_state, s, x, p, tile_weight_sum, tile_max_score, alpha, log2_alpha, first, block, formulas, meta):
    """The riders after a tile of keys from `first` on.

    Parameters
    ----------
    s, x, p : (rows, keys) scores as `tiles.compute_scores` has them, their powers, weights before dropout
    added, highest : (rows,) Σ p and the largest s of the tile
    alpha, moved : (rows,) m − m' and 2 to it
    """
    max_score, max_key, power_sum, mass, sums = fused_state
    b, h, i, n, m = block.location
    j = first + tl.arange(0, meta.keys)[None, :]
    if meta.max_score:
        first_nan = tl.min(tl.where(s != s, j, tile_ops.NO_KEY), 1)  # the first NaN, which is above all
        tile_max = tl.where(first_nan < tile_ops.NO_KEY, float("nan"), tile_max_score)
        found = tl.where(
            first_nan < tile_ops.NO_KEY, first_nan, tl.min(tl.where(s < tile_max_score[:, None], tile_ops.NO_KEY, j), 1)
        )
        above = (tile_max > max_score) | ((tile_max != tile_max) & (max_score == max_score))
        ties = (tile_max == max_score) | ((tile_max != tile_max) & (max_score != max_score))
        replaces = above | (ties & (found < max_key))  # full tiles come before partial ones to their left
        max_score, max_key = tl.where(replaces, tile_max, max_score), tl.where(replaces, found, max_key)
    if meta.entropy:
        power_sum = (power_sum + tl.maximum(log2_alpha, MIN_POWER) * mass) * alpha + tl.sum(
            p * tl.maximum(x, MIN_POWER), 1
        )
        mass = mass * alpha + tile_weight_sum
    if formulas.summands_at is not None:
        if formulas.score_at is None:
            s = s * block.scale
        values = formulas.summands_at(s, b, h, i, tl.minimum(j, m - 1), n, m, block.tables)
        new = ()
        for k in tl.static_range(len(sums)):
            new = new + (sums[k] * alpha + tl.sum(weighted_value(p, values[k]), 1),)  # noqa: RUF005
        sums = new
    return max_score, max_key, power_sum, mass, sums


@triton.jit
def weighted_value(p, value):
    """p · value, which may be a condition; a weight of 0 takes nothing."""
    if value.dtype == tl.int1:
        return tl.where(value, p, 0.0)
    return tl.where(p == 0, 0.0, p * value.to(p.dtype))


@triton.jit
def store(state, to, position, first, n, scale, formulas, meta):
    """Write a block's statistics to (largest, where, entropy, sums) of `to`, (B, H, n) each.

    0 for queries that saw nothing, but −∞ and −1 for their largest score.
    """
    max_score, max_key, power_sum, mass, sums = state.fused_state
    total = state.total
    rows = first + tl.arange(0, meta.rows)
    at, inside = tl.cast(position, tl.int64) * n + rows, rows < n
    safe = tl.where(total == 0, 1.0, total)
    if meta.max_score:
        if formulas.score_at is None:
            max_score = max_score * scale
        tl.store(to[0] + at, max_score, mask=inside)
        tl.store(to[1] + at, max_key.to(tl.int64), mask=inside)
    if meta.entropy:
        wide = safe.to(tl.float64)
        entropy = (tl.log(wide) * mass.to(tl.float64) - tile_ops.LN_2 * power_sum.to(tl.float64)) / wide
        tl.store(to[2] + at, entropy.to(meta.accumulator), mask=inside)
    for k in tl.static_range(len(sums)):
        tl.store(to[3][k] + at, sums[k] / safe, mask=inside)
