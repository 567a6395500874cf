"""The first maximum or minimum: the largest or smallest number, and the first position that has it.

NaN counts as larger, or smaller, than every number. A position of −1 stands for no pair.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operations import dtype_name, namespace


class Extremum(NamedTuple):
    """A largest or smallest number (`value`), and the position j or i of the first pair that has it (`where`)."""

    value: Any
    where: Any

    @property
    def score(self) -> Any:
        """The number, for `max_score`."""
        return self.value


def find_extremum(how: str, values: Any, positions: Any, axis: int) -> Extremum:
    """Return the first "max" or "min" along an axis with at least one entry, and its position.

    `positions` broadcasts to `values`. An entry with the position −1 is found only if all entries have this position.
    """
    xp = namespace(values)
    ordered, positions = values if how == "max" else -values, xp.broadcast_to(positions, values.shape)
    least = float(np.finfo(dtype_name(values)).min)  # so that −∞ with a position is above every entry without one
    ordered = xp.where(positions < 0, -math.inf, xp.where(ordered < least, least, ordered))
    first = xp.argmax(ordered, axis=axis, keepdims=True)
    return Extremum(*[xp.squeeze(xp.take_along_axis(x, first, axis=axis), axis=axis) for x in (values, positions)])


def join_extrema(how: str, one: Any, other: Any) -> Extremum:
    """Return the extremum of two (values, positions). Of equal values, the one with the smaller position is first."""
    (value, where), (other_value, other_where) = one, other
    xp = namespace(value)
    is_beyond = other_value > value if how == "max" else other_value < value
    is_beyond = is_beyond | (xp.isnan(other_value) & ~xp.isnan(value))
    is_equal = (other_value == value) | (xp.isnan(other_value) & xp.isnan(value))
    is_new = (other_where >= 0) & ((where < 0) | is_beyond | (is_equal & (other_where < where)))
    return Extremum(xp.where(is_new, other_value, value), xp.where(is_new, other_where, where))
