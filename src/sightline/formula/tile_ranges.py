"""Classification of tiles as empty, full or partial. A tile is the pairs of a block of queries and a block of keys.

The class follows from bounds of the mask over the tile (`interval_arithmetic`). The search halves a range of keys only
if the bounds over the whole range do not decide its class, so it need not visit every tile. Repeated calls find their
tile ranges in generated code: `cpu.codegen.render_bounds` and `cpu.kernels.tile_search`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import numpy as np

from ..arrays.caching import cached_property
from ..arrays.operations import device
from .evaluate_array import evaluate_at
from .expression import OF_SCORES, Apply, Constant, Expression, Lookup, as_expression, fold, where
from .interval_arithmetic import Interval, compute_intervals

Integers = np.ndarray[Any, np.dtype[np.int64]]

SCORE_BOUND = 1e30  # the bound of |s|: finite, so that an infinite bound of a node comes from the formula
SEARCH_BLOCK = (64, 64)
MAX_ROWS_AT_ONCE = 1 << 16  # rows of `TileRanges` that are bisected together, which limits the memory of the search


@dataclass(frozen=True, eq=False)
class TileRanges:
    """The ranges of key blocks that each block of queries must process, each range full or partial.

    A range covers the key blocks from `first` to before `last`. A row is one (batch, head, query block), in C order.
    `batches` is 1 if the mask does not depend on b, and `heads` is 1 if it does not depend on h. If heads share ranges
    in groups, a row is one (batch, group, query block), and `heads` counts the groups. The ranges of row r are the
    entries `start[r]:start[r + 1]` of `first`, `last` and `full`. A tile that no range covers is empty.
    """

    extent: tuple[int, int, int, int]
    query_block: int
    key_block: int
    batches: int
    heads: int
    start: Integers
    first: Integers
    last: Integers
    full: np.ndarray[Any, np.dtype[np.bool_]]

    @property
    def query_blocks(self) -> int:
        return -(-self.extent[2] // self.query_block)

    @property
    def key_blocks(self) -> int:
        return -(-self.extent[3] // self.key_block)

    def row(self, b: int, h: int, block: int) -> range:
        """Return the places in `first`, `last` and `full` of the ranges of query block number `block`."""
        row = ((b if self.batches > 1 else 0) * self.heads + (h if self.heads > 1 else 0)) * self.query_blocks + block
        return range(int(self.start[row]), int(self.start[row + 1]))

    def find_covered(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return (query blocks, key blocks) booleans: True for a tile that a range covers in some batch and head."""
        changes = np.zeros((self.query_blocks, self.key_blocks + 1), np.int64)
        row = np.repeat(np.arange(len(self.start) - 1), np.diff(self.start)) % max(self.query_blocks, 1)
        np.add.at(changes, (row, self.first), 1)
        np.add.at(changes, (row, self.last), -1)
        return np.cumsum(changes, axis=1)[:, :-1] > 0

    @property
    def _repeats(self) -> int:
        """The number of pairs (b, h) that share the ranges of one row, because the mask does not depend on b or h."""
        B, H, _, _ = self.extent
        return (B // self.batches) * (H // self.heads) if B and H else 0

    @cached_property
    def tiles(self) -> dict[str, int]:
        """The numbers of empty, full and partial tiles over all batches and heads."""
        B, H, _, _ = self.extent
        lengths = self.last - self.first
        full = int(lengths[self.full].sum()) * self._repeats
        partial = int(lengths[~self.full].sum()) * self._repeats
        return {"empty": B * H * self.query_blocks * self.key_blocks - full - partial, "full": full, "partial": partial}


def find_tile_ranges(
    mask: Expression | None, extent: tuple[int, int, int, int], query_block: int, key_block: int, group: int = 1
) -> TileRanges:
    """Return the tile ranges of a mask. If `mask` is None, every pair is allowed.

    A tile is empty if the bounds prove that every pair is hidden, full if they prove that every pair is allowed, and
    partial otherwise. `group` consecutive heads share their ranges, so a tile has one class for all of these heads.
    The ranges of a mask without tables are cached.
    """
    mask = as_expression(True) if mask is None else mask
    if mask.tables:
        return _search(mask, extent, query_block, key_block, group)
    return _search_cached(mask, extent, query_block, key_block, group)


def _search(
    mask: Expression, extent: tuple[int, int, int, int], query_block: int, key_block: int, group: int
) -> TileRanges:
    B, H, n, _ = extent
    counts = ("b", B), ("h", H // group)
    batches, heads = (length if name in mask.free_symbols else min(length, 1) for name, length in counts)
    rows = batches * heads * -(-n // query_block)
    pieces = [np.empty((4, 0), np.int64)]
    for at in range(0, rows, MAX_ROWS_AT_ONCE):
        selected = np.arange(at, min(at + MAX_ROWS_AT_ONCE, rows))
        pieces += _bisect(mask, extent, (query_block, key_block), (heads, group), selected)
    row, first, last, full = _merge_adjacent(np.concatenate(pieces, axis=1))
    start = np.searchsorted(row, np.arange(rows + 1))
    return TileRanges(extent, query_block, key_block, batches, heads, start, first, last, full.astype(bool))


_search_cached = lru_cache(64)(_search)


def _bisect(
    mask: Expression, extent: tuple[int, int, int, int], block: tuple[int, int], groups: tuple[int, int], rows: Integers
) -> list[Integers]:
    """Return unsorted ranges that cover all tiles of `rows` but empty ones, as arrays of (row, first, last, full)."""
    _, H, n, m = extent
    heads, group = groups
    key_blocks, query_blocks = -(-m // block[1]), -(-n // block[0])
    width = 1 << max(key_blocks - 1, 0).bit_length()
    first = np.zeros_like(rows)
    pieces: list[Integers] = []
    while rows.size and key_blocks:
        last = np.minimum(first + width, key_blocks)
        i0, h = rows % query_blocks * block[0], rows // query_blocks % heads
        box = make_box(
            extent,
            b=(rows // query_blocks // heads,) * 2,
            h=(h * group, np.minimum(h * group + group, H) - 1),
            i=(i0, np.minimum(i0 + block[0], n) - 1),
            j=(first * block[1], np.minimum(last * block[1], m) - 1),
        )
        low, high = (np.broadcast_to(end, rows.shape) for end in compute_intervals(mask, box)[id(mask)])
        full = low == 1
        is_decided = full | ((width == 1) & (high != 0))
        pieces.append(np.stack([rows, first, last, full])[:, is_decided])
        width //= 2
        halve = (high != 0) & ~is_decided
        rows, first = np.repeat(rows[halve], 2), np.repeat(first[halve], 2)
        first[1::2] += width
        inside = first < key_blocks
        rows, first = rows[inside], first[inside]
    return pieces


def _merge_adjacent(pieces: Integers) -> Integers:
    """Return the ranges sorted by row and first key block, where one range replaces adjacent ones of the same class."""
    pieces = pieces[:, np.lexsort((pieces[1], pieces[0]))]
    row, first, last, full = pieces
    if row.size == 0:
        return pieces
    continues = (row[1:] == row[:-1]) & (first[1:] == last[:-1]) & (full[1:] == full[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~continues]))
    ends = np.append(starts[1:], row.size) - 1
    return np.stack([row[starts], first[starts], last[ends], full[starts]])


def make_box(extent: tuple[int, int, int, int], **symbols: tuple[Any, Any]) -> dict[str, Interval]:
    """Return the interval of every symbol: its whole range, unless `symbols` has a narrower one."""
    B, H, n, m = extent
    whole = {"b": (0, B - 1), "h": (0, H - 1), "i": (0, n - 1), "j": (0, m - 1), "n": (n, n), "m": (m, m), "p": (0, 1)}
    box = {name: (np.asarray(a, np.float64), np.asarray(z, np.float64)) for name, (a, z) in (whole | symbols).items()}
    box["s"] = (np.asarray(-SCORE_BOUND), np.asarray(SCORE_BOUND))
    box["ln p"] = (np.asarray(-2 * SCORE_BOUND), np.asarray(0.0))
    return box


def find_witness(condition: Expression, extent: tuple[int, int, int, int]) -> tuple[int, int, int, int] | None:
    """Return one (b, h, i, j) at which the condition holds; None if it holds nowhere.

    The condition is evaluated only in the tiles that the bounds do not prove empty.
    """
    for (b, h), rows, columns, holds in _evaluate_tiles(condition, extent):
        at = np.argwhere(np.broadcast_to(holds, (len(rows), len(columns))))
        if at.size:
            return b, h, rows.start + int(at[0, 0]), columns.start + int(at[0, 1])
    return None


def count_pairs(mask: Expression, extent: tuple[int, int, int, int]) -> int:
    """Return the number of (b, h, i, j) that the mask allows. Only partial tiles are evaluated."""
    ranges = find_tile_ranges(mask, extent, *SEARCH_BLOCK)
    allowed = sum(
        int(np.count_nonzero(holds)) * len(rows) * len(columns) // np.size(holds)
        for _, rows, columns, holds in _evaluate_tiles(mask, extent)
    )
    return allowed * (extent[0] // max(ranges.batches, 1)) * (extent[1] // max(ranges.heads, 1))


def find_runs(flags: np.ndarray[Any, np.dtype[np.bool_]]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) for each longest run flags[first:last] whose entries are all True."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def find_blocks(
    mask: Expression, extent: tuple[int, int, int, int], block: tuple[int, int]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return (batches, heads, query blocks, key blocks) booleans: True where the mask allows a pair of the block.

    `batches` and `heads` are those of `TileRanges`. `block` has the numbers of queries and keys of a block.
    """
    ranges = find_tile_ranges(mask, extent, *block)
    allowed = np.zeros((ranges.batches, ranges.heads, ranges.query_blocks, ranges.key_blocks), bool)
    for (b, h), rows, columns, holds in _evaluate_tiles(mask, extent, block):
        keys = np.broadcast_to(holds.any(axis=0) if holds.ndim == 2 else holds, len(columns))
        blocks = np.logical_or.reduceat(keys, np.arange(0, len(columns), block[1]))
        first = columns.start // block[1]
        allowed[b, h, rows.start // block[0], first : first + len(blocks)] = blocks
    return allowed


def _evaluate_tiles(
    condition: Expression, extent: tuple[int, int, int, int], block: tuple[int, int] = SEARCH_BLOCK
) -> Iterator[tuple[tuple[int, int], range, range, Any]]:
    """Yield ((b, h), rows, columns, values) of every range of tiles that the bounds do not prove empty.

    The values broadcast to (rows, columns). For a range of full tiles the values are a single True.
    If the condition does not depend on b, only b = 0 is evaluated. If it does not depend on h, only h = 0 is.
    """
    ranges = find_tile_ranges(condition, extent, *block)
    _, _, n, m = extent
    row_of_entry = np.repeat(np.arange(ranges.start.size - 1), np.diff(ranges.start))
    for row, first, last, full in zip(row_of_entry, ranges.first, ranges.last, ranges.full, strict=True):
        group, k = divmod(int(row), ranges.query_blocks)
        b, h = divmod(group, ranges.heads)
        rows = range(k * block[0], min((k + 1) * block[0], n))
        columns = range(int(first) * block[1], min(int(last) * block[1], m))
        values = np.asarray(True)
        if not full:
            i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)
            values = evaluate_at(condition, b=b, h=h, i=i, j=j, n=n, m=m)
        yield (b, h), rows, columns, values


# -- the pairs that a score hides --------------------------------------------------------------------------------------


def hidden_condition(score: Expression, extent: tuple[int, int, int, int]) -> Expression | None:
    """Return the mask that a score implies: a condition that is true only at pairs where the score is −∞ for every s.

    The result is None if no node of the score proves −∞ at some pair. `where(c, s, −inf)` and a bias of −∞ hide pairs,
    as a mask does. If the mask hides these pairs too, kernels can skip tiles, and a NaN at a hidden pair does not reach
    the output.

    A table in host memory counts as a table that may contain −∞, whatever its entries are, because the entries may
    change between two calls of one kernel. A table on a device is read again only after a write to it.
    """
    bounds = compute_intervals(score, make_box(extent))

    def visit(node: Expression, hidden: list[Expression | None]) -> Expression | None:
        operator = node.operator if isinstance(node, Apply) else None
        if isinstance(node, Constant):
            return as_expression(True) if node.value == -math.inf else None
        if isinstance(node, Lookup) and node.kind == "float":
            may_hide = device(node.table.array) == "cpu" or bool((bounds[id(node)][0] == -math.inf).any())
            return node == -math.inf if may_hide else None
        known = [condition for condition in hidden if condition is not None]
        if operator in ("add", "minimum"):
            return reduce(or_, known) if known else None
        if operator == "subtract":
            return hidden[0]
        if operator == "maximum" and len(known) == 2:
            return known[0] & known[1]
        if operator == "where" and known and node.arguments[0].free_symbols.isdisjoint(OF_SCORES):
            yes, no = (as_expression(False) if part is None else part for part in hidden[1:])
            return where(node.arguments[0], yes, no)
        return None

    return fold(visit, score)
