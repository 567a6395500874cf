"""What each key receives, second pass: a block of keys against the blocks of queries that see it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles
from .weights_pass import combine, reduce

__all__ = ["received"]


class Block(NamedTuple):
    """A block of keys of a head, from `first` on, and the arguments of the kernel that its queries take."""

    key: Any
    first: Any
    b: Any
    h: Any
    query: Any
    lse: Any
    n: Any
    m: Any
    H: Any
    sign: Any
    scale: Any
    unit: Any
    tables: Any


@triton.jit
def process_range(state, first, last, block, formulas, USE_MAX: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """What the keys have, (keys,) float64, after the blocks of queries `first` to before `last`."""
    b, h, n = block.b, block.h, block.n
    scale, unit = (tile_ops.scalar(block.scale, meta.accumulator), tile_ops.scalar(block.unit, meta.accumulator))
    for tile in range(first, last):
        i0 = tile * meta.rows
        location = tile_ops.BlockLocation(b, h, tile_ops.query_indices(i0, n, meta), n, block.m)
        q = tile_ops.load_queries(block.query, b, h, i0, n, block.sign, meta)
        products = tl.dot(q, block.key, input_precision=meta.precision)
        s = tile_ops.compute_scores(products, location, block.first, scale, block.tables, formulas, PARTIAL, meta)
        high, low = tile_ops.normaliser(block.lse, b * block.H + h, i0, n, block.unit, meta)
        p = tile_ops.weight(s, unit, (high[:, None], low[:, None]))
        if USE_MAX:
            p = tl.where(p == p, p, float("inf"))  # maxima pass NaN over; no weight is above 1
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
    """Σ_i P_ij of a block of keys of a head, or the largest.

    Parameters
    ----------
    output : (B, H, m) in the accumulator's type
    blocks : of keys
    schedule : that of blocks of keys, or None where every query sees them
    """
    item = tl.program_id(0)
    position, row = item // blocks, item % blocks
    b, h = position // H, position % H
    j0 = row * meta.keys
    head = tile_ops.locate_head(key, b, h // group)
    k = tile_ops.load_rows_transposed(head, j0, meta.keys, m, meta.d_k, meta.padded_d_k, not meta.even, meta)
    block = Block(k, j0, b, h, query, lse, n, m, H, sign, scale, unit, tables)
    row = ScheduleRow(schedule, b, h, row, n, None, j0 + meta.keys > m)
    state = tl.zeros((meta.keys,), tl.float64)
    state = loop_over_tiles(state, process_range, row, meta.rows, False, block, formulas, USE_MAX, meta)
    if USE_MAX:
        state = tl.where(state == float("inf"), float("nan"), state)
    j = j0 + tl.arange(0, meta.keys)
    location = output + tl.cast(position, tl.int64) * m + j
    tl.store(location, state.to(output.dtype.element_ty), mask=j < m)
