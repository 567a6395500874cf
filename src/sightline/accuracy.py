"""The budget of rounding errors, and the plain computation that it is measured by.

A kernel's error against the float64 definition, on the same already rounded inputs, is at most twice that
of the plain computation in the same dtype, plus 2 units in the last place. In full:

- Errors are taken by rows (the last axis): the largest in the row, in ulps of the row's largest value. An output is a
  weighted mean P V whose terms may cancel, and carries the rounding of the terms: its size is that of P |V|. Other
  rows count as no smaller than a sixteenth of the largest row, for the same reason.
- Plain's error is the largest over all rows, since in one row it may be 0 by luck; in absolute terms or in ulps of its
  row, whichever grants the row at hand less, so that neither large rows nor rows that cancel excuse all others.
- Plain is computed in several orders of summation, by the paper's formula and as fused kernels do it; its worst counts.
- lse is one row: its errors follow the size of the scores, not its own. Its size is 1 at least, as log l has the
  relative error of the sum l for its absolute one.
- NaN, ∞ and −∞ stand exactly where the definition has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import dtype_name, namespace, resolve_dtype, to_numpy
from .dropout import keep_factor
from .formula.derivative import derivative
from .formula.expression import Lookup, walk
from .formula.render_array import evaluate
from .problem import Problem
from .reference import Stages, compute_stages

__all__ = [
    "LOOP_ORDERS",
    "Baseline",
    "budget_used",
    "compute_baseline",
    "dense_attention",
    "gradient_term_sizes",
    "summation_orders",
    "term_sizes",
    "ulp",
]

FORMATS = {  # fraction bits, least exponent
    "float16": (10, -14),
    "bfloat16": (7, -126),
    "float32": (23, -126),
    "float64": (52, -1022),
}
BASELINE_FACTOR, EXTRA_ULPS, SMALL_ROW_RATIO, NUM_ORDERS = 2.0, 2.0, 16, 8
LOOP_ORDERS = (4, 5, 6, 7)  # the orders whose products are written as loops, as register tiles sum them
LOG2_E, LN_2 = math.log2(math.e), math.log(2)


def ulp(values: Any, dtype: str) -> Any:
    """The distance between neighbouring numbers of the dtype at the size of the values, float64."""
    fraction, min_exponent = FORMATS[dtype]
    exponent = np.where(values == 0, min_exponent, np.frexp(np.abs(values))[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, min_exponent) - fraction)


def budget_used(actual: Any, oracle: Any, baseline: Any, terms: Any = None) -> float:
    """The largest share of its budget any row of `actual` uses; at most 1 is within it, ∞ is a NaN or ∞ out of place.

    Parameters
    ----------
    actual : (..., width)
        What a kernel answered, in the dtype it is judged by.
    oracle : (..., width) float64
        The definition's answer.
    baseline : (..., width) or (orders, ..., width)
        The plain computation's, in one or several orders of summation.
    terms : (..., width), optional
        Σ |term| of the sums behind each entry, whose last places no order of summation can save; `oracle` if not given.
    """
    dtype, computed = dtype_name(actual), np.atleast_1d(to_numpy(actual).astype(np.float64))
    oracle = np.atleast_1d(np.asarray(oracle, np.float64))
    if computed.shape != oracle.shape:
        raise AssertionError(f"shape {computed.shape} where the definition has {oracle.shape}")
    for kind in (np.isnan, np.isposinf, np.isneginf):
        if not np.array_equal(kind(computed), kind(oracle)):
            return np.inf
    if oracle.size == 0:
        return 0.0
    orders = np.asarray(baseline, np.float64).reshape(-1, *oracle.shape)
    size = _row_max(oracle if terms is None else np.maximum(np.abs(oracle), terms))
    unit = ulp(np.maximum(size, size.max() / SMALL_ROW_RATIO), dtype)
    baseline_error = np.max([_row_max(_subtract(order, oracle)) for order in orders], axis=0)
    allowed = (
        BASELINE_FACTOR * np.minimum(baseline_error.max(), (baseline_error / unit).max() * unit) + EXTRA_ULPS * unit
    )
    return float((_row_max(_subtract(computed, oracle)) / allowed).max())


def term_sizes(problem: Problem, weights: Any) -> Any:
    """P |V|: the size of the terms an output is the sum of."""
    sizes = np.abs(np.repeat(to_numpy(problem.value).astype(np.float64), problem.group, axis=-3))
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(weights), 0, weights) @ np.where(np.isfinite(sizes), sizes, 0)


@np.errstate(all="ignore")
def gradient_term_sizes(
    problem: Problem, d_output: Any, d_lse: Any = 0.0, d_weights: Any = 0.0, stages: Stages | None = None
) -> dict[Any, Any]:
    """The sizes of the terms that each gradient is a sum of, since rows of dS cancel; weights are before dropout.

        |dP| = |dO| |V|ᵀ + |d_weights|    |dS| = P ∘ (|dP| + rowsum(P ∘ |dP|) + |d_lse|)    and with it dQ, dK, dV, ...

    Keys are "query", "key", "value", "sinks", and places of tables of floats in `Problem.tables`. `stages` are those
    of the definition, where the caller has them.
    """
    query, key, value, d_o = (
        np.abs(to_numpy(x).astype(np.float64)) for x in (problem.query, problem.key, problem.value, d_output)
    )
    key, value = (np.repeat(x, problem.group, axis=-3) for x in (key, value))
    keep = keep_factor(problem, np, slice(0, problem.n), slice(0, problem.m), np.float64)
    stages = compute_stages(problem) if stages is None else stages
    # P = exp(s − lse) has the absolute error of lse for its relative one
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
    place = {id(table): k for k, table in enumerate(problem.tables)}
    score = problem.score
    for node in [] if score is None else walk(score):
        if score is not None and isinstance(node, Lookup) and node.kind == "float":
            share = np.where(d_score == 0, 0.0, d_score * np.abs(values(derivative(score, node))))
            index = [
                np.broadcast_to(np.clip(values(a), 0, length - 1), share.shape)
                for a, length in zip(node.arguments, node.table.shape, strict=True)
            ]
            total = sizes.setdefault(place[id(node.table)], np.zeros(node.table.shape))
            np.add.at(total, tuple(index), share)
    return sizes


def _row_max(values: Any) -> Any:
    """The largest finite size in each row, the row's axis kept."""
    sizes = np.abs(values)
    return np.max(sizes, axis=-1, keepdims=True, where=np.isfinite(sizes), initial=0.0)


