"""What a cache has stored: which rows hold which positions, and how the formulas of a call are written for them."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np

from ..arrays.row_formats import RowFormat
from ..errors import ParameterError, check_count
from ..formula import library
from ..formula.expression import SYMBOLS, Expression, apply, conjoin
from ..formula.tables import Table
from .query_positions import WITHOUT_EVICTION, Rewriting, find_rewriting
from .row_positions import DraftTree, KeptRows, SharedPrefix
from .storage import Storage

b, j = SYMBOLS["b"], SYMBOLS["j"]


class StoredRows:
    """The rows of a cache. `KVCache` has the methods that change them."""

    def __init__(self) -> None:
        self.storage: Storage | None = None  # the first append makes it
        self._lengths: Any  # (B,) int64
        self.prefix: SharedPrefix | None = None  # after `fork`: where the first positions are stored
        self._kept: KeptRows | None = None  # after `keep` or `fork`: the positions that the first rows hold
        self.drafts: DraftTree | None = None  # after `append(parents=...)`, until `accept`
        self._num_rows: int  # the rows of the sequence with most; without `keep`, row k holds position k
        self.rows_are_full: bool  # True if each of these rows holds a position, in every sequence and head
        self._rewritings: dict[tuple[int, bool, int], Rewriting]  # by the arguments of `rewriting`, until a change
        self._ndim = 4  # the number of axes of the appended arrays; 2 and 3 mean that there is no head axis
        self._set_lengths(np.zeros(0, np.int64), np.zeros((0, 0), np.int64))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that shares the storage until this cache or the copy writes to it."""
        copied = memo[id(self)] = self.snapshot()  # the arrays of lengths and positions are replaced, never written to
        copied.storage = self.storage and self.storage.copy()
        return copied

    def __copy__(self) -> Self:
        """Return what `copy.deepcopy` returns, because two caches that write to one storage would change each other."""
        return copy.deepcopy(self)

    def snapshot(self) -> Self:
        """Return the cache as it is now. A call of attention reads this copy, which another thread does not change."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    # -- positions ---------------------------------------------------------------------------------------------------
    @property
    def lengths(self) -> Any:
        """(B,) int64: the number of positions of each sequence."""
        return self._lengths.copy()

    @property
    def max_length(self) -> int:
        """The number of positions of the longest sequence."""
        return int(self._lengths.max(initial=0))

    def positions(self, n: int | None = None) -> Any:
        """Return the positions of a call's queries in their sequences, (B, n) int64; −1 for padding.

        Parameters
        ----------
        n : int, optional
            The queries are the last n positions of every sequence, n ≥ 0 (else ParameterError). Default: the queries
            are the rows of the newest append.
        """
        if n is None:
            return self._newest_positions.copy()
        n = check_count("n={!r}", n, 0, "n=1")
        last = self._lengths[:, None] - n + np.arange(n)
        return np.maximum(last, -1)

    def are_newest(self, n: int) -> bool:
        """True if n queries are the rows of the newest append; False if `truncate` has removed all of these rows."""
        return bool(n == self._newest_positions.shape[1])

    def rewriting(self, count: int, reads_rows: bool, heads: int) -> Rewriting:
        """Return how the formulas of a call of `count` queries are rewritten.

        `reads_rows` is True if a formula reads i. `heads` is the number of query heads.
        """
        kept = self._kept
        group = 1 if kept is None or self.storage is None else max(heads // self.storage.key.shape[1], 1)
        are_next = self._newest_are_last or not self.are_newest(count)
        if reads_rows and are_next and self.rows_are_full and 0 < count <= self._num_rows:
            of_all, of_last, of_next = WITHOUT_EVICTION if kept is None else kept.rewritings(group)
            return of_last if count == 1 else of_all if count == self._num_rows else of_next
        found = self._rewritings.get((count, reads_rows, group))
        if found is None:
            found = self._rewritings[count, reads_rows, group] = find_rewriting(self, count, reads_rows, group)
        return found

    def key_formulas(self, group: int) -> tuple[Expression, Expression | None]:
        """Return two formulas of row j: the position that it holds, and whether it holds one (None if every row does).

        `group` is the number of query heads that share a key head.
        """
        position, condition = (j, None) if self._kept is None else self._kept.formulas(group)
        if self._kept is not None and not self.rows_are_full:  # a row without a position reads inside of tables
            last = Table(np.maximum(self._lengths - 1, 0))
            position = apply("minimum", position, last[b if self._lengths.size > 1 else 0])
        if self.drafts is not None:
            position = self.drafts.position(position)
        if not self._has_equal_rows:
            condition = conjoin(condition, library.padding(self.row_counts))
        return position, condition

    @property
    def row_counts(self) -> Any:
        """(B,) int64: the number of rows of each sequence, counted in the head that keeps the most keys."""
        if self.drafts is not None:
            return self.drafts.first_rows + self.drafts.count
        return self._lengths if self._kept is None else self._lengths - self._kept.evicted

    def rows(self) -> tuple[Any, Any]:
        """Return views of the rows of key and value, with the axes of the appended arrays; bytes if quantised."""
        count, storage = self._num_rows, self.storage  # read once, because another thread may append
        if storage is None:
            raise nothing_appended()
        sequence = 0 if self._ndim == 2 else slice(None)
        head = slice(None) if self._ndim == 4 else 0
        return storage.key[sequence, head, :count], storage.value[sequence, head, :count]

    def stored_rows(self) -> tuple[Any, Any]:
        """Return what `rows` returns, but always with the axes (B, G, rows, width)."""
        assert self.storage is not None
        return self.storage.key[:, :, : self._num_rows], self.storage.value[:, :, : self._num_rows]

    def count_rows(self, sequences: Any, lengths: Any) -> Any:
        """Return, for each b, how many rows hold the positions before lengths[b] of sequence sequences[b]."""
        if self._kept is None:
            return lengths
        return lengths - self._kept.reordered(sequences).truncated(lengths).evicted

    @property
    def row_formats(self) -> tuple[RowFormat, RowFormat] | None:
        """How the rows of keys and of values are quantised; None for floats, and before the first append."""
        return None if self.storage is None else self.storage.row_formats

    # -- internals ---------------------------------------------------------------------------------------------------
    def _set_lengths(self, lengths: Any, newest: Any) -> None:
        """Set the lengths and the positions of the newest append, and forget how formulas were rewritten.

        `_num_rows` is an int and `rows_are_full` a bool, not of NumPy, so that torch.compile can read them.
        """
        self._lengths, self._newest_positions = lengths, newest
        self._rewritings = {}
        count, rows = newest.shape[1], self.row_counts
        self._newest_are_last = bool((newest == lengths[:, None] - count + np.arange(count)).all())
        self._num_rows = int(rows.max(initial=0))
        self._has_equal_rows = bool((rows == self._num_rows).all())
        is_uniform = self._kept is None or self._kept.is_uniform
        self.rows_are_full = self._has_equal_rows and is_uniform and self.drafts is None

    @property
    def _squares(self) -> Any:
        """Σ (x − x̂)² and Σ x² of keys and values, (2, 2); see `Storage`."""
        own = np.zeros((2, 2)) if self.storage is None else self.storage.squares
        return own if self.prefix is None else own + self.prefix.cache._squares


def nothing_appended() -> ParameterError:
    """Return the error that callers raise for a cache to which nothing was appended."""
    given = "a KVCache to which nothing was appended"
    return ParameterError(given, "a cache with positions", "cache.append(key, value) first")
