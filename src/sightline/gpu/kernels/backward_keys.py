"""The kernel that computes dK and dV, with one program for each block of keys; see `backward`."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import tile_ops
from .backward import Pairs, compute_d_scores, has_nonfinite, store_rows
from .forward import classify_nonfinite, decode_nonfinite
from .tile_loop import ScheduleRow, loop_over_tiles


class Keys(namedtuple("Keys", "key value first scale unit dropout_scale tables args")):
    """A block of rows of K and V that begins at key `first`. `args` are the `tile_ops.Arguments`."""


class KeysAndHead(namedtuple("KeysAndHead", "keys b h query d_output")):
    """A block of keys, and a head of queries that attend to these keys."""


@triton.jit
def process_query_range(state, first, last, block, formulas, NAN_SAFE: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles of queries `first` ... `last` − 1.

    The state is (dK without scale and sign, dV without the dropout factor, the bits of `classify_nonfinite`).
    """
    dk, dv, nonfinite = state
    keys, b, h, query, d_output = block
    n, m, j0, arrays = keys.args.n, keys.args.m, keys.first, keys.args.arrays
    CHECKED: tl.constexpr = PARTIAL or NAN_SAFE
    bound: tl.constexpr = PARTIAL and not meta.all_full
    row = tl.arange(0, meta.rows)
    j = (j0 + tl.arange(0, meta.keys))[:, None]
    for tile in range(first, last):
        i0 = tile * meta.rows
        i = i0 + row
        q = tile_ops.load_transposed(query, i0, meta.rows, n, meta.d_k, meta.padded_d_k, bound, meta)
        do = tile_ops.load_rows(d_output, i0, meta.rows, n, meta.d_v, meta.padded_d_v, bound, meta)
        at = (tl.cast(b, tl.int64) * keys.args.H + h) * n + i
        # Triton copies a block with fewer numbers than threads many times, so high and low are one block.
        at = arrays.rows + 4 * at[:, None] + tl.arange(0, 2)[None, :]
        if bound:
            lse = tl.load(at, mask=(i < n)[:, None], other=0.0)
            other = tl.load(at + 2, mask=(i < n)[:, None], other=0.0)
        else:
            lse, other = tl.load(at), tl.load(at + 2)
        high, low = tl.split(lse)
        delta, _ = tl.split(other)
        location = tile_ops.BlockLocation(b, h, tl.minimum(i, n - 1)[None, :], n, m)
        products = tl.dot(keys.key, q, input_precision=meta.precision)
        s = tile_ops.compute_scores(products, location, j, keys.scale, keys.tables, formulas, PARTIAL, meta)
        if bound:
            s = tl.where((i < n)[None, :], s, float("-inf"))
        p = tile_ops.weight(s, keys.unit, (high[None, :], low[None, :]), NAN_SAFE)
        dp = tl.dot(keys.value, tl.trans(do), input_precision=meta.precision)
        dropped = p
        if len(arrays.dropout_state) > 0:
            queries = tile_ops.BlockLocation(b, h, i[:, None], n, m)
            keep = tl.trans(tile_ops.dropout_mask(arrays.dropout_state, queries, j0, meta.rows, meta.keys))
            dropped, dp = tl.where(keep, p, 0.0), tl.where(keep, dp * keys.dropout_scale, 0.0)
        if NAN_SAFE:
            nonfinite = classify_nonfinite(dropped, do, nonfinite, meta)
            do, q = tile_ops.zero_nonfinite(do), tile_ops.zero_nonfinite(q)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=meta.precision)
        values = (p, dp, s, products, Pairs(b, h, location.i, tl.minimum(j, m - 1), n, m))
        ds = compute_d_scores(values, delta[None, :], keys, None, formulas, (), CHECKED)
        dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=meta.precision)
    return dk, dv, nonfinite


