"""Statistics with an entry for every query."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import namespace, resolve_dtype
from ..errors import MaskError, ParameterError
from ..formula.expression import SYMBOLS, Expression, where
from ..formula.render_array import evaluate
from .base import MAX_RESULT_BYTES, BackwardContext, ForwardContext, Outer, StatisticGradients, Tile, itemsize
from .selection import Statistic

if TYPE_CHECKING:
    from ..problem import Problem

__all__ = [
    "Entropy",
    "Largest",
    "Lse",
    "Mass",
    "MaxScore",
    "Top",
    "TopK",
    "entropy",
    "lse",
    "mass",
    "max_score",
    "top_k",
]

i, j, s = (SYMBOLS[name] for name in "ijs")


@dataclass(frozen=True, eq=False, repr=False)
class Lse(Statistic):
    """The normaliser of every query; see `lse`."""

    name = "lse"
    tile_inputs = ()

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, n),)

    def start(self, context: ForwardContext) -> list[Any]:
        return [context.xp.astype(context.lse, resolve_dtype(context.xp, context.problem.accumulator))]

    def backward(self, context: BackwardContext) -> StatisticGradients:
        xp, gradient, problem = namespace(context.lse), context.gradient, context.problem
        if "h" not in context.remaining_axes:
            gradient = gradient[..., None, :]
        return StatisticGradients(lse=xp.broadcast_to(gradient, (*problem.batch_shape, problem.H, problem.n)))


class Largest(NamedTuple):
    """What `max_score` finds."""

    score: Any
    where: Any


@dataclass(frozen=True, eq=False, repr=False)
class MaxScore(Statistic):
    """The largest score of every query and its key; see `max_score`."""

    name = "max_score"
    tile_inputs = ("scores",)
    fill_values = (-float("inf"), -1)
    supports_mean = False

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return (*outer, n), (*outer, n)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return (*super().dtypes(problem), "int64")

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        xp = context.xp
        current, places = (array[..., tile.rows] for array in arrays)
        top = xp.astype(xp.max(tile.scores, axis=-1), current.dtype)
        new = (top > current) | (xp.isnan(top) & ~xp.isnan(current))
        arrays[0][..., tile.rows] = xp.where(new, top, current)
        arrays[1][..., tile.rows] = xp.where(new, xp.argmax(tile.scores, axis=-1) + tile.columns.start, places)

    def build_result(self, arrays: Sequence[Any]) -> Largest:
        return Largest(*arrays)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        result = context.compute(self)
        score_gradient = where(j == context.lookup(result.where, i), context.gradient_at(i), 0.0)
        return StatisticGradients(
            scores=score_gradient, includes_zero_weights=_has_underflowed_maximum(context, result.score)
        )


def _has_underflowed_maximum(context: BackwardContext, largest: Any) -> bool:
    """Whether a sink leaves some query's largest score a weight that may be 0 by rounding; else it is 1/m at least."""
    if context.problem.sinks is None:
        return False
    xp, least = namespace(context.lse), math.log(np.finfo(context.problem.accumulator).tiny)
    return bool(xp.any((largest != -math.inf) & (largest - context.lse < least)))


@dataclass(frozen=True, eq=False, repr=False)
class Entropy(Statistic):
    """How spread out every query's weights are; see `entropy`."""

    name = "entropy"

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, n),)

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        xp, p = context.xp, tile.weights
        logarithms = xp.log(xp.where(p > 0, p, xp.ones_like(p)))  # P ln P is 0 where P is
        arrays[0][..., tile.rows] += xp.astype(xp.sum(-p * logarithms, axis=-1), arrays[0].dtype)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        xp, normaliser = namespace(context.lse), context.lse
        finite_lse = xp.where(normaliser == -float("inf"), xp.zeros_like(normaliser), normaliser)
        return StatisticGradients(weights=-(s - context.lookup(finite_lse, i) + 1.0) * context.gradient_at(i))


class Top(NamedTuple):
    """What `top_k` finds."""

    weights: Any
    where: Any


