"""Statistics of each query that the forward kernel computes with its running softmax, by a few instructions per score.

In base 2, x = s − m, and p = 2^x is the weight before its division by l. When the running maximum m becomes m':

    max_score   the largest score, and the first key that has this score
    entropy     −Σ P ln P = (ln l · Σp − ln 2 · T) / l,    T = Σ p x,    T' = α (T + (m − m') Σp) + ...
    a sum       Σ P f = M / l,    M = Σ p f,    M' = α M + ...    for a formula f of the pair and its final score

If a score of a query is NaN, the statistics and the lse of this query are NaN. The arrays of statistics that were not
requested are None, and the kernel has no code for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import tile_ops

MIN_POWER = tl.constexpr(-2048.0)  # 2 to any smaller power is 0 in every dtype


@triton.jit
def init(SUMS: tl.constexpr, meta):
    """Return the state before any key is processed: (largest s, key of the largest s, T, Σp, SUMS sums M)."""
    none = tl.zeros((meta.rows,), meta.accumulator)
    max_score, max_key, power_sum, mass = (), (), (), ()
    if meta.max_score:
        max_score = tl.full((meta.rows,), float("-inf"), meta.accumulator)
        max_key = tl.full((meta.rows,), -1, tl.int32)
    if meta.entropy:
        power_sum, mass = none, none
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (none,)  # noqa: RUF005  Triton has no stars in tuples
    return max_score, max_key, power_sum, mass, sums


@triton.jit
def update(fused_state, s, step, j, block, formulas, meta):
    """Return the state after one more tile, whose keys are j.

    Parameters
    ----------
    s : (rows, keys) the scores of `tile_ops.compute_scores`
    step : (x, p, Σ p, largest s, α, log2 α) of the tile
        The exponents x and p = 2^x before dropout have the shape (rows, keys). The others have the shape (rows,). α is
        2^(m − m').
    """
    max_score, max_key, power_sum, mass, sums = fused_state
    x, p, tile_sum, tile_max, alpha, log2_alpha = step
    b, h, i, n, m = block.location
    if meta.max_score:
        first_nan = tl.min(tl.where(s != s, j, tile_ops.NO_KEY), 1)  # NaN counts as the largest score
        largest = tl.where(first_nan < tile_ops.NO_KEY, float("nan"), tile_max)
        first_max = tl.min(tl.where(s < tile_max[:, None], tile_ops.NO_KEY, j), 1)
        first_key = tl.where(first_nan < tile_ops.NO_KEY, first_nan, first_max)
        above = (largest > max_score) | ((largest != largest) & (max_score == max_score))
        ties = (largest == max_score) | ((largest != largest) & (max_score != max_score))
        replaces = above | (ties & (first_key < max_key))  # a full tile may come before a partial tile of smaller keys
        max_score, max_key = tl.where(replaces, largest, max_score), tl.where(replaces, first_key, max_key)
    if meta.entropy:
        power_sum = (power_sum + tl.maximum(log2_alpha, MIN_POWER) * mass) * alpha
        power_sum += tl.sum(p * tl.maximum(x, MIN_POWER), 1)
        mass = mass * alpha + tile_sum
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
    """Return p · value, and 0 where p is 0. `value` may be a condition, which counts as 1 or 0."""
    if value.dtype == tl.int1:
        return tl.where(value, p, 0.0)
    return tl.where(p == 0, 0.0, p * value.to(p.dtype))


@triton.jit
def store(state, to, head_index, first, n, scale, formulas, meta):
    """Write the statistics of a block to the arrays `to` = (largest score, its key, entropy, sums), (B, H, n) each.

    For a query without a visible key the kernel writes −∞ as largest score, −1 as its key, and 0 as entropy and sums.
    """
    max_score, max_key, power_sum, mass, sums = state.fused_state
    rows = first + tl.arange(0, meta.rows)
    at, inside = tl.cast(head_index, tl.int64) * n + rows, rows < n
    safe = tl.where(state.total == 0, 1.0, state.total)
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
