"""The class `Statistic`; statistics made from others: of some queries or heads, sums or means over heads, layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..arrays.operations import convert, namespace
from ..errors import ParameterError
from ..formula.expression import SYMBOLS, Expression
from ..formula.tables import Table
from .base import BackwardContext, ForwardContext, Outer, StatisticBase, StatisticGradients, Tile, literal_text
from .head_factors import Factors, check_factors, format_factors, multiply_heads, parse_factors
from .restriction import (
    Indices,
    contiguous_span,
    format_indices,
    parse_indices,
    resolve_heads,
    resolve_indices,
    restrict,
)

if TYPE_CHECKING:
    from ..call.kernel import Result
    from ..call.problem import Problem


class Statistic(StatisticBase):
    """A statistic with methods that restrict it to some queries and heads, or sum or average it over an axis.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.array([0, 1, 2], np.float32).reshape(1, 3, 1, 1)  # 3 heads, with lse 0, 1 and 4
    >>> lse = sightline.lse()
    >>> see = [lse.heads([2, 0]), lse.mean("heads"), lse.sum("heads", weights=[0, -1, 1])]
    >>> _, (some, mean, difference) = sightline.attention(x, x, x, see=see)
    >>> some.ravel(), mean.round(2), difference
    (array([4., 0.], dtype=float32), array([[1.67]], dtype=float32), array([[3.]], dtype=float32))
    """

    def rows(self, indices: Any) -> Selection:
        """Return the statistic restricted to these queries. Only these queries are computed.

        Parameters
        ----------
        indices : whole numbers or a slice
            The positions of the queries, in the order of the result; a negative one counts from the last query. In
            formulas, i stays the position of the query among all queries.

        Raises
        ------
        ParameterError
            indices are neither whole numbers nor a slice, or rows are already selected. Also raised by attention if an
            index is out of range.

        Examples
        --------
        >>> import numpy as np, sightline
        >>> x, mask = np.zeros((4, 1), np.float32), sightline.causal()  # tokens with equal scores
        >>> see = [sightline.weights().rows([1, -1])]
        >>> _, (rows,) = sightline.attention(x, x, x, mask=mask, see=see)
        >>> rows  # queries 1 and 3
        array([[0.5 , 0.5 , 0.  , 0.  ],
               [0.25, 0.25, 0.25, 0.25]], dtype=float32)
        """
        return _select(self, rows=indices)

    def heads(self, indices: Any) -> Selection:
        """Return the statistic restricted to these query heads. Indices and errors are like those of `rows`."""
        return _select(self, heads=indices)

    def mean(self, axis: str, weights: Any = None) -> Statistic:
        """Return the statistic X averaged over the heads, the batch, or the calls of a watch.

        The mean over heads is Σ_h w_h X_h / Σ_h w_h, as in `numpy.average`; without `weights` every w_h is 1. Of
        `weights()` and `scores()` only the mean is stored: n × m numbers for each batch entry, not H × n × m.

        Parameters
        ----------
        axis : {"heads", "batch", "layers"}
            The axis that is removed: (..., H, n) becomes (..., n) or (H, n). "batch" means all leading axes together.
            "layers" means all calls that a `watch` records. Their results are added while the model runs, so that one
            result is stored instead of one for each call.
        weights : H numbers, or (layers, H) numbers in a watch, optional
            The weight w_h of each head, for the axis "heads" only, as a list or an array that requires no gradient. In
            a watch, row l of a matrix belongs to layer l in the model's order. Each row is divided by its own sum.

        Raises
        ------
        ParameterError
            axis is another word, the axis was removed before, the statistic returns key positions, which have no mean,
            or weights are not finite numbers or have the sum 0. Also raised by attention if there are not as many
            weights as heads, or if axis is "layers" and no watch records the call.
        """
        return _reduce(self, "mean", axis, weights)

    def sum(self, axis: str, weights: Any = None) -> Statistic:
        """Return the sum Σ_h w_h X_h of the statistic X over the heads, or its sum over the batch or a watch's calls.

        The parameters and errors are those of `mean`, but weights whose sum is 0 are allowed.
        """
        return _reduce(self, "sum", axis, weights)

    def at_layer(self, layer: int) -> Statistic:
        """Return the statistic that a watch requests of the layer with this number."""
        return self

    def check_layers(self, count: int, is_end: bool = False) -> None:
        """Raise ParameterError if the statistic has one row of weights for each layer, and fewer rows than `count`.

        If `is_end`, a watch of `count` layers has ended, and more rows than `count` are an error, too.
        """

    def make_own_problem(self, problem: Problem) -> Problem:
        """Return a problem with this statistic alone; `extract_result` reads the result of that problem."""
        return problem.with_statistics(self)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        """Return this statistic from the result of its own problem."""
        return result.seen[0]


@dataclass(frozen=True, eq=False, repr=False)
class Derived(Statistic):
    """A statistic that is made from another one, `of`."""

    of: Statistic

    @property
    def is_differentiable(self) -> bool:  # type: ignore[override]
        return self.of.is_differentiable

    @property
    def axes(self) -> str:  # type: ignore[override]
        return self.of.axes

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return self.of.dtypes(problem)

    def build_result(self, arrays: Sequence[Any]) -> Any:
        return self.of.build_result(arrays)

    def map_formulas(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, of=self.of.map_formulas(change))

    def at_layer(self, layer: int) -> Statistic:
        return replace(self, of=self.of.at_layer(layer))

    def check_layers(self, count: int, is_end: bool = False) -> None:
        self.of.check_layers(count, is_end)


@dataclass(frozen=True, eq=False, repr=False)
class Selection(Derived):
    """A statistic of some queries and heads. It is computed from a problem that has only these queries and heads."""

    queries: Indices | None = None
    query_heads: Indices | None = None

    name = "selection"
    has_own_problem = True

    @property
    def fill_values(self) -> tuple[float, ...]:  # type: ignore[override]
        return self.of.fill_values

    def __repr__(self) -> str:
        shown = [
            f".{name}({format_indices(indices)})"
            for name, indices in (("rows", self.queries), ("heads", self.query_heads))
            if indices is not None
        ]
        return f"{self.of!r}{''.join(shown)}"

    def _restricted_sizes(self, problem: Problem, outer: Outer, n: int) -> tuple[Outer, int]:
        if self.query_heads is not None:
            outer = (*outer[:-1], len(resolve_indices("heads", self.query_heads, problem.H)))
        if self.queries is not None:
            span = contiguous_span(self.queries, n)
            n = len(resolve_indices("rows", self.queries, n)) if span is None else span[1] - span[0]
        return outer, n

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, *self._restricted_sizes(problem, outer, n))

    def head_axis(self, batch_ndim: int) -> int | None:
        return self.of.head_axis(batch_ndim)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        if problem.heads_squeezed and self.query_heads is not None:
            raise ParameterError(f"{self!r} of arrays without heads", "arrays (..., H, n, d)", "omit .heads(...)")
        self.of.check(problem, *self._restricted_sizes(problem, outer, n))

    def make_own_problem(self, problem: Problem) -> Problem:
        return restrict(self.of.make_own_problem(problem), self.queries, self.query_heads)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        return self.of.extract_result(result, problem)

    def mean(self, axis: str, weights: Any = None) -> Statistic:
        return self._reduced(self.of.mean(axis, weights))

    def sum(self, axis: str, weights: Any = None) -> Statistic:
        return self._reduced(self.of.sum(axis, weights))

    def _reduced(self, of: Statistic) -> Statistic:
        """Return this selection of `of`, a sum or mean. A sum over layers is returned as a sum of this selection."""
        if isinstance(of, OverLayers):
            return OverLayers(Selection(of.of, self.queries, self.query_heads), of.how)
        return Selection(of, self.queries, self.query_heads)


@dataclass(frozen=True, eq=False, repr=False)
class Mean(Derived):
    """A statistic averaged over the heads, the batch or both. If `of` is linear, it receives averaged tiles.

    `factors` are the numbers by which the heads are multiplied before they are added: one for each head, one row of
    numbers for each layer of a watch, or 1.0 for all. None stands for 1/H. `sums_batch` asks for the sum over the
    batch in place of the mean.
    """

    over_heads: bool = False
    over_batch: bool = False
    factors: Factors = None
    sums_batch: bool = False

    name = "mean"

    @property
    def reads_tiles(self) -> bool:  # type: ignore[override]
        return self.of.reads_tiles

    @property
    def has_own_problem(self) -> bool:  # type: ignore[override]
        return self.of.has_own_problem

    def __repr__(self) -> str:
        sums = "b" * (self.over_batch and self.sums_batch) + "h" * (self.over_heads and self.factors == 1.0)
        if len(sums) == self.over_batch + self.over_heads and (text := self.of.format_over(sums + self.of.axes)):
            return text
        heads = '.mean("heads")' if self.factors is None else f'.sum("heads"{format_factors(self.factors)})'
        batch = '.sum("batch")' if self.sums_batch else '.mean("batch")'
        return repr(self.of) + heads * self.over_heads + batch * self.over_batch

    def remaining_outer(self, outer: Outer) -> Outer:
        """Return the lengths of the axes (*batch_shape, H) that averaging leaves."""
        return (() if self.over_batch else outer[:-1]) + (() if self.over_heads else outer[-1:])

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, self.remaining_outer(outer), n)

    def head_axis(self, batch_ndim: int) -> int | None:
        return None if self.over_heads else 0 if self.over_batch else batch_ndim

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        self.of.check(problem, outer if self.has_own_problem else self.remaining_outer(outer), n)
        check_factors(self.factors, outer[-1])

    def start(self, context: ForwardContext) -> list[Any]:
        if not self.of.is_linear:
            return self.of.start(context)
        reduced = replace(context, outer=self.remaining_outer(context.outer))
        if 0 not in context.outer:
            return self.of.start(reduced)
        shapes = self.of.shapes(context.problem, reduced.outer, context.problem.n)  # the mean over no heads is 0
        return [reduced.full(0.0, *array) for array in zip(shapes, self.dtypes(context.problem), strict=True)]

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        if self.of.is_linear:
            entries = self.average(self.of.entries(tile, context), len(context.problem.batch_shape))
            self.of.add_entries(arrays, entries, tile, context)
        else:
            self.of.add(arrays, tile, context)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        finished = self.of.finish(arrays, context)
        if self.of.is_linear:
            return finished
        return [self.average(array, len(context.problem.batch_shape)) for array in finished]

    def average(self, array: Any, batch_ndim: int) -> Any:
        """Return the mean or sum of an array (*batch_shape, H, ...) over the axes that this statistic removes."""
        averaged = self.averaged_axes(batch_ndim)
        axes = (*range(batch_ndim),) * self.over_batch + (batch_ndim,) * self.over_heads
        array = multiply_heads(array, batch_ndim, self.factors)
        total = namespace(array).sum(array, axis=axes, dtype=array.dtype) if axes else array
        return total / max(math.prod([array.shape[axis] for axis in averaged]), 1) if averaged else total

    def averaged_axes(self, batch_ndim: int) -> tuple[int, ...]:
        """Return the axes of (*batch_shape, H) that are averaged over. A sum over heads or batch is not an average."""
        over_batch, over_heads = self.over_batch and not self.sums_batch, self.over_heads and self.factors is None
        return (*range(batch_ndim),) * over_batch + (batch_ndim,) * over_heads

    def backward(self, context: BackwardContext) -> StatisticGradients:
        problem = context.problem
        count = 1 if self.sums_batch or not self.over_batch else problem.B
        count *= problem.H if self.over_heads and self.factors is None else 1
        remaining_axes = "b" * (not self.over_batch) + "h" * (not self.over_heads)
        gradients = self.of.backward(
            replace(context, gradient=context.gradient / max(count, 1), remaining_axes=remaining_axes, arrays=())
        )
        if not isinstance(self.factors, tuple):
            return gradients
        factors = context.xp.astype(convert(np.asarray(self.factors), context.lse), context.lse.dtype)
        return gradients.multiply(Table(factors)[SYMBOLS["h"]], factors[:, None])

    def make_own_problem(self, problem: Problem) -> Problem:
        return self.of.make_own_problem(problem) if self.has_own_problem else super().make_own_problem(problem)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        if not self.has_own_problem:
            return super().extract_result(result, problem)
        return self.average(self.of.extract_result(result, problem), len(problem.batch_shape))

    @property
    def layer_factors(self) -> tuple[Any, ...]:
        """The factors of each layer of a watch; () if all layers have the same."""
        rows = self.factors if isinstance(self.factors, tuple) else ()
        return rows if rows and isinstance(rows[0], tuple) else ()

    def at_layer(self, layer: int) -> Statistic:
        return replace(self, factors=self.layer_factors[layer]) if self.layer_factors else self

    def check_layers(self, count: int, is_end: bool = False) -> None:
        rows = len(self.layer_factors)
        if rows and (rows < count or (is_end and rows != count)):
            raise ParameterError(
                f"weights of {rows} layers, in a watch of {'' if is_end else 'at least '}{count} layers",
                "a row of weights for each layer",
                "a row for each watched layer; layers=... of the watch selects layers",
            )

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        flags = repr(self.over_heads), repr(self.over_batch), literal_text(self.factors), repr(self.sums_batch)
        return [self.name, *flags, *self.of.serialize(to_text)]


@dataclass(frozen=True, eq=False, repr=False)
class OverLayers(Derived):
    """The sum or mean of a statistic over the calls that a watch records; see `Statistic.mean`.

    A watch requests `of` for each call. `recording.Total` adds the results.
    """

    how: str

    name = "over_layers"
    has_own_problem = True

    def __repr__(self) -> str:
        return f'{self.of!r}.{self.how}("layers")'

    def rows(self, indices: Any) -> OverLayers:  # type: ignore[override]
        return replace(self, of=self.of.rows(indices))

    def heads(self, indices: Any) -> OverLayers:  # type: ignore[override]
        return replace(self, of=self.of.heads(indices))

    def mean(self, axis: str, weights: Any = None) -> OverLayers:
        return self._reduced(self.of.mean(axis, weights))

    def sum(self, axis: str, weights: Any = None) -> OverLayers:
        return self._reduced(self.of.sum(axis, weights))

    def _reduced(self, of: Statistic) -> OverLayers:
        if isinstance(of, OverLayers):
            raise ParameterError(f'a sum or mean over "layers" of {self!r}', "one sum or mean over layers", repr(self))
        return replace(self, of=of)

    def at_layer(self, layer: int) -> Statistic:
        return self.of.at_layer(layer)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        raise ParameterError(
            f"{self!r} of one call of attention",
            "sums and means over layers in a watch, which sees all layers",
            f'see=[{self!r}] in `watch(model, see=...)`, or leave out .{self.how}("layers")',
        )


def _select(of: Statistic, rows: Any = None, heads: Any = None) -> Selection:
    """Return the statistic restricted to these queries or heads, and to those that were selected earlier."""
    queries = None if rows is None else parse_indices("rows", rows)
    query_heads = None if heads is None else parse_indices("heads", heads)
    if not isinstance(of, Selection):
        return Selection(of, queries, query_heads)
    for name, old, new in (("rows", of.queries, queries), ("heads", of.query_heads, query_heads)):
        if old is not None and new is not None:
            raise ParameterError(
                f"{of}.{name}({format_indices(new)})", f"{name} selected once", f"select all {name} in one call"
            )
    queries = of.queries if queries is None else queries
    return Selection(of.of, queries, of.query_heads if query_heads is None else query_heads)


def _reduce(of: Statistic, how: str, axis: Any, weights: Any) -> Statistic:
    """Return the sum or mean of a statistic over an axis."""
    if axis not in ("heads", "batch", "layers"):
        raise ParameterError(f"{how}({axis!r})", '"heads", "batch" or "layers"', f'weights().{how}("heads")')
    if len(of.fill_values) > 1:
        raise ParameterError(
            f"{of}.{how}({axis!r}), which finds positions",
            "statistics without positions",
            "average its arrays yourself",
        )
    if weights is not None and axis != "heads":
        raise ParameterError(f"{how}({axis!r}, weights=...)", 'weights for "heads"', f'{how}("heads", weights=...)')
    if axis == "layers":
        return OverLayers(of, how)
    mean = of if isinstance(of, Mean) else Mean(of)
    if axis == "batch":
        if mean.over_batch and (how == "sum") != mean.sums_batch:
            raise ParameterError(f'{of}.{how}("batch")', "one sum or mean over the batch", str(of))
        return replace(mean, over_batch=True, sums_batch=how == "sum")
    factors = parse_factors(how, weights)
    if mean.over_heads and (factors, mean.factors) != (None, None):
        raise ParameterError(f'{of}.{how}("heads")', "one sum or mean over heads", str(of))
    return replace(mean, over_heads=True, factors=factors)


def spread_mean(statistic: Statistic, gradient: Any, shape: tuple[int, ...], batch_ndim: int) -> Any:
    """Return the gradient of a NumPy array (*batch_shape, H, ...) of this shape from the gradient of its mean or sum.

    The statistic is a `Mean`, or a selection of a `Mean`. For any other statistic the gradient is returned unchanged.
    """
    of = statistic.of if isinstance(statistic, Selection) else statistic
    if not isinstance(of, Mean):
        return gradient
    axes = (*range(batch_ndim),) * of.over_batch + (batch_ndim,) * of.over_heads
    count = math.prod([shape[axis] for axis in of.averaged_axes(batch_ndim)])
    return multiply_heads(
        np.broadcast_to(np.expand_dims(gradient, axes), shape) / max(count, 1), batch_ndim, of.factors
    )


def unwrap_mean(statistic: Statistic) -> Statistic:
    """Return the statistic that a `Mean` averages; any other statistic unchanged."""
    return statistic.of if isinstance(statistic, Mean) else statistic


def solve_selections_separately(problem: Problem, run: Callable[[Problem], Result]) -> Result:
    """Return the result of `run` for the problem. Each statistic with its own problem needs a further call of `run`."""
    together = [statistic for statistic in problem.see if not statistic.has_own_problem]
    if len(together) == len(problem.see):
        return run(problem)
    result = run(replace(problem, see=tuple(together)))
    rest = iter(result.seen)
    seen = []
    for statistic in problem.see:
        if statistic.has_own_problem:
            seen.append(statistic.extract_result(run(statistic.make_own_problem(problem)), problem))
        else:
            seen.append(next(rest))
    return replace(result, seen=tuple(seen))


def places_in(problem: Problem, statistic: Statistic) -> tuple[list[int], list[int], list[int]]:
    """Return the indices in `problem` of the queries, query heads and key heads of the statistic's own problem."""
    queries, heads = (statistic.queries, statistic.query_heads) if isinstance(statistic, Selection) else (None, None)
    rows = resolve_indices("rows", slice(None) if queries is None else queries, problem.n)
    if heads is None:
        return rows, [*range(problem.H)], [*range(problem.G)]
    return rows, *resolve_heads(problem, heads)
