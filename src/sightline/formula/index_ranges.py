"""What bounds prove of a formula: the size of its whole numbers, and the indices that may leave their tables."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .bounds import intervals
from .expression import Expression, Lookup, from_text, walk
from .tensor_cache import Memory
from .tile_ranges import box_of

__all__ = ["Range", "range_of"]

Extent = tuple[int, int, int, int]
Range = tuple[float, tuple[tuple[int, int], ...]]

_RANGES = Memory(4096)


def range_of(formula: Expression | None, extent: Extent) -> Range:
    """The largest whole number the formula meets, and the table indices that may leave their table at hidden pairs.

    An index is (place of the lookup in `walk`, axis). Done once for formulas without tables.
    """
    if formula is None:
        return 0.0, ()
    if not formula.tables:
        return _kept(formula.text, extent)
    arrays = [table.array for table in formula.tables]
    return _RANGES.get((formula.text, extent), arrays, lambda: _measured(formula, extent))


@lru_cache(4096)
def _kept(text: str, extent: Extent) -> Range:
    return _measured(from_text(text, ()), extent)


def _measured(formula: Expression, extent: Extent) -> Range:
    largest, loose = 0.0, set()
    bounds = intervals(formula, box_of(extent))
    for place, node in enumerate(walk(formula)):
        if node.kind == "int":
            largest = max(largest, *(float(np.max(np.abs(end))) for end in bounds[id(node)]))
        if isinstance(node, Lookup):
            for axis, index in enumerate(node.arguments):
                low, high = bounds[id(index)]
                if np.min(low) < 0 or np.max(high) >= node.table.shape[axis]:
                    loose.add((place, axis))
    return largest, tuple(sorted(loose))
