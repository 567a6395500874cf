"""Whether a statistic is right: against its definition in float64, within the budget of `sightline.testing`.

Statistics of queries are looked at in the rows `check.sample` draws, those of cells in some whole rows of cells, those
of keys with all queries of the last head. The definitions here are written out anew, on whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..accuracy import LOOP_ORDERS, budget_used, dense_attention, summation_orders
from ..formula.render_array import evaluate
from ..problem import Problem
from ..statistics import Pooled, Received, Statistic
from .workloads import SEED, Workload

__all__ = ["ExpectedStatistic", "SampledPositions", "WeightMatrix", "queries_to_check"]

Array = np.ndarray[Any, np.dtype[Any]]

LOG_STATISTICS = ("lse", "max_score")  # whose errors follow the size of the scores, not their own


@dataclass(frozen=True)
class SampledPositions:
    """Some heads, queries and keys of a race."""

    workload: Workload
    heads: Array
    rows: Array
    columns: Array


@dataclass(frozen=True)
class WeightMatrix:
    """Weights and scores at some places, (1, heads, rows, columns)."""

    at: SampledPositions
    weights: Array
    scores: Array  # −∞ where hidden
    lse: Array  # (1, heads, rows)
    is_sequential: bool = False  # sums go term by term, as kernels sum, not pairwise

    def sum(self, array: Array, axis: int) -> Array:
        if not self.is_sequential:
            return np.asarray(array.sum(axis))
        return np.asarray(np.take(np.cumsum(array, axis=axis, dtype=array.dtype), -1, axis=axis))


@dataclass(frozen=True)
class ExpectedStatistic:
    """What a statistic is at some places, and what the plain computation makes of it."""

    statistic: Statistic
    at: SampledPositions
    values: Array
    rough: Array  # (orders, ...)
    lookup: Array | None  # scores or weights, where the statistic names keys

    @classmethod
    def of(cls, statistic: Statistic, truth: WeightMatrix, problem: Problem) -> ExpectedStatistic:
        """By the definition's matrix; `problem` is that of its places alone."""
        define, _ = DEFINITIONS[statistic.name]
        scores, rough = _accumulator_scores(problem, np.isneginf(truth.scores)), list[Array]()
        for order in (
            order for order in summation_orders(problem) if order not in LOOP_ORDERS
        ):  # these would take minutes
            _, lse, weights = dense_attention(problem, problem.accumulator, order)
            rough.append(define(statistic, WeightMatrix(truth.at, weights, scores, lse, order % 2 == 1)))
        lookup = {"max_score": truth.scores, "top_k": truth.weights}.get(statistic.name)
        return cls(statistic, truth.at, define(statistic, truth), np.stack(rough), lookup)

    def share(self, found: Sequence[Array]) -> float:
        """The largest share of its budget that any of the statistic's arrays, those of the whole race, uses."""
        _, select = DEFINITIONS[self.statistic.name]
        values, *where = (select(array, self.statistic, self.at) for array in found)
        judged = [values, *(self._at(keys) for keys in where)]
        return max(self._share(one.astype(self.rough.dtype)) for one in judged)

    def _share(self, found: Array) -> float:
        if self.statistic.name in LOG_STATISTICS:
            return budget_used(
                found.reshape(-1), self.values.reshape(-1), self.rough.reshape(len(self.rough), -1), np.float64(1)
            )
        return budget_used(found, self.values, self.rough)

    def _at(self, where: Array) -> Array:
        """What stands at these keys, which must be the largest too; NaN where a key is none of those seen."""
        assert self.lookup is not None
        columns, nothing = self.at.columns, -np.inf if self.statistic.name == "max_score" else 0.0
        keys = where.astype(np.int64).reshape(*self.lookup.shape[:-1], -1)
        place = np.minimum(np.searchsorted(columns, keys), columns.size - 1)
        there = np.where(columns[place] == keys, np.take_along_axis(self.lookup, place, axis=-1), np.nan)
        return np.where(keys == -1, nothing, there).reshape(where.shape)


