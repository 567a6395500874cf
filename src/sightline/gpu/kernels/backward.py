"""The backward kernels, which recompute the weights of each tile from the saved lse.

    S  = Q Kᵀ · scale, then score and mask        P  = e^(S − lse)        dP = dO Vᵀ        δ = rowsum(dO ∘ O) − dlse
    dS = P ∘ (dP − δ) ∘ d score / d s        dQ = dS K · scale        dK = dSᵀ Q · scale        dV = Pᵀ dO

(Dao, "FlashAttention-2", 2023, algorithm 2, in two passes, so that one program alone sums each entry of dQ, dK and
dV.)
`backward_preprocess` computes δ, and lse in the unit of the scores. A program of `backward_queries` sums dQ of a block
of queries over the tiles of keys. A program of `backward_keys` sums dK and dV of a block of keys over the tiles of
queries, for the query heads of its group one after another. The tiles of `backward_keys` are transposed: S has the
shape (keys, rows), so that Pᵀ and dSᵀ need no transposition.

NaN and ∞ at a weight of 0 reach no gradient: P ∘ (dP − δ) is set to 0 where P is 0. A program flags its block if a sum
is not finite. The NaN-safe variants of both kernels, each launched after its kernel, recompute the flagged blocks. That
of `backward_queries` replaces NaN and ∞ in K by 0, and that of `backward_keys` those in Q and dO. In K and Q this loses
no NaN, since dS is 0 or NaN at every pair with such an entry. The variant of `backward_keys` records where NaN, ∞ or −∞
in dO meets a weight other than 0, and adds it to dV. The host waits for no kernel. Finite inputs cost each kernel one
check of its sums, and one launch that finds no flag. For a small problem without table gradients, one NaN-safe launch
of each kernel is enough.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import table_gradient, tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles


class SharedArguments(
    namedtuple(
        "SharedArguments",
        "query key value d_output rows n m H group sign scale unit schedule dropout_state dropout_scale tables sums",
    )
):
    """The arguments that `backward_queries` and `backward_keys` share."""


class ScoreParams(namedtuple("ScoreParams", "scale unit tables")):
    """The arguments that scores need besides Q · K."""


class Pairs(namedtuple("Pairs", "b h i j n m")):
    """The pairs of a tile. i is a column (rows, 1) and j a row (1, keys); in a transposed tile i is the row."""


# -- a tile ------------------------------------------------------------------------------------------------------------
@triton.jit
def compute_weights(products, pairs, inside, lse, params, formulas, PARTIAL: tl.constexpr, NAN_SAFE: tl.constexpr):
    """Return (P, final scores) of a tile from its products Q · K.

    P is 0 and the score is −∞ where the pair is hidden or not `inside`. With a score formula, the scores are in nats;
    without one, they are not yet scaled. `lse` is (high, low) in the unit of the scores. In a full tile, `inside` is
    False only for queries past the last query. The lse of these queries makes P 0, so their scores are set to −∞ only
    if a table has a gradient.
    """
    s = products
    if formulas.score_at is not None:
        s = tl.broadcast_to(formulas.score_at(s * params.scale, *pairs, params.tables), s.shape)
    if PARTIAL and formulas.mask_at is not None:
        inside = inside & formulas.mask_at(*pairs, params.tables)
    if PARTIAL or formulas.table_gradients_at is not None:
        s = tl.where(inside, s, float("-inf"))
    p = tile_ops.weight(s, params.unit, lse)
    if NAN_SAFE:  # lse may be NaN
        p = tl.where(s == float("-inf"), 0.0, p)
    return p, s


@triton.jit
def evaluate_on_scores(formula, s, pairs, params, formulas):
    """Return the values of `formula` for the final scores of a tile; 0 where the score is −∞, as at hidden pairs."""
    final = s
    if formulas.score_at is None:
        final = s * params.scale
    return tl.where(s == float("-inf"), 0.0, formula(final, *pairs, params.tables))


@triton.jit
def compute_d_scores(tile, delta, params, sums, formulas, KINDS: tl.constexpr, CHECKED):
    """Return dS of a tile, without the factor `scale`. Add the tile's part to the gradients of tables.

    `tile` is (P, dP, final scores, products Q · K, pairs). If CHECKED, the term P ∘ (dP − δ) is set to 0 where P is 0,
    since dP may be NaN or ∞ there.
    """
    p, dp, s, products, pairs = tile
    if formulas.d_weights_at is not None:
        dp += evaluate_on_scores(formulas.d_weights_at, s, pairs, params, formulas)
    ds = p * (dp - delta)
    if CHECKED or formulas.score_at is not None:
        ds = tl.where(p == 0, 0.0, ds)
    if formulas.d_scores_at is not None:
        ds += evaluate_on_scores(formulas.d_scores_at, s, pairs, params, formulas)
    raw = products * params.scale
    if formulas.table_gradients_at is not None:
        table_gradient.add(ds, raw, pairs, params.tables, sums, formulas.table_gradients_at, KINDS)
    if formulas.score_derivative_at is not None:
        ds = tl.where(ds == 0, 0.0, ds * formulas.score_derivative_at(raw, *pairs, params.tables))
    return ds


@triton.jit
def has_nonfinite(x):
    """Return 1 if an entry of the matrix x is NaN or ±∞, else 0."""
    return tl.max(tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1), 0)


@triton.jit
def store_rows(block, target, position, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Write `block` to the rows from `first` on of head `position`, in a contiguous array (heads, count, WIDTH)."""
    rows, column = first + tl.arange(0, ROWS), tl.arange(0, PADDED)[None, :]
    location = target + (tl.cast(position, tl.int64) * count + rows)[:, None] * WIDTH + column
    tl.store(location, block.to(target.dtype.element_ty), mask=(rows < count)[:, None] & (column < WIDTH))