@triton.jit
def process_heads(state, first, last, block, formulas, NAN_SAFE: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles of queries `first` ... `last` − 1 of `heads` heads from h on.

    `block` is (keys, b, h, heads). A loop over heads around the loops over tile ranges would spill registers.
    """
    keys, b, h, heads = block
    tl.assume(heads > 0)  # ptxas serialises the matrix products of a loop that may have no iteration
    for k in range(heads):
        query = tile_ops.locate_head(keys.args.arrays.query, b, h + k)
        d_output = tile_ops.locate_head(keys.args.arrays.d_output, b, h + k)
        head = KeysAndHead(keys, b, h + k, query, d_output)
        state = process_query_range(state, first, last, head, formulas, NAN_SAFE, meta, PARTIAL)
    return state


@triton.jit
def compute_block(args, b, g, first, row, formulas, NAN_SAFE: tl.constexpr, meta):
    """Return (dK, dV) of the keys of a key head from `first` on, summed over the query heads of its group in order."""
    m, arrays = args.m, args.arrays
    k, v = tile_ops.locate_head(arrays.key, b, g), tile_ops.locate_head(arrays.value, b, g)
    k = tile_ops.load_rows(k, first, meta.keys, m, meta.d_k, meta.padded_d_k, True, meta)
    k = tile_ops.apply_sign(k, meta)
    v = tile_ops.load_rows(v, first, meta.keys, m, meta.d_v, meta.padded_d_v, True, meta)
    scale, unit = tile_ops.scalar(args.scale, meta.accumulator), tile_ops.scalar(args.unit, meta.accumulator)
    keys = Keys(k, v, first, scale, unit, tile_ops.scalar(args.dropout_scale, meta.accumulator), arrays.tables, args)
    state = (
        tl.zeros((meta.keys, meta.padded_d_k), meta.accumulator),
        tl.zeros((meta.keys, meta.padded_d_v), meta.accumulator),
        tl.zeros((meta.keys, meta.padded_d_v if NAN_SAFE else 1), tl.int32),
    )
    parts = args.group if meta.heads_differ else 1
    heads = args.group if meta.is_grouped else 1
    for part in range(parts):
        h = g * args.group + part
        tiles = ScheduleRow(arrays.schedule, b, h, row, args.n, None, first + meta.keys > m)
        block = (keys, b, h, heads)
        state = loop_over_tiles(state, process_heads, tiles, meta.rows, meta.all_full, block, formulas, NAN_SAFE, meta)
    dk, dv, nonfinite = state
    dv *= keys.dropout_scale
    if NAN_SAFE:
        dv += decode_nonfinite(nonfinite)
    return dk * (scale * meta.sign), dv


@triton.jit(
    do_not_specialize=["n", "m", "H", "group", "blocks", "items"],
    repr=tile_ops.name_variants("backward_keys", "backward_keys_nan_safe"),
)
def backward_keys(
    arrays, n, m, H, group, blocks, items, scale: tl.float64, dropout_scale: tl.float64, formulas, meta: tl.constexpr
):
    """Compute dK and dV of a block of keys of a key head.

    A row of `arrays.schedule` has the ranges of tiles of queries that a block of keys visits, for one query head. The
    first blocks of a head run first, since a causal mask gives them the most tiles. See `forward.forward` for the
    arguments, and for NaN-safe code.
    """
    heads, flags = H // group, arrays.nonfinite_flags
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), dropout_scale)
    if meta.subblocks == 0:
        item = tl.program_id(0)
        head_index, block = item // blocks, item % blocks
        b, g, first = head_index // heads, head_index % heads, block * meta.keys
        dk, dv = compute_block(args, b, g, first, block, formulas, flags is None, meta)
        if flags is not None:
            tl.store(flags + item, has_nonfinite(dk) | has_nonfinite(dv))
        store_rows(dk, arrays.d_key, head_index, first, m, meta.d_k, meta.keys, meta.padded_d_k)
        store_rows(dv, arrays.d_value, head_index, first, m, meta.d_v, meta.keys, meta.padded_d_v)
    else:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(flags + item) != 0:
                head_index, block = item // blocks, item % blocks
                b, g = head_index // heads, head_index % heads
                for subblock in range(meta.subblocks):
                    first = (block * meta.subblocks + subblock) * meta.keys
                    dk, dv = compute_block(args, b, g, first, block, formulas, True, meta)
                    store_rows(dk, arrays.d_key, head_index, first, m, meta.d_k, meta.keys, meta.padded_d_k)
                    store_rows(dv, arrays.d_value, head_index, first, m, meta.d_v, meta.keys, meta.padded_d_v)
