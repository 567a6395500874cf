"""Check the results of a timed library against the float64 definition, with the error budget of `reference.accuracy`.

A problem too large for a dense computation is checked in samples. Of the output, random rows of the first and of the
last head are checked. The sample has all keys that the mask allows for any of these rows. Of the gradients, the whole
last head is checked, because the gradient of a key sums over all queries whose d_output is not 0. A long d_output is
sampled (`Inputs.with_sampled_d_output`). In a sample, formulas and dropout read the i, j and h of the whole problem.

A statistic per query is checked for the sampled queries, a pooled statistic in some whole rows of cells, and a
statistic per key for the last head with all its queries. The definitions of statistics in this file use dense matrices
and share no code with `sightline.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.arrays.operations import resolve_dtype
from sightline.formula.evaluate_array import evaluate
from sightline.formula.expression import Expression
from sightline.formula.library import bias
from sightline.problem.problem import Problem
from sightline.reference import definition as reference
from sightline.reference.accuracy import (
    LOOP_ORDERS,
    budget_used,
    compute_baseline,
    dense_attention,
    gradient_term_sizes,
    summation_orders,
    term_sizes,
)
from sightline.reference.dropout import keep_factor
from sightline.statistics import Pooled, Received, Statistic

from .cases import SEED

if TYPE_CHECKING:
    from .workloads import Inputs, Workload

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLED_ROWS = 64  # number of queries that are checked in each sampled head
INPUT_NAMES = ("query", "key", "value")
LOG_STATISTICS = ("lse", "max_score")  # statistics whose errors grow with the scores, not with the statistic itself


@dataclass(frozen=True, eq=False)
class SampledProblem(Problem):
    """Some heads, queries (rows) and keys (columns) of a workload, with their positions in the workload."""

    whole: Workload
    heads: Array
    rows: Array
    columns: Array

    def positions(self, xp: Any, rows: slice, columns: slice) -> tuple[Any, Any, Any, Any]:
        """Return b, h, i and j in the whole workload, as arrays that broadcast against each other."""

        def at(array: Any, *shape: int) -> Any:
            return xp.reshape(xp.asarray(array, dtype=xp.int64), shape)

        b = at(np.arange(self.B), *self.batch_shape, 1, 1, 1)
        h, i = at(self.heads, self.H, 1, 1), at(self.rows[rows], -1, 1)
        return b, h, i, at(self.columns[columns], -1)


def share_of_budget(workload: Workload, inputs: Inputs, results: dict[str, Any]) -> float:
    """Return the largest share of a rounding-error budget that any of the results uses; correct results use at most 1.

    Parameters
    ----------
    results : the contender's results by name, as `cases.Results`
        "output" is (B, H, n, d_v). Backward passes add the gradients "query", "key", "value" and, with a bias, "bias".
        These arrays are float32 and hold numbers of the workload's dtype. The repr of each statistic of `see` names
        the tuple of that statistic's arrays.
    """
    kind = resolve_dtype(np, workload.dtype)
    shape = (workload.B, workload.H, workload.n, workload.d_v)
    if results["output"].shape != shape:
        raise ValueError(f"the output has the shape {results['output'].shape}, expected {shape}")
    problem = sample(workload, inputs)
    stages, output = _reference_stages(problem), results["output"][:, problem.heads][:, :, problem.rows].astype(kind)
    baseline = compute_baseline(problem).output
    shares = [budget_used(output, stages.output, baseline, term_sizes(problem, stages.weights))]
    if workload.tangents:
        shares.append(budget_used(results["tangent"].astype(kind), *_expected_tangent(workload, inputs)))
    elif workload.passes == "forward":
        shares += [_statistic_share(workload, inputs, each, results[repr(each)]) for each in workload.see]
    else:
        for name, (truth, rough, size) in _expected_gradients(workload, inputs).items():
            shares.append(budget_used(results[name][:, -1:].astype(kind), truth, rough, size))  # only the last head
    return max(shares)


def sample(workload: Workload, inputs: Inputs, queries: Array | None = None, heads: int = 2) -> SampledProblem:
    """Return a part of a workload as a problem: some queries of the last head, and of the first if `heads` is 2.

    The queries are the given ones; if `queries` is None, `SAMPLED_ROWS` random queries are taken.
    """
    rng, kind = np.random.default_rng(SEED), resolve_dtype(np, workload.dtype)
    head_indices = np.unique([0, workload.H - 1] if heads > 1 else [workload.H - 1])
    i = np.sort(rng.choice(workload.n, min(SAMPLED_ROWS, workload.n), replace=False)) if queries is None else queries
    mask, b, j = workload.formula, np.arange(workload.B)[:, None, None, None], np.arange(workload.m)
    if mask is not None:
        allowed = evaluate_at(mask, workload.n, workload.m, b=b, h=head_indices[:, None, None], i=i[:, None], j=j)
        shape = (workload.B, head_indices.size, i.size, j.size)
        j = np.flatnonzero(np.broadcast_to(allowed, shape).any((0, 1, 2)))
    group = workload.H // workload.G
    key, value = (array[:, head_indices // group][:, :, j].astype(kind) for array in (inputs.key, inputs.value))
    score = workload.score.formula(workload.H) if workload.score else None
    return SampledProblem(
        inputs.query[:, head_indices][:, :, i].astype(kind),
        key,
        value,
        mask=mask,
        score=score if inputs.bias is None else bias(inputs.bias.astype(kind)),
        sinks=None,
        scale=float(1 / np.sqrt(workload.d_k)),
        dropout=workload.dropout,
        seed=workload.seed,
        see=(),
        heads_squeezed=False,
        whole=workload,
        heads=head_indices,
        rows=i,
        columns=j,
    )


def evaluate_at(formula: Expression, n: int, m: int, **symbols: Any) -> Any:
    """Return the values of a formula, as a bool or float64 array.

    `symbols` are arrays of those symbols b, h, i, j and s that the formula reads; they broadcast against each other.
    """
    symbols = {name: np.asarray(value) for name, value in symbols.items()} | {"n": n, "m": m}
    return evaluate(formula, symbols, xp=np, float_dtype=np.dtype("float64"), like=symbols["i"])


def _reference_stages(problem: SampledProblem) -> reference.Stages:
    """Return the stages of attention, scores to output, that the float64 definition computes on a sample."""
    rows, columns = slice(0, problem.n), slice(0, problem.m)
    at = dict(zip("bhij", problem.positions(np, rows, columns), strict=True))

    def value(formula: Any, **more: Any) -> Any:
        return evaluate_at(formula, problem.n, problem.m, **at, **more)

    return reference.forward(
        problem.query,
        problem.key,
        problem.value,
        scale=problem.scale,
        score=lambda scaled: scaled if problem.score is None else value(problem.score, s=scaled),
        allowed=True if problem.mask is None else value(problem.mask),
        keep=keep_factor(problem, np, rows, columns, np.float64),
    )


@lru_cache(maxsize=2)  # all contenders of a workload share one computation of the gradients
def _expected_gradients(workload: Workload, inputs: Inputs) -> dict[str, tuple[Array, Array, Array]]:
    """Return for each input, by name, (true gradients, rough gradients, sizes of the summed terms) of the last head.

    The rough gradients are computed in the workload's dtype. Their first axis is the order of summation.
    """
    assert inputs.d_output is not None
    assert workload.G == workload.H  # so the gradient of a key head sums over one query head only
    n, m, narrow = workload.n, workload.m, resolve_dtype(np, workload.dtype)
    shapes = {"query": (n, workload.d_k), "key": (m, workload.d_k), "value": (m, workload.d_v)}
    shapes |= {"bias": (n, m)} if workload.bias else {}
    rows = np.flatnonzero(inputs.d_output[:, -1].any((0, -1)))  # queries whose d_output is not 0
    problem = sample(workload, inputs, rows, heads=1)
    seed = inputs.d_output[:, problem.heads][:, :, rows]
    sizes = gradient_term_sizes(problem, seed, stages=_reference_stages(problem))
    truth = _differentiate(problem, list(shapes), seed, "float64", 0)
    # the other orders of summation are loops, which take minutes at a benchmark's lengths
    rough = [_differentiate(problem, list(shapes), seed, problem.dtype, order) for order in (0, 1)]
    places: dict[str, Any] = {"query": rows, "bias": slice(None)}  # the gradient of a bias has all n rows

    def whole(name: str, part: Array) -> Array:
        """Return the gradient of the last head with zeros at positions outside the sample."""
        array = np.zeros((workload.B, 1, *shapes[name]), part.dtype)
        array[..., places.get(name, problem.columns), :] = part[:, -1:]
        return array

    return {
        name: (
            whole(name, truth[name]),
            np.stack([whole(name, each[name]).astype(narrow) for each in rough]),
            whole(name, sizes[0 if name == "bias" else name]),  # the bias is the only table
        )
        for name in shapes
    }


def _differentiate(
    problem: SampledProblem, names: Sequence[str], seed: Array, dtype: str, order: int
) -> dict[str, Array]:
    """Return the gradients of the named inputs by torch.autograd, through the dense computation rounded to `dtype`.

    `seed` is d_output, and `order` is the order of summation of the dense computation.
    """
    import torch

    wide = torch.float64 if dtype == "float64" else getattr(torch, problem.accumulator)

    def leaf(array: Array) -> Any:
        return torch.from_numpy(np.asarray(array, np.float32)).to(wide).requires_grad_()

    arrays = {name: leaf(getattr(problem, name)) for name in INPUT_NAMES}
    tables = {"bias": leaf(problem.tables[0].array)} if "bias" in names else {}
    differentiated = problem.with_tables(list(tables.values())) if tables else problem
    output, _, _ = dense_attention(replace(differentiated, **arrays), dtype, order)
    d_output = torch.from_numpy(seed).to(output.dtype)
    leaves = arrays | tables
    gradients = torch.autograd.grad(output, [leaves[name] for name in names], d_output)
    return {name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)}


@lru_cache(maxsize=1)
def _expected_tangent(workload: Workload, inputs: Inputs) -> tuple[Array, Array]:
    """Return the true tangent of the output, and the tangent of the dense computation in float32."""
    import torch

    def tangent(dtype: Any) -> Array:
        given = {name: torch.from_numpy(getattr(inputs, name)).to(dtype) for name in INPUT_NAMES}
        directions = tuple(torch.from_numpy(array).to(dtype) for array in inputs.tangents)

        def attend(*operands: Any) -> Any:
            query, key, value = (given | dict(zip(workload.tangents, operands, strict=True))).values()
            return (query @ key.mT / workload.d_k**0.5).softmax(-1) @ value

        found: Any = torch.func.jvp(attend, tuple(given[name] for name in workload.tangents), directions)
        return np.asarray(found[1].numpy())

    return tangent(torch.float64), tangent(torch.float32)


# -- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightMatrix:
    """The weights and the scores at sampled positions, each (B, heads, rows, columns)."""

    at: SampledProblem
    weights: Array
    scores: Array  # the scores of hidden pairs are −∞
    lse: Array  # (B, heads, rows)
    is_sequential: bool = False  # True if `sum` adds term by term, as kernels do, instead of pairwise

    def sum(self, array: Array, axis: int) -> Array:
        if not self.is_sequential:
            return np.asarray(array.sum(axis))
        return np.asarray(np.take(np.cumsum(array, axis=axis, dtype=array.dtype), -1, axis=axis))


def _statistic_share(workload: Workload, inputs: Inputs, statistic: Statistic, found: Sequence[Array]) -> float:
    """Return the largest share of the rounding-error budget that `found`, a contender's arrays of a statistic, uses.

    If the statistic names keys, the true scores or weights at these keys are checked in place of the keys.
    """
    truth, expected, rough = _expected_statistic(workload, inputs, statistic)
    values, *where = (_select(array, statistic, truth.at) for array in found)
    shares = []
    for array in (values, *(_look_up(keys, statistic, truth) for keys in where)):
        given = array.astype(rough.dtype)
        if statistic.name in LOG_STATISTICS:
            shares.append(budget_used(given.ravel(), expected.ravel(), rough.reshape(len(rough), -1), np.float64(1)))
        else:
            shares.append(budget_used(given, expected, rough))
    return max(shares)


@lru_cache(maxsize=8)  # all contenders of a workload share one computation of a statistic
def _expected_statistic(workload: Workload, inputs: Inputs, statistic: Statistic) -> tuple[WeightMatrix, Array, Array]:
    """Return (true weights and scores, their true statistic, the statistic by dense computations in the accumulator).

    The last array has the accumulator's dtype. Its first axis is the order of summation.
    """
    problem = sample(
        workload, inputs, queries_to_check(statistic, workload), 1 if isinstance(statistic, Received) else 2
    )
    stages, define, rough = _reference_stages(problem), DEFINITIONS[statistic.name], list[Array]()
    query, key = (np.asarray(x, problem.accumulator) for x in (problem.query, problem.key))
    products = query @ key.swapaxes(-1, -2)  # a sample has one key head for each query head
    scores = np.where(np.isneginf(stages.masked), -np.inf, products * products.dtype.type(problem.scale))
    for order in summation_orders(problem):
        if order not in LOOP_ORDERS:  # a summation in loops takes minutes
            _, lse, weights = dense_attention(problem, problem.accumulator, order)
            rough.append(define(statistic, WeightMatrix(problem, weights, scores, lse, order % 2 == 1)))
    truth = WeightMatrix(problem, stages.weights, stages.masked, stages.lse)
    return truth, define(statistic, truth), np.stack(rough)


def _select(array: Array, statistic: Statistic, at: SampledProblem) -> Array:
    """Return the part of a contender's array of a statistic that belongs to the sample."""
    of_heads = array[:, at.heads]
    if isinstance(statistic, Received):
        return of_heads[..., at.columns]
    return of_heads[:, :, np.unique(_cell_rows(statistic, at)) if isinstance(statistic, Pooled) else at.rows]


