"""Which tiles of keys each block of queries looks at: `formula.runs` as int32 arrays on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...formula.expression import SYMBOLS, Expression
from ...formula.tensor_cache import Memory, held
from ...formula.tile_ranges import Runs, find_runs
from ...problem import Problem
from ..kernels.tile_loop import Schedule

__all__ = ["exchanged", "schedule", "words"]

_SCHEDULES = Memory(64)
ALIGNED = 16  # numbers and addresses that are multiples of it are all one to the compiler


def words(runs: Runs) -> tuple[Any, Any]:
    """(rows, runs) int32: per row (start, first of the partial ones, stop); per run (first tile, past the last).

    Full runs first. A last tile that the keys do not fill is never full, so full tiles need no bounds.
    """
    owner = np.repeat(np.arange(runs.start.size - 1), np.diff(runs.start))
    first, last, full = runs.first, runs.last, runs.full
    if runs.extent[3] % runs.key_block:
        past = full & (last == runs.key_blocks)
        cut = np.stack([owner[past], last[past] - 1, last[past], np.zeros_like(last[past])])
        whole = np.stack([owner, first, np.where(past, last - 1, last), full])
        owner, first, last, full = np.concatenate([whole, cut], axis=1)
        some = first < last
        owner, first, last, full = owner[some], first[some], last[some], full[some]
    partial = np.logical_not(full)
    order = np.lexsort((first, partial, owner))
    owner, partial = owner[order], partial[order]
    start = np.searchsorted(owner, np.arange(runs.start.size))
    middle = start[:-1] + np.bincount(owner[~partial], minlength=runs.start.size - 1)
    rows = np.stack([start[:-1], middle, start[1:]], axis=1)
    pairs = np.stack([first[order], last[order]], axis=1)
    return rows.astype(np.int32), pairs.astype(np.int32)


def exchanged(mask: Expression) -> Expression:
    """The mask with queries for keys and keys for queries: its rows are the mask's columns."""
    pairs = [("i", "j"), ("j", "i"), ("n", "m"), ("m", "n")]
    return mask.replacing({name: SYMBOLS[other] for name, other in pairs}, {})


def schedule(problem: Problem, query_block: int, key_block: int, of_keys: bool = False) -> Schedule | None:
    """Which tiles of keys blocks of queries look at; None where every key is seen.

    With `of_keys` rows are blocks of keys, and runs are of blocks of queries.
    """
    if problem.mask is None:
        return None
    mask = problem.mask
    question = (mask.text, problem.extent, query_block, key_block, of_keys, problem.device)
    arrays = [table.array for table in mask.tables]
    found = _SCHEDULES.get(question, arrays, lambda: _found(mask, problem, query_block, key_block, of_keys))
    return held(found, problem.query)


def _found(mask: Expression, problem: Problem, query_block: int, key_block: int, of_keys: bool) -> Schedule:
    B, H, n, m = problem.extent
    if of_keys:
        runs = find_runs(exchanged(mask), (B, H, m, n), key_block, query_block)
    else:
        runs = find_runs(mask, problem.extent, query_block, key_block)
    rows, pairs = words(runs)
    step = -(-runs.query_blocks // ALIGNED) * ALIGNED  # rows of a head: Triton compiles anew for other steps
    rows = np.pad(rows.reshape(-1, runs.query_blocks, 3), ((0, 0), (0, step - runs.query_blocks), (0, 0)))
    flat = torch.from_numpy(np.concatenate([rows.reshape(-1), pairs.reshape(-1)])).to(problem.query.device)
    batch = runs.heads * step if runs.batches > 1 else 0
    return Schedule(flat[: rows.size], flat[rows.size :], batch, step if runs.heads > 1 else 0)
