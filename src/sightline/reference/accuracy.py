"""The budget of rounding errors of a kernel, and the dense computation that sets the budget.

A test compares a kernel with the float64 definition, on inputs that are already rounded to the tested dtype. The
kernel's error must be at most twice the error of a dense computation in the tested dtype, plus 2 units in the last
place (ulps):

- Errors are measured row by row, along the last axis. The error of a row is the largest error of its entries. The size
  of a row is the largest magnitude of its entries. The terms of an output P V may cancel, but their rounding errors do
  not. So the size of an output row is the size of its row of P |V|. For the same reason, no row counts as smaller than
  a sixteenth of the largest row.
- The error of the dense computation is the largest over all rows, because the error of a single row may be 0 by chance.
  The largest error is found twice, as an absolute error and in ulps of its row. Each row is allowed the smaller of the
  two. So a large row, or a row whose terms cancel, does not allow larger errors in the other rows.
- The dense computation runs in several orders of summation, some by the paper's formula and some as fused kernels
  compute. The largest of the errors counts.
- The whole lse counts as one row, because its error follows the size of the scores, not the size of the lse. The size
  of this row is at least 1, because the absolute error of ln l is the relative error of the sum l.
- NaN, ∞ and −∞ must have exactly the places that they have in the definition's result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from ..arrays.operations import dtype_name, namespace, resolve_dtype, to_numpy
from ..call.gradient_parts import find_learned_lookups
from ..call.problem import Problem
from ..formula.derivative import derivative
from ..formula.evaluate_array import evaluate
from ..formula.expression import Expression
from .definition import Stages, compute_stages
from .dropout import keep_factor

FLOAT_FORMATS = {  # the number of fraction bits and the smallest exponent of each dtype
    "float16": (10, -14),
    "bfloat16": (7, -126),
    "float32": (23, -126),
    "float64": (52, -1022),
}
BASELINE_FACTOR, EXTRA_ULPS, SMALL_ROW_RATIO, NUM_ORDERS = 2.0, 2.0, 16, 8
LOOP_ORDERS = (4, 5, 6, 7)  # these orders of summation compute products in a loop, as kernels with register tiles do
LOG2_E, LN_2 = math.log2(math.e), math.log(2)


def ulp(values: Any, dtype: str) -> Any:
    """Return, for each value, the distance between neighbouring numbers of the dtype at that size, in float64."""
    fraction, min_exponent = FLOAT_FORMATS[dtype]
    exponent = np.where(values == 0, min_exponent, np.frexp(np.abs(values))[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, min_exponent) - fraction)


def budget_used(actual: Any, oracle: Any, baseline: Any, terms: Any = None) -> float:
    """Return the largest fraction of its error budget that any row of `actual` uses.

    A fraction of at most 1 is within the budget. The fraction is ∞ if `actual` and `oracle` do not have NaN, ∞ and −∞
    at the same places.

    Parameters
    ----------
    actual : (..., width)
        The result of a kernel, in the dtype whose budget applies.
    oracle : (..., width) float64
        The result of the definition.
    baseline : (..., width) or (orders, ..., width)
        The results of the dense computation, in one or several orders of summation.
    terms : (..., width), optional
        For each entry of the result, Σ |term| of the sum that computes the entry. No order of summation avoids the
        rounding of these terms. Default: |oracle|.
    """
    dtype, computed = dtype_name(actual), np.atleast_1d(to_numpy(actual).astype(np.float64))
    oracle = np.atleast_1d(np.asarray(oracle, np.float64))
    if computed.shape != oracle.shape:
        raise AssertionError(f"the result has shape {computed.shape}, the definition {oracle.shape}")
    for kind in (np.isnan, np.isposinf, np.isneginf):
        if not np.array_equal(kind(computed), kind(oracle)):
            return np.inf
    if oracle.size == 0:
        return 0.0
    orders = np.asarray(baseline, np.float64).reshape(-1, *oracle.shape)
    size = _row_max(oracle if terms is None else np.maximum(np.abs(oracle), terms))
    unit = ulp(np.maximum(size, size.max() / SMALL_ROW_RATIO), dtype)
    baseline_error = np.max([_row_max(_subtract(order, oracle)) for order in orders], axis=0)
    baseline_error = np.minimum(baseline_error.max(), (baseline_error / unit).max() * unit)
    allowed = BASELINE_FACTOR * baseline_error + EXTRA_ULPS * unit
    return float((_row_max(_subtract(computed, oracle)) / allowed).max())


def term_sizes(problem: Problem, weights: Any) -> Any:
    """Return P |V|, of shape (..., H, n, d_v): the sum of the magnitudes of the terms of each output entry."""
    sizes = np.abs(np.repeat(to_numpy(problem.value).astype(np.float64), problem.group, axis=-3))
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(weights), 0, weights) @ np.where(np.isfinite(sizes), sizes, 0)


@np.errstate(all="ignore")
def gradient_term_sizes(
    problem: Problem, d_output: Any, d_lse: Any = 0.0, d_weights: Any = 0.0, stages: Stages | None = None
) -> dict[Any, Any]:
    """Return, for each gradient, the sum of the magnitudes of its terms.

    A gradient itself is much smaller than this sum if its terms cancel, as the terms of a row of dS do.

        |dP| = |dO| |V|ᵀ + |d_weights|    |dS| = e P ∘ (|dP| + rowsum(P ∘ |dP|) + |d_lse|)    |dV| = (e P)ᵀ |dO|

    e = max(|lse|, 1) of each query, because an error of lse is a relative error of P. P are the weights before dropout.
    These formulas leave out the factors of dropout, which multiply |dO| |V|ᵀ in |dP|, and P in |dV|. The sums of dQ, dK
    and the other gradients follow from |dS|. The result is a dict. Its keys are "query", "key" and "value", "sinks" if
    the problem has sinks, and the index in `Problem.tables` of each float table that the score reads. `stages` are the
    stages of the definition, if the caller has computed them already.
    """
    query, key, value, d_o = (
        np.abs(to_numpy(x).astype(np.float64)) for x in (problem.query, problem.key, problem.value, d_output)
    )
    key, value = (np.repeat(x, problem.group, axis=-3) for x in (key, value))
    keep = keep_factor(problem, np, slice(0, problem.n), slice(0, problem.m), np.float64)
    stages = compute_stages(problem) if stages is None else stages
    # The relative error of P = exp(s − lse) is the absolute error of lse.
    lse_error = np.where(np.isfinite(stages.lse), np.maximum(np.abs(stages.lse), 1.0), 1.0)
    p = stages.weights * lse_error[..., None]
    d_p = d_o @ np.swapaxes(value, -1, -2) * keep + np.abs(to_numpy(d_weights))
    row = (stages.weights * d_p).sum(-1) + np.abs(to_numpy(d_lse))
    b, h, i, j = problem.positions(np, slice(0, problem.n), slice(0, problem.m))
    symbols = {"b": b, "h": h, "i": i, "j": j, "s": stages.scaled, "n": problem.n, "m": problem.m}

    def values(formula: Any) -> Any:
        return evaluate(formula, symbols, xp=np, float_dtype=np.dtype("float64"), like=query)

    d_score = np.where(p == 0, 0.0, p * (d_p + row[..., None]))
    slope = 1.0 if problem.score is None else values(derivative(problem.score))
    d_s = np.where(p == 0, 0.0, d_score * np.abs(slope * problem.scale))

    def sum_over_groups(array: Any) -> Any:
        return array.reshape(*problem.batch_shape, problem.G, problem.group, *array.shape[-2:]).sum(-3)

    sizes: dict[Any, Any] = {
        "query": d_s @ key,
        "key": sum_over_groups(np.swapaxes(d_s, -1, -2) @ query),
        "value": sum_over_groups(np.swapaxes(p * keep, -1, -2) @ d_o),
    }
    if problem.sinks is not None:
        p = np.exp(to_numpy(problem.sinks).astype(np.float64)[:, None] - stages.lse)
        share = np.where(np.isfinite(p), p * lse_error * row, 0.0)
        sizes["sinks"] = share.sum((*range(share.ndim - 2), -1))
    for _, node, slot in find_learned_lookups(problem, range(len(problem.tables))):
        share = np.where(d_score == 0, 0.0, d_score * np.abs(values(derivative(cast(Expression, problem.score), node))))
        index = [
            np.broadcast_to(np.clip(values(a), 0, length - 1), share.shape)
            for a, length in zip(node.arguments, node.table.shape, strict=True)
        ]
        np.add.at(sizes.setdefault(slot, np.zeros(node.table.shape)), tuple(index), share)
    return sizes


def _row_max(values: Any) -> Any:
    """Return the largest finite magnitude in each row (last axis). The last axis of the result has length 1."""
    sizes = np.abs(values)
    return np.max(sizes, axis=-1, keepdims=True, where=np.isfinite(sizes), initial=0.0)


def _subtract(x: Any, y: Any) -> Any:
    with np.errstate(invalid="ignore"):  # ∞ − ∞ where both arrays hold the same ∞
        return x - y


@dataclass(frozen=True)
class Baseline:
    """The results of the dense computation in the problem's dtype (lse: the accumulator's dtype), stored as float64.

    Axis 0 of each array counts the runs of the dense computation. Each run sums in another order; see
    `dense_attention`.
    """

    output: Any
    lse: Any
    weights: Any


def compute_baseline(problem: Problem) -> Baseline:
    """Return the results of the dense computation in the problem's own dtype, stored as float64.

    The results mean nothing where inputs are NaN or ∞. `budget_used` compares only entries that are finite in the
    result of the definition.
    """
    wide = narrow = [dense_attention(problem, problem.accumulator, order) for order in summation_orders(problem)]
    if problem.dtype != problem.accumulator:  # lse has the accumulator's dtype, so its baseline is `wide`
        # Two orders of summation suffice in a narrow dtype, because rounding outweighs the effect of the order.
        narrow = [dense_attention(problem, problem.dtype, order) for order in range(2)]

    def stack(arrays: list[Any]) -> Any:
        return np.stack([to_numpy(array).astype(np.float64) for array in arrays])

    outputs, _, weights = zip(*narrow, strict=True)
    return Baseline(stack(list(outputs)), stack([lse for _, lse, _ in wide]), stack(list(weights)))


@lru_cache(64)
def _permutations(count: int) -> list[Any]:
    """Return the orders in which to sum `count` terms: forward, backward, even before odd indices, and shuffled."""
    forward, random = np.arange(count), np.random.default_rng(0)
    found = [forward, forward[::-1].copy(), np.concatenate([forward[::2], forward[1::2]])]
    return found + [random.permutation(count) for _ in range(NUM_ORDERS - len(found))]


def summation_orders(problem: Problem) -> Sequence[int]:
    """Return the orders of summation in which `compute_baseline` runs `dense_attention`.

    For fewer than 256 query rows, they are all orders; otherwise they are four orders, two of which sum in a loop.
    """
    return range(NUM_ORDERS) if problem.B * problem.H * problem.n < 256 else (0, 1, *LOOP_ORDERS[:2])


@np.errstate(all="ignore")  # hidden scores may overflow
def dense_attention(problem: Problem, dtype: str, order: int = 0) -> tuple[Any, Any, Any]:
    """Return (output, lse, weights), computed by array operations whose results are rounded to the dtype.

    Sums run in the accumulator's dtype, as in matrix libraries. `order` is the order of summation. Even orders follow
    the paper's formula. Odd orders compute as fused kernels do. There the queries are multiplied by the scale, powers
    have base 2, the output is divided at the end, and the scores are computed again for the weights exp(score − lse).
    The orders in `LOOP_ORDERS` sum term by term in a loop. torch can differentiate the operations.
    """
    xp, fused = namespace(problem.query), order % 2 == 1
    wide, narrow = resolve_dtype(xp, problem.accumulator), resolve_dtype(xp, dtype)

    def round_to_dtype(array: Any) -> Any:
        return array if narrow == wide else xp.astype(xp.astype(array, narrow), wide)

    def permute(array: Any, axis: int, inverse: bool = False) -> Any:
        """Return the array with the positions of an axis in the order of summation; if `inverse`, undo this order."""
        if order == 0:
            return array
        places = _permutations(array.shape[axis])[order]
        places = np.argsort(places) if inverse else places
        return xp.take(array, xp.asarray(places, device=problem.query.device), axis=axis)

    def repeat_heads(array: Any) -> Any:
        """Return the array with its key heads repeated for every query head, and its keys in the order of summation."""
        return permute(xp.repeat(xp.astype(array, wide), problem.group, axis=-3), -2)

    query = permute(xp.astype(problem.query, wide), -2)
    key, value = repeat_heads(problem.key), repeat_heads(problem.value)
    value = xp.where(xp.isfinite(value), value, xp.zeros_like(value))
    rows, columns = slice(0, problem.n), slice(0, problem.m)
    b, h, i, j = problem.positions(xp, rows, columns)
    symbols = {"b": b, "h": h, "i": permute(i, 0), "j": permute(j, 0), "n": problem.n, "m": problem.m}
    negative_infinity = xp.full((*query.shape[:-1], 1), -xp.inf, dtype=wide, device=query.device)

    def logits(scaled: Any) -> Any:
        """Apply the score formula and the mask to the scaled scores."""
        if problem.score is not None:
            values = evaluate(problem.score, symbols | {"s": scaled}, xp=xp, float_dtype=wide, like=query)
            scaled = round_to_dtype(xp.broadcast_to(values, scaled.shape))
        if problem.mask is None:
            return scaled
        allowed = evaluate(problem.mask, symbols, xp=xp, float_dtype=xp.float64, like=query)
        return xp.where(allowed, scaled, negative_infinity)

    matmul = _matmul_by_loop if order in LOOP_ORDERS else xp.matmul
    products = matmul(permute(query, -1), xp.matrix_transpose(permute(key, -1)))
    s = scores = logits(round_to_dtype(round_to_dtype(products) * problem.scale))
    if fused:
        s = logits(round_to_dtype(matmul(round_to_dtype(query * problem.scale), xp.matrix_transpose(key)))) * LOG2_E
    sinks = -xp.inf if problem.sinks is None else xp.astype(problem.sinks, wide)[:, None, None]
    sink = sinks + xp.zeros_like(negative_infinity)
    p, divisor, finite_lse, lse = _exponentials(xp, xp.concat([sink * (LOG2_E if fused else 1.0), s], axis=-1), fused)
    keep = keep_factor(problem, xp, rows, columns)
    keep = keep if isinstance(keep, float) else permute(permute(keep, -1), -2)
    if fused:
        weights = round_to_dtype(xp.exp(scores - finite_lse))
        output = round_to_dtype(matmul(round_to_dtype(p[..., 1:] * keep), value) / divisor)
    else:
        weights = round_to_dtype(p / divisor)[..., 1:]
        output = round_to_dtype(matmul(weights * keep, value))
    output, lse, weights = (permute(x, -2, inverse=True) for x in (output, lse, weights))
    return output, lse[..., 0], permute(weights, -1, inverse=True)


def _exponentials(xp: Any, s: Any, base_2: bool) -> tuple[Any, Any, Any, Any]:
    """Return (exponentials of the logits, divisor, finite lse, lse) of each row of logits.

    The divisor is the sum of the exponentials. If every logit is −∞, the divisor is 1, the finite lse 0 and the lse −∞.
    If `base_2`, the logits are in units of ln 2. The lse is in nats.
    """
    largest = xp.max(s, axis=-1, keepdims=True)
    largest = largest.detach() if hasattr(largest, "detach") else largest  # the result does not depend on the shift
    shift = xp.where(largest == -xp.inf, xp.zeros_like(largest), largest)
    p = 2 ** (s - shift) if base_2 else xp.exp(s - shift)
    total = xp.sum(p, axis=-1, keepdims=True)
    divisor = xp.where(total == 0, xp.ones_like(total), total)
    finite_lse = (shift + xp.log2(divisor)) * LN_2 if base_2 else shift + xp.log(divisor)
    return p, divisor, finite_lse, xp.where(total == 0, xp.full_like(total, -xp.inf), finite_lse)


def _matmul_by_loop(x: Any, y: Any) -> Any:
    """Return the product of two matrices, summed term by term. A matrix library sums in blocks and rounds less."""
    total = x[..., :, :0] @ y[..., :0, :]
    for k in range(x.shape[-1]):
        total = total + x[..., :, k : k + 1] * y[..., k : k + 1, :]
    return total
