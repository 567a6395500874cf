"""A small vector language over llvmlite: it reads like NumPy and emits LLVM.

`Builder` is one function being written; `Value` (values.py) is one of its scalars or vectors, with Python's operators. A
scalar meeting a vector is spread over its lanes. Mutable things are `Variable`s (stack slots that LLVM turns into
registers). Addresses are made by GEP alone, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .values import (
    BFLOAT,
    BOOL,
    BYTE,
    DOUBLE,
    FLOAT,
    HALF,
    INT16,
    INT32,
    INT64,
    POINTER,
    Type,
    Value,
    bytes_of,
    element_type,
    intrinsic_suffix,
    is_float,
    lanes_of,
    vector,
)

__all__ = [
    "BFLOAT",
    "BOOL",
    "BYTE",
    "DOUBLE",
    "FLOAT",
    "HALF",
    "INT16",
    "INT32",
    "INT64",
    "POINTER",
    "Builder",
    "Value",
    "Variable",
    "bytes_of",
    "element_type",
    "is_float",
    "lanes_of",
    "vector",
]


class Variable:
    """A value that changes; a stack slot until LLVM makes it a register."""

    def __init__(self, builder: Builder, kind: Type, start: Any = None) -> None:
        self.builder, self.kind = builder, kind
        self.slot = builder.alloca(kind)
        if start is not None:
            self.set(start)

    def get(self) -> Value:
        return Value(self.builder, self.builder.irbuilder.load(self.slot, typ=self.kind))

    def set(self, value: Any) -> None:
        value = self.builder.value(value, self.kind).broadcast(lanes_of(self.kind))
        self.builder.irbuilder.store(value.raw, self.slot)


class Builder:
    """One function of a module being written, void of its name and of pointers alone."""

    def __init__(self, module: Any, name: str, arguments: int = 1) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER] * arguments), name)
        self.entry = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.irbuilder = ir.IRBuilder(self.function.append_basic_block("body"))
        self.body = self.irbuilder.block
        self.arguments = [Value(self, argument) for argument in self.function.args]

    def finish(self) -> None:
        """Return, and join the stack slots to the body."""
        self.irbuilder.ret_void()
        self.entry.branch(self.body)

    # -- values ---------------------------------------------------------------------------------------------------
    def value(self, x: Any, kind: Type) -> Value:
        """A Python number as a constant of the type (in every lane); a Value as it is."""
        if isinstance(x, Value):
            return x
        one = element_type(kind)
        number = float(x) if is_float(one) else int(x)
        lanes = lanes_of(kind)
        return Value(self, ir.Constant(kind, [number] * lanes if lanes > 1 else number))

    def promote(self, x: Any, y: Any) -> tuple[Value, Value]:
        """Two operands of one type: constants take the other's, scalars spread over the other's lanes."""
        kind = x.type if isinstance(x, Value) else y.type
        x, y = self.value(x, kind), self.value(y, kind)
        lanes = max(lanes_of(x.type), lanes_of(y.type))
        return x.broadcast(lanes), y.broadcast(lanes)

    def arange(self, lanes: int, kind: Type) -> Value:
        """0, 1, 2, ... in the lanes."""
        return Value(self, ir.Constant(vector(kind, lanes), list(range(lanes)) if lanes > 1 else 0))

    def alloca(self, kind: Type) -> Any:
        """A slot on the stack, aligned for the widest vectors."""
        slot = self.entry.alloca(kind)
        slot.align, slot.type = 64, POINTER
        return slot

    def alloca_array(self, kind: Type, count: int) -> Value:
        """Room for that many elements on the stack."""
        return Value(self, self.alloca(ir.ArrayType(kind, count)))

    # -- functions ------------------------------------------------------------------------------------------------
    def declare(self, name: str, signature: Any) -> Any:
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, signature, name)

    def call_intrinsic(self, name: str, *values: Any) -> Value:
        """llvm.name on values of one type."""
        kind = max((v.type for v in values if isinstance(v, Value)), key=lanes_of)
        inputs = [self.value(v, kind).broadcast(lanes_of(kind)) for v in values]
        function = self.declare(f"llvm.{name}.{intrinsic_suffix(kind)}", ir.FunctionType(kind, [kind] * len(inputs)))
        return Value(self, self.irbuilder.call(function, [v.raw for v in inputs]))

    def fma(self, x: Any, y: Any, z: Any) -> Value:
        """x · y + z, rounded once where the machine has an instruction for it, else twice: never by a function call."""
        return self.call_intrinsic("fmuladd", x, y, z)

    def where(self, condition: Value, yes: Any, no: Any) -> Value:
        yes, no = self.promote(yes, no)
        lanes = max(lanes_of(condition.type), lanes_of(yes.type))
        if isinstance(condition.type, ir.VectorType):
            yes, no = yes.broadcast(lanes), no.broadcast(lanes)
        return Value(self, self.irbuilder.select(condition.raw, yes.raw, no.raw))

    def maximum(self, x: Any, y: Any) -> Value:
        """The larger lane; of a NaN x the y, so that one instruction does it."""
        x, y = self.promote(x, y)
        return self.where(x > y, x, y)

    def minimum(self, x: Any, y: Any) -> Value:
        x, y = self.promote(x, y)
        return self.where(x < y, x, y)

    # -- control --------------------------------------------------------------------------------------------------
    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1, kind: Type = INT64) -> Iterator[Value]:
        """for index in range(start, stop, step), with start < stop or not entered."""
        index = Variable(self, kind, start)
        head, body, after = (self.function.append_basic_block(name) for name in ("head", "body", "after"))
        self.irbuilder.branch(head)
        self.irbuilder.position_at_end(head)
        self.irbuilder.cbranch((index.get() < self.value(stop, kind)).raw, body, after)
        self.irbuilder.position_at_end(body)
        yield index.get()
        index.set(index.get() + step)
        self.irbuilder.branch(head)
        self.irbuilder.position_at_end(after)

    @contextmanager
    def infinite_loop(self) -> Iterator[Callable[[Value], None]]:
        """while True; the yielded function leaves when its condition holds."""
        body, after = self.function.append_basic_block("again"), self.function.append_basic_block("done")
        self.irbuilder.branch(body)
        self.irbuilder.position_at_end(body)

        def break_if(condition: Value) -> None:
            continued = self.function.append_basic_block("onward")
            self.irbuilder.cbranch(condition.raw, after, continued)
            self.irbuilder.position_at_end(continued)

        yield break_if
        self.irbuilder.branch(body)
        self.irbuilder.position_at_end(after)

    @contextmanager
    def if_then(self, condition: Value) -> Iterator[None]:
        with self.irbuilder.if_then(condition.raw):
            yield

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """with code.either(c) as (yes, no): with yes: ...; with no: ..."""
        with self.irbuilder.if_else(condition.raw) as (yes, no):
            yield yes, no

    def prefetch(self, pointer: Value) -> None:
        """Ask for a line of memory, into the second cache, that will be read soon; any address will do."""
        words = [INT32] * 3
        function = self.declare("llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [POINTER, *words]))
        self.irbuilder.call(function, [pointer.raw, INT32(0), INT32(2), INT32(1)])

    def atomic_increment(self, pointer: Value, ordering: str = "monotonic") -> Value:
        """The counter's value before one is added, atomically; with "acq_rel" who counts on sees what was written."""
        return Value(self, self.irbuilder.atomic_rmw("add", pointer.raw, INT64(1), ordering))


def horner(builder: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """c₀ + c₁ x + c₂ x² + ..."""
    result: Value = builder.value(coefficients[-1], x.type)
    for coefficient in reversed(coefficients[:-1]):
        result = builder.fma(result, x, coefficient)
    return result
