"""Which blocks of keys each rank needs, and how many pairs it computes with them.

Every rank computes the same schedule from the mask, so no rank asks another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise, zip_longest
from typing import Any

import numpy as np

from ..cached_property import cached_property
from ..formula.expression import Expression
from ..formula.interval_arithmetic import compute_intervals
from ..formula.tile_ranges import TileRanges, find_tile_ranges, make_box
from ..problem import Problem
from ..statistics import itemsize
from .shards import Shards, Span

__all__ = ["KeyBlock", "Round", "Schedule", "find_schedule", "key_block_length"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

MIN_TILE, MAX_TILES = 64, 2048  # positions of a tile of the search, at least; tiles along a sequence, at most
KEY_BYTES, MIN_KEYS = 8 << 20, 256  # the size of a block of keys and values, about; its number of keys, at least
MAX_PIECES_AT_ONCE = 1 << 16  # pieces whose bounds are computed together; the number limits the memory


@dataclass(frozen=True)
class KeyBlock:
    """Consecutive keys that are sent at once. They are the `index`-th block of their owner's shard."""

    owner: int
    index: int
    span: Span


@dataclass(frozen=True)
class Round:
    """The transfers of one round, as one rank sees them.

    At distance t, rank r receives block k from rank r − t and sends its own block k to rank r + t, modulo the number
    of ranks. A transfer that the mask makes needless is None.
    """

    distance: int
    received: KeyBlock | None
    sent: KeyBlock | None


@dataclass(frozen=True, eq=False)
class Schedule:
    """The blocks of keys that each rank needs.

    queries, keys : the division of the queries and of the keys
    blocks : every block of keys, in the order of their owners and indices
    pairs : (spans of queries, blocks), the number of pairs that are computed, over all batches and heads; an estimate
        for long sequences. The spans are those of all ranks, in order. An entry is 0 only if the mask hides every pair.
    """

    queries: Shards
    keys: Shards
    blocks: tuple[KeyBlock, ...]
    pairs: Array

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.queries.ranks)

    @cached_property
    def pairs_by_rank(self) -> Array:
        """(ranks, blocks): the number of pairs that each rank computes with each block."""
        starts = np.cumsum([0, *[len(spans) for spans in self.queries.ranks]])
        return np.stack([self.pairs[first:last].sum(axis=0) for first, last in pairwise(starts)])

    @property
    def work(self) -> Array:
        """(ranks,): the number of pairs that each rank computes."""
        work: Array = self.pairs_by_rank.sum(axis=1)
        return work

    @property
    def imbalance(self) -> float:
        """The work of the most loaded rank over the mean work; 1 if no rank has work."""
        mean = float(self.work.mean())
        return float(self.work.max()) / mean if mean else 1.0

    @cached_property
    def received_keys(self) -> Array:
        """(ranks, ranks): the number of keys that rank r receives from rank o, at [r, o]; 0 on the diagonal."""
        counts = np.zeros((self.size, self.size))
        for column, block in enumerate(self.blocks):
            counts[self.pairs_by_rank[:, column] > 0, block.owner] += len(block.span)
        np.fill_diagonal(counts, 0)
        return counts

    def needs(self, rank: int, block: KeyBlock) -> bool:
        """True if the rank computes pairs with the block."""
        return bool(self.pairs_by_rank[rank, self.column(block)] > 0)

    def column(self, block: KeyBlock) -> int:
        """Return the index of a block in `blocks`."""
        return self._first_column[block.owner] + block.index

    @cached_property
    def _first_column(self) -> list[int]:
        counts = [sum(block.owner == owner for block in self.blocks) for owner in range(self.size)]
        return [sum(counts[:owner]) for owner in range(self.size)]

    def owned(self, rank: int) -> list[KeyBlock]:
        """Return the blocks of a rank's own shard."""
        return [block for block in self.blocks if block.owner == rank]

    def rounds(self, rank: int) -> list[Round]:
        """Return the rounds of transfers of a rank. All ranks have the same rounds, in the same order."""
        most = max((block.index + 1 for block in self.blocks), default=0)
        by_place = {(block.owner, block.index): block for block in self.blocks}
        rounds = []
        for distance in range(1, self.size):
            source, target = (rank - distance) % self.size, (rank + distance) % self.size
            for index in range(most):
                received, sent = by_place.get((source, index)), by_place.get((rank, index))
                rounds.append(
                    Round(
                        distance,
                        received if received is not None and self.needs(rank, received) else None,
                        sent if sent is not None and self.needs(target, sent) else None,
                    )
                )
        return rounds


