"""transformers' mask functions as formulas.

They are written for tensors of indices, `f(batch, head, query, key)`, and ask of them what formulas have no word for:
a constant made `new_ones` like another, a device, a table read by brackets. `Traced` answers these for a formula.
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

__all__ = ["traced"]


class Traced:
    """A formula where a mask function expects a tensor of indices or conditions."""

    device = "cpu"  # asked for only to move other masks to it

    def __init__(self, formula: Any) -> None:
        self.formula = as_expression(formula)

    def to(self, *_: Any, **__: Any) -> Traced:
        """Where it is and as it is: a formula has no device, and its kind is its own."""
        return self

    def new_ones(self, shape: tuple[int, ...], **_: Any) -> Traced:
        """True everywhere."""
        return _constant(shape, True)

    def new_zeros(self, shape: tuple[int, ...], **_: Any) -> Traced:
        """False everywhere."""
        return _constant(shape, False)

    def __and__(self, other: Any) -> Traced:
        return _joined(operator.and_, self, other, neutral=True)

    def __or__(self, other: Any) -> Traced:
        return _joined(operator.or_, self, other, neutral=False)

    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        return bool(self.formula)  # raises, as formulas do

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Traced:
        plain = [_plain(value) for value in inputs]
        return Traced(Expression.__torch_function__(function, types, plain, kwargs))


def _by(name: str) -> Callable[..., Traced]:
    """Python's operator of that name, on the formulas."""
    function = getattr(operator, name)
    return lambda self, *others: Traced(function(self.formula, *map(_plain, others)))


def _reversed(name: str) -> Callable[..., Traced]:
    function = getattr(operator, name)
    return lambda self, other: Traced(function(_plain(other), self.formula))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "xor"):
    setattr(Traced, f"__{_name}__", _by(_name))
    setattr(Traced, f"__r{_name}__", _reversed(_name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(Traced, f"__{_name}__", _by(_name))


class _Reading(TorchFunctionMode):
    """Brackets of a tensor around a formula read it as a table: one table, however often it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Table] = {}

    def __torch_function__(self, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            array, index = inputs
            places = index if isinstance(index, tuple) else (index,)
            if any(isinstance(place, Traced) for place in places):
                table = self.tables.setdefault(id(array), Table(array))
                return Traced(table[tuple(_plain(place) for place in places)])
        return function(*inputs, **(kwargs or {}))


def traced(function: Callable[..., Any], *indices: Expression) -> Expression | None:
    """The formula of a mask function at these indices; None where it does something formulas have no word for."""
    try:
        with _Reading():
            found = function(*[Traced(index) for index in indices])
    except (FormulaError, AttributeError, TypeError, NotImplementedError):
        return None
    return found.formula if isinstance(found, Traced) and found.formula.kind == "bool" else None


def _plain(value: Any) -> Any:
    """What a formula can take: formulas, and numbers that came as tensors."""
    if isinstance(value, Traced):
        return value.formula
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value


def _constant(shape: tuple[int, ...], value: bool) -> Traced:
    if tuple(shape):
        raise TypeError("a constant of several numbers is no formula")
    return Traced(value)


def _joined(join: Callable[..., Any], one: Traced, other: Any, *, neutral: bool) -> Traced:
    """Both conditions, without one that is always `neutral`."""
    pair = [one.formula, as_expression(_plain(other))]
    rest = [formula for formula in pair if not (isinstance(formula, Constant) and formula.value is neutral)]
    return Traced(join(*rest) if len(rest) == 2 else (rest or pair)[0])
