"""The kernel that computes dK and dV, with one program for each block of keys; see `backward`."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import tile_ops
from .backward import Pairs, ScoreParams, SharedArguments, compute_d_scores, compute_weights, has_nonfinite, store_rows
from .forward import classify_nonfinite, decode_nonfinite
from .tile_loop import ScheduleRow, loop_over_tiles


class Keys(namedtuple("Keys", "key value first b h query d_output params dropout_scale args")):
    """A block of rows of K and V that begins at key `first`, and a head of queries that attend to these keys."""


@triton.jit
def process_query_range(state, first, last, block, formulas, NAN_SAFE: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles of queries `first` ... `last` − 1.

    The state is (dK without scale and sign, dV without the dropout factor, the bits of `classify_nonfinite`).
    """
    dk, dv, nonfinite = state
    b, h, j0, params = block.b, block.h, block.first, block.params
    n, m, rows, dropout_state = block.args.n, block.args.m, block.args.rows, block.args.dropout_state
    CHECKED: tl.constexpr = PARTIAL or NAN_SAFE
    row = tl.arange(0, meta.rows)
    j = (j0 + tl.arange(0, meta.keys))[:, None]
    for tile in range(first, last):
        i0 = tile * meta.rows
        i = i0 + row
        q = tile_ops.load_transposed(block.query, i0, meta.rows, n, meta.d_k, meta.padded_d_k, PARTIAL, meta)
        do = tile_ops.load_rows(block.d_output, i0, meta.rows, n, meta.d_v, meta.padded_d_v, PARTIAL, meta)
        at = (tl.cast(b, tl.int64) * block.args.H + h) * n + i
        if PARTIAL:
            high = tl.load(rows[0] + at, mask=i < n, other=0.0)
            low = tl.load(rows[1] + at, mask=i < n, other=0.0)
            delta = tl.load(rows[2] + at, mask=i < n, other=0.0)
        else:
            high, low, delta = tl.load(rows[0] + at), tl.load(rows[1] + at), tl.load(rows[2] + at)
        pairs = Pairs(b, h, tl.minimum(i, n - 1)[None, :], tl.minimum(j, m - 1), n, m)
        lse = (high[None, :], low[None, :])
        products = tl.dot(block.key, q, input_precision=meta.precision)
        inside = (j < m) & (i < n)[None, :]
        p, s = compute_weights(products, pairs, inside, lse, params, formulas, PARTIAL, NAN_SAFE)
        dp = tl.dot(block.value, tl.trans(do), input_precision=meta.precision)
        dropped = p
        if dropout_state is not None:
            location = tile_ops.BlockLocation(b, h, i[:, None], n, m)
            keep = tl.trans(tile_ops.dropout_mask(dropout_state, location, j0, meta.rows, meta.keys))
            dropped, dp = tl.where(keep, p, 0.0), tl.where(keep, dp * block.dropout_scale, 0.0)
        if NAN_SAFE:
            nonfinite = classify_nonfinite(dropped, do, nonfinite, meta)
            do, q = tile_ops.zero_nonfinite(do), tile_ops.zero_nonfinite(q)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=meta.precision)
        values = (p, dp, s, products, pairs)
        ds = compute_d_scores(values, delta[None, :], params, None, formulas, (), CHECKED)
        dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=meta.precision)
    return dk, dv, nonfinite


@triton.jit
def add_head(state, keys, b, h, row, EVEN: tl.constexpr, formulas, NAN_SAFE: tl.constexpr, meta):
    """Return the state after the tiles of queries of head h.

    `keys` is (K, V, first key, `ScoreParams`, dropout factor, `SharedArguments`).
    """
    k, v, first, params, dropout_scale, args = keys
    query, d_output = tile_ops.locate_head(args.query, b, h), tile_ops.locate_head(args.d_output, b, h)
    block = Keys(k, v, first, b, h, query, d_output, params, dropout_scale, args)
    tiles = ScheduleRow(args.schedule, b, h, row, args.n, None, first + meta.keys > args.m)
    return loop_over_tiles(state, process_query_range, tiles, meta.rows, EVEN, block, formulas, NAN_SAFE, meta)


