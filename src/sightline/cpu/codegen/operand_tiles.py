"""Tiles of key and value rows, in the layout that the register tile reads.

The register tile, the matrix product of all kernels, reads numbers along a row or down a column, and broadcasts each
number over the lanes. float32 and float64 are read in place, with any strides. Rows in narrower formats, and quantised
rows, are first copied to scratch, one tile of keys at a time. In the copy, numbers are widened to float32, or the two
bfloat16 numbers of a pair are next to each other.

Rows of float32 and float64 are copied too if they are far apart and the copy serves many queries. The rows of one head
are far apart in a view of (B, n, H, d): a tile of 64 rows then lies in up to 64 pages, and rows whose distance is a
power of two share a few sets of the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .builder import CACHE_LINE_BYTES, Variable
from .formats import FloatFormat, PackedFormat
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
    needs_columns : True if the kernel calls `column`
    copies_far_rows : True if `stage` copies rows that are far apart when its argument `serves_many` is true
    """

    def __init__(
        self,
        tiles: RegisterTiles,
        format: FloatFormat | PackedFormat,
        width: int,
        has_unit_stride: bool,
        max_rows: int,
        needs_rows: bool = True,
        needs_columns: bool = True,
        copies_far_rows: bool = False,
    ) -> None:
        self.builder, self.tiles, self.format, self.width = tiles.builder, tiles, format, width
        self.has_unit_stride, self.max_rows = has_unit_stride, max_rows
        self.is_in_place = format.is_native
        self.row_bytes = tiles.packed_length(width) * tiles.itemsize  # bytes per staged row
        self.pair_row_bytes = width * tiles.itemsize  # bytes per staged row of pairs, each with two numbers of a column
        is_paired_in_memory = has_unit_stride and width % 2 == 0  # pairs along a row need no copy
        self.may_copy = copies_far_rows and self.is_in_place
        needs_row_scratch = self.may_copy or not self.is_in_place
        if tiles.paired:
            needs_row_scratch = needs_rows and not is_paired_in_memory
        self.row_scratch = tiles.scratch(max_rows * self.row_bytes) if needs_row_scratch else None
        self.column_scratch = None  # of pairs of two rows
        if tiles.paired and needs_columns:
            self.column_scratch = tiles.scratch(tiles.packed_length(max_rows) * self.pair_row_bytes)

    def locate(self, head: Value, row: Value, column: Value) -> None:
        """Set the address of a head's rows, and the strides in bytes from row to row and from column to column."""
        self.head, self.row_stride = head, row
        self.column_stride: Any = self.format.itemsize if self.has_unit_stride else column
        self.element_stride = None if self.has_unit_stride else column

    def stage(self, first: Value, count: Value, serves_many: Any = False) -> None:
        """Select `count` rows of the head, from row `first` on, and copy them if their format needs a copy.

        `serves_many` is true if many queries read the rows: rows that are far apart are then copied too.
        """
        self.block, self.count = self.head.at(first * self.row_stride), count
        self.rows, self.row_step, self.column_step = self.block, self.row_stride, self.column_stride
        scratch, where = self.row_scratch, self.builder.where
        if scratch is not None and not self.may_copy:
            self.copy_rows(scratch)
            self.rows, self.column_step = scratch, self.tiles.itemsize
            self.row_step = self.builder.value(self.row_bytes, INT64)
        elif scratch is not None:
            self.copies = copies = serves_many
            if self.has_unit_stride:  # rows are copied only if they are at least twice their length apart
                far = 2 * self.row_bytes
                self.copies = copies = serves_many & ((self.row_stride >= far) | (self.row_stride <= -far))
            with self.builder.if_then(copies):
                self.copy_rows(scratch)
            self.rows = where(copies, scratch, self.block)
            self.row_step = where(copies, self.row_bytes, self.row_stride)
            if not self.has_unit_stride:
                self.column_step = where(copies, self.tiles.itemsize, self.column_stride)
        if self.column_scratch is not None:
            with self.builder.loop(0, count, 2) as r:
                source = self.block.at(r * self.row_stride)
                target = self.column_scratch.at(r * (self.pair_row_bytes // 2))
                has_second, strides = r + 1 < count, (self.row_stride, self.element_stride)
                interleave_rows(self.tiles, source, target, self.width, *strides, has_second)

    def prefetch_next(self, part: Value, parts: Value) -> None:
        """If this tile was copied, prefetch part number `part` (of `parts`) of the rows of the next tile.

        The hardware prefetcher does not foresee which rows a copy reads, because each row is in another page.
        """
        if not self.may_copy or not self.has_unit_stride:
            return
        builder, rows = self.builder, self.max_rows
        with builder.if_then(self.copies), builder.loop(part * rows // parts, (part + 1) * rows // parts) as r:
            row = self.block.at((r + rows) * self.row_stride)
            for at in range(0, self.width * self.format.itemsize, CACHE_LINE_BYTES):
                builder.prefetch(row.at(at))

    def copy_rows(self, scratch: Value) -> None:
        """Copy the tile's rows to scratch, widened or as pairs."""
        with self.builder.loop(0, self.count) as r:
            source, target = self.block.at(r * self.row_stride), scratch.at(r * self.row_bytes)
            if self.tiles.paired:
                pair_row(self.tiles, source, target, self.width, self.element_stride)
            else:
                widen_row(self.tiles, self.format, source, target, self.width, self.element_stride)

    def multiply_rows(self, matrix: Value, finish: Callable[[Value, int, Value], None]) -> None:
        """Call finish(r, v, Σ_c row r[c] · matrix[c][v]) for every row r of the tile and vector v of the matrix."""
        self._multiply(self.count, self.max_rows, self.row, matrix, self.tiles.packed_length(self.width), finish, None)

    def multiply_columns(
        self, matrix: Value, finish: Callable[[Value, int, Value], None], stride: int | None = None
    ) -> None:
        """Call finish(c, v, Σ_r column c[r] · matrix[r][v]) for every column c and vector v of the matrix.

        `stride` are the bytes from row to row of the matrix, if it is no scratch matrix of one block.
        """
        length, pair_size = self.count, self.tiles.pair_size
        length = (length + (pair_size - 1)) // pair_size
        self._multiply(self.width, self.width, self.column, matrix, length, finish, stride)

    def _multiply(
        self,
        count: Any,
        max_count: int,
        number: Callable[[Value], tuple[Value, Any]],
        matrix: Value,
        length: Any,
        finish: Callable[[Value, int, Value], None],
        stride: int | None,
    ) -> None:
        tiles, vectors = self.tiles, range(self.tiles.vectors)

        def rows(first: Value, count: int) -> None:
            operands = [number(first + r) for r in range(count)]
            sums = [[Variable(self.builder, tiles.vector, 0.0) for _ in vectors] for _ in range(count)]
            tiles.accumulate(sums, [base for base, _ in operands], operands[0][1], matrix, length, stride)
            for r in range(count):
                for v in vectors:
                    finish(first + r, v, sums[r][v].get())

        tiles.for_each_row_group(count, max_count, rows)

    def row(self, r: Value) -> tuple[Value, Any]:
        """Return (address of the first number of row r, bytes to the next number); the last row for larger r."""
        r = self.builder.minimum(r, self.count - 1)
        return self.rows.at(r * self.row_step).freeze(), self.tiles.itemsize if self.tiles.paired else self.column_step

    def column(self, c: Value) -> tuple[Value, Any]:
        """Return (address of the first number of column c, bytes to the next number of the column)."""
        if self.column_scratch is not None:
            return self.column_scratch.at(c * self.tiles.itemsize), self.pair_row_bytes
        return self.rows.freeze().at(c * self.column_step), self.row_step

    def load_entry(self, r: Value, c: Value) -> Value:
        """Return the number in row r and column c, read from the operand itself and widened."""
        row = self.block.at(r * self.row_stride)
        if self.has_unit_stride:
            return self.format.load_column(row, c)
        return self.format.load_column(row.at(c * self.column_stride), 0)


def widen_row(
    tiles: RegisterTiles, format: FloatFormat | PackedFormat, source: Value, target: Value, width: int, step: Any
) -> None:
    """Copy a row to scratch, widened. `step` is the bytes from number to number; None if numbers are adjacent."""
    builder, lanes = tiles.builder, tiles.lanes
    whole = width // lanes * lanes if step is None else 0
    with builder.loop(0, whole, lanes) as c:
        target.at(c * tiles.itemsize).store(format.load_column(source, c, lanes))
    with builder.loop(whole, width) as c:
        number = format.load_column(source, c) if step is None else format.load_column(source.at(c * step), 0)
        target.at(c * tiles.itemsize).store(number)


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
    """Copy two rows of bfloat16 to scratch as one row: pair c has both numbers of column c.

    The second number is 0 if `has_second` is false.
    """
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
