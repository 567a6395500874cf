"""dK and dV: a program is a block of keys; see `backward`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..launch.launcher import twin
from . import tile_ops
from .backward import Given, Numbers, Pairs, not_finite, slopes_of, weights_of, write
from .forward import met, of_marks
from .tile_loop import Row, walk

__all__ = ["backward_keys"]


class Block(NamedTuple):
    """A block of keys and values, from `first` on, and a head of queries that looks at them."""

    key: Any
    value: Any
    first: Any
    b: Any
    h: Any
    query: Any
    d_output: Any
    numbers: Any
    kept: Any
    given: Any


@triton.jit
def keys_over_run(state, first, last, block, seams, CAREFUL: tl.constexpr, form, PARTIAL: tl.constexpr):
    """(dK, the scale not in it, dV, marks) after the tiles of queries `first` to before `last` of a head."""
    dk, dv, marks = state
    b, h, j0, numbers = block.b, block.h, block.first, block.numbers
    n, m, rows, random = block.given.n, block.given.m, block.given.rows, block.given.random
    row = tl.arange(0, form.rows)
    j = (j0 + tl.arange(0, form.keys))[:, None]
    for tile in range(first, last):
        i0 = tile * form.rows
        i = i0 + row
        q = tile_ops.keys_of(block.query, i0, form.rows, n, form.d_k, form.lanes_k, PARTIAL, form)
        do = tile_ops.rows_of(block.d_output, i0, form.rows, n, form.d_v, form.lanes_v, PARTIAL, form)
        at = (tl.cast(b, tl.int64) * block.given.H + h) * n + i
        if PARTIAL:
            high = tl.load(rows[0] + at, mask=i < n, other=0.0)
            low = tl.load(rows[1] + at, mask=i < n, other=0.0)
            delta = tl.load(rows[2] + at, mask=i < n, other=0.0)
        else:
            high, low, delta = tl.load(rows[0] + at), tl.load(rows[1] + at), tl.load(rows[2] + at)
        pairs = Pairs(b, h, tl.minimum(i, n - 1)[None, :], tl.minimum(j, m - 1), n, m)
        lse = (high[None, :], low[None, :])
        products = tl.dot(block.key, q, input_precision=form.precision)
        p, s = weights_of(products, pairs, (j < m) & (i < n)[None, :], lse, numbers, seams, PARTIAL, CAREFUL)
        dp = tl.dot(block.value, tl.trans(do), input_precision=form.precision)
        dropped = p
        if random is not None:
            keep = tl.trans(tile_ops.keep(random, tile_ops.Place(b, h, i[:, None], n, m), j0, form.rows, form.keys))
            dropped, dp = tl.where(keep, p, 0.0), tl.where(keep, dp * block.kept, 0.0)
        if CAREFUL:
            marks = met(dropped, do, marks, form)
            do, q = tile_ops.finite(do), tile_ops.finite(q)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=form.precision)
        ds = slopes_of(
            *(p, dp, s, products, pairs, delta[None, :], numbers, None, seams, (), PARTIAL or CAREFUL),
        )
        dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=form.precision)
    return dk, dv, marks


@triton.jit
def block_of_keys(given, b, g, first, row, seams, CAREFUL: tl.constexpr, form):
    """(dK, dV) of a key head's keys from `first` on, over the query heads of its group in order."""
    n, m = given.n, given.m
    k = tile_ops.rows_of(tile_ops.head_of(given.key, b, g), first, form.keys, m, form.d_k, form.lanes_k, True, form)
    k = tile_ops.signed(k, given.sign, form)
    v = tile_ops.rows_of(tile_ops.head_of(given.value, b, g), first, form.keys, m, form.d_v, form.lanes_v, True, form)
    scale, kept = tile_ops.number(given.scale, form.total), tile_ops.number(given.kept, form.total)
    numbers = Numbers(scale, tile_ops.number(given.unit, form.total), given.tables)
    state = (
        tl.zeros((form.keys, form.lanes_k), form.total),
        tl.zeros((form.keys, form.lanes_v), form.total),
        tl.zeros((form.keys, form.lanes_v if CAREFUL else 1), tl.int32),
    )
    for h in range(g * given.group, (g + 1) * given.group):
        query, d_output = tile_ops.head_of(given.query, b, h), tile_ops.head_of(given.d_output, b, h)
        block = Block(k, v, first, b, h, query, d_output, numbers, kept, given)
        along = Row(given.schedule, b, h, row, n, None, first + form.keys > m)
        state = walk(state, keys_over_run, along, form.rows, False, block, seams, CAREFUL, form)
    dk, dv, marks = state
    dv *= kept
    if CAREFUL:
        dv += of_marks(marks)
    return dk * (scale * tile_ops.number(given.sign, form.total)), dv


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "items"], repr=twin("backward_keys", "careful_keys"))
def backward_keys(
    query,
    key,
    value,
    d_output,
    rows,
    d_key,
    d_value,
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
    random,
    kept: tl.float64,
    tables,
    seams,
    form: tl.constexpr,
    PARTS: tl.constexpr,
):
    """dK and dV of a block of keys of a key head; `schedule` has its runs of blocks of queries, for each query head.

    d_key and d_value are (B, G, m, d_k) and (B, G, m, d_v), contiguous; the rest is as in `backward_queries`. Earlier
    blocks come first, since a causal mask makes those the longest.
    """
    heads = H // group
    given = Given(
        *(query, key, value, d_output, rows, n, m, H, group, sign, scale, unit, schedule, random, kept, tables, None)
    )
    if PARTS == 0:
        item = tl.program_id(0)
        place, block = item // blocks, item % blocks
        first = block * form.keys
        dk, dv = block_of_keys(given, place // heads, place % heads, first, block, seams, False, form)
        tl.store(tainted + item, not_finite(dk) | not_finite(dv))
        write(dk, d_key, place, first, m, form.d_k, form.keys, form.lanes_k)
        write(dv, d_value, place, first, m, form.d_v, form.keys, form.lanes_v)
    else:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            if tl.load(tainted + item) != 0:
                place, block = item // blocks, item % blocks
                for part in range(PARTS):
                    first = (block * PARTS + part) * form.keys
                    dk, dv = block_of_keys(given, place // heads, place % heads, first, block, seams, True, form)
                    write(dk, d_key, place, first, m, form.d_k, form.keys, form.lanes_k)
                    write(dv, d_value, place, first, m, form.d_v, form.keys, form.lanes_v)
