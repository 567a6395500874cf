"""Tables of a formula against a tile of pairs: reading entries, and adding to their gradients.

Vectors run along queries. Most tables are read by gathering; but t[..., i, j] has its neighbours along keys, so that
each lane's entry lies a whole row of the table away, often in one and the same set of the first cache. The part of such
a table that a tile reads is taken along its rows and turned once, and its gradient goes back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...formula.expression import Lookup
from ..codegen.abi import TableArguments
from ..codegen.builder import DOUBLE, INT64, Value, bytes_of, element_type, vector
from ..codegen.render import Renderer

if TYPE_CHECKING:
    from .block import Block

__all__ = ["TableGradientCode", "TileTables"]


class TileTables:
    """The lookups t[..., i, j] of one formula.

    Parameters
    ----------
    formula_index : 0 for the mask, 1 for the score
    lookup_indices : of the lookups in the formula's `walk`
    """

    def __init__(
        self, block: Block, formula_index: int, renderer: Renderer | None, lookup_indices: Sequence[int]
    ) -> None:
        self.block, self.formula_index = block, formula_index
        nodes = [] if renderer is None else [renderer.nodes[lookup_index] for lookup_index in lookup_indices]
        self.lookups = [(node, block.tiles.matrix(block.max_keys)) for node in nodes if isinstance(node, Lookup)]

    def transpose(self, j0: Value) -> None:
        """Read what the block's queries and the tile of keys from j0 on look up."""
        block = self.block
        for node, scratch in self.lookups:
            source = block.sources[id(node.table)]
            size = bytes_of(source.kind)
            first = source.pointer.at(block.leading_offset(self.formula_index, node, source.strides)).at(j0 * size)

            def row(lane: Value, first: Value = first, step: Value = source.strides[-2]) -> Value:
                return first.at((block.i0 + block.builder.minimum(lane, block.num_valid - 1)) * step)

            def read(at: Value, lanes: int, kind: Any = source.kind) -> Value:
                return at.load(vector(kind, lanes)).to(block.float)

            block.transpose_rows(row, read, size, block.num_keys, scratch)

    def prefetch(self, lane: Value, j0: Value) -> None:
        """Ask for what one of the block's queries looks up in the tile of keys from j0 on, before it is turned."""
        for node, _ in self.lookups:
            source = self.block.sources[id(node.table)]
            first = source.pointer.at(self.block.leading_offset(self.formula_index, node, source.strides))
            self.block.prefetch_row(first, source.strides[-2], lane, j0, bytes_of(source.kind))

    def entries(self, key: Value, v: int) -> dict[int, Value]:
        """By lookup, the entries of one key and a vector of queries."""
        entries = {id(node): (node, self.block.tiles.load(scratch, key, v)) for node, scratch in self.lookups}
        return {node_id: entry != 0.0 if node.kind == "bool" else entry for node_id, (node, entry) in entries.items()}


class TableGradientCode:
    """The gradient of a table through one lookup of the score: each entry gains Σ dS · d score / d entry.

    Parameters
    ----------
    lengths : of the table's axes
    entry_derivative : d score / d entry
    sums : address of the gradient, and bytes from one part's sums to the next
    is_per_key : whether one part of the keys alone adds to an entry, in the accumulator's type; else in float64
    is_tile_lookup : whether the lookup is t[..., i, j], is_per_key
    """

    def __init__(
        self,
        block: Block,
        node: Lookup,
        lengths: Sequence[Value],
        entry_derivative: Renderer,
        sums: TableArguments,
        is_per_key: bool,
        is_tile_lookup: bool,
    ) -> None:
        self.block, self.node, self.lengths, self.entry_derivative, self.sums = (
            block,
            node,
            lengths,
            entry_derivative,
            sums,
        )
        self.kind = block.float if is_per_key else DOUBLE
        self.tile_shares = block.tiles.matrix(block.max_keys) if is_tile_lookup else None
        self.lane_scratch = [block.tiles.scratch(block.lanes * 8) for _ in range(2)]
        self.strides: list[Any] = [block.builder.value(bytes_of(self.kind), INT64)]
        for length in reversed(lengths[1:]):
            self.strides.insert(0, self.strides[0] * length)

    def add(
        self, d_score: Value, symbols: dict[str, Value], score_values: dict[int, Value], key: Value, v: int
    ) -> None:
        """The share of one key and a vector of queries."""
        block = self.block
        share = (
            self.entry_derivative.evaluate_pair(symbols, score_values).to(block.float).broadcast(block.lanes) * d_score
        )
        share = block.builder.where(d_score == 0.0, 0.0, share)
        if self.tile_shares is not None:
            block.tiles.store(self.tile_shares, key, v, share)
            return
        score = block.renderers[1]
        assert score is not None
        indices = [score_values[id(argument)] for argument in self.node.arguments]
        base, offsets = score.offsets(self.node, indices, self.strides, self.lengths)
        self.scatter(self.sums.pointer.at(block.split * self.sums.strides[0]).at(base), offsets, share.to(self.kind))

    def scatter(self, target: Value, offsets: Value | None, share: Value) -> None:
        """What lies at the offsets += share, lane by lane in order; in one sum where all lanes have one offset."""
        block, kind = self.block, element_type(share.type)
        if offsets is None:
            target.store(target.load(kind) + share.sum())
            return
        offset_lanes, shares = self.lane_scratch
        offset_lanes.store(offsets)
        shares.store(share)
        size, steps = bytes_of(offsets.type), min(block.lanes, 4)
        with block.builder.loop(0, block.lanes, steps) as first:
            for lane in (first + k for k in range(steps)):
                address = target.at(offset_lanes.at(lane * size).load(element_type(offsets.type)).to(INT64))
                address.store(address.load(kind) + shares.at(lane * bytes_of(kind)).load(kind))

    def store(self, j0: Value) -> None:
        """Add the tile's shares to the gradient's rows, where they were kept back."""
        block = self.block
        if self.tile_shares is None:
            return
        size = bytes_of(self.kind)
        first = self.sums.pointer.at(block.leading_offset(1, self.node, self.strides)).at(j0 * size)

        def write(lane: Value, key: Value, shares: Value) -> None:
            address = first.at((block.i0 + lane) * self.strides[-2] + key * size)
            address.store(address.load(shares.type) + shares)

        block.write_transposed_rows(self.tile_shares, block.num_keys, write)
