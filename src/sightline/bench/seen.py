"""Whether a statistic is right: against its definition in float64, within the budget of `sightline.testing`.

Statistics of queries are looked at in the rows `check.sample` draws, those of cells in some whole rows of cells, those
of keys with all queries of the last head. The definitions here are written out anew, on whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..accuracy import LOOPS, budget_used, dense, orders_of
from ..formula.render_array import evaluate
from ..problem import Problem
from ..statistics import Pooled, Received, Statistic
from .races import SEED, Race

__all__ = ["Expected", "Matrix", "Places", "queries_of"]

Array = np.ndarray[Any, np.dtype[Any]]

LOGARITHMS = ("lse", "max_score")  # whose errors follow the size of the scores, not their own


@dataclass(frozen=True)
class Places:
    """Some heads, queries and keys of a race."""

    race: Race
    heads: Array
    rows: Array
    columns: Array


@dataclass(frozen=True)
class Matrix:
    """Weights and scores at some places, (1, heads, rows, columns)."""

    at: Places
    weights: Array
    scores: Array  # −∞ where hidden
    lse: Array  # (1, heads, rows)
    loop: bool = False  # sums go term by term, as kernels sum, not pairwise

    def sum(self, array: Array, axis: int) -> Array:
        if not self.loop:
            return np.asarray(array.sum(axis))
        return np.asarray(np.take(np.cumsum(array, axis=axis, dtype=array.dtype), -1, axis=axis))


@dataclass(frozen=True)
class Expected:
    """What a statistic is at some places, and what the plain computation makes of it."""

    statistic: Statistic
    at: Places
    values: Array
    rough: Array  # (orders, ...)
    looked_up: Array | None  # scores or weights, where the statistic names keys

    @classmethod
    def of(cls, statistic: Statistic, truth: Matrix, problem: Problem) -> Expected:
        """By the definition's matrix; `problem` is that of its places alone."""
        define, _ = DEFINITIONS[statistic.name]
        scores, rough = _plain_scores(problem, np.isneginf(truth.scores)), list[Array]()
        for order in (order for order in orders_of(problem) if order not in LOOPS):  # these would take minutes
            _, lse, weights = dense(problem, problem.accumulator, order)
            rough.append(define(statistic, Matrix(truth.at, weights, scores, lse, order % 2 == 1)))
        looked_up = {"max_score": truth.scores, "top_k": truth.weights}.get(statistic.name)
        return cls(statistic, truth.at, define(statistic, truth), np.stack(rough), looked_up)

    def share(self, found: Sequence[Array]) -> float:
        """The largest share of its budget that any of the statistic's arrays, those of the whole race, uses."""
        _, pick = DEFINITIONS[self.statistic.name]
        values, *where = (pick(array, self.statistic, self.at) for array in found)
        judged = [values, *(self._at(keys) for keys in where)]
        return max(self._share(one.astype(self.rough.dtype)) for one in judged)

    def _share(self, found: Array) -> float:
        if self.statistic.name in LOGARITHMS:
            return budget_used(
                found.reshape(-1), self.values.reshape(-1), self.rough.reshape(len(self.rough), -1), np.float64(1)
            )
        return budget_used(found, self.values, self.rough)

    def _at(self, where: Array) -> Array:
        """What stands at these keys, which must be the largest too; NaN where a key is none of those seen."""
        assert self.looked_up is not None
        columns, nothing = self.at.columns, -np.inf if self.statistic.name == "max_score" else 0.0
        keys = where.astype(np.int64).reshape(*self.looked_up.shape[:-1], -1)
        place = np.minimum(np.searchsorted(columns, keys), columns.size - 1)
        there = np.where(columns[place] == keys, np.take_along_axis(self.looked_up, place, axis=-1), np.nan)
        return np.where(keys == -1, nothing, there).reshape(where.shape)


