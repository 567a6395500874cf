"""Facts that interval arithmetic proves: a bound of a formula's whole numbers, and which indices may leave a table."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .expression import Expression, Lookup, walk
from .interval_arithmetic import compute_intervals
from .tables import bounds_key
from .tensor_cache import TensorCache
from .tile_ranges import make_box

Extent = tuple[int, int, int, int]
IndexRanges = tuple[float, tuple[tuple[int, int], ...]]

_RANGES = TensorCache(4096)


def find_index_ranges(formula: Expression | None, extent: Extent) -> IndexRanges:
    """Return (the largest size of a whole number in the formula, the table indices that may leave their table).

    A table index is given as (position of the lookup in `walk`, axis). Only hidden pairs may leave a table, because
    `check_formulas` has passed. The result is (0.0, ()) if `formula` is None. The result is cached.
    """
    if formula is None:
        return 0.0, ()
    if not formula.tables:
        return _find_cached(formula, extent)
    tables_key, arrays = bounds_key(formula.tables)
    return _RANGES.get((formula.text, tables_key, extent), arrays, lambda: _find(formula, extent))


def _find(formula: Expression, extent: Extent) -> IndexRanges:
    largest, out_of_range = 0.0, set()
    bounds = compute_intervals(formula, make_box(extent))
    for position, node in enumerate(walk(formula)):
        if node.kind == "int":
            largest = max(largest, *(float(np.max(np.abs(end))) for end in bounds[id(node)]))
        if isinstance(node, Lookup):
            for axis, index in enumerate(node.arguments):
                low, high = bounds[id(index)]
                if np.min(low) < 0 or np.max(high) >= node.table.shape[axis]:
                    out_of_range.add((position, axis))
    return largest, tuple(sorted(out_of_range))


_find_cached = lru_cache(4096)(_find)
