"""The conversion of transformers' mask functions into formulas.

A mask function `f(batch, head, query, key)` is written for tensors of indices. It may use tensor operations that
formulas do not have: `new_ones`, `.to(device)`, or the indexing of another tensor. `TracedFormula` implements these
operations for a formula.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import FormulaError
from ..formula.expression import Constant, Expression, as_expression
from ..formula.tables import Table

__all__ = ["trace_mask_function"]


class TracedFormula:
    """A formula that a mask function uses like a tensor of indices or conditions."""

    device = "cpu"  # mask functions move other tensors to this device

    def __init__(self, formula: Any) -> None:
        self.formula = as_expression(formula)

    def to(self, *_: Any, **__: Any) -> TracedFormula:
        """Return the formula unchanged: a formula has neither a device nor a dtype to convert."""
        return self

    def new_ones(self, shape: tuple[int, ...], **_: Any) -> TracedFormula:
        """Return the formula True; `shape` must be ()."""
        return _make_constant(shape, True)

    def new_zeros(self, shape: tuple[int, ...], **_: Any) -> TracedFormula:
        """Return the formula False; `shape` must be ()."""
        return _make_constant(shape, False)

    def __and__(self, other: Any) -> TracedFormula:
        return _combine(operator.and_, self, other, neutral=True)

    def __or__(self, other: Any) -> TracedFormula:
        return _combine(operator.or_, self, other, neutral=False)

    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        return bool(self.formula)  # raises FormulaError

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> TracedFormula:
        unwrapped = [_unwrap(value) for value in inputs]
        return TracedFormula(Expression.__torch_function__(function, types, unwrapped, kwargs))


def _operator(name: str) -> Callable[..., TracedFormula]:
    """Return the method that applies an operator of Python's `operator` module to formulas."""
    function = getattr(operator, name)
    return lambda self, *others: TracedFormula(function(self.formula, *map(_unwrap, others)))


def _reversed_operator(name: str) -> Callable[..., TracedFormula]:
    """Return the method for the same operator with exchanged operands."""
    function = getattr(operator, name)
    return lambda self, other: TracedFormula(function(_unwrap(other), self.formula))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "xor"):
    setattr(TracedFormula, f"__{_name}__", _operator(_name))
    setattr(TracedFormula, f"__r{_name}__", _reversed_operator(_name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(TracedFormula, f"__{_name}__", _operator(_name))


class _TableLookupMode(TorchFunctionMode):
    """Turns the indexing of a tensor by a formula into a table lookup; each tensor becomes one table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Table] = {}

    def __torch_function__(self, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            array, index = inputs
            entries = index if isinstance(index, tuple) else (index,)
            if any(isinstance(entry, TracedFormula) for entry in entries):
                table = self.tables.setdefault(id(array), Table(array))
                return TracedFormula(table[tuple(_unwrap(entry) for entry in entries)])
        return function(*inputs, **(kwargs or {}))


def trace_mask_function(function: Callable[..., Any], *indices: Expression) -> Expression | None:
    """Return the formula of a mask function for these indices; None if the function needs an unsupported operation."""
    try:
        with _TableLookupMode():
            result = function(*[TracedFormula(index) for index in indices])
    except (FormulaError, AttributeError, TypeError, NotImplementedError):
        return None
    return result.formula if isinstance(result, TracedFormula) and result.formula.kind == "bool" else None


def _unwrap(value: Any) -> Any:
    """Return a traced formula's formula, a 0-dimensional tensor's number, and any other value unchanged."""
    if isinstance(value, TracedFormula):
        return value.formula
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value


def _make_constant(shape: tuple[int, ...], value: bool) -> TracedFormula:
    if tuple(shape):
        raise TypeError("a formula's constant has one number")
    return TracedFormula(value)


def _combine(combine: Callable[..., Any], one: TracedFormula, other: Any, *, neutral: bool) -> TracedFormula:
    """Return the combination of two conditions; an operand that is the constant `neutral` is omitted."""
    operands = [one.formula, as_expression(_unwrap(other))]
    remaining = [formula for formula in operands if not (isinstance(formula, Constant) and formula.value is neutral)]
    return TracedFormula(combine(*remaining) if len(remaining) == 2 else (remaining or operands)[0])
