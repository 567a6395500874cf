"""Parts and means of other statistics: of some queries, of some heads, averaged over heads or batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arrays import namespace
from ..errors import ParameterError
from ..formula.expression import SYMBOLS, Expression, Lookup, as_expression, walk
from ..formula.tables import Table
from .base import BackwardContext, ForwardContext, Outer, StatisticBase, StatisticGradients, Tile

if TYPE_CHECKING:
    from ..kernel import Result
    from ..problem import Problem

__all__ = ["Mean", "Selection", "Statistic", "make_selection", "mean", "restrict", "solve_selections_separately"]

Indices = tuple[int, ...] | slice


class Statistic(StatisticBase):
    """A statistic; it can be restricted to some queries and heads, and averaged over heads or batch."""

    def rows(self, indices: Any) -> Selection:
        """The same statistic of these queries alone, at the cost of these.

        Parameters
        ----------
        indices : whole numbers or a slice; negative ones count from the last query
            In this order; what a formula reads as i stays the query's own position.
        """
        return make_selection(self, rows=indices)

    def heads(self, indices: Any) -> Selection:
        """The same statistic of these query heads alone, at the cost of these; indices as in `rows`."""
        return make_selection(self, heads=indices)

    def mean(self, axis: str) -> Statistic:
        """The statistic averaged over the heads or the batch, in the pass: only the mean is held.

        Parameters
        ----------
        axis : {"heads", "batch"}
            The axis that goes: (..., H, n) becomes (..., n) or (H, n). "batch" are all leading axes together.
        """
        return mean(self, axis)

    def make_own_problem(self, problem: Problem) -> Problem:
        """A problem whose result holds this statistic alone; `extract_result` finds it."""
        return problem.with_statistics(self)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        return result.seen[0]


@dataclass(frozen=True, eq=False, repr=False)
class Selection(Statistic):
    """A statistic of some queries and heads: that of a problem which has no others."""

    of: Statistic
    queries: Indices | None = None
    query_heads: Indices | None = None

    name = "part"
    has_own_problem = True

    @property
    def is_differentiable(self) -> bool:  # type: ignore[override]
        return self.of.is_differentiable

    def __repr__(self) -> str:
        shown = [
            f".{name}({_format_indices(indices)})"
            for name, indices in (("rows", self.queries), ("heads", self.query_heads))
            if indices is not None
        ]
        return f"{self.of!r}{''.join(shown)}"

    def _restricted_sizes(self, problem: Problem, outer: Outer, n: int) -> tuple[Outer, int]:
        if self.query_heads is not None:
            count = len(resolve_indices("heads", self.query_heads, problem.H))
            outer = (*outer[:-1], count)
        return outer, n if self.queries is None else count_indices("rows", self.queries, n)

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, *self._restricted_sizes(problem, outer, n))

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return self.of.dtypes(problem)

    def head_axis(self, lead: int) -> int | None:
        return self.of.head_axis(lead)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        if problem.heads_squeezed and self.query_heads is not None:
            raise ParameterError(f"{self!r} of arrays without heads", "arrays (..., H, n, d)", "leave heads(...) out")
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
    """A statistic averaged over the heads, the batch or both. A linear one is fed tiles that are averaged already."""

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
        """What averaging leaves of (*lead, H)."""
        return (() if self.over_batch else outer[:-1]) + (() if self.over_heads else outer[-1:])

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, self.remaining_outer(outer), n)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return self.of.dtypes(problem)

    def head_axis(self, lead: int) -> int | None:
        return None if self.over_heads else 0 if self.over_batch else lead

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        self.of.check(problem, outer if self.has_own_problem else self.remaining_outer(outer), n)

    def start(self, context: ForwardContext) -> list[Any]:
        if not self.of.is_linear:
            return self.of.start(context)
        reduced = replace(context, outer=self.remaining_outer(context.outer))
        if 0 not in context.outer:
            return self.of.start(reduced)
        shapes = self.of.shapes(
            context.problem, reduced.outer, context.problem.n
        )  # of none the mean is 0, as of none its sum
        return [reduced.full(0.0, *one) for one in zip(shapes, self.dtypes(context.problem), strict=True)]

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        if self.of.is_linear:
            parts = {name: self.average(getattr(tile, name), context.problem) for name in self.of.tile_inputs}
            tile = replace(tile, **({"weights": None, "scores": None} | parts))
        self.of.add(arrays, tile, context)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        found = self.of.finish(arrays, context)
        return found if self.of.is_linear else [self.average(array, context.problem) for array in found]

    def average(self, array: Any, problem: Problem) -> Any:
        """The mean of an array (*lead, H, ...) over these axes."""
        lead = len(problem.batch_shape)
        axes = (*range(lead),) * self.over_batch + (lead,) * self.over_heads
        count = math.prod([array.shape[axis] for axis in axes])
        return namespace(array).sum(array, axis=axes, dtype=array.dtype) / max(count, 1) if axes else array

    def backward(self, context: BackwardContext) -> StatisticGradients:
        problem = context.problem
        count = (problem.B if self.over_batch else 1) * (problem.H if self.over_heads else 1)
        remaining_axes = "b" * (not self.over_batch) + "h" * (not self.over_heads)
        return self.of.backward(
            replace(context, gradient=context.gradient / max(count, 1), remaining_axes=remaining_axes)
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


def make_selection(of: Statistic, rows: Any = None, heads: Any = None) -> Selection:
    """The statistic of these queries or heads, besides those it is restricted to already."""
    queries = None if rows is None else _parse_indices("rows", rows)
    query_heads = None if heads is None else _parse_indices("heads", heads)
    if not isinstance(of, Selection):
        return Selection(of, queries, query_heads)
    for name, old, new in (("rows", of.queries, queries), ("heads", of.query_heads, query_heads)):
        if old is not None and new is not None:
            raise ParameterError(
                f"{of}.{name}({_format_indices(new)})", f"{name} said once", f"say the {name} you mean at once"
            )
    return Selection(
        of.of, of.queries if queries is None else queries, of.query_heads if query_heads is None else query_heads
    )


def mean(of: Statistic, axis: str) -> Mean:
    """The statistic averaged over one more axis."""
    if axis not in ("heads", "batch"):
        raise ParameterError(f"mean({axis!r})", '"heads" or "batch"', 'weights().mean("heads")')
    if not of.supports_mean:
        raise ParameterError(
            f"{of}.mean({axis!r}), which finds keys", "statistics that are numbers", "average what it finds yourself"
        )
    over_heads, over_batch = (of.over_heads, of.over_batch) if isinstance(of, Mean) else (False, False)
    return Mean(over_heads or axis == "heads", over_batch or axis == "batch", unwrap_mean(of))


def unwrap_mean(statistic: Statistic) -> Statistic:
    """What a mean is of; the statistic itself otherwise."""
    return statistic.of if isinstance(statistic, Mean) else statistic


def solve_selections_separately(problem: Problem, run: Callable[[Problem], Result]) -> Result:
    """The problem's result by `run`, its statistics apart by `run` of their own problems."""
    in_pass = [statistic for statistic in problem.see if not statistic.has_own_problem]
    if len(in_pass) == len(problem.see):
        return run(problem)
    result = run(replace(problem, see=tuple(in_pass)))
    rest = iter(result.seen)
    seen = []
    for statistic in problem.see:
        if statistic.has_own_problem:
            seen.append(statistic.extract_result(run(statistic.make_own_problem(problem)), problem))
        else:
            seen.append(next(rest))
    return replace(result, seen=tuple(seen))


