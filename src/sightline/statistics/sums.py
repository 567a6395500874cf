"""Sums over the keys: of p, the weight after softmax, times a formula of the pair or times rows of an array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from ..arrays.kinds import check_device, check_kind
from ..arrays.operations import broadcast_to, check_float_dtype, convert, dtype_name, namespace, needs_gradient
from ..errors import MaskError, ParameterError, ShapeError
from ..formula.derivative import ONE, ZERO, derivative, vanishes_with
from ..formula.evaluate_array import evaluate
from ..formula.expression import SYMBOLS, Apply, Expression, Lookup, apply, walk, where
from ..formula.tables import Table
from .base import BackwardContext, ForwardContext, KeyPart, Outer, StatisticGradients, Tile, weigh
from .selection import Statistic

if TYPE_CHECKING:
    from ..call.kernel import Result
    from ..call.problem import Problem

i, j, s, p = (SYMBOLS[name] for name in "ijsp")


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Statistic):
    """Σⱼ P_ij f_ij of every query, where the formula f does not read p; see `sum`."""

    factor: Any  # f; a condition counts as 1 and 0

    name = "sum"
    tile_inputs = ("weights", "scores")
    backward_reads_arrays = True
    is_mergeable = True

    def __repr__(self) -> str:
        return f"sum({times_factor(p, self.factor)}, over=j)"

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        refuse_learned([self], lambda table: needs_gradient(table.array))

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        xp, problem = context.xp, context.problem
        b, h, rows, columns = problem.positions(xp, tile.rows, tile.columns)
        symbols = {"b": b, "h": h, "i": rows, "j": columns, "n": problem.n, "m": problem.m, "s": tile.scores}
        factor = evaluate(self.factor, symbols, xp=xp, float_dtype=xp.float64, like=problem.query)
        arrays[0][..., tile.rows] += xp.astype(xp.sum(multiply(tile.weights, factor), axis=-1), arrays[0].dtype)

    def merge(self, parts: Sequence[KeyPart], lse: Any) -> list[Any]:
        return [reduce(add, [weigh(part.factor, part.arrays[0]) for part in parts])]

    def backward(self, context: BackwardContext) -> StatisticGradients:
        gradient, slope, scores = context.gradient_at(i), derivative(self.factor), None
        weights = times_factor(gradient, self.factor)
        if slope is not ZERO:
            scores = gradient * slope * apply("exp", s - context.lookup(context.finite_lse, i))
        weights_sum = context.gradient * context.arrays[0] if context.arrays else None
        return StatisticGradients(weights, scores, weights_sum=weights_sum)

    def map_formulas(self, change: Callable[[Any], Any]) -> Sum:
        return type(self)(change(self.factor))

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        return [self.name, to_text(self.factor)]


class Mass(Sum):
    """The weight of every query on the pairs that satisfy a condition; see `mass`."""

    name = "mass"

    def __repr__(self) -> str:
        return f"mass({self.factor!r})"


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


def times_factor(x: Expression, factor: Expression) -> Expression:
    """Return x · f as a formula. A condition f counts as 1 and 0."""
    return where(factor, x, 0.0) if factor.kind == "bool" else x if factor is ONE else x * factor


def multiply(weights: Any, factor: Any) -> Any:
    """Return P ∘ f. The product is 0 where P is 0, whatever f is there. A condition f counts as 1 and 0."""
    xp = namespace(weights)
    if dtype_name(factor) == "bool":
        return xp.where(factor, weights, xp.zeros_like(weights))
    return weights * xp.where(weights == 0, xp.zeros_like(weights), xp.astype(factor, weights.dtype))


def refuse_learned(see: Sequence[Statistic], is_learned: Callable[[Table], bool]) -> None:
    """Raise ParameterError if the formula of a statistic needs the gradient of a learned table."""

    def check(formula: Any) -> Any:
        for node in walk(formula) if isinstance(formula, Expression) else ():
            if isinstance(node, Lookup) and is_learned(node.table) and derivative(formula, node) is not ZERO:
                given = f"sum(p * ({formula}), over=j), with a table that requires a gradient"
                raise ParameterError(given, "tables without gradients", "t.detach() or jax.lax.stop_gradient(t)")
        return formula

    for statistic in see:
        statistic.map_formulas(check)


def sum(formula: Any, over: Any) -> Statistic:
    """Request Σⱼ p f over the keys of every query, where p is the weight P_ij and f is any formula of the pair.

    `sum(p * abs(i - j), over=j)` is the mean distance between a query and the keys that it attends to. The forward
    kernels compute the sum together with the output.

    The result is (..., H, n) in the accumulator's dtype (float64 for float64 arrays, else float32); 0 for a query
    without keys. p is the weight after softmax and before dropout; s is the final score. Hidden pairs add nothing,
    even if f is NaN or ∞ there. Query, key, sinks and the tables of the score get gradients; the tables of f get none.

    Parameters
    ----------
    formula : formula
        p times a formula of b, h, i, j, n, m, s and tables, such as `p * abs(i - j)`, `p * is_word[j]`,
        `where(j < i, p, 0)` or `-p * s / 2`. It must be proportional to p.
    over : the symbol j
        The axis that is summed.

    Raises
    ------
    ParameterError
        formula is not proportional to p, over is not j, or f reads a table that requires a gradient.
    FormulaError, TableError
        Raised by attention if the formula has no meaning or reads outside its table.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> from sightline import i, j, p
    >>> x, mask = np.zeros((4, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> see = {"distance": sightline.sum(p * (i - j), over=j)}
    >>> _, seen = sightline.attention(x, x, x, mask=mask, see=see)
    >>> seen["distance"]  # the mean of 0 to i
    array([0. , 0.5, 1. , 1.5], dtype=float32)
    """
    if (over[0] if isinstance(over, tuple) and len(over) == 1 else over) is not j:
        raise ParameterError(
            f"sum(formula, over={over!r})",
            "over=j, the sum over the keys of each query",
            'received() sums weights over queries, pooled(rows, columns) over cells, .sum("heads") over heads',
        )
    is_proportional = isinstance(formula, Expression) and vanishes_with(formula, p)
    factor = derivative(formula, p) if is_proportional else p
    if any(node is p for node in walk(factor)):
        raise ParameterError(
            f"sum({formula!r}, over=j)",
            "p times a formula without p",
            "sum(p * abs(i - j), over=j); sightline.tiles computes any other function of the weights",
        )
    match factor:
        case Apply("where", (condition, first, second)) if first is ONE and second is ZERO:
            return Sum(condition)
    return Sum(factor)


def mass(mask: Any) -> Statistic:
    """Request Σⱼ P_ij over the keys that satisfy a condition, such as the weight on a document or on a prefix.

    It is `sum(where(mask, p, 0), over=j)`, with the same gradient and errors. The result is (..., H, n) in the
    accumulator's dtype (float64 for float64 arrays, else float32), from 0 to 1; 0 for a query without keys.

    Parameters
    ----------
    mask : formula, function (b, h, i, j) or boolean array
        The condition. The weights of pairs for which it is True are summed. The condition hides no pair.

    Raises
    ------
    MaskError
        mask is None, a formula of a number, or reads p. Also raised by attention if mask is not a condition.

    Examples
    --------
    >>> import sightline
    >>> from sightline import i, j
    >>> a, see = sightline.data.load("minilm_cat").layers[0], [sightline.mass(j == i - 1)]
    >>> _, (before,) = sightline.attention(a.query, a.key, a.value, see=see)
    >>> before[1, :4, 1:].mean(-1).round(2)  # of four heads, head 2 attends to the token before
    array([0.06, 0.06, 1.  , 0.06], dtype=float32)
    """
    reads_p = isinstance(mask, Expression) and any(node is p for node in walk(mask))
    if mask is None or reads_p or (isinstance(mask, Expression) and mask.kind != "bool"):
        cure = "mass(i == j)" if mask is None else "sightline.tiles" if reads_p else f"sum(p * ({mask}), over=j)"
        raise MaskError(f"mass({mask})", "a condition of b, h, i and j. True pairs are summed", cure)
    return Mass(mask)


def weighted_sum(x: Any) -> Statistic:
    """Request (P x)_i = Σⱼ P_ij x_j: the product of the weights, before dropout, with an array x other than value.

    If x holds positions, the result is the mean position that a query attends to. If x has one-hot rows, the result is
    the weight on each group of keys. If x is the rollout matrix of earlier layers, the result is the attention rollout
    (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3).

    The result is (..., H, n, r) in the query's dtype; 0 for a query without keys. The weights and x get gradients.

    Parameters
    ----------
    x : (m, r), (G, m, r) or (..., G, m, r) floats
        One row for every key. Attention converts x to the query's dtype.

    Raises
    ------
    ParameterError, DtypeError
        x is a formula, or not a plain array of floats.
    ShapeError, DeviceError
        Raised by attention if x does not fit the keys, or lies on another device than the query.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((3, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> places = np.arange(3, dtype=np.float32)[:, None]
    >>> _, (mean,) = sightline.attention(x, x, x, mask=mask, see=[sightline.weighted_sum(places)])
    >>> mean.ravel().round(2)  # the mean of the positions 0 to i
    array([0. , 0.5, 1. ], dtype=float32)
    """
    if isinstance(x, Expression):
        raise ParameterError("weighted_sum(formula)", "an array with one row for every key", "sum(p * formula, over=j)")
    check_kind("x of weighted_sum(x)", x)
    check_float_dtype("x of weighted_sum(x)", x)
    return WeightedSum(x)
