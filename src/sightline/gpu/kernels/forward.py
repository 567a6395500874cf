"""The forward kernel: FlashAttention's running softmax over the tiles that a block of queries visits.

    S  = Q Kᵀ, score, mask        m' = max(m, max S),  α = e^(m − m')        P = e^(S − m')
    l  = α l + Σ P                O  = α O + P V                              the output is O / l at the end

(Dao, "FlashAttention-2", 2023, algorithm 1.) e^x is computed as a power of 2. Full tiles come first, for which mask and
bounds are not checked, then partial tiles. One program computes one block of queries of a head, and visits tiles in the
order of the block's schedule row.

NaN and ∞ in V at a weight of 0 do not reach the output. The kernel flags the blocks whose output has NaN. The NaN-safe
variant, launched next, recomputes the flagged blocks: it replaces NaN and ∞ in V by 0, and records where NaN, ∞ or −∞
meets a weight other than 0. Finite inputs cost one check of the output, and one kernel launch that finds no flag. A
launch costs more than the work of a small problem: there, one launch computes every block NaN-safe.

Without mask, score formula and dropout, a weight is 0 where Q · K is −∞ or far below the running maximum. In one case,
NaN and ∞ at a weight of 0 do reach the output: the weight becomes 0 only when a later tile has a larger score. The
row of V of this weight was added before that tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import fused_statistics, tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles


class SoftmaxState(NamedTuple):
    """The running softmax of a block of queries."""

    output: Any  # Σ P V, not yet divided by l
    total: Any  # l = Σ P
    compensation: Any  # Σ of the rounding errors of l
    maximum: Any  # m, the running maximum
    nonfinite: Any  # the bits of `classify_nonfinite`
    fused_state: Any  # the state of `fused_statistics`


@triton.jit
def classify_nonfinite(weights, value, nonfinite, meta):
    """Return `nonfinite`, (rows, padded_d_v), with the bits set that a tile adds: 1 for NaN, 2 for ∞, 4 for −∞.

    Entry [r, c] gets a bit if a weight of query r other than 0 multiplies such an entry of column c of V. One matrix
    product counts all three kinds as digits of base 256, exactly: a tile has at most 128 keys. `weights` must not be
    rounded to the dtype of V, since float16 would round weights below 2⁻²⁵ to 0.
    """
    signs = tl.where(value == float("inf"), 1.0, tl.where(value == float("-inf"), 256.0, 0.0))
    code = tl.where(value != value, 0.00390625, signs).to(value.dtype)
    seen = tl.where(weights == 0, 0.0, 1.0).to(value.dtype)
    counts = (tl.dot(seen, code, input_precision=meta.precision) * 256).to(tl.int32)
    bits = tl.where(counts % 256 != 0, 1, 0) + tl.where(counts // 256 % 256 != 0, 2, 0)
    return nonfinite | (bits + tl.where(counts // 65536 != 0, 4, 0))


@triton.jit
def decode_nonfinite(nonfinite):
    """Return the sum of what the bits of `classify_nonfinite` stand for: NaN, ∞, −∞, or 0 if no bit is set."""
    signs = tl.where((nonfinite & 2) != 0, float("inf"), tl.where((nonfinite & 4) != 0, float("-inf"), 0.0))
    return tl.where(((nonfinite & 1) != 0) | ((nonfinite & 6) == 6), float("nan"), signs)


@triton.jit
def process_range(state, first, last, block, formulas, NAN_SAFE: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state after the tiles of keys `first` ... `last` − 1."""
    output, total, compensation, maximum, nonfinite, fused = state
    m = block.location.m
    bound: tl.constexpr = PARTIAL and not meta.even
    for tile in range(first, last):
        j0 = tile * meta.keys
        k = tile_ops.load_transposed(block.key, j0, meta.keys, m, meta.d_k, meta.padded_d_k, bound, meta)
        products = tl.dot(block.query, k, input_precision=meta.precision)
        j = j0 + tl.arange(0, meta.keys)[None, :]
        s = tile_ops.compute_scores(products, block.location, j, block.scale, block.tables, formulas, PARTIAL, meta)
        tile_max = tl.max(s, 1)
        x, p, sums, log2_alpha, alpha, maximum, total, compensation = tile_ops.update_softmax(
            s, tile_max, maximum, total, compensation, block.unit
        )
        step = (x, p, sums, tile_max, alpha, log2_alpha)
        fused = fused_statistics.update(fused, s, step, j, block, formulas, meta)
        if len(block.dropout_state) > 0:
            p = tl.where(tile_ops.dropout_mask(block.dropout_state, block.location, j0, meta.rows, meta.keys), p, 0.0)
        v = tile_ops.load_rows(block.value, j0, meta.keys, m, meta.d_v, meta.padded_d_v, bound, meta)
        if NAN_SAFE:
            nonfinite = classify_nonfinite(p, v, nonfinite, meta)
            v = tile_ops.zero_nonfinite(v)
        output = tl.dot(p.to(v.dtype), v, output * alpha[:, None], input_precision=meta.precision)
    return SoftmaxState(output, total, compensation, maximum, nonfinite, fused)


