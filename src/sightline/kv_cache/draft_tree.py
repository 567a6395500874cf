"""Drafts of speculative decoding: appended positions that form a tree, until some of them are accepted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..caching import cached_property
from ..errors import ParameterError, ShapeError
from ..formula.expression import SYMBOLS, Expression, apply, where
from ..formula.tables import Table
from .argument_checks import to_integers

b, i, j = (SYMBOLS[name] for name in "bij")


@dataclass(frozen=True)
class DraftTree:
    """The drafts of a cache, its last rows. Each draft continues another one, or the last position before all drafts.

    Attributes
    ----------
    parents : (1 or B, t) int64, the index of each draft's parent; −1 for the last position before all drafts
    depths : (1 or B, t) int64, the number of ancestors of each draft among the drafts
    first_rows : (B,) int64, the row of the first draft of each sequence
    lengths : (B,) int64, the number of positions before the drafts
    """

    parents: Any
    depths: Any
    first_rows: Any
    lengths: Any

    @classmethod
    def read(cls, given: Any, count: int, first_rows: Any, lengths: Any) -> DraftTree:
        """Return the tree of `count` drafts; `given` is the argument `parents` of `KVCache.append`, (t,) or (B, t).

        Raise ShapeError for another shape, ParameterError unless each parent comes before its draft.
        """
        parents = to_integers(given)
        if parents is None or parents.shape not in ((count,), (len(lengths), count)):
            raise ShapeError(
                f"append(parents={given!r}) of {count} positions",
                f"({count},) whole numbers, or ({len(lengths)}, {count})",
                "parents=[-1, 0, 0]: two continuations of one draft",
            )
        parents = parents.reshape(-1, count)
        if count == 0 or (parents < -1).any() or (parents >= np.arange(count)).any():
            raise ParameterError(
                f"append(parents={given!r})",
                "one draft or more, each with −1 or an earlier draft as its parent",
                "order the drafts by depth, parents first",
            )
        depths = np.zeros_like(parents)
        entries = np.arange(len(parents))
        for draft in range(count):
            parent = parents[:, draft]
            depths[:, draft] = np.where(parent < 0, 0, depths[entries, parent] + 1)
        return cls(parents, depths, first_rows, lengths)

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
        found = np.zeros((*self.parents.shape, self.count), bool)
        entries = np.arange(len(self.parents))
        for draft in range(self.count):
            parent = self.parents[:, draft]
            found[:, draft] = np.where(parent[:, None] < 0, False, found[entries, parent])
            found[:, draft, draft] = True
        return found

    def reordered(self, order: Any) -> DraftTree:
        """Return the drafts with sequence order[b] in place of sequence b."""
        shared = len(self.parents) == 1
        parents, depths = (x if shared else x[order] for x in (self.parents, self.depths))
        return DraftTree(parents, depths, self.first_rows[order], self.lengths[order])

    def after(self, rows: Any) -> DraftTree:
        """Return the drafts of a cache that has rows[b] more rows before the drafts of sequence b."""
        return replace(self, first_rows=self.first_rows + rows)

    def position(self, of_other_rows: Expression) -> Expression:
        """Return a formula of the position that row j holds; `of_other_rows` is the one for rows before the drafts."""
        first, draft = self._locate()
        entry = 0 if len(self.depths) == 1 else b
        own = Table(self.lengths)[b] + Table(self.depths)[entry, draft]
        return where(j < first, of_other_rows, own)

    def condition(self, count: int) -> Expression:
        """Return the condition that draft i sees row j: a row before the drafts, the row of an ancestor, or its own.

        Raise ShapeError unless `count`, the number of queries of the call, is the number of drafts.
        """
        if count != self.count:
            raise ShapeError(
                f"{count} queries on a KVCache with {self.count} drafts",
                "one query for each draft",
                "cache.accept(path) first; it keeps the drafts of a path and drops the others",
            )
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
            raise ShapeError(
                f"accept({given!r})", f"(k,) whole numbers, or ({B}, k)", "accept([0, 2]): draft 0, then draft 2"
            )
        path = np.broadcast_to(path, (B, path.shape[-1]))
        parents = np.broadcast_to(self.parents, (B, self.count))
        is_draft = (path >= 0) & (path < self.count)
        before = np.concatenate([np.full((B, 1), -1), path[:, :-1]], axis=1)[:, : path.shape[1]]
        continues = parents[np.arange(B)[:, None], np.where(is_draft, path, 0)] == before
        ends = (path == -1) & np.logical_and.accumulate((path == -1)[:, ::-1], axis=1)[:, ::-1]
        if not ((is_draft & continues) | ends).all():
            raise ParameterError(
                f"accept({given!r}) of drafts with the parents {self.parents.tolist()}",
                "a path: a draft whose parent is −1, then a child of it, and so on; −1 behind the last",
                "follow the parents from the last accepted draft, then reverse the list",
            )
        return path
