"""The rows of K and V that the decoding kernel reads; in registers they are widened, or become pairs of 16 bits.

The scales of quantised rows are widened once for each tile. If a row has only one scale, the scales of K multiply the
scores, and the scales of V multiply the weights. The inner loops then read codes alone.

If the output has 16 bits, x86 multiplies codes of int8 as whole numbers. A row of Q becomes a scale times whole numbers
of 16 bits, and so do the weights of a row for a tile times the scales of V. With ε = 2⁻¹⁶, the errors of a score and of
the sums of a tile are at most

    ε max_d |Q[r][d]| Σ_d |K[j][d]|        ε max_j (P[r][j] scale_j) Σ_j |code_j[d]|

If numbers round independently, the standard deviation of the first error is at most √d / 258 of that of the codes of K.

If the processor multiplies pairs of bfloat16, codes of int4 look up their group's 16 numbers, rounded to bfloat16. So
these rows have the rounding errors of a bfloat16 cache, in addition to those of their codes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from ...arrays.row_formats import SCALE_BYTES, RowFormat
from ..codegen.builder import Variable
from ..codegen.formats import FloatFormat, PackedFormat
from ..codegen.math import FloatConstants
from ..codegen.register_tile import INT16_PRODUCTS, RegisterTiles
from ..codegen.values import BFLOAT, BYTE, INT16, INT32, INT64, Type, Value, vector
from ..runtime.machine import Machine
from .kernel_spec import KEY_BLOCK, SHUFFLE_BYTES

if TYPE_CHECKING:
    from .decode import Decode

LARGEST_INT16 = 32767.0
ROW_BYTES = 8  # the number of a row, INT64
UNROLL = 4  # number of query rows, and number of keys, whose products are summed in registers together


def find_pairs(dtype: str, rows: RowFormat | None, machine: Machine) -> Type | None:
    """Return the kind of the pairs that products have for outputs of a dtype and these quantised rows, or None."""
    has_products = dtype == "bfloat16" and machine.has_bf16_dot
    if rows is None:
        return BFLOAT if has_products else None
    if "16" not in dtype or rows.width % (machine.vector_bytes // INT16.itemsize):
        return None
    if rows.dtype == "int8" and rows.num_groups == 1 and machine.vector_bytes in INT16_PRODUCTS:
        return INT16
    return BFLOAT if rows.dtype == "int4" and has_products else None


class DecodeRows:
    """The rows of K (`name` is "key") or V ("value") of a key head and a tile. Keys are numbers of `VisibleKeys`.

    Attributes
    ----------
    start : address of the tile's first row
    ahead : address of the first row of a later tile, which is prefetched
    """

    start: Value
    ahead: Value

    def __init__(self, decode: Decode, name: str, format: FloatFormat | PackedFormat) -> None:
        self.decode, self.format, self.lanes = decode, format, decode.lanes
        rows = format.rows if isinstance(format, PackedFormat) else None
        pairs = find_pairs(decode.spec.dtype, rows, decode.machine)
        self.tiles = RegisterTiles(decode.builder, decode.float, decode.machine, pairs)
        self.row_stride: Value = getattr(decode.args, f"{name}_row_stride")
        if isinstance(format, PackedFormat):
            self.scale_bytes = SCALE_BYTES if format.has_row_scale else format.num_scales * self.tiles.itemsize
            self.scales = self.tiles.scratch(KEY_BLOCK * self.scale_bytes)

    def row(self, start: Value, key: Value) -> Value:
        """Return the address of a key's row in the tile whose first row is at `start`."""
        return start.at(self.decode.visible_keys.row(key) * self.row_stride)

    def load_scales(self) -> None:
        """Copy the scales of the quantised rows that are read. After the last key, its scales are repeated."""
        builder, format = self.decode.builder, self.format
        if not isinstance(format, PackedFormat):
            return
        with builder.loop(0, KEY_BLOCK, UNROLL) as key:
            for k in range(UNROLL):
                row = self.row(self.start, builder.minimum(key + k, self.decode.num_keys - 1))
                format.copy_scales(row, self.scales.at((key + k) * self.scale_bytes))

    def multiply_by_scales(self, numbers: Value, v: int) -> Value:
        """Return the numbers times the scales of the keys in vector `v`; unchanged unless a row has one scale."""
        if not (isinstance(self.format, PackedFormat) and self.format.has_row_scale):
            return numbers
        return numbers * self.format.scale_format.load(self.scales.at(v * self.lanes * SCALE_BYTES), self.lanes)

    def store_factors(self, numbers: list[Value], target: Value, scale: Value) -> None:
        """Store vectors of a row of Q or of weights as factors of products, and their scale if factors are INT16.

        The error of an INT16 is at most 2⁻¹⁶ of the largest magnitude. The scale is NaN if a number is NaN or ∞.
        """
        builder, size = self.decode.builder, self.tiles.align // self.tiles.pair_size
        factors = numbers
        if self.tiles.pairs is BFLOAT:
            factors = [x.to(BFLOAT) for x in numbers]
        elif self.tiles.pairs is INT16:
            magnitudes = [builder.call_intrinsic("fabs", x) for x in numbers]
            largest = reduce(builder.maximum, magnitudes).reduce(builder.maximum)
            scale.store(largest / LARGEST_INT16 + reduce(operator.add, [x * 0.0 for x in numbers]).sum())
            inverse = builder.value(LARGEST_INT16, largest.type) / largest
            inverse = builder.where(largest < 2.0**-100, 0.0, inverse)  # it may be ∞
            rounding_constant = FloatConstants(largest).rounding_constant
            factors = [(x * inverse + rounding_constant).bits(INT32).to(INT16) for x in numbers]
        for v, x in enumerate(factors):
            target.at(v * size).store(x)

    def load_vectors(self, key: Value, first: Any, count: int) -> Iterator[Value]:
        """Load `count` vectors of a row from the column `first` on.

        The numbers are widened, or pairs of bfloat16, or codes that are not yet multiplied by the scale of their row.
        """
        row, format = self.row(self.start, key), self.format
        if self.tiles.paired:
            columns = range(0, 2 * count * self.lanes, 2 * self.lanes)
            return (self.load_16_bits(key, first + c).bitcast(self.tiles.operand_vector) for c in columns)
        if isinstance(format, PackedFormat):
            if format.has_row_scale:
                return (format.load_codes(row, first + k * self.lanes, self.lanes) for k in range(count))
            return format.load_columns(row, first, count, self.lanes, self.scales.at(key * self.scale_bytes))
        return format.load_columns(row, first, count, self.lanes)

    def load_16_bits(self, key: Value, column: Any) -> Value:
        """Load the numbers of two vectors of columns, as bits of bfloat16 or as codes."""
        row, format = self.row(self.start, key), self.format
        if isinstance(format, PackedFormat):
            if format.name == "int4":
                return format.load_bfloats(row, column, self.scales.at(key * self.scale_bytes))
            return row.at(column).load(vector(BYTE, 2 * self.lanes)).to(INT16)
        return row.at(column * 2).load(vector(INT16, 2 * self.lanes))

    def load_row_pairs(self, k: Value, columns: Sequence[int]) -> list[Value]:
        """Return the rows 2k and 2k + 1 joined to pairs. Columns are permuted within every two vectors."""
        minimum, last = self.decode.builder.minimum, self.decode.num_keys - 1
        keys = [minimum(k * 2 + u, last) for u in range(2)]
        pairs: list[Value] = []
        for column in columns:
            low, high = (self.load_16_bits(key, column) for key in keys)
            halves = (low.interleave(high, half, 1, SHUFFLE_BYTES // 2) for half in range(2))
            pairs += [half.bitcast(self.tiles.operand_vector) for half in halves]
        return pairs


class VisibleKeys:
    """The rows of the current tile of keys that are read: in a partial tile, those that a query row of the item sees.

    Decoding is limited by the bytes of K and V that it reads. A mask such as the lists of `formula.block_lists.blocks`
    may show few keys of a tile, and the kernel reads their rows alone, in ascending order.

    Attributes
    ----------
    count : the number of these rows
    """

    count: Value

    def __init__(self, decode: Decode) -> None:
        self.decode, self.builder = decode, decode.builder
        self.has_mask = decode.spec.mask is not None
        if self.has_mask:
            # `seen` has the rows of a partial tile that are seen, and then other row numbers; `all` has every row
            self.seen, self.all = (decode.tiles.scratch(KEY_BLOCK * ROW_BYTES) for _ in range(2))
            self.marks = decode.tiles.scratch(KEY_BLOCK * ROW_BYTES)  # 1 for a row that is seen, else 0
            with self.builder.loop(0, KEY_BLOCK) as key:
                for target in (self.seen, self.all):
                    target.at(key * ROW_BYTES).store(key)

    def select(self, j0: Value, partial: Value) -> None:
        """Find the rows that are read of the tile at j0, and set `count` and `rows`."""
        builder = self.builder
        self.count = builder.minimum(self.decode.args.m - j0, KEY_BLOCK)
        if not self.has_mask:
            return
        count = Variable(builder, INT64, self.count)
        with builder.if_then(partial):
            self.mark_rows(j0)
            seen = Variable(builder, INT64, 0)
            with builder.loop(0, self.count) as key:
                self.seen.at(seen.get() * ROW_BYTES).store(key)
                seen.set(seen.get() + self.marks.at(key * ROW_BYTES).load(INT64))
            count.set(seen.get())
        self.rows, self.count = builder.where(partial, self.seen, self.all), count.get()

    def mark_rows(self, j0: Value) -> None:
        """Set `marks` to 1 for each row of the tile that a query row of the item sees, else to 0."""
        builder, decode = self.builder, self.decode
        kind = vector(INT64, decode.lanes)
        marks = [Variable(builder, kind, 0) for _ in range(KEY_BLOCK // decode.lanes)]
        with builder.loop(0, decode.num_rows) as r:
            for v, mark in enumerate(marks):
                key = builder.arange(decode.lanes, INT64) + v * decode.lanes
                allowed = decode.evaluate_mask(r, builder.minimum(key + j0, decode.args.m - 1))
                mark.set(builder.where(allowed, 1, mark.get()))
        for v, mark in enumerate(marks):
            self.marks.at(v * decode.lanes * ROW_BYTES).store(mark.get())

    def row(self, key: Value) -> Value:
        """Return the row in the tile of the key that is number `key` among the keys that are read."""
        return self.rows.at(key * ROW_BYTES).load(INT64) if self.has_mask else key

    def row_vector(self, v: int) -> Value:
        """Return the rows of a vector of keys; past the last key, numbers of other rows."""
        lanes = self.decode.lanes
        if not self.has_mask:
            return self.builder.arange(lanes, INT64) + v * lanes
        return self.rows.at(v * lanes * ROW_BYTES).load(vector(INT64, lanes))
