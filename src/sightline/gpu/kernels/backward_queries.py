"""The kernel that computes dQ and the gradients of tables, with one program per block of queries; see `backward`."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import tile_ops
from .backward import Pairs, ScoreParams, SharedArguments, compute_d_scores, compute_weights, has_nonfinite, store_rows
from .tile_loop import ScheduleRow, loop_over_tiles


class Queries(
    namedtuple("Queries", "query d_output inside lse delta location key value params dropout_scale dropout_state sums")
):
    """A block of queries, and the heads of K and V that they attend to.

    `lse` is (high, low), whose sum is lse. `high`, `low`, `delta` and `inside` have the shape (rows, 1). `inside` is
    False past the last query.
    """


@triton.jit
def process_key_range(state, first, last, block, formulas, OPTIONS: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles of keys `first` ... `last` − 1. The state is dQ without the factor `scale`.

    OPTIONS is (KINDS, NAN_SAFE). KINDS has the kinds of the lookups whose tables get a gradient. If NAN_SAFE, NaN and ∞
    in K are replaced by 0.
    """
    NAN_SAFE: tl.constexpr = OPTIONS[1]
    CHECKED: tl.constexpr = PARTIAL or NAN_SAFE
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
        inside = (j < m) & block.inside
        p, s = compute_weights(products, pairs, inside, block.lse, block.params, formulas, PARTIAL, NAN_SAFE)
        dp = tl.dot(block.d_output, v, input_precision=meta.precision)
        if block.dropout_state is not None:
            keep = tile_ops.dropout_mask(block.dropout_state, block.location, j0, meta.rows, meta.keys)
            dp = tl.where(keep, dp * block.dropout_scale, 0.0)
        values = (p, dp, s, products, pairs)
        ds = compute_d_scores(values, block.delta, block.params, block.sums, formulas, OPTIONS[0], CHECKED)
        if NAN_SAFE:
            k = tile_ops.zero_nonfinite(k)
        state = tl.dot(ds.to(k.dtype), tl.trans(k), state, input_precision=meta.precision)
    return state


@triton.jit
def compute_block(args, b, h, first, row, formulas, KINDS: tl.constexpr, NAN_SAFE: tl.constexpr, meta):
    """Return dQ of the block of queries that begins at query `first` of a head.

    `row` is the index of the block in the head's part of the schedule.
    """
    n, m, rows = args.n, args.m, args.rows
    i = first + tl.arange(0, meta.rows)
    inside, at = i < n, (tl.cast(b, tl.int64) * args.H + h) * n + i
    high = tl.load(rows[0] + at, mask=inside, other=float("inf"))[:, None]  # P is 0 past the last query
    low = tl.load(rows[1] + at, mask=inside, other=0.0)[:, None]
    scale, d_output = tile_ops.scalar(args.scale, meta.accumulator), tile_ops.locate_head(args.d_output, b, h)
    q = tile_ops.load_queries(args.query, b, h, first, n, args.sign, meta)
    do = tile_ops.load_rows(d_output, first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta)
    lse, inside_column = (high, low), inside[:, None]
    delta = tl.load(rows[2] + at, mask=inside, other=0.0)[:, None]
    location = tile_ops.BlockLocation(b, h, tile_ops.query_indices(first, n, meta), n, m)
    g = h // args.group
    key, value = tile_ops.locate_head(args.key, b, g), tile_ops.locate_head(args.value, b, g)
    params = ScoreParams(scale, tile_ops.scalar(args.unit, meta.accumulator), args.tables)
    dropout_scale, state = tile_ops.scalar(args.dropout_scale, meta.accumulator), args.dropout_state
    block = Queries(q, do, inside_column, lse, delta, location, key, value, params, dropout_scale, state, args.sums)
    OPTIONS: tl.constexpr = (KINDS, NAN_SAFE)
    row = ScheduleRow(args.schedule, b, h, row, m, None, False)
    none = tl.zeros((meta.rows, meta.padded_d_k), meta.accumulator)
    dq = loop_over_tiles(none, process_key_range, row, meta.keys, meta.even, block, formulas, OPTIONS, meta)
    return dq * (scale * tile_ops.scalar(args.sign, meta.accumulator))


@triton.jit(
    do_not_specialize=["n", "m", "H", "group", "blocks", "items", "B", "batches", "heads"],
    repr=tile_ops.name_variants("backward_queries", "backward_queries_nan_safe"),
)
def backward_queries(
    query,
    key,
    value,
    d_output,
    rows,
    d_query,
    nonfinite_flags,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    items: tl.int32,
    B: tl.int32,
    batches: tl.int32,
    heads: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    dropout_state,
    dropout_scale: tl.float64,
    tables,
    sums,
    formulas,
    meta: tl.constexpr,
    KINDS: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    SUBBLOCKS: tl.constexpr,
):
    """Compute dQ of a block of queries of a head, and add to the gradients of tables.

    If SUBBLOCKS is 0, the kernel computes dQ and writes the flag of each block: 1 if dQ is not finite. If
    `nonfinite_flags` is None, NaN-safe code computes every block, and KINDS must be empty. If SUBBLOCKS is not 0, the
    kernel recomputes dQ of the flagged blocks alone, by NaN-safe code and without the gradients of tables. It divides a
    flagged block into SUBBLOCKS blocks of `meta.rows` queries.

    Parameters
    ----------
    query, key, value, d_output : `tile_ops.Array`
    rows : the arrays that `backward_preprocess` writes
    d_query : (B, H, n, d_k), contiguous
    nonfinite_flags : int32, one for each block: 1 if dQ of the block is not finite; or None
    batches, heads, SEQUENTIAL : numbers of batches and heads that have programs of their own
        If SEQUENTIAL, a program loops over the batches and heads that read the same table entries by lookups of kind
        "pair", since only one program may add to such an entry.
    schedule, dropout_state, dropout_scale : see `forward.forward`
    sums, KINDS : for each lookup the array of sums and the kind, see `table_gradient`
    """
    args = SharedArguments(
        *(query, key, value, d_output, rows, n, m, H, group, sign, scale, unit),
        *(schedule, dropout_state, dropout_scale, tables, sums),
    )
    if SUBBLOCKS != 0:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(nonfinite_flags + item) != 0:
                location, block = item // blocks, item % blocks
                for subblock in range(SUBBLOCKS):
                    first = (block * SUBBLOCKS + subblock) * meta.rows
                    dq = compute_block(args, location // H, location % H, first, block, formulas, KINDS, True, meta)
                    store_rows(dq, d_query, location, first, n, meta.d_k, meta.rows, meta.padded_d_k)
    elif SEQUENTIAL:
        location, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
        for b in range(location // heads, B, batches):
            for h in range(location % heads, H, heads):
                dq = compute_block(args, b, h, block * meta.rows, block, formulas, KINDS, False, meta)
                tl.store(nonfinite_flags + (b * H + h) * blocks + block, has_nonfinite(dq))
                store_rows(dq, d_query, b * H + h, block * meta.rows, n, meta.d_k, meta.rows, meta.padded_d_k)
                tl.debug_barrier()  # the next iteration reads sums that other threads wrote in this iteration
    else:
        location, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
        first, b, h = block * meta.rows, location // H, location % H
        dq = compute_block(args, b, h, first, block, formulas, KINDS, nonfinite_flags is None, meta)
        if nonfinite_flags is not None:
            tl.store(nonfinite_flags + location * blocks + block, has_nonfinite(dq))
        store_rows(dq, d_query, location, first, n, meta.d_k, meta.rows, meta.padded_d_k)
