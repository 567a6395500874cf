"""Whether a statistic is right: against its definition in float64, within the budget of `sightline.testing`.

Statistics of queries are looked at in the rows `check.sample` draws, those of cells in some whole rows of cells, those
of keys with all queries of the last head. The definitions here are written out anew, on whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..formula.render_array import evaluate
from ..observe import Pooled, Received, Statistic
from ..problem import Problem
from ..testing import budget_used, dense, orders_of
from .races import SEED, Race

__all__ = ["Matrix", "queries_of", "share_of_statistic"]

Array = np.ndarray[Any, np.dtype[Any]]

LOGARITHMS = ("lse", "max_score")  # whose errors follow the size of the scores, not their own


@dataclass(frozen=True)
class Matrix:
    """Weights and scores of some heads, queries and keys, (1, heads, rows, columns), and where they stand."""

    race: Race
    heads: Array
    rows: Array
    columns: Array
    weights: Array
    scores: Array  # −∞ where hidden
    lse: Array
    loop: bool = False  # sums go term by term, as kernels sum, not pairwise

    def sum(self, array: Array, axis: int) -> Array:
        if not self.loop:
            return np.asarray(array.sum(axis))
        return np.asarray(np.take(np.cumsum(array, axis=axis, dtype=array.dtype), -1, axis=axis))


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


def share_of_statistic(statistic: Statistic, found: tuple[Array, ...], truth: Matrix, problem: Problem) -> float:
    """The largest share of its budget that a statistic's arrays use, at the places of the matrix.

    Parameters
    ----------
    found : the statistic's arrays for the whole race
    truth : the definition's matrix
    problem : the problem of its places alone
    """
    define, pick = DEFINITIONS[statistic.name]
    scores = _plain_scores(problem, np.isneginf(truth.scores))
    rough = []
    for order in orders_of(problem):
        _, lse, weights = dense(problem, problem.accumulator, order)
        matrix = replace(truth, weights=weights, scores=scores, lse=lse, loop=order % 2 == 1)
        rough.append(define(statistic, matrix))
    values, *where = (pick(array, statistic, truth) for array in found)
    judged = [values]
    if where:  # what stands at the keys they name must be the largest too
        judged.append(_at(truth, where[0], scores=statistic.name == "max_score"))
    expected = define(statistic, truth)
    return max(_share(statistic, one.astype(problem.accumulator), expected, rough) for one in judged)


def _plain_scores(problem: Problem, hidden: Array) -> Array:
    """The scores in the accumulator's dtype."""
    query, key = (np.asarray(x, problem.accumulator) for x in (problem.query, problem.key))
    products = query @ np.repeat(key, problem.group, axis=-3).swapaxes(-1, -2)
    return np.where(hidden, -np.inf, products * products.dtype.type(problem.scale))


def _share(statistic: Statistic, found: Array, expected: Array, rough: list[Array]) -> float:
    if statistic.name in LOGARITHMS:
        return budget_used(found.reshape(-1), expected.reshape(-1), np.stack([x.reshape(-1) for x in rough]), 1.0)
    return budget_used(found, expected, np.stack(rough))


def _at(of: Matrix, where: Array, scores: bool) -> Array:
    """The scores or weights of these keys; −∞ or 0 where none is named, NaN where one that is not there."""
    matrix = of.scores if scores else of.weights
    keys = where.astype(np.int64).reshape(*matrix.shape[:-1], -1)
    place = np.minimum(np.searchsorted(of.columns, keys), of.columns.size - 1)
    there = np.where(of.columns[place] == keys, np.take_along_axis(matrix, place, axis=-1), np.nan)
    return np.where(keys == -1, -np.inf if scores else 0.0, there).reshape(where.shape)


def _edges(length: int, cells: int) -> Array:
    """Where cells begin, and the length."""
    return np.arange(cells + 1) * length // cells


# -- definitions -------------------------------------------------------------------------------------------------------


def _entropy(_: Statistic, of: Matrix) -> Array:
    p = of.weights
    return of.sum(-p * np.log(np.where(p > 0, p, np.ones_like(p))), -1)


def _mass(statistic: Any, of: Matrix) -> Array:
    symbols: dict[str, Any] = {"b": np.asarray(0), "h": of.heads[:, None, None], "i": of.rows[:, None], "j": of.columns}
    symbols |= {"n": of.race.n, "m": of.race.m}
    counted = evaluate(statistic.mask, symbols, xp=np, float_dtype=np.dtype("float64"), like=of.rows)
    return of.sum(np.where(counted, of.weights, np.zeros_like(of.weights)), -1)


def _top_k(statistic: Any, of: Matrix) -> Array:
    seen = np.where(np.isneginf(of.scores), np.zeros_like(of.weights), of.weights)
    return -np.sort(-seen, axis=-1)[..., : statistic.k]


def _received(statistic: Any, of: Matrix) -> Array:
    if statistic.how == "max":
        return np.asarray(of.weights.max(-2))
    total = of.sum(of.weights, -2)
    return total / of.race.n if statistic.how == "mean" else total


def _cell_rows(statistic: Any, of: Matrix) -> Array:
    """Which row of cells each query lies in."""
    return np.searchsorted(_edges(of.race.n, statistic.down)[1:], of.rows, side="right")


def _pooled(statistic: Any, of: Matrix) -> Array:
    edges = _edges(of.race.m, statistic.across)
    columns = np.searchsorted(edges[1:], of.columns, side="right")
    _, rows, heights = np.unique(_cell_rows(statistic, of), return_inverse=True, return_counts=True)
    found = np.zeros((*of.weights.shape[:2], heights.size, statistic.across), of.weights.dtype)
    join: Any = np.maximum if statistic.how == "max" else np.add
    join.at(found, (slice(None), slice(None), rows[:, None], columns), of.weights)
    return found if statistic.how == "max" else found / np.outer(heights, np.diff(edges)).astype(found.dtype)


def _by_query(array: Array, _: Statistic, of: Matrix) -> Array:
    return array[:, of.heads][:, :, of.rows]


def _by_key(array: Array, _: Statistic, of: Matrix) -> Array:
    return array[:, of.heads][..., of.columns]


def _by_cell(array: Array, statistic: Statistic, of: Matrix) -> Array:
    return array[:, of.heads][:, :, np.unique(_cell_rows(statistic, of))]


DEFINITIONS: dict[str, tuple[Callable[[Any, Matrix], Array], Callable[[Array, Any, Matrix], Array]]] = {
    "lse": (lambda _, of: of.lse, _by_query),
    "max_score": (lambda _, of: np.asarray(of.scores.max(-1)), _by_query),
    "entropy": (_entropy, _by_query),
    "mass": (_mass, _by_query),
    "top_k": (_top_k, _by_query),
    "received": (_received, _by_key),
    "pooled": (_pooled, _by_cell),
}
"""By a statistic's name: its definition, and the places a matrix has of its arrays."""
