"""The kernel that appends rows of keys and values to a quantised cache, and its call.

Each group of numbers becomes codes, a scale and maybe an offset:

    int8            scale = max |x| / 127             code = round(x / scale)
    float8_e4m3fn   scale = max |x| / 448             code = x / scale, rounded to a float of 8 bits
    int4            scale = (max x − min x) / 15      code = round((x − offset) / scale), offset = min x

Scale and offset are rounded to their storage type first. Codes are rounded to the nearest, ties to even. `sums` gets
Σ (x − x̂)² and Σ x² of the appended rows. A group with NaN or ∞ has the scale NaN, so that all its numbers become NaN.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...arrays.operations import address_of, detach, dtype_name, strides_of
from ...arrays.row_formats import LARGEST_CODE, RowFormat
from ...call import call_cache
from ...call.request import machine_setting
from ..codegen.abi import LoadedArguments
from ..codegen.builder import Builder, Module, Variable
from ..codegen.formats import PackedFormat, format_of
from ..codegen.values import BYTE, DOUBLE, FLOAT, INT32, INT64, POINTER, Value, vector
from ..runtime.machine import Machine
from ..runtime.processor import HOST
from ..runtime.thread_team import KERNEL_FUNCTION
from .kernel_spec import round_up

QUANTIZE_KERNEL = "sightline_quantize"
ROUNDING_CONSTANT = 1.5 * 2.0**23  # x + this number has the whole number nearest to x in its low bits
ARRAYS = ("key_source", "value_source", "key_target", "value_target")  # (B, G, t, d), (B, G, capacity, bytes of a row)
STRIDES = ("_batch_stride", "_head_stride", "_row_stride", "_column_stride")  # in bytes
QUANTIZE_FIELDS: dict[str, Any] = {
    **dict.fromkeys(ARRAYS, POINTER),
    "target_rows": POINTER,  # (B, t) int64: the row of the target; −1 for padding
    "sums": POINTER,  # (2, 2) float64, the result of `quantize`
    **{array + stride: INT64 for array in ARRAYS for stride in STRIDES},
    **dict.fromkeys(("B", "G", "t"), INT64),
}


@dataclass(frozen=True)
class QuantizeSpec:
    """What is compiled for keys or values: row formats, and whether the numbers of a source row are adjacent."""

    row_format: RowFormat
    dtype: str  # of the source
    unit_stride: bool


class Quantize:
    """Write the code that quantises rows of keys or of values; `name` is "key" or "value"."""

    def __init__(self, args: LoadedArguments, name: str, spec: QuantizeSpec, machine: Machine) -> None:
        self.spec, self.row_format = spec, spec.row_format
        self.builder = builder = args.sums.builder
        self.source, self.target = (
            [getattr(args, f"{name}_{array}{word}") for word in ("", *STRIDES)] for array in ("source", "target")
        )
        self.source_format = format_of(spec.dtype, machine)
        self.packed = PackedFormat(spec.row_format, machine)
        self.lanes = machine.vector_bytes // FLOAT.itemsize
        filled = self.row_format.group if self.row_format.dtype == "int4" else 1
        self.stop = round_up(round_up(self.row_format.width, filled), self.lanes)
        self.numbers = builder.scratch(FLOAT, self.stop)  # a source row, widened
        self.errors, self.squares = (Variable(builder, DOUBLE, 0.0) for _ in range(2))

    def load_row(self, source: Value) -> None:
        """Copy a row of the source, widened to float32. Copies of its last number fill the rest of `numbers`."""
        builder, width, format = self.builder, self.row_format.width, self.source_format
        stride = format.itemsize if self.spec.unit_stride else self.source[-1]
        whole = width // self.lanes * self.lanes if self.spec.unit_stride else 0
        with builder.loop(0, whole, self.lanes) as c:
            self.numbers.at(c * 4).store(format.load_column(source, c, self.lanes).to(FLOAT))
        with builder.loop(whole, self.stop) as c:
            column = builder.minimum(c, width - 1)
            self.numbers.at(c * 4).store(format.load(source.at(column * stride)).to(FLOAT))

    def write_row(self, target: Value) -> None:
        """Write codes, scales and offsets of a row, and add the row's terms to the sums."""
        size, width = self.row_format.group, self.row_format.width
        with self.builder.loop(0, width // size) as group:
            self.write_group(target, group, size)
        if width % size:
            self.write_group(target, self.builder.value(width // size, INT64), width % size)

    def write_group(self, target: Value, group: Value, count: int) -> None:
        """Write codes, scale and offset of one group of `count` numbers, and add the group's terms to the sums."""
        builder, row_format, start = self.builder, self.row_format, group * self.row_format.group
        first = self.numbers.at(start * 4)
        vectors = [first.at(at * 4).load(vector(FLOAT, self.lanes)) for at in range(0, count, self.lanes)]
        high, low, marks = vectors[0], vectors[0], vectors[0] * 0.0
        for x in vectors[1:]:
            high, low, marks = builder.maximum(x, high), builder.minimum(x, low), marks + x * 0.0
        largest, smallest = high.reduce(builder.maximum), low.reduce(builder.minimum)
        not_a_number = marks.sum()  # 0, or NaN if a number is NaN or infinite
        span = largest - smallest if row_format.has_offsets else builder.maximum(largest, -smallest)
        scale = span / LARGEST_CODE[row_format.dtype] + not_a_number
        stored = [scale, smallest + not_a_number] if row_format.has_offsets else [scale]
        place = target.at(row_format.code_bytes).at(group * 2)
        for index, number in enumerate(stored):
            self.packed.scale_format.store(place.at(index * 2 * row_format.num_groups), number)
        scale, *offsets = [
            self.packed.scale_format.load(place.at(k * 2 * row_format.num_groups)) for k in range(len(stored))
        ]
        divisor = builder.where(scale == 0.0, math.inf, scale)  # numbers below the least scale have the code 0
        whole = count // self.lanes * self.lanes
        loops = (0, whole, self.lanes), (whole, count, 1)
        for begin, end, lanes in [(0, row_format.group // 2, self.lanes)] if row_format.dtype == "int4" else loops:
            with builder.loop(begin, end, lanes) as at:
                self.store_codes(target, group, at, lanes, divisor, offsets)
        for begin, end, lanes in loops:
            with builder.loop(begin, end, lanes) as at:
                x = first.at(at * 4).load(vector(FLOAT, lanes))
                difference = x - self.packed.load_column(target, start + at, lanes)
                self.errors.set(self.errors.get() + (difference * difference).to(DOUBLE).sum())
                self.squares.set(self.squares.get() + (x * x).to(DOUBLE).sum())

    def store_codes(self, target: Value, group: Value, at: Value, lanes: int, divisor: Value, offsets: Any) -> None:
        """Store the codes of `lanes` numbers of a group, from the place `at` on. `divisor` is the scale.

        A product with 1 / scale would round numbers halfway between two codes to the wrong one.
        A byte of int4 also has the code of the number that is half a group later. `offsets` is [offset] or [].
        """
        builder, start, largest = self.builder, group * self.row_format.group, LARGEST_CODE[self.row_format.dtype]
        least = 0.0 if offsets else -largest

        def divide(place: Any) -> Value:
            x = self.numbers.at((start + place) * 4).load(vector(FLOAT, lanes))
            x = (x - offsets[0] if offsets else x) / divisor
            return builder.maximum(builder.minimum(x, largest), least)  # NaN becomes a limit

        if self.row_format.dtype == "float8_e4m3fn":
            target.at(start + at).store(_float_to_e4m3(builder, divide(at)).to(BYTE))
        elif self.row_format.dtype == "int8":
            target.at(start + at).store((divide(at) + ROUNDING_CONSTANT).bits(INT32).to(BYTE))
        else:
            half = self.row_format.group // 2
            low, high = ((divide(place) + ROUNDING_CONSTANT).bits(INT32) & 15 for place in (at, at + half))
            target.at(group * half + at).store((low | (high << 4)).to(BYTE))


def _float_to_e4m3(builder: Builder, x: Value) -> Value:
    """Round numbers up to ±448 to the format e4m3, and return the bits, each in a 32-bit integer lane."""
    bits = x.bits(INT32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + (0x7FFFF - (120 << 23)) + ((magnitude >> 20) & 1)) >> 20
    # the ulp of the sum below is 2⁻⁹, the smallest positive number of the format
    subnormal = (magnitude.bits(FLOAT) + 2.0**14).bits(INT32) - ((127 + 14) << 23)
    return builder.where(magnitude < 121 << 23, subnormal, normal) | ((bits >> 24) & 0x80)


def write_quantize(specs: Sequence[QuantizeSpec], machine: Machine) -> Module:
    """Return the module of the kernel. `specs` are those of keys and of values."""
    builder = Builder(Module(), QUANTIZE_KERNEL)
    args = LoadedArguments(builder, QUANTIZE_FIELDS)
    parts = [Quantize(args, name, spec, machine) for name, spec in zip(("key", "value"), specs, strict=True)]
    with builder.loop(0, args.B) as b, builder.loop(0, args.t) as r:
        position = args.target_rows.at((b * args.t + r) * 8).load(INT64)
        with builder.if_then(position >= 0), builder.loop(0, args.G) as g:
            for part in parts:
                sides = (part.source, r), (part.target, position)
                source, target = (at.at(b * steps[0] + g * steps[1] + row * steps[2]) for (at, *steps), row in sides)
                part.load_row(source)
                part.write_row(target)
    for k, part in enumerate(parts):
        args.sums.at(16 * k).store(part.errors.get())
        args.sums.at(16 * k + 8).store(part.squares.get())
    builder.finish()
    return builder.module


def quantize(arrays: Sequence[Any], storages: Sequence[Any], rows: Any, formats: tuple[RowFormat, RowFormat]) -> Any:
    """Write array[b, :, r] to storage[b, :, rows[b, r]], quantised, for every b and r with rows[b, r] ≠ −1.

    Return Σ (x − x̂)² and Σ x² of the written numbers as a (2, 2) array, a row for keys and one for values.

    arrays : keys and values, (B, G, t, width) floats
    storages : those of keys and values, (B, G, capacity, bytes of a row) uint8
    rows : (B, t) int64
    """
    sums, structure = np.empty((2, 2)), (formats, machine_setting())
    own = [*arrays, *storages, np.ascontiguousarray(rows, np.int64), sums]
    found = call_cache.LOOKUP.find_or_run(call_cache.calls, structure, (), *own)
    call, addresses = (None, ()) if found is None else (found[0], found[3:])
    if call is None:
        own = [detach(array) for array in own]
        addresses, strides = tuple(map(address_of, own)), [strides_of(array) for array in own[:4]]
        specs = [QuantizeSpec(x, dtype_name(own[0]), own[0].itemsize == strides[k][-1]) for k, x in enumerate(formats)]
        address = HOST.kernel(repr(specs), QUANTIZE_KERNEL, lambda: write_quantize(specs, HOST.machine))
        words = [*itertools.chain(*strides), *own[0].shape[:3]]
        # The code is freed together with `address`. The function `find_or_run` reads `prepared`.
        call = SimpleNamespace(prepared=None, words=words, function=KERNEL_FUNCTION(address), address=address)
        if found is not None:
            call_cache.store_call(call_cache.calls, (found[2], structure), call)
    else:
        call_cache.mark_as_used(call_cache.calls, (found[2], structure))
    call.function(struct.pack(f"{len(QUANTIZE_FIELDS)}q", *addresses, *call.words))
    return sums
