"""The kernel that computes dQ and the gradients of tables, with one program per block of queries; see `backward`."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import tile_ops
from .backward import Pairs, compute_d_scores, has_nonfinite, store_rows
from .tile_loop import ScheduleRow, loop_over_tiles


class Queries(namedtuple("Queries", "block d_output inside lse delta dropout_scale sums")):
    """A `tile_ops.QueryBlock`, and what the backward pass reads of its queries.

    `lse` is (high, low), whose sum is lse. `high`, `low`, `delta` and `inside` have the shape (rows, 1). `inside` is
    False past the last query.
    """


@triton.jit
def process_key_range(state, first, last, queries, formulas, NAN_SAFE: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles of keys `first` ... `last` − 1. The state is dQ without the factor `scale`.

    If NAN_SAFE, NaN and ∞ in K are replaced by 0.
    """
    CHECKED: tl.constexpr = PARTIAL or NAN_SAFE
    block = queries.block
    b, h, i, n, m = block.location
    bound: tl.constexpr = PARTIAL and not meta.even
    for tile in range(first, last):
        j0 = tile * meta.keys
        k = tile_ops.load_transposed(block.key, j0, meta.keys, m, meta.d_k, meta.padded_d_k, bound, meta)
        v = tile_ops.load_transposed(block.value, j0, meta.keys, m, meta.d_v, meta.padded_d_v, bound, meta)
        j = j0 + tl.arange(0, meta.keys)[None, :]
        at = j
        if bound:
            at = tl.minimum(j, m - 1)
        pairs = Pairs(b, h, i, at, n, m)
        products = tl.dot(block.query, k, input_precision=meta.precision)
        s = tile_ops.compute_scores(products, block.location, j, block.scale, block.tables, formulas, PARTIAL, meta)
        if formulas.table_gradients_at is not None:  # else it is enough that P is 0 past the last query
            s = tl.where(queries.inside, s, float("-inf"))
        p = tile_ops.weight(s, block.unit, queries.lse, NAN_SAFE)
        dp = tl.dot(queries.d_output, v, input_precision=meta.precision)
        if len(block.dropout_state) > 0:
            keep = tile_ops.dropout_mask(block.dropout_state, block.location, j0, meta.rows, meta.keys)
            dp = tl.where(keep, dp * queries.dropout_scale, 0.0)
        values = (p, dp, s, products, pairs)
        ds = compute_d_scores(values, queries.delta, block, queries.sums, formulas, meta.kinds, CHECKED)
        if NAN_SAFE:
            k = tile_ops.zero_nonfinite(k)
        state = tl.dot(ds.to(k.dtype), tl.trans(k), state, input_precision=meta.precision)
    return state


@triton.jit
def compute_block(args, b, h, first, row, formulas, NAN_SAFE: tl.constexpr, meta):
    """Return dQ of the block of queries that begins at query `first` of a head.

    `row` is the index of the block in the head's part of the schedule.
    """
    n, rows = args.n, args.arrays.rows
    i = first + tl.arange(0, meta.rows)
    inside, at = i < n, (tl.cast(b, tl.int64) * args.H + h) * n + i
    at = rows + 4 * at
    high = tl.load(at, mask=inside, other=float("inf"))[:, None]  # P is 0 past the last query
    low = tl.load(at + 1, mask=inside, other=0.0)[:, None]
    delta = tl.load(at + 2, mask=inside, other=0.0)[:, None]
    d_output = tile_ops.locate_head(args.arrays.d_output, b, h)
    do = tile_ops.load_rows(d_output, first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta)
    dropout_scale = tile_ops.scalar(args.dropout_scale, meta.accumulator)
    block = tile_ops.load_query_block(args, b, h, first, meta)
    queries = Queries(block, do, inside[:, None], (high, low), delta, dropout_scale, args.arrays.sums)
    row = ScheduleRow(args.arrays.schedule, b, h, row, args.m, None, False)
    none = tl.zeros((meta.rows, meta.padded_d_k), meta.accumulator)
    dq = loop_over_tiles(none, process_key_range, row, meta.keys, meta.even, queries, formulas, NAN_SAFE, meta)
    return dq * (block.scale * meta.sign)


@triton.jit(
    do_not_specialize=["n", "m", "H", "group", "blocks", "items"],
    repr=tile_ops.name_variants("backward_queries", "backward_queries_nan_safe"),
)
def backward_queries(
    arrays, n, m, H, group, blocks, items, scale: tl.float64, dropout_scale: tl.float64, formulas, meta: tl.constexpr
):
    """Compute dQ of a block of queries of a head, and add to the gradients of tables.

    If `meta.subblocks` is 0, the kernel computes dQ and writes the flag of each block: 1 if dQ is not finite. If
    `arrays.nonfinite_flags` is None, NaN-safe code computes every block, and `meta.kinds` must be empty. If
    `meta.subblocks` is not 0, the kernel recomputes dQ of the flagged blocks alone, by NaN-safe code and without the
    gradients of tables.

    If `meta.sequential`, a program loops over the batches and heads that read the same table entries by lookups of kind
    "pair", since only one program may add to such an entry. See `forward.forward` for the arguments.
    """
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), dropout_scale)
    flags, d_query = arrays.nonfinite_flags, arrays.d_query
    if meta.subblocks != 0:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(flags + item) != 0:
                head_index, block = item // blocks, item % blocks
                for subblock in range(meta.subblocks):
                    first = (block * meta.subblocks + subblock) * meta.rows
                    dq = compute_block(args, head_index // H, head_index % H, first, block, formulas, True, meta)
                    store_rows(dq, d_query, head_index, first, n, meta.d_k, meta.rows, meta.padded_d_k)
    elif meta.sequential:
        B = items // (H * blocks)
        batches, heads = 1 if meta.shares_batches else B, 1 if meta.shares_heads else H
        head_index, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
        for b in range(head_index // heads, B, batches):
            for h in range(head_index % heads, H, heads):
                dq = compute_block(args, b, h, block * meta.rows, block, formulas, False, meta)
                tl.store(flags + (b * H + h) * blocks + block, has_nonfinite(dq))
                store_rows(dq, d_query, b * H + h, block * meta.rows, n, meta.d_k, meta.rows, meta.padded_d_k)
                tl.debug_barrier()  # the next iteration reads sums that other threads wrote in this iteration
    else:
        head_index, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
        first, b, h = block * meta.rows, head_index // H, head_index % H
        dq = compute_block(args, b, h, first, block, formulas, flags is None, meta)
        if flags is not None:
            tl.store(flags + head_index * blocks + block, has_nonfinite(dq))
        store_rows(dq, d_query, head_index, first, n, meta.d_k, meta.rows, meta.padded_d_k)
