"""Which tiles of keys each block of queries looks at: `formula.ranges` as int32 arrays on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...formula.expression import SYMBOLS, Expression
from ...formula.tensor_cache import TensorCache, retain
from ...formula.tile_ranges import TileRanges, find_tile_ranges
from ...problem import Problem
from ..kernels.tile_loop import Schedule

__all__ = ["encode_ranges", "make_schedule", "swap_queries_and_keys"]

_SCHEDULES = TensorCache(64)
ROW_ALIGNMENT = 16  # numbers and addresses that are multiples of it are all one to the compiler


def encode_ranges(ranges: TileRanges) -> tuple[Any, Any]:
    """(rows, runs) int32: per row (start, first of the partial ones, stop); per run (first tile, past the last).

    Full runs first. A last tile that the keys do not fill is never full, so full tiles need no bounds.
    """
    owner = np.repeat(np.arange(ranges.start.size - 1), np.diff(ranges.start))
    first, last, full = ranges.first, ranges.last, ranges.full
    if ranges.extent[3] % ranges.key_block:
        past = full & (last == ranges.key_blocks)
        cut = np.stack([owner[past], last[past] - 1, last[past], np.zeros_like(last[past])])
        whole = np.stack([owner, first, np.where(past, last - 1, last), full])
        owner, first, last, full = np.concatenate([whole, cut], axis=1)
        some = first < last
        owner, first, last, full = owner[some], first[some], last[some], full[some]
    partial = np.logical_not(full)
    order = np.lexsort((first, partial, owner))
    owner, partial = owner[order], partial[order]
    start = np.searchsorted(owner, np.arange(ranges.start.size))
    middle = start[:-1] + np.bincount(owner[~partial], minlength=ranges.start.size - 1)
    rows = np.stack([start[:-1], middle, start[1:]], axis=1)
    pairs = np.stack([first[order], last[order]], axis=1)
    return rows.astype(np.int32), pairs.astype(np.int32)


def swap_queries_and_keys(mask: Expression) -> Expression:
    """The mask with queries for keys and keys for queries: its rows are the mask's columns."""
    pairs = [("i", "j"), ("j", "i"), ("n", "m"), ("m", "n")]
    return mask.substitute({name: SYMBOLS[other] for name, other in pairs}, {})


def make_schedule(problem: Problem, query_block: int, key_block: int, of_keys: bool = False) -> Schedule | None:
    """Which tiles of keys blocks of queries look at; None where every key is seen.

    With `of_keys` rows are blocks of keys, and runs are of blocks of queries.
    """
    if problem.mask is None:
        return None
    mask = problem.mask
    cache_key = (mask.text, problem.extent, query_block, key_block, of_keys, problem.device)
    arrays = [table.array for table in mask.tables]
    found = _SCHEDULES.get(cache_key, arrays, lambda: _build_schedule(mask, problem, query_block, key_block, of_keys))
    return retain(found, problem.query)


def _build_schedule(mask: Expression, problem: Problem, query_block: int, key_block: int, of_keys: bool) -> Schedule:
    B, H, n, m = problem.extent
    if of_keys:
        ranges = find_tile_ranges(swap_queries_and_keys(mask), (B, H, m, n), key_block, query_block)
    else:
        ranges = find_tile_ranges(mask, problem.extent, query_block, key_block)
    rows, pairs = encode_ranges(ranges)
    step = (
        -(-ranges.query_blocks // ROW_ALIGNMENT) * ROW_ALIGNMENT
    )  # rows of a head: Triton compiles anew for other steps
    rows = np.pad(rows.reshape(-1, ranges.query_blocks, 3), ((0, 0), (0, step - ranges.query_blocks), (0, 0)))
    flat = torch.from_numpy(np.concatenate([rows.reshape(-1), pairs.reshape(-1)])).to(problem.query.device)
    batch = ranges.heads * step if ranges.batches > 1 else 0
    return Schedule(flat[: rows.size], flat[rows.size :], batch, step if ranges.heads > 1 else 0)
