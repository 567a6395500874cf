"""The forward kernel: FlashAttention's running softmax over the runs of a block of queries.

    S  = Q Kᵀ, score, mask        m' = max(m, max S),  α = e^(m − m')        P = e^(S − m')
    l  = α l + Σ P                O  = α O + P V                              at the end O / l

(Dao, "FlashAttention-2", 2023, algorithm 1.) e^x is 2^(x · unit). Full tiles come first, without mask and bounds, then
the partial ones. One program is one block of queries of a head; its sums run in the order of its runs.

What a weight of 0 meets reaches nothing, NaN and ∞ in V included: the kernel marks blocks whose output is NaN. Launched
again, as `careful`, it computes these once more with V made finite, and counts beside what weights other than 0 meet.
Whole inputs pay one look at their output, and a launch that finds no mark. Without mask, score and dropout a weight is
0 where Q · K is −∞, or far below the largest so far; one that a larger score of a later tile makes 0 keeps what it met.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..launch.launcher import name_variants
from . import fused_statistics, tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles

__all__ = [
    "Block",
    "KernelArguments",
    "State",
    "classify_nonfinite",
    "compute_block",
    "decode_nonfinite",
    "forward",
    "has_nan",
    "init",
    "store",
]


class KernelArguments(NamedTuple):
    """The arguments of a kernel that say what a head's queries attend to; see `forward`."""

    query: Any
    key: Any
    value: Any
    n: Any
    m: Any
    H: Any
    group: Any
    sign: Any
    scale: Any
    unit: Any
    schedule: Any
    sinks: Any
    dropout_state: Any
    tables: Any


class Block(NamedTuple):
    """A block of queries and the heads of keys and values it attends to."""

    query: Any
    key: Any
    value: Any
    location: Any
    scale: Any
    unit: Any
    dropout_state: Any
    tables: Any


class State(NamedTuple):
    """The running softmax of a block's rows."""

    output: Any  # Σ P V, not yet divided
    total: Any  # l = Σ P
    compensation: Any  # what rounding lost of it
    largest: Any  # m, the shift of P
    nonfinite_marks: Any  # see `classify_nonfinite`
    fused_state: Any  # see `riding`


