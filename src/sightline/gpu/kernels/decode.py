"""The decoding kernels, for few queries and many keys. The time to read K and V limits these kernels.

The queries of all query heads that share a key head are rows of one block, so that one read of K and V serves all of
them, if they fit a block. The keys are divided into splits, and one program computes one block over one split.
`merge_splits` merges the results of the splits p in the order of their keys (Dao et al., "Flash-Decoding", 2023):

    lse = ln Σ_p e^lse_p        O = Σ_p e^(lse_p − lse) O_p
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import tile_ops
from .forward import SoftmaxState, compute_block, init, process_range, store
from .tile_loop import ScheduleRow, loop_over_tiles

UNROLL_FACTOR = tl.constexpr(8)  # splits whose loads `merge_splits` overlaps, instead of waiting for each load


@triton.jit(do_not_specialize=["n", "m", "H", "group", "num_splits", "split_size"])
def decode(arrays, n, m, H, group, num_splits, split_size, scale: tl.float64, formulas, meta: tl.constexpr):
    """Compute attention for a block of queries of a group of heads over one split of the keys.

    The kernel writes `arrays.split_output`, and `arrays.split_lse` = log2 Σ 2^x over each split, where x is the final
    score in base 2. It is −∞ for a query without a visible key in the split. A split has `split_size` tiles.
    """
    item = tl.program_id(0)
    split, position = item % num_splits, item // num_splits
    G = H // group
    blocks = tl.cdiv(group * n, meta.rows)
    block, b, g = position % blocks, position // blocks // G, position // blocks % G
    rows = (block * meta.rows + tl.arange(0, meta.rows))[:, None]
    inside = rows < group * n
    rows = tl.minimum(rows, group * n - 1)
    h, i = g * group + rows // n, rows % n
    q = tile_ops.gather_rows(tile_ops.locate_head(arrays.query, b, h), i, inside, meta.d_k, meta.padded_d_k, meta)
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), None)
    q = tile_ops.apply_sign(q, meta)
    k, v = tile_ops.locate_head(arrays.key, b, g), tile_ops.locate_head(arrays.value, b, g)
    location = tile_ops.BlockLocation(b, h, i, n, m)
    scale, unit = tile_ops.scalar(args.scale, meta.accumulator), tile_ops.scalar(args.unit, meta.accumulator)
    queries = tile_ops.QueryBlock(q, k, v, location, scale, unit, arrays.tables, arrays.dropout_state)
    row = ScheduleRow(arrays.schedule, b, 0, 0, m, (split * split_size, (split + 1) * split_size), False)
    state = init(None, 0, False, meta)
    state = loop_over_tiles(state, process_range, row, meta.keys, meta.even, queries, formulas, False, meta)
    nothing = state.total == 0
    safe = tl.where(nothing, 1.0, state.total)
    at = ((tl.cast(split, tl.int64) * tl.num_programs(0) // (num_splits * blocks * G) + b) * H + h) * n + i
    column = tl.arange(0, meta.padded_d_v)[None, :]
    pointers = arrays.split_output + at * meta.d_v + column
    tl.store(pointers, state.output / safe[:, None], mask=inside & (column < meta.d_v))
    base = state.maximum.to(tl.float64) * args.unit
    sums = base + tl.log2(safe.to(tl.float64) + state.compensation.to(tl.float64))
    tl.store(arrays.split_lse + at, tl.where(nothing, float("-inf"), sums)[:, None], mask=inside)


@triton.jit(do_not_specialize=["n", "m", "H", "group", "num_splits"])
def merge_splits(
    arrays, n, m, H, group, num_splits, scale: tl.float64, dropout_scale: tl.float64, formulas, meta: tl.constexpr
):
    """Merge the splits of the queries of one head.

    If the merged output of the head has NaN, the kernel recomputes the head NaN-safe. Its tiles then have `meta.rows`
    queries, enough for matrix products. Merging multiplies no matrices, so it has only `meta.merged_rows` queries: with
    few rows, many loads overlap.
    """
    ROWS: tl.constexpr = meta.merged_rows
    head_index = tl.program_id(0)
    rows, column = tl.arange(0, ROWS), tl.arange(0, meta.padded_d_v)[None, :]
    at, inside = tl.cast(head_index, tl.int64) * n + rows, rows < n
    step = tl.cast(tl.num_programs(0), tl.int64) * n  # number of rows of `split_lse` for one split
    maximum = tl.full((ROWS,), float("-inf"), tl.float64)
    if arrays.sinks is not None:
        maximum = tl.zeros((ROWS,), tl.float64) + tl.load(arrays.sinks + head_index % H) * tile_ops.LOG2_E
    sink = maximum
    for split in tl.range(num_splits, loop_unroll_factor=UNROLL_FACTOR):
        power = tl.load(arrays.split_lse + split * step + at, mask=inside, other=float("-inf"))
        maximum = tl.maximum(maximum, power)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.exp2(sink - shift)
    output = tl.zeros((ROWS, meta.padded_d_v), meta.accumulator)
    for split in tl.range(num_splits, loop_unroll_factor=UNROLL_FACTOR):
        power = tl.load(arrays.split_lse + split * step + at, mask=inside, other=float("-inf"))
        weight = tl.exp2((power - shift).to(meta.accumulator))  # exact enough, and float64 exp2 has branches
        total += weight.to(tl.float64)
        pointers = arrays.split_output + (split * step + at)[:, None] * meta.d_v + column
        share = tl.load(pointers, mask=inside[:, None] & (column < meta.d_v), other=0.0)
        output += weight[:, None] * share
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), dropout_scale)
    if tile_ops.has_nan(output) != 0:
        state = compute_block(args, head_index, 0, 0, formulas, 0, True, meta)
        store(state, args, head_index, 0, args.unit, meta.rows, meta)
    else:
        high = total.to(meta.accumulator)
        merged = SoftmaxState(output, high, (total - high.to(tl.float64)).to(meta.accumulator), maximum, (), ())
        store(merged, args, head_index, 0, 1.0, ROWS, meta)
