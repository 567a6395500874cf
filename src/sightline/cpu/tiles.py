"""The register tile: the one matrix product everything is made of.

Matrices in scratch memory are rows of `block` lanes, a whole number of vectors. A tile is a few rows by all vectors of
a row, kept in registers while numbers of one operand are spread over the lanes of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .lanes import INT64, Code, Value, Variable, bytes_of, vector
from .machine import Machine

__all__ = ["Tiles"]

UNROLL = 4  # steps of the inner product written out

Groups = Callable[[Value, int], None]


class Tiles:
    """Products and addresses of scratch matrices for one type of number on one machine."""

    def __init__(self, code: Code, kind: Any, machine: Machine) -> None:
        self.code, self.kind = code, kind
        self.size = bytes_of(kind)
        self.lanes = machine.width // self.size
        self.rows, self.vectors = machine.tile
        self.block = self.lanes * self.vectors
        self.align = machine.width
        self.vector = vector(kind, self.lanes)
        self.row_bytes = self.block * self.size

    def matrix(self, rows: int) -> Value:
        """Scratch memory of that many rows."""
        return self.code.array(self.kind, max(rows, 1) * self.block)

    def variables(self) -> list[Variable]:
        """One variable for each vector of a row."""
        return [Variable(self.code, self.vector) for _ in range(self.vectors)]

    def at(self, matrix: Value, row: Any, v: Any) -> Value:
        """Address of a vector of a matrix."""
        row, v = (self.code.value(x, INT64) for x in (row, v))
        return matrix.at(row * self.row_bytes + v * (self.lanes * self.size))

    def load(self, matrix: Value, row: Any, v: Any) -> Value:
        return self.at(matrix, row, v).load(self.vector, self.align)

    def store(self, matrix: Value, row: Any, v: Any, value: Value) -> None:
        self.at(matrix, row, v).store(value, self.align)

    def in_groups(self, count: Any, most: int, write: Groups) -> None:
        """write(first, rows) for groups of rows up to `count` (≤ most); the last group is what `most` leaves."""
        code = self.code
        whole = most // self.rows * self.rows
        count = code.value(count, INT64)
        if whole:
            with code.loop(0, code.minimum(count, whole), self.rows) as first:
                write(first, self.rows)
        if most > whole:
            with code.when(count > whole):
                write(code.value(whole, INT64), most - whole)

    def accumulate(
        self, sums: list[list[Variable]], bases: Sequence[Value], step: Any, matrix: Value, count: Any
    ) -> None:
        """sums[r][lane] += Σ_k base_r[k · step] · matrix[k][lane] for k < count; `step` in bytes."""
        code = self.code

        def steps(first: Value, count: int) -> None:
            held = [[variable.get() for variable in row] for row in sums]
            for k in (first + u for u in range(count)):
                lanes = [self.load(matrix, k, v) for v in range(self.vectors)]
                for r, base in enumerate(bases):
                    number = base.at(k * step).load(self.kind).spread(self.lanes)
                    held[r] = [code.fma(number, lane, old) for lane, old in zip(lanes, held[r], strict=True)]
            for row, values in zip(sums, held, strict=True):
                for variable, value in zip(row, values, strict=True):
                    variable.set(value)

        whole = count - count % UNROLL
        with code.loop(0, whole, UNROLL) as k:
            steps(k, UNROLL)
        with code.loop(whole, count) as k:
            steps(k, 1)
