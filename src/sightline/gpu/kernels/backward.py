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
from .weights_pass import compute_scores, load_block


class Pairs(namedtuple("Pairs", "b h i j n m")):
    """The pairs of a tile. i is a column (rows, 1) and j a row (1, keys); in a transposed tile i is the row."""


# -- a tile ------------------------------------------------------------------------------------------------------------
@triton.jit
def evaluate_on_scores(formula, s, pairs, block, formulas):
    """Return the values of `formula` for the final scores of a tile; 0 where the score is −∞, as at hidden pairs."""
    final = s
    if formulas.score_at is None:
        final = s * block.scale
    return tl.where(s == float("-inf"), 0.0, formula(final, *pairs, block.tables))


@triton.jit
def compute_d_scores(tile, delta, block, sums, formulas, KINDS: tl.constexpr, CHECKED):
    """Return dS of a tile, without the factor `scale`. Add the tile's part to the gradients of tables.

    `tile` is (P, dP, final scores, products Q · K, pairs). If CHECKED, the term P ∘ (dP − δ) is set to 0 where P is 0,
    since dP may be NaN or ∞ there.
    """
    p, dp, s, products, pairs = tile
    if formulas.d_weights_at is not None:
        dp += evaluate_on_scores(formulas.d_weights_at, s, pairs, block, formulas)
    ds = p * (dp - delta)
    if CHECKED or formulas.score_at is not None:
        ds = tl.where(p == 0, 0.0, ds)
    if formulas.d_scores_at is not None:
        ds += evaluate_on_scores(formulas.d_scores_at, s, pairs, block, formulas)
    raw, tables = products * block.scale, block.tables
    if formulas.table_gradients_at is not None:
        table_gradient.add(ds, raw, pairs, tables, sums, formulas.table_gradients_at, KINDS)
    if formulas.score_derivative_at is not None:
        ds = tl.where(ds == 0, 0.0, ds * formulas.score_derivative_at(raw, *pairs, tables))
    return ds


@triton.jit
def has_nonfinite(x):
    """Return 1 if an entry of the matrix x is NaN or ±∞, else 0."""
    return tl.max(tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1), 0)


@triton.jit
def store_rows(block, target, head_index, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Write `block` to the rows from `first` on of a head, in a contiguous array (heads, count, WIDTH)."""
    rows, column = first + tl.arange(0, ROWS), tl.arange(0, PADDED)[None, :]
    pointers = target + (tl.cast(head_index, tl.int64) * count + rows)[:, None] * WIDTH + column
    tl.store(pointers, block.to(target.dtype.element_ty), mask=(rows < count)[:, None] & (column < WIDTH))


# -- per query ---------------------------------------------------------------------------------------------------------
@triton.jit
def sum_d_weights_range(state, first, last, block, formulas, OPTIONS: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return `state` plus Σⱼ P ∘ d_weights_at over the tiles `first` ... `last` − 1.

    The sum over all tiles is the part of δ that comes from statistics.
    """
    queries = block.queries
    b, h, i, n, m = queries.location
    for tile in range(first, last):
        j = tile * meta.keys + tl.arange(0, meta.keys)[None, :]
        pairs = Pairs(b, h, i, tl.minimum(j, m - 1), n, m)
        s = compute_scores(block, tile * meta.keys, formulas, PARTIAL, meta)
        p = tile_ops.weight(s, queries.unit, block.lse, True)
        state += tl.sum(p * evaluate_on_scores(formulas.d_weights_at, s, pairs, queries, formulas), 1)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def backward_preprocess(arrays, n, m, H, group, blocks, scale: tl.float64, formulas, meta: tl.constexpr):
    """Write `arrays.rows` = (high, low, δ) for a block of queries of a head; see `forward.forward` for the arguments.

    high + low is lse in the unit of the scores, or 0 for a query whose lse is −∞.
    """
    item = tl.program_id(0)
    head_index, first = item // blocks, item % blocks * meta.rows
    b, h = head_index // H, head_index % H
    i = first + tl.arange(0, meta.rows)
    inside, at = i < n, tl.cast(head_index, tl.int64) * n + i
    output, d_output = tile_ops.locate_head(arrays.output, b, h), tile_ops.locate_head(arrays.d_output, b, h)
    o = tile_ops.load_rows(output, first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta)
    do = tile_ops.load_rows(d_output, first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta)
    delta = tl.sum(o.to(meta.accumulator) * do.to(meta.accumulator), 1)
    if arrays.d_lse is not None:
        delta -= tl.load(arrays.d_lse + at, mask=inside, other=0.0).to(meta.accumulator)
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), None)
    high, low = tile_ops.load_lse(arrays.lse, head_index, first, n, args.unit, meta)
    if formulas.d_weights_at is not None:
        block = load_block(args, b, h, first, (), meta)
        row = ScheduleRow(arrays.schedule, b, h, item % blocks, m, None, False)
        none = tl.zeros((meta.rows,), meta.accumulator)
        delta += loop_over_tiles(none, sum_d_weights_range, row, meta.keys, meta.even, block, formulas, None, meta)
    at = arrays.rows + 4 * at
    tl.store(at, high, mask=inside)
    tl.store(at + 1, low, mask=inside)
    tl.store(at + 2, delta, mask=inside)
