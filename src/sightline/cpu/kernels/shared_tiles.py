"""The base class of the kernels whose blocks of queries take turns at each tile of keys.

A tile of K and V is read, and copied if need be, once for several blocks. The blocks belong to heads that share a key
head. Each block has its own tile ranges, so that it skips the tiles in which all its pairs are hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..codegen.builder import Variable
from ..codegen.operand_tiles import OperandTile
from ..codegen.values import BYTE, INT64, Value
from .block import Block
from .kernel_spec import KEY_BLOCK, round_up

NO_TILE = 2**62
MIN_BLOCKS_FOR_COPY, MIN_QUERIES_FOR_COPY = 4, 96  # fewer do not repay a copy of rows of K and V that are far apart


def min_blocks_for_copy(query_block: int) -> int:
    """Return how many blocks, of so many queries each, repay a copy of a tile whose rows are far apart."""
    return max(MIN_BLOCKS_FOR_COPY, MIN_QUERIES_FOR_COPY // query_block)


class SharedTiles(Block):
    """A block among several that share tiles.

    Attributes
    ----------
    key, value : the tiles of rows of K and V
    g : the key head
    first_block, num_blocks : the selected blocks, numbered over all heads of the key head
    block_number : the number of the block in `loop_blocks`, from 0 on
    """

    key: OperandTile
    value: OperandTile
    g: Value

    def allocate_blocks(self, count: int, matrices: Mapping[str, int], variables: Sequence[Variable]) -> None:
        """Allocate what is kept of each of `count` blocks: variables, and matrices (attribute: number of rows)."""
        self.head, self.block_index, self.range_index = (Variable(self.builder, INT64) for _ in range(3))
        self.kept_variables = [self.range_index, self.head, self.block_index, *variables]
        self.kept_matrices, self.kept_offset = {}, 0
        for name, rows in matrices.items():
            self.kept_matrices[name] = self.kept_offset
            self.kept_offset += rows * self.tiles.row_bytes
        # all variables have the size of the largest: integers may be wider than the floats of the kernel
        size = max(variable.kind.lanes * variable.kind.itemsize for variable in self.kept_variables)
        self.kept_size = round_up(size, self.tiles.align)
        self.block_bytes = self.kept_offset + len(self.kept_variables) * self.kept_size
        self.blocks = self.tiles.scratch(count * self.block_bytes)

    def select_blocks(self, first: Value, count: Value) -> None:
        """Select the blocks of the key head `self.g` that the next loops visit."""
        self.first_block, self.num_blocks = first, count
        self.serves_many = count >= min_blocks_for_copy(self.tiles.block)

    @contextmanager
    def loop_blocks(self, is_new: bool = False, loads: bool = False, stores: bool = False) -> Iterator[None]:
        """Write a loop over the selected blocks, and locate each block.

        Parameters
        ----------
        is_new : the first loop over the selected blocks
        loads, stores : the body reads, or sets, the variables that the kernel keeps of each block
        """
        args, align = self.args, self.tiles.align
        with self.builder.loop(0, self.num_blocks) as k:
            kept, self.block_number = self.blocks.at(k * self.block_bytes), k
            for name, offset in self.kept_matrices.items():
                setattr(self, name, kept.at(offset))
            places = [kept.at(self.kept_offset + index * self.kept_size) for index in range(len(self.kept_variables))]
            variables = list(zip(self.kept_variables, places, strict=True))
            for variable, place in [] if is_new else variables if loads else variables[:3]:
                variable.set(place.load(variable.kind, align))
            if is_new:
                index = self.first_block + k
                self.head.set(self.g * args.group + index // args.query_blocks)
                self.block_index.set(index % args.query_blocks)
            self.locate(self.b, self.head.get(), self.block_index.get())
            if is_new:
                self.restart_tiles()
            yield
            for variable, place in (variables[3:] if stores else []) + variables[: 3 if is_new else 1]:
                place.store(variable.get(), align)

    def restart_tiles(self) -> None:
        """Let a block begin with its first tile range again."""
        self.range_index.set(self.tile_range_start)

    @contextmanager
    def loop_shared_tiles(self, first: Any, last: Any, operands: Sequence[OperandTile]) -> Iterator[Value]:
        """Write a loop over the tiles `first` <= tile < `last` that any block needs; select the tile's rows of K and V.

        Yields the index of the tile's first key. The body visits the blocks by `loop_blocks`, and `is_at(j0)` tells
        whether a block needs the tile.
        """
        builder = self.builder
        tile = Variable(builder, INT64, first)
        with builder.infinite_loop() as break_if:
            tile.set(self.find_tile(tile.get()))
            break_if(tile.get() >= last)
            j0 = tile.get() * KEY_BLOCK
            self.num_keys = builder.minimum(self.args.m - j0, KEY_BLOCK)
            for operand in operands:
                operand.stage(j0, self.num_keys, self.serves_many)
            yield j0
            tile.set(tile.get() + 1)

    def is_at(self, j0: Value) -> Value:
        """True if the tile at j0, which `find_tile` returned, is in the block's current tile range."""
        tile = j0 // KEY_BLOCK
        return self.next_tile(tile) == tile

    def is_partial(self) -> Value:
        """True if some pairs of the block's current tile range may be hidden."""
        return self.args.tile_range_full.at(self.range_index.get()).load(BYTE) == 0

    def find_tile(self, first: Value) -> Value:
        """Return the first tile, from `first` on, that any block needs; `NO_TILE` if no block needs another tile."""
        nearest = Variable(self.builder, INT64, NO_TILE)
        with self.loop_blocks():
            with self.builder.infinite_loop() as break_if:  # skip the ranges that end before
                break_if(self.range_index.get() >= self.tile_range_stop)
                break_if(self.args.tile_range_last.at(self.range_index.get() * 8).load(INT64) > first)
                self.range_index.set(self.range_index.get() + 1)
            nearest.set(self.builder.minimum(self.next_tile(first), nearest.get()))
        return nearest.get()

    def next_tile(self, first: Value) -> Value:
        """Return the first tile from `first` on of the block's current range; `NO_TILE` if no range is left."""
        found = Variable(self.builder, INT64, NO_TILE)
        with self.builder.if_then(self.range_index.get() < self.tile_range_stop):
            start = self.args.tile_range_first.at(self.range_index.get() * 8).load(INT64)
            found.set(self.builder.maximum(start, first))
        return found.get()
