"""Positions that several sequences of a cache share. They are stored once, in another cache that never changes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..caching import cached_property

if TYPE_CHECKING:
    from .cache import KVCache

MIN_SHARED_ROWS = 64  # `KVCache.fork` copies fewer rows, because each prefix adds a call to attention


@dataclass(frozen=True)
class SharedPrefix:
    """The first positions of the sequences of a cache, stored in another cache.

    Attributes
    ----------
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
        earlier = SharedPrefix(
            before.cache, before.owners[self.owners], np.minimum(before.lengths[self.owners], self.lengths)
        )
        return [self, *earlier.parts]

    @cached_property
    def groups(self) -> Any:
        """(B₀, C) int64: row k has the sequences that begin with sequence k of `cache`, and −1 behind the last."""
        counts = np.bincount(self.owners, minlength=len(self.cache.lengths))
        found = np.full((counts.size, counts.max(initial=0)), -1)
        order = np.argsort(self.owners, kind="stable")
        found[np.arange(found.shape[1]) < counts[:, None]] = order
        return found
