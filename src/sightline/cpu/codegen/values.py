"""Types of numbers, and `Value`: a scalar or vector of the generated function, with Python's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from .builder import Builder

Type = Any  # llvmlite's types are untyped


class _BFloatType(ir.types.Type):  # type: ignore[misc]
    """LLVM's type bfloat, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloatType)

    def __hash__(self) -> int:
        return hash(_BFloatType)


BOOL, BYTE, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, BFLOAT, FLOAT, DOUBLE = ir.HalfType(), _BFloatType(), ir.FloatType(), ir.DoubleType()
POINTER, VOID = ir.PointerType(), ir.VoidType()


def vector(kind: Type, lanes: int) -> Type:
    """Return the vector type with `lanes` lanes; the scalar type if `lanes` is 1."""
    return ir.VectorType(kind, lanes) if lanes > 1 else kind


def element_type(kind: Type) -> Type:
    """Return the type of one lane; the type itself if the type is a scalar type."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


def lanes_of(kind: Type) -> int:
    """Return the number of lanes; 1 for a scalar type."""
    return int(kind.count) if isinstance(kind, ir.VectorType) else 1


def is_float(kind: Type) -> bool:
    """True if the type is a floating-point type, or a vector type of floating-point lanes."""
    return isinstance(element_type(kind), ir.HalfType | _BFloatType | ir.FloatType | ir.DoubleType)


def bytes_of(kind: Type) -> int:
    """Return the size in bytes of one lane; of the scalar if the type is a scalar type."""
    element = element_type(kind)
    if isinstance(element, ir.IntType):
        return max(int(element.width) // 8, 1)
    return 2 if isinstance(element, ir.HalfType | _BFloatType) else 4 if isinstance(element, ir.FloatType) else 8


class Value:
    """A scalar or vector of the generated function."""

    __hash__ = object.__hash__

    def __init__(self, builder: Builder, raw: Any) -> None:
        self.builder, self.raw = builder, raw

    @property
    def type(self) -> Type:
        return self.raw.type

    def _binary(self, other: Any, for_float: str, for_int: str) -> Value:
        x, y = self.builder.promote(self, other)
        name = for_float if is_float(x.type) else for_int
        return Value(self.builder, getattr(self.builder.irbuilder, name)(x.raw, y.raw))

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
        """Compare lane by lane. With NaN, != is true and every other comparison is false."""
        x, y = self.builder.promote(self, other)
        irbuilder = self.builder.irbuilder
        if is_float(x.type):
            compare = irbuilder.fcmp_unordered if predicate == "!=" else irbuilder.fcmp_ordered
        else:  # as a signed number of 1 bit, True is −1
            compare = irbuilder.icmp_unsigned if element_type(x.type) == BOOL else irbuilder.icmp_signed
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
        """Convert the lanes to another type of number. Integers are signed, and truth values become 0 and 1."""
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
        """Convert integers to a wider type and fill with zeros, for bit patterns, which have no sign."""
        result_type = vector(element_type(kind), lanes_of(self.type))
        return Value(self.builder, self.builder.irbuilder.zext(self.raw, result_type))

    def bits(self, kind: Type) -> Value:
        """Reinterpret the bits of each lane as another element type of equal width."""
        return self.bitcast(vector(element_type(kind), lanes_of(self.type)))

    def bitcast(self, kind: Type) -> Value:
        """Reinterpret all bits as another type, whose lanes may have another width."""
        return Value(self.builder, self.builder.irbuilder.bitcast(self.raw, kind))

    def broadcast(self, lanes: int) -> Value:
        """Copy a scalar to every lane. A vector is returned unchanged."""
        if lanes == 1 or isinstance(self.type, ir.VectorType):
            return self
        undefined, irbuilder = ir.Constant(vector(self.type, lanes), ir.Undefined), self.builder.irbuilder
        first = irbuilder.insert_element(undefined, self.raw, INT32(0))
        zeros = ir.Constant(vector(INT32, lanes), None)
        return Value(self.builder, irbuilder.shuffle_vector(first, undefined, zeros))

    def any(self) -> Value:
        """Return a scalar condition: true if this condition is true in at least one lane."""
        return self.bitcast(ir.IntType(lanes_of(self.type))) != 0

    def trailing_zeros(self) -> Value:
        """Return the index of the lowest set bit of a nonzero integer."""
        return Value(self.builder, self.builder.irbuilder.cttz(self.raw, BOOL(1)))

    def sum(self) -> Value:
        """Return the sum of the lanes."""
        return self.reduce(lambda x, y: x + y)

    def reduce(self, combine: Callable[[Value, Value], Value]) -> Value:
        """Reduce the lanes to a scalar: combine the lower half with the upper half until one lane is left."""
        total, lanes = self, lanes_of(self.type)
        while lanes > 1:
            lanes //= 2
            total = combine(*(total.extract_lanes(range(start, start + lanes)) for start in (0, lanes)))
        return total

    def _shuffle(self, other: Value, indices: Sequence[int]) -> Value:
        """Return the lanes at these indices, which count the lanes of this vector, then those of `other`."""
        shuffle_mask = ir.Constant(vector(INT32, len(indices)), list(indices))
        return Value(self.builder, self.builder.irbuilder.shuffle_vector(self.raw, other.raw, shuffle_mask))

    def extract_lanes(self, indices: Sequence[int]) -> Value:
        """Return the lanes at these indices; a scalar if there is one index."""
        if len(indices) == 1:
            return Value(self.builder, self.builder.irbuilder.extract_element(self.raw, INT32(indices[0])))
        return self._shuffle(self, indices)

    def interleave(self, other: Value, half: int, unit: int = 1, block: int | None = None) -> Value:
        """Alternate units of `unit` lanes from this vector and from `other`, in every block of `block` lanes.

        `half` 0 takes the units from the lower half of each block of lanes, and `half` 1 from the upper half. By
        default the block is the whole vector.
        """
        lanes = lanes_of(self.type)
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
        lanes = lanes_of(self.type)
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
        raw = self.builder.irbuilder.gep(self.raw, [offset.raw], source_etype=BYTE)
        raw.type = vector(POINTER, lanes_of(offset.type))  # llvmlite types the result as one pointer
        return Value(self.builder, raw)

    def load(self, kind: Type, align: int = 1) -> Value:
        """Load a value of this type from the pointer. `align` is in bytes."""
        return Value(self.builder, self.builder.irbuilder.load(self.raw, align=align, typ=kind))

    def store(self, value: Value, align: int = 1) -> None:
        """Store a value at the pointer. `align` is in bytes."""
        self.builder.irbuilder.store(value.raw, self.raw, align=align)

    def gather(self, kind: Type, lanes: int) -> Value:
        """Load one number through each pointer of a vector of pointers."""
        result_type, pointers = vector(kind, lanes), vector(POINTER, lanes)
        name = f"llvm.masked.gather.{intrinsic_suffix(result_type)}.v{lanes}p0"
        signature = ir.FunctionType(result_type, [pointers, vector(BOOL, lanes), result_type])
        all_lanes = ir.Constant(vector(BOOL, lanes), [1] * lanes)
        operands = [self.raw, all_lanes, ir.Constant(result_type, ir.Undefined)]
        return Value(self.builder, self.builder.irbuilder.call(self.builder.declare(name, signature), operands))


def intrinsic_suffix(kind: Type) -> str:
    """Return the suffix in the names of LLVM's intrinsics for this type: i64, v16f32, ..."""
    element = element_type(kind)
    name = f"i{element.width}" if isinstance(element, ir.IntType) else f"f{8 * bytes_of(kind)}"
    return f"v{lanes_of(kind)}{name}" if isinstance(kind, ir.VectorType) else name
