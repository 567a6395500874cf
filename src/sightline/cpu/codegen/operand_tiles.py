"""Tiles of key and value rows, in the layout that the register tile reads.

The register tile reads numbers along a row or down a column, and broadcasts each number over the lanes. float32 and
float64 are read in place, with any strides. Rows in narrower formats are first copied to scratch, one tile of keys at a
time. In the copy, numbers are widened to float32, or the two bfloat16 numbers of a pair are next to each other.
"""

from __future__ import annotations

from typing import Any

from .formats import FloatFormat
from .register_tile import RegisterTiles
from .values import INT16, INT32, INT64, Value, vector


class OperandTile:
    """The rows of K or V of one tile of keys.

    Parameters
    ----------
    width : numbers per row
    has_unit_stride : True if adjacent numbers of a row are adjacent in memory
    max_rows : the most rows of a tile
    needs_rows : True if the kernel calls `row`
    needs_columns : True if the kernel calls `column` or `vector_rows`
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
        self.builder, self.tiles, self.format, self.width = tiles.builder, tiles, format, width
        self.has_unit_stride = has_unit_stride
        self.is_in_place = format.is_native
        self.row_bytes = tiles.packed_length(width) * tiles.itemsize  # bytes per staged row
        self.pair_row_bytes = width * tiles.itemsize  # bytes per staged row of pairs, each with two numbers of a column
        self.column_row_bytes = self.pair_row_bytes if tiles.paired else self.row_bytes
        is_paired_in_memory = has_unit_stride and width % 2 == 0  # pairs along a row need no copy
        needs_row_scratch = needs_rows and not is_paired_in_memory if tiles.paired else not self.is_in_place
        self.row_scratch = tiles.scratch(max_rows * self.row_bytes) if needs_row_scratch else None
        self.column_scratch = None if tiles.paired else self.row_scratch
        if tiles.paired and needs_columns:
            self.column_scratch = tiles.scratch(tiles.packed_length(max_rows) * self.pair_row_bytes)

    def locate(self, head: Value, row: Value, column: Value) -> None:
        """Set the address of a head's rows, and the strides in bytes from row to row and from column to column."""
        self.head, self.row_stride = head, row
        self.column_stride: Any = self.format.itemsize if self.has_unit_stride else column
        self.element_stride = None if self.has_unit_stride else column

    def stage(self, first: Value, count: Value) -> None:
        """Select `count` rows of the head, from row `first` on, and copy the rows if their format needs a copy."""
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
                source = self.block.at(r * self.row_stride)
                target = self.column_scratch.at(r * (self.pair_row_bytes // 2))
                has_second, strides = r + 1 < count, (self.row_stride, self.element_stride)
                interleave_rows(self.tiles, source, target, self.width, *strides, has_second)

    def row(self, r: Value) -> tuple[Value, Any]:
        """Return (address of the first number of row r, bytes to the next number). Later rows are the last row."""
        r = self.builder.minimum(r, self.count - 1)
        if self.row_scratch is not None:
            return self.row_scratch.at(r * self.row_bytes), self.tiles.itemsize
        return self.block.at(r * self.row_stride), self.tiles.itemsize if self.tiles.paired else self.column_stride

    def column(self, c: Value) -> tuple[Value, Any]:
        """Return (address of the first number of column c, bytes to the next number of the column)."""
        if self.column_scratch is not None:
            return self.column_scratch.at(c * self.tiles.itemsize), self.column_row_bytes
        return self.block.at(c * self.column_stride), self.row_stride

    def vector_rows(self) -> tuple[Value, Any]:
        """Return (address, bytes from row to row) to load vectors along rows. A row of pairs joins two rows of V."""
        if self.column_scratch is not None:
            return self.column_scratch, self.column_row_bytes
        return self.block, self.row_stride

    def load_entry(self, r: Value, c: Value) -> Value:
        """Return the number in row r and column c, read from the operand itself and widened."""
        return self.format.load(self.block.at(r * self.row_stride).at(c * self.column_stride))


def widen_row(tiles: RegisterTiles, format: FloatFormat, source: Value, target: Value, width: int, step: Any) -> None:
    """Copy a row to scratch, widened. `step` is the bytes from number to number; None if numbers are adjacent."""
    builder, lanes = tiles.builder, tiles.lanes
    stride = format.itemsize if step is None else step
    whole = width // lanes * lanes if step is None else 0
    with builder.loop(0, whole, lanes) as c:
        target.at(c * tiles.itemsize).store(format.load(source.at(c * format.itemsize), lanes))
    with builder.loop(whole, width) as c:
        target.at(c * tiles.itemsize).store(format.load(source.at(c * stride)))


def pair_row(tiles: RegisterTiles, source: Value, target: Value, width: int, step: Any) -> None:
    """Copy a row of bfloat16 to scratch as pairs of adjacent numbers. If `width` is odd, the last pair ends with 0."""
    builder = tiles.builder
    stride = 2 if step is None else step
    with builder.loop(0, width // 2) as c:
        pair = [_load_bits(source.at((c * 2 + k) * stride)) for k in range(2)]
        target.at(c * 4).store(pair[0] | (pair[1] << 16))
    if width % 2:
        last = builder.value(width - 1, INT64)
        target.at(last // 2 * 4).store(_load_bits(source.at(last * stride)))


def interleave_rows(
    tiles: RegisterTiles,
    source: Value,
    target: Value,
    width: int,
    row_stride: Value,
    element_stride: Any,
    has_second: Value,
) -> None:
    """Copy two rows of bfloat16 to scratch as one row of pairs. The second row is 0 if `has_second` is false."""
    builder, lanes = tiles.builder, 2 * tiles.lanes
    stride = 2 if element_stride is None else element_stride
    step = builder.where(has_second, row_stride, 0)
    whole = width // lanes * lanes if element_stride is None else 0

    def rows(at: Value, count: int) -> list[Value]:
        low, high = (x.load(vector(INT16, count)) for x in (at, at.at(step)))
        return [low, builder.where(has_second, high, builder.value(0, high.type))]

    with builder.loop(0, whole, lanes) as c:
        low, high = rows(source.at(c * 2), lanes)
        for half in range(2):
            target.at(c * 4 + half * tiles.align).store(low.interleave(high, half))
    with builder.loop(whole, width) as c:
        low, high = (x.zero_extend(INT32) for x in rows(source.at(c * stride), 1))
        target.at(c * 4).store(low | (high << 16))


def _load_bits(pointer: Value) -> Value:
    """Return the bits of one bfloat16 number in the low half of an INT32."""
    return pointer.load(INT16).zero_extend(INT32)