def _look_up(where: Array, statistic: Statistic, truth: WeightMatrix) -> Array:
    """Return the true scores (`max_score`) or weights (`top_k`) at the key positions in `where`.

    The result is NaN at a key outside the sample. At position −1, which means no key, it is the score −∞ or weight 0.
    """
    matrix, missing = (truth.scores, -np.inf) if statistic.name == "max_score" else (truth.weights, 0.0)
    columns, keys = truth.at.columns, where.astype(np.int64).reshape(*matrix.shape[:-1], -1)
    index = np.minimum(np.searchsorted(columns, keys), columns.size - 1)
    values = np.where(columns[index] == keys, np.take_along_axis(matrix, index, axis=-1), np.nan)
    return np.where(keys == -1, missing, values).reshape(where.shape)


def queries_to_check(statistic: Statistic, workload: Workload) -> Array | None:
    """Return the queries that are needed to check a statistic; None if random queries suffice.

    A statistic per key needs all queries. A pooled statistic needs whole rows of cells, which together have about
    `SAMPLED_ROWS` queries.
    """
    if isinstance(statistic, Received):
        return np.arange(workload.n)
    if not isinstance(statistic, Pooled):
        return None
    edges = _edges(workload.n, statistic.down)
    count = max(SAMPLED_ROWS * statistic.down // workload.n, 1)
    cells = np.random.default_rng(SEED).choice(statistic.down, min(count, statistic.down), replace=False)
    return np.concatenate([np.arange(edges[r], edges[r + 1]) for r in np.sort(cells)])


def _edges(length: int, cells: int) -> Array:
    """Return the first position of every pooled cell along an axis, followed by the length of the axis."""
    return np.arange(cells + 1) * length // cells


# -- definitions -------------------------------------------------------------------------------------------------------


def _entropy(_: Statistic, of: WeightMatrix) -> Array:
    p = of.weights
    return of.sum(-p * np.log(np.where(p > 0, p, np.ones_like(p))), -1)


def _mass(statistic: Any, of: WeightMatrix) -> Array:
    heads, rows, size = of.at.heads[:, None, None], of.at.rows[:, None], (of.at.whole.n, of.at.whole.m)
    counted = evaluate_at(statistic.mask, *size, b=0, h=heads, i=rows, j=of.at.columns)
    return of.sum(np.where(counted, of.weights, np.zeros_like(of.weights)), -1)


def _top_k(statistic: Any, of: WeightMatrix) -> Array:
    weights = np.where(np.isneginf(of.scores), np.zeros_like(of.weights), of.weights)
    return -np.sort(-weights, axis=-1)[..., : statistic.k]


def _received(statistic: Any, of: WeightMatrix) -> Array:
    if statistic.how == "max":
        return np.asarray(of.weights.max(-2))
    total = of.sum(of.weights, -2)
    return total / of.at.whole.n if statistic.how == "mean" else total


def _cell_rows(statistic: Any, at: SampledProblem) -> Array:
    """Return for each sampled query the index of its row of pooled cells."""
    return np.searchsorted(_edges(at.whole.n, statistic.down)[1:], at.rows, side="right")


def _pooled(statistic: Any, of: WeightMatrix) -> Array:
    edges = _edges(of.at.whole.m, statistic.across)
    columns = np.searchsorted(edges[1:], of.at.columns, side="right")
    _, rows, heights = np.unique(_cell_rows(statistic, of.at), return_inverse=True, return_counts=True)
    cells = np.zeros((*of.weights.shape[:2], heights.size, statistic.across), of.weights.dtype)
    reduce: Any = np.maximum if statistic.how == "max" else np.add
    reduce.at(cells, (slice(None), slice(None), rows[:, None], columns), of.weights)
    return cells if statistic.how == "max" else cells / np.outer(heights, np.diff(edges)).astype(cells.dtype)


# the definition of each statistic by name, as a function of the statistic and of weights and scores
DEFINITIONS: dict[str, Callable[[Any, WeightMatrix], Array]] = {
    "lse": lambda _, of: of.lse,
    "max_score": lambda _, of: np.asarray(of.scores.max(-1)),
    "entropy": _entropy,
    "mass": _mass,
    "top_k": _top_k,
    "received": _received,
    "pooled": _pooled,
}
