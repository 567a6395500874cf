"""Formulas on lanes: each part computed as seldom as it can be.

Parts that read neither j nor s are computed once for a block of queries, parts that read only j once for a row of keys
(as scalars), and the rest for every vector of pairs. Vectors run along i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...formula.expression import Apply, Constant, Expression, Lookup, Symbol, walk
from ...formula.operators import Kind, common_kind
from . import math
from .builder import BOOL, INT64, Code, Value, element, is_float, lanes_of

__all__ = ["LLVM_RULES", "Renderer", "Source"]


@dataclass(frozen=True)
class Source:
    """A table in memory: its address, per axis its stride in bytes and its length, and what one entry is."""

    pointer: Value
    strides: tuple[Value, ...]
    lengths: tuple[Value, ...]
    kind: Any


class Renderer:
    """One formula in one function.

    Parameters
    ----------
    floats, integers : types of numbers in the formula
    sources : tables by id
    clamped : (place of a lookup in `walk`, axis) whose index may leave the table at hidden pairs
    """

    def __init__(
        self,
        code: Code,
        formula: Expression,
        floats: Any,
        integers: Any,
        sources: dict[int, Source],
        clamped: tuple[tuple[int, int], ...],
    ) -> None:
        self.code, self.formula, self.sources, self.clamped = code, formula, sources, clamped
        self.types: dict[Kind, Any] = {"bool": BOOL, "int": integers, "float": floats}
        self.nodes = walk(formula)
        self.place = {id(node): place for place, node in enumerate(self.nodes)}

    def block(self, symbols: dict[str, Value]) -> dict[int, Value]:
        """Parts that read neither j nor s."""
        return self._evaluate(symbols, {}, lambda reads: reads.isdisjoint({"j", "s"}))

    def row(self, symbols: dict[str, Value], known: dict[int, Value]) -> dict[int, Value]:
        """Parts that read j and neither i nor s."""
        return self._evaluate(symbols, known, lambda reads: reads.isdisjoint({"i", "s"}))

    def pair(self, symbols: dict[str, Value], known: dict[int, Value]) -> Value:
        """The formula itself."""
        return self.everything(symbols, known)[id(self.formula)]

    def everything(self, symbols: dict[str, Value], known: dict[int, Value]) -> dict[int, Value]:
        """The formula and all its parts."""
        return self._evaluate(symbols, known, lambda reads: True)

    def _evaluate(
        self, symbols: dict[str, Value], known: dict[int, Value], wanted: Callable[[frozenset[str]], bool]
    ) -> dict[int, Value]:
        found = dict(known)
        for node in self.nodes:
            if id(node) not in found and wanted(node.reads):
                found[id(node)] = self._compute(node, symbols, found)
        return found

    def _compute(self, node: Expression, symbols: dict[str, Value], found: dict[int, Value]) -> Value:
        if isinstance(node, Symbol):
            return symbols[node.name].to(self.types[node.kind])
        if isinstance(node, Constant):
            return self.code.value(node.value, self.types[node.kind])
        if isinstance(node, Lookup):
            return self._lookup(node, [found[id(a)] for a in node.arguments])
        assert isinstance(node, Apply)
        kind = self.types[common_kind(node)]
        skip = 1 if node.operator == "where" else 0
        inputs = [found[id(a)] for a in node.arguments]
        return LLVM_RULES[node.operator](self.code, *inputs[:skip], *(x.to(kind) for x in inputs[skip:]))

    def _lookup(self, node: Lookup, indices: list[Value]) -> Value:
        source = self.sources[id(node.table)]
        base, offsets = self.offsets(node, indices, source.strides, source.lengths)
        pointer = source.pointer.at(base)
        if offsets is None:
            entry = pointer.load(source.kind)
        else:
            entry = pointer.at(offsets).gather(source.kind, lanes_of(offsets.type))
        return entry.to(self.types[node.kind])

    def offsets(
        self, node: Lookup, indices: Sequence[Value], strides: Sequence[Any], lengths: Sequence[Value]
    ) -> tuple[Value, Value | None]:
        """(bytes common to all lanes, bytes of each lane beyond them or None) of a lookup's entries."""
        code, integers = self.code, self.types["int"]
        base: Any = code.value(0, INT64)
        apart: Value | None = None
        for axis, (index, stride, length) in enumerate(zip(indices, strides, lengths, strict=True)):
            if (self.place[id(node)], axis) in self.clamped:
                index = code.maximum(code.minimum(index, length.to(integers) - 1), 0)
            if lanes_of(index.type) == 1:
                base = base + index.to(INT64) * stride
            else:
                share = index * stride.to(integers)
                apart = share if apart is None else apart + share
        return base, apart


