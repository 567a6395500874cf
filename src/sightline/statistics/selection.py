"""Statistics made from other statistics: restricted to some queries or heads, or averaged over heads or batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arrays.operations import namespace
from ..errors import ParameterError
from ..formula.expression import Expression
from .base import BackwardContext, ForwardContext, Outer, StatisticBase, StatisticGradients, Tile
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
    from ..problem.kernel import Result
    from ..problem.problem import Problem


class Statistic(StatisticBase):
    """A statistic with methods that restrict it to some queries and heads, and average it over heads or batch."""

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
        """
        return _select(self, rows=indices)

    def heads(self, indices: Any) -> Selection:
        """Return the statistic restricted to these query heads. Indices and errors are like those of `rows`."""
        return _select(self, heads=indices)

    def mean(self, axis: str) -> Statistic:
        """Return the statistic averaged over the heads or the batch.

        For weights, scores, and received or pooled by sum or mean, only the mean is stored, not the result of every
        head.

        Parameters
        ----------
        axis : {"heads", "batch"}
            The axis that is removed: (..., H, n) becomes (..., n) or (H, n). "batch" means all leading axes together.

        Raises
        ------
        ParameterError
            axis is neither "heads" nor "batch", or the statistic returns key positions, which have no mean.
        """
        if axis not in ("heads", "batch"):
            raise ParameterError(f"mean({axis!r})", '"heads" or "batch"', 'weights().mean("heads")')
        if not self.supports_mean:
            raise ParameterError(
                f"{self}.mean({axis!r}), which finds keys", "statistics that are numbers", "average the result yourself"
            )
        over_heads, over_batch = (self.over_heads, self.over_batch) if isinstance(self, Mean) else (False, False)
        return Mean(over_heads or axis == "heads", over_batch or axis == "batch", unwrap_mean(self))

    def make_own_problem(self, problem: Problem) -> Problem:
        """Return a problem with this statistic alone; `extract_result` reads the result of that problem."""
        return problem.with_statistics(self)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        """Return this statistic from the result of its own problem."""
        return result.seen[0]


@dataclass(frozen=True, eq=False, repr=False)
class Selection(Statistic):
    """A statistic of some queries and heads. It is computed from a problem that has only these queries and heads."""

    of: Statistic
    queries: Indices | None = None
    query_heads: Indices | None = None

    name = "selection"
    has_own_problem = True

    @property
    def is_differentiable(self) -> bool:  # type: ignore[override]
        return self.of.is_differentiable

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

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return self.of.dtypes(problem)

    def head_axis(self, batch_ndim: int) -> int | None:
        return self.of.head_axis(batch_ndim)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        if problem.heads_squeezed and self.query_heads is not None:
            raise ParameterError(f"{self!r} of arrays without heads", "arrays (..., H, n, d)", "omit .heads(...)")
        self.of.check(problem, *self._restricted_sizes(problem, outer, n))

    def build_result(self, arrays: Sequence[Any]) -> Any:
        return self.of.build_result(arrays)

    def make_own_problem(self, problem: Problem) -> Problem:
        return restrict(self.of.make_own_problem(problem), self.queries, self.query_heads)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        return self.of.extract_result(result, problem)

    def map_formulas(self, change: Callable[[Any], Any]) -> Selection:
        return Selection(self.of.map_formulas(change), self.queries, self.query_heads)

    def mean(self, axis: str) -> Selection:
        return Selection(self.of.mean(axis), self.queries, self.query_heads)


@dataclass(frozen=True, eq=False, repr=False)
class Mean(Statistic):
    """A statistic averaged over the heads, the batch or both. A linear statistic receives averaged tiles."""

    over_heads: bool
    over_batch: bool
    of: Statistic

    name = "mean"

    @property
    def tile_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.of.tile_inputs

    @property
    def has_own_problem(self) -> bool:  # type: ignore[override]
        return self.of.has_own_problem

    @property
    def is_differentiable(self) -> bool:  # type: ignore[override]
        return self.of.is_differentiable

    def __repr__(self) -> str:
        return repr(self.of) + '.mean("heads")' * self.over_heads + '.mean("batch")' * self.over_batch

    def remaining_outer(self, outer: Outer) -> Outer:
        """Return the lengths of the axes (*batch_shape, H) that averaging leaves."""
        return (() if self.over_batch else outer[:-1]) + (() if self.over_heads else outer[-1:])

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, self.remaining_outer(outer), n)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return self.of.dtypes(problem)

    def head_axis(self, batch_ndim: int) -> int | None:
        return None if self.over_heads else 0 if self.over_batch else batch_ndim

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        self.of.check(problem, outer if self.has_own_problem else self.remaining_outer(outer), n)

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
            averaged = {name: self.average(getattr(tile, name), context.problem) for name in self.of.tile_inputs}
            tile = replace(tile, **({"weights": None, "scores": None} | averaged))
        self.of.add(arrays, tile, context)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        finished = self.of.finish(arrays, context)
        return finished if self.of.is_linear else [self.average(array, context.problem) for array in finished]

    def average(self, array: Any, problem: Problem) -> Any:
        """Return the mean of an array (*batch_shape, H, ...) over the axes that this statistic averages over."""
        return average_over(array, mean_axes_of(self, len(problem.batch_shape)))

    def backward(self, context: BackwardContext) -> StatisticGradients:
        problem = context.problem
        count = (problem.B if self.over_batch else 1) * (problem.H if self.over_heads else 1)
        remaining_axes = "b" * (not self.over_batch) + "h" * (not self.over_heads)
        return self.of.backward(
            replace(context, gradient=context.gradient / max(count, 1), remaining_axes=remaining_axes, arrays=())
        )

    def make_own_problem(self, problem: Problem) -> Problem:
        return self.of.make_own_problem(problem) if self.has_own_problem else super().make_own_problem(problem)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        if not self.has_own_problem:
            return super().extract_result(result, problem)
        return self.average(self.of.extract_result(result, problem), problem)

    def map_formulas(self, change: Callable[[Any], Any]) -> Mean:
        return Mean(self.over_heads, self.over_batch, self.of.map_formulas(change))

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        return [self.name, repr(self.over_heads), repr(self.over_batch), *self.of.serialize(to_text)]


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


def average_over(array: Any, axes: tuple[int, ...]) -> Any:
    """Return the mean of an array over these axes; the mean over no heads is 0."""
    count = math.prod([array.shape[axis] for axis in axes])
    return namespace(array).sum(array, axis=axes, dtype=array.dtype) / max(count, 1) if axes else array


def mean_axes_of(statistic: Statistic, batch_ndim: int) -> tuple[int, ...]:
    """Return the axes over which a `Mean`, or a selection of one, averages arrays (*batch_shape, H, ...)."""
    of = statistic.of if isinstance(statistic, Selection) else statistic
    return (*range(batch_ndim),) * of.over_batch + (batch_ndim,) * of.over_heads if isinstance(of, Mean) else ()


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
    """Return which queries, query heads and key heads of the problem the statistic's own problem has, in its order."""
    queries, heads = (statistic.queries, statistic.query_heads) if isinstance(statistic, Selection) else (None, None)
    rows = resolve_indices("rows", slice(None) if queries is None else queries, problem.n)
    if heads is None:
        return rows, [*range(problem.H)], [*range(problem.G)]
    return rows, *resolve_heads(problem, heads)
