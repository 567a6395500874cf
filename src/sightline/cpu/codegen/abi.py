"""The argument block of a kernel: one array of 64-bit words, first the fields, then the tables, then the numbers.

`pack` writes the words on the host. `LoadedArguments` reads the words in the kernel, in the order in which `pack` wrote
them.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .builder import Builder
from .values import DOUBLE, INT64, POINTER, Value

__all__ = [
    "BACKWARD_FIELDS",
    "COMMON_FIELDS",
    "DECODE_FIELDS",
    "FORWARD_FIELDS",
    "LoadedArguments",
    "TableArguments",
    "pack",
    "to_word",
]


def _operand_fields(name: str) -> dict[str, Any]:
    """Return the argument fields of an array (*batch_shape, heads, rows, columns). Offsets and strides are in bytes.

    The field `_batch_offsets` points to one offset per batch, so that the batch axes may have any strides.
    """
    fields = {"": POINTER, "_batch_offsets": POINTER}
    fields |= dict.fromkeys(("_head_stride", "_row_stride", "_column_stride"), INT64)
    return {name + suffix: kind for suffix, kind in fields.items()}


COMMON_FIELDS: dict[str, Any] = {
    "counter": POINTER,  # index of the next work item
    "items": INT64,  # number of work items
    **_operand_fields("query"),
    **_operand_fields("key"),
    **_operand_fields("value"),
    "lse": POINTER,  # (B, H, n) float64, contiguous
    # products of query and key are multiplied by `factor`: |scale|, or 1 if it is 0; times log₂ e for scores in base 2
    "factor": DOUBLE,
    "scale_sign": DOUBLE,  # sign of the scale: −1, 0 or 1; queries are multiplied by the sign
    "H": INT64,
    "group": INT64,  # query heads per key head
    "n": INT64,
    "m": INT64,
    "query_blocks": INT64,
    # four arrays of formula.tile_ranges.TileRanges: int64, but `full` has one byte per tile range
    "tile_range_start": POINTER,
    "tile_range_first": POINTER,
    "tile_range_last": POINTER,
    "tile_range_full": POINTER,
    "tile_range_batch_stride": INT64,  # rows of TileRanges from batch to batch; 0 if all batches share them
    "tile_range_head_stride": INT64,  # rows of TileRanges from head to head; 0 if all heads share them
    "seed": INT64,  # seed of dropout
    "dropout_threshold": INT64,  # a weight is dropped if its random word is below the threshold
    "dropout_scale": DOUBLE,  # factor of the weights that are not dropped
}
FORWARD_FIELDS = COMMON_FIELDS | {
    "output": POINTER,  # (B, H, n, d_v), contiguous
    "sinks": POINTER,  # (H,) float64
}
DECODE_FIELDS = FORWARD_FIELDS | {
    "split_output": POINTER,  # (num_splits, B, H, n, d_v) in the accumulator's type
    "split_lse": POINTER,  # (num_splits, B, H, n) float64
    "finished_splits": POINTER,  # number of finished splits for each batch, key head and group of query rows
    "nonfinite_flag": POINTER,  # set to 1 if an output is NaN or infinite
    "batches": INT64,
    "num_splits": INT64,  # number of splits of the keys
    "split_size": INT64,  # tiles of keys per split
}
BACKWARD_FIELDS = COMMON_FIELDS | {
    **_operand_fields("output"),
    **_operand_fields("d_output"),
    "d_lse": POINTER,  # (B, H, n) float64, contiguous
    "scale": DOUBLE,
    "d_query": POINTER,  # (num_splits, B, H, n, d_k); like d_key and d_value in the accumulator's type
    "d_key": POINTER,  # (B, G, m, d_k rounded up to whole vectors)
    "d_value": POINTER,  # (B, G, m, d_v rounded up to whole vectors)
    "nonfinite_flag": POINTER,  # set to 1 if a gradient is NaN or infinite
    "batches": INT64,
    "split_size": INT64,  # tiles of keys per split; one thread processes a split
    "parallel_heads": INT64,  # G if each key head is a work item of its own, 1 if an item loops over all key heads
    "parallel_batches": INT64,  # B if each batch is a work item of its own, 1 if an item loops over all batches
}


class TableArguments(NamedTuple):
    """The argument words of one table: its address, the stride of each axis in bytes, then the length of each axis."""

    pointer: Value
    strides: tuple[Value, ...]
    lengths: tuple[Value, ...]


class LoadedArguments:
    """The argument block as `Value`s of the kernel. Each word is loaded once, and each field is an attribute."""

    def __init__(
        self,
        builder: Builder,
        packed: Value,
        fields: Mapping[str, Any],
        table_ranks: Sequence[int],
        number_types: Sequence[Any] = (),
    ) -> None:
        self._values = {name: packed.at(8 * index).load(kind, 8) for index, (name, kind) in enumerate(fields.items())}
        self.tables: list[TableArguments] = []
        index = len(fields)
        for rank in table_ranks:
            entries = [packed.at(8 * (index + 1 + k)).load(INT64, 8) for k in range(2 * rank)]
            pointer = packed.at(8 * index).load(POINTER, 8)
            self.tables.append(TableArguments(pointer, tuple(entries[:rank]), tuple(entries[rank:])))
            index += 1 + 2 * rank
        self.numbers = [packed.at(8 * (index + k)).load(kind, 8) for k, kind in enumerate(number_types)]

    def __getattr__(self, name: str) -> Value:
        try:
            value: Value = self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None
        return value

    def head_address(self, name: str, b: Value, head: Value) -> Value:
        """Return the address of the first row of one head of an operand, in batch b."""
        offset = self._values[f"{name}_batch_offsets"].at(b * 8).load(INT64)
        return self._values[name].at(offset).at(head * self._values[f"{name}_head_stride"])


def pack(
    fields: Mapping[str, Any],
    values: Mapping[str, Any],
    tables: Sequence[tuple[int, ...]],
    numbers: Sequence[float] = (),
) -> Any:
    """Return the argument block as an int64 array. Each of `tables` is (address, *strides, *lengths).

    The number of a DOUBLE field, and each float of `numbers`, is stored as its 64 bits.
    """
    words = [to_word(float(values[name])) if kind is DOUBLE else values[name] for name, kind in fields.items()]
    return np.array([*words, *itertools.chain(*tables), *map(to_word, numbers)], np.int64)


def to_word(number: float) -> int:
    """Return the 64-bit word that holds a number: an int itself, or the bits of a float."""
    return number if isinstance(number, int) else int(_WORD.unpack(_DOUBLE.pack(number))[0])


_DOUBLE, _WORD = struct.Struct("d"), struct.Struct("q")