@triton.jit
def init(sink, SUMS: tl.constexpr, NAN_SAFE: tl.constexpr, meta):
    """Return the state before any key is processed: its running maximum is the sink, or −∞ without a sink.

    SUMS is the number of sums Σ P f that `fused_statistics` computes.
    """
    output = tl.zeros((meta.rows, meta.padded_d_v), meta.accumulator)
    nonfinite = tl.zeros((meta.rows, meta.padded_d_v if NAN_SAFE else 1), tl.int32)
    compensation = tl.zeros((meta.rows,), meta.accumulator)
    total, maximum = compensation, tl.full((meta.rows,), float("-inf"), meta.accumulator)
    if sink is not None:
        total = compensation + 1.0
        maximum = compensation + sink
    return SoftmaxState(output, total, compensation, maximum, nonfinite, fused_statistics.init(SUMS, meta))


@triton.jit
def store(state, args, head_index, first, unit, ROWS: tl.constexpr, meta):
    """Write O / l and lse of the block of ROWS queries that begins at query `first` of a head.

    `unit` times the running maximum is an exponent of 2. For a query without a visible key O / l is 0, and lse is the
    sink, or −∞ without a sink.
    """
    n, output = args.n, args.arrays.output
    dropout_scale = tile_ops.scalar(args.dropout_scale, meta.accumulator)
    i = first + tl.arange(0, ROWS)
    at, inside = tl.cast(head_index, tl.int64) * n + i, i < n
    safe = tl.where(state.total == 0, 1.0, state.total)
    column = tl.arange(0, meta.padded_d_v)[None, :]
    block = (state.output * (dropout_scale / safe)[:, None]).to(output.dtype.element_ty)
    tl.store(output + at[:, None] * meta.d_v + column, block, mask=inside[:, None] & (column < meta.d_v))
    unit = tile_ops.scalar(unit, tl.float64)
    h = head_index % args.H
    lse = tile_ops.compute_lse(state.maximum, state.total, state.compensation, args.arrays.sinks, h, unit)
    tl.store(args.arrays.lse + at, lse, mask=inside)


@triton.jit
def compute_block(args, head_index, first, row, formulas, SUMS: tl.constexpr, NAN_SAFE: tl.constexpr, meta):
    """Return the final state of the block of queries that begins at query `first` of a head.

    `head_index` is b · H + h, and `row` is the index of the block in the head's part of the schedule.
    """
    b, h = head_index // args.H, head_index % args.H
    block, sink = tile_ops.load_query_block(args, b, h, first, meta), None
    if args.arrays.sinks is not None:
        logit = tl.load(args.arrays.sinks + h) * tile_ops.LOG2_E / tile_ops.scalar(args.unit, tl.float64)
        sink = tl.where(logit > 0, tile_ops.clamp_finite(logit, meta), logit.to(meta.accumulator))
    state = init(sink, SUMS, NAN_SAFE, meta)
    row = ScheduleRow(args.arrays.schedule, b, h, row, args.m, None, False)
    state = loop_over_tiles(state, process_range, row, meta.keys, meta.even, block, formulas, NAN_SAFE, meta)
    if NAN_SAFE:
        output, total, compensation, maximum, nonfinite, fused_state = state
        state = SoftmaxState(output + decode_nonfinite(nonfinite), total, compensation, maximum, nonfinite, fused_state)
    return state


@triton.jit(
    do_not_specialize=["n", "m", "H", "group", "blocks", "items"],
    repr=tile_ops.name_variants("forward", "forward_nan_safe"),
)
def forward(
    arrays, n, m, H, group, blocks, items, scale: tl.float64, dropout_scale: tl.float64, formulas, meta: tl.constexpr
):
    """Compute attention for one block of queries of a head.

    If `meta.subblocks` is not 0, the kernel is its NaN-safe variant: each program recomputes some of the flagged
    blocks, and divides a flagged block into `meta.subblocks` blocks of `meta.rows` queries. If `arrays.nonfinite_flags`
    is None, NaN-safe code computes every block.

    Parameters
    ----------
    arrays : `tile_ops.KernelArrays`
    blocks : number of blocks of queries in a head
        The last blocks of a head run first, since a causal mask gives them the most tiles.
    items : number of blocks of all heads
    scale : the size of the problem's scale, or 1 if that is 0; see `MetaParameters.sign`
    dropout_scale : see `GpuOperands.dropout_scale`
    """
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), dropout_scale)
    flags, seen = arrays.nonfinite_flags, arrays.seen
    if meta.subblocks == 0:
        item = tl.program_id(0)
        head_index, block = item // blocks, blocks - 1 - item % blocks
        first = block * meta.rows
        state = compute_block(args, head_index, first, block, formulas, len(seen[3]), flags is None, meta)
        if flags is not None:
            tl.store(flags + item, tile_ops.has_nan(state.output))
        store(state, args, head_index, first, args.unit, meta.rows, meta)
        scale = tile_ops.scalar(args.scale, meta.accumulator)
        fused_statistics.store(state, seen, head_index, first, n, scale, formulas, meta)
    else:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(flags + item) != 0:
                head_index, block = item // blocks, blocks - 1 - item % blocks
                for subblock in range(meta.subblocks):
                    first = (block * meta.subblocks + subblock) * meta.rows
                    state = compute_block(args, head_index, first, block, formulas, 0, True, meta)
                    store(state, args, head_index, first, args.unit, meta.rows, meta)
