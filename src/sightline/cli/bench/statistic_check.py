"""Check statistics against their float64 definitions, within the rounding-error budget of `sightline.testing`.

A statistic per query is checked for the queries that `check.sample` draws. A pooled statistic is checked in some whole
rows of cells. A statistic per key is checked for the last head, with all its queries. The definitions here use dense
matrices and share no code with `sightline.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...problem.problem import Problem
from ...reference.accuracy import LOOP_ORDERS, budget_used, dense_attention, summation_orders
from ...statistics import Pooled, Received, Statistic
from .workloads import SEED, Workload, evaluate_at

Array = np.ndarray[Any, np.dtype[Any]]

LOG_STATISTICS = ("lse", "max_score")  # statistics whose errors grow with the scores, not with the statistic itself


@dataclass(frozen=True)
class SampledPositions:
    """The indices of some heads, queries (rows) and keys (columns) of a workload."""

    workload: Workload
    heads: Array
    rows: Array
    columns: Array


@dataclass(frozen=True)
class WeightMatrix:
    """The weights and the scores at sampled positions, each (1, heads, rows, columns)."""

    at: SampledPositions
    weights: Array
    scores: Array  # the scores of hidden pairs are −∞
    lse: Array  # (1, heads, rows)
    is_sequential: bool = False  # True if `sum` adds term by term, as kernels do, instead of pairwise

    def sum(self, array: Array, axis: int) -> Array:
        if not self.is_sequential:
            return np.asarray(array.sum(axis))
        return np.asarray(np.take(np.cumsum(array, axis=axis, dtype=array.dtype), -1, axis=axis))


@dataclass(frozen=True)
class ExpectedStatistic:
    """What a statistic should be at the sampled positions, by the float64 definition and by plain computations."""

    statistic: Statistic
    at: SampledPositions
    values: Array  # the statistic by the float64 definition
    rough: Array  # (orders of summation, ...): the statistic by dense computations in the accumulator's dtype
    lookup: Array | None  # true scores or weights, if the statistic returns positions of keys; else None

    @classmethod
    def of(cls, statistic: Statistic, truth: WeightMatrix, problem: Problem) -> ExpectedStatistic:
        """Return what `statistic` should be, given the true weights and scores `truth` of the sampled `problem`."""
        define, _ = DEFINITIONS[statistic.name]
        scores, rough = _accumulator_scores(problem, np.isneginf(truth.scores)), list[Array]()
        for order in summation_orders(problem):
            if order in LOOP_ORDERS:  # a summation in loops takes minutes
                continue
            _, lse, weights = dense_attention(problem, problem.accumulator, order)
            rough.append(define(statistic, WeightMatrix(truth.at, weights, scores, lse, order % 2 == 1)))
        lookup = {"max_score": truth.scores, "top_k": truth.weights}.get(statistic.name)
        return cls(statistic, truth.at, define(statistic, truth), np.stack(rough), lookup)

    def share(self, found: Sequence[Array]) -> float:
        """Return the largest share of the rounding-error budget that the arrays in `found` use.

        `found` are the statistic's arrays as a contender returns them, for the whole workload.
        """
        _, select = DEFINITIONS[self.statistic.name]
        values, *where = (select(array, self.statistic, self.at) for array in found)
        compared = [values, *(self._look_up(keys) for keys in where)]
        return max(self._share(array.astype(self.rough.dtype)) for array in compared)

    def _share(self, found: Array) -> float:
        if self.statistic.name in LOG_STATISTICS:
            return budget_used(
                found.reshape(-1), self.values.reshape(-1), self.rough.reshape(len(self.rough), -1), np.float64(1)
            )
        return budget_used(found, self.values, self.rough)

    def _look_up(self, where: Array) -> Array:
        """Return the true scores or weights at the key positions in `where`.

        A key outside the sample has NaN. Position −1, no key, has the score −∞ or the weight 0.
        """
        assert self.lookup is not None
        columns, missing = self.at.columns, -np.inf if self.statistic.name == "max_score" else 0.0
        keys = where.astype(np.int64).reshape(*self.lookup.shape[:-1], -1)
        index = np.minimum(np.searchsorted(columns, keys), columns.size - 1)
        values = np.where(columns[index] == keys, np.take_along_axis(self.lookup, index, axis=-1), np.nan)
        return np.where(keys == -1, missing, values).reshape(where.shape)


def queries_to_check(statistic: Statistic, workload: Workload, rows: int) -> Array | None:
    """Return the queries that are needed to check a statistic; None if random queries suffice.

    A statistic per key needs all queries. A pooled statistic needs whole rows of cells, of about `rows` queries in all.
    """
    if isinstance(statistic, Received):
        return np.arange(workload.n)
    if not isinstance(statistic, Pooled):
        return None
    edges = _edges(workload.n, statistic.down)
    count = max(rows * statistic.down // workload.n, 1)
    cells = np.random.default_rng(SEED).choice(statistic.down, min(count, statistic.down), replace=False)
    return np.concatenate([np.arange(edges[r], edges[r + 1]) for r in np.sort(cells)])


def _accumulator_scores(problem: Problem, hidden: Array) -> Array:
    """Return the scaled scores in the accumulator's dtype. The scores of `hidden` pairs are −∞."""
    query, key = (np.asarray(x, problem.accumulator) for x in (problem.query, problem.key))
    products = query @ np.repeat(key, problem.group, axis=-3).swapaxes(-1, -2)
    return np.where(hidden, -np.inf, products * products.dtype.type(problem.scale))


