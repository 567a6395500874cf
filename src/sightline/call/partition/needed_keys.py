"""Which keys each rank needs, in blocks of which length they are sent, and which of its queries see them.

A rank is one process of a group. All ranks compute the same schedule from the mask, and exchange no messages for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise, zip_longest
from typing import Any

import numpy as np

from ...arrays.caching import cached_property
from ...arrays.operations import itemsize
from ...formula.expression import Expression
from ...formula.interval_arithmetic import compute_intervals
from ...formula.tile_ranges import Integers, find_tile_ranges, make_box
from ..problem import Problem
from .shards import Shards, Span

Booleans = np.ndarray[Any, np.dtype[np.bool_]]

MIN_TILE, MAX_TILES = 64, 2048  # the fewest positions of a tile of the search, and the most tiles along a sequence
KEY_BYTES, MIN_KEYS = 8 << 20, 256  # the approximate size of a block of keys and values, and its fewest keys
MAX_PIECES_AT_ONCE = 1 << 16  # pieces whose bounds are computed together; the number limits the memory


@dataclass(frozen=True)
class KeyBlock:
    """Consecutive keys that are sent at once: the `index`-th block of the keys that the rank `owner` holds."""

    owner: int
    index: int
    span: Span


@dataclass(frozen=True)
class Round:
    """The transfers of one round, as one rank sees them.

    The rank receives a block of rank `source`, and sends one to rank `target`. `received` or `sent` is None if there is
    no such block, or if the receiving rank needs none of its keys.
    """

    source: int
    received: KeyBlock | None
    target: int
    sent: KeyBlock | None


@dataclass(frozen=True, eq=False)
class Schedule:
    """The blocks of keys that each rank needs.

    queries, keys : the division of the queries and of the keys
    blocks : every block of keys, in the order of their owners and indices
    seeing : (2, spans of queries, blocks), the first query of each span that may see a key of the block, and the
        position after the last such query; both are 0 if no query of the span sees the block. The spans are those of
        all ranks.
    seen : (2, ranks, blocks), the first key of each block that a query of the rank may see, and the position after the
        last such key; both are 0 if the rank sees no key of the block
    """

    queries: Shards
    keys: Shards
    blocks: tuple[KeyBlock, ...]
    seeing: Integers
    seen: Integers

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.queries.ranks)

    @cached_property
    def _query_spans(self) -> list[slice]:
        return _spans_by_rank(self.queries)

    def needed_part(self, rank: int, block: KeyBlock) -> KeyBlock | None:
        """Return the part of a block whose keys the rank needs, or None if the rank needs no key of the block."""
        span = block.span.part(*self.seen[:, rank, self.column(block)].tolist())
        return replace(block, span=span) if len(span) else None

    def seeing_spans(self, rank: int, block: KeyBlock) -> Iterator[Span]:
        """Yield the rank's queries that may see a key of the block: at most one part of each of the rank's spans."""
        seeing = self.seeing[:, self._query_spans[rank], self.column(block)]
        for span, bounds in zip(self.queries.ranks[rank], seeing.T.tolist(), strict=True):
            part = span.part(*bounds)
            if len(part):
                yield part

    def column(self, block: KeyBlock) -> int:
        """Return the index of a block in `blocks`."""
        return int(self.columns[block.owner, block.index])

    @cached_property
    def columns(self) -> Integers:
        """(ranks, most blocks of a rank): entry (r, k) is the index in `blocks` of block k of rank r, −1 for none."""
        columns = np.full((self.size, max((block.index + 1 for block in self.blocks), default=0)), -1)
        for column, block in enumerate(self.blocks):
            columns[block.owner, block.index] = column
        return columns

    def own_parts(self, rank: int) -> Iterator[KeyBlock]:
        """Yield the parts of a rank's own blocks whose keys the rank's queries may see."""
        for block in self.blocks:
            part = self.needed_part(rank, block) if block.owner == rank else None
            if part is not None:
                yield part

    def rounds(self, rank: int) -> list[Round]:
        """Return the rounds of transfers of a rank. All ranks have the same rounds, in the same order.

        At distance t, rank r receives block k of rank r − t, and sends its own block k to rank r + t, modulo the number
        of ranks.
        """
        rounds = []
        for distance in range(1, self.size):
            source, target = (rank - distance) % self.size, (rank + distance) % self.size
            for columns in self.columns.T:
                received, sent = (
                    self.needed_part(reader, self.blocks[columns[owner]]) if columns[owner] >= 0 else None
                    for reader, owner in ((rank, source), (target, rank))
                )
                rounds.append(Round(source, received, target, sent))
        return rounds


def _spans_by_rank(shards: Shards) -> list[slice]:
    """Return the slice of each rank's spans among the spans of all ranks."""
    ends = np.cumsum([0, *map(len, shards.ranks)]).tolist()
    return [slice(*pair) for pair in pairwise(ends)]


