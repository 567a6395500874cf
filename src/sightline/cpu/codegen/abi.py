"""The argument block of a kernel: one array of 64-bit words.

    fields | tables' addresses | numbers of formulas | outputs' addresses | tables' layouts | outputs' layouts

The layout of a table is the stride of each axis in bytes, then the length of each axis. The outputs are arrays of some
kernels only, such as statistics. The layout of an output is one stride. The words that change from call to call are
adjacent, in the order of `call_words`. Their fields are the last ones, such as `FORWARD_CALL_FIELDS`. `pack_fields`
writes the block on the host, and `LoadedArguments` reads the block in the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np

from ...formula.expression import Expression, Lookup, Parameter, walk
from ...formula.parameters import TableParameter
from .builder import Builder
from .values import BYTE, DOUBLE, FLOAT, INT32, INT64, POINTER, Type, Value

ENTRY_TYPES = {"bool": BYTE, "int32": INT32, "int64": INT64, "float32": FLOAT, "float64": DOUBLE}  # of tables, by dtype


def _operand_fields(name: str) -> dict[str, Any]:
    """Return the fields (name: type) of an array (*batch_shape, heads, rows, columns); offsets, strides in bytes.

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
    "lse": POINTER,  # (B, H, n) float64, contiguous; null if a forward kernel need not store it
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
    "dropout_b": INT64,  # `Problem.dropout_origin`, the counters of dropout at b = h = i = j = 0
    "dropout_h": INT64,
    "dropout_i": INT64,
    "dropout_j": INT64,
    "dropout_threshold": INT64,  # a weight is dropped if its random word is below the threshold
    "dropout_scale": DOUBLE,  # factor of the weights that are not dropped
}
FORWARD_CALL_FIELDS = ("query", "key", "value", "output", "lse", "sinks", "seed")
DECODE_CALL_FIELDS = (*FORWARD_CALL_FIELDS, "m", "items", "num_splits", "split_size", "heads_per_item")
BACKWARD_CALL_FIELDS = (
    *("query", "key", "value", "output", "d_output", "lse", "d_lse", "d_query", "d_key", "d_value"),
    "seed",
)
TANGENT_CALL_FIELDS = (
    *("query", "key", "value", "output", "query_tangent", "key_tangent", "value_tangent", "lse", "sink_tangent"),
    *("output_tangent", "lse_tangent", "seed"),
)
WEIGHTS_CALL_FIELDS = ("query", "key", "lse")


