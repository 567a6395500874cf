"""Statistics with an entry for every key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ParameterError, check_count
from ..formula.expression import SYMBOLS, where
from .base import BackwardContext, ForwardContext, Outer, StatisticGradients, Tile
from .selection import Statistic

if TYPE_CHECKING:
    from ..call.problem import Problem

i, j = SYMBOLS["i"], SYMBOLS["j"]


@dataclass(frozen=True, eq=False, repr=False)
class Received(Statistic):
    """The weight that every key receives; see `received`."""

    how: Literal["sum", "mean", "max"] = "sum"

    name = "received"

    @property
    def is_linear(self) -> bool:
        return self.how != "max"

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, problem.m),)

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        xp, total = context.xp, arrays[0]
        if self.how == "max":
            largest = xp.astype(xp.max(tile.weights, axis=-2), total.dtype)
            total[..., tile.columns] = xp.maximum(total[..., tile.columns], largest)
        else:
            total[..., tile.columns] += xp.astype(xp.sum(tile.weights, axis=-2), total.dtype)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        return [arrays[0] / max(context.problem.n, 1)] if self.how == "mean" else arrays

    @property
    def backward_reads_tiles(self) -> bool:  # type: ignore[override]
        return self.how == "max"

    def backward(self, context: BackwardContext) -> StatisticGradients:
        if self.how == "max":
            is_first = i == context.lookup(_first_maximal_query(context), j)
            return StatisticGradients(weights=where(is_first, context.gradient_at(j), 0.0))
        share = 1 / max(context.problem.n, 1) if self.how == "mean" else 1.0
        return StatisticGradients(weights=context.gradient_at(j) * share)


def _first_maximal_query(context: BackwardContext) -> Any:
    """Return, for each key, the first query with the largest weight on the key; −1 if no weight on it is above 0.

    The result has the shape (*batch_shape, H, m).
    """
    problem = context.problem
    forward = ForwardContext(problem, context.lse, (*problem.batch_shape, problem.H))
    xp, shape = forward.xp, (*forward.outer, problem.m)
    largest, first = forward.full(0.0, shape, problem.accumulator), forward.full(-1, shape, "int64")
    for tile in context.tiles():
        current, queries = largest[..., tile.columns], first[..., tile.columns]
        top = xp.max(tile.weights, axis=-2)
        is_new = top > current
        largest[..., tile.columns] = xp.where(is_new, top, current)
        first[..., tile.columns] = xp.where(is_new, xp.argmax(tile.weights, axis=-2) + tile.rows.start, queries)
    return first


def received(how: Literal["sum", "mean", "max"] = "sum", last: int | None = None) -> Statistic:
    """Request the weight that every key j receives from the queries: Σᵢ P_ij, the mean over i, or max_i P_ij.

    The result is (..., H, m) in the accumulator's dtype (float64 for float64 arrays, else float32); 0 for a key that
    no query attends to. With grouped-query attention (GQA), H is the number of query heads. The result has a
    gradient. The gradient of a maximum goes to the weight of the first query that has the maximum.

    Parameters
    ----------
    how : {"sum", "mean", "max"}, default "sum"
        The mean divides by the number of queries, whether or not they attend to the key.
    last : int, optional
        Count only the last `last` queries, or all queries if there are fewer. Only these queries are computed.

    Raises
    ------
    ParameterError
        how is another word, or last is not a whole number of at least 1.

    References
    ----------
    For the sum: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    2023. For the last queries: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((3, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> _, (received,) = sightline.attention(x, x, x, mask=mask, see=[sightline.received()])
    >>> received.round(2)  # 1 + 1/2 + 1/3, 1/2 + 1/3, and 1/3
    array([1.83, 0.83, 0.33], dtype=float32)
    """
    if how not in ("sum", "mean", "max"):
        raise ParameterError(f"received(how={how!r})", '"sum", "mean" or "max"', 'received("sum")')
    if last is None:
        return Received(how)
    count = check_count("received(last={!r})", last, 1, "last=32, or last=None for all")
    return Received(how).rows(slice(-count, None))
