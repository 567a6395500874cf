"""The work items of one call: blocks of keys that fit the memory limit, and the queries that see each block."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...arrays.operations import itemsize
from ...errors import ParameterError
from ...formula.expression import Expression
from ...formula.tile_ranges import find_runs, find_tile_ranges
from ...problem.problem import Problem

UNITS = ("", "k", "M", "G", "T")
MIN_POSITIONS = 64  # the fewest keys of a block, and the fewest queries of a work item
SEARCH_ROWS = 256  # the queries of a tile in the search for the queries that see a block
MAX_PAIRS = 1 << 30  # the most pairs of one work item, so that an interrupt takes effect within seconds
BLOCKS_IN_MEMORY = 2  # the block that is computed, and the block that is read at the same time
COPIES = 6  # the merge of a work item's results needs memory for so many copies of its output and statistics
KEY_MULTIPLE = 4  # dropout counts keys in groups of 4


@dataclass(frozen=True)
class BlockSizes:
    """The number of keys of a block, and the largest number of queries of a work item."""

    keys: int
    queries: int


@dataclass(frozen=True)
class WorkItem:
    """One step of a call: these queries attend to this block of keys."""

    queries: slice
    keys: slice


def parse_bytes(limit: Any) -> int:
    """Return a number of bytes from a whole number or text such as "2 GB" or "512 MiB"; else raise ParameterError."""
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return limit
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B\s*", limit) if isinstance(limit, str) else None
    size = 0
    if found is not None:
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** UNITS.index(unit))
    if size < 1:
        raise ParameterError(f"memory_limit={limit!r}", "a number of bytes, or text with a unit", 'memory_limit="2 GB"')
    return size


def choose_sizes(problem: Problem, key_bytes: int, limit: int, output_in_memory: bool) -> BlockSizes:
    """Return the largest sizes with which a call stays within the limit.

    Parameters
    ----------
    problem : the whole problem, with the statistics other than lse
    key_bytes : the bytes of one position of key and value, over all batches and heads
    limit : the bytes that the call may use
    output_in_memory : True if the result is a new array, False if it is written to a file or to the caller's array

    Raises
    ------
    ParameterError
        The limit is too small for the results of all queries beside a work item of `MIN_POSITIONS` keys and queries.
    """
    heads = problem.B * problem.H
    wide, narrow = itemsize(problem.accumulator), itemsize(problem.dtype)
    sums = heads * problem.n * (problem.d_v * wide + 8)  # 8 bytes for the lse
    numbers = sum([math.prod(shape) for statistic in problem.see for shape, _ in statistic.outputs(problem)])
    sums += numbers * (8 + wide)  # summed in 8 bytes, and returned in the accumulator's dtype
    if output_in_memory and wide != narrow:
        sums += heads * problem.n * problem.d_v * narrow
    row_bytes = heads * (problem.d_k * narrow + COPIES * problem.d_v * wide + 16 * 8)
    row_bytes += COPIES * 8 * numbers // max(problem.n, 1)
    least = sums + 2 * MIN_POSITIONS * max(BLOCKS_IN_MEMORY * key_bytes, row_bytes)
    if limit < least:
        raise ParameterError(
            f"memory_limit of {limit:,} bytes",
            f"at least {least:,} bytes for {problem.n:,} queries, {heads} heads and d_v = {problem.d_v}",
            f"memory_limit={least}, or fewer queries in one call",
        )
    half = (limit - sums) // 2
    keys = half // max(BLOCKS_IN_MEMORY * key_bytes, 1) // KEY_MULTIPLE * KEY_MULTIPLE
    keys = min(keys, max(-(-problem.m // KEY_MULTIPLE), 1) * KEY_MULTIPLE)
    queries = min(half // max(row_bytes, 1), max(MAX_PAIRS // (max(heads, 1) * keys), MIN_POSITIONS), problem.n)
    return BlockSizes(keys, max(queries, 1))


def find_work(mask: Expression | None, extent: tuple[int, int, int, int], sizes: BlockSizes) -> list[WorkItem]:
    """Return the work items of a mask, in the order of their keys. A pair that is in no item is hidden."""
    _, _, n, m = extent
    items = []
    ranges = find_tile_ranges(mask, extent, SEARCH_ROWS, sizes.keys)
    for block, is_seen in enumerate(ranges.count_tiles().T > 0):
        keys = slice(block * sizes.keys, min((block + 1) * sizes.keys, m))
        for first, last in find_runs(is_seen):
            start, stop = first * SEARCH_ROWS, min(last * SEARCH_ROWS, n)
            count = math.ceil((stop - start) / sizes.queries)
            bounds = [start + (stop - start) * part // count for part in range(count + 1)]
            items += [WorkItem(slice(*rows), keys) for rows in pairwise(bounds)]
    return items
