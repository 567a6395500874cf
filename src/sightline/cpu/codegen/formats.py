"""Numbers as they lie in memory and as they are computed with: float16 and bfloat16 widen to float32.

Where the processor has the conversion it is one instruction; elsewhere the bits are moved, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..runtime.machine import Machine
from .builder import BFLOAT, DOUBLE, FLOAT, HALF, INT16, INT32, Code, Value, bytes_of, lanes_of, vector

__all__ = ["Format", "format_of"]


@dataclass(frozen=True)
class Format:
    """A float's form in memory and the type sums of it are kept in."""

    name: str
    memory: Any
    wide: Any
    converts: bool  # whether one instruction goes from one to the other

    @property
    def bytes(self) -> int:
        return bytes_of(self.memory)

    @property
    def same(self) -> bool:
        """Whether numbers are computed with as they lie in memory."""
        return self.memory is self.wide

    @property
    def widened(self) -> Format:
        """The format sums are stored in."""
        return Format("float64" if self.wide is DOUBLE else "float32", self.wide, self.wide, True)

    def load(self, pointer: Value, lanes: int = 1) -> Value:
        """Neighbouring numbers, widened."""
        if self.same:
            return pointer.load(vector(self.memory, lanes))
        if self.converts and self.name == "float16":
            return pointer.load(vector(HALF, lanes)).to(FLOAT)
        bits = pointer.load(vector(INT16, lanes)).widened(INT32)
        if self.name == "bfloat16":
            return (bits << 16).bits(FLOAT)
        return _from_half(pointer.code, bits)

    def store(self, pointer: Value, value: Value) -> None:
        """Neighbouring numbers, rounded to the nearest, ties to even."""
        if self.same:
            pointer.store(value)
        elif self.converts:
            pointer.store(value.to(self.memory))
        else:
            rounded = _to_bfloat if self.name == "bfloat16" else _to_half
            pointer.store(rounded(pointer.code, value).to(INT16))


def format_of(dtype: str, machine: Machine) -> Format:
    """The format of a dtype on a machine."""
    if dtype in ("float32", "float64"):
        kind = FLOAT if dtype == "float32" else DOUBLE
        return Format(dtype, kind, kind, True)
    if dtype == "float16":
        return Format(dtype, HALF, FLOAT, machine.half)
    return Format(dtype, BFLOAT, FLOAT, machine.bf16_dot)


def _from_half(code: Code, bits: Value) -> Value:
    """float16 bits, in 32-bit lanes, as float32: a product moves the exponent, exact below normal too."""
    sign, rest = (bits & 0x8000) << 16, (bits & 0x7FFF) << 13
    moved = (rest.bits(FLOAT) * 2.0**112).bits(INT32)
    return (code.where(rest < 0x7C00 << 13, moved, moved | 0x7F800000) | sign).bits(FLOAT)


def _to_half(code: Code, value: Value) -> Value:
    """float32 as float16 bits in 32-bit lanes."""
    bits = value.bits(INT32)
    size = bits & 0x7FFFFFFF
    sign = (bits >> 16) & 0x8000
    normal = (size + (0xFFF - (112 << 23)) + ((size >> 13) & 1)) >> 13
    tiny = (size.bits(FLOAT) + 0.5).bits(INT32) - (126 << 23)  # the sum's last place is 2⁻²⁴, half's smallest
    large = code.where(size > 0x7F800000, code.value(0x7E00, size.type), 0x7C00)
    result = code.where(size < 113 << 23, tiny, normal)
    return code.where(size >= 143 << 23, large, result) | sign


def _to_bfloat(code: Code, value: Value) -> Value:
    """float32 as bfloat16 bits in 32-bit lanes."""
    bits = value.bits(INT32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return code.where(value != value, code.value(0x7FC0, vector(INT32, lanes_of(value.type))), rounded)
