"""The least and the greatest entry of a table over many ranges of its indices at once.

The bounds form a pyramid of aligned blocks: a block of one level is twice as wide as a block of the level below. One or
two blocks per axis cover a range. They belong to the narrowest level whose blocks are at least as wide as the range.
These blocks may cover more than the range. They cover exactly the range if it is one aligned block or one index.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.operations import drop_repeats, framework, to_numpy
from ..caching import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
Level = tuple[int, ...]  # per axis, log2 of the block's width

BASE_LEVEL = 4  # blocks up to 2⁴ wide are reduced from the table, wider blocks from blocks that are 2⁴ wide


class TableBounds:
    """The pyramid of bounds of one array, of NumPy or of a framework. A level is computed when it is first needed."""

    def __init__(self, array: Any) -> None:
        self.array = drop_repeats(array)  # `over` clips the indices of an axis that is cut to length 1
        self.values = to_numpy(self.array)
        self.levels: dict[Level, tuple[Array, Array]] = {}

    def over(self, ranges: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return (least, greatest) as float64 for index ranges (low, high), one pair per axis, both ends included.

        Ranges that leave the table are clipped to the table.
        """
        if 0 in self.values.shape:
            return np.float64(0), np.float64(0)  # an empty table is read only at hidden pairs
        ends = np.broadcast_arrays(*(end for pair in ranges for end in pair))
        shape = ends[0].shape
        last_indices = [length - 1 for length in self.values.shape]
        flat = [np.clip(e.ravel(), 0, last_indices[k // 2]).astype(np.int64) for k, e in enumerate(ends)]
        first, last = flat[0::2], flat[1::2]
        if all((a == 0).all() and (z == limit).all() for a, z, limit in zip(first, last, last_indices, strict=True)):
            return np.full(shape, self.over_all[0]), np.full(shape, self.over_all[1])
        width = [np.ceil(np.log2(np.maximum(z - a, 0) + 1)).astype(np.int64) for a, z in zip(first, last, strict=True)]
        code = sum(w << (6 * k) for k, w in enumerate(width))
        least, greatest = np.empty(code.shape), np.empty(code.shape)
        for level_code in np.unique(code):
            selected = np.flatnonzero(code == level_code)
            level = tuple(int(level_code) >> (6 * k) & 63 for k in range(len(first)))
            low, high = self._level(level)
            sides = [
                (a[selected] >> w, z[selected] >> w) if w else (a[selected],)
                for a, z, w in zip(first, last, level, strict=True)
            ]
            corners = list(itertools.product(*sides))
            least[selected] = np.minimum.reduce([low[corner] for corner in corners])
            greatest[selected] = np.maximum.reduce([high[corner] for corner in corners])
        return least.reshape(shape), greatest.reshape(shape)

    @cached_property
    def over_all(self) -> tuple[float, float]:
        """The least and the greatest entry of the whole table."""
        return framework(self.array).min_max(self.array)

    def _level(self, level: Level) -> tuple[Array, Array]:
        if not any(level):
            return self.values, self.values
        if level not in self.levels:
            base = tuple(min(w, BASE_LEVEL) for w in level)
            below = (0,) * len(level) if level == base else base
            low, high = self._level(below)
            steps = [w - v for w, v in zip(level, below, strict=True)]
            self.levels[level] = _reduce_blocks(low, steps, np.minimum), _reduce_blocks(high, steps, np.maximum)
        return self.levels[level]


class UnknownBounds:
    """The bounds of a table whose entries are not read: the same limits for every range of indices."""

    def __init__(self, least: float, greatest: float) -> None:
        self.over_all = least, greatest

    def over(self, ranges: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return (least, greatest) as `TableBounds.over` does."""
        shape = np.broadcast_shapes(*[np.shape(end) for pair in ranges for end in pair])
        return np.full(shape, self.over_all[0]), np.full(shape, self.over_all[1])


def _reduce_blocks(values: Array, steps: Sequence[int], reduce: Any) -> Array:
    """Return the minimum or maximum (`reduce`) of each block of 2^step entries per axis; the last may be shorter."""
    for axis, step in enumerate(steps):
        if step:
            values = reduce.reduceat(values, np.arange(0, values.shape[axis], 1 << step), axis=axis)
    return values
