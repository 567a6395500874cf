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

from ..launch.launcher import twin
from . import fused_statistics, tile_ops
from .tile_loop import Row, walk

__all__ = ["Block", "Given", "State", "begin", "block_of_head", "forward", "hand_over", "has_nan", "met", "of_marks"]


class Given(NamedTuple):
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
    random: Any
    tables: Any


class Block(NamedTuple):
    """A block of queries and the heads of keys and values it attends to."""

    query: Any
    key: Any
    value: Any
    place: Any
    scale: Any
    unit: Any
    random: Any
    tables: Any


class State(NamedTuple):
    """The running softmax of a block's rows."""

    output: Any  # Σ P V, not yet divided
    total: Any  # l = Σ P
    lost: Any  # what rounding lost of it
    largest: Any  # m, the shift of P
    marks: Any  # see `met`
    riders: Any  # see `riding`


@triton.jit
def met(weights, value, marks, form):
    """`marks` and which of NaN (1), ∞ (2) and −∞ (4) in V the weights of a tile that are not 0 meet, (rows, lanes_v).

    One product counts all three: 128 keys at most of each, in digits of base 256, every sum exact. Weights come as they
    are before they are rounded to V's dtype: of float16's, those under 2⁻²⁵ would be 0.
    """
    signs = tl.where(value == float("inf"), 1.0, tl.where(value == float("-inf"), 256.0, 0.0))
    code = tl.where(value != value, 0.00390625, signs).to(value.dtype)
    seen = tl.where(weights == 0, 0.0, 1.0).to(value.dtype)
    counts = (tl.dot(seen, code, input_precision=form.precision) * 256).to(tl.int32)
    found = tl.where(counts % 256 != 0, 1, 0) + tl.where(counts // 256 % 256 != 0, 2, 0)
    return marks | (found + tl.where(counts // 65536 != 0, 4, 0))


@triton.jit
def of_marks(marks):
    """What `met` of them stands for: NaN, ∞, −∞ or 0."""
    signs = tl.where((marks & 2) != 0, float("inf"), tl.where((marks & 4) != 0, float("-inf"), 0.0))
    return tl.where(((marks & 1) != 0) | ((marks & 6) == 6), float("nan"), signs)


@triton.jit
def over_run(state, first, last, block, seams, CAREFUL: tl.constexpr, form, PARTIAL: tl.constexpr):
    """The softmax's state after the tiles `first` to before `last`."""
    output, total, lost, largest, marks, riders = state
    m, unit = block.place.m, block.unit
    bound: tl.constexpr = PARTIAL and not form.even
    for tile in range(first, last):
        j0 = tile * form.keys
        k = tile_ops.keys_of(block.key, j0, form.keys, m, form.d_k, form.lanes_k, bound, form)
        products = tl.dot(block.query, k, input_precision=form.precision)
        s = tile_ops.scores(products, block.place, j0, block.scale, block.tables, seams, PARTIAL, form)
        highest = tl.max(s, 1)
        new = tl.maximum(largest, highest)
        shift = tl.where(new == float("-inf"), 0.0, new)
        moved = (largest - shift) * unit
        alpha = tl.exp2(moved)
        x = tile_ops.exponents(s, unit, shift)
        p = tl.exp2(x)
        sums = tl.sum(p, 1)
        old = total * alpha  # Knuth's sum: later passes over the weights take on the error of lse
        total = old + sums
        share = total - old
        lost = lost * alpha + ((old - (total - share)) + (sums - share))
        riders = fused_statistics.ride(riders, s, x, p, sums, highest, alpha, moved, j0, block, seams, form)
        if block.random is not None:
            p = tl.where(tile_ops.keep(block.random, block.place, j0, form.rows, form.keys), p, 0.0)
        v = tile_ops.rows_of(block.value, j0, form.keys, m, form.d_v, form.lanes_v, bound, form)
        if CAREFUL:
            marks = met(p, v, marks, form)
            v = tile_ops.finite(v)
        output = tl.dot(p.to(v.dtype), v, output * alpha[:, None], input_precision=form.precision)
        largest = new
    return State(output, total, lost, largest, marks, riders)


@triton.jit
def begin(sink, SUMS: tl.constexpr, CAREFUL: tl.constexpr, form):
    """The softmax's state before any key: its largest score is the sink's, or −∞.

    SUMS is how many further sums ride along, see `riding`.
    """
    output = tl.zeros((form.rows, form.lanes_v), form.total)
    marks = tl.zeros((form.rows, form.lanes_v if CAREFUL else 1), tl.int32)
    lost = tl.zeros((form.rows,), form.total)
    total, largest = lost, tl.full((form.rows,), float("-inf"), form.total)
    if sink is not None:
        total = lost + 1.0
        largest = lost + sink
    return State(output, total, lost, largest, marks, fused_statistics.begin(SUMS, form))


@triton.jit
def has_nan(block):
    """1 where a block has a NaN, else 0."""
    return tl.max(tl.max(tl.where(block == block, 0, 1), 1), 0)


@triton.jit
def hand_over(state, output, lse, sinks, position, first, n, H, unit, kept, form):
    """Write O / l and lse = m · unit · ln 2 + ln l of a head's queries from `first` on; 0 and −∞ where none is seen."""
    rows = first + tl.arange(0, form.rows)
    at, inside = tl.cast(position, tl.int64) * n + rows, rows < n
    nothing = state.total == 0
    safe = tl.where(nothing, 1.0, state.total)
    column = tl.arange(0, form.lanes_v)[None, :]
    rows = (state.output * (kept / safe)[:, None]).to(output.dtype.element_ty)
    place = output + at[:, None] * form.d_v + column
    tl.store(place, rows, mask=inside[:, None] & (column < form.d_v))
    base = tl.where(nothing, float("-inf"), state.largest).to(tl.float64) * tile_ops.number(unit, tl.float64)
    found = base * tile_ops.LN_2 + tl.log(safe.to(tl.float64) + state.lost.to(tl.float64))
    if sinks is not None:  # one beyond the largest score was taken for the largest
        sink = tl.load(sinks + position % H)
        found = tl.where(found < sink, sink, found)
    tl.store(lse + at, found, mask=inside)


@triton.jit
def block_of_head(given, position, first, row, seams, SUMS: tl.constexpr, CAREFUL: tl.constexpr, form):
    """The softmax's final state of a head's queries from `first` on; `row` is their block's of the head's schedule."""
    b, h, n, m = position // given.H, position % given.H, given.n, given.m
    block = Block(
        tile_ops.queries_of(given.query, b, h, first, n, given.sign, form),
        tile_ops.head_of(given.key, b, h // given.group),
        tile_ops.head_of(given.value, b, h // given.group),
        tile_ops.Place(b, h, tile_ops.column_of(first, n, form), n, m),
        tile_ops.number(given.scale, form.total),
        tile_ops.number(given.unit, form.total),
        given.random,
        given.tables,
    )
    sink = None
    if given.sinks is not None:
        logit = tl.load(given.sinks + h) * tile_ops.LOG2_E / tile_ops.number(given.unit, tl.float64)
        sink = tl.where(logit > 0, tile_ops.bounded(logit, form), logit.to(form.total))
    state = begin(sink, SUMS, CAREFUL, form)
    row = Row(given.schedule, b, h, row, m, None, False)
    state = walk(state, over_run, row, form.keys, form.even, block, seams, CAREFUL, form)
    if CAREFUL:
        output, total, lost, largest, marks, riders = state
        state = State(output + of_marks(marks), total, lost, largest, marks, riders)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "items"], repr=twin("forward", "careful"))
def forward(
    query,
    key,
    value,
    output,
    lse,
    tainted,
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
    random,
    kept: tl.float64,
    tables,
    seen,
    seams,
    form: tl.constexpr,
    PARTS: tl.constexpr,
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
    random : of `Operands.random`; `kept` is the factor on what dropout keeps
    seen : where riders go, see `riding`
    """
    given = Given(query, key, value, n, m, H, group, sign, scale, unit, schedule, sinks, random, tables)
    factor = tile_ops.number(kept, form.total)
    if PARTS == 0:
        item = tl.program_id(0)
        position, block = item // blocks, blocks - 1 - item % blocks
        first = block * form.rows
        state = block_of_head(given, position, first, block, seams, len(seen[3]), False, form)
        tl.store(tainted + item, has_nan(state.output))
        hand_over(state, output, lse, sinks, position, first, n, H, unit, factor, form)
        fused_statistics.hand_over(state, seen, position, first, n, tile_ops.number(scale, form.total), seams, form)
    else:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(tainted + item) != 0:
                position, block = item // blocks, blocks - 1 - item % blocks
                for part in range(PARTS):
                    first = (block * PARTS + part) * form.rows
                    state = block_of_head(given, position, first, block, seams, 0, True, form)
                    hand_over(state, output, lse, sinks, position, first, n, H, unit, factor, form)