@dataclass(frozen=True, eq=False, repr=False)
class TopK(Statistic):
    """The k largest weights of every query and their keys; see `top_k`."""

    k: int

    name = "top_k"
    tile_inputs = ("weights", "scores")
    fill_values = (-1.0, -1)  # weights are below 0 past the seen keys until the end
    supports_mean = is_differentiable = False

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return (*outer, n, self.k), (*outer, n, self.k)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return (*super().dtypes(problem), "int64")

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        size = math.prod((*outer, n, self.k)) * sum(map(itemsize, self.dtypes(problem)))
        if size > MAX_RESULT_BYTES and self.k > problem.m:
            raise ParameterError(
                f"{self!r} of {problem.m} keys, {size:,} bytes", f"k up to {problem.m}", f"top_k({problem.m})"
            )

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        xp = context.xp
        current, places = (array[..., tile.rows, :] for array in arrays)
        seen = tile.scores != -float("inf")
        weights = xp.astype(xp.where(seen, tile.weights, -xp.ones_like(tile.weights)), current.dtype)
        keys = xp.arange(tile.columns.start, tile.columns.stop, dtype=places.dtype, device=weights.device)
        keys = xp.where(seen, keys, -xp.ones_like(keys))
        weights, keys = xp.concat([current, weights], axis=-1), xp.concat([places, keys], axis=-1)
        order = xp.argsort(weights, axis=-1, descending=True, stable=True)[..., : self.k]
        for array, values in zip(arrays, (weights, keys), strict=True):
            array[..., tile.rows, :] = xp.take_along_axis(values, order, axis=-1)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        weights, places = arrays
        return [context.xp.where(places < 0, context.xp.zeros_like(weights), weights), places]

    def build_result(self, arrays: Sequence[Any]) -> Top:
        return Top(*arrays)


@dataclass(frozen=True, eq=False, repr=False)
class Mass(Statistic):
    """The weight of every query on what a condition holds for; see `mass`."""

    mask: Any  # a formula once it is asked

    name = "mass"

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, n),)

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        xp, problem = context.xp, context.problem
        b, h, rows, columns = problem.positions(xp, tile.rows, tile.columns)
        symbols = {"b": b, "h": h, "i": rows, "j": columns, "n": problem.n, "m": problem.m}
        counted = evaluate(self.mask, symbols, xp=xp, float_dtype=xp.float64, like=problem.query)
        p = xp.where(counted, tile.weights, xp.zeros_like(tile.weights))
        arrays[0][..., tile.rows] += xp.astype(xp.sum(p, axis=-1), arrays[0].dtype)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        return StatisticGradients(weights=where(self.mask, context.gradient_at(i), 0.0))

    def map_formulas(self, change: Callable[[Any], Any]) -> Mass:
        return Mass(change(self.mask))

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        return [self.name, to_text(self.mask)]


def lse() -> Statistic:
    """lse_i = ln Σⱼ exp(S_ij) over the keys i may see, the sink counted.

    Returns, in `seen`, (..., H, n) in the accumulator's dtype (float64 for float64, else float32), in nats; −∞ for a
    query that sees nothing. Two parts of the keys merge by it. Source: Milakov and Gimelshein, "Online normalizer
    calculation for softmax", 2018.
    """
    return Lse()


def max_score() -> Statistic:
    """max_j S_ij and the first j that has it, the sink not counted.

    Returns, in `seen`, a named tuple: `score` (..., H, n) in the accumulator's dtype, in nats, and `where` (..., H, n)
    int64; −∞ and −1 for a query that sees nothing. Its gradient goes to the score that is largest. QK-clip bounds it
    to keep training steady. Source: Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, section 2.1.
    """
    return MaxScore()


def entropy() -> Statistic:
    """H_i = −Σⱼ P_ij ln P_ij over the keys: how spread out the weights are. A sink's own term is not counted.

    Returns, in `seen`, (..., H, n) in the accumulator's dtype, in nats, from 0 to ln m; 0 for a query that sees
    nothing. Where it falls towards 0, training becomes unstable. Source: Zhai et al., "Stabilizing Transformer Training
    by Preventing Attention Entropy Collapse", 2023, section 3.
    """
    return Entropy()


def top_k(k: int) -> Statistic:
    """The k largest weights of every query, and the keys that have them; the smaller j first among equals.

    Parameters
    ----------
    k : int
        At least 1.

    Returns, in `seen`, a named tuple: `weights` (..., H, n, k) in the accumulator's dtype, descending, and `where`
    (..., H, n, k) int64; 0 and −1 past the seen keys. It has no gradient.

    Raises
    ------
    ParameterError
        k is no whole number of at least 1; or, when the question is asked, more than there are keys where that takes
        more than 2 GiB.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ParameterError(f"top_k(k={k!r})", "a whole number of at least 1", "top_k(8)")
    return TopK(k)


def mass(mask: Any) -> Statistic:
    """Σⱼ P_ij over the keys for which a condition of b, h, i and j holds: the weight on a document, a prefix, oneself.

    Parameters
    ----------
    mask : formula, function (b, h, i, j) or boolean array
        True is counted. Read and checked as a mask is; it hides nothing.

    Returns, in `seen`, (..., H, n) in the accumulator's dtype, from 0 to 1; 0 for a query that sees nothing.

    Raises
    ------
    MaskError, FormulaError, TableError
        As a mask does, when the question is asked; None is no condition.
    """
    if mask is None:
        raise MaskError("mass(None)", "a condition of b, h, i and j, True is counted", "mass(i == j)")
    return Mass(mask)
