"""Translation of NumPy and torch function calls on formulas into operators, by function name."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from ..arrays.operations import is_compiling
from ..errors import FormulaError
from .composed_functions import COMPOSED
from .expression import Expression, apply
from .operators import OPERATOR_ALIASES, OPERATORS
from .printing import format_as_code
from .tensor_casts import CASTS

IS_READING = ContextVar("IS_READING", default=False)  # True while a mask or score function is called
FUNCTIONS: dict[str, Callable[..., Expression]] = {**COMPOSED, **CASTS}
METHODS = {*OPERATORS, *OPERATOR_ALIASES, *FUNCTIONS}
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
        f"{cure} for the statistic"
        if cure
        else "write the function with these operators, or put its values into a table",
    )


def _suggest_statistic(name: str, formula: Any) -> str:
    """Return the statistic that a reduction of a formula over an axis means, else ""."""
    return f"see=sightline.{REDUCTIONS[name].format(format_as_code(formula))}" if name in REDUCTIONS else ""
