"""Quantised rows as kernels read them: codes are widened to float32 in registers, then scaled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...arrays.row_formats import SCALE, SCALE_BYTES, RowFormat
from ..runtime.machine import Machine
from .formats import format_of
from .values import BYTE, FLOAT, INT16, INT32, INT64, Value, vector

EXPONENT_BIAS_FACTOR = 2.0**120  # corrects the exponent of a float8 whose bits are those of a float32


class PackedFormat:
    """The format of the rows of a quantised K or V. It has the methods of `FloatFormat` that load rows."""

    is_native = has_conversion = False
    itemsize = 1  # bytes from code to code, for strides; `load_columns` finds the codes of int4 itself

    def __init__(self, rows: RowFormat, machine: Machine) -> None:
        self.rows, self.name, self.scale_format = rows, rows.dtype, format_of(SCALE, machine)

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row, scales included."""
        return self.rows.row_bytes

    def load_column(self, row: Value, column: Any, lanes: int = 1) -> Value:
        """Load `lanes` numbers of a row from a column on, which is a multiple of `lanes`; see `load_columns`."""
        return next(self.load_columns(row, column, 1, lanes))

    def load_columns(self, row: Value, first: Any, count: int, lanes: int) -> Iterator[Value]:
        """Load `count` vectors of neighbouring numbers from the column `first` on.

        `first` is a whole number or a Value, a multiple of count · lanes. A vector lies in one group.
        """
        size, known = self.rows.group, dict[int, tuple[Value, ...]]()
        starts_group = isinstance(first, int) or self.rows.num_groups == 1 or (count * lanes) % size == 0
        for at in range(0, count * lanes, lanes):
            if isinstance(first, int):
                key = group = (first + at) // size
            elif starts_group:  # the vectors of one group share its scale
                key = at // size
                group = first // size + key if self.rows.num_groups > 1 else 0
            else:
                key, group = at, (first + at) // size
            if key not in known:
                known[key] = self._load_scales(row, group)
            scale, *offset = (number.broadcast(lanes) for number in known[key])
            codes = self.load_codes(row, first + at, lanes)
            yield row.builder.fma(codes, scale, offset[0]) if offset else codes * scale

    @property
    def has_row_scale(self) -> bool:
        """True if a row has one scale and no offset, so that products and sums of codes can be scaled instead."""
        return self.rows.num_groups == 1 and not self.rows.has_offsets

    def load_row_scale(self, row: Value) -> Value:
        """Load the scale of a row that has one scale."""
        return self._load_scales(row, 0)[0]

    def _load_scales(self, row: Value, group: Any) -> tuple[Value, ...]:
        """Load the scale of a group, and its offset if the format has offsets."""
        places = [self.rows.code_bytes, self.rows.code_bytes + SCALE_BYTES * self.rows.num_groups]
        count = 1 + self.rows.has_offsets
        return tuple(self.scale_format.load(row.at(group * SCALE_BYTES + place)) for place in places[:count])

    def load_codes(self, row: Value, column: Any, lanes: int) -> Value:
        """Load codes as float32."""
        kind = vector(BYTE, lanes)
        if self.name == "int8":
            return row.at(column).load(kind).to(INT32).to(FLOAT)
        if self.name == "float8_e4m3fn":
            bits = row.at(column).load(kind).zero_extend(INT32)
            magnitude = ((bits & 0x7F) << 20).bits(FLOAT) * EXPONENT_BIAS_FACTOR
            return (magnitude.bits(INT32) | ((bits & 0x80) << 24)).bits(FLOAT)
        if lanes == 1:
            column = row.builder.value(column, INT32) if isinstance(column, int) else column.to(INT32)
            byte = row.at((column // 2).zero_extend(INT64)).load(BYTE).zero_extend(INT32)
            code: Value = (byte >> (column % 2) * 4) & 15
            return code.to(FLOAT)
        pairs = row.at(column // 2).load(vector(BYTE, lanes // 2)).zero_extend(INT16)
        codes = ((pairs | (pairs << 4)) & 0x0F0F).bitcast(kind)  # each in a byte
        return codes.zero_extend(INT32).to(FLOAT)
