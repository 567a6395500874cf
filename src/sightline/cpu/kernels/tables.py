"""Table lookups of a formula for a tile of pairs: the entries are read, or terms are added to table gradients.

Vectors run along queries. Most tables are read by a gather. In t[..., i, j], however, entries are adjacent along keys,
and each lane reads another row of the table. These rows often map to the same set of the first-level cache. The entries
that a tile reads are therefore loaded along the rows and transposed once. The terms of such a table's gradient are
transposed back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...formula.derivative import derivative
from ...formula.expression import Expression, Lookup, walk
from ..codegen.abi import OutputArguments, slot_of
from ..codegen.builder import CACHE_LINE_BYTES
from ..codegen.render_llvm import NodeValues, Renderer
from ..codegen.values import DOUBLE, INT64, Value, vector
from .kernel_spec import KEY_BLOCK

if TYPE_CHECKING:
    from .block import Block, ScoredPairs


class TileTables:
    """Reads the table entries of the lookups t[..., i, j] of one formula.

    Parameters
    ----------
    formula : 0 for the mask, 1 for the score, 2 and more for the extra formulas
    lookups : the lookups' indices in `walk(formula)`, the list of the formula's nodes
    """

    def __init__(self, block: Block, formula: int, renderer: Renderer | None, lookups: Sequence[int]) -> None:
        self.block, self.formula = block, formula
        nodes = [] if renderer is None else [renderer.nodes[index] for index in lookups]
        self.lookups = [(node, block.tiles.matrix(KEY_BLOCK)) for node in nodes if isinstance(node, Lookup)]

    def transpose(self, j0: Value) -> None:
        """Read the table entries for the block's queries and the tile of keys at j0 into scratch."""
        block = self.block
        for node, scratch in self.lookups:
            table = block.args.tables[slot_of(node)]
            size = table.kind.itemsize
            first = table.pointer.at(_leading_offset(block, self.formula, node, table.strides)).at(j0 * size)

            def row(lane: Value, first: Value = first, step: Value = table.strides[-2]) -> Value:
                return first.at((block.i0 + block.builder.minimum(lane, block.num_valid - 1)) * step)

            def read(at: Value, lanes: int, kind: Any = table.kind) -> Value:
                return at.load(vector(kind, lanes)).to(block.float)

            block.transpose_rows(row, read, size, block.num_keys, scratch)

    def prefetch(self, lane: Value, j0: Value) -> None:
        """Prefetch the table entries for one query of the block and the tile of keys at j0.

        Without the prefetch `transpose` would wait for memory at every tile, since each lane reads another row.
        """
        block = self.block
        for node, _ in self.lookups:
            table = block.args.tables[slot_of(node)]
            size = table.kind.itemsize
            first = table.pointer.at(_leading_offset(block, self.formula, node, table.strides))
            i = block.i0 + block.builder.minimum(lane, block.num_valid - 1)
            row = first.at(i * table.strides[-2]).at(j0 * size)
            for at in range(0, KEY_BLOCK * size, CACHE_LINE_BYTES):
                block.builder.prefetch(row.at(at))

    def entries(self, key: Value, v: int) -> NodeValues:
        """Return, by the lookup's id, the table entries for one key and a vector of queries."""
        entries = {id(node): (node, self.block.tiles.load(scratch, key, v)) for node, scratch in self.lookups}
        return {node_id: entry != 0.0 if node.kind == "bool" else entry for node_id, (node, entry) in entries.items()}


class TableGradientCode:
    """The gradient of a table through one lookup of the score: Σ dS · d score / d entry is added to each entry.

    Parameters
    ----------
    sums : address of the gradient, and the bytes from one split's sums to the next split's
    node_index : the lookup's index in `walk(score)`, the list of the score's nodes
    slot : the table's slot among the tables of the kernel
    is_per_key : True if a single split of the keys adds to each entry. The sums have the accumulator's type if
        `is_per_key` is true, else float64.
    """

    def __init__(
        self, block: Block, score: Expression, sums: OutputArguments, node_index: int, slot: int, is_per_key: bool
    ) -> None:
        node = walk(score)[node_index]
        assert isinstance(node, Lookup)
        self.block, self.node, self.lengths, self.sums = block, node, block.args.tables[slot].lengths, sums
        self.entry_derivative = block.make_renderer(derivative(score, node), block.float, ())
        self.kind = block.float if is_per_key else DOUBLE
        is_tile_lookup = is_per_key and node_index in block.spec.tile_lookups[1]
        self.tile_sums = block.tiles.matrix(KEY_BLOCK) if is_tile_lookup else None
        self.lane_scratch = [block.tiles.scratch(block.lanes * 8) for _ in range(2)]
        self.strides: list[Any] = [block.builder.value(self.kind.itemsize, INT64)]
        for length in reversed(self.lengths[1:]):
            self.strides.insert(0, self.strides[0] * length)

    def add(self, d_score: Value, pairs: ScoredPairs) -> None:
        """Add the terms of these pairs to the gradient, or store them in `tile_sums`."""
        block = self.block
        term = self.entry_derivative.evaluate_formula(pairs.symbols, pairs.nodes).to(block.float).broadcast(block.lanes)
        term = term * d_score
        term = block.builder.where(d_score == 0.0, 0.0, term)
        if self.tile_sums is not None:
            block.tiles.store(self.tile_sums, pairs.key, pairs.v, term)
            return
        score = block.renderers[1]
        assert score is not None
        indices = [pairs.nodes[id(argument)] for argument in self.node.arguments]
        base, offsets = score.offsets(self.node, indices, self.strides, self.lengths)
        self.scatter(self.sums.pointer.at(block.split * self.sums.stride).at(base), offsets, term.to(self.kind))

    def scatter(self, target: Value, offsets: Value | None, terms: Value) -> None:
        """Add each lane's term to the entry at the lane's offset, in the order of the lanes.

        If `offsets` is None, all lanes belong to the entry at `target`, and the sum of the lanes is added once.
        """
        block, kind = self.block, terms.type.element
        if offsets is None:
            target.store(target.load(kind) + terms.sum())
            return
        offset_lanes, term_lanes = self.lane_scratch
        offset_lanes.store(offsets)
        term_lanes.store(terms)
        size, steps = offsets.type.itemsize, min(block.lanes, 4)
        with block.builder.loop(0, block.lanes, steps) as first:
            for lane in (first + k for k in range(steps)):
                address = target.at(offset_lanes.at(lane * size).load(offsets.type.element).to(INT64))
                address.store(address.load(kind) + term_lanes.at(lane * kind.itemsize).load(kind))

    def store(self, j0: Value) -> None:
        """Add the sums of the tile at j0 to the gradient's rows, if the lookup is t[..., i, j]."""
        block = self.block
        if self.tile_sums is None:
            return
        size = self.kind.itemsize
        first = self.sums.pointer.at(_leading_offset(block, 1, self.node, self.strides)).at(j0 * size)

        def write(lane: Value, key: Value, terms: Value) -> None:
            address = first.at((block.i0 + lane) * self.strides[-2] + key * size)
            address.store(address.load(terms.type) + terms)

        block.write_transposed_rows(self.tile_sums, block.num_keys, write)


def _leading_offset(block: Block, formula: int, node: Lookup, strides: Sequence[Any]) -> Value:
    """Return the bytes from a table's start to t[..., 0, 0], for a lookup t[..., i, j] of the block."""
    start = block.builder.value(0, INT64)
    for index, stride in zip(node.arguments[:-2], strides[:-2], strict=True):
        start = start + block.block_values[0][formula][id(index)].to(INT64) * stride
    return start
