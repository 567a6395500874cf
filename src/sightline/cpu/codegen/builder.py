"""A small vector language that reads like NumPy and emits LLVM.

`Builder` writes one function. `Value` (values.py) is a scalar or vector of the function, with Python's operators. A
scalar that is combined with a vector is broadcast over the lanes. A `Variable` is mutable: a stack slot that LLVM turns
into a register. Every address is computed with GEP, in bytes.

LLVM reads every line of a function several times. So within a basic block the builder computes no value twice and reads
no variable twice. It computes sums and products of known integers itself, and drops loops that never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .values import INT32, INT64, POINTER, VOID, Type, Value, constant, intrinsic_suffix, vector

CACHE_LINE_BYTES = 64
MAX_STACK_BYTES = 2048  # larger scratch is not on the stack, which may be small: a thread of musl has 128 KiB
SCRATCH = """\
%heap = call ptr @malloc(i64 {size})
%is_missing = icmp eq ptr %heap, null
%stack_size = select i1 %is_missing, i64 {size}, i64 0
%stack = alloca i8, i64 %stack_size
%block = select i1 %is_missing, ptr %stack, ptr %heap
%address = ptrtoint ptr %block to i64
%negative = sub i64 0, %address
%padding = and i64 %negative, {last}
%scratch = getelementptr i8, ptr %block, i64 %padding"""


class Module:
    """The functions and variables of one LLVM module. `str` returns its LLVM assembly."""

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self.declarations: dict[str, str] = {}
        self.variables: dict[str, str] = {}

    def __str__(self) -> str:
        variables = [f"@{name} = {text}" for name, text in self.variables.items()]
        declarations = [text for name, text in self.declarations.items() if name not in self.functions]
        return "\n".join([*variables, *declarations, *self.functions.values()])


class Variable:
    """A mutable value: a stack slot, which LLVM turns into a register."""

    def __init__(self, builder: Builder, kind: Type, start: Any = None) -> None:
        self.builder, self.kind = builder, kind
        self.slot = builder.alloca(str(kind))
        if start is not None:
            self.set(start)

    def get(self) -> Value:
        known = self.builder.variables.get(self.slot.name)
        if known is None:
            known = self.builder.variables[self.slot.name] = self.slot.load(self.kind, 64)
        return known

    def set(self, value: Any) -> None:
        value = self.builder.value(value, self.kind).broadcast(self.kind.lanes)
        self.slot.store(value, 64)
        self.builder.variables[self.slot.name] = value


class Builder:
    """Writes one function of a module. By default, its only argument is a pointer, and it returns nothing."""

    def __init__(self, module: Module, name: str, arguments: Sequence[Type] = (POINTER,), result: Type = VOID) -> None:
        self.module, self.name = module, name
        self.arguments = [Value(self, kind, f"%argument{k}") for k, kind in enumerate(arguments)]
        self.head = f"define {result} @{name}({', '.join(f'{x.type} {x.name}' for x in self.arguments)}) {{"
        self.slots: list[str] = []  # the lines that allocate the stack slots
        self.scratch_slots: list[str] = []  # the lines that compute the addresses of large scratch
        self.scratch_bytes = 0
        self.lines: list[str] = []
        self.num_values = self.num_labels = 0
        self.is_terminated = False  # True if the basic block has ended
        self.computed: dict[str, Value] = {}  # what the basic block has computed, by instruction
        self.variables: dict[str, Value] = {}  # the variables that the basic block has read or set, by slot

    def finish(self, result: Value | None = None) -> None:
        """End the function with its result, and add the function to the module."""
        if self.scratch_bytes:
            size = self.scratch_bytes + CACHE_LINE_BYTES
            self.slots += [SCRATCH.format(size=size, last=CACHE_LINE_BYTES - 1), *self.scratch_slots]
            self.module.declarations["malloc"] = "declare noalias ptr @malloc(i64)"
            self.call("free", VOID, Value(self, POINTER, "%heap"))
        self.return_(result)
        self.module.functions[self.name] = "\n".join([self.head, *self.slots, *self.lines, "}"])

    def return_(self, result: Value | None = None) -> None:
        """Return from the function. In a conditional block, this must be the last instruction."""
        self.write("ret void" if result is None else f"ret {result.type} {result.name}")
        self.is_terminated = True

    # -- instructions -----------------------------------------------------------------------------------------------
    def write(self, text: str) -> None:
        """Write an instruction without a result."""
        self.lines.append(text)

    def execute(self, kind: Type, text: str) -> Value:
        """Write an instruction with a result of this type."""
        name = f"%v{self.num_values}"
        self.num_values += 1
        self.lines.append(f"{name} = {text}")
        return Value(self, kind, name)

    def compute(self, kind: Type, text: str) -> Value:
        """Return the result of an instruction without side effects, which is written once in a basic block."""
        known = self.computed.get(text)
        if known is None:
            known = self.computed[text] = self.execute(kind, text)
        return known

    def new_labels(self, *names: str) -> list[str]:
        """Return a new name of a basic block for each of `names`."""
        self.num_labels += 1
        return [f"{name}{self.num_labels}" for name in names]

    def begin_block(self, label: str) -> None:
        self.write(f"{label}:")
        self.is_terminated = False
        self.computed, self.variables = {}, {}

    def branch(self, label: str) -> None:
        """End the basic block with a jump to `label`, unless the block has ended."""
        if not self.is_terminated:
            self.write(f"br label %{label}")

    def branch_if(self, condition: Value, yes: str, no: str) -> None:
        self.write(f"br i1 {condition.name}, label %{yes}, label %{no}")

    # -- values ---------------------------------------------------------------------------------------------------
    def value(self, x: Any, kind: Type) -> Value:
        """Return a Python number as a constant of the type, in every lane. A Value is returned unchanged."""
        if isinstance(x, Value):
            return x
        number = float(x) if kind.is_float else int(x)
        return Value(self, kind, constant(number, kind), None if kind.is_float or kind.lanes > 1 else int(number))

    def null(self) -> Value:
        return Value(self, POINTER, "null")

    def promote(self, x: Any, y: Any) -> tuple[Value, Value]:
        """Return both operands in one type: a Python number takes the other's type, and a scalar becomes a vector."""
        kind = x.type if isinstance(x, Value) else y.type
        x, y = self.value(x, kind), self.value(y, kind)
        lanes = max(x.type.lanes, y.type.lanes)
        return x.broadcast(lanes), y.broadcast(lanes)

    def arange(self, lanes: int, kind: Type) -> Value:
        """Return a vector with 0, 1, 2, ... in its lanes."""
        numbers = ", ".join(f"{kind} {k}" for k in range(lanes))
        return Value(self, vector(kind, lanes), f"<{numbers}>") if lanes > 1 else self.value(0, kind)

    def alloca(self, kind: str) -> Value:
        """Allocate a stack slot of this type, aligned for the widest vectors (64 bytes), and return its address."""
        slot = Value(self, POINTER, f"%slot{len(self.slots)}")
        self.slots.append(f"{slot.name} = alloca {kind}, align 64")
        return slot

    def alloca_array(self, kind: Type, count: int) -> Value:
        """Return the address of a new array of `count` elements on the stack."""
        return self.alloca(f"[{count} x {kind}]")

    def scratch(self, kind: Type, count: int) -> Value:
        """Allocate `count` elements until the function ends at `finish`, aligned for the widest vectors.

        Large scratch is on the heap, or on the stack if the heap is exhausted.
        """
        size = count * kind.itemsize
        if size <= MAX_STACK_BYTES:
            return self.alloca_array(kind, count)
        slot = Value(self, POINTER, f"%scratch{len(self.scratch_slots)}")
        self.scratch_slots.append(f"{slot.name} = getelementptr i8, ptr %scratch, i64 {self.scratch_bytes}")
        self.scratch_bytes += -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return slot

    def global_variable(self, name: str, text: str) -> Value:
        """Return the address of the module's variable of this name. The first call with a name defines it by `text`."""
        self.module.variables.setdefault(name, text)
        return Value(self, POINTER, f"@{name}")

    # -- functions ------------------------------------------------------------------------------------------------
    def call(self, function: str | Value, result: Type, *values: Value) -> Value:
        """Call a C function, by the name of a symbol of this process or by its address."""
        if isinstance(function, str):
            kinds = ", ".join([value.type.name for value in values])
            self.module.declarations.setdefault(function, f"declare {result} @{function}({kinds})")
        name = f"@{function}" if isinstance(function, str) else function.name
        text = f"call {result} {name}({', '.join([f'{value.type} {value.name}' for value in values])})"
        if result is not VOID:
            return self.execute(result, text)
        self.write(text)
        return Value(self, VOID, "")

    def call_intrinsic(self, name: str, *values: Any) -> Value:
        """Call LLVM's intrinsic `name`. Numbers and scalars take the type of the widest operand."""
        kind = max((v.type for v in values if isinstance(v, Value)), key=lambda kind: kind.lanes)
        inputs = [self.value(v, kind).broadcast(kind.lanes) for v in values]
        return self.call(f"llvm.{name}.{intrinsic_suffix(kind)}", kind, *inputs)

    def fma(self, x: Any, y: Any, z: Any) -> Value:
        """Return x · y + z, rounded once if the machine has the instruction, otherwise twice. No library is called."""
        return self.call_intrinsic("fmuladd", x, y, z)

    def where(self, condition: Value, yes: Any, no: Any) -> Value:
        """Return `yes` in the lanes where the condition is true, and `no` in the others."""
        yes, no = self.promote(yes, no)
        lanes = max(condition.type.lanes, yes.type.lanes)
        if condition.type.lanes > 1:
            yes, no = yes.broadcast(lanes), no.broadcast(lanes)
        operands = f"{condition.type} {condition.name}, {yes.type} {yes.name}, {no.type} {no.name}"
        return self.compute(yes.type, f"select {operands}")

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
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Value]:
        """Build `for index in range(start, stop, step)`, with step > 0, and yield the index.

        The condition is at the end of the body, and once before the loop, so that each iteration ends in one jump.
        """
        index, stop = Variable(self, INT64, start), self.value(stop, INT64)
        first = index.get()
        body, after = self.new_labels("body", "after")
        is_known = first.number is not None and stop.number is not None
        begin = len(self.lines)
        if is_known:
            self.branch(body)
        else:
            self.branch_if(first < stop, body, after)
        self.begin_block(body)
        yield index.get()
        index.set(index.get() + step)
        self.branch_if(index.get() < stop, body, after)
        if is_known and first.number >= stop.number:  # the loop never runs
            del self.lines[begin:]
            self.branch(after)
        self.begin_block(after)

    @contextmanager
    def infinite_loop(self) -> Iterator[Callable[[Value], None]]:
        """Build `while True`, and yield a function that leaves the loop if its argument is true."""
        body, after = self.new_labels("again", "done")
        self.branch(body)
        self.begin_block(body)

        def break_if(condition: Value) -> None:
            (continued,) = self.new_labels("onward")
            self.branch_if(condition, after, continued)
            self.begin_block(continued)

        yield break_if
        self.branch(body)
        self.begin_block(after)

    @contextmanager
    def if_then(self, condition: Value) -> Iterator[None]:
        """Build `if condition`, for a scalar condition."""
        yes, after = self.new_labels("then", "endif")
        self.branch_if(condition, yes, after)
        self.begin_block(yes)
        yield
        self.branch(after)
        self.begin_block(after)

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """Build `if ... else` for a scalar condition. Use: with if_else(c) as (yes, no): with yes: ...; with no: ..."""
        yes, no, after = self.new_labels("then", "else", "endif")
        self.branch_if(condition, yes, no)
        yield self._arm(yes, after), self._arm(no, after)
        self.begin_block(after)

    @contextmanager
    def _arm(self, label: str, after: str) -> Iterator[None]:
        self.begin_block(label)
        yield
        self.branch(after)

    def prefetch(self, pointer: Value) -> None:
        """Prefetch the cache line at the pointer into the second-level cache. An invalid address is harmless."""
        self.call("llvm.prefetch.p0", VOID, pointer, *(self.value(x, INT32) for x in (0, 2, 1)))

    def atomic_load(self, pointer: Value, kind: Type) -> Value:
        """Load a value of 8 bytes atomically. What its writer stored before the value is visible afterwards."""
        return self.execute(kind, f"load atomic {kind}, ptr {pointer.name} acquire, align 8")

    def atomic_exchange(self, pointer: Value, new: Value) -> Value:
        """Store a value atomically, and return the earlier value. The memory order is sequentially consistent."""
        return self.execute(new.type, f"atomicrmw xchg ptr {pointer.name}, {new.type} {new.name} seq_cst")

    def atomic_add(self, pointer: Value, number: int, ordering: str) -> Value:
        """Add a number to an integer atomically, and return its value before the addition.

        With the ordering "acq_rel", a thread that increments a counter sees all that other threads wrote to memory
        before they incremented it.
        """
        return self.execute(INT64, f"atomicrmw add ptr {pointer.name}, i64 {number} {ordering}")
