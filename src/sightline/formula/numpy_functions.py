"""Translation of NumPy and torch function calls on formulas into operators, by function name.

Methods of torch tensors cast a number or make a constant: `x.to(dtype)`, `x.new_ones(())` and others. A formula has a
kind (condition, integer or float) and no dtype. A cast changes the kind. The precision stays that of the formula: a
cast to a narrow float dtype does not round.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from ..arrays.operations import is_compiling
from ..errors import FormulaError
from .composed_functions import COMPOSED, as_condition, truncated_quotient
from .expression import Apply, Constant, Expression, apply, as_expression, where
from .operators import OPERATOR_ALIASES, OPERATORS, Kind
from .printing import format_as_code

IS_READING = ContextVar("IS_READING", default=False)  # True while a mask or score function is called
KINDS: dict[str, Kind] = {
    "bool": "bool",
    **dict.fromkeys(("int", "long", "int32", "int64"), "int"),
    **dict.fromkeys(("float", "double", "half", "float16", "bfloat16", "float32", "float64"), "float"),
}
# The namespaces of torch's own operators, and that of the attention gym, whose approx::tanh is an instruction for tanh.
OPERATOR_NAMESPACES = ("aten", "approx")

DTYPES = {"bool": "bool", "int": "int64", "float": "float32"}
ATTRIBUTES: dict[str, Callable[[Any, Expression], Any]] = {  # (torch, formula) → attribute of a tensor
    "device": lambda torch, value: torch.get_default_device(),
    "dtype": lambda torch, value: getattr(torch, DTYPES[value.kind]),
    "ndim": lambda torch, value: 0,
    "shape": lambda torch, value: torch.Size(()),
}
REDUCTIONS = {  # functions that reduce an array, and the statistics that they mean
    **dict.fromkeys(("sum", "add.reduce"), "sum({}, over=j)"),
    **dict.fromkeys(("mean", "average"), "sum({} / m, over=j)"),
    **dict.fromkeys(("max", "amax", "maximum.reduce"), "max({}, over=j)"),
    **dict.fromkeys(("min", "amin", "minimum.reduce"), "min({}, over=j)"),
}
CURES = dict.fromkeys(("sort", "argsort", "cumsum"), "a table; of weights, see=sightline.top_k(k) or sightline.tiles")
CURES["where"] = "where(condition, x, y), with the number where the condition is false, such as 0"
NO_ATTRIBUTE = (
    "formulas have no attribute {!r}, because a formula is not an array; formula.array(n, m) makes one. A model of "
    "transformers takes a formula by `with sightline.transformers.masking(model, mask):`"
)


def translate_call(
    name: str, inputs: Sequence[Any], kwargs: dict[str, Any], library: str, function: Any = None
) -> Expression:
    """Return the formula that `numpy.name(...)` or `torch.name(...)` means.

    `function` is the function itself, or None for NumPy. From `function` it follows whether the call is a method of a
    tensor, and whether it is an operator of another library than torch, such as `torch.ops.library.name`.
    """
    if not is_compiling():
        qualified = getattr(function, "_qualified_op_name", None) or str(getattr(function, "_schema", "")).split("(")[0]
        if "::" in qualified and qualified.split("::")[0] not in OPERATOR_NAMESPACES:
            raise _unsupported("the custom operator", qualified, inputs)
        if name == "__getitem__":
            raise FormulaError(
                f"a tensor indexed by {inputs[1]}", "tables indexed by formulas", "sightline.table(tensor)[i]"
            )
        if name == "where" and isinstance(function, types.MethodDescriptorType):
            inputs = (inputs[1], inputs[0], *inputs[2:])  # tensor.where(condition, other)
    return _translate(name, inputs, dict(kwargs), library)


def tensor_attribute(value: Expression, name: str) -> Any:
    """Return the attribute that a torch tensor without axes has, such as the method `clamp`, for a formula.

    A formula has a dtype and a shape only while a mask or score function is called. At other times this library reads
    an object with dtype and shape as an array. Raise AttributeError if formulas have no such attribute.
    """
    if name == "device" and is_compiling():
        return None
    if name in ATTRIBUTES and not is_compiling() and IS_READING.get() and "torch" in sys.modules:
        return ATTRIBUTES[name](sys.modules["torch"], value)
    if name not in METHODS:
        cure = _suggest_statistic(name, value)
        raise AttributeError(NO_ATTRIBUTE.format(name) + (f" For the statistic write {cure}." if cure else ""))

    def method(*inputs: Any, **kwargs: Any) -> Any:
        first = (inputs[0], value, *inputs[1:]) if name == "where" else (value, *inputs)
        return _translate(name, first, kwargs, "tensor")

    return method


def _translate(name: str, inputs: Sequence[Any], kwargs: dict[str, Any], library: str) -> Expression:
    name = OPERATOR_ALIASES.get(name, name)
    for keyword, default in (("out", None), ("inplace", False)):
        if keyword in kwargs and kwargs[keyword] is default:
            del kwargs[keyword]
    # numpy.max(x, axis) is no torch.max(x, y)
    if name in FUNCTIONS and not (library == "numpy" and name in REDUCTIONS):
        try:
            return FUNCTIONS[name](*inputs, **kwargs)
        except TypeError as error:  # the signature is read only after an error, because it takes longer than the call
            if accepts(inspect.signature(FUNCTIONS[name]), *inputs, **kwargs):
                raise
            raise _unsupported(library, name, inputs, _describe(inputs, kwargs)) from error
    if name not in OPERATORS:
        raise _unsupported(library, name, inputs)
    arity = OPERATORS[name].arity
    keywords = ("condition", "input", "other") if arity == 3 else ("input", "other")[:arity]
    operands = [*inputs, *[kwargs.pop(keyword) for keyword in keywords[len(inputs) :] if keyword in kwargs]]
    if kwargs or len(operands) != arity:
        raise _unsupported(library, name, inputs, _describe(inputs, kwargs))
    return apply(name, *operands)


def accepts(signature: inspect.Signature, *inputs: Any, **kwargs: Any) -> bool:
    """True if a function with this signature can be called with these arguments."""
    try:
        signature.bind(*inputs, **kwargs)
    except TypeError:
        return False
    return True


def _describe(inputs: Sequence[Any], kwargs: dict[str, Any]) -> str:
    return f" with {len(inputs)} arguments" + (f" and {', '.join(sorted(kwargs))}=" if kwargs else "")


def _unsupported(library: str, name: str, inputs: Sequence[Any], arguments: str = "") -> FormulaError:
    """Return the error for a function that the formula language does not have."""
    names = sorted({*OPERATORS, *COMPOSED})
    cure = _suggest_statistic(name, inputs[0] if inputs else None)
    return FormulaError(
        f"{library}{' ' if ' ' in library else '.'}{name}{arguments} of a formula",
        f"+ - * / // % ** abs, comparisons, & | ^ ~, and {', '.join(names)}",
        f"{cure} for the statistic" if cure else CURES.get(name, "write the function with these operators, or a table"),
    )


def _suggest_statistic(name: str, formula: Any) -> str:
    """Return the statistic that a reduction of a formula over an axis means, else ""."""
    return f"see=sightline.{REDUCTIONS[name].format(format_as_code(formula))}" if name in REDUCTIONS else ""


# -- casts and constants -----------------------------------------------------------------------------------------------


def cast(value: Any, kind: Kind) -> Expression:
    """Return the value as a condition, an integer or a float, as torch casts it.

    A float becomes an integer only if it is a quotient of integers, or such a quotient rounded by floor, ceil or trunc.
    Integer division computes this integer exactly. Other floats raise FormulaError, because their rounding can vary.
    """
    x = as_expression(value)
    if isinstance(x, Constant) and math.isfinite(x.value):
        return as_expression({"bool": bool, "int": int, "float": float}[kind](x.value))
    if kind == "bool":
        return as_condition(x)
    if x.kind == "bool":
        return where(x, 1.0, 0.0) if kind == "float" else where(x, 1, 0)
    if x.kind == kind:
        return x
    return apply("multiply", x, 1.0) if kind == "float" else _to_integer(x)


def _to_integer(x: Expression) -> Expression:
    """Return a float formula rounded toward 0 as an integer formula; see `cast` for the floats that are allowed."""
    if getattr(x, "operator", "") == "where":  # a truncated quotient is a `where` whose branches are rounded
        condition, yes, no = x.arguments
        return where(condition, cast(yes, "int"), cast(no, "int"))
    if getattr(x, "operator", "") in ("floor", "ceil"):
        quotient = _read_quotient(x.arguments[0])
        if quotient is not None:
            down = apply("floor_divide", *quotient)
            if x.operator == "floor":  # type: ignore[attr-defined]
                return down
            return -apply("floor_divide", -quotient[0], quotient[1])
    quotient = _read_quotient(x)
    if quotient is not None:
        return truncated_quotient(*quotient)
    raise FormulaError(
        f"{x}, a float, cast to an integer",
        "integers, conditions, and quotients of integers such as (i / 2).int()",
        "compute with whole numbers: i // 2, i % 2; or compute the integers of all positions before the call, in a "
        "tensor that the function indexes: bucket[q_idx - kv_idx + n]",
    )


def _read_quotient(x: Expression) -> tuple[Expression, ...] | None:
    """Return (a, b) if x is a / b for integers a and b, else None."""
    is_quotient = isinstance(x, Apply) and x.operator == "divide" and all(a.kind == "int" for a in x.arguments)
    return x.arguments if is_quotient else None


def read_kind(dtype: Any) -> Kind:
    """Return the kind of a dtype of torch or NumPy, of a Python type, or of a dtype's name."""
    name = getattr(dtype, "__name__", str(dtype)).rpartition(".")[2].rstrip("_")
    if name in KINDS:
        return KINDS[name]
    raise FormulaError(
        f"a formula cast to {dtype}",
        "bool, int32, int64, float16, bfloat16, float32, float64",
        "cast to one of these dtypes: a formula has only three kinds, condition, integer and float",
    )


