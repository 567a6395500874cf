"""The kernel of the second pass that writes the whole matrix of weights or scores."""

from __future__ import annotations

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles
from .weights_pass import compute_scores, load_block


@triton.jit
def store_range(_, first, last, block, formulas, OUTPUT_KIND: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Write the tiles `first` ... `last` − 1. "sums" of weights are added to what this program has already written."""
    corner, rows = block.extra
    m = block.location.m
    down, across = tl.arange(0, meta.rows)[:, None], tl.arange(0, meta.keys)[None, :]
    for tile in range(first, last):
        j0 = tile * meta.keys
        s = compute_scores(block, j0, formulas, PARTIAL, meta)
        pointers = corner + j0 + (tl.cast(down, tl.int64) * m + across)
        inside = (down < rows) & (across < m - j0)
        if OUTPUT_KIND == "scores":
            if formulas.score_at is None:
                s = s * block.scale
            tl.store(pointers, s, mask=inside)
        elif OUTPUT_KIND == "weights":
            p = tile_ops.weight(s, block.unit, block.lse)
            tl.store(pointers, p.to(corner.dtype.element_ty), mask=inside)
        else:
            total = tl.load(pointers, mask=inside, other=0.0)
            tl.store(pointers, total + tile_ops.weight(s, block.unit, block.lse), mask=inside)
    return ()


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "batches", "heads"])
def dense_weights(
    query,
    key,
    lse,
    output,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    batches: tl.int32,
    heads: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    tables,
    formulas,
    meta: tl.constexpr,
    OUTPUT_KIND: tl.constexpr,
):
    """Write P or S of a block of queries, or P summed over batches and heads.

    Parameters
    ----------
    output : (number of matrices, n, m), which already holds the result of the tiles that are not visited
    batches, heads : numbers of batches and heads that are summed to one matrix; one program loops over them
    OUTPUT_KIND : "weights", "scores" in nats, or "sums" of weights
    """
    item = tl.program_id(0)
    matrix, row = item // blocks, blocks - 1 - item % blocks
    across = H // heads  # number of matrices of a batch
    first = row * meta.rows
    corner = output + (tl.cast(matrix, tl.int64) * n + first) * m
    for k in range(batches * heads):
        b, h = matrix // across * batches + k // heads, matrix % across * heads + k % heads
        extra = (corner, n - first)
        block = load_block(query, key, lse, b, h, first, n, m, H, group, sign, scale, unit, tables, extra, meta)
        schedule_row = ScheduleRow(schedule, b, h, row, m, None, False)
        loop_over_tiles((), store_range, schedule_row, meta.keys, meta.even, block, formulas, OUTPUT_KIND, meta)
        tl.debug_barrier()  # the next iteration reads what other threads wrote in this iteration