def key_block_length(problem: Problem) -> int:
    """Return how many keys are sent at once: their keys and values have about `KEY_BYTES` in the accumulator's dtype.

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
    sizes = [max(MIN_TILE, -(-length // MAX_TILES)) for length in (n, m)]
    ranges = find_tile_ranges(mask, extent, *sizes)
    full, partial = _count_tiles(ranges, ranges.full), _count_tiles(ranges, ~ranges.full)
    spans = [span for own in queries.ranks for span in own]
    rows, columns = _Pieces.of(spans, n, sizes[0]), _Pieces.of([block.span for block in blocks], m, sizes[1])
    pieces = partial[np.ix_(rows.tile, columns.tile)]
    if mask is not None:
        _clear_hidden(pieces, mask, extent, rows, columns)
    pieces *= (1 + MIN_TILE / max(sizes)) / 2  # a kernel's tiles are small: about half of them are empty in a large one
    pieces += full[np.ix_(rows.tile, columns.tile)]
    pieces *= rows.lengths[:, None] * columns.lengths
    return Schedule(queries, keys, blocks, columns.sum_spans(rows.sum_spans(pieces).T).T)


_find_cached = lru_cache(64)(_find_schedule)


def _cut(owner: int, spans: Sequence[Span], block_length: int) -> list[KeyBlock]:
    """Return the blocks of a rank's spans: the first block of each span, then the second of each, and so on.

    Under a causal mask, a block of the first span of a zigzag is much work for some ranks, and a block of the last span
    for the others. In turn they keep the ranks in step, since a rank waits for the ranks with which it exchanges.
    """
    pieces = [
        [
            Span(first, min(first + block_length, span.stop), span.row + first - span.start)
            for first in range(span.start, span.stop, block_length)
        ]
        for span in spans
    ]
    in_turn = [piece for group in zip_longest(*pieces) for piece in group if piece is not None]
    return [KeyBlock(owner, index, piece) for index, piece in enumerate(in_turn)]


def _count_tiles(ranges: TileRanges, kind: np.ndarray[Any, np.dtype[np.bool_]]) -> Array:
    """Return (query blocks, key blocks): in how many batches and heads each tile is in the ranges of a kind."""
    B, H, _, _ = ranges.extent
    starts = np.zeros((ranges.query_blocks, ranges.key_blocks + 1))
    row = np.repeat(np.arange(len(ranges.start) - 1), np.diff(ranges.start)) % max(ranges.query_blocks, 1)
    np.add.at(starts, (row[kind], ranges.first[kind]), 1.0)
    np.add.at(starts, (row[kind], ranges.last[kind]), -1.0)
    repeats = (B // ranges.batches) * (H // ranges.heads) if B and H else 0
    counts: Array = starts.cumsum(axis=1)[:, :-1] * repeats
    return counts


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The tiles of a sequence, cut where a span begins or ends.

    first, last : (pieces,), the first and the last position of each piece
    lengths : (pieces,), the number of positions of each piece
    tile : (pieces,), the tile that has the piece
    is_cut : (pieces,), whether the piece is a part of its tile alone
    begin, end : (spans,), the pieces of each span, from `begin` to before `end`
    """

    first: Indices
    last: Indices
    lengths: Array
    tile: Indices
    is_cut: np.ndarray[Any, np.dtype[np.bool_]]
    begin: Indices
    end: Indices

    @classmethod
    def of(cls, spans: Sequence[Span], length: int, size: int) -> _Pieces:
        """Return the pieces of `length` positions in tiles of `size` positions."""
        starts, stops = (np.array([getattr(span, name) for span in spans], np.int64) for name in ("start", "stop"))
        edges = np.unique(np.concatenate([np.arange(0, length, size), starts, stops, [length]]))
        first, lengths = edges[:-1], np.diff(edges)
        tile = first // size
        is_cut = lengths < np.minimum(size, length - tile * size)
        begin, end = np.searchsorted(edges, starts), np.searchsorted(edges, stops)
        return cls(first, edges[1:] - 1, lengths.astype(np.float64), tile, is_cut, begin, end)

    def sum_spans(self, values: Array) -> Array:
        """Return (spans, ...), the sums of an array (pieces, ...) over the pieces of each span."""
        padded = np.concatenate([values, np.zeros((1, *values.shape[1:]))])  # `end` is an index of `reduceat`
        if not len(self.begin):
            return padded[:0]
        order = np.argsort(self.begin, kind="stable")  # then `reduceat` sums no piece between two spans
        bounds = np.stack([self.begin[order], self.end[order]], axis=1)
        sums = np.empty((len(order), *values.shape[1:]))
        sums[order] = np.add.reduceat(padded, bounds.ravel(), axis=0)[::2]
        sums[self.begin == self.end] = 0.0
        return sums


def _clear_hidden(
    pieces: Array, mask: Expression, extent: tuple[int, int, int, int], rows: _Pieces, columns: _Pieces
) -> None:
    """Set the entries of cut pieces to 0 where bounds prove that the mask hides every pair. The tiles are partial.

    Without this, a tile on the border of two ranks would make a rank need the whole block of its neighbour.
    """
    at = np.argwhere((pieces > 0) & (rows.is_cut[:, None] | columns.is_cut))
    for chunk in np.array_split(at, -(-len(at) // MAX_PIECES_AT_ONCE)) if len(at) else ():
        row, column = chunk.T
        box = make_box(extent, i=(rows.first[row], rows.last[row]), j=(columns.first[column], columns.last[column]))
        _, high = compute_intervals(mask, box)[id(mask)]
        pieces[row, column] *= np.broadcast_to(high, row.shape) != 0
