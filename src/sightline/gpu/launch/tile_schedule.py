"""The tiles of keys that each block of queries visits, as int32 arrays on the device; see `formula.tile_ranges`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...call.problem import Problem
from ...formula.expression import SYMBOLS, Expression
from ...formula.tables import bounds_key
from ...formula.tensor_cache import TensorCache, retain
from ...formula.tile_ranges import TileRanges, find_tile_ranges
from ..kernels.tile_loop import GpuSchedule

_SCHEDULES = TensorCache(64)
# The rows of a head in a schedule are padded to a multiple of this number: Triton compiles one kernel for all integers
# and addresses that are multiples of 16.
ROW_ALIGNMENT = 16


def encode_ranges(ranges: TileRanges) -> tuple[Any, Any]:
    """Return (rows, pairs), int32 arrays of the shapes (number of schedule rows, 3) and (number of tile ranges, 2).

    A schedule row is one block of queries. rows[r] is (start, first partial range, stop): row r visits the tile ranges
    pairs[start:stop], its full ranges first. pairs[k] is (first tile, last tile + 1) of tile range k. A last tile that
    the keys do not fill counts as partial, so full tiles need no bounds checks.
    """
    owner = np.repeat(np.arange(ranges.start.size - 1), np.diff(ranges.start))  # the schedule row of each tile range
    first, last, full = ranges.first, ranges.last, ranges.full
    if ranges.extent[3] % ranges.key_block:
        ragged = full & (last == ranges.key_blocks)
        tails = np.stack([owner[ragged], last[ragged] - 1, last[ragged], np.zeros_like(last[ragged])])
        heads = np.stack([owner, first, np.where(ragged, last - 1, last), full])
        owner, first, last, full = np.concatenate([heads, tails], axis=1)
        nonempty = first < last
        owner, first, last, full = owner[nonempty], first[nonempty], last[nonempty], full[nonempty]
    partial = np.logical_not(full)
    order = np.lexsort((first, partial, owner))
    owner, partial = owner[order], partial[order]
    start = np.searchsorted(owner, np.arange(ranges.start.size))
    middle = start[:-1] + np.bincount(owner[~partial], minlength=ranges.start.size - 1)
    rows = np.stack([start[:-1], middle, start[1:]], axis=1)
    pairs = np.stack([first[order], last[order]], axis=1)
    return rows.astype(np.int32), pairs.astype(np.int32)


def make_schedule(problem: Problem, query_block: int, key_block: int, of_keys: bool = False) -> GpuSchedule | None:
    """Return the schedule of a problem: the ranges of key tiles that each block of queries visits.

    With `of_keys`, the schedule has the ranges of query tiles that each block of keys visits. The result is None if the
    problem has no mask: then every tile is visited.
    """
    if problem.mask is None:
        return None
    mask = problem.mask
    tables_key, arrays = bounds_key(mask.tables)
    cache_key = (mask.text, tables_key, problem.extent, query_block, key_block, of_keys, problem.device)
    found = _SCHEDULES.get(cache_key, arrays, lambda: _build_schedule(mask, problem, query_block, key_block, of_keys))
    return retain(found, problem.query)


def _build_schedule(mask: Expression, problem: Problem, query_block: int, key_block: int, of_keys: bool) -> GpuSchedule:
    B, H, n, m = problem.extent
    if of_keys:  # the tile ranges of the transposed mask
        swapped = {name: SYMBOLS[other] for name, other in zip("ijnm", "jimn", strict=True)}
        ranges = find_tile_ranges(mask.rewrite(swapped), (B, H, m, n), key_block, query_block)
    else:
        ranges = find_tile_ranges(mask, problem.extent, query_block, key_block)
    rows, pairs = encode_ranges(ranges)
    stride = -(-ranges.query_blocks // ROW_ALIGNMENT) * ROW_ALIGNMENT  # schedule rows of a head, padded
    rows = np.pad(rows.reshape(-1, ranges.query_blocks, 3), ((0, 0), (0, stride - ranges.query_blocks), (0, 0)))
    flat = torch.from_numpy(np.concatenate([rows.reshape(-1), pairs.reshape(-1)])).to(problem.query.device)
    batch_stride, head_stride = ranges.heads * stride * (ranges.batches > 1), stride * (ranges.heads > 1)
    return GpuSchedule(flat[: rows.size], flat[rows.size :], batch_stride, head_stride)
