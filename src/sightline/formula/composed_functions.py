"""Functions of NumPy and torch that are composed of the operators. Their parameters have torch's names.

Each function takes formulas and numbers, and returns a formula. For NaN and ∞ the results are those of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

from ..arrays.operations import is_traced, to_numpy
from ..errors import FormulaError
from .expression import Constant, Expression, apply, as_expression, where
from .tables import Table

TRUE, FALSE = as_expression(True), as_expression(False)
MAX_SET_SIZE = 64  # `isin` compares with every member of the set


def as_condition(value: Any) -> Expression:
    """Return a condition unchanged, and a number x as x ≠ 0."""
    expression = as_expression(value)
    if isinstance(expression, Constant):
        return as_expression(bool(expression.value))
    return expression if expression.kind == "bool" else apply("not_equal", expression, 0)


def power(input: Any, exponent: Any) -> Expression:
    """Return input ** exponent. Whole exponents from 1 to 8 become products, so that whole numbers stay whole."""
    if isinstance(exponent, int) and not isinstance(exponent, bool) and 1 <= exponent <= 8:
        base = as_expression(input)
        return reduce(lambda product, factor: apply("multiply", product, factor), [base] * exponent)
    return apply("power", input, exponent)


def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Expression:
    """Return the condition that `elements` is one of the entries of `test_elements`, an array or a list of numbers."""
    if is_traced(test_elements):
        members = Table(test_elements.reshape(-1))
        entries = [members[k] for k in range(members.shape[0])]
    else:
        entries = sorted(set(to_numpy(test_elements).ravel().tolist()))
    if len(entries) > MAX_SET_SIZE:
        raise FormulaError(
            f"isin of a formula and {len(entries)} numbers",
            f"at most {MAX_SET_SIZE} numbers",
            "a table of True and False: member[kv_idx], where member = torch.isin(torch.arange(m), numbers)",
        )
    equalities = [apply("equal", elements, entry) for entry in entries]
    member = reduce(lambda x, y: apply("logical_or", x, y), equalities) if equalities else as_expression(False)
    return apply("logical_not", member) if invert else member


# -- whole numbers ---------------------------------------------------------------------------------------------------


def bitwise_and(input: Any, other: Any) -> Expression:
    """Return input & other of two conditions or two integers. True & x, which torch's `and_masks` computes, is x."""
    x, y = as_expression(input), as_expression(other)
    if x is TRUE or y is TRUE:
        return apply("logical_and", x, y).arguments[x is TRUE]
    return apply("bitwise_and" if x.kind == y.kind == "int" else "logical_and", x, y)


def bitwise_or(input: Any, other: Any) -> Expression:
    """Return input | other; x + y − (x & y) for integers. False | x, which torch's `or_masks` computes, is x."""
    x, y = as_expression(input), as_expression(other)
    if x is FALSE or y is FALSE:
        return apply("logical_or", x, y).arguments[x is FALSE]
    return x + y - apply("bitwise_and", x, y) if x.kind == y.kind == "int" else apply("logical_or", x, y)


def bitwise_xor(input: Any, other: Any) -> Expression:
    """Return input ^ other. For whole numbers, x ^ y = x + y − 2 (x & y)."""
    x, y = as_expression(input), as_expression(other)
    return x + y - 2 * apply("bitwise_and", x, y) if x.kind == y.kind == "int" else apply("logical_xor", x, y)


def bitwise_not(input: Any) -> Expression:
    """Return the negation of a condition, and −input − 1 for a whole number."""
    x = as_expression(input)
    return -x - 1 if x.kind == "int" else apply("logical_not", x)


def shift_left(input: Any, other: Any) -> Expression:
    """Return input · 2^other, for a whole number `other` that is not a formula."""
    return apply("multiply", _check_whole(input, "<<"), 2 ** _read_shift(other))


def shift_right(input: Any, other: Any) -> Expression:
    """Return ⌊input / 2^other⌋, for a whole number `other` that is not a formula."""
    return apply("floor_divide", _check_whole(input, ">>"), 2 ** _read_shift(other))


