"""The dense definition of every statistic, and the check of a kernel's statistics against the definitions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import sightline
from sightline.arrays.operations import dtype_name, namespace, to_numpy
from sightline.call.problem import Problem
from sightline.formula.evaluate_array import evaluate_at, evaluate_dense
from sightline.reference.accuracy import dense_attention, summation_orders
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from sightline.statistics import arrays_of, solve_selections_separately
from strategies import Case, generators, masks, scores


@dataclass(frozen=True)
class Dense:
    """The dense matrices that statistics are computed from, in NumPy or torch, and the summation order."""

    weights: Any  # (*batch, H, n, m)
    scores: Any  # (*batch, H, n, m), after the score formula, −∞ where hidden
    lse: Any  # (*batch, H, n)
    problem: Problem
    rows: Any = field(default_factory=lambda: slice(None))  # the problem's rows that the matrices have
    heads: Any = field(default_factory=lambda: slice(None))
    loop: bool = False  # add term by term, as kernels do, instead of pairwise

    def sum(self, array: Any, axis: int) -> Any:
        if not self.loop or array.shape[axis] == 0:
            return array.sum(axis)
        return np.take(np.cumsum(array, axis=axis, dtype=array.dtype), -1, axis=axis)

    def positions(self, formula: Any) -> Any:
        """Return a formula's values at these rows and heads."""
        problem, shape = self.problem, tuple(self.weights.shape)
        B, H, n, m = problem.extent
        b, h, i = (
            np.arange(count).reshape(-1, *[1] * (3 - axis))[own]
            for axis, (count, own) in enumerate(((B, slice(None)), (H, self.heads), (n, self.rows)))
        )
        b = b.reshape(*problem.batch_shape, 1, 1, 1)
        read = {"s": lambda: np.where(np.isneginf(self.scores), 0.0, self.scores), "p": lambda: self.weights}
        given = {name: read[name]() for name in formula.free_symbols & {"s", "p"}}
        return np.broadcast_to(evaluate_at(formula, b=b, h=h, i=i, j=np.arange(m), n=n, m=m, **given), shape)


def defined(statistic: Any, of: Dense) -> tuple[Any, ...]:
    """Return the arrays of a statistic by its definition."""
    name = "reduction" if statistic.name in REDUCTIONS else statistic.name
    return DEFINITIONS[name](statistic, of)


def _max_score(_: Any, of: Dense) -> tuple[Any, ...]:
    if not of.problem.m:
        return of.lse + -np.inf, np.full(of.lse.shape, -1)
    largest = namespace(of.scores).max(of.scores, axis=-1)
    return largest, np.where(to_numpy(largest) == -np.inf, -1, to_numpy(of.scores).argmax(-1))


def _entropy(_: Any, of: Dense) -> tuple[Any, ...]:
    xp, p = namespace(of.weights), of.weights
    return (of.sum(-p * xp.log(xp.where(p > 0, p, xp.ones_like(p))), -1),)


def _top_k(statistic: Any, of: Dense) -> tuple[Any, ...]:
    p = np.where(np.isneginf(of.scores), -1.0, of.weights)
    p = np.concatenate([p, np.full((*p.shape[:-1], statistic.k), -1.0)], axis=-1)
    order = np.argsort(-p, axis=-1, kind="stable")[..., : statistic.k]
    found = np.take_along_axis(p, order, axis=-1)
    return np.maximum(found, 0.0).astype(of.weights.dtype), np.where(found < 0, -1, order)


def _mass(statistic: Any, of: Dense) -> tuple[Any, ...]:
    xp = namespace(of.weights)
    return (of.sum(xp.where(xp.asarray(of.positions(statistic.formula).copy()), of.weights, 0.0 * of.weights), -1),)


def _received(statistic: Any, of: Dense) -> tuple[Any, ...]:
    xp, p = namespace(of.weights), of.weights
    if statistic.how == "max" and p.shape[-2]:
        return (xp.max(p, axis=-2),)
    return (of.sum(p, -2) / (max(p.shape[-2], 1) if statistic.how == "mean" else 1),)


