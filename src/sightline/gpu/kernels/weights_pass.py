"""The second pass over the tiles: statistics of the normalised weights, which need the lse of the forward pass.

    P = 2^((S − lse) · unit), 0 at hidden pairs and for queries without a visible key

lse is converted to the unit of S as a sum of two numbers of the accumulator's type (`tile_ops.load_lse`). So weights
have no error from rounding lse to one number, and the difference S − lse is exact where S is near lse. One program
alone computes each number of a result, in the order of the program's tiles, so that equal calls give equal bits. Sums
over many tiles are float64.

This module has what the kernels of the second pass share. `top_k`, `dense_weights` and `pooled` loop over the tiles
that a block of queries visits, `received` over the tiles that a block of keys visits.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from . import tile_ops


class Block(namedtuple("Block", "query key location lse scale unit tables extra")):
    """A block of queries, and the key head that they attend to.

    `lse` is (high, low), (rows, 1) each, and `extra` has further arguments that one kernel alone needs.
    """


@triton.jit
def load_block(query, key, lse, b, h, first, n, m, H, group, sign, scale, unit, tables, extra, meta):
    """Return the `Block` of queries that begins at query `first` of a head."""
    high, low = tile_ops.load_lse(lse, b * H + h, first, n, unit, meta)
    q = tile_ops.load_queries(query, b, h, first, n, sign, meta)
    head = tile_ops.locate_head(key, b, h // group)
    location = tile_ops.BlockLocation(b, h, tile_ops.query_indices(first, n, meta), n, m)
    lse = (high[:, None], low[:, None])
    scale, unit = tile_ops.scalar(scale, meta.accumulator), tile_ops.scalar(unit, meta.accumulator)
    return Block(q, head, location, lse, scale, unit, tables, extra)


@triton.jit
def compute_scores(block, first, formulas, PARTIAL: tl.constexpr, meta):
    """Return the final scores of the tile that begins at key `first`, see `tile_ops.compute_scores`."""
    bound: tl.constexpr = PARTIAL and not meta.even
    m = block.location.m
    k = tile_ops.load_transposed(block.key, first, meta.keys, m, meta.d_k, meta.padded_d_k, bound, meta)
    products = tl.dot(block.query, k, input_precision=meta.precision)
    j = first + tl.arange(0, meta.keys)[None, :]
    return tile_ops.compute_scores(products, block.location, j, block.scale, block.tables, formulas, PARTIAL, meta)


@triton.jit
def combine(x, y, USE_MAX: tl.constexpr):
    """Return x + y, or the larger of x and y if USE_MAX."""
    return tl.maximum(x, y) if USE_MAX else x + y


@triton.jit
def reduce(block, axis: tl.constexpr, USE_MAX: tl.constexpr):
    """Return the sum of the weights `block` along an axis, or the largest weight along it if USE_MAX."""
    return tl.max(block, axis) if USE_MAX else tl.sum(block, axis)
