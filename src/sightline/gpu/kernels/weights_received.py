"""The kernel of the second pass that computes the weight that each key receives, with one program per block of keys."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles
from .weights_pass import combine, reduce


class Block(namedtuple("Block", "key first b h query lse n m H sign scale unit tables")):
    """A block of keys that begins at key `first` of a head, and the arguments needed to load queries and their lse."""


@triton.jit
def process_range(state, first, last, block, formulas, USE_MAX: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles of queries `first` ... `last` − 1.

    The state is the sum or maximum of the weights that each key receives, (keys,) float64.
    """
    b, h, n = block.b, block.h, block.n
    scale, unit = tile_ops.scalar(block.scale, meta.accumulator), tile_ops.scalar(block.unit, meta.accumulator)
    for tile in range(first, last):
        i0 = tile * meta.rows
        location = tile_ops.BlockLocation(b, h, tile_ops.query_indices(i0, n, meta), n, block.m)
        q = tile_ops.load_queries(block.query, b, h, i0, n, block.sign, meta)
        products = tl.dot(q, block.key, input_precision=meta.precision)
        j = block.first + tl.arange(0, meta.keys)[None, :]
        s = tile_ops.compute_scores(products, location, j, scale, block.tables, formulas, PARTIAL, meta)
        high, low = tile_ops.load_lse(block.lse, b * block.H + h, i0, n, block.unit, meta)
        p = tile_ops.weight(s, unit, (high[:, None], low[:, None]))
        if USE_MAX:
            p = tl.where(p == p, p, float("inf"))  # a maximum skips NaN; no weight is above 1
        if PARTIAL:
            p = tl.where((i0 + tl.arange(0, meta.rows))[:, None] < n, p, 0.0)
        state = combine(state, reduce(p, 0, USE_MAX).to(tl.float64), USE_MAX)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def received(
    query,
    key,
    lse,
    output,
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
    USE_MAX: tl.constexpr,
):
    """Write Σ_i P_ij, or max_i P_ij if USE_MAX, for a block of keys of a head.

    Parameters
    ----------
    output : (B, H, m) in the accumulator's dtype
    blocks : number of blocks of keys in a head
    schedule : a `tile_loop.Schedule` with the tiles of queries that each block of keys visits, or None without a mask
    """
    item = tl.program_id(0)
    position, row = item // blocks, item % blocks
    b, h = position // H, position % H
    j0 = row * meta.keys
    head = tile_ops.locate_head(key, b, h // group)
    k = tile_ops.load_transposed(head, j0, meta.keys, m, meta.d_k, meta.padded_d_k, not meta.even, meta)
    block = Block(k, j0, b, h, query, lse, n, m, H, sign, scale, unit, tables)
    row = ScheduleRow(schedule, b, h, row, n, None, j0 + meta.keys > m)
    state = tl.zeros((meta.keys,), tl.float64)
    state = loop_over_tiles(state, process_range, row, meta.rows, False, block, formulas, USE_MAX, meta)
    if USE_MAX:
        state = tl.where(state == float("inf"), float("nan"), state)
    j = j0 + tl.arange(0, meta.keys)
    location = output + tl.cast(position, tl.int64) * m + j
    tl.store(location, state.to(output.dtype.element_ty), mask=j < m)
