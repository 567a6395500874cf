"""dQ, and what tables gain: a program is a block of queries; see `backward`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..launch.launcher import name_variants
from . import tile_ops
from .backward import (
    KernelArguments,
    Pairs,
    ScoreParameters,
    compute_d_scores,
    compute_weights,
    has_nonfinite,
    store_rows,
)
from .tile_loop import ScheduleRow, loop_over_tiles

__all__ = ["backward_queries"]


class Block(NamedTuple):
    """A block of queries, and the heads of keys and values it looks at."""

    query: Any
    d_output: Any
    inside: Any  # which rows are queries, (rows, 1)
    lse: Any  # (high, low), (rows, 1) each, and so δ
    delta: Any
    location: Any
    key: Any
    value: Any
    score_parameters: Any
    dropout_scale: Any
    dropout_state: Any
    sums: Any


@triton.jit
def process_key_range(state, first, last, block, formulas, OPTIONS: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """dQ, the scale not in it, after the tiles of keys `first` to before `last`; HOW is (KINDS, CAREFUL)."""
    KINDS: tl.constexpr = OPTIONS[0]
    NAN_SAFE: tl.constexpr = OPTIONS[1]
    b, h, i, n, m = block.location
    bound: tl.constexpr = PARTIAL and not meta.even
    for tile in range(first, last):
        j0 = tile * meta.keys
        k = tile_ops.load_rows_transposed(block.key, j0, meta.keys, m, meta.d_k, meta.padded_d_k, bound, meta)
        v = tile_ops.load_rows_transposed(block.value, j0, meta.keys, m, meta.d_v, meta.padded_d_v, bound, meta)
        j = j0 + tl.arange(0, meta.keys)[None, :]
        at = j
        if bound:
            at = tl.minimum(j, m - 1)
        pairs = Pairs(b, h, i, at, n, m)
        products = tl.dot(block.query, k, input_precision=meta.precision)
        p, s = compute_weights(
            products, pairs, (j < m) & block.inside, block.lse, block.score_parameters, formulas, PARTIAL, NAN_SAFE
        )
        dp = tl.dot(block.d_output, v, input_precision=meta.precision)
        if block.dropout_state is not None:
            dp = tl.where(
                tile_ops.dropout_mask(block.dropout_state, block.location, j0, meta.rows, meta.keys),
                dp * block.dropout_scale,
                0.0,
            )
        ds = compute_d_scores(
            *(
                p,
                dp,
                s,
                products,
                pairs,
                block.delta,
                block.score_parameters,
                block.sums,
                formulas,
                KINDS,
                PARTIAL or NAN_SAFE,
            )
        )
        if NAN_SAFE:
            k = tile_ops.zero_nonfinite(k)
        state = tl.dot(ds.to(k.dtype), tl.trans(k), state, input_precision=meta.precision)
    return state


@triton.jit
def compute_block(arguments, b, h, first, row, formulas, KINDS: tl.constexpr, NAN_SAFE: tl.constexpr, meta):
    """dQ of a head's queries from `first` on; `row` is their block's of the head's schedule."""
    n, m, rows = arguments.n, arguments.m, arguments.rows
    i = first + tl.arange(0, meta.rows)
    inside, at = i < n, (tl.cast(b, tl.int64) * arguments.H + h) * n + i
    high = tl.load(rows[0] + at, mask=inside, other=float("inf"))[:, None]  # past the end, so that P = 0
    low = tl.load(rows[1] + at, mask=inside, other=0.0)[:, None]
    scale, d_output = (
        tile_ops.scalar(arguments.scale, meta.accumulator),
        tile_ops.locate_head(arguments.d_output, b, h),
    )
    block = Block(
        tile_ops.load_queries(arguments.query, b, h, first, n, arguments.sign, meta),
        tile_ops.load_rows(d_output, first, meta.rows, n, meta.d_v, meta.padded_d_v, True, meta),
        inside[:, None],
        (high, low),
        tl.load(rows[2] + at, mask=inside, other=0.0)[:, None],
        tile_ops.BlockLocation(b, h, tile_ops.query_indices(first, n, meta), n, m),
        tile_ops.locate_head(arguments.key, b, h // arguments.group),
        tile_ops.locate_head(arguments.value, b, h // arguments.group),
        ScoreParameters(scale, tile_ops.scalar(arguments.unit, meta.accumulator), arguments.tables),
        tile_ops.scalar(arguments.dropout_scale, meta.accumulator),
        arguments.dropout_state,
        arguments.sums,
    )
    OPTIONS: tl.constexpr = (KINDS, NAN_SAFE)
    row, none = (
        ScheduleRow(arguments.schedule, b, h, row, m, None, False),
        tl.zeros((meta.rows, meta.padded_d_k), meta.accumulator),
    )
    dq = loop_over_tiles(none, process_key_range, row, meta.keys, meta.even, block, formulas, OPTIONS, meta)
    return dq * (scale * tile_ops.scalar(arguments.sign, meta.accumulator))


@triton.jit(
    do_not_specialize=["n", "m", "H", "group", "blocks", "items", "B", "batches", "heads"],
    repr=name_variants("backward_queries", "backward_queries_nan_safe"),
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
    """dQ of a block of queries of a head, and what tables gain; with PARTS the blocks marked, each in so many parts.

    Parameters
    ----------
    query, key, value, d_output : arrays, see `tiles`
    rows : of `backward_preprocess`
    d_query : (B, H, n, d_k), contiguous
    tainted : int32, one for each block: whether its dQ is not finite
    batches, heads : how many of each are worked on apart; with TURNS, one program takes the others in turn, since an
        entry of a table that has one for each pair belongs to the program of the pair
    schedule, random, kept : as in `forward`
    sums, KINDS : see `gains`
    """
    arguments = KernelArguments(
        *(
            query,
            key,
            value,
            d_output,
            rows,
            n,
            m,
            H,
            group,
            sign,
            scale,
            unit,
            schedule,
            dropout_state,
            dropout_scale,
            tables,
            sums,
        )
    )
    if SUBBLOCKS != 0:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(nonfinite_flags + item) != 0:
                location, block = item // blocks, item % blocks
                for subblock in range(SUBBLOCKS):
                    first = (block * SUBBLOCKS + subblock) * meta.rows
                    dq = compute_block(
                        arguments, location // H, location % H, first, block, formulas, KINDS, True, meta
                    )
                    store_rows(dq, d_query, location, first, n, meta.d_k, meta.rows, meta.padded_d_k)
    elif SEQUENTIAL:
        location, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
        for b in range(location // heads, B, batches):
            for h in range(location % heads, H, heads):
                dq = compute_block(arguments, b, h, block * meta.rows, block, formulas, KINDS, False, meta)
                tl.store(nonfinite_flags + (b * H + h) * blocks + block, has_nonfinite(dq))
                store_rows(dq, d_query, b * H + h, block * meta.rows, n, meta.d_k, meta.rows, meta.padded_d_k)
                tl.debug_barrier()  # the next one's threads read the sums that these have written
    else:
        location, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
        dq = compute_block(
            arguments, location // H, location % H, block * meta.rows, block, formulas, KINDS, False, meta
        )
        tl.store(nonfinite_flags + location * blocks + block, has_nonfinite(dq))
        store_rows(dq, d_query, location, block * meta.rows, n, meta.d_k, meta.rows, meta.padded_d_k)
