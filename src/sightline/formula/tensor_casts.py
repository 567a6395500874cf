"""The methods of torch tensors that cast a number or make a constant: `x.to(dtype)`, `x.new_ones(())` and others.

A formula has a kind (condition, integer or float) and no dtype. A cast changes the kind. The precision stays that of
the formula: a cast to a narrow float dtype does not round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import FormulaError
from .composed_functions import as_condition, truncated_quotient
from .expression import Apply, Constant, Expression, apply, as_expression, where
from .operators import Kind

KINDS: dict[str, Kind] = {
    "bool": "bool",
    **dict.fromkeys(("int", "long", "int32", "int64"), "int"),
    **dict.fromkeys(("float", "double", "half", "float16", "bfloat16", "float32", "float64"), "float"),
}


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


def _is_dtype(value: Any) -> bool:
    """True for a dtype of torch or NumPy, a Python type or a dtype's name; False for a device."""
    return type(value).__name__.lower().endswith("dtype") or isinstance(value, type) or str(value) in KINDS


def _to(input: Any, *arguments: Any, dtype: Any = None, **options: Any) -> Expression:
    """Return `input.to(dtype)`, `input.to(device, dtype)` or `input.to(other)`; devices and options do nothing."""
    unknown = set(options) - {"device", "other", "copy", "non_blocking", "memory_format"}
    if unknown:
        raise FormulaError(f"to with {', '.join(sorted(unknown))}=", "to(dtype)", "x.to(torch.float32)")
    for argument in (*arguments, options.get("other")):
        if isinstance(argument, Expression):
            return cast(input, argument.kind)
        if _is_dtype(argument):
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
