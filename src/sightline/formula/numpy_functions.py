"""Translation of NumPy and torch function calls on formulas into operators, by function name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import FormulaError
from .expression import Expression, apply, as_expression
from .operators import OPERATOR_ALIASES, OPERATORS

__all__ = ["power", "translate_call"]


def power(base: Any, exponent: Any) -> Expression:
    """Return base ** exponent. Whole exponents from 1 to 8 become products, so that whole numbers stay whole."""
    if isinstance(exponent, int) and not isinstance(exponent, bool) and 1 <= exponent <= 8:
        result = first = as_expression(base)
        for _ in range(exponent - 1):
            result = apply("multiply", result, first)
        return result
    return apply("power", base, exponent)


def translate_call(name: str, inputs: Sequence[Any], kwargs: dict[str, Any], library: str) -> Expression:
    """Return the formula that `numpy.name(...)` or `torch.name(...)` means."""
    name = OPERATOR_ALIASES.get(name, name)
    if name == "sigmoid" and len(inputs) == 1:
        return 1 / (1 + apply("exp", apply("negative", inputs[0])))
    if name == "clip":
        return _clip(*inputs, **kwargs)
    if name == "power" and not kwargs and len(inputs) == 2:
        return power(*inputs)
    if name == "square" and not kwargs and len(inputs) == 1:
        return power(inputs[0], 2)
    if name not in OPERATORS or kwargs or len(inputs) != OPERATORS[name].arity:
        known = f" with {len(inputs)} arguments" if name in OPERATORS else ""
        raise _unsupported(f"{library}.{name}{known}" + (f" and {', '.join(sorted(kwargs))}=" if kwargs else ""))
    return apply(name, *inputs)


def _clip(value: Any, low: Any = None, high: Any = None, **names: Any) -> Expression:
    low = names.pop("min", names.pop("a_min", low))
    high = names.pop("max", names.pop("a_max", high))
    if names:
        raise _unsupported(f"clip with {sorted(names)}")
    result = as_expression(value)
    if low is not None:
        result = apply("maximum", result, low)
    return result if high is None else apply("minimum", result, high)


def _unsupported(call: str) -> FormulaError:
    """Return the error for a function that the formula language does not have."""
    names = sorted({*OPERATORS, "clip", "sigmoid", "square"})
    return FormulaError(
        f"{call} of a formula",
        f"+ - * / // % ** abs, comparisons, & | ^ ~, and {', '.join(names)}",
        "write the function with these operators, or put its values into a table",
    )
