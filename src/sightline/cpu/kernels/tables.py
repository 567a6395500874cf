"""Tables of a formula against a tile of pairs: reading entries, and adding to their gradients.

Vectors run along queries. Most tables are read by gathering; but t[..., i, j] has its neighbours along keys, so that
each lane's entry lies a whole row of the table away, often in one and the same set of the first cache. The part of such
a table that a tile reads is taken along its rows and turned once, and its gradient goes back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...formula.expression import Lookup
from ..codegen.abi import Table
from ..codegen.builder import DOUBLE, INT64, Value, bytes_of, element, vector
from ..codegen.render import Renderer

if TYPE_CHECKING:
    from .block import Block

__all__ = ["Gain", "TileTables"]


class TileTables:
    """The lookups t[..., i, j] of one formula.

    Parameters
    ----------
    which : 0 for the mask, 1 for the score
    places : of the lookups in the formula's `walk`
    """

    def __init__(self, block: Block, which: int, renderer: Renderer | None, places: Sequence[int]) -> None:
        self.block, self.which = block, which
        nodes = [] if renderer is None else [renderer.nodes[place] for place in places]
        self.lookups = [(node, block.tiles.matrix(block.most)) for node in nodes if isinstance(node, Lookup)]

    def turn(self, j0: Value) -> None:
        """Read what the block's queries and the tile of keys from j0 on look up."""
        block = self.block
        for node, scratch in self.lookups:
            source = block.sources[id(node.table)]
            size = bytes_of(source.kind)
            first = source.pointer.at(block.start_of(self.which, node, source.strides)).at(j0 * size)

            def row(lane: Value, first: Value = first, step: Value = source.strides[-2]) -> Value:
                return first.at((block.i0 + block.code.minimum(lane, block.valid - 1)) * step)

            def read(at: Value, lanes: int, kind: Any = source.kind) -> Value:
                return at.load(vector(kind, lanes)).to(block.float)

            block.turn_rows(row, read, size, block.keys, scratch)

    def fetch(self, lane: Value, j0: Value) -> None:
        """Ask for what one of the block's queries looks up in the tile of keys from j0 on, before it is turned."""
        for node, _ in self.lookups:
            source = self.block.sources[id(node.table)]
            first = source.pointer.at(self.block.start_of(self.which, node, source.strides))
            self.block.fetch(first, source.strides[-2], lane, j0, bytes_of(source.kind))

    def entries(self, key: Value, v: int) -> dict[int, Value]:
        """By lookup, the entries of one key and a vector of queries."""
        found = {id(node): (node, self.block.tiles.load(scratch, key, v)) for node, scratch in self.lookups}
        return {which: entry != 0.0 if node.kind == "bool" else entry for which, (node, entry) in found.items()}


class Gain:
    """The gradient of a table through one lookup of the score: each entry gains Σ dS · d score / d entry.

    Parameters
    ----------
    lengths : of the table's axes
    slope : d score / d entry
    sums : address of the gradient, and bytes from one part's sums to the next
    owned : whether one part of the keys alone adds to an entry, in the accumulator's type; else in float64
    by_tile : whether the lookup is t[..., i, j], owned
    """

    def __init__(
        self,
        block: Block,
        node: Lookup,
        lengths: Sequence[Value],
        slope: Renderer,
        sums: Table,
        owned: bool,
        by_tile: bool,
    ) -> None:
        self.block, self.node, self.lengths, self.slope, self.sums = block, node, lengths, slope, sums
        self.kind = block.float if owned else DOUBLE
        self.shares = block.tiles.matrix(block.most) if by_tile else None
        self.lanes = [block.tiles.scratch(block.lanes * 8) for _ in range(2)]
        self.strides: list[Any] = [block.code.value(bytes_of(self.kind), INT64)]
        for length in reversed(lengths[1:]):
            self.strides.insert(0, self.strides[0] * length)

    def add(self, d_score: Value, symbols: dict[str, Value], parts: dict[int, Value], key: Value, v: int) -> None:
        """The share of one key and a vector of queries."""
        block = self.block
        share = self.slope.pair(symbols, parts).to(block.float).spread(block.lanes) * d_score
        share = block.code.where(d_score == 0.0, 0.0, share)
        if self.shares is not None:
            block.tiles.store(self.shares, key, v, share)
            return
        score = block.renderers[1]
        assert score is not None
        indices = [parts[id(argument)] for argument in self.node.arguments]
        base, offsets = score.offsets(self.node, indices, self.strides, self.lengths)
        self.scatter(self.sums.pointer.at(block.part * self.sums.strides[0]).at(base), offsets, share.to(self.kind))

    def scatter(self, target: Value, offsets: Value | None, share: Value) -> None:
        """What lies at the offsets += share, lane by lane in order; in one sum where all lanes have one offset."""
        block, kind = self.block, element(share.type)
        if offsets is None:
            target.store(target.load(kind) + share.sum())
            return
        places, shares = self.lanes
        places.store(offsets)
        shares.store(share)
        size, steps = bytes_of(offsets.type), min(block.lanes, 4)
        with block.code.loop(0, block.lanes, steps) as first:
            for lane in (first + k for k in range(steps)):
                place = target.at(places.at(lane * size).load(element(offsets.type)).to(INT64))
                place.store(place.load(kind) + shares.at(lane * bytes_of(kind)).load(kind))

    def hand_over(self, j0: Value) -> None:
        """Add the tile's shares to the gradient's rows, where they were kept back."""
        block = self.block
        if self.shares is None:
            return
        size = bytes_of(self.kind)
        first = self.sums.pointer.at(block.start_of(1, self.node, self.strides)).at(j0 * size)

        def write(lane: Value, key: Value, shares: Value) -> None:
            place = first.at((block.i0 + lane) * self.strides[-2] + key * size)
            place.store(place.load(shares.type) + shares)

        block.turn_rows_back(self.shares, block.keys, write)