@triton.jit
def classify_nonfinite(weights, value, nonfinite_marks, meta):
    """`nonfinite_marks` and which of NaN (1), ∞ (2) and −∞ (4) in V the weights of a tile that are not 0 meet, (rows, lanes_v).

    One product counts all three: 128 keys at most of each, in digits of base 256, every sum exact. Weights come as they
    are before they are rounded to V's dtype: of float16's, those under 2⁻²⁵ would be 0.
    """
    signs = tl.where(value == float("inf"), 1.0, tl.where(value == float("-inf"), 256.0, 0.0))
    code = tl.where(value != value, 0.00390625, signs).to(value.dtype)
    seen = tl.where(weights == 0, 0.0, 1.0).to(value.dtype)
    counts = (tl.dot(seen, code, input_precision=meta.precision) * 256).to(tl.int32)
    found = tl.where(counts % 256 != 0, 1, 0) + tl.where(counts // 256 % 256 != 0, 2, 0)
    return nonfinite_marks | (found + tl.where(counts // 65536 != 0, 4, 0))


@triton.jit
def decode_nonfinite(nonfinite_marks):
    """What `classify_nonfinite` of them stands for: NaN, ∞, −∞ or 0."""
    signs = tl.where((nonfinite_marks & 2) != 0, float("inf"), tl.where((nonfinite_marks & 4) != 0, float("-inf"), 0.0))
    return tl.where(((nonfinite_marks & 1) != 0) | ((nonfinite_marks & 6) == 6), float("nan"), signs)


@triton.jit
def process_range(state, first, last, block, formulas, NAN_SAFE: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """The softmax's state after the tiles `first` to before `last`."""
    output, total, compensation, largest, nonfinite_marks, fused_state = state
    m, unit = block.location.m, block.unit
    bound: tl.constexpr = PARTIAL and not meta.even
    for tile in range(first, last):
        j0 = tile * meta.keys
        k = tile_ops.load_rows_transposed(block.key, j0, meta.keys, m, meta.d_k, meta.padded_d_k, bound, meta)
        products = tl.dot(block.query, k, input_precision=meta.precision)
        s = tile_ops.compute_scores(products, block.location, j0, block.scale, block.tables, formulas, PARTIAL, meta)
        highest = tl.max(s, 1)
        new = tl.maximum(largest, highest)
        shift = tl.where(new == float("-inf"), 0.0, new)
        log2_alpha = (largest - shift) * unit
        alpha = tl.exp2(log2_alpha)
        x = tile_ops.shifted_exponents(s, unit, shift)
        p = tl.exp2(x)
        sums = tl.sum(p, 1)
        old = total * alpha  # Knuth's sum: later passes over the weights take on the error of lse
        total = old + sums
        share = total - old
        compensation = compensation * alpha + ((old - (total - share)) + (sums - share))
        fused_state = fused_statistics.update(
            fused_state, s, x, p, sums, highest, alpha, log2_alpha, j0, block, formulas, meta
        )
        if block.dropout_state is not None:
            p = tl.where(tile_ops.dropout_mask(block.dropout_state, block.location, j0, meta.rows, meta.keys), p, 0.0)
        v = tile_ops.load_rows(block.value, j0, meta.keys, m, meta.d_v, meta.padded_d_v, bound, meta)
        if NAN_SAFE:
            nonfinite_marks = classify_nonfinite(p, v, nonfinite_marks, meta)
            v = tile_ops.zero_nonfinite(v)
        output = tl.dot(p.to(v.dtype), v, output * alpha[:, None], input_precision=meta.precision)
        largest = new
    return State(output, total, compensation, largest, nonfinite_marks, fused_state)


@triton.jit
def init(sink, SUMS: tl.constexpr, NAN_SAFE: tl.constexpr, meta):
    """The softmax's state before any key: its largest score is the sink's, or −∞.

    SUMS is how many further sums ride along, see `riding`.
    """
    output = tl.zeros((meta.rows, meta.padded_d_v), meta.accumulator)
    nonfinite_marks = tl.zeros((meta.rows, meta.padded_d_v if NAN_SAFE else 1), tl.int32)
    compensation = tl.zeros((meta.rows,), meta.accumulator)
    total, largest = compensation, tl.full((meta.rows,), float("-inf"), meta.accumulator)
    if sink is not None:
        total = compensation + 1.0
        largest = compensation + sink
    return State(output, total, compensation, largest, nonfinite_marks, fused_statistics.init(SUMS, meta))


@triton.jit
def has_nan(block):
    """1 where a block has a NaN, else 0."""
    return tl.max(tl.max(tl.where(block == block, 0, 1), 1), 0)


@triton.jit
def store(state, output, lse, sinks, position, first, n, H, unit, dropout_scale, meta):
    """Write O / l and lse = m · unit · ln 2 + ln l of a head's queries from `first` on; 0 and −∞ where none is seen."""
    rows = first + tl.arange(0, meta.rows)
    at, inside = tl.cast(position, tl.int64) * n + rows, rows < n
    nothing = state.total == 0
    safe = tl.where(nothing, 1.0, state.total)
    column = tl.arange(0, meta.padded_d_v)[None, :]
    rows = (state.output * (dropout_scale / safe)[:, None]).to(output.dtype.element_ty)
    location = output + at[:, None] * meta.d_v + column
    tl.store(location, rows, mask=inside[:, None] & (column < meta.d_v))
    base = tl.where(nothing, float("-inf"), state.largest).to(tl.float64) * tile_ops.scalar(unit, tl.float64)
    found = base * tile_ops.LN_2 + tl.log(safe.to(tl.float64) + state.compensation.to(tl.float64))
    if sinks is not None:  # one beyond the largest score was taken for the largest
        sink = tl.load(sinks + position % H)
        found = tl.where(found < sink, sink, found)
    tl.store(lse + at, found, mask=inside)


@triton.jit
def compute_block(arguments, position, first, row, formulas, SUMS: tl.constexpr, NAN_SAFE: tl.constexpr, meta):
    """The softmax's final state of a head's queries from `first` on; `row` is their block's of the head's schedule."""
    b, h, n, m = position // arguments.H, position % arguments.H, arguments.n, arguments.m
    block = Block(
        tile_ops.load_queries(arguments.query, b, h, first, n, arguments.sign, meta),
        tile_ops.locate_head(arguments.key, b, h // arguments.group),
        tile_ops.locate_head(arguments.value, b, h // arguments.group),
        tile_ops.BlockLocation(b, h, tile_ops.query_indices(first, n, meta), n, m),
        tile_ops.scalar(arguments.scale, meta.accumulator),
        tile_ops.scalar(arguments.unit, meta.accumulator),
        arguments.dropout_state,
        arguments.tables,
    )
    sink = None
    if arguments.sinks is not None:
        logit = tl.load(arguments.sinks + h) * tile_ops.LOG2_E / tile_ops.scalar(arguments.unit, tl.float64)
        sink = tl.where(logit > 0, tile_ops.clamp_finite(logit, meta), logit.to(meta.accumulator))
    state = init(sink, SUMS, NAN_SAFE, meta)
    row = ScheduleRow(arguments.schedule, b, h, row, m, None, False)
    state = loop_over_tiles(state, process_range, row, meta.keys, meta.even, block, formulas, NAN_SAFE, meta)
    if NAN_SAFE:
        output, total, compensation, largest, nonfinite_marks, fused_state = state
        state = State(
            output + decode_nonfinite(nonfinite_marks), total, compensation, largest, nonfinite_marks, fused_state
        )
    return state


@triton.jit(
    do_not_specialize=["n", "m", "H", "group", "blocks", "items"], repr=name_variants("forward", "forward_nan_safe")
)
def forward(
    query,
    key,
    value,
    output,
    lse,
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
    sinks,
    dropout_state,
    dropout_scale: tl.float64,
    tables,
    seen,
    formulas,
    meta: tl.constexpr,
    SUBBLOCKS: tl.constexpr,
):
    """One block of queries of a head; with PARTS the blocks marked as tainted, each in so many parts, carefully.

    Parameters
    ----------
    query, key, value : arrays, see `tiles`
    output, lse : (B, H, n, d_v) and float64 (B, H, n), contiguous
    tainted : int32, one for each block: whether its output has NaN
    blocks : of queries in a head; later ones first, since a causal mask makes those the longest
    items : blocks of all heads
    sign, scale, unit : s = Q Kᵀ · sign · scale, and scores come to base 2 by · unit
    schedule : a `runs.Schedule`, or None for all keys
    sinks : (H,) float64, or None
    random : of `Operands.dropout_state`; `dropout_scale` is the factor on what dropout keeps
    seen : where riders go, see `riding`
    """
    arguments = KernelArguments(
        query, key, value, n, m, H, group, sign, scale, unit, schedule, sinks, dropout_state, tables
    )
    factor = tile_ops.scalar(dropout_scale, meta.accumulator)
    if SUBBLOCKS == 0:
        item = tl.program_id(0)
        position, block = item // blocks, blocks - 1 - item % blocks
        first = block * meta.rows
        state = compute_block(arguments, position, first, block, formulas, len(seen[3]), False, meta)
        tl.store(nonfinite_flags + item, has_nan(state.output))
        store(state, output, lse, sinks, position, first, n, H, unit, factor, meta)
        fused_statistics.store(
            state, seen, position, first, n, tile_ops.scalar(scale, meta.accumulator), formulas, meta
        )
    else:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(nonfinite_flags + item) != 0:
                position, block = item // blocks, blocks - 1 - item % blocks
                for subblock in range(SUBBLOCKS):
                    first = (block * SUBBLOCKS + subblock) * meta.rows
                    state = compute_block(arguments, position, first, block, formulas, 0, True, meta)
                    store(state, output, lse, sinks, position, first, n, H, unit, factor, meta)
