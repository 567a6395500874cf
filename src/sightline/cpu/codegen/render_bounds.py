"""Rendering of a formula's bounds into LLVM: an interval that contains all its values over a rectangle of pairs.

The rules are those of `formula.interval_arithmetic`. `BoundsNamespace` has the functions of NumPy that the rules call,
for `Value`s instead of arrays. An interval is a pair (low, high) of float64 scalars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import mul
from typing import Any

from ...formula.expression import Expression, Lookup, Parameter, walk
from ...formula.interval_arithmetic import Interval, compute_interval
from .abi import TableArguments, slot_of
from .builder import Builder, Variable
from .render_llvm import LLVM_RULES
from .values import BOOL, BYTE, DOUBLE, INT64, Value, vector

EXTREMES_BLOCK = 64  # entries along a table's last axis that share one minimum and one maximum
EXTREMES_BYTES = 16  # one minimum and one maximum, float64
LANES = 8  # entries of a block that are read at once


class BoundsNamespace:
    """The functions of NumPy that the rules of interval arithmetic call, for float64 scalars of a generated function.

    minimum and maximum are NaN if an operand is NaN, as in NumPy.
    """

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def __getattr__(self, name: str) -> Any:
        rule = LLVM_RULES[{"abs": "absolute"}.get(name, name)]
        return lambda *operands: rule(self.builder, *map(self.float64, operands))

    def float64(self, x: Any) -> Value:
        return x.to(DOUBLE) if isinstance(x, Value) else self.builder.value(x, DOUBLE)

    def where(self, condition: Value, yes: Any, no: Any) -> Value:
        return self.builder.where(condition, self.float64(yes), self.float64(no))

    def isnan(self, x: Value) -> Value:
        return x != x

    def isinf(self, x: Value) -> Value:
        return self.builder.call_intrinsic("fabs", x) == math.inf

    def any(self, condition: Value) -> bool:
        """Return True: the values are not known when the code is written, so no step can be left out."""
        return True


class TableExtremes:
    """The minimum and maximum of a table over ranges of its indices, from the extremes of blocks of entries.

    A block has `EXTREMES_BLOCK` adjacent entries along the table's last axis; the last block of a row may be shorter.
    `compute` writes the extremes of every block, and `over` reads them.

    Parameters
    ----------
    extremes : address of the extremes, float64 pairs (minimum, maximum)
    """

    def __init__(self, builder: Builder, table: TableArguments, extremes: Value) -> None:
        self.builder, self.table, self.extremes = builder, table, extremes
        self.xp = BoundsNamespace(builder)
        # an axis with stride 0 repeats one entry
        lengths = zip(table.lengths, table.strides, strict=True)
        self.lengths = [builder.where(stride == 0, 1, length) for length, stride in lengths]
        self.blocks = (self.lengths[-1] + (EXTREMES_BLOCK - 1)) // EXTREMES_BLOCK  # in each row
        self.rows = reduce(mul, self.lengths[:-1], builder.value(1, INT64))

    @property
    def num_bytes(self) -> Value:
        return self.rows * self.blocks * EXTREMES_BYTES

    def compute(self) -> None:
        builder, size = self.builder, self.table.kind.itemsize
        with builder.loop(0, self.rows) as row:
            base, rest = builder.value(0, INT64), row
            for length, stride in reversed(list(zip(self.lengths[:-1], self.table.strides[:-1], strict=True))):
                base, rest = base + rest % length * stride, rest // length
            with builder.loop(0, self.blocks) as block:
                first = block * EXTREMES_BLOCK
                last = builder.minimum(first + EXTREMES_BLOCK, self.lengths[-1])
                low, high = self._variables()
                is_whole = (last - first == EXTREMES_BLOCK) & (self.table.strides[-1] == size)
                with builder.if_else(is_whole) as (yes, no):
                    with yes:
                        self._add_block(self.table.pointer.at(base).at(first * size), low, high)
                    with no, builder.loop(first, last) as index:
                        entry = self._entry(base, index)
                        self._add(entry, entry, low, high)
                target = self.extremes.at((row * self.blocks + block) * EXTREMES_BYTES)
                target.store(low.get())
                target.at(8).store(high.get())

    def over(self, ranges: Sequence[Interval]) -> Interval:
        """Return (minimum, maximum) over index ranges, one (low, high) for each axis; both ends are included.

        Indices outside the table are clamped to it. For an empty table the result is (0, 0).
        """
        builder = self.builder
        low, high = self._variables()
        is_empty = builder.value(0, BOOL)
        for length in self.lengths:
            is_empty = is_empty | (length == 0)
        ends = [
            tuple(self._clamp(self.xp.float64(end), length) for end in pair)
            for pair, length in zip(ranges, self.lengths, strict=True)
        ]
        with builder.if_then(~is_empty):
            self._scan_axes(ends, 0, builder.value(0, INT64), builder.value(0, INT64), low, high)
        return builder.where(is_empty, 0.0, low.get()), builder.where(is_empty, 0.0, high.get())

    def _scan_axes(
        self, ends: Sequence[tuple[Value, ...]], axis: int, row: Value, base: Value, low: Variable, high: Variable
    ) -> None:
        """Widen (low, high) by the entries in the ranges `ends` of this axis and of all later axes.

        `row` is the index, in C order, of the part of the table that the indices of earlier axes select. `base` is the
        offset of this part in bytes.
        """
        first, last = ends[axis]
        if axis == len(ends) - 1:
            self._scan_row(first, last, row, base, low, high)
            return
        with self.builder.loop(first, last + 1) as index:
            row = row * self.lengths[axis] + index
            self._scan_axes(ends, axis + 1, row, base + index * self.table.strides[axis], low, high)

    def _scan_row(self, first: Value, last: Value, row: Value, base: Value, low: Variable, high: Variable) -> None:
        """Widen (low, high) by the entries `first` to `last` of a row: whole blocks at once, other entries singly."""
        builder, end = self.builder, self.lengths[-1] - 1
        index = Variable(builder, INT64, first)
        with builder.infinite_loop() as break_if:
            at = index.get()
            is_decided = self._is_decided(low, high)
            break_if((at > last) | is_decided)
            block_end = builder.minimum(at + (EXTREMES_BLOCK - 1), end)
            with builder.if_else(self._is_block(at, block_end, last)) as (yes, no):
                with yes:
                    self._add_extremes(row * self.blocks + at // EXTREMES_BLOCK, low, high)
                    index.set(block_end + 1)
                with no:
                    entry = self._entry(base, at)
                    self._add(entry, entry, low, high)
                    index.set(at + 1)

    def _is_block(self, first: Value, block_end: Value, last: Value) -> Value:
        """True if a block begins at `first` and the range up to `last` contains the block."""
        return ((first % EXTREMES_BLOCK) == 0) & (block_end <= last)

    def _add_extremes(self, block: Value, low: Variable, high: Variable) -> None:
        pair = self.extremes.at(block * EXTREMES_BYTES)
        self._add(pair.load(DOUBLE), pair.at(8).load(DOUBLE), low, high)

    def _is_decided(self, low: Variable, high: Variable) -> Value:
        """True if further entries cannot widen the interval: a table of booleans had both True and False."""
        if self.table.kind is not BYTE:
            return self.builder.value(0, BOOL)
        return (low.get() == 0.0) & (high.get() == 1.0)

    def _add_block(self, address: Value, low: Variable, high: Variable) -> None:
        """Widen (low, high) by a whole block of adjacent entries."""
        kind = self.table.kind
        if kind is BYTE:
            is_true = address.load(vector(BYTE, EXTREMES_BLOCK)) != 0
            self._add(self.xp.float64(~(~is_true).any()), self.xp.float64(is_true.any()), low, high)
            return
        least = greatest = address.load(vector(kind, LANES)).to(DOUBLE)
        for at in range(LANES, EXTREMES_BLOCK, LANES):
            entries = address.at(at * kind.itemsize).load(vector(kind, LANES)).to(DOUBLE)
            least, greatest = self._minimum(least, entries), self._maximum(greatest, entries)
        self._add(least.reduce(self._minimum), greatest.reduce(self._maximum), low, high)

    def _minimum(self, x: Value, y: Value) -> Value:
        """Return the smaller operand; NaN if an operand is NaN. Entries of an integer table are never NaN."""
        is_nan_possible = self.table.kind.is_float
        return self.builder.call_intrinsic("minimum", x, y) if is_nan_possible else self.builder.minimum(x, y)

    def _maximum(self, x: Value, y: Value) -> Value:
        is_nan_possible = self.table.kind.is_float
        return self.builder.call_intrinsic("maximum", x, y) if is_nan_possible else self.builder.maximum(x, y)

    def _add(self, low: Value, high: Value, total_low: Variable, total_high: Variable) -> None:
        total_low.set(self._minimum(total_low.get(), low))
        total_high.set(self._maximum(total_high.get(), high))

    def _variables(self) -> tuple[Variable, Variable]:
        return Variable(self.builder, DOUBLE, math.inf), Variable(self.builder, DOUBLE, -math.inf)

    def _entry(self, base: Value, index: Value) -> Value:
        entry = self.table.pointer.at(base).at(index * self.table.strides[-1]).load(self.table.kind)
        return self.xp.float64(entry)

    def _clamp(self, index: Value, length: Value) -> Value:
        builder = self.builder
        return builder.maximum(builder.minimum(index, length.to(DOUBLE) - 1.0), 0.0).to(INT64)


class HiddenEntries(TableExtremes):
    """A float table t[..., i, j] of which only one fact is needed: whether all entries of a range are −∞.

    The table is as large as the scores, so its extremes would cost a pass over all of its entries. Here a range is read
    up to the first entry above −∞. `over` returns (−∞, −∞) if every entry is −∞, else (−∞, a larger number).
    """

    def compute(self) -> None:
        """Write nothing, because `over` reads the entries themselves and needs no extremes."""

    def over(self, ranges: Sequence[Interval]) -> Interval:
        return self.builder.value(-math.inf, DOUBLE), super().over(ranges)[1]

    def _is_block(self, first: Value, block_end: Value, last: Value) -> Value:
        return self.builder.value(0, BOOL)

    def _is_decided(self, low: Variable, high: Variable) -> Value:
        return ~(high.get() == -math.inf)


class BoundsRenderer:
    """Writes code that computes the interval (low, high) of every node of some formulas, in one function.

    Parameters
    ----------
    extremes : the `TableExtremes` of each table, by slot
    numbers : the numbers of the formulas' parameters, by `Parameter.slot`
    """

    def __init__(
        self,
        builder: Builder,
        formulas: Sequence[Expression],
        extremes: Sequence[TableExtremes],
        numbers: Sequence[Value],
    ) -> None:
        self.xp, self.extremes, self.numbers = BoundsNamespace(builder), extremes, numbers
        self.nodes = walk(*formulas)

    def evaluate(self, box: Mapping[str, Interval], known: Mapping[int, Interval]) -> dict[int, Interval]:
        """Return the known intervals and those of the nodes that depend only on symbols with an interval in `box`."""
        bounds, given = dict(known), box.keys()
        for node in self.nodes:
            if id(node) not in bounds and node.free_symbols <= given:
                bounds[id(node)] = self._interval(node, bounds, box)
        return bounds

    def _interval(self, node: Expression, bounds: Mapping[int, Interval], box: Mapping[str, Interval]) -> Interval:
        if isinstance(node, Parameter):
            return (self.xp.float64(self.numbers[node.slot]),) * 2
        return compute_interval(node, bounds, box, self.xp, self._read_table)

    def _read_table(self, node: Lookup, indices: list[Interval]) -> Interval:
        return self.extremes[slot_of(node)].over(indices)