def _to(input: Any, *arguments: Any, dtype: Any = None, **options: Any) -> Expression:
    """Return `input.to(dtype)`, `input.to(device, dtype)` or `input.to(other)`; devices and options do nothing."""
    unknown = set(options) - {"device", "other", "copy", "non_blocking", "memory_format"}
    if unknown:
        raise FormulaError(f"to with {', '.join(sorted(unknown))}=", "to(dtype)", "x.to(torch.float32)")
    for argument in (*arguments, options.get("other")):
        if isinstance(argument, Expression):
            return cast(input, argument.kind)
        is_dtype = type(argument).__name__.lower().endswith("dtype")  # of torch or NumPy
        if is_dtype or isinstance(argument, type) or str(argument) in KINDS:
            dtype = argument
        elif hasattr(argument, "dtype"):
            dtype = argument.dtype
    return as_expression(input) if dtype is None else cast(input, read_kind(dtype))


def _constant(
    input: Any,
    size: Any,
    fill_value: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    memory_format: Any = None,
    requires_grad: bool = False,
) -> Expression:
    """Return `fill_value` in the kind of the dtype, by default that of `input`. The `size` of a formula must be ()."""
    shape = tuple(size) if hasattr(size, "__len__") else (size,)
    if shape:
        raise FormulaError(f"a tensor of shape {shape} made from a formula", "shape ()", "x.new_ones(())")
    return cast(fill_value, as_expression(input).kind if dtype is None else read_kind(dtype))


