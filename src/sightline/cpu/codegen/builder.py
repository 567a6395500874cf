"""A small vector language over llvmlite, which reads like NumPy and emits LLVM.

`Builder` builds one function. `Value` (values.py) is a scalar or vector of the function, with Python's operators. A
scalar that is combined with a vector is broadcast over the lanes. A `Variable` is mutable: a stack slot that LLVM turns
into a register. Every address is computed with GEP, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .values import INT32, INT64, POINTER, VOID, Type, Value, intrinsic_suffix, is_float, lanes_of, vector

CACHE_LINE_BYTES = 64


class Variable:
    """A mutable value: a stack slot, which LLVM turns into a register."""

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


class _Callee:
    """A function at an address that is known only at run time. llvmlite calls only functions with names."""

    def __init__(self, address: Any, signature: Any) -> None:
        self.function_type, self.type, self.get_reference = signature, address.type, address.get_reference


class Builder:
    """Builds one function of a module. By default, its only argument is a pointer, and it returns nothing."""

    def __init__(self, module: Any, name: str, arguments: Sequence[Type] = (POINTER,), result: Type = VOID) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, arguments), name)
        self.entry = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.irbuilder = ir.IRBuilder(self.function.append_basic_block("body"))
        self.body = self.irbuilder.block
        self.arguments = [Value(self, argument) for argument in self.function.args]

    def finish(self, result: Value | None = None) -> None:
        """End the function with its result, and branch from the stack slots of the entry block to the body."""
        self.return_(result)
        self.entry.branch(self.body)

    def return_(self, result: Value | None = None) -> None:
        """Return from the function. In a conditional block, nothing may follow."""
        if result is None:
            self.irbuilder.ret_void()
        else:
            self.irbuilder.ret(result.raw)

    # -- values ---------------------------------------------------------------------------------------------------
    def value(self, x: Any, kind: Type) -> Value:
        """Return a Python number as a constant of the type, in every lane. A Value is returned unchanged."""
        if isinstance(x, Value):
            return x
        number = float(x) if is_float(kind) else int(x)
        lanes = lanes_of(kind)
        return Value(self, ir.Constant(kind, [number] * lanes if lanes > 1 else number))

    def null(self) -> Value:
        """Return the null pointer."""
        return Value(self, ir.Constant(POINTER, None))

    def promote(self, x: Any, y: Any) -> tuple[Value, Value]:
        """Return both operands in one type: a Python number takes the other's type, and a scalar becomes a vector."""
        kind = x.type if isinstance(x, Value) else y.type
        x, y = self.value(x, kind), self.value(y, kind)
        lanes = max(lanes_of(x.type), lanes_of(y.type))
        return x.broadcast(lanes), y.broadcast(lanes)

    def arange(self, lanes: int, kind: Type) -> Value:
        """Return a vector with 0, 1, 2, ... in its lanes."""
        return Value(self, ir.Constant(vector(kind, lanes), list(range(lanes)) if lanes > 1 else 0))

    def alloca(self, kind: Type) -> Any:
        """Allocate a stack slot, aligned for the widest vectors (64 bytes)."""
        slot = self.entry.alloca(kind)
        slot.align, slot.type = 64, POINTER
        return slot

    def alloca_array(self, kind: Type, count: int) -> Value:
        """Allocate `count` elements on the stack, and return their address."""
        return Value(self, self.alloca(ir.ArrayType(kind, count)))

    # -- functions ------------------------------------------------------------------------------------------------
    def declare(self, name: str, signature: Any) -> Any:
        """Return the module's function of this name. The first call with a name declares the function."""
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, signature, name)

    def call(self, function: str | Value, result: Type, *values: Value) -> Value:
        """Call a C function, by the name of a symbol of this process or by its address."""
        signature = ir.FunctionType(result, [value.type for value in values])
        callee = self.declare(function, signature) if isinstance(function, str) else _Callee(function.raw, signature)
        return Value(self, self.irbuilder.call(callee, [value.raw for value in values]))

    def call_intrinsic(self, name: str, *values: Any) -> Value:
        """Call the intrinsic llvm.`name` of operands that share one type."""
        kind = max((v.type for v in values if isinstance(v, Value)), key=lanes_of)
        inputs = [self.value(v, kind).broadcast(lanes_of(kind)) for v in values]
        function = self.declare(f"llvm.{name}.{intrinsic_suffix(kind)}", ir.FunctionType(kind, [kind] * len(inputs)))
        return Value(self, self.irbuilder.call(function, [v.raw for v in inputs]))

    def fma(self, x: Any, y: Any, z: Any) -> Value:
        """Return x · y + z, rounded once if the machine has the instruction, otherwise twice. No library is called."""
        return self.call_intrinsic("fmuladd", x, y, z)

    def where(self, condition: Value, yes: Any, no: Any) -> Value:
        """Return `yes` in the lanes where the condition is true, and `no` in the others."""
        yes, no = self.promote(yes, no)
        lanes = max(lanes_of(condition.type), lanes_of(yes.type))
        if isinstance(condition.type, ir.VectorType):
            yes, no = yes.broadcast(lanes), no.broadcast(lanes)
        return Value(self, self.irbuilder.select(condition.raw, yes.raw, no.raw))

    def maximum(self, x: Any, y: Any) -> Value:
        """Return the larger operand of each lane; y if an operand is NaN, so that one instruction suffices."""
        x, y = self.promote(x, y)
        return self.where(x > y, x, y)

    def minimum(self, x: Any, y: Any) -> Value:
        """Return the smaller operand of each lane; y if an operand is NaN."""
        x, y = self.promote(x, y)
        return self.where(x < y, x, y)

    # -- control --------------------------------------------------------------------------------------------------
    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1, kind: Type = INT64) -> Iterator[Value]:
        """Build `for index in range(start, stop, step)`, with step > 0, and yield the index."""
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
        """Build `while True`, and yield a function that leaves the loop if its argument is true."""
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

    def if_then(self, condition: Value) -> Any:
        """Build `if condition`, for a scalar condition."""
        return self.irbuilder.if_then(condition.raw)

    def if_else(self, condition: Value) -> Any:
        """Build `if ... else` for a scalar condition. Use: with if_else(c) as (yes, no): with yes: ...; with no: ..."""
        return self.irbuilder.if_else(condition.raw)

    def prefetch(self, pointer: Value) -> None:
        """Prefetch the cache line at the pointer into the second-level cache. An invalid address is harmless."""
        function = self.declare("llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [POINTER, INT32, INT32, INT32]))
        self.irbuilder.call(function, [pointer.raw, INT32(0), INT32(2), INT32(1)])

    def atomic_exchange(self, pointer: Value, new: Value) -> Value:
        """Store a value atomically, and return the value before. The operation orders all others of the thread."""
        return Value(self, self.irbuilder.atomic_rmw("xchg", pointer.raw, new.raw, "seq_cst"))

    def atomic_increment(self, pointer: Value, ordering: str = "monotonic") -> Value:
        """Add 1 to a counter atomically, and return its value before the addition.

        With the ordering "acq_rel", a thread that increments the counter sees all that other threads wrote to memory
        before they incremented it.
        """
        return Value(self, self.irbuilder.atomic_rmw("add", pointer.raw, INT64(1), ordering))
