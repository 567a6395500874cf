"""The second pass over the tiles: statistics of the normalised weights, which need the lse of the forward pass.

    P = 2^((S − lse) · unit), 0 at hidden pairs and for queries without a visible key

lse is converted to the unit of S as a sum of two numbers of the accumulator's type (`tile_ops.load_lse`). So weights
have no error from rounding lse to one number, and the difference S − lse is exact where S is near lse. One program
alone computes each number of a result, in the order of the program's tiles, so that equal calls give equal bits. Sums
over many tiles are float64.

This module has what the kernels of the second pass share, and the kernels `dense_weights` and `received`; `top_k` and
`pooled` have modules of their own. `received` loops over the tiles that a block of keys visits, the others over the
tiles that a block of queries visits.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles


class WeightsBlock(namedtuple("WeightsBlock", "queries lse extra")):
    """A `tile_ops.QueryBlock`, and the lse of its queries.

    `lse` is (high, low); `high` and `low` have the shape (rows, 1). `extra` has arguments that only one kernel needs.
    """


@triton.jit
def load_block(args, b, h, first, extra, meta):
    """Return the `WeightsBlock` that begins at query `first` of a head."""
    high, low = tile_ops.load_lse(args.arrays.lse, b * args.H + h, first, args.n, args.unit, meta)
    queries = tile_ops.load_query_block(args, b, h, first, meta)
    return WeightsBlock(queries, (high[:, None], low[:, None]), extra)


@triton.jit
def compute_scores(block, first, formulas, PARTIAL: tl.constexpr, meta):
    """Return the final scores of the tile that begins at key `first`, see `tile_ops.compute_scores`."""
    bound: tl.constexpr = PARTIAL and not meta.even
    queries, location = block.queries, block.queries.location
    k = tile_ops.load_transposed(queries.key, first, meta.keys, location.m, meta.d_k, meta.padded_d_k, bound, meta)
    products = tl.dot(queries.query, k, input_precision=meta.precision)
    j = first + tl.arange(0, meta.keys)[None, :]
    return tile_ops.compute_scores(products, location, j, queries.scale, queries.tables, formulas, PARTIAL, meta)


@triton.jit
def compute_weights(s, block):
    """Return the weights of a tile from the scores of `compute_scores`."""
    return tile_ops.weight(s, block.queries.unit, block.lse)


@triton.jit
def combine(x, y, USE_MAX: tl.constexpr):
    """Return x + y, or the larger of x and y if USE_MAX."""
    return tl.maximum(x, y) if USE_MAX else x + y


@triton.jit
def reduce(block, axis: tl.constexpr, USE_MAX: tl.constexpr):
    """Return the sum of the weights `block` along an axis, or the largest weight along it if USE_MAX."""
    return tl.max(block, axis) if USE_MAX else tl.sum(block, axis)


# -- the whole matrix of weights or scores -----------------------------------------------------------------------------
@triton.jit
def store_range(_, first, last, block, formulas, OPTIONS: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Write the tiles `first` ... `last` − 1. For "sums", add the weights to what this program has already written."""
    corner, rows = block.extra
    m = block.queries.location.m
    down, across = tl.arange(0, meta.rows)[:, None], tl.arange(0, meta.keys)[None, :]
    for tile in range(first, last):
        j0 = tile * meta.keys
        s = compute_scores(block, j0, formulas, PARTIAL, meta)
        pointers = corner + j0 + (tl.cast(down, tl.int64) * m + across)
        inside = (down < rows) & (across < m - j0)
        if meta.output_kind == "scores":
            if formulas.score_at is None:
                s = s * block.queries.scale
            tl.store(pointers, s, mask=inside)
        elif meta.output_kind == "weights":
            tl.store(pointers, compute_weights(s, block).to(corner.dtype.element_ty), mask=inside)
        else:
            total = tl.load(pointers, mask=inside, other=0.0)
            tl.store(pointers, total + compute_weights(s, block), mask=inside)
    return ()


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "batches", "heads"])
def dense_weights(arrays, n, m, H, group, blocks, batches, heads, scale: tl.float64, formulas, meta: tl.constexpr):
    """Write P or S of a block of queries, or P summed over batches and heads.

    Parameters
    ----------
    arrays : `arrays.seen` is a matrix (number of matrices, n, m), which holds the result of tiles that are not visited
    batches, heads : numbers of batches and heads that are summed to one matrix; one program loops over them
    meta : its `output_kind` is "weights", "scores" in nats, or "sums" of weights
    """
    item = tl.program_id(0)
    matrix, row = item // blocks, blocks - 1 - item % blocks
    across = H // heads  # number of matrices of a batch
    first = row * meta.rows
    corner = arrays.seen[0] + (tl.cast(matrix, tl.int64) * n + first) * m
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), None)
    for k in range(batches * heads):
        b, h = matrix // across * batches + k // heads, matrix % across * heads + k % heads
        block = load_block(args, b, h, first, (corner, n - first), meta)
        schedule_row = ScheduleRow(arrays.schedule, b, h, row, m, None, False)
        loop_over_tiles((), store_range, schedule_row, meta.keys, meta.even, block, formulas, None, meta)
        tl.debug_barrier()  # the next iteration reads what other threads wrote in this iteration


