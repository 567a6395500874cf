"""The register tile: the one matrix product everything is made of.

Matrices in scratch memory are rows of vectors. A tile is a few rows of sums by the vectors of a row, kept in registers
while numbers of one operand are spread over the lanes of the other:

    sums[r][lane] += Σ_k number_r[k] · matrix[k][lane]

In bfloat16, where the processor multiplies pairs, `operand_type` and each lane of `matrix` hold two neighbours of the k axis
in 32 bits, and the sums stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ..runtime.machine import Machine
from .builder import BFLOAT, FLOAT, INT32, INT64, Builder, Value, Variable, bytes_of, vector

__all__ = ["RegisterTiles"]

UNROLLED_STEPS = 4  # steps of the inner product written out

RowGroupWriter = Callable[[Value, int], None]


class RegisterTiles:
    """Products and addresses of scratch matrices for one type of number on one machine.

    Parameters
    ----------
    kind : type of the sums, FLOAT or DOUBLE
    paired : whether the numbers multiplied are pairs of bfloat16
    """

    def __init__(self, builder: Builder, kind: Any, machine: Machine, paired: bool = False) -> None:
        self.builder, self.kind, self.paired = builder, kind, paired
        self.itemsize = bytes_of(kind)  # of a sum, of a number and of a pair alike
        self.operand_type = INT32 if paired else kind
        self.pair_size = 2 if paired else 1
        self.lanes = machine.vector_bytes // self.itemsize
        self.rows, self.vectors = machine.register_tile
        self.block = self.lanes * self.vectors
        self.align = machine.vector_bytes
        self.vector = vector(kind, self.lanes)
        self.operand_vector = vector(self.operand_type, self.lanes)
        self.row_bytes = self.block * self.itemsize

    def packed_length(self, count: int) -> int:
        """Numbers that hold so many entries of the axis summed over."""
        return -(-count // self.pair_size)

    def matrix(self, rows: int) -> Value:
        """Scratch memory of that many rows of a block."""
        return self.scratch(rows * self.row_bytes)

    def scratch(self, size: int) -> Value:
        """Scratch memory of that many bytes."""
        return self.builder.alloca_array(self.operand_type, max(size, self.align) // self.itemsize)

    def variables(self, start: float | None = None) -> list[Variable]:
        """One variable for each vector of a row."""
        return [Variable(self.builder, self.vector, start) for _ in range(self.vectors)]

    def at(self, matrix: Value, row: Any, v: Any = 0) -> Value:
        """Address of a vector of a matrix of blocks."""
        row, v = (self.builder.value(x, INT64) for x in (row, v))
        return matrix.at(row * self.row_bytes + v * self.align)

    def load(self, matrix: Value, row: Any, v: Any) -> Value:
        return self.at(matrix, row, v).load(self.vector, self.align)

    def store(self, matrix: Value, row: Any, v: Any, value: Value) -> None:
        self.at(matrix, row, v).store(value, self.align)

    def transpose_lanes(self, rows: list[Value]) -> list[Value]:
        """As many vectors as they have lanes, rows and lanes exchanged, by as many perfect shuffles as lanes halve."""
        half = len(rows) // 2
        for _ in range(len(rows).bit_length() - 1):
            pairs = zip(rows[:half], rows[half:], strict=True)
            rows = [a.interleave(b, part) for a, b in pairs for part in range(2)]
        return rows

    def for_each_row_group(self, count: Any, max_rows: int, write: RowGroupWriter) -> None:
        """write(first, rows) for groups of rows up to `count` (≤ most); the last group is what `max_rows` leaves."""
        builder = self.builder
        whole = max_rows // self.rows * self.rows
        count = builder.value(count, INT64)
        if whole:
            with builder.loop(0, builder.minimum(count, whole), self.rows) as first:
                write(first, self.rows)
        if max_rows > whole:
            with builder.if_then(count > whole):
                write(builder.value(whole, INT64), max_rows - whole)

    def accumulate(
        self,
        sums: Sequence[Sequence[Variable]],
        bases: Sequence[Value],
        step: Any,
        matrix: Value,
        count: Any,
        stride: Any = None,
        align: int | None = None,
        read: Callable[[Value], list[Value]] | None = None,
    ) -> None:
        """sums[r][v] += Σ_k base_r[k · step] · matrix[k · stride][v] for k < count; `step` and `stride` in bytes.

        `read` gives matrix[k] where that is more than loading a row.
        """
        builder = self.builder
        stride = self.row_bytes if stride is None else stride
        align = self.align if align is None else align

        def load(k: Value) -> list[Value]:
            row = matrix.at(k * stride)
            return [row.at(v * self.align).load(self.operand_vector, align) for v in range(len(sums[0]))]

        def steps(first: Value, count: int) -> None:
            partial_sums = [[variable.get() for variable in row] for row in sums]
            for k in (first + u for u in range(count)):
                lanes = load(k) if read is None else read(k)
                for r, base in enumerate(bases):
                    number = base.at(k * step).load(self.operand_type).broadcast(self.lanes)
                    partial_sums[r] = [
                        self.multiply_add(number, lane, old) for lane, old in zip(lanes, partial_sums[r], strict=True)
                    ]
            for row_of_sums, values in zip(sums, partial_sums, strict=True):
                for variable, value in zip(row_of_sums, values, strict=True):
                    variable.set(value)

        whole = count - count % UNROLLED_STEPS
        with builder.loop(0, whole, UNROLLED_STEPS) as k:
            steps(k, UNROLLED_STEPS)
        with builder.loop(whole, count) as k:
            steps(k, 1)

    def multiply_add(self, x: Value, y: Value, z: Value) -> Value:
        """x · y + z; of pairs x₀ y₀ + x₁ y₁ + z."""
        if not self.paired:
            return self.builder.fma(x, y, z)
        pairs = vector(BFLOAT, 2 * self.lanes)
        sums = vector(FLOAT, self.lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{self.align * 8}"
        function = self.builder.declare(name, ir.FunctionType(sums, [sums, pairs, pairs]))
        irbuilder = self.builder.irbuilder
        return Value(
            self.builder, irbuilder.call(function, [z.raw, *(irbuilder.bitcast(v.raw, pairs) for v in (x, y))])
        )
