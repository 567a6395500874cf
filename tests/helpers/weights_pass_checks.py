"""Checks of the weights pass's statistics against the same statistics of dense float64 weights."""

from functools import lru_cache, partial

import numpy as np

from sightline.arrays.operations import dtype_name, to_numpy
from sightline.cpu import Cpu
from sightline.cpu.launch.weights_pass import bind_passes, is_lse_imprecise, run_first
from sightline.cpu.runtime.processor import HOST
from sightline.reference.accuracy import dense_attention, summation_orders
from sightline.reference.definition import compute_stages
from sightline.statistics import Mean, Pooled, Received, TopK, Weights
from sightline.testing import assert_within_budget

# -- one statistic by a pass of its own ------------------------------------------------------------------------------


def compute(problem, lse, statistic, threads, processor):
    """Return the arrays of the statistic; None if streaming must compute it."""
    if 0 in problem.extent and not is_lse_imprecise(problem, lse):  # there is no pass if there is nothing to compute
        return Cpu().run(problem.with_statistics(statistic)).seen[0]
    passes = [] if is_lse_imprecise(problem, lse) else bind_passes(problem, [statistic], processor)
    found = run_first(problem, lse, passes[0], threads) if passes else None
    return None if found is None else tuple(found[0]) if len(found[0]) > 1 else found[0][0]


def received(problem, lse, how="sum", threads=None, processor=HOST):
    return compute(problem, lse, Received(how), threads, processor)


def pooled(problem, lse, rows, columns, how="mean", within=None, threads=None, processor=HOST):
    return compute(problem, lse, Pooled(rows, columns, how, within), threads, processor)


def top_k(problem, lse, k, threads=None, processor=HOST):
    return compute(problem, lse, TopK(k), threads, processor)


def weights(problem, lse, threads=None, processor=HOST):
    return compute(problem, lse, Weights(), threads, processor)


def weight_sums(problem, lse, threads=None, processor=HOST):
    return compute(problem, lse, Mean(True, False, Weights(), head_factors(problem)), threads, processor)


def head_factors(problem):
    return tuple(np.linspace(0.5, 2, problem.H).tolist())


# -- statistics of a dense matrix of weights (..., n, m) -------------------------------------------------------------


def dense_received(p, how="sum"):
    """Return the sum, mean or maximum over the queries; 0 if there are none."""
    if p.shape[-2] == 0:
        return np.zeros((*p.shape[:-2], p.shape[-1]), p.dtype)
    return getattr(p, how)(-2)


