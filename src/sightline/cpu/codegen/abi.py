"""The arguments of a kernel: one row of 64-bit words, written by `pack` and read by `LoadedArguments` in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .builder import DOUBLE, INT64, POINTER, Builder, Value

__all__ = ["BACKWARD_FIELDS", "DECODE_FIELDS", "FORWARD_FIELDS", "LoadedArguments", "TableArguments", "pack"]


def _operand_fields(name: str) -> dict[str, Any]:
    """An array (*lead, heads, rows, columns): strides in bytes; `_batch_offsets` points to one offset per batch, so that the
    leading axes may have any strides.
    """
    parts = {
        "": POINTER,
        "_batch_offsets": POINTER,
        "_head_stride": INT64,
        "_row_stride": INT64,
        "_column_stride": INT64,
    }
    return {name + part: kind for part, kind in parts.items()}


COMMON_FIELDS: dict[str, Any] = {
    "counter": POINTER,  # the next item of work
    "items": INT64,
    **_operand_fields("query"),
    **_operand_fields("key"),
    **_operand_fields("value"),
    "lse": POINTER,  # (B, H, n) float64, contiguous
    "factor": DOUBLE,  # what products of query and key are multiplied with; above 0
    "scale_sign": DOUBLE,  # of the scale, which the queries take: −1, 0 or 1
    "H": INT64,
    "group": INT64,  # query heads to a key head
    "n": INT64,
    "m": INT64,
    "query_blocks": INT64,
    "tile_range_start": POINTER,  # the fields of formula.runs.Runs; run_full one byte each
    "tile_range_first": POINTER,
    "tile_range_last": POINTER,
    "tile_range_full": POINTER,
    "tile_range_batch_stride": INT64,  # rows of runs from one batch and one head to the next; 0 where they share
    "tile_range_head_stride": INT64,
    "seed": INT64,  # of dropout
    "dropout_threshold": INT64,  # weights whose random word is below it are dropped
    "dropout_scale": DOUBLE,  # what the others are multiplied with
}
FORWARD_FIELDS = COMMON_FIELDS | {
    "output": POINTER,  # (B, H, n, d_v), contiguous
    "sinks": POINTER,  # (H,) float64
}
DECODE_FIELDS = COMMON_FIELDS | {
    "output": POINTER,  # (B, H, n, d_v), contiguous
    "sinks": POINTER,  # (H,) float64
    "split_output": POINTER,  # (chunks, B, H, n, d_v) in the accumulator's type
    "split_lse": POINTER,  # (chunks, B, H, n) float64
    "finished_splits": POINTER,  # how many parts are done, for each batch, key head and batch of rows
    "nonfinite_flag": POINTER,  # set to 1 where an output is NaN or infinite
    "batches": INT64,
    "num_splits": INT64,  # parts of the keys
    "split_size": INT64,  # blocks of keys in each
}
BACKWARD_FIELDS = COMMON_FIELDS | {
    **_operand_fields("output"),
    **_operand_fields("d_output"),
    "d_lse": POINTER,  # (B, H, n) float64, contiguous
    "scale": DOUBLE,
    "d_query": POINTER,  # (chunks, B, H, n, d_k), in the accumulator's type like those below
    "d_key": POINTER,  # (B, G, m, d_k rounded up to whole vectors)
    "d_value": POINTER,  # (B, G, m, d_v rounded up to whole vectors)
    "nonfinite_flag": POINTER,  # set to 1 where a gradient is NaN or infinite
    "batches": INT64,
    "num_splits": INT64,  # parts of the keys, each worked on by one thread
    "split_size": INT64,  # blocks of keys in each
    "parallel_heads": INT64,  # key heads worked on apart: G, or 1 where one item takes all in turn
    "parallel_batches": INT64,  # likewise batches
}


class TableArguments:
    """A table's words: address, then stride and length of each axis."""

    def __init__(self, pointer: Value, strides: tuple[Value, ...], lengths: tuple[Value, ...]) -> None:
        self.pointer, self.strides, self.lengths = pointer, strides, lengths


class LoadedArguments:
    """The words as values of the kernel, loaded once; fields are attributes."""

    def __init__(self, builder: Builder, packed: Value, fields: Mapping[str, Any], table_ranks: Sequence[int]) -> None:
        self._values = {name: packed.at(8 * index).load(kind, 8) for index, (name, kind) in enumerate(fields.items())}
        self.tables: list[TableArguments] = []
        index = len(fields)
        for count in table_ranks:
            entries = [packed.at(8 * (index + 1 + k)).load(INT64, 8) for k in range(2 * count)]
            pointer = packed.at(8 * index).load(POINTER, 8)
            self.tables.append(TableArguments(pointer, tuple(entries[:count]), tuple(entries[count:])))
            index += 1 + 2 * count

    def __getattr__(self, name: str) -> Value:
        try:
            value: Value = self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None
        return value

    def head_address(self, name: str, b: Value, head: Value) -> Value:
        """Address of one head's rows of an operand."""
        offset = self._values[f"{name}_batch_offsets"].at(b * 8).load(INT64)
        return self._values[name].at(offset).at(head * self._values[f"{name}_head_stride"])


def pack(
    fields: Mapping[str, Any],
    values: Mapping[str, int | float],
    tables: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
) -> Any:
    """The words for these values of a kernel's fields and its tables (address, strides, lengths), as an int64 array."""
    packed = np.zeros(len(fields) + sum(1 + 2 * len(strides) for _, strides, _ in tables), np.int64)
    for index, (name, kind) in enumerate(fields.items()):
        if kind is DOUBLE:
            packed[index : index + 1].view(np.float64)[0] = values[name]
        else:
            packed[index] = values[name]
    index = len(fields)
    for address, strides, lengths in tables:
        entries = [address, *strides, *lengths]
        packed[index : index + len(entries)] = entries
        index += len(entries)
    return packed
