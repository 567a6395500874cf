"""Formats of numbers in memory and in computations: float16, bfloat16 and quantised rows are widened to float32.

A conversion is one instruction if the processor has such an instruction. Otherwise integer operations convert the
bits, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...arrays.row_formats import SCALE, SCALE_BYTES, RowFormat
from ..runtime.machine import Machine
from .builder import Builder
from .values import BFLOAT, BYTE, DOUBLE, FLOAT, HALF, INT16, INT32, Type, Value, vector


@dataclass(frozen=True)
class FloatFormat:
    """The storage type of a floating-point format, and the type of sums of its numbers."""

    name: str
    storage_type: Type
    accumulator_type: Type
    has_conversion: bool  # True if instructions convert between the two types; see `store`

    @property
    def itemsize(self) -> int:
        return self.storage_type.itemsize

    @property
    def is_native(self) -> bool:
        """True if computations use the storage type."""
        return self.storage_type is self.accumulator_type

    @property
    def accumulator_format(self) -> FloatFormat:
        """The format of sums of these numbers: float64 or float32."""
        name = "float64" if self.accumulator_type is DOUBLE else "float32"
        return FloatFormat(name, self.accumulator_type, self.accumulator_type, True)

    def load(self, pointer: Value, lanes: int = 1) -> Value:
        """Load `lanes` adjacent numbers, widened to the accumulator type."""
        if self.is_native:
            return pointer.load(vector(self.storage_type, lanes))
        if self.has_conversion and self.name == "float16":
            return pointer.load(vector(HALF, lanes)).to(FLOAT)
        bits = pointer.load(vector(INT16, lanes)).zero_extend(INT32)
        if self.name == "bfloat16":
            return (bits << 16).bits(FLOAT)
        return _half_to_float(pointer.builder, bits)

    def row_bytes(self, width: int) -> int:
        return width * self.itemsize

    def load_column(self, row: Value, column: Any, lanes: int = 1) -> Value:
        """Load `lanes` adjacent numbers of a row from a column on."""
        return self.load(row.at(column * self.itemsize), lanes)

    def load_columns(self, row: Value, first: Any, count: int, lanes: int) -> Iterator[Value]:
        """Load `count` vectors of neighbouring numbers of a row from the column `first` on."""
        return (self.load_column(row, first + k * lanes, lanes) for k in range(count))

    def store(self, pointer: Value, value: Value) -> None:
        """Store adjacent numbers, rounded to the nearest number of the storage type, ties to even."""
        if self.is_native:
            pointer.store(value)
        elif self.has_conversion:
            pointer.store(value.to(self.storage_type))
        else:
            round_bits = _float_to_bfloat if self.name == "bfloat16" else _float_to_half
            pointer.store(round_bits(pointer.builder, value).to(INT16))


def format_of(dtype: str, machine: Machine) -> FloatFormat:
    """Return the format of a dtype (float16, bfloat16, float32 or float64) on a machine."""
    if dtype in ("float32", "float64"):
        kind = FLOAT if dtype == "float32" else DOUBLE
        return FloatFormat(dtype, kind, kind, True)
    if dtype == "float16":
        return FloatFormat(dtype, HALF, FLOAT, machine.has_half_conversion)
    return FloatFormat(dtype, BFLOAT, FLOAT, machine.has_bf16_dot)


class PackedFormat:
    """The format of the rows of a quantised K or V. It has the methods of `FloatFormat` that load rows.

    Codes are widened to float32 in registers, then scaled.
    """

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
        """Store the only scale of a row as it is, or its scales and then its offsets as float32."""
        start = row.at(self.rows.code_bytes)
        target.store(start.load(INT16) if self.has_row_scale else self.scale_format.load(start, self.num_scales))

    def _load_scales(self, row: Value, group: Any, scales: Value | None) -> list[Value]:
        """Load the scale of a group, and its offset if the format has offsets."""
        places = [group + k * self.rows.num_groups for k in range(1 + self.rows.has_offsets)]
        if scales is not None:
            return [scales.at(place * FLOAT.itemsize).load(FLOAT) for place in places]
        start = row.at(self.rows.code_bytes)
        return [self.scale_format.load(start.at(place * SCALE_BYTES)) for place in places]

    def load_bfloats(self, row: Value, column: Any, scales: Value) -> Value:
        """Load the numbers of a group of int4 from its first column on, rounded to bfloat16, as the bits of INT16."""
        builder, half = row.builder, self.rows.group // 2
        scale, offset = self._load_scales(row, column // self.rows.group, scales)
        floats = builder.fma(builder.arange(half, INT32).to(FLOAT), scale, offset)
        table = builder.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector(BFLOAT, 2 * half), floats, floats)
        codes = row.at(column // 2).load(vector(BYTE, half)).extract_lanes([*range(half)] * 2).zero_extend(INT16)
        codes = codes >> ((builder.arange(2 * half, INT16) >> 4) << 2)  # of an index, the low five bits count
        numbers: Value = builder.call("llvm.x86.avx512.permvar.hi.512", codes.type, table.bits(INT16), codes)
        return numbers

    def load_codes(self, row: Value, column: Any, lanes: int, place: Any = 0) -> Value:
        """Load codes as float32 from a column on. For int4, `place` is the column's place in its group."""
        kind = vector(BYTE, lanes)
        if self.name == "int8":
            return row.at(column).load(kind).to(INT32).to(FLOAT)
        if self.name == "float8_e4m3fn":
            bits = (row.at(column).load(kind).to(INT16) << 7) & 0xBF80  # a float16 whose exponent is 8 too small
            if self.scale_format.has_conversion:
                return bits.bits(HALF).to(FLOAT) * 2.0**8
            return _half_to_float(row.builder, bits.zero_extend(INT32)) * 2.0**8
        half = self.rows.group // 2
        pairs = row.at((column - place) // 2 + place % half).load(kind).zero_extend(INT32)
        shift = place // half * 4
        if isinstance(shift, Value):
            shift = shift.to(INT32).broadcast(lanes)
        codes: Value = (pairs >> shift) & 15
        return codes.to(FLOAT)


def _half_to_float(builder: Builder, bits: Value) -> Value:
    """Convert float16 bits in 32-bit lanes to float32.

    A product with 2¹¹² corrects the exponent bias. The product is exact, for subnormal numbers too.
    """
    sign, magnitude = (bits & 0x8000) << 16, (bits & 0x7FFF) << 13
    scaled = (magnitude.bits(FLOAT) * 2.0**112).bits(INT32)
    return (builder.where(magnitude < 0x7C00 << 13, scaled, scaled | 0x7F800000) | sign).bits(FLOAT)


def _float_to_half(builder: Builder, value: Value) -> Value:
    """Round float32 values to float16 and return the float16 bits, each in a 32-bit integer lane."""
    bits = value.bits(INT32)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 16) & 0x8000
    normal = (magnitude + (0xFFF - (112 << 23)) + ((magnitude >> 13) & 1)) >> 13
    # the ulp of the sum below is 2⁻²⁴, the smallest positive float16
    subnormal = (magnitude.bits(FLOAT) + 0.5).bits(INT32) - (126 << 23)
    overflow = builder.where(magnitude > 0x7F800000, builder.value(0x7E00, magnitude.type), 0x7C00)
    result = builder.where(magnitude < 113 << 23, subnormal, normal)
    return builder.where(magnitude >= 143 << 23, overflow, result) | sign


def _float_to_bfloat(builder: Builder, value: Value) -> Value:
    """Round float32 values to bfloat16 and return the bfloat16 bits, each in a 32-bit integer lane."""
    bits = value.bits(INT32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return builder.where(value != value, builder.value(0x7FC0, vector(INT32, value.type.lanes)), rounded)
