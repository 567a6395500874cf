"""The register tile, the matrix product that all kernels use.

A matrix in scratch memory consists of rows, and a row consists of vectors. A register tile is a few rows of sums, each
as wide as a row of the matrix. The sums stay in registers. Each number of one operand is broadcast over the lanes and
multiplied by the vectors of the other operand, a matrix:

    sums[r][lane] += Σ_k number_r[k] · matrix[k][lane]

The factors may be pairs of bfloat16 or of INT16. Each number and each lane of `matrix` then has 32 bits with two
adjacent entries of the k axis (`operand_type` is INT32), and the sums are float32 or INT32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..runtime.machine import Machine
from .builder import Builder, Variable
from .values import INT16, INT32, INT64, Type, Value, vector

PIECE_BYTES = 16  # the lanes of a vector that an instruction of x86 shuffles among each other
# x₀ y₀ + x₁ y₁ of pairs of INT16, by the bytes of a vector
INT16_PRODUCTS = {32: "llvm.x86.avx2.pmadd.wd", 64: "llvm.x86.avx512.pmaddw.d.512"}
UNROLLED_STEPS = 4  # steps of k per iteration of the inner loop


class RegisterTiles:
    """Products and addresses of scratch matrices, for one type of number on one machine.

    Parameters
    ----------
    kind : type of the numbers, FLOAT or DOUBLE
    pairs : BFLOAT or INT16 if the factors are pairs of such numbers, else None
    """

    def __init__(self, builder: Builder, kind: Type, machine: Machine, pairs: Type | None = None) -> None:
        self.builder, self.kind, self.pairs, self.paired = builder, kind, pairs, pairs is not None
        self.itemsize = kind.itemsize  # bytes of a sum, and of a factor or pair of factors
        self.operand_type = INT32 if self.paired else kind
        self.pair_size = 2 if self.paired else 1
        self.lanes = machine.vector_bytes // self.itemsize
        self.rows, self.vectors = machine.register_tile
        self.block = self.lanes * self.vectors
        self.align = machine.vector_bytes
        self.vector = vector(kind, self.lanes)
        self.sum_vector = vector(INT32 if pairs is INT16 else kind, self.lanes)
        self.operand_vector = vector(self.operand_type, self.lanes)
        self.row_bytes = self.block * self.itemsize

    def packed_length(self, count: int) -> int:
        """Return how many numbers, or how many pairs if factors are pairs, store `count` entries of the summed axis."""
        return -(-count // self.pair_size)

    def matrix(self, rows: int) -> Value:
        """Allocate a scratch matrix with `rows` rows of `block` numbers."""
        return self.scratch(rows * self.row_bytes)

    def scratch(self, size: int) -> Value:
        """Allocate scratch memory of `size` bytes, at least one vector."""
        return self.builder.scratch(self.operand_type, max(size, self.align) // self.itemsize)

    def variables(self, start: float | None = None) -> list[Variable]:
        """Return one new variable for each vector of a row, set to `start`; unset if `start` is None."""
        return [Variable(self.builder, self.vector, start) for _ in range(self.vectors)]

    def at(self, matrix: Value, row: Any, v: Any = 0) -> Value:
        """Return the address of vector `v` of a row of a scratch matrix."""
        row, v = (self.builder.value(x, INT64) for x in (row, v))
        return matrix.at(row * self.row_bytes + v * self.align)

    def load(self, matrix: Value, row: Any, v: Any) -> Value:
        return self.at(matrix, row, v).load(self.vector, self.align)

    def store(self, matrix: Value, row: Any, v: Any, value: Value) -> None:
        self.at(matrix, row, v).store(value, self.align)

    def fill(self, matrix: Value, first: Any, last: Any, number: float) -> None:
        """Set the rows `first` <= row < `last` of a scratch matrix to a number."""
        with self.builder.loop(first, last) as row:
            for v in range(self.vectors):
                self.store(matrix, row, v, self.builder.value(number, self.vector))

    def transpose_lanes(self, rows: list[Value]) -> list[Value]:
        """Transpose a square matrix of n vectors with n lanes each, by log₂ n shuffles of all its rows.

        Each shuffle is one instruction on x86: the first ones are inside of pieces of 16 bytes, the others move pieces.
        Shuffle number k joins rows whose numbers differ in bit k, and this bit becomes a bit of the lane.
        """
        piece, bits = PIECE_BYTES // self.itemsize, len(rows).bit_length() - 1
        for bit in range(bits):
            unit = 1 << bit
            joined: list[Value] = [*rows]
            for low in (k for k in range(len(rows)) if not k & unit):
                for part, row in enumerate((low, low | unit)):
                    a, b = rows[low], rows[low | unit]
                    if unit < piece:
                        joined[row] = a.interleave(b, part, unit, piece)
                    else:
                        joined[row] = a.deinterleave(b, part, piece, self.lanes)
            rows = joined
        if piece < 4:
            return rows
        # the shuffles inside of pieces have exchanged bits 0 and 1 of the rows' numbers
        return [rows[k & ~3 | (k & 1) << 1 | (k & 2) >> 1] for k in range(len(rows))]

    def for_each_row_group(self, count: Any, max_rows: int, write: Callable[[Value, int], None]) -> None:
        """Write a loop over groups of `self.rows` rows, up to row `count` ≤ `max_rows`; write(first, rows) is its body.

        If `max_rows` is no multiple of `self.rows`, the last group has the remaining rows.
        """
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
        read: Callable[[Value], list[Value]] | None = None,
    ) -> None:
        """Build sums[r][v] += Σ_k base_r[k · step] · matrix[k · stride][v] for k < count.

        `step` and `stride` are in bytes. `read(k)`, if given, replaces the load of the vectors of row k.
        """
        builder = self.builder
        stride = self.row_bytes if stride is None else stride

        def load(k: Value) -> list[Value]:
            row = matrix.at(k * stride)
            return [row.at(v * self.align).load(self.operand_vector, self.align) for v in range(len(sums[0]))]

        def steps(first: Value, count: int) -> None:
            partial_sums = [[variable.get() for variable in variables] for variables in sums]
            for k in (first + u for u in range(count)):
                row = load(k) if read is None else read(k)
                for r, base in enumerate(bases):
                    number = base.at(k * step).load(self.operand_type).broadcast(self.lanes)
                    products = zip(row, partial_sums[r], strict=True)
                    partial_sums[r] = [self.multiply_add(number, factor, old) for factor, old in products]
            for variables, values in zip(sums, partial_sums, strict=True):
                for variable, value in zip(variables, values, strict=True):
                    variable.set(value)

        whole = count - count % UNROLLED_STEPS
        with builder.loop(0, whole, UNROLLED_STEPS) as k:
            steps(k, UNROLLED_STEPS)
        with builder.loop(whole, count) as k:
            steps(k, 1)

    def multiply_add(self, x: Value, y: Value, z: Value) -> Value:
        """Return x · y + z; if factors are pairs, x₀ y₀ + x₁ y₁ + z."""
        if self.pairs is None:
            return self.builder.fma(x, y, z)
        kind = vector(self.pairs, 2 * self.lanes)
        x, y = x.bitcast(kind), y.bitcast(kind)
        if self.pairs is INT16:  # LLVM joins the product and the sum where one instruction has both
            return self.builder.call(INT16_PRODUCTS[self.align], self.sum_vector, x, y) + z
        return self.builder.call(f"llvm.x86.avx512bf16.dpbf16ps.{self.align * 8}", self.sum_vector, z, x, y)
