"""Which positions the rows of a cache hold after `KVCache.keep` has evicted some keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ParameterError, ShapeError
from ..formula.expression import SYMBOLS, Expression, apply, where
from ..formula.tables import Table
from .argument_checks import to_integers

b, h, j = (SYMBOLS[name] for name in "bhj")
CURE = "cache.keep(numpy.sort(chosen)), where `chosen` are positions of cache.key_positions"


@dataclass(frozen=True)
class KeptRows:
    """The positions that the rows of a cache hold after `KVCache.keep`, also the rows that were appended later.

    Attributes
    ----------
    positions : (B, G, R) int64
        The position that each kept row holds, ascending; −1 behind the last row of a head.
    rows : (B,) int64
        The number of kept rows of each sequence, counted in the head that keeps the most keys.
    evicted : (B,) int64
        A row k of sequence b that was appended later holds the position k + evicted[b].
    """

    positions: Any
    rows: Any
    evicted: Any
    _formulas: dict[int, tuple[Expression, Expression | None]] = field(default_factory=dict, compare=False)

    @property
    def is_uniform(self) -> bool:
        """True if all heads of all sequences have equally many rows, so that every row holds a position."""
        return bool((self.positions >= 0).all()) and self.shift is not None

    @property
    def shift(self) -> int | None:
        """The number in `evicted` if it is the same for all sequences; None otherwise, and without sequences."""
        numbers = set(self.evicted.tolist())
        return numbers.pop() if len(numbers) == 1 else None

    def of_rows(self, count: int, lengths: Any) -> Any:
        """Return the positions that the first `count` rows hold, (B, G, count); −1 at or beyond a sequence's length."""
        rows = np.arange(count)
        found = np.broadcast_to(rows + self.evicted[:, None, None], (*self.positions.shape[:2], count)).copy()
        kept = min(count, self.positions.shape[2])
        is_kept = rows[:kept] < self.rows[:, None, None]
        found[:, :, :kept] = np.where(is_kept, self.positions[:, :, :kept], found[:, :, :kept])
        return np.where(found < lengths[:, None, None], found, -1)

    def truncated(self, lengths: Any) -> KeptRows:
        """Return the rows of a cache whose sequences were shortened to these lengths."""
        positions = np.where(self.positions < lengths[:, None, None], self.positions, -1)
        has_all = lengths - self.evicted >= self.rows
        rows = np.where(has_all, self.rows, _count(positions))
        evicted = np.where(has_all, self.evicted, lengths - rows)
        return KeptRows(positions[:, :, : int(rows.max(initial=0))], rows, evicted)

    def reordered(self, order: Any) -> KeptRows:
        """Return the rows with sequence order[b] in place of sequence b."""
        return KeptRows(self.positions[order], self.rows[order], self.evicted[order])

    def formulas(self, group: int) -> tuple[Expression, Expression | None]:
        """Return two formulas of row j: the position that it holds, and whether it holds one (None if every row does).

        `group` is the number of query heads that share a key head.
        """
        if group not in self._formulas:
            self._formulas[group] = self._make_formulas(group)
        return self._formulas[group]

    def _make_formulas(self, group: int) -> tuple[Expression, Expression | None]:
        positions = self.positions
        if (positions == positions[:, :1]).all():
            positions = positions[:, :1]
        if (positions == positions[:1]).all() and self.shift is not None and (self.rows == self.rows[0]).all():
            positions = positions[:1]
        entry = 0 if len(positions) == 1 else b
        head = 0 if positions.shape[1] == 1 else h // group
        rows, evicted = (x[0] if len(positions) == 1 else Table(x)[b] for x in (self.rows.tolist(), self.evicted))
        row = apply("minimum", j, max(positions.shape[2] - 1, 0))
        later = j + (int(evicted) if len(positions) == 1 else evicted)
        if not positions.size:
            return later, None
        counts = (positions >= 0).sum(-1)
        found = where(j < rows, Table(np.maximum(positions, 0))[entry, head, row], later)
        is_held = None if (counts == positions.shape[2]).all() else (j >= rows) | (j < Table(counts)[entry, head])
        return found, is_held


def all_rows(batch: int, heads: int) -> KeptRows:
    """Return the rows of a cache that has evicted nothing: row k holds position k."""
    none = np.zeros(batch, np.int64)
    return KeptRows(np.zeros((batch, heads, 0), np.int64), none, none)


def find_rows(indices: Any, held: Any) -> tuple[Any, Any]:
    """Return the rows that hold the positions `indices`, and the positions, both (B, G, c). Raise as `KVCache.keep`.

    Parameters
    ----------
    indices : (B or 1, G or 1, c) integers, the argument of `KVCache.keep`; −1 stands for no position
    held : (B, G, m) int64, the position that each row holds, −1 for a row that holds none
    """
    B, G, _ = held.shape
    positions = to_integers(indices)
    if positions is None or positions.ndim != 3 or positions.shape[0] not in (1, B) or positions.shape[1] not in (1, G):
        raise ShapeError(
            f"keep({indices!r})",
            f"whole numbers of shape ({B} or 1, {G} or 1, count)",
            "keep(indices[None, None]) for one list of positions",
        )
    positions = np.broadcast_to(positions, (B, G, positions.shape[2]))
    is_real = positions >= 0
    ascends = (positions[..., 1:] > positions[..., :-1]) | ~is_real[..., 1:]
    if (positions < -1).any() or not ascends.all() or (is_real[..., 1:] & ~is_real[..., :-1]).any():
        raise ParameterError("keep of positions that do not ascend", "ascending positions, and −1 at the end", CURE)
    # one search in all heads: a head's positions are raised above those of the heads before
    top = int(max(held.max(initial=0), positions.max(initial=0))) + 2
    lift = np.arange(B * G).reshape(B, G, 1) * top
    order = np.argsort(held, axis=-1, kind="stable")
    ordered = np.take_along_axis(held, order, -1)
    places = np.searchsorted((ordered + lift).ravel(), (positions + lift).ravel()).reshape(positions.shape)
    places = np.clip(places - np.arange(B * G).reshape(B, G, 1) * held.shape[2], 0, max(held.shape[2] - 1, 0))
    rows = np.take_along_axis(order, places, -1) if held.shape[2] else places
    found = np.take_along_axis(held, rows, -1) if held.shape[2] else np.full_like(positions, -2)
    if ((found != positions) & is_real).any():
        wrong = positions[(found != positions) & is_real]
        raise ParameterError(
            f"keep of position {wrong[0]}, which the cache does not hold for a head", "positions that are stored", CURE
        )
    return np.where(is_real, rows, 0), positions


def keep_rows(positions: Any, lengths: Any) -> KeptRows:
    """Return the rows of a cache that keeps the positions (B, G, c) of sequences of these lengths; −1 keeps nothing."""
    rows = _count(positions)
    return KeptRows(np.ascontiguousarray(positions[:, :, : int(rows.max(initial=0))]), rows, lengths - rows)


def _count(positions: Any) -> Any:
    return (positions >= 0).sum(-1).max(1, initial=0)
