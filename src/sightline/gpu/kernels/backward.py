"""The backward kernels: the weights again from the saved normaliser, tile by tile.

    S  = Q Kᵀ, score, mask       P  = e^(S − lse)        dP = dO Vᵀ        δ = rowsum(dO ∘ O) − dlse
    dS = P ∘ (dP − δ) ∘ d score / d s        dQ = dS K · scale        dK = dSᵀ Q · scale        dV = Pᵀ dO

(Dao, "FlashAttention-2", 2023, algorithm 2, in two passes, so that no two programs add to one number.) `backward_preprocess` makes
δ, and lse in the unit of the scores. A program of `backward_queries` is a block of queries and adds up dQ over its runs
of keys; one of `backward_keys` is a block of keys, and adds up dK and dV over its runs of queries, for the heads of its
group in turn. Tiles of the second are transposed: S there is (keys, rows), so that Pᵀ and dSᵀ are factors as they come.

What a weight of 0 meets reaches nothing, NaN and ∞ included: dS is 0 where P is, and programs whose sums are not finite
mark their block. Launched again, as `careful_queries` and `careful_keys`, they compute those once more: K and Q made
finite, since dS shows where they are visible, and beside dV which NaN and ∞ of dO meet weights other than 0. The host
waits for nothing; whole inputs pay one look at their sums, and a launch that finds no mark.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import table_gradient, tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles

__all__ = [
    "KernelArguments",
    "Pairs",
    "ScoreParameters",
    "backward_preprocess",
    "compute_d_scores",
    "compute_weights",
    "has_nonfinite",
    "store_rows",
]


class KernelArguments(NamedTuple):
    """The arguments of `backward_queries` and `backward_keys` that both have."""

    query: Any
    key: Any
    value: Any
    d_output: Any
    rows: Any
    n: Any
    m: Any
    H: Any
    group: Any
    sign: Any
    scale: Any
    unit: Any
    schedule: Any
    dropout_state: Any
    dropout_scale: Any
    tables: Any
    sums: Any


class ScoreParameters(NamedTuple):
    """What scores are computed with beside their products."""

    scale: Any
    unit: Any
    tables: Any


class Pairs(NamedTuple):
    """The pairs of a tile: i and j are a column and a row, or a row and a column where tiles are transposed."""

    b: Any
    h: Any
    i: Any
    j: Any
    n: Any
    m: Any


# -- a tile ------------------------------------------------------------------------------------------------------------
@triton.jit
def compute_weights(
    products, pairs, inside, lse, score_parameters, formulas, PARTIAL: tl.constexpr, NAN_SAFE: tl.constexpr
):
    """(P, final scores) of a tile from its Q · K; P is 0 and the score −∞ where the pair is hidden or not `inside`.

    Full tiles have none outside but queries past the last, whose P is 0 by their lse: there only tables' gains need
    to be told. Scores are in nats where a formula makes them, else not yet scaled. `lse` is (high, low) in the scores'
    unit.
    """
    b, h, i, j, n, m = pairs
    s = products
    if formulas.score_at is not None:
        s = tl.broadcast_to(
            formulas.score_at(s * score_parameters.scale, b, h, i, j, n, m, score_parameters.tables), s.shape
        )
    if PARTIAL and formulas.mask_at is not None:
        inside = inside & formulas.mask_at(b, h, i, j, n, m, score_parameters.tables)
    if PARTIAL or formulas.table_gradients_at is not None:
        s = tl.where(inside, s, float("-inf"))
    p = tile_ops.weight(s, score_parameters.unit, lse)
    if NAN_SAFE:  # an lse of NaN
        p = tl.where(s == float("-inf"), 0.0, p)
    return p, s


@triton.jit
def evaluate_on_scores(formula, s, pairs, score_parameters, formulas):
    """A formula of the final scores over a tile, 0 where the pair is hidden."""
    b, h, i, j, n, m = pairs
    final = s
    if formulas.score_at is None:
        final = s * score_parameters.scale
    return tl.where(s == float("-inf"), 0.0, formula(final, b, h, i, j, n, m, score_parameters.tables))


@triton.jit
def compute_d_scores(
    p, dp, s, products, pairs, delta, score_parameters, sums, formulas, KINDS: tl.constexpr, CHECKED: tl.constexpr
):
    """dS of a tile, the scale not in it, from P and dP; tables gain their shares."""
    b, h, i, j, n, m = pairs
    if formulas.d_weights_at is not None:
        dp += evaluate_on_scores(formulas.d_weights_at, s, pairs, score_parameters, formulas)
    ds = p * (dp - delta)
    if CHECKED or formulas.score_at is not None:
        ds = tl.where(p == 0, 0.0, ds)
    if formulas.d_scores_at is not None:
        ds += evaluate_on_scores(formulas.d_scores_at, s, pairs, score_parameters, formulas)
    if formulas.table_gradients_at is not None:
        table_gradient.add(
            ds,
            products * score_parameters.scale,
            pairs,
            score_parameters.tables,
            sums,
            formulas.table_gradients_at,
            KINDS,
        )
    if formulas.score_derivative_at is not None:
        ds = tl.where(
            ds == 0,
            0.0,
            ds
            * formulas.score_derivative_at(
                products * score_parameters.scale, b, h, i, j, n, m, score_parameters.tables
            ),
        )
    return ds


@triton.jit
def has_nonfinite(x):
    """1 where a block has NaN or ∞, else 0."""
    return tl.max(tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1), 0)


@triton.jit
def store_rows(
    block, target, position, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED_WIDTH: tl.constexpr
):
    """A block of rows from `first` on to a contiguous (heads, count, WIDTH)."""
    rows, column = first + tl.arange(0, ROWS), tl.arange(0, PADDED_WIDTH)[None, :]
    location = target + (tl.cast(position, tl.int64) * count + rows)[:, None] * WIDTH + column
    tl.store(location, block.to(target.dtype.element_ty), mask=(rows < count)[:, None] & (column < WIDTH))


# -- what rows need ----------------------------------------------------------------------------------------------------
class WeightedBlock(NamedTuple):
    """A block of queries and the keys it looks at."""

    query: Any
    key: Any
    lse: Any
    location: Any
    score_parameters: Any


@triton.jit
def sum_d_weights_range(state, first, last, block, formulas, OPTIONS: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Σⱼ P ∘ what statistics add to dP."""
    b, h, i, n, m = block.location
    for tile in range(first, last):
        j0 = tile * meta.keys
        k = tile_ops.load_rows_transposed(block.key, j0, meta.keys, m, meta.d_k, meta.padded_d_k, PARTIAL, meta)
        j = j0 + tl.arange(0, meta.keys)[None, :]
        products = tl.dot(block.query, k, input_precision=meta.precision)
        pairs = Pairs(b, h, i, tl.minimum(j, m - 1), n, m)
        p, s = compute_weights(products, pairs, j < m, block.lse, block.score_parameters, formulas, PARTIAL, True)
        state += tl.sum(p * evaluate_on_scores(formulas.d_weights_at, s, pairs, block.score_parameters, formulas), 1)
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
    """Of a block of queries of a head: lse in the unit of its scores, as a sum of two numbers, and δ.

    Parameters
    ----------
    output, d_output : arrays, see `tiles`
    d_lse, lse : float64 (B, H, n), contiguous; d_lse None for 0
    rows : (high, low, δ), each (B, H, n), contiguous; a row that sees nothing has 0 for its lse
    """
    item = tl.program_id(0)
    position, first = item // blocks, item % blocks * meta.rows
    b, h = position // H, position % H
    i = first + tl.arange(0, meta.rows)
    inside, at = i < n, tl.cast(position, tl.int64) * n + i
    o = tile_ops.load_rows(
        tile_ops.locate_head(output, b, h), first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta
    )
    do = tile_ops.load_rows(
        tile_ops.locate_head(d_output, b, h), first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta
    )
    delta = tl.sum(o.to(meta.accumulator) * do.to(meta.accumulator), 1)
    if d_lse is not None:
        delta -= tl.load(d_lse + at, mask=inside, other=0.0).to(meta.accumulator)
    high, low = tile_ops.normaliser(lse, position, first, n, unit, meta)
    if formulas.d_weights_at is not None:
        block = WeightedBlock(
            tile_ops.load_queries(query, b, h, first, n, sign, meta),
            tile_ops.locate_head(key, b, h // group),
            (high[:, None], low[:, None]),
            tile_ops.BlockLocation(b, h, tile_ops.query_indices(first, n, meta), n, m),
            ScoreParameters(tile_ops.scalar(scale, meta.accumulator), tile_ops.scalar(unit, meta.accumulator), tables),
        )
        row = ScheduleRow(schedule, b, h, item % blocks, m, None, False)
        none = tl.zeros((meta.rows,), meta.accumulator)
        delta += loop_over_tiles(none, sum_d_weights_range, row, meta.keys, meta.even, block, formulas, None, meta)
    tl.store(rows[0] + at, high, mask=inside)
    tl.store(rows[1] + at, low, mask=inside)
    tl.store(rows[2] + at, delta, mask=inside)