def _edges(length: int, cells: int) -> Array:
    """Return the first position of every pooled cell along an axis, followed by the length of the axis."""
    return np.arange(cells + 1) * length // cells


# -- definitions -------------------------------------------------------------------------------------------------------


def _entropy(_: Statistic, of: WeightMatrix) -> Array:
    p = of.weights
    return of.sum(-p * np.log(np.where(p > 0, p, np.ones_like(p))), -1)


def _mass(statistic: Any, of: WeightMatrix) -> Array:
    heads, rows, size = of.at.heads[:, None, None], of.at.rows[:, None], (of.at.workload.n, of.at.workload.m)
    counted = evaluate_at(statistic.mask, *size, b=0, h=heads, i=rows, j=of.at.columns)
    return of.sum(np.where(counted, of.weights, np.zeros_like(of.weights)), -1)


def _top_k(statistic: Any, of: WeightMatrix) -> Array:
    weights = np.where(np.isneginf(of.scores), np.zeros_like(of.weights), of.weights)
    return -np.sort(-weights, axis=-1)[..., : statistic.k]


def _received(statistic: Any, of: WeightMatrix) -> Array:
    if statistic.how == "max":
        return np.asarray(of.weights.max(-2))
    total = of.sum(of.weights, -2)
    return total / of.at.workload.n if statistic.how == "mean" else total


def _cell_rows(statistic: Any, at: SampledPositions) -> Array:
    """Return for each sampled query the index of its row of pooled cells."""
    return np.searchsorted(_edges(at.workload.n, statistic.down)[1:], at.rows, side="right")


def _pooled(statistic: Any, of: WeightMatrix) -> Array:
    edges = _edges(of.at.workload.m, statistic.across)
    columns = np.searchsorted(edges[1:], of.at.columns, side="right")
    _, rows, heights = np.unique(_cell_rows(statistic, of.at), return_inverse=True, return_counts=True)
    cells = np.zeros((*of.weights.shape[:2], heights.size, statistic.across), of.weights.dtype)
    reduce: Any = np.maximum if statistic.how == "max" else np.add
    reduce.at(cells, (slice(None), slice(None), rows[:, None], columns), of.weights)
    return cells if statistic.how == "max" else cells / np.outer(heights, np.diff(edges)).astype(cells.dtype)


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
"""For each statistic by name: its definition, and a function that selects the sampled positions from its arrays."""
