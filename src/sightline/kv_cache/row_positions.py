"""Which positions the rows of a cache hold after an eviction, for drafts, and after a fork."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..arrays.caching import cached_property
from ..errors import ParameterError, ShapeError
from ..formula.expression import SYMBOLS, Expression, apply, where
from ..formula.tables import Table
from .argument_checks import to_integers
from .query_positions import Rewriting

if TYPE_CHECKING:
    from .cache import KVCache

b, h, i, j, m, n = (SYMBOLS[name] for name in "bhijmn")
CURE = "cache.keep(numpy.sort(chosen)), where `chosen` are positions of cache.key_positions"


@dataclass(frozen=True)
class KeptRows:
    """The positions that the rows of a cache hold after `KVCache.keep`, also the rows that were appended later.

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
    _rewritings: dict[int, tuple[Rewriting, ...]] = field(default_factory=dict, compare=False)

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
        positions = np.broadcast_to(rows + self.evicted[:, None, None], (*self.positions.shape[:2], count)).copy()
        kept = min(count, self.positions.shape[2])
        is_kept = rows[:kept] < self.rows[:, None, None]
        positions[:, :, :kept] = np.where(is_kept, self.positions[:, :, :kept], positions[:, :, :kept])
        return np.where(positions < lengths[:, None, None], positions, -1)

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

    def rewritings(self, group: int) -> tuple[Rewriting, ...]:
        """Return what `WITHOUT_EVICTION` has, for a cache that keeps equally many keys in all sequences and heads."""
        if group not in self._rewritings:
            length = m + cast(int, self.shift)
            symbols = {"i": i + (length - n), "n": length, "m": length, "j": self.formulas(group)[0]}
            self._rewritings[group] = Rewriting(symbols), Rewriting(symbols, are_last=True), Rewriting(symbols)
        return self._rewritings[group]

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

    indices : (B or 1, G or 1, c) integers, the argument of `KVCache.keep`; −1 stands for no position
    held : (B, G, m) int64, the position that each row holds, −1 for a row that holds none
    """
    B, G, _ = held.shape
    positions = to_integers(indices)
    if positions is None or positions.ndim != 3 or positions.shape[0] not in (1, B) or positions.shape[1] not in (1, G):
        allowed = f"whole numbers of shape ({B} or 1, {G} or 1, count)"
        raise ShapeError(f"keep({indices!r})", allowed, "keep(indices[None, None]) for one list of positions")
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
        given = f"keep of position {wrong[0]}, which the cache does not hold for a head"
        raise ParameterError(given, "positions that are stored", CURE)
    return np.where(is_real, rows, 0), positions


def keep_rows(positions: Any, lengths: Any) -> KeptRows:
    """Return the rows of a cache that keeps the positions (B, G, c) of sequences of these lengths; −1 keeps nothing."""
    rows = _count(positions)
    return KeptRows(np.ascontiguousarray(positions[:, :, : int(rows.max(initial=0))]), rows, lengths - rows)


def _count(positions: Any) -> Any:
    return (positions >= 0).sum(-1).max(1, initial=0)


@dataclass(frozen=True)
class DraftTree:
    """The drafts of a cache, its last rows. Each draft continues another one, or the last position before all drafts.

    parents : (1 or B, t) int64, the index of each draft's parent; −1 for the last position before all drafts
    first_rows : (B,) int64, the row of the first draft of each sequence
    lengths : (B,) int64, the number of positions before the drafts
    """

    parents: Any
    first_rows: Any
    lengths: Any

    @classmethod
    def read(cls, given: Any, count: int, first_rows: Any, lengths: Any) -> DraftTree:
        """Return the tree of `count` drafts; `given` is the argument `parents` of `KVCache.append`, (t,) or (B, t).

        Raise ShapeError for another shape, ParameterError unless each parent comes before its draft.
        """
        parents = to_integers(given)
        if parents is None or parents.shape not in ((count,), (len(lengths), count)):
            allowed = f"({count},) whole numbers, or ({len(lengths)}, {count})"
            cure = "parents=[-1, 0, 0]: two continuations of one draft"
            raise ShapeError(f"append(parents={given!r}) of {count} positions", allowed, cure)
        parents = parents.reshape(-1, count)
        if count == 0 or (parents < -1).any() or (parents >= np.arange(count)).any():
            allowed = "one draft or more, each with −1 or an earlier draft as its parent"
            raise ParameterError(f"append(parents={given!r})", allowed, "order the drafts by depth, parents first")
        return cls(parents, first_rows, lengths)

    @property
    def count(self) -> int:
        """The number of drafts of a sequence."""
        return int(self.parents.shape[1])

    @property
    def rows(self) -> Any:
        """(B, t) int64: the row of each draft."""
        return self.first_rows[:, None] + np.arange(self.count)

    @property
    def positions(self) -> Any:
        """(B, t) int64: the position of each draft."""
        return self.lengths[:, None] + self.depths

    @cached_property
    def ancestors(self) -> Any:
        """(1 or B, t, t) booleans: the entry [..., x, y] is True if draft y is draft x or an ancestor of it."""
        is_ancestor = np.zeros((*self.parents.shape, self.count), bool)
        entries = np.arange(len(self.parents))
        for draft in range(self.count):
            parent = self.parents[:, draft]
            is_ancestor[:, draft] = np.where(parent[:, None] < 0, False, is_ancestor[entries, parent])
            is_ancestor[:, draft, draft] = True
        return is_ancestor

    @property
    def depths(self) -> Any:
        """(1 or B, t) int64: the number of ancestors of each draft among the drafts."""
        return self.ancestors.sum(-1) - 1

    def reordered(self, order: Any) -> DraftTree:
        """Return the drafts with sequence order[b] in place of sequence b."""
        parents = self.parents if len(self.parents) == 1 else self.parents[order]
        return DraftTree(parents, self.first_rows[order], self.lengths[order])

    def after(self, rows: Any) -> DraftTree:
        """Return the drafts of a cache that has rows[b] more rows before the drafts of sequence b."""
        return replace(self, first_rows=self.first_rows + rows)

    def position(self, of_other_rows: Expression) -> Expression:
        """Return a formula of the position that row j holds; `of_other_rows` is the one for rows before the drafts."""
        first, draft = self._locate()
        entry = 0 if len(self.parents) == 1 else b
        own = Table(self.lengths)[b] + Table(self.depths)[entry, draft]
        return where(j < first, of_other_rows, own)

    def condition(self, count: int) -> Expression:
        """Return the condition that draft i sees row j: a row before the drafts, the row of an ancestor, or its own.

        Raise ShapeError unless `count`, the number of queries of the call, is the number of drafts.
        """
        if count != self.count:
            cure = "cache.accept(path) first; it keeps the drafts of a path and drops the others"
            raise ShapeError(f"{count} queries on a KVCache with {self.count} drafts", "one query for each draft", cure)
        first, draft = self._locate()
        return (j < first) | Table(self.ancestors)[0 if len(self.parents) == 1 else b, i, draft]

    def _locate(self) -> tuple[Expression, Expression]:
        """Return formulas of the row of the first draft, and of the index of the draft in row j, 0 for earlier rows."""
        first = Table(self.first_rows)[b]
        return first, apply("minimum", apply("maximum", j - first, 0), self.count - 1)

    def read_path(self, given: Any) -> Any:
        """Return the drafts on the path of each sequence, (B, k), with −1 behind the last one of a shorter path.

        Raise ShapeError unless `given` is (k,) or (B, k) whole numbers, ParameterError if they are no path from a root.
        """
        path = to_integers(given)
        B = len(self.lengths)
        if path is None or path.ndim not in (1, 2) or (path.ndim == 2 and len(path) != B):
            cure = "accept([0, 2]): draft 0, then draft 2"
            raise ShapeError(f"accept({given!r})", f"(k,) whole numbers, or ({B}, k)", cure)
        path = np.broadcast_to(path, (B, path.shape[-1]))
        parents = np.broadcast_to(self.parents, (B, self.count))
        is_draft = (path >= 0) & (path < self.count)
        before = np.concatenate([np.full((B, 1), -1), path[:, :-1]], axis=1)[:, : path.shape[1]]
        continues = parents[np.arange(B)[:, None], np.where(is_draft, path, 0)] == before
        ends = (path == -1) & np.logical_and.accumulate((path == -1)[:, ::-1], axis=1)[:, ::-1]
        if not ((is_draft & continues) | ends).all():
            allowed = "a path: a draft whose parent is −1, then a child of it, and so on; −1 behind the last"
            cure = "follow the parents from the last accepted draft, then reverse the list"
            raise ParameterError(f"accept({given!r}) of drafts with the parents {self.parents.tolist()}", allowed, cure)
        return path


@dataclass(frozen=True)
class SharedPrefix:
    """The first positions of the sequences of a cache, stored in another cache.

    cache : KVCache, which may have a prefix of its own
    owners : (B,) int64, for each sequence, the sequence of `cache` with which it begins
    lengths : (B,) int64, how many positions each sequence has from the sequence of `cache`
    """

    cache: KVCache
    owners: Any
    lengths: Any

    @cached_property
    def own_row_counts(self) -> Any:
        """(B,) int64: how many rows each sequence has from `cache` itself, without the prefix of `cache`."""
        return self.cache.count_rows(self.owners, self.lengths)

    @cached_property
    def row_counts(self) -> Any:
        """(B,) int64: how many rows each sequence has from all `parts`."""
        return np.sum([part.own_row_counts for part in self.parts], axis=0)

    @property
    def is_own(self) -> bool:
        """True if no two sequences begin with the same sequence of `cache`."""
        return bool(np.unique(self.owners).size == self.owners.size)

    def truncated(self, lengths: Any) -> SharedPrefix | None:
        """Return the prefix of sequences cut to `lengths`: the first of its `parts` that still has rows, or None."""
        cut = replace(self, lengths=np.minimum(self.lengths, lengths))
        return next((part for part in cut.parts if part.own_row_counts.any()), None)

    def reordered(self, order: Any) -> SharedPrefix | None:
        """Return the prefix with sequence order[b] in place of sequence b; None if no row of the prefix is left.

        If at most half of the sequences of `cache` are still used, they are copied, so that memory is freed.
        """
        moved = SharedPrefix(self.cache, self.owners[order], self.lengths[order]).truncated(self.lengths[order])
        if moved is None:
            return None
        used, numbers = np.unique(moved.owners, return_inverse=True)
        if 2 * used.size > len(moved.cache.lengths):
            return moved
        remaining = copy.deepcopy(moved.cache)
        remaining.reorder(used)
        return SharedPrefix(remaining.compacted(), numbers, moved.lengths)

    @cached_property
    def parts(self) -> list[SharedPrefix]:
        """The prefix itself, the prefix of its cache, and so on, each written as a prefix of the B sequences."""
        before = self.cache.prefix
        if before is None:
            return [self]
        lengths = np.minimum(before.lengths[self.owners], self.lengths)
        return [self, *SharedPrefix(before.cache, before.owners[self.owners], lengths).parts]

    @cached_property
    def groups(self) -> Any:
        """(B₀, C) int64: row k has the sequences that begin with sequence k of `cache`, and −1 behind the last."""
        counts = np.bincount(self.owners, minlength=len(self.cache.lengths))
        found = np.full((counts.size, counts.max(initial=0)), -1)
        order = np.argsort(self.owners, kind="stable")
        found[np.arange(found.shape[1]) < counts[:, None]] = order
        return found
