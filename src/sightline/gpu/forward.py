"""The forward kernel: FlashAttention's running softmax over the runs of a block of queries.

    S  = Q Kᵀ, score, mask        m' = max(m, max S),  α = e^(m − m')        P = e^(S − m')
    l  = α l + Σ P                O  = α O + P V                              at the end O / l

(Dao, "FlashAttention-2", 2023, algorithm 1.) e^x is 2^(x · unit). Full tiles come first, without mask and bounds, then
the partial ones. One program is one block of queries of a head; its sums run in the order of its runs.

What a mask hides reaches nothing, NaN and ∞ in V included: the kernel marks blocks whose output is NaN, and `careful`,
launched after it, computes these once more with V made finite, and counts beside what weights other than 0 meet. Whole
inputs pay one look at their output, problems without mask, score and dropout none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import riding, tiles

__all__ = ["attend", "begin", "block_of_head", "careful", "forward", "hand_over", "has_nan", "with_marks"]

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def met(weights, value, marks, form: tl.constexpr):
    """`marks` and which of NaN (1), ∞ (2) and −∞ (4) in V the weights of a tile that are not 0 meet, (rows, lanes_v).

    One product counts all three: 128 keys at most of each, in digits of base 256, every sum exact.
    """
    signs = tl.where(value == float("inf"), 1.0, tl.where(value == float("-inf"), 256.0, 0.0))
    code = tl.where(value != value, 0.00390625, signs).to(value.dtype)
    seen = tl.where(weights == 0, 0.0, 1.0).to(value.dtype)
    counts = (tl.dot(seen, code, input_precision=form.precision) * 256).to(tl.int32)
    found = tl.where(counts % 256 != 0, 1, 0) + tl.where(counts // 256 % 256 != 0, 2, 0)
    return marks | (found + tl.where(counts // 65536 != 0, 4, 0))


@triton.jit
def over_run(
    state,
    first,
    last,
    block,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
    PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
    sums_at: tl.constexpr = None,
):
    """The softmax's state after the tiles `first` to before `last`."""
    output, total, lost, largest, marks, riders = state
    query, key, key_start, value, value_start, place, scale, unit, random, tables = block
    m = place[4]
    bound: tl.constexpr = PARTIAL and not form.even
    for tile in range(first, last):
        j0 = tile * form.keys
        k = tiles.keys_of(key_start, key, j0, form.keys, m, form.d_k, form.lanes_k, bound, form)
        products = tl.dot(query, k, input_precision=form.precision)
        s = tiles.scores(products, place, j0, scale, tables, mask_at, score_at, PARTIAL, form)
        highest = tl.max(s, 1)
        new = tl.maximum(largest, highest)
        shift = tl.where(new == float("-inf"), 0.0, new)
        moved = (largest - shift) * unit
        alpha = tl.exp2(moved)
        x = tiles.exponents(s, unit, shift)
        p = tl.exp2(x)
        sums = tl.sum(p, 1)
        old = total * alpha  # Knuth's sum: later passes over the weights take on the error of lse
        total = old + sums
        share = total - old
        lost = lost * alpha + ((old - (total - share)) + (sums - share))
        riders = riding.ride(
            riders, s, x, p, sums, highest, alpha, moved, j0, place, scale, tables, score_at, sums_at, form
        )
        if random is not None:
            p = tl.where(tiles.keep(random, place, j0, form.rows, form.keys), p, 0.0)
        v = tiles.rows_of(value_start, value, j0, form.keys, m, form.d_v, form.lanes_v, bound, form)
        p = p.to(v.dtype)
        if CAREFUL:
            marks = met(p, v, marks, form)
            v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
        output = tl.dot(p, v, output * alpha[:, None], input_precision=form.precision)
        largest = new
    return output, total, lost, largest, marks, riders


@triton.jit
def within(first, last, window):
    """The part of a run that lies in a window of tiles (first, past the last); all of it where there is none."""
    if window is not None:
        first, last = tl.maximum(first, window[0]), tl.minimum(last, window[1])
    return first, last


@triton.jit
def attend(
    state,
    schedule,
    row,
    window,
    block,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
    CAREFUL: tl.constexpr,
    sums_at: tl.constexpr = None,
):
    """The state after all runs of a block: those of its row of the schedule, or all keys where there is none."""
    if schedule is None:
        whole = block[5][4] // form.keys
        first, last = within(0, whole, window)
        state = over_run(state, first, last, block, mask_at, score_at, form, False, CAREFUL, sums_at)
        if not form.even:
            first, last = within(whole, whole + 1, window)
            state = over_run(state, first, last, block, mask_at, score_at, form, True, CAREFUL, sums_at)
    else:
        runs, at = schedule[1], schedule[0] + 3 * row
        start, middle, stop = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        for run in range(start, middle):
            first, last = within(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1), window)
            state = over_run(state, first, last, block, mask_at, score_at, form, False, CAREFUL, sums_at)
        for run in range(middle, stop):
            first, last = within(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1), window)
            state = over_run(state, first, last, block, mask_at, score_at, form, True, CAREFUL, sums_at)
    return state


@triton.jit
def begin(sink, CAREFUL: tl.constexpr, form: tl.constexpr, sums: tl.constexpr = 0):
    """The softmax's state before any key: (O, l, what rounding lost of l, m, marks, riders), m the sink's score or −∞.

    `sums` is how many further sums ride along, see `riding`.
    """
    output = tl.zeros((form.rows, form.lanes_v), form.total)
    marks = tl.zeros((form.rows, form.lanes_v if CAREFUL else 1), tl.int32)
    lost = tl.zeros((form.rows,), form.total)
    total, largest = lost, tl.full((form.rows,), float("-inf"), form.total)
    if sink is not None:
        total = lost + 1.0
        largest = lost + sink
    return output, total, lost, largest, marks, riding.begin(sums, form)


