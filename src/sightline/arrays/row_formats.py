"""Rows of numbers in few bits, as a quantised cache stores them.

    row = codes of all numbers | scale of each group | offset of each group (only int4)

A group is `GROUP[dtype]` adjacent numbers of a row, and the last group of a row may be shorter. Scales and offsets are
float16 numbers. The number x̂ that a code stands for is

    int8            x̂ = scale · code,           code = −127 ... 127 in one byte
    float8_e4m3fn   x̂ = scale · code,           code = a float of 8 bits, up to ±448
    int4            x̂ = scale · code + offset,  code = 0 ... 15; the low bits of byte k of a group are the code of the
                                                group's number k, the high bits the code of number k + 16

`cpu.kernels.quantize` writes rows, and `cpu.codegen.formats` reads them in kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .operations import namespace, resolve_dtype

QUANTIZED = ("int8", "int4", "float8_e4m3fn")
GROUP = {"int8": 128, "int4": 32, "float8_e4m3fn": 128}  # numbers with one scale
SCALE, SCALE_BYTES = "float16", 2
LARGEST_CODE = {"int8": 127.0, "int4": 15.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True)
class RowFormat:
    """How rows of `width` numbers are stored; `dtype` is one of `QUANTIZED`."""

    dtype: str
    width: int

    @property
    def group(self) -> int:
        """How many adjacent numbers share a scale."""
        return GROUP[self.dtype]

    @property
    def num_groups(self) -> int:
        return -(-self.width // self.group)

    @property
    def has_offsets(self) -> bool:
        return self.dtype == "int4"

    @property
    def code_bytes(self) -> int:
        """How many bytes the codes of a row take: an even number, to align the scales. int4 fills up its last group."""
        return self.num_groups * self.group // 2 if self.dtype == "int4" else self.width + self.width % 2

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + SCALE_BYTES * self.num_groups * (1 + self.has_offsets)

    def unpack(self, rows: Any) -> Any:
        """Return the numbers of rows (..., row_bytes) uint8 as a new float32 array (..., width)."""
        xp = namespace(rows)
        numbers = self._decode(rows[..., : self.code_bytes], xp)[..., : self.width]
        scales = xp.astype(_view(xp, rows[..., self.code_bytes :], SCALE), xp.float32)
        group = [k // self.group for k in range(self.width)]
        result = numbers * scales[..., group]
        return result + scales[..., self.num_groups :][..., group] if self.has_offsets else result

    def _decode(self, codes: Any, xp: Any) -> Any:
        """Return the codes (..., code_bytes) uint8 as float32 numbers, without scale and offset."""
        if self.dtype == "int4":
            groups = xp.reshape(codes, (*codes.shape[:-1], self.num_groups, self.group // 2))
            codes = xp.concat([groups & 15, groups >> 4], axis=-1)
            codes = xp.reshape(codes, (*codes.shape[:-2], self.num_groups * self.group))
        else:
            codes = _view(xp, codes, self.dtype)
        return xp.astype(codes, xp.float32)


def _view(xp: Any, array: Any, dtype: str) -> Any:
    """Return the bytes of an array as numbers of another dtype."""
    array = array.contiguous() if hasattr(array, "contiguous") else array.copy()
    return array.view(resolve_dtype(xp, dtype))
