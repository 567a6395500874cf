"""Rows of key and value as the register tile reads them: numbers to spread, along a row or down a column.

float32 and float64 are read where they lie, whatever their strides. Narrower floats are staged, a block of keys at a
time: widened to float32, or for pairs of bfloat16 laid so that the two of a pair are neighbours.
"""

from __future__ import annotations

from typing import Any

from .builder import INT16, INT32, INT64, Code, Value, vector
from .formats import Format
from .register_tile import Tiles

__all__ = ["Rows", "join_rows", "widen_row"]


class Rows:
    """One operand's rows of a block of keys.

    Parameters
    ----------
    width : numbers in a row
    unit : whether the numbers of a row lie next to each other
    most : rows in a block
    along, down : whether `row` and `column` will be asked for
    """

    def __init__(
        self, tiles: Tiles, form: Format, width: int, unit: bool, most: int, along: bool = True, down: bool = True
    ) -> None:
        self.code: Code = tiles.code
        self.tiles, self.form, self.width, self.unit, self.most = tiles, form, width, unit, most
        self.in_place = form.same
        self.long = tiles.pairs(width) * tiles.size  # bytes of a staged row
        self.wide = width * tiles.size  # of a row of pairs taken down the columns
        pairs = tiles.paired
        ready = pairs and unit and width % 2 == 0  # pairs along a row lie in memory as they are wanted
        self.by_row = None if self.in_place or ready or (pairs and not along) else tiles.scratch(most * self.long)
        self.by_column = self.by_row if not pairs else tiles.scratch(tiles.pairs(most) * self.wide) if down else None

    def place(self, head: Value, row: Value, column: Value) -> None:
        """Where a head's rows lie: its address, and bytes from row to row and column to column."""
        self.head, self.row_step = head, row
        self.column_step: Any = self.form.bytes if self.unit else column
        self.apart = None if self.unit else column

    def stage(self, first: Value, count: Value) -> None:
        """Make ready the rows from `first` on, `count` of them."""
        self.block, self.count = self.head.at(first * self.row_step), count
        if self.in_place:
            return
        code = self.code
        if self.by_row is not None:
            with code.loop(0, count) as r:
                source, target = self.block.at(r * self.row_step), self.by_row.at(r * self.long)
                if self.tiles.paired:
                    pair_row(self.tiles, source, target, self.width, self.apart)
                else:
                    widen_row(self.tiles, self.form, source, target, self.width, self.apart)
        if self.tiles.paired and self.by_column is not None:
            with code.loop(0, count, 2) as r:
                source, target = self.block.at(r * self.row_step), self.by_column.at(r * (self.wide // 2))
                join_rows(self.tiles, source, target, self.width, self.row_step, self.apart, r + 1 < count)

    def row(self, r: Value) -> tuple[Value, Any]:
        """(address of row r's first number, bytes to the next); rows past the end repeat the last."""
        r = self.code.minimum(r, self.count - 1)
        if self.by_row is not None:
            return self.by_row.at(r * self.long), self.tiles.size
        return self.block.at(r * self.row_step), self.tiles.size if self.tiles.paired else self.column_step

    def column(self, c: Value) -> tuple[Value, Any]:
        """(address of column c's first number, bytes to the next)."""
        if self.by_column is not None:
            return self.by_column.at(c * self.tiles.size), self.wide if self.tiles.paired else self.long
        return self.block.at(c * self.column_step), self.row_step

    def lines(self) -> tuple[Value, Any]:
        """(address, bytes from one to the next) of the rows as vectors, two joined to one of pairs."""
        if self.by_column is not None:
            return self.by_column, self.wide if self.tiles.paired else self.long
        return self.block, self.row_step

    def entry(self, r: Value, c: Value) -> Value:
        """One number as it lies in memory, widened."""
        return self.form.load(self.block.at(r * self.row_step).at(c * self.column_step))


def widen_row(tiles: Tiles, form: Format, source: Value, target: Value, width: int, apart: Any) -> None:
    """A row as it is computed with; `apart` is bytes from one of its numbers to the next, None where they touch."""
    code, lanes = tiles.code, tiles.lanes
    whole = width // lanes * lanes if apart is None else 0
    with code.loop(0, whole, lanes) as c:
        target.at(c * tiles.size).store(form.load(source.at(c * form.bytes), lanes))
    with code.loop(whole, width) as c:
        target.at(c * tiles.size).store(form.load(source.at(c * (form.bytes if apart is None else apart))))


def pair_row(tiles: Tiles, source: Value, target: Value, width: int, apart: Any) -> None:
    """A row of bfloat16 as pairs of neighbours, 0 after an odd end."""
    code = tiles.code
    step = 2 if apart is None else apart
    with code.loop(0, width // 2) as c:
        pair = [_bits(source.at((c * 2 + k) * step)) for k in range(2)]
        target.at(c * 4).store(pair[0] | (pair[1] << 16))
    if width % 2:
        last = code.value(width - 1, INT64)
        target.at(last // 2 * 4).store(_bits(source.at(last * step)))


def join_rows(tiles: Tiles, source: Value, target: Value, width: int, row_step: Value, apart: Any, both: Value) -> None:
    """Two rows of bfloat16 as one of pairs; 0 in place of a second that is not there."""
    code, lanes = tiles.code, 2 * tiles.lanes
    step = code.where(both, row_step, 0)
    whole = width // lanes * lanes if apart is None else 0

    def rows(at: Value, count: int) -> list[Value]:
        low, high = (x.load(vector(INT16, count)) for x in (at, at.at(step)))
        return [low, code.where(both, high, code.value(0, high.type))]

    with code.loop(0, whole, lanes) as c:
        low, high = rows(source.at(c * 2), lanes)
        for half in range(2):
            target.at(c * 4 + half * tiles.align).store(low.braid(high, half))
    with code.loop(whole, width) as c:
        low, high = (x.widened(INT32) for x in rows(source.at(c * (2 if apart is None else apart)), 1))
        target.at(c * 4).store(low | (high << 16))


def _bits(pointer: Value) -> Value:
    return pointer.load(INT16).widened(INT32)