def _full_like(
    input: Any, fill_value: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None
) -> Expression:
    return _constant(input, (), fill_value, dtype=dtype)


def _new_tensor(input: Any, data: Any, *, dtype: Any = None, device: Any = None) -> Expression:
    number = as_expression(data)
    return number if dtype is None else cast(number, read_kind(dtype))


def _refuse_value(input: Any) -> Expression:
    raise FormulaError(
        f"the value of a formula ({input}), read by .item() or .tolist()",
        "formulas, which stand for all (i, j) at once",
        "torch.where(condition, x, y) for `x if condition.item() else y`",
    )


def _refuse_detach(input: Any) -> Expression:
    raise FormulaError(
        f"detach of a formula ({input})", "detach of tensors", "detach the tensor that the formula reads: t.detach()[h]"
    )


CASTS: dict[str, Callable[..., Any]] = {
    **{
        name: partial(cast, kind=KINDS[name]) for name in ("bool", "int", "long", "float", "double", "half", "bfloat16")
    },
    "to": _to,
    "type": _to,
    "astype": _to,
    "type_as": _to,
    "new_ones": partial(_constant, fill_value=1),
    "new_zeros": partial(_constant, fill_value=0),
    "new_full": _constant,
    "new_tensor": _new_tensor,
    "ones_like": partial(_constant, size=(), fill_value=1),
    "zeros_like": partial(_constant, size=(), fill_value=0),
    "full_like": _full_like,
    "clone": as_expression,
    "contiguous": as_expression,
    "item": _refuse_value,
    "tolist": _refuse_value,
    "detach": _refuse_detach,
}
FUNCTIONS: dict[str, Callable[..., Expression]] = {**COMPOSED, **CASTS}
METHODS = {*OPERATORS, *OPERATOR_ALIASES, *FUNCTIONS}
