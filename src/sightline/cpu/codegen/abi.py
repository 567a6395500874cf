"""The arguments of a kernel: one row of 64-bit words, written by `pack` and read by `Arguments` in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .builder import DOUBLE, INT64, POINTER, Code, Value

__all__ = ["BACKWARD", "DECODE", "FORWARD", "Arguments", "Table", "pack"]


def _operand(name: str) -> dict[str, Any]:
    """An array (*lead, heads, rows, columns): strides in bytes; `_batch` points to one offset per batch, so that the
    leading axes may have any strides.
    """
    parts = {"": POINTER, "_batch": POINTER, "_head": INT64, "_row": INT64, "_column": INT64}
    return {name + part: kind for part, kind in parts.items()}


COMMON: dict[str, Any] = {
    "counter": POINTER,  # the next item of work
    "items": INT64,
    **_operand("query"),
    **_operand("key"),
    **_operand("value"),
    "lse": POINTER,  # (B, H, n) float64, contiguous
    "factor": DOUBLE,  # what products of query and key are multiplied with; above 0
    "sign": DOUBLE,  # of the scale, which the queries take: −1, 0 or 1
    "H": INT64,
    "group": INT64,  # query heads to a key head
    "n": INT64,
    "m": INT64,
    "query_blocks": INT64,
    "run_start": POINTER,  # the fields of formula.runs.Runs; run_full one byte each
    "run_first": POINTER,
    "run_last": POINTER,
    "run_full": POINTER,
    "run_batch": INT64,  # rows of runs from one batch and one head to the next; 0 where they share
    "run_head": INT64,
    "seed": INT64,  # of dropout
    "threshold": INT64,  # weights whose random word is below it are dropped
    "keep": DOUBLE,  # what the others are multiplied with
}
FORWARD = COMMON | {
    "output": POINTER,  # (B, H, n, d_v), contiguous
    "sinks": POINTER,  # (H,) float64
}
DECODE = COMMON | {
    "output": POINTER,  # (B, H, n, d_v), contiguous
    "sinks": POINTER,  # (H,) float64
    "part_output": POINTER,  # (chunks, B, H, n, d_v) in the accumulator's type
    "part_lse": POINTER,  # (chunks, B, H, n) float64
    "done": POINTER,  # how many parts are done, for each batch, key head and batch of rows
    "taint": POINTER,  # set to 1 where an output is NaN or infinite
    "batches": INT64,
    "chunks": INT64,  # parts of the keys
    "chunk": INT64,  # blocks of keys in each
}
BACKWARD = COMMON | {
    **_operand("output"),
    **_operand("d_output"),
    "d_lse": POINTER,  # (B, H, n) float64, contiguous
    "scale": DOUBLE,
    "d_query": POINTER,  # (chunks, B, H, n, d_k), in the accumulator's type like those below
    "d_key": POINTER,  # (B, G, m, d_k rounded up to whole vectors)
    "d_value": POINTER,  # (B, G, m, d_v rounded up to whole vectors)
    "taint": POINTER,  # set to 1 where a gradient is NaN or infinite
    "batches": INT64,
    "chunks": INT64,  # parts of the keys, each worked on by one thread
    "chunk": INT64,  # blocks of keys in each
    "heads_apart": INT64,  # key heads worked on apart: G, or 1 where one item takes all in turn
    "batches_apart": INT64,  # likewise batches
}


class Table:
    """A table's words: address, then stride and length of each axis."""

    def __init__(self, pointer: Value, strides: tuple[Value, ...], lengths: tuple[Value, ...]) -> None:
        self.pointer, self.strides, self.lengths = pointer, strides, lengths


class Arguments:
    """The words as values of the kernel, loaded once; fields are attributes."""

    def __init__(self, code: Code, words: Value, fields: Mapping[str, Any], axes: Sequence[int]) -> None:
        self._values = {name: words.at(8 * place).load(kind, 8) for place, (name, kind) in enumerate(fields.items())}
        self.tables: list[Table] = []
        place = len(fields)
        for count in axes:
            numbers = [words.at(8 * (place + 1 + k)).load(INT64, 8) for k in range(2 * count)]
            pointer = words.at(8 * place).load(POINTER, 8)
            self.tables.append(Table(pointer, tuple(numbers[:count]), tuple(numbers[count:])))
            place += 1 + 2 * count

    def __getattr__(self, name: str) -> Value:
        try:
            value: Value = self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None
        return value

    def operand(self, name: str, b: Value, head: Value) -> Value:
        """Address of one head's rows of an operand."""
        offset = self._values[f"{name}_batch"].at(b * 8).load(INT64)
        return self._values[name].at(offset).at(head * self._values[f"{name}_head"])


def pack(
    fields: Mapping[str, Any],
    values: Mapping[str, int | float],
    tables: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
) -> Any:
    """The words for these values of a kernel's fields and its tables (address, strides, lengths), as an int64 array."""
    words = np.zeros(len(fields) + sum(1 + 2 * len(strides) for _, strides, _ in tables), np.int64)
    for place, (name, kind) in enumerate(fields.items()):
        if kind is DOUBLE:
            words[place : place + 1].view(np.float64)[0] = values[name]
        else:
            words[place] = values[name]
    place = len(fields)
    for address, strides, lengths in tables:
        numbers = [address, *strides, *lengths]
        words[place : place + len(numbers)] = numbers
        place += len(numbers)
    return words
