"""Conversion of Python functions to formulas, so that a FlexAttention mask_mod or score_mod works unchanged.

The function is called once with the symbols. It may index arrays of its surrounding scope, as in `document_id[q_idx]`.
During the call, these arrays are replaced by tables.
"""

from __future__ import annotations

import types
from typing import Any

from ..arrays import framework
from ..errors import FormulaError, SightlineError
from .expression import SYMBOLS, Expression, as_expression
from .tables import Table

__all__ = ["to_formula"]

MAX_FUNCTION_DEPTH = 4  # arrays become tables in the function, the functions that it calls, ...: this many levels


def to_formula(value: Any, argument: str, symbols: str) -> Expression:
    """Return `value`, which is an expression, a number or a function, as an expression.

    `argument` is the name of the value in error messages. `symbols` names the arguments of the function.

    Raises
    ------
    FormulaError
        The function takes other arguments, does not return a formula, or uses the symbols in a way that has no meaning
        for formulas.
    """
    if isinstance(value, Expression) or not callable(value):
        return as_expression(value)
    names = symbols.split()
    if getattr(value, "__module__", "").startswith("sightline."):
        name = f"sightline.{value.__name__}"
        raise FormulaError(
            f"{argument} is the function {name} itself", "the formula that it returns", f"call it: {name}(...)"
        )
    function = _wrap_arrays(value)
    try:
        result = function(*[SYMBOLS[name] for name in names])
    except SightlineError:
        raise
    except (TypeError, AttributeError, IndexError) as error:
        listed = ", ".join(names)
        raise FormulaError(
            f"{argument}={getattr(value, '__name__', value)!r} failed when called with ({listed}): {error}",
            f"a function f({listed}) of formulas",
            "build the formula from the symbols: from sightline import b, h, i, j, s, table, where",
        ) from error
    return as_expression(result)


def _wrap_arrays(function: Any, depth: int = MAX_FUNCTION_DEPTH) -> Any:
    """Return the function with tables in place of the arrays in its closure, globals and defaults.

    Functions that it calls are converted too, down to `depth` levels. Everything else is left unchanged.
    """
    if not isinstance(function, types.FunctionType) or depth == 0:
        return function
    closure, scope = function.__closure__ or (), function.__globals__
    if not all(map(_is_filled, closure)):
        return function
    cells = tuple(types.CellType(_as_table(cell.cell_contents, depth)) for cell in closure)
    changed = {name: _as_table(scope[name], depth) for name in _global_names(function.__code__) if name in scope}
    defaults = tuple(_as_table(value, depth) for value in function.__defaults__ or ()) or None
    copy = types.FunctionType(function.__code__, {**scope, **changed}, function.__name__, defaults, cells)
    copy.__kwdefaults__ = {k: _as_table(v, depth) for k, v in (function.__kwdefaults__ or {}).items()}
    return copy


def _as_table(value: Any, depth: int) -> Any:
    if framework(value) in ("numpy", "torch", "jax") and getattr(value, "ndim", 0) > 0 and hasattr(value, "dtype"):
        return Table(value)
    if isinstance(value, tuple | list) and value and all(isinstance(item, types.FunctionType) for item in value):
        return type(value)(_wrap_arrays(item, depth - 1) for item in value)
    if isinstance(value, types.FunctionType) and not value.__module__.startswith(
        ("numpy", "torch", "jax", "sightline")
    ):
        return _wrap_arrays(value, depth - 1)
    return value


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of the globals that a function and its nested functions read."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_global_names(c) for c in inner))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  reading an empty cell raises ValueError
    except ValueError:
        return False
    return True
