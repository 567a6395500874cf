"""Types of numbers, and `Value`: a scalar or vector of the function being written, with Python's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from .builder import Code

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
    "element",
    "is_float",
    "lanes_of",
    "suffix",
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


def element(kind: Type) -> Type:
    """The type of one lane."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


def lanes_of(kind: Type) -> int:
    return int(kind.count) if isinstance(kind, ir.VectorType) else 1


def is_float(kind: Type) -> bool:
    return isinstance(element(kind), ir.HalfType | _BFloatType | ir.FloatType | ir.DoubleType)


def bytes_of(kind: Type) -> int:
    """Size of one lane in bytes."""
    one = element(kind)
    if isinstance(one, ir.IntType):
        return max(int(one.width) // 8, 1)
    return 2 if isinstance(one, ir.HalfType | _BFloatType) else 4 if isinstance(one, ir.FloatType) else 8


class Value:
    """A scalar or vector of the function being written."""

    __hash__ = object.__hash__

    def __init__(self, code: Code, raw: Any) -> None:
        self.code, self.raw = code, raw

    @property
    def type(self) -> Type:
        return self.raw.type

    def _binary(self, other: Any, for_float: str, for_int: str, swap: bool = False) -> Value:
        x, y = self.code.meet(self, other)
        if swap:
            x, y = y, x
        name = for_float if is_float(x.type) else for_int
        return Value(self.code, getattr(self.code.builder, name)(x.raw, y.raw))

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
        return Value(self.code, self.code.builder.not_(self.raw))

    def __neg__(self) -> Value:
        builder = self.code.builder
        return Value(self.code, builder.fneg(self.raw) if is_float(self.type) else builder.neg(self.raw))

    def compare(self, sign: str, other: Any) -> Value:
        """Lane-wise comparison; false with NaN, but for != ."""
        x, y = self.code.meet(self, other)
        builder = self.code.builder
        if is_float(x.type):
            compare = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
            return Value(self.code, compare(sign, x.raw, y.raw))
        compare = builder.icmp_unsigned if element(x.type) == BOOL else builder.icmp_signed  # a signed True is −1
        return Value(self.code, compare(sign, x.raw, y.raw))

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
        source, target = element(self.type), element(kind)
        wanted = vector(target, lanes_of(self.type))
        builder = self.code.builder
        if source == target:
            return self
        if is_float(source) and is_float(target):
            raw = (builder.fpext if bytes_of(target) > bytes_of(source) else builder.fptrunc)(self.raw, wanted)
        elif is_float(target):
            raw = (builder.uitofp if source == BOOL else builder.sitofp)(self.raw, wanted)
        elif is_float(source):
            raw = builder.fptosi(self.raw, wanted)
        elif target == BOOL:
            return self != 0
        elif target.width > source.width:
            raw = (builder.zext if source == BOOL else builder.sext)(self.raw, wanted)
        else:
            raw = builder.trunc(self.raw, wanted)
        return Value(self.code, raw)

    def widened(self, kind: Type) -> Value:
        """Whole numbers with zeros above: for bits, which have no sign."""
        wanted = vector(element(kind), lanes_of(self.type))
        return Value(self.code, self.code.builder.zext(self.raw, wanted))

    def bits(self, kind: Type) -> Value:
        """The same bits read as another type of the same width."""
        return Value(self.code, self.code.builder.bitcast(self.raw, vector(element(kind), lanes_of(self.type))))

    def cast(self, kind: Type) -> Value:
        """The same bits as lanes of another width."""
        return Value(self.code, self.code.builder.bitcast(self.raw, kind))

    def spread(self, lanes: int) -> Value:
        """A scalar in every lane; a vector as it is."""
        if lanes == 1 or isinstance(self.type, ir.VectorType):
            return self
        kind = vector(self.type, lanes)
        first = self.code.builder.insert_element(ir.Constant(kind, ir.Undefined), self.raw, INT32(0))
        zeros = ir.Constant(vector(INT32, lanes), None)
        return Value(self.code, self.code.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros))

    def any(self) -> Value:
        """Whether a condition holds in any lane."""
        whole = ir.IntType(lanes_of(self.type))
        return Value(self.code, self.code.builder.bitcast(self.raw, whole)) != 0

    def trailing_zeros(self) -> Value:
        """Of a whole number that is not 0, the place of its lowest bit."""
        return Value(self.code, self.code.builder.cttz(self.raw, BOOL(1)))

    def sum(self) -> Value:
        """The sum of the lanes."""
        return self.fold(lambda x, y: x + y)

    def fold(self, join: Callable[[Value, Value], Value]) -> Value:
        """The lanes made one, halves joined with halves."""
        total, lanes = self, lanes_of(self.type)
        while lanes > 1:
            lanes //= 2
            low, high = (total.pick(range(start, start + lanes)) for start in (0, lanes))
            total = join(low, high)
        return total

    def join(self, other: Value, part: int, unit: int, block: int) -> Value:
        """In each block of lanes every second unit of this vector's lanes, then of the other's; the odd ones for 1."""
        lanes = lanes_of(self.type)
        places = [
            vector_start + unit_start + k
            for start in range(0, lanes, block)
            for vector_start in (start, lanes + start)
            for unit_start in range(part * unit, block, 2 * unit)
            for k in range(unit)
        ]
        chosen = ir.Constant(vector(INT32, lanes), places)
        return Value(self.code, self.code.builder.shuffle_vector(self.raw, other.raw, chosen))

    def pick(self, places: Sequence[int]) -> Value:
        """The lanes at these places; a scalar for one."""
        if len(places) == 1:
            return Value(self.code, self.code.builder.extract_element(self.raw, INT32(places[0])))
        chosen = ir.Constant(vector(INT32, len(places)), list(places))
        return Value(self.code, self.code.builder.shuffle_vector(self.raw, self.raw, chosen))

    def braid(self, other: Value, half: int, unit: int = 1, block: int | None = None) -> Value:
        """Units of lanes of this vector and the other in turn, of the first or second half of each block of lanes."""
        lanes = lanes_of(self.type)
        block = block or lanes
        chosen = [
            at + k + vector_start
            for start in range(half * block // 2, lanes, block)
            for at in range(start, start + block // 2, unit)
            for vector_start in (0, lanes)
            for k in range(unit)
        ]
        places = ir.Constant(vector(INT32, lanes), chosen)
        return Value(self.code, self.code.builder.shuffle_vector(self.raw, other.raw, places))

    def beside(self, other: Value) -> Value:
        """The lanes of this vector, then those of the other."""
        lanes = lanes_of(self.type) * 2
        whole = ir.Constant(vector(INT32, lanes), list(range(lanes)))
        return Value(self.code, self.code.builder.shuffle_vector(self.raw, other.raw, whole))

    def at(self, offset: Any, kind: Type | None = None) -> Value:
        """A pointer moved by bytes; by a vector of offsets, a vector of pointers."""
        offset = self.code.value(offset, INT64)
        raw = self.code.builder.gep(self.raw, [offset.raw], source_etype=BYTE)
        raw.type = vector(POINTER, lanes_of(offset.type))  # llvmlite forgets that vectors of offsets give vectors
        return Value(self.code, raw)

    def load(self, kind: Type, align: int = 1) -> Value:
        return Value(self.code, self.code.builder.load(self.raw, align=align, typ=kind))

    def store(self, value: Value, align: int = 1) -> None:
        self.code.builder.store(value.raw, self.raw, align=align)

    def gather(self, kind: Type, lanes: int) -> Value:
        """Loads through a vector of pointers."""
        wanted, pointers = vector(kind, lanes), vector(POINTER, lanes)
        name = f"llvm.masked.gather.{suffix(wanted)}.v{lanes}p0"
        signature = ir.FunctionType(wanted, [pointers, vector(BOOL, lanes), wanted])
        function = self.code.declare(name, signature)
        everywhere = ir.Constant(vector(BOOL, lanes), [1] * lanes)
        raw = self.code.builder.call(function, [self.raw, everywhere, ir.Constant(wanted, ir.Undefined)])
        return Value(self.code, raw)


def suffix(kind: Type) -> str:
    one = element(kind)
    name = f"i{one.width}" if isinstance(one, ir.IntType) else "f32" if isinstance(one, ir.FloatType) else "f64"
    return f"v{lanes_of(kind)}{name}" if isinstance(kind, ir.VectorType) else name