def dense_pooled(p, rows, columns, how="mean", within=None):
    (i0, i1), (j0, j1) = within or ((0, p.shape[-2]), (0, p.shape[-1]))
    rows, columns = min(rows, i1 - i0), min(columns, j1 - j0)
    found = np.zeros((*p.shape[:-2], rows, columns), p.dtype)
    for r, c in np.ndindex(rows, columns):
        queries = slice(i0 + r * (i1 - i0) // rows, i0 + (r + 1) * (i1 - i0) // rows)
        keys = slice(j0 + c * (j1 - j0) // columns, j0 + (c + 1) * (j1 - j0) // columns)
        found[..., r, c] = getattr(p[..., queries, keys], how)((-2, -1))
    return found


def dense_sum_over_heads(p, factors):
    return (np.reshape(factors, (-1, 1, 1)).astype(p.dtype) * p).sum(-3)


def largest(p, k):
    """Return the k largest numbers of each row, descending; 0 past the row's end."""
    found = -np.sort(-p, axis=-1)[..., :k]
    return np.concatenate([found, np.zeros((*p.shape[:-1], k - found.shape[-1]), p.dtype)], axis=-1)


def wide(problem):
    return problem.accumulator


def narrow(problem):
    return problem.dtype


@lru_cache(2)
def plain_weights(problem, dtype):
    """Return the weights of the dense computation in several orders of summation, in the accumulator's dtype."""
    found = (dense_attention(problem, dtype, order)[2] for order in summation_orders(problem))
    return [p.astype(problem.accumulator) for p in found]


true = lru_cache(1)(compute_stages)


def check(problem, call, of_dense, lse=None, dtype=wide, threads=2, **options):
    """Check one statistic within its error budget and return the kernel's result, None if a visible score is nonfinite.

    `call` is the function of the weights pass, and `of_dense` computes the statistic from dense weights. If `lse` is
    None, the reference's lse is used. That lse has no rounding of the kernel's scores, so that the relative error of a
    weight is the absolute error of its score.
    """
    found = call(problem, true(problem).lse if lse is None else lse, threads=threads, **options)
    return check_result(problem, found, of_dense, call.__name__, lse is None, dtype)


def check_result(problem, found, of_dense, name, has_true_lse=True, dtype=wide):
    """Check what `check` describes for a result that is already computed. `name` is the statistic's."""
    truth = true(problem)
    sure = np.maximum(np.abs(np.where(np.isfinite(truth.lse), truth.lse, 0.0)), 1.0) if has_true_lse else 1.0
    if np.isnan(truth.lse).any() or (truth.lse == np.inf).any():
        assert found is None
        return None
    values = found[0] if isinstance(found, tuple) else found
    rough = [of_dense(p) for p in plain_weights(problem, dtype(problem))]
    assert dtype_name(values) == dtype(problem)
    sizes = of_dense(truth.weights * np.reshape(sure, (*np.shape(sure), 1)))
    # in float64, a sum of equal terms in the order of the queries is several ulps off
    oracle = of_dense(truth.weights.astype(np.longdouble))
    assert_within_budget(values, oracle, rough, name, sizes)
    if isinstance(found, tuple):
        check_places(problem, truth, found, rough, sizes)
    return found


def check_places(problem, truth, found, rough, sizes):
    """Check that the keys are visible and distinct, and as many as possible, and that their weights are the largest."""
    where, k = to_numpy(found[1]), found[1].shape[-1]
    seen = np.isfinite(truth.masked)
    assert dtype_name(found[1]) == "int64"
    np.testing.assert_array_equal((where >= 0).sum(-1), np.minimum(seen.sum(-1), k))
    is_key = where >= 0
    assert not (np.diff(is_key.astype(int), axis=-1) > 0).any(), "a key after the last"
    if problem.m == 0:
        return
    at = np.maximum(where, 0)
    assert (np.take_along_axis(seen, at, -1) | ~is_key).all()
    each = np.sort(np.where(is_key, where, -1 - np.arange(k)), axis=-1)
    assert (np.diff(each, axis=-1) > 0).all(), "a key twice"
    reached = np.where(is_key, np.take_along_axis(truth.weights, at, -1), 0)
    assert_within_budget(reached.astype(wide(problem)), largest(truth.weights, k), rough, "weights of the keys", sizes)


def check_pooled(problem, rows, columns, how, within=None, **more):
    options = {"rows": rows, "columns": columns, "how": how, "within": within}
    return check(problem, pooled, partial(dense_pooled, **options), **options, **more)


def compute_together(problem, lse, statistics, threads=2, processor=HOST):
    """Return the result of each statistic, computed by as few passes as possible; None if `is_lse_imprecise`."""
    if is_lse_imprecise(problem, lse):
        return None
    passes, found = bind_passes(problem, statistics, processor), {}
    assert len(passes) == max(sum(type(x) is kind for x in statistics) for kind in map(type, statistics))
    for bound in passes:
        found |= zip(bound[1].indices, run_first(problem, lse, bound, threads), strict=True)
    return [tuple(arrays) if len(arrays) > 1 else arrays[0] for _, arrays in sorted(found.items())]


def check_together(problem, statistics, lse=None, threads=2, processor=HOST):
    """Check statistics that share passes, each within its error budget, and return the results."""
    found = compute_together(problem, true(problem).lse if lse is None else lse, statistics, threads, processor)
    for index, statistic in enumerate(statistics):
        result, of_dense = None if found is None else found[index], dense_definition(statistic)
        check_result(problem, result, of_dense, f"{statistic!r} of {len(statistics)}", lse is None)
    return found


def dense_definition(statistic):
    """Return the function that computes a statistic from dense weights."""
    if isinstance(statistic, TopK):
        return partial(largest, k=statistic.k)
    if isinstance(statistic, Received):
        return partial(dense_received, how=statistic.how)
    return partial(dense_pooled, rows=statistic.down, columns=statistic.across, how=statistic.how)


def check_everything(problem, maxima=False, **more):
    """Check every statistic of a problem with uneven parameters, and return the results as a list of arrays."""
    n, m = problem.n, problem.m
    within = (n // 3, n), (m // 2, m)
    found = [
        check(problem, received, dense_received, **more),
        check_pooled(problem, 5, 7, "mean", **more),
        check(problem, top_k, partial(largest, k=5), k=5, **more),
        check(problem, weights, lambda p: p, dtype=narrow, **more),
        check(problem, weight_sums, partial(dense_sum_over_heads, factors=head_factors(problem)), dtype=narrow, **more),
    ]
    if maxima:
        found.append(check(problem, received, partial(dense_received, how="max"), how="max", **more))
        found.append(check_pooled(problem, 2, 3, "max", within, **more))
    found += check_together(problem, several(problem), **more) or [None]
    return [array for one in found for array in (one if isinstance(one, tuple) else (one,))]


def several(problem):
    """Return statistics for one pass, and for a second pass the same ones with other parameters."""
    sums = Received(), Pooled(5, problem.m + 1), TopK(6)
    return [*sums, TopK(problem.m + 1), Received("max"), Pooled(5, 7, "max")]