def queries_to_check(statistic: Statistic, workload: Workload, rows: int) -> Array | None:
    """The queries a statistic must be looked at by: all for those of keys, about so many in whole cells; else None."""
    if isinstance(statistic, Received):
        return np.arange(workload.n)
    if not isinstance(statistic, Pooled):
        return None
    edges = _edges(workload.n, statistic.down)
    count = max(rows * statistic.down // workload.n, 1)
    cells = np.random.default_rng(SEED).choice(statistic.down, min(count, statistic.down), replace=False)
    return np.concatenate([np.arange(edges[r], edges[r + 1]) for r in np.sort(cells)])


def _accumulator_scores(problem: Problem, hidden: Array) -> Array:
    """The scores in the accumulator's dtype."""
    query, key = (np.asarray(x, problem.accumulator) for x in (problem.query, problem.key))
    products = query @ np.repeat(key, problem.group, axis=-3).swapaxes(-1, -2)
    return np.where(hidden, -np.inf, products * products.dtype.type(problem.scale))


def _edges(length: int, cells: int) -> Array:
    """Where cells begin, and the length."""
    return np.arange(cells + 1) * length // cells


# -- definitions -------------------------------------------------------------------------------------------------------


def _entropy(_: Statistic, of: WeightMatrix) -> Array:
    p = of.weights
    return of.sum(-p * np.log(np.where(p > 0, p, np.ones_like(p))), -1)


def _mass(statistic: Any, of: WeightMatrix) -> Array:
    at = of.at
    symbols: dict[str, Any] = {"b": np.asarray(0), "h": at.heads[:, None, None], "i": at.rows[:, None], "j": at.columns}
    symbols |= {"n": at.workload.n, "m": at.workload.m}
    counted = evaluate(statistic.mask, symbols, xp=np, float_dtype=np.dtype("float64"), like=at.rows)
    return of.sum(np.where(counted, of.weights, np.zeros_like(of.weights)), -1)


def _top_k(statistic: Any, of: WeightMatrix) -> Array:
    seen = np.where(np.isneginf(of.scores), np.zeros_like(of.weights), of.weights)
    return -np.sort(-seen, axis=-1)[..., : statistic.k]


def _received(statistic: Any, of: WeightMatrix) -> Array:
    if statistic.how == "max":
        return np.asarray(of.weights.max(-2))
    total = of.sum(of.weights, -2)
    return total / of.at.workload.n if statistic.how == "mean" else total


def _cell_rows(statistic: Any, at: SampledPositions) -> Array:
    """Which row of cells each query lies in."""
    return np.searchsorted(_edges(at.workload.n, statistic.down)[1:], at.rows, side="right")


def _pooled(statistic: Any, of: WeightMatrix) -> Array:
    edges = _edges(of.at.workload.m, statistic.across)
    columns = np.searchsorted(edges[1:], of.at.columns, side="right")
    _, rows, heights = np.unique(_cell_rows(statistic, of.at), return_inverse=True, return_counts=True)
    found = np.zeros((*of.weights.shape[:2], heights.size, statistic.across), of.weights.dtype)
    join: Any = np.maximum if statistic.how == "max" else np.add
    join.at(found, (slice(None), slice(None), rows[:, None], columns), of.weights)
    return found if statistic.how == "max" else found / np.outer(heights, np.diff(edges)).astype(found.dtype)


def _by_query(array: Array, _: Statistic, at: SampledPositions) -> Array:
    return array[:, at.heads][:, :, at.rows]


def _by_key(array: Array, _: Statistic, at: SampledPositions) -> Array:
    return array[:, at.heads][..., at.columns]


def _by_cell(array: Array, statistic: Statistic, at: SampledPositions) -> Array:
    return array[:, at.heads][:, :, np.unique(_cell_rows(statistic, at))]


DEFINITIONS: dict[str, tuple[Callable[[Any, WeightMatrix], Array], Callable[[Array, Any, SampledPositions], Array]]] = {
    "lse": (lambda _, of: of.lse, _by_query),
    "max_score": (lambda _, of: np.asarray(of.scores.max(-1)), _by_query),
    "entropy": (_entropy, _by_query),
    "mass": (_mass, _by_query),
    "top_k": (_top_k, _by_query),
    "received": (_received, _by_key),
    "pooled": (_pooled, _by_cell),
}
"""By a statistic's name: its definition, and the part of its arrays that stands at some places."""