@triton.jit
def has_nan(block):
    """1 where a block has a NaN, else 0."""
    return tl.max(tl.max(tl.where(block == block, 0, 1), 1), 0)


@triton.jit
def with_marks(state):
    """The state, in O what weights met that is not finite: NaN, ∞ or −∞."""
    output, total, lost, largest, marks, riders = state
    both = (marks & 6) == 6
    signs = tl.where((marks & 2) != 0, float("inf"), tl.where((marks & 4) != 0, float("-inf"), 0.0))
    output += tl.where(((marks & 1) != 0) | both, float("nan"), signs)
    return output, total, lost, largest, marks, riders


@triton.jit
def hand_over(state, output, lse, position, first, n, unit, kept, form: tl.constexpr):
    """Write O / l and lse = m · unit · ln 2 + ln l of a head's queries from `first` on; 0 and −∞ where none is seen."""
    rows = first + tl.arange(0, form.rows)
    at, inside = tl.cast(position, tl.int64) * n + rows, rows < n
    found, total, lost, largest, _, _ = state
    nothing = total == 0
    safe = tl.where(nothing, 1.0, total)
    column = tl.arange(0, form.lanes_v)[None, :]
    rows = (found * (kept / safe)[:, None]).to(output.dtype.element_ty)
    place = output + at[:, None] * form.d_v + column
    tl.store(place, rows, mask=inside[:, None] & (column < form.d_v))
    base = tl.where(nothing, float("-inf"), largest).to(tl.float64) * tiles.number(unit, tl.float64)
    tl.store(lse + at, base * LN_2 + tl.log(safe.to(tl.float64) + lost.to(tl.float64)), mask=inside)


@triton.jit
def block_of_head(
    given,
    position,
    first,
    row,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
    CAREFUL: tl.constexpr,
    sums_at: tl.constexpr = None,
    sums: tl.constexpr = 0,
):
    """The softmax's final state of a head's queries from `first` on; `row` is their block's of the head's schedule.

    `given` is (query, key, value, n, m, H, group, sign, scale, unit, schedule, sinks, random, tables) of the kernel.
    """
    query, key, value, n, m, H, group, sign, scale, unit, schedule, sinks, random, tables = given
    b, h = position // H, position % H
    place = (b, h, tl.minimum(first + tl.arange(0, form.rows), n - 1)[:, None], n, m)
    q = tiles.rows_of(tiles.head_of(query, b, h), query, first, form.rows, n, form.d_k, form.lanes_k, True, form)
    q = (q * tiles.number(sign, form.total)).to(q.dtype)  # nothing is rounded
    starts = (tiles.head_of(key, b, h // group), tiles.head_of(value, b, h // group))
    numbers = (tiles.number(scale, form.total), tiles.number(unit, form.total))
    block = (q, key, starts[0], value, starts[1], place, numbers[0], numbers[1], random, tables)
    sink = None
    if sinks is not None:
        logit = tl.load(sinks + h) * LOG2_E / tiles.number(unit, tl.float64)
        sink = tl.where(logit > 0, tiles.bounded(logit, form), logit.to(form.total))
    if schedule is not None:
        row = b * schedule[2] + h * schedule[3] + row
    return attend(
        *(begin(sink, CAREFUL, form, sums), schedule, row, None, block),
        *(mask_at, score_at, form, CAREFUL, sums_at),
    )


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
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
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    sinks,
    random,
    kept: tl.float64,
    tables,
    seen,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    sums_at: tl.constexpr,
    form: tl.constexpr,
):
    """One block of queries of a head.

    Parameters
    ----------
    query, key, value : arrays, see `tiles`
    output, lse : (B, H, n, d_v) and float64 (B, H, n), contiguous
    tainted : int32, one for each program: whether its output has NaN; None where nothing is hidden
    blocks : of queries in a head; later ones first, since a causal mask makes those the longest
    sign, scale, unit : s = Q Kᵀ · sign · scale, and scores come to base 2 by · unit
    schedule : (rows, runs, rows to the next batch, to the next head), or None for all keys
    sinks : (H,) float64, or None
    random : of `Operands.random`; `kept` is the factor on what dropout keeps
    seen, sums_at : where riders go, and the formulas of the sums among them, see `riding`
    """
    item = tl.program_id(0)
    position, block = item // blocks, blocks - 1 - item % blocks
    first = block * form.rows
    given = (query, key, value, n, m, H, group, sign, scale, unit, schedule, sinks, random, tables)
    state = block_of_head(given, position, first, block, mask_at, score_at, form, False, sums_at, len(seen[3]))
    if tainted is not None:
        tl.store(tainted + item, has_nan(state[0]))
    hand_over(state, output, lse, position, first, n, unit, tiles.number(kept, form.total), form)
    riding.hand_over(state[5], state[1], seen, position, first, n, tiles.number(scale, form.total), score_at, form)


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "items"])
def careful(
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
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    form: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The blocks `forward` marked, in PARTS of form.rows queries each; a weight of 0 takes nothing, even of NaN."""
    given = (query, key, value, n, m, H, group, sign, scale, unit, schedule, sinks, random, tables)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if tl.load(tainted + item) != 0:
            position, block = item // blocks, blocks - 1 - item % blocks
            for part in range(PARTS):
                first = (block * PARTS + part) * form.rows
                state = block_of_head(given, position, first, block, mask_at, score_at, form, True)
                hand_over(
                    with_marks(state), output, lse, position, first, n, unit, tiles.number(kept, form.total), form
                )