def queries_of(statistic: Statistic, race: Race, rows: int) -> Array | None:
    """The queries a statistic must be looked at by: all for those of keys, about so many in whole cells; else None."""
    if isinstance(statistic, Received):
        return np.arange(race.n)
    if not isinstance(statistic, Pooled):
        return None
    edges = _edges(race.n, statistic.down)
    count = max(rows * statistic.down // race.n, 1)
    cells = np.random.default_rng(SEED).choice(statistic.down, min(count, statistic.down), replace=False)
    return np.concatenate([np.arange(edges[r], edges[r + 1]) for r in np.sort(cells)])


def _plain_scores(problem: Problem, hidden: Array) -> Array:
    """The scores in the accumulator's dtype."""
    query, key = (np.asarray(x, problem.accumulator) for x in (problem.query, problem.key))
    products = query @ np.repeat(key, problem.group, axis=-3).swapaxes(-1, -2)
    return np.where(hidden, -np.inf, products * products.dtype.type(problem.scale))


def _edges(length: int, cells: int) -> Array:
    """Where cells begin, and the length."""
    return np.arange(cells + 1) * length // cells


# -- definitions -------------------------------------------------------------------------------------------------------


def _entropy(_: Statistic, of: Matrix) -> Array:
    p = of.weights
    return of.sum(-p * np.log(np.where(p > 0, p, np.ones_like(p))), -1)


def _mass(statistic: Any, of: Matrix) -> Array:
    at = of.at
    symbols: dict[str, Any] = {"b": np.asarray(0), "h": at.heads[:, None, None], "i": at.rows[:, None], "j": at.columns}
    symbols |= {"n": at.race.n, "m": at.race.m}
    counted = evaluate(statistic.mask, symbols, xp=np, float_dtype=np.dtype("float64"), like=at.rows)
    return of.sum(np.where(counted, of.weights, np.zeros_like(of.weights)), -1)


def _top_k(statistic: Any, of: Matrix) -> Array:
    seen = np.where(np.isneginf(of.scores), np.zeros_like(of.weights), of.weights)
    return -np.sort(-seen, axis=-1)[..., : statistic.k]


def _received(statistic: Any, of: Matrix) -> Array:
    if statistic.how == "max":
        return np.asarray(of.weights.max(-2))
    total = of.sum(of.weights, -2)
    return total / of.at.race.n if statistic.how == "mean" else total


def _cell_rows(statistic: Any, at: Places) -> Array:
    """Which row of cells each query lies in."""
    return np.searchsorted(_edges(at.race.n, statistic.down)[1:], at.rows, side="right")


def _pooled(statistic: Any, of: Matrix) -> Array:
    edges = _edges(of.at.race.m, statistic.across)
    columns = np.searchsorted(edges[1:], of.at.columns, side="right")
    _, rows, heights = np.unique(_cell_rows(statistic, of.at), return_inverse=True, return_counts=True)
    found = np.zeros((*of.weights.shape[:2], heights.size, statistic.across), of.weights.dtype)
    join: Any = np.maximum if statistic.how == "max" else np.add
    join.at(found, (slice(None), slice(None), rows[:, None], columns), of.weights)
    return found if statistic.how == "max" else found / np.outer(heights, np.diff(edges)).astype(found.dtype)


def _by_query(array: Array, _: Statistic, at: Places) -> Array:
    return array[:, at.heads][:, :, at.rows]


def _by_key(array: Array, _: Statistic, at: Places) -> Array:
    return array[:, at.heads][..., at.columns]


def _by_cell(array: Array, statistic: Statistic, at: Places) -> Array:
    return array[:, at.heads][:, :, np.unique(_cell_rows(statistic, at))]


DEFINITIONS: dict[str, tuple[Callable[[Any, Matrix], Array], Callable[[Array, Any, Places], Array]]] = {
    "lse": (lambda _, of: of.lse, _by_query),
    "max_score": (lambda _, of: np.asarray(of.scores.max(-1)), _by_query),
    "entropy": (_entropy, _by_query),
    "mass": (_mass, _by_query),
    "top_k": (_top_k, _by_query),
    "received": (_received, _by_key),
    "pooled": (_pooled, _by_cell),
}
"""By a statistic's name: its definition, and the part of its arrays that stands at some places."""
