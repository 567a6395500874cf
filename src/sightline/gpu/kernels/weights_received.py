"""What each key receives, second pass: a block of keys against the blocks of queries that see it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import Row, walk
from .weights_pass import folded, join

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
def over_run(state, first, last, block, seams, MAXIMA: tl.constexpr, form, PARTIAL: tl.constexpr):
    """What the keys have, (keys,) float64, after the blocks of queries `first` to before `last`."""
    b, h, n = block.b, block.h, block.n
    scale, unit = tile_ops.number(block.scale, form.total), tile_ops.number(block.unit, form.total)
    for tile in range(first, last):
        i0 = tile * form.rows
        place = tile_ops.Place(b, h, tile_ops.column_of(i0, n, form), n, block.m)
        q = tile_ops.queries_of(block.query, b, h, i0, n, block.sign, form)
        products = tl.dot(q, block.key, input_precision=form.precision)
        s = tile_ops.scores(products, place, block.first, scale, block.tables, seams, PARTIAL, form)
        high, low = tile_ops.normaliser(block.lse, b * block.H + h, i0, n, block.unit, form)
        p = tile_ops.weight(s, unit, (high[:, None], low[:, None]))
        if MAXIMA:
            p = tl.where(p == p, p, float("inf"))  # maxima pass NaN over; no weight is above 1
        if PARTIAL:
            p = tl.where((i0 + tl.arange(0, form.rows))[:, None] < n, p, 0.0)
        state = join(state, folded(p, 0, MAXIMA).to(tl.float64), MAXIMA)
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
    seams,
    form: tl.constexpr,
    MAXIMA: tl.constexpr,
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
    j0 = row * form.keys
    head = tile_ops.head_of(key, b, h // group)
    k = tile_ops.keys_of(head, j0, form.keys, m, form.d_k, form.lanes_k, not form.even, form)
    block = Block(k, j0, b, h, query, lse, n, m, H, sign, scale, unit, tables)
    row = Row(schedule, b, h, row, n, None, j0 + form.keys > m)
    state = tl.zeros((form.keys,), tl.float64)
    state = walk(state, over_run, row, form.rows, False, block, seams, MAXIMA, form)
    if MAXIMA:
        state = tl.where(state == float("inf"), float("nan"), state)
    j = j0 + tl.arange(0, form.keys)
    place = output + tl.cast(position, tl.int64) * m + j
    tl.store(place, state.to(output.dtype.element_ty), mask=j < m)