def _subtract(x: Any, y: Any) -> Any:
    with np.errstate(invalid="ignore"):  # ∞ − ∞ in place
        return x - y


@dataclass(frozen=True)
class Baseline:
    """The plain computation in several orders of summation, the first axis of each array."""

    output: Any
    lse: Any
    weights: Any


def compute_baseline(problem: Problem) -> Baseline:
    """The dense computation a person would write in the problem's own dtype; float64 holds its values.

    Where inputs are NaN or ∞ it means nothing: only what the definition finds finite is compared.
    """
    wide = narrow = [dense_attention(problem, problem.accumulator, order) for order in summation_orders(problem)]
    if problem.dtype != problem.accumulator:  # lse is kept in the accumulator's dtype, so it is judged by that;
        narrow = [
            dense_attention(problem, problem.dtype, order) for order in range(2)
        ]  # here rounding outweighs the order

    def stack(arrays: list[Any]) -> Any:
        return np.stack([to_numpy(array).astype(np.float64) for array in arrays])

    outputs, _, weights = zip(*narrow, strict=True)
    return Baseline(stack(list(outputs)), stack([lse for _, lse, _ in wide]), stack(list(weights)))


def _permutations(count: int) -> list[Any]:
    """Orders in which to sum that many terms: forward, backward, even before odd, and shuffled."""
    forward, random = np.arange(count), np.random.default_rng(0)
    found = [forward, forward[::-1].copy(), np.concatenate([forward[::2], forward[1::2]])]
    return found + [random.permutation(count) for _ in range(NUM_ORDERS - len(found))]


def summation_orders(problem: Problem) -> Sequence[int]:
    """The orders `dense_attention` is tried in: fewer where there are many rows, loops among them."""
    return range(NUM_ORDERS) if problem.B * problem.H * problem.n < 256 else (0, 1, *LOOP_ORDERS[:2])


