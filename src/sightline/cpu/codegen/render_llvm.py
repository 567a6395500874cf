"""Rendering of formulas into LLVM, with every part evaluated as rarely as possible.

A part that depends on neither j nor s is evaluated once per block of queries. A part that depends on j, but on neither
i nor s, is evaluated once per key, as a scalar. Every other part is evaluated for each vector of pairs. The lanes of a
vector are queries (the index i).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...formula.expression import Apply, Constant, Expression, Lookup, Parameter, Symbol, walk
from ...formula.operators import Kind, common_kind
from . import math
from .abi import LoadedArguments, slot_of
from .builder import Builder
from .values import BOOL, DOUBLE, INT64, Value

NodeValues = dict[int, Value]  # values of nodes of a formula, by id of the node


class Renderer:
    """Writes the LLVM code of one formula into a function.

    Parameters
    ----------
    floats, integers : LLVM types of the formula's floats and of its integers
    args : the arguments of the function, with the tables and numbers of the formula
    clamped : (index of a lookup in `walk(formula)`, axis) of each table index that a hidden pair may put out of range
    """

    def __init__(
        self,
        builder: Builder,
        formula: Expression,
        floats: Any,
        integers: Any,
        args: LoadedArguments,
        clamped: tuple[tuple[int, int], ...],
    ) -> None:
        self.builder, self.formula, self.args, self.clamped = builder, formula, args, clamped
        self.types: dict[Kind, Any] = {"bool": BOOL, "int": integers, "float": floats}
        self.nodes = walk(formula)
        self.node_index = {id(node): index for index, node in enumerate(self.nodes)}

    def evaluate(self, symbols: Mapping[str, Value], known: NodeValues) -> NodeValues:
        """Return the known values and those of the parts that depend only on the given symbols, by id of the part."""
        values, given = dict(known), symbols.keys()
        for node in self.nodes:
            if id(node) not in values and node.free_symbols <= given:
                values[id(node)] = self._compute(node, symbols, values)
        return values

    def evaluate_formula(self, symbols: Mapping[str, Value], known: NodeValues) -> Value:
        """Return the value of the formula. `known` has the values of parts computed before."""
        return self.evaluate(symbols, known)[id(self.formula)]

    def _compute(self, node: Expression, symbols: Mapping[str, Value], values: NodeValues) -> Value:
        if isinstance(node, Symbol):
            return symbols[node.name].to(self.types[node.kind])
        if isinstance(node, Constant):
            return self.builder.value(node.value, self.types[node.kind])
        if isinstance(node, Parameter):
            return self.args.numbers[node.slot].to(self.types[node.kind])
        if isinstance(node, Lookup):
            return self._load_lookup(node, [values[id(a)] for a in node.arguments])
        assert isinstance(node, Apply)
        kind = self.types[common_kind(node)]
        inputs = [values[id(a)] for a in node.arguments]
        first = 1 if node.operator == "where" else 0  # the condition of `where` is not converted
        return LLVM_RULES[node.operator](self.builder, *inputs[:first], *(x.to(kind) for x in inputs[first:]))

    def _load_lookup(self, node: Lookup, indices: list[Value]) -> Value:
        table = self.args.tables[slot_of(node)]
        base, offsets = self.offsets(node, indices, table.strides, table.lengths)
        pointer = table.pointer.at(base)
        if offsets is None:
            entry = pointer.load(table.kind)
        else:
            entry = pointer.at(offsets).gather(table.kind, offsets.type.lanes)
        return entry.to(self.types[node.kind])

    def offsets(
        self, node: Lookup, indices: Sequence[Value], strides: Sequence[Any], lengths: Sequence[Value]
    ) -> tuple[Value, Value | None]:
        """Return the offsets of a lookup's entries in bytes: (offset common to all lanes, additional offset per lane).

        The additional offset is None if no index is a vector.
        """
        builder, integers = self.builder, self.types["int"]
        base: Any = builder.value(0, INT64)
        lane_offsets: Value | None = None
        for axis, (index, stride, length) in enumerate(zip(indices, strides, lengths, strict=True)):
            if (self.node_index[id(node)], axis) in self.clamped:
                index = builder.maximum(builder.minimum(index, length.to(integers) - 1), 0)
            if index.type.lanes == 1:
                base = base + index.to(INT64) * stride
            else:
                offsets = index * stride.to(integers)
                lane_offsets = offsets if lane_offsets is None else lane_offsets + offsets
        return base, lane_offsets


def _floor_divide(builder: Builder, x: Value, y: Value) -> tuple[Value, Value]:
    """Return (⌊x / y⌋, x − y ⌊x / y⌋). For integers with y = 0 both are 0: a division by 0 would trap.

    Processors divide no vectors of integers. So integers are divided as float64, whose rounded quotient has the right
    floor: integers are below 2⁵³. LLVM turns the division by a number that is known into a multiplication.
    """
    if x.type.is_float:
        quotient = builder.call_intrinsic("floor", x / y)
        return quotient, x - quotient * y
    if y.number:
        quotient = x / y
        rest = x - quotient * y
        wrong = rest < 0 if y.number > 0 else rest > 0
        return builder.where(wrong, quotient - 1, quotient), builder.where(wrong, rest + y, rest)
    zero = y == 0
    ratio = x.to(DOUBLE) / builder.where(zero, 1, y).to(DOUBLE)
    quotient = builder.where(zero, 0, builder.call_intrinsic("floor", ratio).to(x.type))
    return quotient, builder.where(zero, 0, x - quotient * y)


def _absolute(builder: Builder, x: Value) -> Value:
    return builder.call_intrinsic("fabs", x) if x.type.is_float else builder.where(x < 0, -x, x)


def _min_max_rule(predicate: str, name: str) -> Callable[[Builder, Value, Value], Value]:
    """Return the function that emits a minimum or maximum. Its result is NaN if an operand is NaN."""

    def rule(builder: Builder, x: Value, y: Value) -> Value:
        x, y = builder.promote(x, y)
        if x.type.is_float:
            return builder.call_intrinsic(name, x, y)
        if x.type.element == BOOL:
            return x & y if name == "minimum" else x | y
        return builder.where(x.compare(predicate, y), x, y)

    return rule


def _intrinsic_rule(name: str) -> Callable[[Builder, Value], Value]:
    return lambda builder, x: builder.call_intrinsic(name, x)


def _rounding_rule(name: str) -> Callable[[Builder, Value], Value]:
    return lambda builder, x: builder.call_intrinsic(name, x) if x.type.is_float else x


LLVM_RULES: dict[str, Callable[..., Value]] = {
    "add": lambda builder, x, y: x + y,
    "subtract": lambda builder, x, y: x - y,
    "multiply": lambda builder, x, y: x * y,
    "divide": lambda builder, x, y: x / y,
    "floor_divide": lambda builder, x, y: _floor_divide(builder, x, y)[0],
    "remainder": lambda builder, x, y: _floor_divide(builder, x, y)[1],
    "negative": lambda builder, x: -x,
    "power": lambda builder, x, y: builder.call_intrinsic("pow", x, y),
    "absolute": _absolute,
    "minimum": _min_max_rule("<", "minimum"),
    "maximum": _min_max_rule(">", "maximum"),
    "less": lambda builder, x, y: x < y,
    "less_equal": lambda builder, x, y: x <= y,
    "greater": lambda builder, x, y: x > y,
    "greater_equal": lambda builder, x, y: x >= y,
    "equal": lambda builder, x, y: x == y,
    "not_equal": lambda builder, x, y: x != y,
    "logical_not": lambda builder, x: ~x,
    "logical_and": lambda builder, x, y: x & y,
    "logical_xor": lambda builder, x, y: x ^ y,
    "logical_or": lambda builder, x, y: x | y,
    "bitwise_and": lambda builder, x, y: x & y,
    "where": lambda builder, c, x, y: builder.where(c, x, y),
    "exp": math.exp,
    "exp2": math.exp2,
    "log": _intrinsic_rule("log"),
    "log2": _intrinsic_rule("log2"),
    "log1p": math.log1p,
    "sqrt": _intrinsic_rule("sqrt"),
    "tanh": math.tanh,
    "sin": _intrinsic_rule("sin"),
    "cos": _intrinsic_rule("cos"),
    "floor": _rounding_rule("floor"),
    "ceil": _rounding_rule("ceil"),
}
