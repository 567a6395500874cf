"""The definition of attention: scaled dot-product attention and its gradients in float64, with every stage named.

    S = Q Kᵀ · scale        P = softmax(score(S) + M)        O = P V

The source is Vaswani et al., "Attention Is All You Need", 2017, equation 1; the source of the gradients is Dao et al.,
"FlashAttention", 2022, appendix B.2. Every other kernel of this library is checked against this module. The module
favours clarity over speed and stores n×m arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.operations import Array, convert, namespace, resolve_dtype, to_numpy
from ..call.kernel import Kernel, Result
from ..call.problem import Problem
from ..formula.evaluate_array import evaluate_dense
from ..statistics import Tile, accumulate_statistics
from .dropout import keep_factor


@dataclass(frozen=True)
class Stages:
    """The results of every stage of attention, in float64. The shape is (..., H, n, m) if a comment names no other."""

    scores: Array  # Q Kᵀ
    scaled: Array  # scores · scale
    masked: Array  # score(scaled) at visible pairs, −∞ at hidden pairs
    weights: Array  # softmax of `masked` over the keys; 0 for a query that sees no key
    output: Array  # (..., H, n, d_v): (weights ∘ dropout) V
    lse: Array  # (..., H, n): ln Σ exp(masked), sinks included; −∞ for a query that sees no key and has no sink


@dataclass(frozen=True)
class StageGradients:
    """The gradients of the stages of attention (see `Stages`), in the order in which the chain rule computes them.

    The comment beside each field has the notation of the FlashAttention paper, for attention without dropout.
    """

    value: Array  # dV = Pᵀ dO
    weights: Array  # dP = dO Vᵀ
    masked: Array  # dS = P ∘ (dP − rowsum(P ∘ dP))
    scores: Array  # dS · d score / d s · scale: the gradient of Q Kᵀ
    query: Array  # `scores` K
    key: Array  # `scores`ᵀ Q


def forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float,
    score: Callable[[Array], Array] = lambda s: s,
    allowed: Array | bool = True,
    sinks: Array | None = None,
    keep: Array | float = 1.0,
) -> Stages:
    """Compute attention stage by stage.

    Parameters
    ----------
    query, key, value : (..., H, n, d_k), (..., H, m, d_k), (..., H, m, d_v)
    scale : factor on the dot products, usually 1/√d_k
    score : function that maps the scaled scores to the final scores
    allowed : (..., H, n, m) bool, True where the query attends to the key
    sinks : (H,) logits that take part in the softmax but have no row of V
    keep : dropout factors on the weights: 0 for a dropped weight, else 1/(1 − p)

    Returns
    -------
    Stages
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    with np.errstate(all="ignore"):  # hidden scores may overflow
        scores = query @ key.swapaxes(-1, -2)
        scaled = scores * scale
        masked = np.where(allowed, score(scaled), -np.inf)
        sink = np.broadcast_to(-np.inf if sinks is None else np.asarray(sinks, np.float64)[:, None], masked.shape[:-1])
        largest = np.maximum(masked.max(-1, initial=-np.inf), sink)
        shift = np.where(largest == -np.inf, 0, largest)
        exponentials = np.exp(masked - shift[..., None])
        total = exponentials.sum(-1) + np.exp(sink - shift)
        weights = exponentials / np.where(total == 0, 1, total)[..., None]
        lse = shift + np.log(total)
        output = nan_safe_matmul(weights * keep, value)
    return Stages(scores, scaled, masked, weights, output, lse)