@np.errstate(all="ignore")  # what the mask hides may overflow
def dense_attention(problem: Problem, dtype: str, order: int = 0) -> tuple[Any, Any, Any]:
    """(output, lse, weights) by plain array operations, each stage rounded to the dtype; torch can differentiate it.

    Sums run in the accumulator's dtype, as matrix libraries have it. Even orders follow the paper's formula. Odd ones
    do as fused kernels do: the scale in the queries, base 2, the output divided in the end, and the weights from the
    lse and scores computed once more. Half of them sum term by term, as a loop does.
    """
    xp, fused = namespace(problem.query), order % 2 == 1
    wide, narrow = resolve_dtype(xp, problem.accumulator), resolve_dtype(xp, dtype)

    def round_to_dtype(array: Any) -> Any:
        return xp.astype(xp.astype(array, narrow), wide)

    def index(count: int) -> Any:
        return xp.asarray(_permutations(count)[order], device=problem.query.device)

    def permute(array: Any, axis: int) -> Any:
        return xp.take(array, index(array.shape[axis]), axis=axis)

    def unpermute(array: Any, axis: int) -> Any:
        back = np.argsort(_permutations(array.shape[axis])[order])
        return xp.take(array, xp.asarray(back, device=problem.query.device), axis=axis)

    def repeat_heads(array: Any) -> Any:
        """Key heads for every query head, keys in this order."""
        return permute(xp.repeat(xp.astype(array, wide), problem.group, axis=-3), -2)

    query = permute(xp.astype(problem.query, wide), -2)
    key, value = repeat_heads(problem.key), repeat_heads(problem.value)
    value = xp.where(xp.isfinite(value), value, xp.zeros_like(value))
    rows, columns = slice(0, problem.n), slice(0, problem.m)
    b, h, i, j = problem.positions(xp, rows, columns)
    symbols = {"b": b, "h": h, "i": permute(i, 0), "j": permute(j, 0), "n": problem.n, "m": problem.m}
    negative_infinity = xp.full(
        (*problem.batch_shape, problem.H, problem.n, 1), -xp.inf, dtype=wide, device=problem.query.device
    )

    def logits(scaled: Any) -> Any:
        """Through the score formula and the mask."""
        if problem.score is not None:
            values = evaluate(problem.score, symbols | {"s": scaled}, xp=xp, float_dtype=wide, like=query)
            scaled = round_to_dtype(xp.broadcast_to(values, scaled.shape))
        if problem.mask is None:
            return scaled
        return xp.where(
            evaluate(problem.mask, symbols, xp=xp, float_dtype=xp.float64, like=query), scaled, negative_infinity
        )

    matmul = _matmul_by_loop if order in LOOP_ORDERS else xp.matmul
    products = matmul(permute(query, -1), xp.matrix_transpose(permute(key, -1)))
    s = scores = logits(round_to_dtype(round_to_dtype(products) * problem.scale))
    if fused:
        s = logits(round_to_dtype(matmul(round_to_dtype(query * problem.scale), xp.matrix_transpose(key)))) * LOG2_E
    sink = (
        negative_infinity
        if problem.sinks is None
        else xp.astype(problem.sinks, wide)[:, None, None] + xp.zeros_like(negative_infinity)
    )
    s = xp.concat([sink * (LOG2_E if fused else 1.0), s], axis=-1)
    largest = xp.max(s, axis=-1, keepdims=True)
    largest = largest.detach() if hasattr(largest, "detach") else largest  # the result does not depend on the shift
    shift = xp.where(largest == -xp.inf, xp.zeros_like(largest), largest)
    p = 2 ** (s - shift) if fused else xp.exp(s - shift)
    total = xp.sum(p, axis=-1, keepdims=True)
    divisor = xp.where(total == 0, xp.ones_like(total), total)
    normaliser = (shift + xp.log2(divisor)) * LN_2 if fused else shift + xp.log(divisor)
    keep = keep_factor(problem, xp, rows, columns)
    keep = keep if isinstance(keep, float) else permute(permute(keep, -1), -2)
    if fused:
        weights = round_to_dtype(xp.exp(scores - normaliser))
        output = round_to_dtype(matmul(round_to_dtype(p[..., 1:] * keep), value) / divisor)
    else:
        weights = round_to_dtype(p / divisor)[..., 1:]
        output = round_to_dtype(matmul(weights * keep, value))
    lse = xp.where(total == 0, negative_infinity, normaliser)
    output, lse, weights = (unpermute(x, -2) for x in (output, lse, weights))
    return output, lse[..., 0], unpermute(weights, -1)


def _matmul_by_loop(x: Any, y: Any) -> Any:
    """The product of two matrices summed term by term, where a library's sums in parts and rounds less."""
    total = x[..., :, :0] @ y[..., :0, :]
    for k in range(x.shape[-1]):
        total = total + x[..., :, k : k + 1] * y[..., k : k + 1, :]
    return total
