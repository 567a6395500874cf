"""Evaluation of formulas with plain array operations, in any array-API namespace.

Callers compute the floats of a mask in float64, so that every kernel hides the same pairs. The floats of a score have
the dtype that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays.operations import convert, device_option, namespace, to_numpy
from ..errors import FormulaError
from .expression import Apply, Constant, Expression, Lookup, Symbol, fold
from .operators import Kind, common_kind


def evaluate(formula: Expression, symbols: Mapping[str, Any], *, xp: Any, float_dtype: Any, like: Any) -> Any:
    """Return the formula's result as one array, for broadcastable arrays of its symbols.

    Parameters
    ----------
    symbols : by name, the int64 arrays b, h, i and j, the array s, and the Python ints n and m
    xp : the array-API namespace of the computation
    float_dtype : the dtype of every node that is a float
    like : an array of the namespace `xp`; the computation runs on its device
    """
    options = device_option(like)
    dtypes = {"bool": xp.bool, "int": xp.int64, "float": float_dtype}

    def cast(value: Any, kind: Kind) -> Any:
        return value if value.dtype == dtypes[kind] else xp.astype(value, dtypes[kind])

    def visit(node: Expression, inputs: list[Any]) -> Any:
        if isinstance(node, Symbol):
            value = symbols[node.name]
            return cast(value if hasattr(value, "dtype") else xp.asarray(value, **options), node.kind)
        if isinstance(node, Constant):
            return xp.asarray(node.value, dtype=dtypes[node.kind], **options)
        if isinstance(node, Lookup):
            source = convert(node.table.array, like)
            if 0 in source.shape:  # only hidden pairs read an empty table, and for a hidden pair any number is correct
                source = xp.zeros([max(length, 1) for length in source.shape], dtype=source.dtype, **options)
            index = tuple(xp.clip(x, 0, length - 1) for x, length in zip(inputs, source.shape, strict=True))
            return cast(source[index], node.kind)
        assert isinstance(node, Apply)
        operand_kind, first = common_kind(node), 1 if node.operator == "where" else 0  # the condition is not converted
        operands = [*inputs[:first], *[cast(x, operand_kind) for x in inputs[first:]]]
        return ARRAY_RULES[node.operator](xp, *operands)

    return fold(visit, formula)


def evaluate_dense(formula: Expression, extent: tuple[int, int, int, int], s: Any = None) -> Any:
    """Return the formula's result at every pair, as a (B, H, n, m) NumPy array of bool, int64 or float64."""
    B, H, n, m = extent
    if formula.free_symbols & ({"s", "p"} if s is None else {"p"}):
        raise FormulaError(f"{formula}, evaluated without scores", "s with scores, p in sum only", "pass s=scores")
    b, h, i = (np.arange(length).reshape(-1, *axes) for length, axes in ((B, (1, 1, 1)), (H, (1, 1)), (n, (1,))))
    scores = {} if s is None else {"s": np.broadcast_to(to_numpy(s), extent)}
    return np.broadcast_to(evaluate_at(formula, b=b, h=h, i=i, j=np.arange(m), n=n, m=m, **scores), extent)


def evaluate_at(formula: Expression, *, b: Any, h: Any, i: Any, j: Any, n: int, m: int, **scores: Any) -> Any:
    """Return the formula's result for NumPy arrays or numbers of its symbols, with floats in float64."""
    symbols = {"b": np.asarray(b), "h": np.asarray(h), "i": i, "j": j, "n": n, "m": m, **scores}
    with np.errstate(all="ignore"):
        return evaluate(formula, symbols, xp=namespace(i), float_dtype=np.dtype("float64"), like=i)


def _integer_division(name: str) -> Callable[[Any, Any, Any], Any]:
    """Return the array rule of `name`, which is "floor_divide" or "remainder".

    For whole numbers, x // 0 and x mod 0 are 0, as in NumPy, also with libraries that raise an error there.
    """

    def rule(xp: Any, x: Any, y: Any) -> Any:
        if xp.isdtype(x.dtype, "real floating"):
            return xp.floor(x / y) if name == "floor_divide" else x - xp.floor(x / y) * y
        zero = y == 0
        result = getattr(xp, name)(x, xp.where(zero, 1, y))
        return xp.where(zero, 0, result)

    return rule


def _namespace_function(name: str) -> Callable[..., Any]:
    return lambda xp, *inputs: getattr(xp, name)(*inputs)


_SAME_NAME = (
    "add subtract multiply divide negative minimum maximum less less_equal greater greater_equal equal not_equal "
    "logical_not logical_and logical_xor logical_or bitwise_and where exp log log2 log1p sqrt tanh sin cos"
)

ARRAY_RULES: dict[str, Callable[..., Any]] = {name: _namespace_function(name) for name in _SAME_NAME.split()} | {
    "absolute": _namespace_function("abs"),
    "power": _namespace_function("pow"),
    "exp2": lambda xp, x: 2.0**x,
    "floor": lambda xp, x: xp.floor(x) if xp.isdtype(x.dtype, "real floating") else x,
    "ceil": lambda xp, x: xp.ceil(x) if xp.isdtype(x.dtype, "real floating") else x,
    "floor_divide": _integer_division("floor_divide"),
    "remainder": _integer_division("remainder"),
}