def key_block_length(problem: Problem) -> int:
    """Return the number of keys in a block. They and their values have about `KEY_BYTES` in the accumulator's dtype.

    Larger blocks would need more memory. Smaller blocks would need more transfers, and more calls of the kernel.
    """
    B, _, _, _ = problem.extent
    key_bytes = B * problem.G * (problem.d_k + problem.d_v) * itemsize(problem.accumulator)
    return max(MIN_KEYS, KEY_BYTES // max(key_bytes, 1) // 64 * 64)


def find_schedule(
    mask: Expression | None, extent: tuple[int, int, int, int], queries: Shards, keys: Shards, block_length: int
) -> Schedule:
    """Return the schedule of a mask.

    Parameters
    ----------
    mask : the mask of the whole problem; None if every pair is allowed
    extent : (B, H, n, m) of the whole problem
    queries, keys : the division of the n queries and of the m keys
    block_length : the largest number of keys in a block
    """
    if mask is not None and mask.tables:
        return _find_schedule(mask, extent, queries, keys, block_length)
    return _find_cached(mask, extent, queries, keys, block_length)


def _find_schedule(
    mask: Expression | None, extent: tuple[int, int, int, int], queries: Shards, keys: Shards, block_length: int
) -> Schedule:
    blocks = tuple(chain.from_iterable([_cut(owner, spans, block_length) for owner, spans in enumerate(keys.ranks)]))
    _, _, n, m = extent
    sizes = [max(MIN_TILE, -(-length // (MAX_TILES * MIN_TILE)) * MIN_TILE) for length in (n, m)]
    ranges = find_tile_ranges(mask, extent, *sizes)
    spans = [span for own in queries.ranks for span in own]
    rows, columns = _Pieces.of(spans, n, sizes[0]), _Pieces.of([block.span for block in blocks], m, sizes[1])
    is_seen = ranges.find_covered()[np.ix_(rows.tile, columns.tile)]
    if mask is not None:
        _clear_hidden(is_seen, mask, extent, rows, columns)
    by_span, by_block = rows.find_ends(is_seen)[1] > 0, columns.find_ends(is_seen.T)[1] > 0
    by_rank = np.stack([by_span[own].any(axis=0) for own in _spans_by_rank(queries)])
    seeing, seen = rows.find_ends(by_block.T), columns.find_ends(by_rank.T).swapaxes(1, 2)
    return Schedule(queries, keys, blocks, seeing, seen)


_find_cached = lru_cache(64)(_find_schedule)


def _cut(owner: int, spans: Sequence[Span], block_length: int) -> list[KeyBlock]:
    """Return the blocks of a rank's spans: the first block of each span, then the second of each, and so on.

    Under a causal mask and the layout zigzag, a block of the first span is much work for some ranks, and a block of the
    last span is much work for the others. In this order the ranks have about the same work at the same time, so they
    wait less for the ranks with which they exchange blocks.
    """
    cut = [span.cut(block_length) for span in spans]
    in_turn = [piece for group in zip_longest(*cut) for piece in group if piece is not None]
    return [KeyBlock(owner, index, piece) for index, piece in enumerate(in_turn)]


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The tiles of a sequence, cut where a span begins or ends. Piece k has the positions edges[k] to edges[k + 1] − 1.

    tile : (pieces,), the index of the tile that contains the piece
    is_cut : (pieces,), True if the piece is shorter than its tile
    begin, end : (spans,), the pieces of span s have the indices begin[s] to end[s] − 1
    """

    edges: Integers
    tile: Integers
    is_cut: Booleans
    begin: Integers
    end: Integers

    @classmethod
    def of(cls, spans: Sequence[Span], length: int, size: int) -> _Pieces:
        """Divide `length` positions into tiles of `size` positions. Divide a tile again where a span begins or ends."""
        starts, stops = (np.array([getattr(span, name) for span in spans], np.int64) for name in ("start", "stop"))
        edges = np.unique(np.concatenate([np.arange(0, length, size), starts, stops, [length]]))
        tile = edges[:-1] // size
        is_cut = np.diff(edges) < np.minimum(size, length - tile * size)
        return cls(edges, tile, is_cut, np.searchsorted(edges, starts), np.searchsorted(edges, stops))

    def find_ends(self, is_seen: Booleans) -> Integers:
        """Return (2, spans, k): the first seen position of each span, and the position after the last seen one.

        Both are 0 if no query sees a position of the span. `is_seen` has the shape (pieces, k).
        """
        shape, edges = (1, is_seen.shape[1]), self.edges[:, None]
        firsts = np.concatenate([np.where(is_seen, edges[:-1], edges[-1]), np.full(shape, edges[-1])])
        stops = np.concatenate([np.zeros(shape, np.int64), np.where(is_seen, edges[1:], 0)])
        next_first = np.minimum.accumulate(firsts[::-1])[::-1]  # of the pieces from each one on
        found = np.stack([next_first[self.begin], np.maximum.accumulate(stops)[self.end]])
        return np.where(found[0] < found[1], found, 0)


def _clear_hidden(
    is_seen: Booleans, mask: Expression, extent: tuple[int, int, int, int], rows: _Pieces, columns: _Pieces
) -> None:
    """Set an entry of `is_seen` to False if its piece is cut and bounds prove that the mask hides all its pairs.

    Without this function a rank would need a whole block of another rank because of one tile that has positions of both
    ranks.
    """
    at = np.argwhere(is_seen & (rows.is_cut[:, None] | columns.is_cut))
    for chunk in np.array_split(at, -(-len(at) // MAX_PIECES_AT_ONCE)) if len(at) else ():
        row, column = chunk.T
        ends = [(own.edges[k], own.edges[k + 1] - 1) for own, k in ((rows, row), (columns, column))]
        _, high = compute_intervals(mask, make_box(extent, i=ends[0], j=ends[1]))[id(mask)]
        is_seen[row, column] = np.broadcast_to(high, row.shape) != 0