# -- per query ---------------------------------------------------------------------------------------------------------
class WeightedBlock(namedtuple("WeightedBlock", "query key lse location params")):
    """A block of queries, and the head of keys that they attend to."""


@triton.jit
def sum_d_weights_range(state, first, last, block, formulas, OPTIONS: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return `state` plus Σⱼ P ∘ d_weights_at over the tiles `first` ... `last` − 1.

    The sum over all tiles is the part of δ that comes from statistics.
    """
    b, h, i, n, m = block.location
    for tile in range(first, last):
        j0 = tile * meta.keys
        k = tile_ops.load_transposed(block.key, j0, meta.keys, m, meta.d_k, meta.padded_d_k, PARTIAL, meta)
        j = j0 + tl.arange(0, meta.keys)[None, :]
        products = tl.dot(block.query, k, input_precision=meta.precision)
        pairs = Pairs(b, h, i, tl.minimum(j, m - 1), n, m)
        p, s = compute_weights(products, pairs, j < m, block.lse, block.params, formulas, PARTIAL, True)
        state += tl.sum(p * evaluate_on_scores(formulas.d_weights_at, s, pairs, block.params, formulas), 1)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def backward_preprocess(
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
    formulas,
    meta: tl.constexpr,
):
    """Compute δ and lse for a block of queries of a head. lse is in the unit of the scores, as a sum of two numbers.

    Parameters
    ----------
    output, d_output : `tile_ops.Array`
    d_lse, lse : float64 (B, H, n), contiguous; d_lse may be None, which means 0
    rows : (high, low, δ), the arrays to write, each (B, H, n), contiguous
        high + low is lse, or 0 for a query whose lse is −∞.
    """
    item = tl.program_id(0)
    position, first = item // blocks, item % blocks * meta.rows
    b, h = position // H, position % H
    i = first + tl.arange(0, meta.rows)
    inside, at = i < n, tl.cast(position, tl.int64) * n + i
    output = tile_ops.locate_head(output, b, h)
    o = tile_ops.load_rows(output, first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta)
    d_output = tile_ops.locate_head(d_output, b, h)
    do = tile_ops.load_rows(d_output, first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta)
    delta = tl.sum(o.to(meta.accumulator) * do.to(meta.accumulator), 1)
    if d_lse is not None:
        delta -= tl.load(d_lse + at, mask=inside, other=0.0).to(meta.accumulator)
    high, low = tile_ops.load_lse(lse, position, first, n, unit, meta)
    if formulas.d_weights_at is not None:
        q = tile_ops.load_queries(query, b, h, first, n, sign, meta)
        head, lse_columns = tile_ops.locate_head(key, b, h // group), (high[:, None], low[:, None])
        location = tile_ops.BlockLocation(b, h, tile_ops.query_indices(first, n, meta), n, m)
        params = ScoreParams(tile_ops.scalar(scale, meta.accumulator), tile_ops.scalar(unit, meta.accumulator), tables)
        block = WeightedBlock(q, head, lse_columns, location, params)
        row = ScheduleRow(schedule, b, h, item % blocks, m, None, False)
        none = tl.zeros((meta.rows,), meta.accumulator)
        delta += loop_over_tiles(none, sum_d_weights_range, row, meta.keys, meta.even, block, formulas, None, meta)
    tl.store(rows[0] + at, high, mask=inside)
    tl.store(rows[1] + at, low, mask=inside)
    tl.store(rows[2] + at, delta, mask=inside)
