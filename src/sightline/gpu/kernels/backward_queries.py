"""dQ, and what tables gain: a program is a block of queries; see `backward`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..launch.launcher import twin
from . import tile_ops
from .backward import Given, Numbers, Pairs, not_finite, slopes_of, weights_of, write
from .tile_loop import Row, walk

__all__ = ["backward_queries"]


class Block(NamedTuple):
    """A block of queries, and the heads of keys and values it looks at."""

    query: Any
    d_output: Any
    inside: Any  # which rows are queries, (rows, 1)
    lse: Any  # (high, low), (rows, 1) each, and so δ
    delta: Any
    place: Any
    key: Any
    value: Any
    numbers: Any
    kept: Any
    random: Any
    sums: Any


@triton.jit
def queries_over_run(state, first, last, block, seams, HOW: tl.constexpr, form, PARTIAL: tl.constexpr):
    """dQ, the scale not in it, after the tiles of keys `first` to before `last`; HOW is (KINDS, CAREFUL)."""
    KINDS: tl.constexpr = HOW[0]
    CAREFUL: tl.constexpr = HOW[1]
    b, h, i, n, m = block.place
    bound: tl.constexpr = PARTIAL and not form.even
    for tile in range(first, last):
        j0 = tile * form.keys
        k = tile_ops.keys_of(block.key, j0, form.keys, m, form.d_k, form.lanes_k, bound, form)
        v = tile_ops.keys_of(block.value, j0, form.keys, m, form.d_v, form.lanes_v, bound, form)
        j = j0 + tl.arange(0, form.keys)[None, :]
        at = j
        if bound:
            at = tl.minimum(j, m - 1)
        pairs = Pairs(b, h, i, at, n, m)
        products = tl.dot(block.query, k, input_precision=form.precision)
        p, s = weights_of(products, pairs, (j < m) & block.inside, block.lse, block.numbers, seams, PARTIAL, CAREFUL)
        dp = tl.dot(block.d_output, v, input_precision=form.precision)
        if block.random is not None:
            dp = tl.where(tile_ops.keep(block.random, block.place, j0, form.rows, form.keys), dp * block.kept, 0.0)
        ds = slopes_of(
            *(p, dp, s, products, pairs, block.delta, block.numbers, block.sums, seams, KINDS, PARTIAL or CAREFUL),
        )
        if CAREFUL:
            k = tile_ops.finite(k)
        state = tl.dot(ds.to(k.dtype), tl.trans(k), state, input_precision=form.precision)
    return state


@triton.jit
def block_of_queries(given, b, h, first, row, seams, KINDS: tl.constexpr, CAREFUL: tl.constexpr, form):
    """dQ of a head's queries from `first` on; `row` is their block's of the head's schedule."""
    n, m, rows = given.n, given.m, given.rows
    i = first + tl.arange(0, form.rows)
    inside, at = i < n, (tl.cast(b, tl.int64) * given.H + h) * n + i
    high = tl.load(rows[0] + at, mask=inside, other=float("inf"))[:, None]  # past the end, so that P = 0
    low = tl.load(rows[1] + at, mask=inside, other=0.0)[:, None]
    scale, d_output = tile_ops.number(given.scale, form.total), tile_ops.head_of(given.d_output, b, h)
    block = Block(
        tile_ops.queries_of(given.query, b, h, first, n, given.sign, form),
        tile_ops.rows_of(d_output, first, form.rows, n, form.d_v, form.lanes_v, True, form),
        inside[:, None],
        (high, low),
        tl.load(rows[2] + at, mask=inside, other=0.0)[:, None],
        tile_ops.Place(b, h, tile_ops.column_of(first, n, form), n, m),
        tile_ops.head_of(given.key, b, h // given.group),
        tile_ops.head_of(given.value, b, h // given.group),
        Numbers(scale, tile_ops.number(given.unit, form.total), given.tables),
        tile_ops.number(given.kept, form.total),
        given.random,
        given.sums,
    )
    HOW: tl.constexpr = (KINDS, CAREFUL)
    row, none = Row(given.schedule, b, h, row, m, None, False), tl.zeros((form.rows, form.lanes_k), form.total)
    dq = walk(none, queries_over_run, row, form.keys, form.even, block, seams, HOW, form)
    return dq * (scale * tile_ops.number(given.sign, form.total))


@triton.jit(
    do_not_specialize=["n", "m", "H", "group", "blocks", "items", "B", "batches", "heads"],
    repr=twin("backward_queries", "careful_queries"),
)
def backward_queries(
    query,
    key,
    value,
    d_output,
    rows,
    d_query,
    tainted,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    items: tl.int32,
    B: tl.int32,
    batches: tl.int32,
    heads: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    random,
    kept: tl.float64,
    tables,
    sums,
    seams,
    form: tl.constexpr,
    KINDS: tl.constexpr,
    TURNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """dQ of a block of queries of a head, and what tables gain; with PARTS the blocks marked, each in so many parts.

    Parameters
    ----------
    query, key, value, d_output : arrays, see `tiles`
    rows : of `prepare`
    d_query : (B, H, n, d_k), contiguous
    tainted : int32, one for each block: whether its dQ is not finite
    batches, heads : how many of each are worked on apart; with TURNS, one program takes the others in turn, since an
        entry of a table that has one for each pair belongs to the program of the pair
    schedule, random, kept : as in `forward`
    sums, KINDS : see `gains`
    """
    given = Given(
        *(query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables, sums)
    )
    if PARTS != 0:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(tainted + item) != 0:
                place, block = item // blocks, item % blocks
                for part in range(PARTS):
                    first = (block * PARTS + part) * form.rows
                    dq = block_of_queries(given, place // H, place % H, first, block, seams, KINDS, True, form)
                    write(dq, d_query, place, first, n, form.d_k, form.rows, form.lanes_k)
    elif TURNS:
        place, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
        for b in range(place // heads, B, batches):
            for h in range(place % heads, H, heads):
                dq = block_of_queries(given, b, h, block * form.rows, block, seams, KINDS, False, form)
                tl.store(tainted + (b * H + h) * blocks + block, not_finite(dq))
                write(dq, d_query, b * H + h, block * form.rows, n, form.d_k, form.rows, form.lanes_k)
                tl.debug_barrier()  # the next one's threads read the sums that these have written
    else:
        place, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
        dq = block_of_queries(given, place // H, place % H, block * form.rows, block, seams, KINDS, False, form)
        tl.store(tainted + place * blocks + block, not_finite(dq))
        write(dq, d_query, place, block * form.rows, n, form.d_k, form.rows, form.lanes_k)