def _check_whole(value: Any, sign: str) -> Expression:
    expression = as_expression(value)
    if expression.kind != "int":
        raise FormulaError(
            f"{sign} of {expression}, which is a {expression.kind}", "whole numbers", f"cast it: x.int() {sign} 2"
        )
    return expression


def _read_shift(value: Any) -> int:
    number = getattr(as_expression(value), "value", None)
    if type(number) is int and 0 <= number < 53:
        return number
    raise FormulaError(
        f"a shift by {value} bits", "whole numbers from 0 to 52", "i * powers[h] or i // powers[h] with a table powers"
    )


def truncated_quotient(x: Any, y: Any) -> Expression:
    """Return x / y, rounded toward 0."""
    x, y = as_expression(x), as_expression(y)
    if "float" in (x.kind, y.kind):
        return truncate(apply("divide", x, y))
    quotient = apply("floor_divide", abs(x), abs(y))
    return where((x < 0) ^ (y < 0), -quotient, quotient)


def divide(input: Any, other: Any, *, rounding_mode: str | None = None) -> Expression:
    """Return input / other, rounded toward 0 ("trunc"), rounded down ("floor"), or not rounded (None)."""
    if rounding_mode not in (None, "trunc", "floor"):
        raise FormulaError(f"rounding_mode={rounding_mode!r}", 'None, "trunc" or "floor"', 'rounding_mode="floor"')
    if rounding_mode == "trunc":
        return truncated_quotient(input, other)
    return apply("divide" if rounding_mode is None else "floor_divide", input, other)


def fmod(input: Any, other: Any) -> Expression:
    """Return the remainder with the sign of `input`, as in C."""
    quotient = truncated_quotient(input, other)
    return where(quotient == 0, input, apply("subtract", input, apply("multiply", quotient, other)))


# -- rounding and signs ----------------------------------------------------------------------------------------------


def truncate(input: Any) -> Expression:
    """Return the input rounded toward 0."""
    x = as_expression(input)
    return where(x < 0, apply("ceil", x), apply("floor", x))


def round_half_even(input: Any) -> Expression:
    """Return the nearest whole number; of two equally near ones, the even one."""
    x = as_expression(input)
    if x.kind != "float":
        return apply("floor", x)
    low = apply("floor", x)
    rest = x - low
    nearest_even = where(apply("remainder", low, 2) == 0, low, low + 1)
    return where(rest < 0.5, low, where(rest > 0.5, low + 1, nearest_even))


def sign(input: Any) -> Expression:
    """Return 1, 0 or −1, the sign of the input."""
    x = as_expression(input)
    one = 1.0 if x.kind == "float" else 1
    return where(x > 0, one, where(x < 0, -one, 0 * one))


def clip(input: Any, low: Any = None, high: Any = None, **names: Any) -> Expression:
    """Return min(max(input, low), high). A limit may be None. `names` has limits by their names in torch or NumPy."""
    low = names.pop("min", names.pop("a_min", low))
    high = names.pop("max", names.pop("a_max", high))
    if names:
        raise FormulaError(
            f"clip with {', '.join(sorted(names))}=", "the arguments of clip(x, low, high)", "np.clip(x, 0, 5)"
        )
    result = as_expression(input)
    if low is not None:
        result = apply("maximum", result, low)
    return result if high is None else apply("minimum", result, high)


# -- elementary functions --------------------------------------------------------------------------------------------


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Expression:
    """Return ln(1 + e^(βx)) / β, and x itself where βx > threshold."""
    x = as_expression(input)
    return where(x * beta > threshold, x, apply("log1p", apply("exp", x * beta)) / beta)


def sigmoid(input: Any) -> Expression:
    """Return 1 / (1 + e^−x), computed as e^x / (1 + e^x) where x < 0, so that no value and no derivative overflows."""
    x = as_expression(input)
    e = apply("exp", x)
    return where(x < 0, e / (1 + e), 1 / (1 + apply("exp", -x)))


def log_sigmoid(input: Any) -> Expression:
    """Return ln(1 / (1 + e^−x)), computed as x − ln(1 + e^x) where x < 0."""
    x = as_expression(input)
    return where(x < 0, x - apply("log1p", apply("exp", x)), -apply("log1p", apply("exp", -x)))