def backward(
    stages: Stages,
    query: Array,
    key: Array,
    value: Array,
    d_output: Array,
    *,
    scale: float,
    slope: Array | float = 1.0,
    keep: Array | float = 1.0,
    d_lse: Array | float = 0.0,
    d_weights: Array | float = 0.0,
) -> StageGradients:
    """Return the gradients of Σ d_output ∘ output + Σ d_lse ∘ lse + Σ d_weights ∘ weights.

    Parameters
    ----------
    stages : result of `forward`
    query, key, value, scale, keep : as in `forward`
    d_output : (..., H, n, d_v)
    slope : (..., H, n, m) d score(s) / d s at the scaled scores
    d_lse : (..., H, n)
    d_weights : (..., H, n, m)

    Returns
    -------
    StageGradients
    """
    query, key, value, d_output = (np.asarray(x, np.float64) for x in (query, key, value, d_output))
    p = stages.weights
    with np.errstate(all="ignore"):
        d_value = nan_safe_matmul((p * keep).swapaxes(-1, -2), d_output)
        through_output = np.where(np.equal(keep, 0), 0, (d_output @ value.swapaxes(-1, -2)) * keep)
        d_p = np.where(p == 0, 0, through_output + d_weights)
        row = (p * d_p).sum(-1, keepdims=True) - np.asarray(d_lse)[..., None]
        d_masked = np.where(p == 0, 0, p * (d_p - row))
        d_scores = np.where(p == 0, 0, d_masked * slope * scale)
        d_query = nan_safe_matmul(d_scores, key)
        d_key = nan_safe_matmul(d_scores.swapaxes(-1, -2), query)
    return StageGradients(d_value, d_p, d_masked, d_scores, d_query, d_key)


def nan_safe_matmul(weights: Array, rows: Array) -> Array:
    """Return Σⱼ weights[i, j] · rows[j]. A weight of 0 adds 0, even if rows[j] holds NaN or ∞."""
    if np.isfinite(rows).all():
        return weights @ rows
    with np.errstate(all="ignore"):
        terms: Array = np.where(weights[..., None] == 0, 0, weights[..., None] * rows[..., None, :, :])
    total: Array = terms.sum(-2)
    return total


def compute_stages(problem: Problem) -> Stages:
    """Return the stages of a problem. Formulas are evaluated at all pairs, and key heads are repeated."""
    query, key, value = (to_numpy(x) for x in (problem.query, problem.key, problem.value))
    if problem.row_formats is not None:
        key, value = (form.unpack(x) for form, x in zip(problem.row_formats, (key, value), strict=True))
    key, value = (np.repeat(x, problem.group, axis=-3) for x in (key, value))
    shape = (*problem.batch_shape, problem.H, problem.n, problem.m)

    def score(scaled: Array) -> Array:
        if problem.score is None:
            return scaled
        return np.asarray(evaluate_dense(problem.score, problem.extent, scaled.reshape(problem.extent))).reshape(shape)

    return forward(
        query,
        key,
        value,
        scale=problem.scale,
        score=score,
        allowed=True if problem.mask is None else evaluate_dense(problem.mask, problem.extent).reshape(shape),
        sinks=None if problem.sinks is None else to_numpy(problem.sinks),
        keep=keep_factor(problem, np, slice(0, problem.n), slice(0, problem.m), np.float64),
    )


class Reference(Kernel):
    """The definition as a kernel. It serves every problem, computes in float64 and needs n · m memory."""

    name = "reference"
    description = "the definition, dense float64 in NumPy, n² memory"

    def cost(self, problem: Problem) -> float:
        return 100.0

    def run(self, problem: Problem) -> Result:
        stages = compute_stages(problem)
        xp = namespace(problem.query)

        def to_framework(array: Array, dtype: str) -> Any:
            return xp.astype(convert(array, problem.query), resolve_dtype(xp, dtype))

        output, lse = to_framework(stages.output, problem.dtype), to_framework(stages.lse, "float64")

        def tiles() -> Iterator[Tile]:
            if problem.n and problem.m:
                weights, masked = (to_framework(array, "float64") for array in (stages.weights, stages.masked))
                yield Tile(slice(0, problem.n), slice(0, problem.m), weights, masked, lse)

        return Result(output, lse, accumulate_statistics(problem, lse, tiles))