def _pooled(statistic: Any, of: Dense) -> tuple[Any, ...]:
    xp, (n, m) = namespace(of.weights), of.weights.shape[-2:]
    (i0, i1), (j0, j1) = statistic.within or ((0, n), (0, m))
    down, across = min(statistic.cells[0], i1 - i0), min(statistic.cells[1], j1 - j0)
    if 0 in (down, across):
        return (xp.zeros((*of.weights.shape[:-2], down, across), dtype=of.weights.dtype),)
    rows = [i0 + r * (i1 - i0) // down for r in range(down + 1)]
    columns = [j0 + c * (j1 - j0) // across for c in range(across + 1)]
    lines = []
    for top, bottom in itertools.pairwise(rows):
        line = []
        for left, right in itertools.pairwise(columns):
            cell = of.weights[..., top:bottom, left:right]
            cell = xp.reshape(cell, (*cell.shape[:-2], (bottom - top) * (right - left)))
            count = cell.shape[-1] if statistic.how == "mean" else 1
            line.append(EXTREMA[statistic.how](cell, axis=-1) if statistic.how in EXTREMA else of.sum(cell, -1) / count)
        lines.append(xp.stack(line, axis=-1))
    return (xp.stack(lines, axis=-2),)


def _reduction(statistic: Any, of: Dense) -> tuple[Any, ...]:
    """Return the sum, maximum or minimum of a formula of p, s and positions; hidden pairs take no part.

    If a query has a score that is NaN, its weights are NaN, also at hidden pairs.
    """
    how, is_hidden = statistic.name, np.isneginf(of.scores) & ~np.isnan(of.weights)
    empty = {"sum": 0.0, "max": -np.inf, "min": np.inf}[how]
    entries = np.where(is_hidden, empty, of.positions(statistic.formula)).astype(of.weights.dtype)
    if statistic.axes == "ij":
        if statistic.cells:
            return _pooled(replace(statistic, how=how), replace(of, weights=entries))
        entries, axis = entries.reshape(*entries.shape[:-2], -1), -1
    elif statistic.axes:
        axis = {"i": -2, "j": -1}[statistic.axes]
    else:
        return (entries,)
    if how == "sum":
        return (of.sum(entries, axis),)
    found = EXTREMA[how](entries, axis=axis, initial=empty)
    if statistic.axes == "ij":
        return (found,)
    sign = 1 if how == "max" else -1
    where = (sign * entries).argmax(axis) if entries.shape[axis] else np.zeros(found.shape, int)
    return found, np.where(is_hidden.all(axis), -1, where)


def _weighted_sum(statistic: Any, of: Dense) -> tuple[Any, ...]:
    problem, xp = of.problem, namespace(of.weights)
    x = xp.asarray(statistic.x, dtype=of.weights.dtype)
    if x.ndim > 2:
        x = xp.repeat(x, problem.group, axis=-3)[..., of.heads, :, :]
    return (of.weights @ x,)


def _part(statistic: Any, of: Dense) -> tuple[Any, ...]:
    rows, heads = (
        slice(None) if given is None else np.arange(count)[given if isinstance(given, slice) else list(given)]
        for given, count in ((statistic.queries, of.problem.n), (statistic.query_heads, of.problem.H))
    )

    def matrix(array: Any) -> Any:
        return array[..., heads, :, :][..., rows, :]

    return defined(
        statistic.of,
        replace(
            of,
            weights=matrix(of.weights),
            scores=matrix(of.scores),
            lse=of.lse[..., heads, :][..., rows],
            rows=rows,
            heads=heads,
        ),
    )


def _mean(statistic: Any, of: Dense) -> tuple[Any, ...]:
    (found,), lead = defined(statistic.of, of), len(of.problem.batch_shape)
    axes = tuple(range(lead)) * statistic.over_batch + (lead,) * statistic.over_heads
    averaged = [axis for axis in axes if axis != lead or statistic.factors is None]
    count = max(int(np.prod([found.shape[axis] for axis in averaged])), 1)
    if isinstance(statistic.factors, tuple):
        xp = namespace(found)
        factors = xp.asarray(statistic.factors, dtype=found.dtype)
        found = xp.reshape(factors, (-1, *[1] * (found.ndim - lead - 1))) * found
    for axis in sorted(axes, reverse=True):
        found = of.sum(found, axis)
    return (found / count,)


EXTREMA: dict[str, Any] = {"max": np.max, "min": np.min}
REDUCTIONS = ("sum", *EXTREMA)
DEFINITIONS = {
    "lse": lambda _, of: (of.lse,),
    "max_score": _max_score,
    "entropy": _entropy,
    "top_k": _top_k,
    "mass": _mass,
    "received": _received,
    "pooled": _pooled,
    "weights": lambda _, of: (of.weights,),
    "scores": lambda _, of: (of.scores,),
    "weighted_sum": _weighted_sum,
    "reduction": _reduction,
    "selection": _part,
    "mean": _mean,
}


# -- the check ---------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def plain_scores(problem: Problem, order: int) -> Any:
    """Return the scores in the accumulator's dtype, with products summed in this order, score formula and mask."""
    wide, shuffled = np.dtype(problem.accumulator), np.random.default_rng(order).permutation(problem.d_k)
    query, key = (to_numpy(x).astype(wide)[..., shuffled] for x in (problem.query, problem.key))
    key = np.repeat(key, problem.group, axis=-3)
    if order % 2:
        products = sum((query[..., :, None, k] * key[..., None, :, k] for k in range(problem.d_k)), start=wide.type(0))
    else:
        products = query @ key.swapaxes(-1, -2)
    s = (products * wide.type(problem.scale)).astype(wide)
    if problem.score is not None:
        s = evaluate_dense(problem.score, problem.extent, s.reshape(problem.extent)).reshape(s.shape).astype(wide)
    if problem.mask is not None:
        s = np.where(evaluate_dense(problem.mask, problem.extent).reshape(s.shape), s, -np.inf)
    return s


def oracle(problem: Problem) -> Dense:
    stages = compute_stages(problem)
    return Dense(stages.weights, stages.masked, stages.lse, problem)


def roughs(problem: Problem, dtype: str) -> list[Dense]:
    """Return the plain computation in several summation orders, in the dtype of a statistic."""
    found = []
    for order in summation_orders(problem):
        _, lse, weights = (to_numpy(x) for x in dense_attention(problem, dtype, order))
        weights, scores = weights.astype(problem.accumulator), plain_scores(problem, order)
        found.append(Dense(weights, scores, lse, problem, loop=order % 2 == 1))
    return found


def usable(problem: Problem) -> bool:
    """True if softmax is defined: no score is NaN or +∞."""
    stages = compute_stages(problem)
    return not (np.isnan(stages.weights).any() or np.isposinf(stages.masked).any())


LOGARITHMS = {"lse", "scores", "max_score"}  # their errors grow with the size of the scores


def kind(statistic: Any) -> str:
    """Return the name of the statistic inside a part or mean."""
    return kind(statistic.of) if hasattr(statistic, "of") else statistic.name


def check(run: Any, problem: Problem) -> None:
    """Raise AssertionError unless every statistic of the problem is within its rounding-error budget."""
    check_results(problem, problem.see, solve_selections_separately(problem, run).seen)


def check_results(problem: Problem, see: Any, seen: Any, has_exact_lse: bool = False) -> None:
    """Raise AssertionError unless the results `seen` of the statistics `see` are within their budgets.

    `has_exact_lse` is True if they were computed from the definition's lse. The relative error of a weight is then the
    absolute error of its score, which is as large as the score.
    """
    truth, plain = oracle(problem), {}
    sizes = truth
    if has_exact_lse:
        error = np.maximum(np.abs(np.where(np.isfinite(truth.lse), truth.lse, 0.0)), 1.0)
        sizes = replace(truth, weights=truth.weights * error[..., None])
        # in float64, a sum of equal terms in the order of the queries is several ulps off
        truth = replace(truth, weights=truth.weights.astype(np.longdouble))
    for statistic, entry in zip(see, seen, strict=True):
        found = arrays_of(entry)
        expected = defined(statistic, truth)
        outputs = statistic.outputs(problem)
        for array, (shape, dtype) in zip(found, outputs, strict=True):
            assert (tuple(array.shape), dtype_name(array)) == (shape, dtype), f"{statistic} has a wrong shape or dtype"
        dtype = outputs[0][1]
        if dtype not in plain:
            plain[dtype] = roughs(problem, dtype)
        rough = [defined(statistic, one)[0] for one in plain[dtype]]
        may_cancel = kind(statistic) in ("weighted_sum", *REDUCTIONS) or isinstance(
            getattr(statistic, "factors", 0), tuple
        )
        terms = defined(of_sizes(statistic), sizes)[0] if may_cancel or has_exact_lse else None
        judge(statistic, found[0], expected[0], rough, terms)
        if len(found) > 1:
            check_places(statistic, found, expected, rough, truth, terms)


def of_sizes(statistic: Any) -> Any:
    """Return a statistic with |x|, |f| and |w| in place of x, f and weights of heads: the sizes of terms."""
    if isinstance(getattr(statistic, "factors", None), tuple):
        statistic = replace(statistic, factors=tuple(map(abs, statistic.factors)))
    if hasattr(statistic, "of"):
        return replace(statistic, of=of_sizes(statistic.of))
    if statistic.name in REDUCTIONS:
        return replace(statistic, formula=abs(statistic.formula))
    return replace(statistic, x=abs(statistic.x)) if statistic.name == "weighted_sum" else statistic


def judge(statistic: Any, found: Any, expected: Any, rough: Any, terms: Any = None) -> None:
    if kind(statistic) in LOGARITHMS:
        found, expected, terms = found.reshape(-1), np.asarray(expected).reshape(-1), 1.0
    assert_within_budget(found, expected, np.stack(rough), str(statistic), terms)


def check_places(statistic: Any, found: Any, expected: Any, rough: Any, truth: Dense, terms: Any) -> None:
    """Check keys: their true values equal the results within the budget, none occurs twice, −1 if there is no key."""
    where = to_numpy(found[1])
    assert np.array_equal(where < 0, expected[1] < 0), f"{statistic} finds keys where none is seen: out of its budget"
    if statistic.name == "selection":
        return
    index, matrix = np.maximum(where, 0), truth.scores if statistic.name == "max_score" else truth.weights
    axis = -2 if getattr(statistic, "axes", "j") == "i" else -1
    if statistic.name in REDUCTIONS:
        matrix = np.broadcast_to(truth.positions(statistic.formula), truth.weights.shape)
    if matrix.shape[axis]:
        wide = index if statistic.name == "top_k" else np.expand_dims(index, axis)
        there = np.take_along_axis(matrix, wide, axis=axis).reshape(index.shape)
        there = np.where(where < 0, expected[0], there).astype(dtype_name(found[0]))
        judge(statistic, there, expected[0], rough, terms)
    if statistic.name == "top_k":
        seen = np.take_along_axis(truth.scores > -np.inf, index, axis=-1) if matrix.shape[-1] else where < 0
        assert (seen | (where < 0)).all(), f"{statistic} finds a hidden key: out of its budget"
        places = np.sort(np.where(where < 0, -1 - np.arange(statistic.k), where), axis=-1)
        assert (np.diff(places, axis=-1) > 0).all(), f"{statistic} finds a key twice: out of its budget"


KEYS = np.arange(150)
EQUAL_WEIGHTS = {  # by name: different scores of `KEYS`, the logit of a sink, the keys of larger weight
    "underflow, ascending": (np.where(KEYS == 37, 0.0, KEYS - 2000.0), -np.inf, [37]),
    "underflow, in no order": (np.where(KEYS % 70 == 37, -KEYS, -2000.0 - KEYS * 67 % 113), -np.inf, [37, 107]),
    "a sink with all the weight": (-2000.0 - KEYS * 67 % 113, 0.0, []),
    "rounding": ((KEYS * 67 % 113) * 1e-20, -np.inf, []),
}


def check_equal_weights(run: Any, name: str, dtype: str, by_formula: bool) -> None:
    """Check that `top_k` lists keys of equal weight in ascending order, 0 and rounded weights included.

    The scores come from a score formula if `by_formula`, else from products.
    """
    logits, sink, largest = EQUAL_WEIGHTS[name]
    query, key = np.ones((1, 1, 20, 1), dtype), np.zeros((1, 1, KEYS.size, 1), dtype)
    if not by_formula:
        key[..., 0] = logits
    score = sightline.table(logits)[sightline.j] + sightline.s if by_formula else None
    mask = (sightline.i < 3) | (sightline.j % 9 != 4)
    options = {"mask": mask, "score": score, "scale": 1.0, "sinks": np.array([sink])}
    problem = Case(query, key, key, options).as_torch().make_problem(see=[sightline.top_k(9)])
    ((weights, where),) = run(problem).seen
    visible = problem.mask.array(20, KEYS.size)
    rest = [j for j in KEYS.tolist() if j not in largest]
    expected = [[j for j in (*largest, *rest) if row[j]][:9] for row in visible]
    np.testing.assert_array_equal(to_numpy(where)[0, 0], expected)
    assert (np.diff(to_numpy(weights)) <= 0).all()
    found = np.isin(to_numpy(where), largest) | (name == "rounding")
    np.testing.assert_array_equal(to_numpy(weights) > 0, found)


# -- drawn statistics --------------------------------------------------------------------------------------------------


@st.composite
def statistics(draw: Any, problem: Problem) -> list[Any]:
    """One statistic of each kind, with drawn parameters, the mean of one, and a sum over heads of another."""
    n, m, rng = problem.n, problem.m, draw(generators())
    see = [
        sightline.lse(),
        sightline.max_score(),
        sightline.entropy(),
        sightline.top_k(draw(st.integers(1, 6))),
        sightline.mass(draw(masks(problem.extent))),
        sightline.sum(sightline.p * draw(scores(problem.extent, hides=False)), over=sightline.j),
        sightline.received(draw(st.sampled_from(["sum", "mean", "max"]))),
        sightline.weights(),
        sightline.scores(),
    ]
    see += [draw(reductions(problem)) for _ in range(2)]
    if n and m:
        (i0, i1), (j0, j1) = (sorted(rng.integers(0, count + 1, 2).tolist()) for count in (n, m))
        within = ((i0, i1), (j0, j1)) if i0 < i1 and j0 < j1 else None
        cells = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        see.append(sightline.pooled(*cells, draw(st.sampled_from(["mean", "max"])), within))
    means = [one for one in see if len(one.fill_values) == 1]
    see.append(draw(st.sampled_from(means)).mean(draw(st.sampled_from(["heads", "batch"]))))
    if problem.H:
        of = draw(st.sampled_from([one for one in means if one.name != "scores"]))
        of = of.mean("batch") if draw(st.booleans()) else of
        see.append(of.sum("heads", weights=draw(st.sampled_from([None, rng.normal(size=problem.H)]))))
    return see


@st.composite
def reductions(draw: Any, problem: Problem) -> Any:
    """A sum, maximum or minimum of a drawn formula of the weight, the score and the pair, over drawn axes."""
    p, i, j, rng = sightline.p, sightline.i, sightline.j, draw(generators())
    factor = draw(scores(problem.extent, hides=False))
    chosen = [p, p * p, p * factor, factor, sightline.where(abs(i - j) > 1, p, 0.5), p + sightline.h, np.sqrt(p), i * j]
    how = draw(st.sampled_from(REDUCTIONS))
    over = draw(st.sampled_from(["j", "i", "ij", ""]))
    cells = {"cells": tuple(rng.integers(1, 9, 2).tolist())} if over == "ij" and draw(st.booleans()) else {}
    axes = tuple([{"i": i, "j": j}[name] for name in over])
    return getattr(sightline, how)(draw(st.sampled_from(chosen)), over=axes, **cells)


@st.composite
def parts(draw: Any, problem: Problem) -> list[Any]:
    """Statistics that are solved as separate problems: parts, means of parts, weighted sums."""
    rng = draw(generators())
    grouped = () if problem.heads_squeezed or draw(st.booleans()) else (problem.G,)
    x = rng.normal(size=(*grouped, problem.m, draw(st.integers(1, 3)))).astype(problem.query.dtype)
    product = sightline.weighted_sum(x.astype(draw(st.sampled_from([np.float64, np.float32]))))
    of = draw(st.sampled_from([sightline.weights(), sightline.entropy(), sightline.received("mean"), product]))
    if problem.n:
        of = of.rows(draw(st.sampled_from([[-1, 0, 0], slice(-3, None), slice(None, None, -2), [0]])))
    if problem.H and not problem.heads_squeezed and draw(st.booleans()):
        of = of.heads(rng.integers(-problem.H, problem.H, draw(st.integers(1, 3))).tolist())
    last = sightline.received(draw(st.sampled_from(["sum", "max"])), last=draw(st.integers(1, 9)))
    return [product, of.mean("heads") if draw(st.booleans()) else of, last]
