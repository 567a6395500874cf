"""Types of numbers, and `Value`: a scalar or vector of the generated function, with Python's operators."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builder import Builder


class Type:
    """A type of LLVM, a scalar or a vector. Each type is one object, so that types are compared by `is`.

    Attributes
    ----------
    name : as LLVM writes it
    bits, itemsize : the size of a lane in bits, and in bytes of memory
    is_float : True if the lanes are floating-point numbers
    element, lanes : the type of a lane, and the number of lanes; a scalar type is its own element, with one lane
    """

    def __init__(self, name: str, bits: int, is_float: bool = False, element: Type | None = None, lanes: int = 1):
        self.name, self.bits, self.is_float, self.lanes = name, bits, is_float, lanes
        self.element, self.itemsize = self if element is None else element, max(bits // 8, 1)

    def __str__(self) -> str:
        return self.name


@cache
def integer(bits: int) -> Type:
    """Return the type of integers with so many bits."""
    return Type(f"i{bits}", bits)


BOOL, BYTE, INT16, INT32, INT64 = map(integer, (1, 8, 16, 32, 64))
HALF, BFLOAT = Type("half", 16, True), Type("bfloat", 16, True)
FLOAT, DOUBLE = Type("float", 32, True), Type("double", 64, True)
POINTER, VOID = Type("ptr", 64), Type("void", 0)


@cache
def vector(kind: Type, lanes: int) -> Type:
    """Return the vector type with `lanes` lanes; the scalar type if `lanes` is 1."""
    return Type(f"<{lanes} x {kind}>", kind.bits, kind.is_float, kind, lanes) if lanes > 1 else kind


def constant(number: float, kind: Type) -> str:
    """Return a number as LLVM writes it: a float32 or float64 as the bits of a float64, in every lane of a vector."""
    if kind.lanes > 1:
        return f"splat ({kind.element} {constant(number, kind.element)})"
    if not kind.is_float:
        return str(number)
    if kind is FLOAT:
        (number,) = struct.unpack("f", struct.pack("f", number))
    return f"0x{struct.unpack('Q', struct.pack('d', number))[0]:016x}"


@cache
def _lane_indices(indices: tuple[int, ...]) -> str:
    return f"<{len(indices)} x i32> <{', '.join(f'i32 {index}' for index in indices)}>"


class Value:
    """A scalar or vector of the generated function.

    Parameters
    ----------
    name : what LLVM calls the value: a register, a global variable or a constant
    number : the number of an integer constant; None for other values
    """

    __hash__ = object.__hash__
    __slots__ = ("builder", "name", "number", "type")

    def __init__(self, builder: Builder, kind: Type, name: str, number: int | None = None) -> None:
        self.builder, self.type, self.name, self.number = builder, kind, name, number

    def _binary(self, other: Any, for_float: str, for_int: str) -> Value:
        x, y = self.builder.promote(self, other)
        if (x.number is not None or y.number is not None) and (folded := _fold(for_int, x, y)) is not None:
            return folded
        return self.builder.compute(x.type, f"{for_float if x.type.is_float else for_int} {x.type} {x.name}, {y.name}")

    def __add__(self, other: Any) -> Value:
        return self._binary(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return self._binary(other, "fsub", "sub")

    def __rsub__(self, other: Any) -> Value:
        return self.builder.value(other, self.type) - self

    def __mul__(self, other: Any) -> Value:
        return self._binary(other, "fmul", "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return self._binary(other, "fdiv", "sdiv")

    def __floordiv__(self, other: Any) -> Value:
        """Return the quotient of non-negative integers."""
        return self._binary(other, "fdiv", "udiv")

    def __mod__(self, other: Any) -> Value:
        """Return the remainder of non-negative integers."""
        return self._binary(other, "frem", "urem")

    def __lshift__(self, other: Any) -> Value:
        return self._binary(other, "shl", "shl")

    def __rshift__(self, other: Any) -> Value:
        """Shift the bits right and fill with zeros: a division by a power of two for non-negative integers."""
        return self._binary(other, "lshr", "lshr")

    def shift_right_signed(self, bits: int) -> Value:
        """Shift the bits right and fill with the sign: a division by a power of two that rounds down."""
        return self._binary(bits, "ashr", "ashr")

    def __and__(self, other: Any) -> Value:
        return self._binary(other, "and", "and")

    def __or__(self, other: Any) -> Value:
        return self._binary(other, "or", "or")

    def __xor__(self, other: Any) -> Value:
        return self._binary(other, "xor", "xor")

    def __invert__(self) -> Value:
        return self ^ (1 if self.type.element is BOOL else -1)

    def __neg__(self) -> Value:
        if self.type.is_float:
            return self.builder.compute(self.type, f"fneg {self.type} {self.name}")
        return self.builder.value(0, self.type) - self

    def compare(self, predicate: str, other: Any) -> Value:
        """Compare lane by lane. With NaN, != is true and every other comparison is false."""
        x, y = self.builder.promote(self, other)
        name = _PREDICATES[predicate]
        if x.type.is_float:
            name = f"fcmp {'u' if predicate == '!=' else 'o'}{name}"
        elif predicate in ("==", "!="):
            name = f"icmp {name}"
        else:  # as a signed number of 1 bit, True is −1
            name = f"icmp {'u' if x.type.element is BOOL else 's'}{name}"
        return self.builder.compute(vector(BOOL, x.type.lanes), f"{name} {x.type} {x.name}, {y.name}")

    def __lt__(self, other: Any) -> Value:
        return self.compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self.compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self.compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self.compare(">=", other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self.compare("==", other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self.compare("!=", other)

    def to(self, kind: Type) -> Value:
        """Convert the lanes to another type of number. Integers are signed, and truth values become 0 and 1."""
        source, target = self.type.element, kind.element
        if source is target:
            return self
        if target is BOOL and not source.is_float:
            return self != 0
        if source.is_float and target.is_float:
            name = "fpext" if target.bits > source.bits else "fptrunc"
        elif target.is_float:
            name = "uitofp" if source is BOOL else "sitofp"
        elif source.is_float:
            name = "fptosi"
        elif target.bits > source.bits:
            name = "zext" if source is BOOL else "sext"
        else:
            name = "trunc"
        return self._convert(name, vector(target, self.type.lanes))

    def _convert(self, name: str, kind: Type) -> Value:
        if self.number is not None and name in ("sext", "trunc") and kind.lanes == 1:
            return self.builder.value(_wrap(self.number, kind), kind)
        return self.builder.compute(kind, f"{name} {self.type} {self.name} to {kind}")

    def zero_extend(self, kind: Type) -> Value:
        """Convert integers to a wider type and fill with zeros, for bit patterns, which have no sign."""
        return self._convert("zext", vector(kind.element, self.type.lanes))

    def bits(self, kind: Type) -> Value:
        """Reinterpret the bits of each lane as another element type of equal width."""
        return self.bitcast(vector(kind.element, self.type.lanes))

    def bitcast(self, kind: Type) -> Value:
        """Reinterpret all bits as another type, whose lanes may have another width."""
        return self if kind is self.type else self._convert("bitcast", kind)

    def address(self) -> Value:
        """Return this pointer as an integer."""
        return self._convert("ptrtoint", INT64)

    def broadcast(self, lanes: int) -> Value:
        """Copy a scalar to every lane. A vector is returned unchanged."""
        if lanes == 1 or self.type.lanes > 1:
            return self
        kind = vector(self.type, lanes)
        if self.number is not None:
            return self.builder.value(self.number, kind)
        first = self.builder.compute(kind, f"insertelement {kind} poison, {self.type} {self.name}, i32 0")
        zeros = f"<{lanes} x i32> zeroinitializer"
        return self.builder.compute(kind, f"shufflevector {kind} {first.name}, {kind} poison, {zeros}")

    def any(self) -> Value:
        """Return a scalar condition: true if this condition is true in at least one lane."""
        return self.bitcast(integer(self.type.lanes)) != 0

    def sum(self) -> Value:
        return self.reduce(lambda x, y: x + y)

    def reduce(self, combine: Callable[[Value, Value], Value]) -> Value:
        """Reduce the lanes to a scalar: combine the lower half with the upper half until one lane is left."""
        total, lanes = self, self.type.lanes
        while lanes > 1:
            lanes //= 2
            total = combine(*(total.extract_lanes(range(start, start + lanes)) for start in (0, lanes)))
        return total

    def _shuffle(self, other: Value, indices: Sequence[int]) -> Value:
        """Return the lanes at these indices, which count the lanes of this vector, then those of `other`."""
        text = f"shufflevector {self.type} {self.name}, {self.type} {other.name}, {_lane_indices(tuple(indices))}"
        return self.builder.compute(vector(self.type.element, len(indices)), text)

    def extract_lanes(self, indices: Sequence[int]) -> Value:
        """Return the lanes at these indices; a scalar if there is one index."""
        if len(indices) == 1:
            return self.builder.compute(self.type.element, f"extractelement {self.type} {self.name}, i32 {indices[0]}")
        return self._shuffle(self, indices)

    def interleave(self, other: Value, half: int, unit: int = 1, block: int | None = None) -> Value:
        """Alternate units of `unit` lanes from this vector and from `other`, in every block of `block` lanes.

        `half` 0 takes the units from the lower half of each block of lanes, and `half` 1 from the upper half. By
        default the block is the whole vector.
        """
        lanes = self.type.lanes
        block = block or lanes
        indices = [
            vector_start + unit_start + k
            for start in range(half * block // 2, lanes, block)
            for unit_start in range(start, start + block // 2, unit)
            for vector_start in (0, lanes)
            for k in range(unit)
        ]
        return self._shuffle(other, indices)

    def deinterleave(self, other: Value, part: int, unit: int, block: int) -> Value:
        """In every block of `block` lanes, concatenate every second unit of this vector and of `other`.

        A unit has `unit` lanes. `part` 0 takes the units of even index, and `part` 1 the units of odd index.
        """
        lanes = self.type.lanes
        indices = [
            vector_start + unit_start + k
            for start in range(0, lanes, block)
            for vector_start in (start, lanes + start)
            for unit_start in range(part * unit, block, 2 * unit)
            for k in range(unit)
        ]
        return self._shuffle(other, indices)

    def at(self, offset: Any) -> Value:
        """Return this pointer plus an offset in bytes. A vector of offsets gives a vector of pointers."""
        offset = self.builder.value(offset, INT64)
        if offset.number == 0:
            return self
        text = f"getelementptr i8, ptr {self.name}, {offset.type} {offset.name}"
        return self.builder.compute(vector(POINTER, offset.type.lanes), text)

    def freeze(self) -> Value:
        """Return the same value. LLVM does not look past it, so that its analysis of loops takes less time."""
        return self.builder.compute(self.type, f"freeze {self.type} {self.name}")

    def load(self, kind: Type, align: int = 1) -> Value:
        """Load a value of the type `kind` from the pointer. `align` is in bytes."""
        return self.builder.execute(kind, f"load {kind}, ptr {self.name}, align {align}")

    def store(self, value: Value, align: int = 1) -> None:
        """Store a value at the pointer. `align` is in bytes."""
        self.builder.write(f"store {value.type} {value.name}, ptr {self.name}, align {align}")

    def gather(self, kind: Type, lanes: int) -> Value:
        """Load one number through each pointer of a vector of pointers."""
        result_type = vector(kind, lanes)
        name = f"llvm.masked.gather.{intrinsic_suffix(result_type)}.v{lanes}p0"
        all_lanes, undefined = self.builder.value(1, vector(BOOL, lanes)), Value(self.builder, result_type, "undef")
        alignment = self.builder.value(1, INT32)  # in bytes; LLVM 22 makes it an attribute
        return self.builder.call(name, result_type, self, alignment, all_lanes, undefined)


_PREDICATES = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}


def _wrap(number: int, kind: Type) -> int:
    """Return the number of this integer type that is equal to another number modulo 2^bits."""
    half = 1 << (kind.bits - 1)
    return (number + half) % (2 * half) - half


def _fold(operation: str, x: Value, y: Value) -> Value | None:
    """Return the sum, difference or product of scalar integers if it needs no instruction, else None."""
    if operation not in _FOLDED or x.type.lanes > 1 or x.type is BOOL:
        return None
    if x.number is not None and y.number is not None:
        return x.builder.value(_wrap(_FOLDED[operation](x.number, y.number), x.type), x.type)
    neutral = 1 if operation == "mul" else 0
    if y.number == neutral:
        return x
    return y if x.number == neutral and operation != "sub" else None


_FOLDED: dict[str, Callable[[int, int], int]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def intrinsic_suffix(kind: Type) -> str:
    """Return the suffix in the names of LLVM's intrinsics for this type: i64, v16f32, ..."""
    name = f"f{kind.bits}" if kind.is_float else f"i{kind.bits}"
    return f"v{kind.lanes}{name}" if kind.lanes > 1 else name
