"""The second pass's statistics against those of dense float64 weights: the machinery of the checks."""

from functools import lru_cache, partial

import numpy as np

from sightline.accuracy import dense_attention, summation_orders
from sightline.arrays import dtype_name, to_numpy
from sightline.cpu.launch.weights_pass import pooled, received, top_k, weights
from sightline.reference import compute_stages
from sightline.testing import assert_within_budget

# -- what is asked, and the same of a dense matrix of weights (..., n, m) --------------------------------------------


def dense_received(p, how="sum", last=None):
    """Σ, mean or maximum over the queries that count; 0 where none does."""
    counted = p[..., max(p.shape[-2] - (p.shape[-2] if last is None else last), 0) :, :]
    if counted.shape[-2] == 0:
        return np.zeros((*p.shape[:-2], p.shape[-1]), p.dtype)
    return getattr(counted, how)(-2)


def dense_pooled(p, rows, columns, how="mean", within=None):
    (i0, i1), (j0, j1) = within or ((0, p.shape[-2]), (0, p.shape[-1]))
    found = np.zeros((*p.shape[:-2], rows, columns), p.dtype)
    for r, c in np.ndindex(rows, columns):
        queries = slice(i0 + r * (i1 - i0) // rows, i0 + (r + 1) * (i1 - i0) // rows)
        keys = slice(j0 + c * (j1 - j0) // columns, j0 + (c + 1) * (j1 - j0) // columns)
        found[..., r, c] = getattr(p[..., queries, keys], how)((-2, -1))
    return found


def largest(p, k):
    """The k largest of each row, descending; 0 past the row's end."""
    found = -np.sort(-p, axis=-1)[..., :k]
    return np.concatenate([found, np.zeros((*p.shape[:-1], k - found.shape[-1]), p.dtype)], axis=-1)


def wide(problem):
    return problem.accumulator


def narrow(problem):
    return problem.dtype


@lru_cache(2)
def plain_weights(problem, dtype):
    """The dense computation's in several orders of summation, in the accumulator's dtype."""
    found = (dense_attention(problem, dtype, order)[2] for order in summation_orders(problem))
    return [p.astype(problem.accumulator) for p in found]


true = lru_cache(1)(compute_stages)


def check(problem, ask, of_dense, lse=None, dtype=wide, threads=2, **options):
    """One question within its budget: what the kernel says, or None where a score that counts is not finite.

    The definition's lse stands in where none is given. It has not the rounding of the kernel's scores, so that weights
    have the absolute error of a score for their relative one.
    """
    truth = true(problem)
    sure = 1.0 if lse is not None else np.maximum(np.abs(np.where(np.isfinite(truth.lse), truth.lse, 0.0)), 1.0)
    lse = truth.lse if lse is None else lse
    found = ask(problem, lse, threads=threads, **options)
    if np.isnan(truth.lse).any() or (truth.lse == np.inf).any():
        assert found is None
        return None
    values = found[0] if isinstance(found, tuple) else found
    rough = [of_dense(p) for p in plain_weights(problem, dtype(problem))]
    assert dtype_name(values) == dtype(problem)
    sizes = of_dense(truth.weights * np.reshape(sure, (*np.shape(sure), 1)))
    assert_within_budget(values, of_dense(truth.weights), rough, ask.__name__, sizes)
    if ask is top_k:
        check_places(problem, truth, found, rough, sizes)
    return found


def check_places(problem, truth, found, rough, sizes):
    """The keys are those of the weights: seen, each once, as many as there are, and as large as can be."""
    where, k = to_numpy(found[1]), found[1].shape[-1]
    seen = np.isfinite(truth.masked)
    assert dtype_name(found[1]) == "int64"
    np.testing.assert_array_equal((where >= 0).sum(-1), np.minimum(seen.sum(-1), k))
    some = where >= 0
    assert not (np.diff(some.astype(int), axis=-1) > 0).any(), "a key after the last"
    if problem.m == 0:
        return
    at = np.maximum(where, 0)
    assert (np.take_along_axis(seen, at, -1) | ~some).all()
    each = np.sort(np.where(some, where, -1 - np.arange(k)), axis=-1)
    assert (np.diff(each, axis=-1) > 0).all(), "a key twice"
    reached = np.where(some, np.take_along_axis(truth.weights, at, -1), 0)
    assert_within_budget(reached.astype(wide(problem)), largest(truth.weights, k), rough, "weights of the keys", sizes)


def check_pooled(problem, rows, columns, how, within=None, **more):
    options = {"rows": rows, "columns": columns, "how": how, "within": within}
    return check(problem, pooled, partial(dense_pooled, **options), **options, **more)


def check_everything(problem, maxima=False, **more):
    """Every statistic of a problem, with odd parameters; what they say, as arrays."""
    n, m = problem.n, problem.m
    rows, within = slice(n // 3, n - 1), ((n // 3, n), (m // 2, m))
    found = [
        check(problem, received, partial(dense_received, last=n // 2), last=n // 2, **more),
        check_pooled(problem, 5, 7, "mean", **more),
        check(problem, top_k, partial(largest, k=5), k=5, **more),
        check(problem, weights, lambda p: p, dtype=narrow, **more),
        check(problem, weights, lambda p: p[..., rows, 3:-1], dtype=narrow, rows=rows, columns=slice(3, -1), **more),
    ]
    if maxima:
        found.append(check(problem, received, partial(dense_received, how="max"), how="max", **more))
        found.append(check_pooled(problem, 2, 3, "max", within, **more))
    return [array for one in found for array in (one if isinstance(one, tuple) else (one,))]
