"""The arguments of a kernel: one row of 64-bit words, written by `pack` and read by `Arguments` in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .lanes import DOUBLE, INT64, POINTER, Code, Value

__all__ = ["Arguments", "Table", "pack"]

# Strides and offsets are in bytes. *_batch point to one offset per batch, so that leading axes may have any strides.
FIELDS: dict[str, Any] = {
    "counter": POINTER,  # the next item of work
    "items": INT64,  # batches × query heads × blocks of queries
    "query": POINTER,
    "query_batch": POINTER,
    "query_head": INT64,
    "query_row": INT64,
    "query_column": INT64,
    "key": POINTER,
    "key_batch": POINTER,
    "key_head": INT64,
    "key_row": INT64,
    "key_column": INT64,
    "value": POINTER,
    "value_batch": POINTER,
    "value_head": INT64,
    "value_row": INT64,
    "value_column": INT64,
    "output": POINTER,  # (B, H, n, d_v), contiguous
    "lse": POINTER,  # (B, H, n) float64, contiguous
    "sinks": POINTER,  # (H,) float64
    "factor": DOUBLE,  # what the queries are multiplied with
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
}


class Table:
    """A table's words: address, then stride and length of each axis."""

    def __init__(self, pointer: Value, strides: tuple[Value, ...], lengths: tuple[Value, ...]) -> None:
        self.pointer, self.strides, self.lengths = pointer, strides, lengths


class Arguments:
    """The words as values of the kernel, loaded once; fields are attributes."""

    def __init__(self, code: Code, words: Value, axes: tuple[int, ...]) -> None:
        self._values = {name: words.at(8 * place).load(kind, 8) for place, (name, kind) in enumerate(FIELDS.items())}
        self.tables: list[Table] = []
        place = len(FIELDS)
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


def pack(fields: Mapping[str, int | float], tables: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> Any:
    """The words for these fields and tables (address, strides, lengths), as an int64 array."""
    words = np.zeros(len(FIELDS) + sum(1 + 2 * len(strides) for _, strides, _ in tables), np.int64)
    for place, (name, kind) in enumerate(FIELDS.items()):
        if kind is DOUBLE:
            words[place : place + 1].view(np.float64)[0] = fields[name]
        else:
            words[place] = fields[name]
    place = len(FIELDS)
    for address, strides, lengths in tables:
        numbers = [address, *strides, *lengths]
        words[place : place + len(numbers)] = numbers
        place += len(numbers)
    return words
