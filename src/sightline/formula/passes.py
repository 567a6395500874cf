"""The functions that the methods of formulas call, and that the module of formulas cannot import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..view.picture import Picture
    from .expression import Expression


class Passes:
    """Functions of modules that import `expression`, for the methods of `Expression` and of its base classes.

    `formula/__init__.py` sets every attribute except `picture`, which `sightline/__init__.py` sets.
    """

    translate_call: Callable[..., Expression]
    tensor_attribute: Callable[[Any, str], Any]
    apply: Callable[..., Expression]
    bitwise: dict[str, Callable[[Any, Any], Expression]]
    check_formulas: Callable[..., None]
    count_pairs: Callable[[Any, tuple[int, int, int, int]], int]
    evaluate_dense: Callable[..., Any]
    learned_number: Callable[[Any], Expression]
    format_formula: Callable[[Expression], str]
    picture: Callable[..., Picture]
    power: Callable[[Any, Any], Expression]


PASSES = Passes()
