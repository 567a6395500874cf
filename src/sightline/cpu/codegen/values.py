"""Types of numbers, and `Value`: a scalar or vector of the function being written, with Python's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from .builder import Builder

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
    "Type",
    "Value",
    "bytes_of",
    "element_type",
    "intrinsic_suffix",
    "is_float",
    "lanes_of",
    "vector",
]

Type = Any  # llvmlite's types are untyped


class _BFloatType(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not know."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloatType)

    def __hash__(self) -> int:
        return hash(_BFloatType)


BOOL, BYTE, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, BFLOAT, FLOAT, DOUBLE = ir.HalfType(), _BFloatType(), ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()


def vector(kind: Type, lanes: int) -> Type:
    """The type of that many lanes; a scalar for 1."""
    return ir.VectorType(kind, lanes) if lanes > 1 else kind


def element_type(kind: Type) -> Type:
    """The type of one lane."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


def lanes_of(kind: Type) -> int:
    return int(kind.count) if isinstance(kind, ir.VectorType) else 1


def is_float(kind: Type) -> bool:
    return isinstance(element_type(kind), ir.HalfType | _BFloatType | ir.FloatType | ir.DoubleType)


def bytes_of(kind: Type) -> int:
    """Size of one lane in bytes."""
    one = element_type(kind)
    if isinstance(one, ir.IntType):
        return max(int(one.width) // 8, 1)
    return 2 if isinstance(one, ir.HalfType | _BFloatType) else 4 if isinstance(one, ir.FloatType) else 8


class Value:
    """A scalar or vector of the function being written."""

    __hash__ = object.__hash__

    def __init__(self, builder: Builder, raw: Any) -> None:
        self.builder, self.raw = builder, raw

    @property
    def type(self) -> Type:
        return self.raw.type

    def _binary(self, other: Any, for_float: str, for_int: str, swap: bool = False) -> Value:
        x, y = self.builder.promote(self, other)
        if swap:
            x, y = y, x
        name = for_float if is_float(x.type) else for_int
        return Value(self.builder, getattr(self.builder.irbuilder, name)(x.raw, y.raw))

    def __add__(self, other: Any) -> Value:
        return self._binary(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return self._binary(other, "fsub", "sub")

    def __rsub__(self, other: Any) -> Value:
        return self._binary(other, "fsub", "sub", swap=True)

    def __mul__(self, other: Any) -> Value:
        return self._binary(other, "fmul", "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return self._binary(other, "fdiv", "sdiv")

    def __rtruediv__(self, other: Any) -> Value:
        return self._binary(other, "fdiv", "sdiv", swap=True)

    def __floordiv__(self, other: Any) -> Value:
        """Quotient of integers known not to be negative."""
        return self._binary(other, "fdiv", "udiv")

    def __mod__(self, other: Any) -> Value:
        """Remainder of integers known not to be negative."""
        return self._binary(other, "frem", "urem")

    def __lshift__(self, other: Any) -> Value:
        return self._binary(other, "shl", "shl")

    def __rshift__(self, other: Any) -> Value:
        """The bits moved down, zeros above: whole numbers known not to be negative."""
        return self._binary(other, "lshr", "lshr")

    def __and__(self, other: Any) -> Value:
        return self._binary(other, "and_", "and_")

    def __or__(self, other: Any) -> Value:
        return self._binary(other, "or_", "or_")

    def __xor__(self, other: Any) -> Value:
        return self._binary(other, "xor", "xor")

    def __invert__(self) -> Value:
        return Value(self.builder, self.builder.irbuilder.not_(self.raw))

    def __neg__(self) -> Value:
        irbuilder = self.builder.irbuilder
        return Value(self.builder, irbuilder.fneg(self.raw) if is_float(self.type) else irbuilder.neg(self.raw))

    def compare(self, predicate: str, other: Any) -> Value:
        """Lane-wise comparison; false with NaN, but for != ."""
        x, y = self.builder.promote(self, other)
        irbuilder = self.builder.irbuilder
        if is_float(x.type):
            compare = irbuilder.fcmp_unordered if predicate == "!=" else irbuilder.fcmp_ordered
            return Value(self.builder, compare(predicate, x.raw, y.raw))
        compare = (
            irbuilder.icmp_unsigned if element_type(x.type) == BOOL else irbuilder.icmp_signed
        )  # a signed True is −1
        return Value(self.builder, compare(predicate, x.raw, y.raw))

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
        """The lanes as another type of number (signed integers, truth values as 0 and 1)."""
        source, target = element_type(self.type), element_type(kind)
        result_type = vector(target, lanes_of(self.type))
        irbuilder = self.builder.irbuilder
        if source == target:
            return self
        if is_float(source) and is_float(target):
            raw = (irbuilder.fpext if bytes_of(target) > bytes_of(source) else irbuilder.fptrunc)(self.raw, result_type)
        elif is_float(target):
            raw = (irbuilder.uitofp if source == BOOL else irbuilder.sitofp)(self.raw, result_type)
        elif is_float(source):
            raw = irbuilder.fptosi(self.raw, result_type)
        elif target == BOOL:
            return self != 0
        elif target.width > source.width:
            raw = (irbuilder.zext if source == BOOL else irbuilder.sext)(self.raw, result_type)
        else:
            raw = irbuilder.trunc(self.raw, result_type)
        return Value(self.builder, raw)

    def zero_extend(self, kind: Type) -> Value:
        """Whole numbers with zeros above: for bits, which have no sign."""
        result_type = vector(element_type(kind), lanes_of(self.type))
        return Value(self.builder, self.builder.irbuilder.zext(self.raw, result_type))

    def bits(self, kind: Type) -> Value:
        """The same bits read as another type of the same width."""
        return Value(
            self.builder, self.builder.irbuilder.bitcast(self.raw, vector(element_type(kind), lanes_of(self.type)))
        )

    def bitcast(self, kind: Type) -> Value:
        """The same bits as lanes of another width."""
        return Value(self.builder, self.builder.irbuilder.bitcast(self.raw, kind))

    def broadcast(self, lanes: int) -> Value:
        """A scalar in every lane; a vector as it is."""
        if lanes == 1 or isinstance(self.type, ir.VectorType):
            return self
        kind = vector(self.type, lanes)
        first = self.builder.irbuilder.insert_element(ir.Constant(kind, ir.Undefined), self.raw, INT32(0))
        zeros = ir.Constant(vector(INT32, lanes), None)
        return Value(self.builder, self.builder.irbuilder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros))

    def any(self) -> Value:
        """Whether a condition holds in any lane."""
        whole = ir.IntType(lanes_of(self.type))
        return Value(self.builder, self.builder.irbuilder.bitcast(self.raw, whole)) != 0

    def trailing_zeros(self) -> Value:
        """Of a whole number that is not 0, the place of its lowest bit."""
        return Value(self.builder, self.builder.irbuilder.cttz(self.raw, BOOL(1)))

    def sum(self) -> Value:
        """The sum of the lanes."""
        return self.reduce(lambda x, y: x + y)

    def reduce(self, combine: Callable[[Value, Value], Value]) -> Value:
        """The lanes made one, halves joined with halves."""
        total, lanes = self, lanes_of(self.type)
        while lanes > 1:
            lanes //= 2
            low, high = (total.extract_lanes(range(start, start + lanes)) for start in (0, lanes))
            total = combine(low, high)
        return total

    def deinterleave(self, other: Value, part: int, unit: int, block: int) -> Value:
        """In each block of lanes every second unit of this vector's lanes, then of the other's; the odd ones for 1."""
        lanes = lanes_of(self.type)
        indices = [
            vector_start + unit_start + k
            for start in range(0, lanes, block)
            for vector_start in (start, lanes + start)
            for unit_start in range(part * unit, block, 2 * unit)
            for k in range(unit)
        ]
        shuffle_mask = ir.Constant(vector(INT32, lanes), indices)
        return Value(self.builder, self.builder.irbuilder.shuffle_vector(self.raw, other.raw, shuffle_mask))

    def extract_lanes(self, indices: Sequence[int]) -> Value:
        """The lanes at these places; a scalar for one."""
        if len(indices) == 1:
            return Value(self.builder, self.builder.irbuilder.extract_element(self.raw, INT32(indices[0])))
        shuffle_mask = ir.Constant(vector(INT32, len(indices)), list(indices))
        return Value(self.builder, self.builder.irbuilder.shuffle_vector(self.raw, self.raw, shuffle_mask))

    def interleave(self, other: Value, half: int, unit: int = 1, block: int | None = None) -> Value:
        """Units of lanes of this vector and the other in turn, of the first or second half of each block of lanes."""
        lanes = lanes_of(self.type)
        block = block or lanes
        shuffle_mask = [
            at + k + vector_start
            for start in range(half * block // 2, lanes, block)
            for at in range(start, start + block // 2, unit)
            for vector_start in (0, lanes)
            for k in range(unit)
        ]
        indices = ir.Constant(vector(INT32, lanes), shuffle_mask)
        return Value(self.builder, self.builder.irbuilder.shuffle_vector(self.raw, other.raw, indices))

    def concatenate(self, other: Value) -> Value:
        """The lanes of this vector, then those of the other."""
        lanes = lanes_of(self.type) * 2
        whole = ir.Constant(vector(INT32, lanes), list(range(lanes)))
        return Value(self.builder, self.builder.irbuilder.shuffle_vector(self.raw, other.raw, whole))

    def at(self, offset: Any, kind: Type | None = None) -> Value:
        """A pointer moved by bytes; by a vector of offsets, a vector of pointers."""
        offset = self.builder.value(offset, INT64)
        raw = self.builder.irbuilder.gep(self.raw, [offset.raw], source_etype=BYTE)
        raw.type = vector(POINTER, lanes_of(offset.type))  # llvmlite forgets that vectors of offsets give vectors
        return Value(self.builder, raw)

    def load(self, kind: Type, align: int = 1) -> Value:
        return Value(self.builder, self.builder.irbuilder.load(self.raw, align=align, typ=kind))

    def store(self, value: Value, align: int = 1) -> None:
        self.builder.irbuilder.store(value.raw, self.raw, align=align)

    def gather(self, kind: Type, lanes: int) -> Value:
        """Loads through a vector of pointers."""
        result_type, pointers = vector(kind, lanes), vector(POINTER, lanes)
        name = f"llvm.masked.gather.{intrinsic_suffix(result_type)}.v{lanes}p0"
        signature = ir.FunctionType(result_type, [pointers, vector(BOOL, lanes), result_type])
        function = self.builder.declare(name, signature)
        all_lanes = ir.Constant(vector(BOOL, lanes), [1] * lanes)
        raw = self.builder.irbuilder.call(function, [self.raw, all_lanes, ir.Constant(result_type, ir.Undefined)])
        return Value(self.builder, raw)


def intrinsic_suffix(kind: Type) -> str:
    one = element_type(kind)
    name = f"i{one.width}" if isinstance(one, ir.IntType) else "f32" if isinstance(one, ir.FloatType) else "f64"
    return f"v{lanes_of(kind)}{name}" if isinstance(kind, ir.VectorType) else name