@triton.jit
def compute_block(args, b, g, first, row, formulas, OPTIONS: tl.constexpr, NAN_SAFE: tl.constexpr, meta):
    """Return (dK, dV) of the keys of a key head from `first` on, summed over the query heads of its group in order.

    OPTIONS is (GROUPED, EVEN) of `backward_keys`.
    """
    m = args.m
    k = tile_ops.locate_head(args.key, b, g)
    k = tile_ops.load_rows(k, first, meta.keys, m, meta.d_k, meta.padded_d_k, True, meta)
    k = tile_ops.apply_sign(k, args.sign, meta)
    v = tile_ops.locate_head(args.value, b, g)
    v = tile_ops.load_rows(v, first, meta.keys, m, meta.d_v, meta.padded_d_v, True, meta)
    scale = tile_ops.scalar(args.scale, meta.accumulator)
    dropout_scale = tile_ops.scalar(args.dropout_scale, meta.accumulator)
    params = ScoreParams(scale, tile_ops.scalar(args.unit, meta.accumulator), args.tables)
    state = (
        tl.zeros((meta.keys, meta.padded_d_k), meta.accumulator),
        tl.zeros((meta.keys, meta.padded_d_v), meta.accumulator),
        tl.zeros((meta.keys, meta.padded_d_v if NAN_SAFE else 1), tl.int32),
    )
    keys = (k, v, first, params, dropout_scale, args)
    if OPTIONS[0]:
        for h in range(g * args.group, (g + 1) * args.group):
            state = add_head(state, keys, b, h, row, OPTIONS[1], formulas, NAN_SAFE, meta)
    else:  # a loop, even of one iteration, needs more registers
        state = add_head(state, keys, b, g, row, OPTIONS[1], formulas, NAN_SAFE, meta)
    dk, dv, nonfinite = state
    dv *= dropout_scale
    if NAN_SAFE:
        dv += decode_nonfinite(nonfinite)
    return dk * (scale * tile_ops.scalar(args.sign, meta.accumulator)), dv


@triton.jit(
    do_not_specialize=["n", "m", "H", "group", "blocks", "items"],
    repr=tile_ops.name_variants("backward_keys", "backward_keys_nan_safe"),
)
def backward_keys(
    query,
    key,
    value,
    d_output,
    rows,
    d_key,
    d_value,
    nonfinite_flags,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    items: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    dropout_state,
    dropout_scale: tl.float64,
    tables,
    formulas,
    meta: tl.constexpr,
    OPTIONS: tl.constexpr,
    SUBBLOCKS: tl.constexpr,
):
    """Compute dK and dV of a block of keys of a key head.

    OPTIONS is (GROUPED, EVEN). GROUPED is True if several query heads share a key head. EVEN is True if tiles divide
    the queries and the keys.

    d_key and d_value are (B, G, m, d_k) and (B, G, m, d_v), contiguous. A row of `schedule` has the ranges of tiles of
    queries that a block of keys visits, for one query head. The other arguments are those of `backward_queries`. The
    first blocks of a head run first, since a causal mask gives them the most tiles.
    """
    heads = H // group
    args = SharedArguments(
        *(query, key, value, d_output, rows, n, m, H, group, sign, scale, unit),
        *(schedule, dropout_state, dropout_scale, tables, None),
    )
    if SUBBLOCKS == 0:
        item = tl.program_id(0)
        position, block = item // blocks, item % blocks
        b, g, first = position // heads, position % heads, block * meta.keys
        dk, dv = compute_block(args, b, g, first, block, formulas, OPTIONS, nonfinite_flags is None, meta)
        if nonfinite_flags is not None:
            tl.store(nonfinite_flags + item, has_nonfinite(dk) | has_nonfinite(dv))
        store_rows(dk, d_key, position, first, m, meta.d_k, meta.keys, meta.padded_d_k)
        store_rows(dv, d_value, position, first, m, meta.d_v, meta.keys, meta.padded_d_v)
    else:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(nonfinite_flags + item) != 0:
                position, block = item // blocks, item % blocks
                b, g = position // heads, position % heads
                for subblock in range(SUBBLOCKS):
                    first = (block * SUBBLOCKS + subblock) * meta.keys
                    dk, dv = compute_block(args, b, g, first, block, formulas, OPTIONS, True, meta)
                    store_rows(dk, d_key, position, first, m, meta.d_k, meta.keys, meta.padded_d_k)
                    store_rows(dv, d_value, position, first, m, meta.d_v, meta.keys, meta.padded_d_v)
