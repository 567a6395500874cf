"""Functions as formulas: called once with the symbols, so a FlexAttention mask_mod or score_mod works as it stands.

Such functions read arrays of the surrounding scope (`document_id[q_idx]`); in the call those stand for tables.
"""

from __future__ import annotations

import types
from typing import Any

from ..arrays import framework
from ..errors import FormulaError, SightlineError
from .expression import SYMBOLS, Expression, as_expression
from .tables import Table

__all__ = ["to_formula"]

MAX_FUNCTION_DEPTH = 4  # functions inside functions whose arrays are made tables


def to_formula(value: Any, argument: str, symbols: str) -> Expression:
    """An expression, number or function as an expression.

    Raises
    ------
    FormulaError
        The function takes other arguments, returns no formula, or does to the symbols what formulas cannot mean.
    """
    if isinstance(value, Expression) or not callable(value):
        return as_expression(value)
    if getattr(value, "__module__", "").startswith("sightline."):
        name = f"sightline.{value.__name__}"
        raise FormulaError(
            f"{argument} is the function {name} itself", "the formula it writes", f"call it: {name}(...)"
        )
    arguments = [SYMBOLS[name] for name in symbols.split()]
    function = wrap_arrays(value)
    try:
        result = function(*arguments)
    except SightlineError:
        raise
    except (TypeError, AttributeError, IndexError) as error:
        listed = ", ".join(symbols.split())
        raise FormulaError(
            f"{argument}={getattr(value, '__name__', value)!r} failed when called with ({listed}): {error}",
            f"a function f({listed}) of formulas",
            "build the formula from the symbols: from sightline import b, h, i, j, s, table, where",
        ) from error
    return as_expression(result)


def wrap_arrays(function: Any, depth: int = MAX_FUNCTION_DEPTH) -> Any:
    """The function with arrays among its closure, globals and defaults replaced by tables; others are left alone."""
    if not isinstance(function, types.FunctionType) or depth == 0:
        return function
    used = {
        name: function.__globals__[name] for name in _global_names(function.__code__) if name in function.__globals__
    }
    cells = tuple(
        types.CellType(_as_table(cell.cell_contents, depth)) for cell in function.__closure__ or () if _is_filled(cell)
    )
    if len(cells) != len(function.__closure__ or ()):
        return function
    changed = {name: _as_table(value, depth) for name, value in used.items()}
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **changed}, function.__name__, function.__defaults__, cells
    )
    copy.__defaults__ = tuple(_as_table(value, depth) for value in function.__defaults__ or ()) or None
    copy.__kwdefaults__ = {k: _as_table(v, depth) for k, v in (function.__kwdefaults__ or {}).items()}
    return copy


def _as_table(value: Any, depth: int) -> Any:
    if framework(value) in ("numpy", "torch") and getattr(value, "ndim", 0) > 0 and hasattr(value, "dtype"):
        return Table(value)
    if isinstance(value, tuple | list) and value and all(isinstance(item, types.FunctionType) for item in value):
        return type(value)(wrap_arrays(item, depth - 1) for item in value)
    if isinstance(value, types.FunctionType) and not value.__module__.startswith(("numpy", "torch", "sightline")):
        return wrap_arrays(value, depth - 1)
    return value


def _global_names(code: types.CodeType) -> set[str]:
    """Global names read by a function and by the functions written inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_global_names(c) for c in inner))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  an empty cell raises
    except ValueError:
        return False
    return True
