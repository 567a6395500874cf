"""The second pass over the tiles: normalised weights from the saved normaliser, for statistics that need it first.

    P = 2^((S − lse) · unit), 0 where hidden and in rows that see nothing

The normaliser is brought to the unit of S, a sum of two numbers of the accumulator's type (`tiles.normaliser`): weights
do not take on its rounding, and the difference is exact where S is near it. Every number of a result is written by one
program alone, in the order of its runs, so that reruns give the same bits. Sums over many tiles are float64.

What the kernels of statistics share: `top_k`, `written` and `pooled` walk the runs of a block of queries, `received`
those of a block of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import tile_ops

__all__ = ["Block", "block_of", "folded", "join", "scores"]


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
def block_of(query, key, lse, b, h, first, n, m, H, group, sign, scale, unit, tables, own, form):
    """A block of queries of a head, from `first` on."""
    high, low = tile_ops.normaliser(lse, b * H + h, first, n, unit, form)
    return Block(
        tile_ops.queries_of(query, b, h, first, n, sign, form),
        tile_ops.head_of(key, b, h // group),
        tile_ops.Place(b, h, tile_ops.column_of(first, n, form), n, m),
        (high[:, None], low[:, None]),
        tile_ops.number(scale, form.total),
        tile_ops.number(unit, form.total),
        tables,
        own,
    )


@triton.jit
def scores(block, first, seams, PARTIAL: tl.constexpr, form):
    """Final scores of a tile of keys, see `tiles.scores`."""
    bound: tl.constexpr = PARTIAL and not form.even
    k = tile_ops.keys_of(block.key, first, form.keys, block.place.m, form.d_k, form.lanes_k, bound, form)
    products = tl.dot(block.query, k, input_precision=form.precision)
    return tile_ops.scores(products, block.place, first, block.scale, block.tables, seams, PARTIAL, form)


@triton.jit
def join(x, y, MAXIMA: tl.constexpr):
    """The sum of weights, or the larger."""
    if MAXIMA:
        return tl.maximum(x, y)
    return x + y


@triton.jit
def folded(block, axis: tl.constexpr, MAXIMA: tl.constexpr):
    """Weights joined along an axis."""
    if MAXIMA:
        return tl.max(block, axis)
    return tl.sum(block, axis)
