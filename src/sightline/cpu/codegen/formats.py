"""Formats of numbers in memory and in computations: float16 and bfloat16 are widened to float32.

A conversion is one instruction if the processor has such an instruction. Otherwise integer operations convert the
bits, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..runtime.machine import Machine
from .builder import Builder
from .values import BFLOAT, DOUBLE, FLOAT, HALF, INT16, INT32, Type, Value, vector


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