# -- a problem of fewer queries and heads ------------------------------------------------------------------------------


def restrict(problem: Problem, queries: Indices | None, query_heads: Indices | None) -> Problem:
    """The problem of these queries and heads alone. Formulas read where they were: i and h become lookups."""
    query, key, value, sinks = problem.query, problem.key, problem.value, problem.sinks
    symbols: dict[str, Expression] = {}
    if query_heads is not None:
        selected = resolve_indices("heads", query_heads, problem.H)
        key_heads = _key_heads([head // problem.group for head in selected])
        query, key, value = query[..., selected, :, :], key[..., key_heads, :, :], value[..., key_heads, :, :]
        sinks = None if sinks is None else sinks[selected]
        symbols["h"] = Table(_index_array(tuple(selected), problem.H, query))[SYMBOLS["h"]]
    if queries is not None:
        places, span = _index_array(queries, problem.n, query), contiguous_span(queries, problem.n)
        query = query[..., places, :] if span is None else query[..., span[0] : span[1], :]
        symbols["i"] = Table(places)[SYMBOLS["i"]]
        symbols["n"] = as_expression(problem.n)
    tables: dict[int, Table] = {}

    def substitute_in(formula: Expression | None) -> Expression | None:
        return None if formula is None else _substitute(formula, symbols, tables)

    return replace(
        problem,
        query=query,
        key=key,
        value=value,
        sinks=sinks,
        mask=substitute_in(problem.mask),
        score=substitute_in(problem.score),
        see=tuple([statistic.map_formulas(substitute_in) for statistic in problem.see]),
    )


def _substitute(formula: Expression, symbols: dict[str, Expression], tables: dict[int, Table]) -> Expression:
    """The formula with others for some symbols; its tables, put into `tables`, no longer promise to span these."""
    for node in walk(formula):
        if isinstance(node, Lookup) and id(node.table) not in tables:
            axes = node.table.axes
            if axes is not None and any(axis in symbols for axis in axes):
                remaining_axes = tuple([None if axis in symbols else axis for axis in axes])
                tables[id(node.table)] = Table(node.table.array, remaining_axes)
    return formula.substitute(symbols, tables)


def _key_heads(of_queries: list[int]) -> list[int]:
    """The key heads for query heads that read these: each once for a whole group where all groups stay equal."""
    runs: list[list[int]] = []
    for head in of_queries:
        if runs and runs[-1][0] == head:
            runs[-1].append(head)
        else:
            runs.append([head])
    equal = all(len(run) == len(runs[0]) for run in runs)
    return [run[0] for run in runs] if equal else of_queries


def resolve_indices(what: str, indices: Indices, count: int) -> list[int]:
    """Indices from 0; ParameterError where there is no such one."""
    if isinstance(indices, slice):
        return list(range(*indices.indices(count)))
    for index in indices:
        if not -count <= index < count:
            raise ParameterError(
                f"{what}({_format_indices(indices)}) of {count}",
                f"indices from {-count} to {count - 1}",
                f"leave out {index}",
            )
    return [index + count if index < 0 else index for index in indices]


def contiguous_span(indices: Indices, count: int) -> tuple[int, int] | None:
    """(first, past last) of a slice without steps. `slice.indices` would make numbers of torch.compile's symbols."""
    if not isinstance(indices, slice) or indices.step not in (None, 1):
        return None
    first, last = (
        usual if end is None else max(end + count, 0) if end < 0 else min(end, count)
        for end, usual in ((indices.start, 0), (indices.stop, count))
    )
    return first, max(first, last)


def count_indices(what: str, indices: Indices, count: int) -> int:
    """How many indices there are."""
    span = contiguous_span(indices, count)
    return len(resolve_indices(what, indices, count)) if span is None else span[1] - span[0]


def _index_array(indices: Indices, count: int, like: Any) -> Any:
    """The indices from 0 as an array in like's place."""
    xp = namespace(like)
    place = {"dtype": xp.int64, "device": like.device}
    span = contiguous_span(indices, count)
    if span is not None:
        return xp.arange(*span, **place)
    listed = xp.asarray(resolve_indices("", indices, count) if isinstance(indices, slice) else list(indices), **place)
    return xp.where(listed < 0, listed + count, listed)


def _parse_indices(what: str, indices: Any) -> Indices:
    if isinstance(indices, slice):
        ends = indices.start, indices.stop, indices.step
        if indices.step != 0 and all(end is None or hasattr(end, "__index__") for end in ends):
            return indices
        raise ParameterError(f"{what}({indices})", "a slice of whole numbers, steps not 0", f"{what}(slice(-8, None))")
    if hasattr(indices, "tolist"):
        indices = indices.tolist()
    listed = tuple(indices) if isinstance(indices, list | tuple | range) else None
    if listed is None or not all(isinstance(index, int) and not isinstance(index, bool) for index in listed):
        raise ParameterError(f"{what}({indices!r})", "whole numbers, or a slice", f"{what}([0, -1])")
    return listed


def _format_indices(indices: Indices) -> str:
    if isinstance(indices, slice):
        ends = ["" if end is None else str(end) for end in (indices.start, indices.stop)]
        return f"{ends[0]}:{ends[1]}" + ("" if indices.step is None else f":{indices.step}")
    return str(list(indices)) if len(indices) < 9 else f"{len(indices)} indices"
