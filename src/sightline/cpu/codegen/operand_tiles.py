"""Rows of key and value as the register tile reads them: numbers to spread, along a row or down a column.

float32 and float64 are read where they lie, whatever their strides. Narrower floats are staged, a block of keys at a
time: widened to float32, or for pairs of bfloat16 laid so that the two of a pair are neighbours.
"""

from __future__ import annotations

from typing import Any

from .builder import INT16, INT32, INT64, Builder, Value, vector
from .formats import FloatFormat
from .register_tile import RegisterTiles

__all__ = ["OperandTile", "interleave_rows", "widen_row"]


class OperandTile:
    """One operand's rows of a block of keys.

    Parameters
    ----------
    width : numbers in a row
    has_unit_stride : whether the numbers of a row lie next to each other
    max_rows : rows in a block
    needs_rows, needs_columns : whether `row` and `column` will be asked for
    """

    def __init__(
        self,
        tiles: RegisterTiles,
        format: FloatFormat,
        width: int,
        has_unit_stride: bool,
        max_rows: int,
        needs_rows: bool = True,
        needs_columns: bool = True,
    ) -> None:
        self.builder: Builder = tiles.builder
        self.tiles, self.format, self.width, self.has_unit_stride, self.max_rows = (
            tiles,
            format,
            width,
            has_unit_stride,
            max_rows,
        )
        self.is_in_place = format.is_native
        self.row_bytes = tiles.packed_length(width) * tiles.itemsize  # bytes of a staged row
        self.pair_row_bytes = width * tiles.itemsize  # of a row of pairs taken down the columns
        pairs = tiles.paired
        is_paired_in_memory = (
            pairs and has_unit_stride and width % 2 == 0
        )  # pairs along a row lie in memory as they are wanted
        self.row_scratch = (
            None
            if self.is_in_place or is_paired_in_memory or (pairs and not needs_rows)
            else tiles.scratch(max_rows * self.row_bytes)
        )
        self.column_scratch = (
            self.row_scratch
            if not pairs
            else tiles.scratch(tiles.packed_length(max_rows) * self.pair_row_bytes)
            if needs_columns
            else None
        )

    def locate(self, head: Value, row: Value, column: Value) -> None:
        """Where a head's rows lie: its address, and bytes from row to row and column to column."""
        self.head, self.row_stride = head, row
        self.column_stride: Any = self.format.itemsize if self.has_unit_stride else column
        self.element_stride = None if self.has_unit_stride else column

    def stage(self, first: Value, count: Value) -> None:
        """Make ready the rows from `first` on, `count` of them."""
        self.block, self.count = self.head.at(first * self.row_stride), count
        if self.is_in_place:
            return
        builder = self.builder
        if self.row_scratch is not None:
            with builder.loop(0, count) as r:
                source, target = self.block.at(r * self.row_stride), self.row_scratch.at(r * self.row_bytes)
                if self.tiles.paired:
                    pair_row(self.tiles, source, target, self.width, self.element_stride)
                else:
                    widen_row(self.tiles, self.format, source, target, self.width, self.element_stride)
        if self.tiles.paired and self.column_scratch is not None:
            with builder.loop(0, count, 2) as r:
                source, target = (
                    self.block.at(r * self.row_stride),
                    self.column_scratch.at(r * (self.pair_row_bytes // 2)),
                )
                interleave_rows(
                    self.tiles, source, target, self.width, self.row_stride, self.element_stride, r + 1 < count
                )

    def row(self, r: Value) -> tuple[Value, Any]:
        """(address of row r's first number, bytes to the next); rows past the end repeat the last."""
        r = self.builder.minimum(r, self.count - 1)
        if self.row_scratch is not None:
            return self.row_scratch.at(r * self.row_bytes), self.tiles.itemsize
        return self.block.at(r * self.row_stride), self.tiles.itemsize if self.tiles.paired else self.column_stride

    def column(self, c: Value) -> tuple[Value, Any]:
        """(address of column c's first number, bytes to the next)."""
        if self.column_scratch is not None:
            return self.column_scratch.at(
                c * self.tiles.itemsize
            ), self.pair_row_bytes if self.tiles.paired else self.row_bytes
        return self.block.at(c * self.column_stride), self.row_stride

    def vector_rows(self) -> tuple[Value, Any]:
        """(address, bytes from one to the next) of the rows as vectors, two joined to one of pairs."""
        if self.column_scratch is not None:
            return self.column_scratch, self.pair_row_bytes if self.tiles.paired else self.row_bytes
        return self.block, self.row_stride

    def load_entry(self, r: Value, c: Value) -> Value:
        """One number as it lies in memory, widened."""
        return self.format.load(self.block.at(r * self.row_stride).at(c * self.column_stride))


def widen_row(
    tiles: RegisterTiles, format: FloatFormat, source: Value, target: Value, width: int, element_stride: Any
) -> None:
    """A row as it is computed with; `element_stride` is bytes from one of its numbers to the next, None where they touch."""
    builder, lanes = tiles.builder, tiles.lanes
    whole = width // lanes * lanes if element_stride is None else 0
    with builder.loop(0, whole, lanes) as c:
        target.at(c * tiles.itemsize).store(format.load(source.at(c * format.itemsize), lanes))
    with builder.loop(whole, width) as c:
        target.at(c * tiles.itemsize).store(
            format.load(source.at(c * (format.itemsize if element_stride is None else element_stride)))
        )


def pair_row(tiles: RegisterTiles, source: Value, target: Value, width: int, element_stride: Any) -> None:
    """A row of bfloat16 as pairs of neighbours, 0 after an odd end."""
    builder = tiles.builder
    step = 2 if element_stride is None else element_stride
    with builder.loop(0, width // 2) as c:
        pair = [_load_bits(source.at((c * 2 + k) * step)) for k in range(2)]
        target.at(c * 4).store(pair[0] | (pair[1] << 16))
    if width % 2:
        last = builder.value(width - 1, INT64)
        target.at(last // 2 * 4).store(_load_bits(source.at(last * step)))


def interleave_rows(
    tiles: RegisterTiles, source: Value, target: Value, width: int, row_stride: Value, element_stride: Any, both: Value
) -> None:
    """Two rows of bfloat16 as one of pairs; 0 in place of a second that is not there."""
    builder, lanes = tiles.builder, 2 * tiles.lanes
    step = builder.where(both, row_stride, 0)
    whole = width // lanes * lanes if element_stride is None else 0

    def rows(at: Value, count: int) -> list[Value]:
        low, high = (x.load(vector(INT16, count)) for x in (at, at.at(step)))
        return [low, builder.where(both, high, builder.value(0, high.type))]

    with builder.loop(0, whole, lanes) as c:
        low, high = rows(source.at(c * 2), lanes)
        for half in range(2):
            target.at(c * 4 + half * tiles.align).store(low.interleave(high, half))
    with builder.loop(whole, width) as c:
        low, high = (
            x.zero_extend(INT32) for x in rows(source.at(c * (2 if element_stride is None else element_stride)), 1)
        )
        target.at(c * 4).store(low | (high << 16))


def _load_bits(pointer: Value) -> Value:
    return pointer.load(INT16).zero_extend(INT32)
