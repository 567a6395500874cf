"""The kernel of the second pass that finds the largest weights of each query, and the keys of these weights."""

from __future__ import annotations

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import ScheduleRow, loop_over_tiles
from .weights_pass import compute_scores, compute_weights, load_block


@triton.jit
def rank_weights(s, block):
    """Return the number by which each score s is ranked: its weight, ∞ if the weight is NaN, or −∞ if s is −∞.

    Different scores may have equal weights, for example 0.
    """
    p = compute_weights(s, block)
    p = tl.where(p == p, p, float("inf"))
    return tl.where(s == float("-inf"), s, p)


@triton.jit
def keep_largest(state, p, first, meta):
    """Return the state after one more tile: for each query a list of its K largest weights and their keys.

    `p` has the results of `rank_weights`. The state is (weights, keys, least weight of each list, key of this weight).
    The first two have the shape (rows, K), and each list is in any order. The last two have the shape (rows, 1). In
    every row the largest weight of the tile replaces the least weight of the list, until no weight of the tile is
    larger. Of equal weights, the one with the smaller key counts as larger.
    """
    values, keys, least, least_key = state
    j = tl.broadcast_to(first + tl.arange(0, meta.keys)[None, :], p.shape)
    better = (p > least) | ((p == least) & (j < least_key) & (p > float("-inf")))
    while tl.max(tl.max(better.to(tl.int32), 1), 0) > 0:
        best = tl.max(tl.where(better, p, float("-inf")), 1, keep_dims=True)
        key = tl.min(tl.where(better & (p == best), j, tile_ops.NO_KEY), 1, keep_dims=True)
        enters = (keys == least_key) & (key != tile_ops.NO_KEY)
        values, keys = tl.where(enters, best, values), tl.where(enters, key, keys)
        least = tl.min(values, 1, keep_dims=True)
        least_key = tl.max(tl.where(values == least, keys, -1), 1, keep_dims=True)
        p = tl.where(j == key, float("-inf"), p)
        better = (p > least) | ((p == least) & (j < least_key) & (p > float("-inf")))
    return values, keys, least, least_key


@triton.jit
def update_top_k_range(state, first, last, block, formulas, OPTIONS: tl.constexpr, meta, PARTIAL: tl.constexpr):
    """Return the state of `keep_largest` after the tiles of keys `first` ... `last` − 1."""
    for tile in range(first, last):
        s = compute_scores(block, tile * meta.keys, formulas, PARTIAL, meta)
        state = keep_largest(state, rank_weights(s, block), tile * meta.keys, meta)
    return state


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "k"])
def top_k(arrays, n, m, H, group, blocks, k, scale: tl.float64, formulas, meta: tl.constexpr, K: tl.constexpr):
    """Write the k largest weights of each query of a block, descending, and their keys.

    Of equal weights the one with the smaller key comes first.

    Parameters
    ----------
    arrays : `arrays.seen` is two arrays (B, H, n, k): the weights, and their keys (int64)
        If a query has fewer than k visible keys, the remaining entries are 0 and −1. Entries from K on are not written.
    K : a power of two, at least min(k, m)
    """
    item = tl.program_id(0)
    head_index, row = item // blocks, blocks - 1 - item % blocks
    first = row * meta.rows
    b, h = head_index // H, head_index % H
    args = tile_ops.Arguments(arrays, n, m, H, group, scale, tile_ops.find_unit(scale, formulas), None)
    block = load_block(args, b, h, first, (), meta)
    values = tl.full((meta.rows, K), float("-inf"), meta.accumulator)
    # The keys of the entries in an empty list differ, so that a new score replaces one entry alone.
    keys = tl.full((meta.rows, K), tile_ops.NO_KEY, tl.int32) - 1 - tl.arange(0, K)[None, :]
    least = tl.full((meta.rows, 1), float("-inf"), meta.accumulator)
    last = tl.full((meta.rows, 1), tile_ops.NO_KEY - 1, tl.int32)
    state = (values, keys, least, last)
    row = ScheduleRow(arrays.schedule, b, h, row, m, None, False)
    state = loop_over_tiles(state, update_top_k_range, row, meta.keys, meta.even, block, formulas, None, meta)
    values, keys, least, last = state
    rows = first + tl.arange(0, meta.rows)[:, None]
    at, inside = (tl.cast(head_index, tl.int64) * n + rows) * k, rows < n
    for rank in range(tl.minimum(k, K)):
        best = tl.max(values, 1, keep_dims=True)
        best_key = tl.min(tl.where(values == best, keys, tile_ops.NO_KEY), 1, keep_dims=True)
        some = best > float("-inf")
        p = tl.where(some, tl.where(best == float("inf"), float("nan"), best), 0.0)
        tl.store(arrays.seen[0] + at + rank, p, mask=inside)
        tl.store(arrays.seen[1] + at + rank, tl.where(some, best_key, -1).to(tl.int64), mask=inside)
        values = tl.where(keys == best_key, float("-inf"), values)