def _floor_divide(code: Code, x: Value, y: Value) -> tuple[Value, Value]:
    """(⌊x / y⌋, x − y ⌊x / y⌋); both 0 for whole numbers divided by 0, which would otherwise trap."""
    if is_float(x.type):
        quotient = code.intrinsic("floor", x / y)
        return quotient, x - quotient * y
    zero = y == 0
    safe = code.where(zero, 1, y)
    quotient = x / safe
    rest = x - quotient * safe
    wrong = (rest != 0) & ((rest < 0) ^ (safe < 0))
    quotient, rest = code.where(wrong, quotient - 1, quotient), code.where(wrong, rest + safe, rest)
    return code.where(zero, 0, quotient), code.where(zero, 0, rest)


def _absolute(code: Code, x: Value) -> Value:
    return code.intrinsic("fabs", x) if is_float(x.type) else code.where(x < 0, -x, x)


def _extreme(sign: str, name: str) -> Callable[[Code, Value, Value], Value]:
    """Minimum or maximum; of floats the one that lets NaN through."""

    def rule(code: Code, x: Value, y: Value) -> Value:
        x, y = code.meet(x, y)
        if is_float(x.type):
            return code.intrinsic(name, x, y)
        if element(x.type) == BOOL:
            return x & y if name == "minimum" else x | y
        return code.where(x.compare(sign, y), x, y)

    return rule


def _library(name: str) -> Callable[[Code, Value], Value]:
    return lambda code, x: code.intrinsic(name, x)


def _rounding(name: str) -> Callable[[Code, Value], Value]:
    return lambda code, x: code.intrinsic(name, x) if is_float(x.type) else x


LLVM_RULES: dict[str, Callable[..., Value]] = {
    "add": lambda code, x, y: x + y,
    "subtract": lambda code, x, y: x - y,
    "multiply": lambda code, x, y: x * y,
    "divide": lambda code, x, y: x / y,
    "floor_divide": lambda code, x, y: _floor_divide(code, x, y)[0],
    "remainder": lambda code, x, y: _floor_divide(code, x, y)[1],
    "negative": lambda code, x: -x,
    "power": lambda code, x, y: code.intrinsic("pow", x, y),
    "absolute": _absolute,
    "minimum": _extreme("<", "minimum"),
    "maximum": _extreme(">", "maximum"),
    "less": lambda code, x, y: x < y,
    "less_equal": lambda code, x, y: x <= y,
    "greater": lambda code, x, y: x > y,
    "greater_equal": lambda code, x, y: x >= y,
    "equal": lambda code, x, y: x == y,
    "not_equal": lambda code, x, y: x != y,
    "logical_not": lambda code, x: ~x,
    "logical_and": lambda code, x, y: x & y,
    "logical_xor": lambda code, x, y: x ^ y,
    "logical_or": lambda code, x, y: x | y,
    "where": lambda code, c, x, y: code.where(c, x, y),
    "exp": math.exp,
    "exp2": math.exp2,
    "log": _library("log"),
    "log2": _library("log2"),
    "sqrt": _library("sqrt"),
    "tanh": math.tanh,
    "sin": _library("sin"),
    "cos": _library("cos"),
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
}
