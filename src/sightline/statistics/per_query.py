"""Statistics with an entry or a row of entries for every query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.operations import broadcast_to, convert, dtype_name, itemsize, namespace, resolve_dtype
from ..arrays.unreadable import check_device
from ..errors import ParameterError, ShapeError, check_count
from .contexts import MAX_RESULT_BYTES, BackwardContext, ForwardContext, KeyPart, Outer, StatisticGradients, Tile, weigh
from .statistic import Statistic

if TYPE_CHECKING:
    from ..call.kernel import Result
    from ..call.problem import Problem


@dataclass(frozen=True, eq=False, repr=False)
class Lse(Statistic):
    """The lse of every query; see `lse`."""

    name = "lse"
    num_arrays = 0
    fill_values = (-math.inf,)
    fused_role = "lse"

    def start(self, context: ForwardContext) -> list[Any]:
        return [context.xp.astype(context.lse, resolve_dtype(context.xp, context.problem.accumulator))]

    def merge(self, parts: Sequence[KeyPart], lse: Any) -> list[Any]:
        return [lse]

    def backward(self, context: BackwardContext) -> StatisticGradients:
        return StatisticGradients(lse=context.gradient)


def entropy_of(weights: Any) -> Any:
    """Return −Σⱼ P_ij ln P_ij, (..., n), of weights P, an array (..., n, m). P ln P is 0 for P = 0."""
    xp = namespace(weights)
    return xp.sum(-weights * xp.log(xp.where(weights > 0, weights, xp.ones_like(weights))), axis=-1)


class TopKResult(NamedTuple):
    """The result of `top_k`: the largest weights of each query (`weights`) and the indices of their keys (`where`)."""

    weights: Any
    where: Any


@dataclass(frozen=True, eq=False, repr=False)
class TopK(Statistic):
    """The k largest weights of every query, and their keys; see `top_k`."""

    k: int

    name = "top_k"
    finds = True
    fill_values = (0.0, -1)
    is_mergeable = True
    is_differentiable = False

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return (*outer, n, self.k), (*outer, n, self.k)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        size = math.prod((*outer, n, self.k)) * sum(map(itemsize, self.dtypes(problem)))
        if size > MAX_RESULT_BYTES and self.k > problem.m:
            raise ParameterError(
                f"{self!r} of {problem.m} keys, {size:,} bytes", f"k up to {problem.m}", f"top_k({problem.m})"
            )

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        xp = context.xp
        current, current_keys = (array[..., tile.rows, :] for array in arrays)
        weights = xp.concat([current, xp.astype(tile.weights, current.dtype)], axis=-1)
        keys = xp.arange(tile.columns.start, tile.columns.stop, dtype=current_keys.dtype, device=weights.device)
        keys = xp.where(tile.scores == -math.inf, -xp.ones_like(keys), keys)
        largest = self._largest(weights, xp.concat([current_keys, keys], axis=-1))
        for array, values in zip(arrays, largest, strict=True):
            array[..., tile.rows, :] = values

    def _largest(self, weights: Any, keys: Any) -> list[Any]:
        """Return the k largest weights and their keys. Entries without a key come last, with the weight 0.

        Of equal weights, the first one comes first.
        """
        xp = namespace(weights)
        marked = xp.where(keys < 0, -xp.ones_like(weights), weights)
        order = xp.argsort(-xp.where(marked != marked, xp.inf, marked), axis=-1, stable=True)[..., : self.k]
        marked, keys = (xp.take_along_axis(array, order, axis=-1) for array in (marked, keys))
        return [xp.where(keys < 0, xp.zeros_like(marked), marked), keys]

    def merge(self, parts: Sequence[KeyPart], lse: Any) -> list[Any]:
        xp = namespace(lse)
        weights = xp.concat([weigh(part.factor[..., None], part.arrays[0]) for part in parts], axis=-1)
        keys = xp.concat([part.arrays[1] for part in parts], axis=-1)
        order = xp.argsort(keys, axis=-1, stable=True)
        return self._largest(*[xp.take_along_axis(array, order, axis=-1) for array in (weights, keys)])

    def build_result(self, arrays: Sequence[Any]) -> TopKResult:
        return TopKResult(*arrays)


@dataclass(frozen=True, eq=False, repr=False)
class WeightedSum(Statistic):
    """The product P x; see `weighted_sum`. Kernels compute it as attention with x in place of value."""

    x: Any

    name = "weighted_sum"
    has_own_problem = True

    def __repr__(self) -> str:
        return f"weighted_sum({'×'.join([str(length) for length in self.x.shape])} {dtype_name(self.x)})"

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, n, self.x.shape[-1]),)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return (dtype_name(problem.query),)

    def _rows(self, problem: Problem) -> Any:
        """Return x in the query's library. An x with a batch axis gets a head axis if the caller's arrays have none."""
        x = convert(self.x, problem.query)
        return x[..., None, :, :] if problem.heads_squeezed and x.ndim > 2 else x

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        shape, whole = tuple(self._rows(problem).shape), (*problem.batch_shape, problem.G, problem.m)
        own = shape[:-1]
        fits = len(shape) > 1 and len(own) <= len(whole) and own[-1] == whole[-1]
        if not fits or any(a not in (1, w) for a, w in zip(own[::-1], whole[::-1], strict=False)):
            raise ShapeError(
                f"weighted_sum(x) of shape {tuple(self.x.shape)}",
                f"(m, r), (G, m, r) or (..., G, m, r), with m = {problem.m} keys, G = {problem.G} key heads and any r",
                "give x one row for every key",
            )
        check_device("x of weighted_sum", self.x, problem.query)

    def make_own_problem(self, problem: Problem) -> Problem:
        xp = namespace(problem.query)
        if problem.row_formats is not None:  # no kernel reads codes as keys and floats as values
            key = problem.row_formats[0].unpack(problem.key)
            problem = replace(problem, query=xp.astype(problem.query, key.dtype), key=key, row_formats=None)
        x = xp.astype(self._rows(problem), problem.query.dtype)
        shape = (*problem.batch_shape, problem.G, *x.shape[-2:])
        return problem.with_statistics(value=broadcast_to(x, shape))

    def extract_result(self, result: Result, problem: Problem) -> Any:
        return namespace(result.output).astype(result.output, problem.query.dtype, copy=False)


def lse() -> Statistic:
    """Request lse_i = ln Σⱼ exp(S_ij) over the keys that query i attends to. `sinks=` adds exp(sink logit) to the sum.

    The result is (..., H, n) in the accumulator's dtype (float64 for float64 arrays, else float32), in nats; −∞ for a
    query without keys and without a sink logit. `sightline.merge` uses lse to merge attention over disjoint sets of
    keys. lse has a gradient. Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((3, 1), np.float32), sightline.causal()  # all scores are 0
    >>> _, (lse,) = sightline.attention(x, x, x, mask=mask, see=[sightline.lse()])
    >>> np.exp(lse).round(2)  # sums of one, two and three exp(0)
    array([1., 2., 3.], dtype=float32)
    """
    return Lse()


def top_k(k: int) -> Statistic:
    """Request the k largest weights of every query and their keys; among equal weights, the smaller j comes first.

    The result is a named tuple: `weights` (..., H, n, k) in the accumulator's dtype (float64 for float64 arrays, else
    float32), in descending order, and `where` (..., H, n, k) int64, the key positions j. Weights are equal if they are
    equal in that dtype, so all weights that underflow to 0 are equal. If a query has fewer than k keys, the remaining
    entries are 0 in `weights` and −1 in `where`. The statistic has no gradient.

    Parameters
    ----------
    k : int
        At least 1.

    Raises
    ------
    ParameterError
        k is not a whole number of at least 1. Also raised by attention if k exceeds m and the result exceeds 2 GiB.

    Examples
    --------
    >>> import sightline
    >>> cat = sightline.data.load("minilm_cat")
    >>> a, mask, see = cat.layers[0], sightline.padding(cat.lengths), [sightline.top_k(1)]
    >>> _, (top,) = sightline.attention(a.query, a.key, a.value, mask=mask, see=see)
    >>> [cat.tokens[0][j] for j in top.where[0, 2, :7, 0]]  # head 2 attends to the token before
    ['[CLS]', '[CLS]', 'the', 'cat', 'ate', 'the', 'rat']
    """
    return TopK(check_count("top_k(k={!r})", k, 1, "top_k(8)"))
