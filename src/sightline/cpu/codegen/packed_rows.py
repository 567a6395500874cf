"""Quantised rows as kernels read them: codes are widened to float32 in registers, then scaled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...arrays.row_formats import SCALE, SCALE_BYTES, RowFormat
from ..runtime.machine import Machine
from .formats import format_of
from .values import BYTE, FLOAT, INT32, Value, vector

EXPONENT_BIAS_FACTOR = 2.0**120  # corrects the exponent of a float8 whose bits are those of a float32


class PackedFormat:
    """The format of the rows of a quantised K or V. It has the methods of `FloatFormat` that load rows."""

    is_native = has_conversion = False
    itemsize = 1  # bytes from code to code, for strides; `load_columns` finds the codes of int4 itself

    def __init__(self, rows: RowFormat, machine: Machine) -> None:
        self.rows, self.name, self.scale_format = rows, rows.dtype, format_of(SCALE, machine)

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row, scales included. `width` must be the width of the format."""
        return self.rows.row_bytes

    def load_column(self, row: Value, column: Any, lanes: int = 1) -> Value:
        """Load `lanes` numbers of a row from `column` on, a multiple of `lanes`; see `load_columns`."""
        return next(self.load_columns(row, column, 1, lanes))

    def load_columns(
        self, row: Value, first: Any, count: int, lanes: int, scales: Value | None = None
    ) -> Iterator[Value]:
        """Load `count` vectors of neighbouring numbers from the column `first` on.

        `first` is a multiple of `lanes`, and of count · lanes if it is a Value. A group is the numbers that share a
        scale, and each vector must lie in one group. `scales` is the address to which `copy_scales` has copied the
        row's scales; by default, the scales are read from the row.
        """
        size, known = self.rows.group, dict[Any, list[Value]]()
        for at in range(0, count * lanes, lanes):
            column = first + at
            if isinstance(first, int):
                key, group, place = column // size, column // size, column % size
            elif (count * lanes) % size == 0:  # `first` is the start of a group
                key, group, place = at // size, first // size + at // size, at % size
            else:
                key, group, place = at, column // size, column % size
            if key not in known:
                known[key] = [number.broadcast(lanes) for number in self._load_scales(row, group, scales)]
            scale, *offset = known[key]
            codes = self.load_codes(row, column, lanes, place)
            yield row.builder.fma(codes, scale, offset[0]) if offset else codes * scale

    @property
    def has_row_scale(self) -> bool:
        """True if a row has one scale and no offset, so that products and sums of codes can be scaled instead."""
        return self.num_scales == 1

    @property
    def num_scales(self) -> int:
        """The number of scales and offsets of a row."""
        return self.rows.num_groups * (1 + self.rows.has_offsets)

    def copy_scales(self, row: Value, target: Value) -> None:
        """Store the scales of a row, then its offsets, as float32."""
        target.store(self.scale_format.load(row.at(self.rows.code_bytes), self.num_scales))

    def _load_scales(self, row: Value, group: Any, scales: Value | None) -> list[Value]:
        """Load the scale of a group, and its offset if the format has offsets."""
        places = [group + k * self.rows.num_groups for k in range(1 + self.rows.has_offsets)]
        if scales is not None:
            return [scales.at(place * FLOAT.itemsize).load(FLOAT) for place in places]
        start = row.at(self.rows.code_bytes)
        return [self.scale_format.load(start.at(place * SCALE_BYTES)) for place in places]

    def load_codes(self, row: Value, column: Any, lanes: int, place: Any = 0) -> Value:
        """Load codes as float32 from a column on. For int4, `place` is the column's place in its group."""
        kind = vector(BYTE, lanes)
        if self.name == "int8":
            return row.at(column).load(kind).to(INT32).to(FLOAT)
        if self.name == "float8_e4m3fn":
            bits = row.at(column).load(kind).zero_extend(INT32)
            magnitude = ((bits & 0x7F) << 20).bits(FLOAT) * EXPONENT_BIAS_FACTOR
            return (magnitude.bits(INT32) | ((bits & 0x80) << 24)).bits(FLOAT)
        half = self.rows.group // 2
        pairs = row.at((column - place) // 2 + place % half).load(kind).zero_extend(INT32)
        shift = place // half * 4
        if isinstance(shift, Value):
            shift = shift.to(INT32).broadcast(lanes)
        codes: Value = (pairs >> shift) & 15
        return codes.to(FLOAT)
