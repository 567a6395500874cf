"""The second pass over the tiles: normalised weights from the saved normaliser, for statistics that need it first.

    P = 2^((S − lse) · unit), 0 where hidden and in rows that see nothing

The normaliser is brought to the unit of S, a sum of two numbers of the accumulator's type (`tiles.normaliser`): weights
do not take on its rounding, and the difference is exact where S is near it. Every number of a result is written by one
program alone, in the order of its runs, so that reruns give the same bits. Sums over many tiles are float64.

What the kernels of statistics share: `top_k`, `dense_weights` and `pooled` walk the runs of a block of queries, `received`
those of a block of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import tile_ops

__all__ = ["Block", "combine", "compute_scores", "load_block", "reduce"]


class Block(NamedTuple):
    """A block of queries, the keys it looks at, and what its kernel needs beside."""

    query: Any
    key: Any
    location: Any
    normaliser: Any
    scale: Any
    unit: Any
    tables: Any
    extra: Any


@triton.jit
def load_block(query, key, lse, b, h, first, n, m, H, group, sign, scale, unit, tables, extra, meta):
    """A block of queries of a head, from `first` on."""
    high, low = tile_ops.normaliser(lse, b * H + h, first, n, unit, meta)
    return Block(
        tile_ops.load_queries(query, b, h, first, n, sign, meta),
        tile_ops.locate_head(key, b, h // group),
        tile_ops.BlockLocation(b, h, tile_ops.query_indices(first, n, meta), n, m),
        (high[:, None], low[:, None]),
        tile_ops.scalar(scale, meta.accumulator),
        tile_ops.scalar(unit, meta.accumulator),
        tables,
        extra,
    )


@triton.jit
def compute_scores(block, first, formulas, PARTIAL: tl.constexpr, meta):
    """Final scores of a tile of keys, see `tiles.compute_scores`."""
    bound: tl.constexpr = PARTIAL and not meta.even
    k = tile_ops.load_rows_transposed(
        block.key, first, meta.keys, block.location.m, meta.d_k, meta.padded_d_k, bound, meta
    )
    products = tl.dot(block.query, k, input_precision=meta.precision)
    return tile_ops.compute_scores(products, block.location, first, block.scale, block.tables, formulas, PARTIAL, meta)


@triton.jit
def combine(x, y, USE_MAX: tl.constexpr):
    """The sum of weights, or the larger."""
    if USE_MAX:
        return tl.maximum(x, y)
    return x + y


@triton.jit
def reduce(block, axis: tl.constexpr, USE_MAX: tl.constexpr):
    """Weights joined along an axis."""
    if USE_MAX:
        return tl.max(block, axis)
    return tl.sum(block, axis)
