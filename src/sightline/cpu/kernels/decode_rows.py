"""The rows of K and V as the decoding kernel reads them: in registers they are widened, or joined to pairs of bfloat16.

The scales of quantised rows are widened once for each tile. If a row has only one scale, the scales of K multiply the
scores, and the scales of V multiply the weights. The inner loops then read codes alone. If the processor multiplies
pairs of bfloat16, these codes become bfloat16, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..codegen.formats import FloatFormat
from ..codegen.packed_rows import PackedFormat
from ..codegen.values import INT16, INT32, Value, vector
from .kernel_spec import KEY_BLOCK

if TYPE_CHECKING:
    from .decode import Decode

SHUFFLE_BYTES = 16  # shuffles within groups of this many bytes are fast on every machine
UNROLL = 4  # number of query rows, and number of keys, whose products are summed in registers together


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
        self.decode, self.name, self.format = decode, name, format
        self.tiles, self.lanes = decode.tiles, decode.lanes
        if isinstance(format, PackedFormat):
            self.scales = self.tiles.scratch(KEY_BLOCK * format.num_scales * self.tiles.itemsize)

    def row(self, start: Value, key: Value) -> Value:
        """Return the address of a key's row in the tile whose first row is at `start`."""
        return start.at(self.decode.visible_keys.row(key) * self.row_stride)

    @property
    def row_stride(self) -> Value:
        stride: Value = getattr(self.decode.args, f"{self.name}_row_stride")
        return stride

    def load_scales(self) -> None:
        """Widen the scales of the quantised rows that are read. After the last key, its scales are repeated."""
        builder, format = self.decode.builder, self.format
        if not isinstance(format, PackedFormat):
            return
        with builder.loop(0, KEY_BLOCK, UNROLL) as key:
            for k in range(UNROLL):
                row = self.row(self.start, builder.minimum(key + k, self.decode.num_keys - 1))
                format.copy_scales(row, self.scales.at((key + k) * (format.num_scales * self.tiles.itemsize)))

    def multiply_by_scales(self, numbers: Value, v: int) -> Value:
        """Return the numbers times the scales of the keys in vector `v`; unchanged unless a row has one scale."""
        if not (isinstance(self.format, PackedFormat) and self.format.has_row_scale):
            return numbers
        return numbers * self.scales.at(v * self.tiles.align).load(self.tiles.vector)

    def load_vectors(self, key: Value, first: Any, count: int) -> Iterator[Value]:
        """Load `count` vectors of a row from the column `first` on.

        The numbers are widened, or pairs of bfloat16, or codes that are not yet multiplied by the scale of their row.
        """
        row, format = self.row(self.start, key), self.format
        if isinstance(format, PackedFormat):
            if self.tiles.paired:
                codes = [format.load_codes(row, first + k * self.lanes, self.lanes) for k in range(2 * count)]
                return map(_join_pairs, codes[::2], codes[1::2])
            if format.has_row_scale:
                return (format.load_codes(row, first + k * self.lanes, self.lanes) for k in range(count))
            scales = self.scales.at(key * (format.num_scales * self.tiles.itemsize))
            return format.load_columns(row, first, count, self.lanes, scales)
        if self.tiles.paired:
            align = self.tiles.align
            return (row.at(first * 2 + k * align).load(self.tiles.operand_vector) for k in range(count))
        return format.load_columns(row, first, count, self.lanes)

    def load_row_pairs(self, k: Value, offsets: Sequence[int]) -> list[Value]:
        """Return the rows 2k and 2k + 1 joined to pairs. Columns of floats are permuted within every two vectors."""
        minimum, last = self.decode.builder.minimum, self.decode.num_keys - 1
        rows, format = [self.row(self.start, minimum(k * 2 + u, last)) for u in range(2)], self.format
        if isinstance(format, PackedFormat):
            return [_join_pairs(*(format.load_codes(row, at // 4, self.lanes) for row in rows)) for at in offsets]
        pairs: list[Value] = []
        for offset in offsets[::2]:
            low, high = (row.at(offset // 2).load(vector(INT16, 2 * self.lanes)) for row in rows)
            halves = (low.interleave(high, half, 1, SHUFFLE_BYTES // 2) for half in range(2))
            pairs += [half.bitcast(self.tiles.operand_vector) for half in halves]
        return pairs


def _join_pairs(first: Value, second: Value) -> Value:
    """Return two float32 vectors as pairs of bfloat16. Their numbers have at most 8 bits and are not rounded."""
    pairs: Value = (first.bits(INT32) >> 16) | (second.bits(INT32) & 0xFFFF0000)
    return pairs
