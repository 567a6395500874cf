"""Least and greatest entries of a table over ranges of its indices, many ranges at once.

A pyramid of aligned blocks, each level twice as wide as the last: a range is covered by at most two blocks per axis of
the narrowest level at least as wide. The answer covers at least the range asked, and exactly that range when it is one
aligned block or one index.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import min_max, to_numpy

__all__ = ["TableBounds"]

Array = np.ndarray[Any, np.dtype[Any]]
Level = tuple[int, ...]  # per axis, log2 of the block's width

BASE_LEVEL = 4  # blocks up to 2⁴ wide come from the table itself, wider ones from those: one pass over large tables


class TableBounds:
    """The pyramid over one array, NumPy's or a framework's; levels are made when first asked for."""

    def __init__(self, array: Any) -> None:
        self.array, self.values = array, to_numpy(array)
        self.levels: dict[Level, tuple[Array, Array]] = {}

    def over(self, ranges: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """(least, greatest) as float64 for index ranges (low, high), ends included, one pair per axis.

        Ranges that leave the table are cut to it.
        """
        if 0 in self.values.shape:
            return np.float64(0), np.float64(0)  # never read where it matters
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
        """(least, greatest) of all entries."""
        return min_max(self.array)

    def _level(self, level: Level) -> tuple[Array, Array]:
        if not any(level):
            return self.values, self.values
        if level not in self.levels:
            base = tuple(min(w, BASE_LEVEL) for w in level)
            source, below = (
                ((self.values, self.values), (0,) * len(level)) if level == base else (self._level(base), base)
            )
            steps = [w - v for w, v in zip(level, below, strict=True)]
            self.levels[level] = (
                _reduce_blocks(source[0], steps, np.minimum),
                _reduce_blocks(source[1], steps, np.maximum),
            )
        return self.levels[level]


def _reduce_blocks(values: Array, steps: Sequence[int], reduce: Any) -> Array:
    """Each axis reduced in blocks of 2^step; the last block may be shorter."""
    for axis, step in enumerate(steps):
        if step:
            values = reduce.reduceat(values, np.arange(0, values.shape[axis], 1 << step), axis=axis)
    return values
