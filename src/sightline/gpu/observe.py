"""The second pass over the tiles: normalised weights from the saved normaliser, for statistics that need it first.

    P = 2^((S − lse) · unit), 0 where hidden and in rows that see nothing

The normaliser is brought to the unit of S, a sum of two numbers of the accumulator's type: weights do not take on its
rounding, and the difference is exact where S is near it. Every number of a result is written by one program alone, in
the order of its runs, so that reruns give the same bits. Sums over many tiles are float64.

What the kernels of statistics share: `top_k`, `written` and `pooled` walk the runs of a block of queries, `received`
those of a block of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import tiles

__all__ = ["Block", "block_of", "folded", "join", "normaliser", "scores", "weight"]

LOG2_E = tl.constexpr(1.4426950408889634)


class Block(NamedTuple):
    """A block of queries, the keys it looks at, and what its kernel needs beside."""

    query: Any
    key: Any
    place: Any
    normaliser: Any
    scale: Any
    unit: Any
    tables: Any
    own: Any


@triton.jit
def normaliser(lse, position, first, n, unit, form):
    """lse of a head's queries from `first` on in the scores' unit, high + low, (rows, 1); 0 where nothing is seen."""
    rows = first + tl.arange(0, form.rows)[:, None]
    x = tl.load(lse + tl.cast(position, tl.int64) * n + rows, mask=rows < n, other=0.0) * (LOG2_E / unit)
    x = tl.where(x == float("-inf"), 0.0, x)
    high = tiles.bounded(x, form)
    return high, tiles.bounded(tl.where(tl.abs(x) < float("inf"), x - high.to(tl.float64), 0.0), form)


@triton.jit
def weight(s, unit, normaliser):
    """P of scores as `tiles.scores` has them."""
    high, low = normaliser
    x = tl.minimum((s - high) - low, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(x * unit)


@triton.jit
def block_of(query, key, lse, b, h, first, n, m, H, group, sign, scale, unit, tables, own, form):
    """A block of queries of a head, from `first` on."""
    return Block(
        tiles.queries_of(query, b, h, first, n, sign, form),
        tiles.head_of(key, b, h // group),
        tiles.Place(b, h, tiles.column_of(first, n, form), n, m),
        normaliser(lse, b * H + h, first, n, unit, form),
        tiles.number(scale, form.total),
        tiles.number(unit, form.total),
        tables,
        own,
    )


@triton.jit
def scores(block, first, seams, PARTIAL: tl.constexpr, form):
    """Final scores of a tile of keys, see `tiles.scores`."""
    bound: tl.constexpr = PARTIAL and not form.even
    k = tiles.keys_of(block.key, first, form.keys, block.place.m, form.d_k, form.lanes_k, bound, form)
    products = tl.dot(block.query, k, input_precision=form.precision)
    return tiles.scores(products, block.place, first, block.scale, block.tables, seams, PARTIAL, form)


@triton.jit
def join(x, y, LARGEST: tl.constexpr):
    """The sum of weights, or the larger."""
    if LARGEST:
        return tl.maximum(x, y)
    return x + y


@triton.jit
def folded(block, axis: tl.constexpr, LARGEST: tl.constexpr):
    """Weights joined along an axis."""
    if LARGEST:
        return tl.max(block, axis)
    return tl.sum(block, axis)