def leaky_relu(input: Any, negative_slope: float = 0.01) -> Expression:
    """Return x where x > 0, and x · negative_slope elsewhere."""
    x = as_expression(input)
    return where(x > 0, x, x * negative_slope)


def gelu(input: Any, approximate: str = "none") -> Expression:
    """Return x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), the approximation "tanh" of GELU."""
    if approximate != "tanh":
        raise FormulaError(
            "gelu of a formula by the error function erf, which formulas lack",
            'gelu with approximate="tanh"',
            'torch.nn.functional.gelu(x, approximate="tanh")',
        )
    x = as_expression(input)
    return 0.5 * x * (1 + apply("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * power(x, 3))))


def _join_conditions(operator: str) -> Callable[[Any, Any], Expression]:
    return lambda input, other: apply(operator, as_condition(input), as_condition(other))


def _add_multiple(operator: str) -> Callable[..., Expression]:
    def function(input: Any, other: Any, *, alpha: Any = 1) -> Expression:
        return apply(operator, input, other if alpha == 1 else apply("multiply", other, alpha))

    return function


def _pairwise(operator: str) -> Callable[[Any, Any], Expression]:
    """Return the function torch.max or torch.min of two formulas. A number as `other` raises FormulaError."""

    def function(input: Any, other: Any) -> Expression:
        if isinstance(other, int | float):
            raise FormulaError(
                f"torch.{operator[:3]}(formula, {other}), whose second argument is an axis",
                f"torch.{operator} of formulas and numbers",
                f"torch.clamp(formula, {'min' if operator == 'maximum' else 'max'}={other})",
            )
        return apply(operator, input, other)

    return function


COMPOSED: dict[str, Callable[..., Any]] = {
    "add": _add_multiple("add"),
    "subtract": _add_multiple("subtract"),
    "reverse_subtract": lambda input, other, *, alpha=1: _add_multiple("subtract")(other, input, alpha=alpha),
    "divide": divide,
    "power": power,
    "logical_and": _join_conditions("logical_and"),
    "logical_or": _join_conditions("logical_or"),
    "logical_xor": _join_conditions("logical_xor"),
    "logical_not": lambda input: apply("logical_not", as_condition(input)),
    "bitwise_and": bitwise_and,
    "bitwise_or": bitwise_or,
    "bitwise_xor": bitwise_xor,
    "bitwise_not": bitwise_not,
    "bitwise_left_shift": shift_left,
    "bitwise_right_shift": shift_right,
    "isin": isin,
    "masked_fill": lambda input, mask, value: where(mask, value, input),
    "clip": clip,
    "clamp_min": lambda input, min: apply("maximum", input, min),
    "clamp_max": lambda input, max: apply("minimum", input, max),
    "max": _pairwise("maximum"),
    "min": _pairwise("minimum"),
    "fmod": fmod,
    "trunc": truncate,
    "frac": lambda input: apply("subtract", input, truncate(input)),
    "round": round_half_even,
    "sign": sign,
    "isnan": lambda input: apply("not_equal", input, input),
    "isinf": lambda input: apply("equal", apply("absolute", input), math.inf),
    "isfinite": lambda input: apply("less", apply("absolute", input), math.inf),
    "square": lambda input: power(input, 2),
    "reciprocal": lambda input: apply("divide", 1.0, input),
    "rsqrt": lambda input: apply("divide", 1.0, apply("sqrt", input)),
    "expm1": lambda input: apply("tanh", apply("divide", input, 2)) * (apply("exp", input) + 1),
    "log10": lambda input: apply("log", input) / math.log(10),
    "tan": lambda input: apply("sin", input) / apply("cos", input),
    "sigmoid": sigmoid,
    "softplus": softplus,
    "log_sigmoid": log_sigmoid,
    "silu": lambda input: as_expression(input) * sigmoid(input),
    "relu": lambda input: apply("maximum", 0, input),  # at 0 the derivative is that of the first argument
    "leaky_relu": leaky_relu,
    "gelu": gelu,
}