# -- the weight that each key receives ---------------------------------------------------------------------------------
class WeightsKeyBlock(namedtuple("WeightsKeyBlock", "key first b h args")):
    """A block of keys that begins at key `first` of a head, and the arguments needed to load queries and their lse."""


@triton.jit
def receive_range(state, first, last, block, formulas, USE_MAX: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles of queries `first` ... `last` − 1.

    The state is the sum or maximum of the weights that each key receives, (keys,) float64.
    """
    b, h, args, n = block.b, block.h, block.args, block.args.n
    scale, unit = tile_ops.scalar(args.scale, meta.accumulator), tile_ops.scalar(args.unit, meta.accumulator)
    for tile in range(first, last):
        i0 = tile * meta.rows
        location = tile_ops.BlockLocation(b, h, tile_ops.query_indices(i0, n, meta), n, args.m)
        q = tile_ops.load_queries(args.arrays.query, b, h, i0, n, meta)
        products = tl.dot(q, block.key, input_precision=meta.precision)
        j = block.first + tl.arange(0, meta.keys)[None, :]
        s = tile_ops.compute_scores(products, location, j, scale, args.arrays.tables, formulas, PARTIAL, meta)
        high, low = tile_ops.load_lse(args.arrays.lse, b * args.H + h, i0, n, args.unit, meta)
        p = tile_ops.weight(s, unit, (high[:, None], low[:, None]))
        if USE_MAX:
            p = tl.where(p == p, p, float("inf"))  # `tl.max` skips NaN, so ∞ stands for NaN; no weight is above 1
        if PARTIAL:
            p = tl.where((i0 + tl.arange(0, meta.rows))[:, None] < n, p, 0.0)
        state = combine(state, reduce(p, 0, USE_MAX).to(tl.float64), USE_MAX)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def received(arrays, n, m, H, group, blocks, scale: tl.float64, formulas, meta: tl.constexpr, USE_MAX: tl.constexpr):
    """Write Σ_i P_ij, or max_i P_ij if USE_MAX, for a block of keys of a head.

    Parameters
    ----------
    arrays : `arrays.seen` is an array (B, H, m) in the accumulator's dtype
        A row of `arrays.schedule` has the tiles of queries that a block of keys visits.
    blocks : number of blocks of keys in a head
    """
    item = tl.program_id(0)
    head_index, row = item // blocks, item % blocks
    b, h = head_index // H, head_index % H
    j0 = row * meta.keys
    head = tile_ops.locate_head(arrays.key, b, h // group)
    k = tile_ops.load_transposed(head, j0, meta.keys, m, meta.d_k, meta.padded_d_k, not meta.even, meta)
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), None)
    block = WeightsKeyBlock(k, j0, b, h, args)
    row = ScheduleRow(arrays.schedule, b, h, row, n, None, j0 + meta.keys > m)
    state = tl.zeros((meta.keys,), tl.float64)
    state = loop_over_tiles(state, receive_range, row, meta.rows, False, block, formulas, USE_MAX, meta)
    if USE_MAX:
        state = tl.where(state == float("inf"), float("nan"), state)
    j = j0 + tl.arange(0, meta.keys)
    pointers = arrays.seen[0] + tl.cast(head_index, tl.int64) * m + j
    tl.store(pointers, state.to(pointers.dtype.element_ty), mask=j < m)
