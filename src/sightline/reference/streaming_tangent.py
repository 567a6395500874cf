"""The derivative of output and lse in the direction of given tangents, by tiles in plain array operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..call.gradient_parts import sink_weights
from ..call.kernel import Tangents
from ..call.problem import Problem
from ..formula.derivative import score_tangent
from .dropout import keep_factor
from .streaming import ScoreGradients, TileOps, row_tiles


def tangent(problem: Problem, tangents: Tangents, saved: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the tangents of output and lse, in O(n) memory. Here d marks a tangent, and `keep` the dropout factors.

        ds = (dQ Kᵀ + Q dKᵀ) · scale        D = P ∘ (d score / d s · ds + the score's derivative along its tables)
        d_lse = rowsum(D)                     d_output = (D ∘ keep) V + (P ∘ keep) dV − d_lse ∘ output

    A sink adds exp(sink − lse) times its tangent to d_lse.

    Parameters
    ----------
    tangents : the tangents of the inputs
    saved : (output, lse) of the forward pass
    """
    ops = TileOps(problem, tangents.query, tangents.key, tangents.value)
    xp, (output, lse) = ops.xp, saved
    d_output = ops.full(0.0, *problem.batch_shape, problem.H, problem.n, problem.d_v)
    d_lse = xp.zeros_like(lse)
    score = ScoreGradients(ops)
    formula = score_tangent(problem.score, dict(zip(problem.tables, tangents.tables, strict=False)))
    with np.errstate(all="ignore"):  # hidden scores may overflow
        for rows in ops.query_blocks():
            total, row = ops.full(0.0), ops.full(0.0)
            if tangents.sinks is not None:
                weights = xp.astype(sink_weights(problem.sinks, lse[..., rows]), ops.dtype)
                total = weights * xp.astype(tangents.sinks, ops.dtype)[:, None]
            for columns, scaled, _, p in row_tiles(ops, rows, lse):
                d_score = score.slope(scaled, rows, columns) * _product_tangent(ops, tangents, rows, columns)
                if formula is not None:
                    d_score = d_score + ops.evaluate_formula(formula, ops.symbols(rows, columns, scaled))
                d = xp.astype(xp.where(p == 0, ops.full(0.0), p * d_score), ops.dtype)
                total = total + xp.sum(d, axis=-1)
                keep = keep_factor(problem, xp, rows, columns)
                row = row + ops.sum_over_keys(xp.astype(d * keep, ops.dtype), ops.widen(problem.value, columns))
                if tangents.value is not None:
                    kept = xp.astype(p * keep, ops.dtype)
                    row = row + ops.sum_over_keys(kept, ops.widen(tangents.value, columns))
            own = xp.astype(output[..., rows, :], ops.dtype)
            d_output[..., rows, :] = row - xp.where(total == 0, ops.full(0.0), total)[..., None] * own
            d_lse[..., rows] = xp.astype(total, d_lse.dtype)
    return xp.astype(d_output, problem.query.dtype), d_lse


def _product_tangent(ops: TileOps, tangents: Tangents, rows: slice, columns: slice) -> Any:
    """Return the tangent of Q Kᵀ · scale over a tile. The caller ignores its entries at hidden pairs, NaN and ∞ too."""
    problem, total = ops.problem, ops.full(0.0)
    for query, key in ((tangents.query, problem.key), (problem.query, tangents.key)):
        if query is not None and key is not None:
            total = total + ops.dot_products(ops.widen(query, rows), ops.widen(key, columns)) * problem.scale
    return total