def end_with(names: Sequence[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the fields in `names` moved to the end, in the order of `names`."""
    return {name: kind for name, kind in fields.items() if name not in names} | {name: fields[name] for name in names}


_FORWARD_FIELDS = COMMON_FIELDS | {
    "output": POINTER,  # (B, H, n, d_v) with these strides in bytes, and adjacent columns
    **dict.fromkeys(("output_batch_stride", "output_head_stride", "output_row_stride"), INT64),
    "sinks": POINTER,  # (H,) float64
    "imprecise_lse_flag": POINTER,  # set to 1 if an lse is NaN, +∞, or above `gradient_parts.MAX_LSE` in size
}
FORWARD_FIELDS = end_with(FORWARD_CALL_FIELDS, _FORWARD_FIELDS | {"blocks_per_item": INT64})
_DECODE_FIELDS = _FORWARD_FIELDS | {
    "split_output": POINTER,  # (num_splits, B, H, n, d_v) in the accumulator's type
    "split_lse": POINTER,  # (num_splits, B, H, n) float64
    "split_entropy": POINTER,  # like split_lse; null if the entropy is not requested
    "finished_splits": POINTER,  # number of finished splits for each batch, key head and group of query rows
    "nonfinite_flag": POINTER,  # set to 1 if an output is NaN or infinite
    "batches": INT64,
    "num_splits": INT64,  # number of splits of the keys
    "split_size": INT64,  # tiles of keys per split
    "heads_per_item": INT64,  # the most key heads of a work item
}
DECODE_FIELDS = end_with(DECODE_CALL_FIELDS, _DECODE_FIELDS)
_BACKWARD_FIELDS = COMMON_FIELDS | {
    **_operand_fields("output"),
    **_operand_fields("d_output"),
    "d_lse": POINTER,  # (B, H, n) float64, contiguous; null for 0
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
BACKWARD_FIELDS = end_with(BACKWARD_CALL_FIELDS, _BACKWARD_FIELDS)
_TANGENT_FIELDS = COMMON_FIELDS | {
    **_operand_fields("output"),
    **_operand_fields("query_tangent"),  # tangents have adjacent columns; null for 0
    **_operand_fields("key_tangent"),
    **_operand_fields("value_tangent"),
    "sink_tangent": POINTER,  # (B, H, n) float64, contiguous: the tangent of lse from the sinks; null for 0
    "output_tangent": POINTER,  # (B, H, n, d_v), contiguous
    "lse_tangent": POINTER,  # (B, H, n) float64, contiguous
    "nonfinite_flag": POINTER,  # set to 1 if a tangent is NaN or infinite
}
TANGENT_FIELDS = end_with(TANGENT_CALL_FIELDS, _TANGENT_FIELDS)


class TableArguments(NamedTuple):
    """A table: its address, the stride in bytes and the length of each axis, and the type of an entry."""

    pointer: Value
    strides: tuple[Value, ...]
    lengths: tuple[Value, ...]
    kind: Type


class OutputArguments(NamedTuple):
    """The arguments of an output without a field, such as a statistic or a table's gradient: its address and a stride.

    The stride is the bytes from the sums of one split of the keys to those of the next split; 0 if there is one array.
    """

    pointer: Value
    stride: Value


class LoadedArguments:
    """The argument block as `Value`s of the kernel. Each word is loaded once, and each field is an attribute.

    Parameters
    ----------
    fields : the names and types of the fields
    tables : dtype and number of axes of each table, by its slot
    formulas : the formulas of a structure, whose parameters are the numbers
    num_outputs : the number of outputs without a field
    """

    def __init__(
        self,
        builder: Builder,
        fields: Mapping[str, Any],
        tables: Sequence[tuple[str, int]] = (),
        formulas: Sequence[Expression | None] = (),
        num_outputs: int = 0,
    ) -> None:
        packed, number_types = builder.arguments[0], _parameter_types(formulas)
        self._values = {name: packed.at(8 * index).load(kind, 8) for index, (name, kind) in enumerate(fields.items())}
        kinds = [*[POINTER] * len(tables), *number_types, *[POINTER] * num_outputs]
        kinds += [INT64] * (2 * sum(rank for _, rank in tables) + num_outputs)
        words = iter([packed.at(8 * (len(fields) + k)).load(kind, 8) for k, kind in enumerate(kinds)])
        pointers, self.numbers, outputs = (
            list(islice(words, count)) for count in (len(tables), len(number_types), num_outputs)
        )
        self.tables = [
            TableArguments(pointer, tuple(islice(words, rank)), tuple(islice(words, rank)), ENTRY_TYPES[dtype])
            for pointer, (dtype, rank) in zip(pointers, tables, strict=True)
        ]
        self.outputs = [OutputArguments(pointer, next(words)) for pointer in outputs]

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

    def output_row(self, b: Value, h: Value, i: Value) -> Value:
        """Return the address of a row of the output that the kernel writes."""
        offset = b * self.output_batch_stride + h * self.output_head_stride + i * self.output_row_stride
        return self.output.at(offset)


def slot_of(lookup: Lookup) -> int:
    """Return the slot of the table that a formula of a structure reads."""
    return cast(TableParameter, lookup.table).slot


def _parameter_types(formulas: Sequence[Expression | None]) -> list[Type]:
    """Return the type of the argument word of each parameter of these formulas, by `Parameter.slot`."""
    nodes = walk(*[formula for formula in formulas if formula is not None])
    types = {node.slot: DOUBLE if node.kind == "float" else INT64 for node in nodes if isinstance(node, Parameter)}
    return [types[slot] for slot in range(len(types))]


def pack_fields(
    fields: Mapping[str, Any],
    values: Mapping[str, Any],
    tables: Sequence[Any],
    numbers: Sequence[float] = (),
    outputs: Sequence[int] = (),
) -> Any:
    """Return the argument block as an int64 array.

    Parameters
    ----------
    fields, values : the fields of the kernel, and the value of each; the number of a DOUBLE field is stored as its bits
    tables : NumPy arrays
    numbers : numbers of formulas; an int is stored as such, and a float as its bits
    outputs : the stride of each output; the addresses are 0
    """
    words = call_words(
        [to_word(float(values[name])) if kind is DOUBLE else values[name] for name, kind in fields.items()],
        [table.ctypes.data for table in tables],
        numbers,
        [0 for _ in outputs],
    )
    words += [word for table in tables for word in (*table.strides, *table.shape)]
    return np.array([*words, *outputs], np.int64)


def call_words(
    fields: Sequence[int], tables: Sequence[int], numbers: Sequence[float], outputs: Sequence[int]
) -> list[int]:
    """Return words in the order of the block: fields, addresses of tables, numbers, addresses of outputs."""
    return [*fields, *tables, *map(to_word, numbers), *outputs]


def to_word(number: float) -> int:
    """Return the 64-bit word that holds a number: an int itself, or the bits of a float."""
    return number if isinstance(number, int) else int(_WORD.unpack(_DOUBLE.pack(number))[0])


def signed_word(seed: int) -> int:
    """Return the signed 64-bit word with the bits of a seed, 0 ≤ seed < 2⁶⁴."""
    return seed - (2**64 if seed >= 2**63 else 0)


_DOUBLE, _WORD = struct.Struct("d"), struct.Struct("q")
