"""The backward kernels: the weights again from the saved normaliser, tile by tile.

    S  = Q Kᵀ, score, mask       P  = e^(S − lse)        dP = dO Vᵀ        δ = rowsum(dO ∘ O) − dlse
    dS = P ∘ (dP − δ) ∘ d score / d s        dQ = dS K · scale        dK = dSᵀ Q · scale        dV = Pᵀ dO

(Dao, "FlashAttention-2", 2023, algorithm 2, in two passes, so that no two programs add to one number.) `prepare` makes
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
from .tile_loop import Row, walk

__all__ = ["Given", "Numbers", "Pairs", "not_finite", "prepare", "slopes_of", "weights_of", "write"]


class Given(NamedTuple):
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
    random: Any
    kept: Any
    tables: Any
    sums: Any


class Numbers(NamedTuple):
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
def weights_of(products, pairs, inside, lse, numbers, seams, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr):
    """(P, final scores) of a tile from its Q · K; P is 0 and the score −∞ where the pair is hidden or not `inside`.

    Full tiles have none outside but queries past the last, whose P is 0 by their lse: there only tables' gains need
    to be told. Scores are in nats where a formula makes them, else not yet scaled. `lse` is (high, low) in the scores'
    unit.
    """
    b, h, i, j, n, m = pairs
    s = products
    if seams.score_at is not None:
        s = tl.broadcast_to(seams.score_at(s * numbers.scale, b, h, i, j, n, m, numbers.tables), s.shape)
    if PARTIAL and seams.mask_at is not None:
        inside = inside & seams.mask_at(b, h, i, j, n, m, numbers.tables)
    if PARTIAL or seams.gains_at is not None:
        s = tl.where(inside, s, float("-inf"))
    p = tile_ops.weight(s, numbers.unit, lse)
    if CAREFUL:  # an lse of NaN
        p = tl.where(s == float("-inf"), 0.0, p)
    return p, s


@triton.jit
def of_statistics(formula, s, pairs, numbers, seams):
    """A formula of the final scores over a tile, 0 where the pair is hidden."""
    b, h, i, j, n, m = pairs
    final = s
    if seams.score_at is None:
        final = s * numbers.scale
    return tl.where(s == float("-inf"), 0.0, formula(final, b, h, i, j, n, m, numbers.tables))


@triton.jit
def slopes_of(p, dp, s, products, pairs, delta, numbers, sums, seams, KINDS: tl.constexpr, CHECKED: tl.constexpr):
    """dS of a tile, the scale not in it, from P and dP; tables gain their shares."""
    b, h, i, j, n, m = pairs
    if seams.weights_at is not None:
        dp += of_statistics(seams.weights_at, s, pairs, numbers, seams)
    ds = p * (dp - delta)
    if CHECKED or seams.score_at is not None:
        ds = tl.where(p == 0, 0.0, ds)
    if seams.scores_at is not None:
        ds += of_statistics(seams.scores_at, s, pairs, numbers, seams)
    if seams.gains_at is not None:
        table_gradient.add(ds, products * numbers.scale, pairs, numbers.tables, sums, seams.gains_at, KINDS)
    if seams.slope_at is not None:
        ds = tl.where(ds == 0, 0.0, ds * seams.slope_at(products * numbers.scale, b, h, i, j, n, m, numbers.tables))
    return ds


@triton.jit
def not_finite(x):
    """1 where a block has NaN or ∞, else 0."""
    return tl.max(tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1), 0)


@triton.jit
def write(block, target, position, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """A block of rows from `first` on to a contiguous (heads, count, WIDTH)."""
    rows, column = first + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    place = target + (tl.cast(position, tl.int64) * count + rows)[:, None] * WIDTH + column
    tl.store(place, block.to(target.dtype.element_ty), mask=(rows < count)[:, None] & (column < WIDTH))


# -- what rows need ----------------------------------------------------------------------------------------------------
class Weighed(NamedTuple):
    """A block of queries and the keys it looks at."""

    query: Any
    key: Any
    lse: Any
    place: Any
    numbers: Any


@triton.jit
def weighed_over_run(state, first, last, block, seams, HOW: tl.constexpr, form, PARTIAL: tl.constexpr):
    """Σⱼ P ∘ what statistics add to dP."""
    b, h, i, n, m = block.place
    for tile in range(first, last):
        j0 = tile * form.keys
        k = tile_ops.keys_of(block.key, j0, form.keys, m, form.d_k, form.lanes_k, PARTIAL, form)
        j = j0 + tl.arange(0, form.keys)[None, :]
        products = tl.dot(block.query, k, input_precision=form.precision)
        pairs = Pairs(b, h, i, tl.minimum(j, m - 1), n, m)
        p, s = weights_of(products, pairs, j < m, block.lse, block.numbers, seams, PARTIAL, True)
        state += tl.sum(p * of_statistics(seams.weights_at, s, pairs, block.numbers, seams), 1)
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
    seams,
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
    o = tile_ops.rows_of(tile_ops.head_of(output, b, h), first, form.rows, n, form.d_v, form.lanes_v, True, form)
    do = tile_ops.rows_of(tile_ops.head_of(d_output, b, h), first, form.rows, n, form.d_v, form.lanes_v, True, form)
    delta = tl.sum(o.to(form.total) * do.to(form.total), 1)
    if d_lse is not None:
        delta -= tl.load(d_lse + at, mask=inside, other=0.0).to(form.total)
    high, low = tile_ops.normaliser(lse, position, first, n, unit, form)
    if seams.weights_at is not None:
        block = Weighed(
            tile_ops.queries_of(query, b, h, first, n, sign, form),
            tile_ops.head_of(key, b, h // group),
            (high[:, None], low[:, None]),
            tile_ops.Place(b, h, tile_ops.column_of(first, n, form), n, m),
            Numbers(tile_ops.number(scale, form.total), tile_ops.number(unit, form.total), tables),
        )
        row = Row(schedule, b, h, item % blocks, m, None, False)
        none = tl.zeros((form.rows,), form.total)
        delta += walk(none, weighed_over_run, row, form.keys, form.even, block, seams, None, form)
    tl.store(rows[0] + at, high, mask=inside)
    tl.store(rows[1] + at, low, mask=inside)
    tl.store(rows[2] + at, delta, mask=inside)
