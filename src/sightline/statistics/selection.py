"""Parts and means of other statistics: of some queries, of some heads, averaged over heads or batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arrays import namespace
from ..errors import ParameterError
from ..formula.expression import SYMBOLS, Constant, Expression, Lookup, walk
from ..formula.tables import Table
from .base import Back, Outer, Pass, Slopes, StatisticBase, Tile

if TYPE_CHECKING:
    from ..kernel import Result
    from ..problem import Problem

__all__ = ["Mean", "Part", "Statistic", "apart", "mean", "part", "restricted"]

Indices = tuple[int, ...] | slice


class Statistic(StatisticBase):
    """A statistic; it can be restricted to some queries and heads, and averaged over heads or batch."""

    def rows(self, indices: Any) -> Part:
        """The same statistic of these queries alone, at the cost of these.

        Parameters
        ----------
        indices : whole numbers or a slice; negative ones count from the last query
            In this order; what a formula reads as i stays the query's own position.
        """
        return part(self, rows=indices)

    def heads(self, indices: Any) -> Part:
        """The same statistic of these query heads alone, at the cost of these; indices as in `rows`."""
        return part(self, heads=indices)

    def mean(self, axis: str) -> Statistic:
        """The statistic averaged over the heads or the batch, in the pass: only the mean is held.

        Parameters
        ----------
        axis : {"heads", "batch"}
            The axis that goes: (..., H, n) becomes (..., n) or (H, n). "batch" are all leading axes together.
        """
        return mean(self, axis)

    def posed(self, problem: Problem) -> Problem:
        """A problem whose result holds this statistic alone; `found` finds it."""
        return problem.asking(self)

    def found(self, result: Result, problem: Problem) -> Any:
        return result.seen[0]


@dataclass(frozen=True, eq=False, repr=False)
class Part(Statistic):
    """A statistic of some queries and heads: that of a problem which has no others."""

    of: Statistic
    queries: Indices | None = None
    query_heads: Indices | None = None

    name = "part"
    apart = True

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        return self.of.differentiable

    def __repr__(self) -> str:
        shown = [
            f".{name}({_shown(given)})"
            for name, given in (("rows", self.queries), ("heads", self.query_heads))
            if given is not None
        ]
        return f"{self.of!r}{''.join(shown)}"

    def _sizes(self, problem: Problem, outer: Outer, n: int) -> tuple[Outer, int]:
        if self.query_heads is not None:
            count = len(resolved("heads", self.query_heads, problem.H))
            outer = (*outer[:-1], count)
        return outer, n if self.queries is None else counted("rows", self.queries, n)

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, *self._sizes(problem, outer, n))

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return self.of.dtypes(problem)

    def head_axis(self, lead: int) -> int | None:
        return self.of.head_axis(lead)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        if problem.headless and self.query_heads is not None:
            raise ParameterError(f"{self!r} of arrays without heads", "arrays (..., H, n, d)", "leave heads(...) out")
        self.of.check(problem, *self._sizes(problem, outer, n))

    def joined(self, arrays: Sequence[Any]) -> Any:
        return self.of.joined(arrays)

    def posed(self, problem: Problem) -> Problem:
        return restricted(self.of.posed(problem), self.queries, self.query_heads)

    def found(self, result: Result, problem: Problem) -> Any:
        return self.of.found(result, problem)

    def mapped(self, change: Callable[[Any], Any]) -> Part:
        return Part(self.of.mapped(change), self.queries, self.query_heads)

    def mean(self, axis: str) -> Part:
        return Part(self.of.mean(axis), self.queries, self.query_heads)


@dataclass(frozen=True, eq=False, repr=False)
class Mean(Statistic):
    """A statistic averaged over the heads, the batch or both. A linear one is fed tiles that are averaged already."""

    over_heads: bool
    over_batch: bool
    of: Statistic

    name = "mean"

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.of.reads

    @property
    def apart(self) -> bool:  # type: ignore[override]
        return self.of.apart

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        return self.of.differentiable

    def __repr__(self) -> str:
        return repr(self.of) + '.mean("heads")' * self.over_heads + '.mean("batch")' * self.over_batch

    def left(self, outer: Outer) -> Outer:
        """What averaging leaves of (*lead, H)."""
        return (() if self.over_batch else outer[:-1]) + (() if self.over_heads else outer[-1:])

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, self.left(outer), n)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return self.of.dtypes(problem)

    def head_axis(self, lead: int) -> int | None:
        return None if self.over_heads else 0 if self.over_batch else lead

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        self.of.check(problem, outer if self.apart else self.left(outer), n)

    def start(self, over: Pass) -> list[Any]:
        if not self.of.linear:
            return self.of.start(over)
        left = replace(over, outer=self.left(over.outer))
        if 0 not in over.outer:
            return self.of.start(left)
        shapes = self.of.shapes(over.problem, left.outer, over.problem.n)  # of none the mean is 0, as of none its sum
        return [left.full(0.0, *one) for one in zip(shapes, self.dtypes(over.problem), strict=True)]

    def add(self, arrays: list[Any], tile: Tile, over: Pass) -> None:
        if self.of.linear:
            parts = {name: self.averaged(getattr(tile, name), over.problem) for name in self.of.reads}
            tile = replace(tile, **({"weights": None, "scores": None} | parts))
        self.of.add(arrays, tile, over)

    def finish(self, arrays: list[Any], over: Pass) -> list[Any]:
        found = self.of.finish(arrays, over)
        return found if self.of.linear else [self.averaged(array, over.problem) for array in found]

    def averaged(self, array: Any, problem: Problem) -> Any:
        """The mean of an array (*lead, H, ...) over these axes."""
        lead = len(problem.lead)
        axes = (*range(lead),) * self.over_batch + (lead,) * self.over_heads
        count = math.prod([array.shape[axis] for axis in axes])
        return namespace(array).sum(array, axis=axes, dtype=array.dtype) / max(count, 1) if axes else array

    def slopes(self, back: Back) -> Slopes:
        problem = back.problem
        count = (problem.B if self.over_batch else 1) * (problem.H if self.over_heads else 1)
        kept = "b" * (not self.over_batch) + "h" * (not self.over_heads)
        return self.of.slopes(replace(back, gradient=back.gradient / max(count, 1), kept=kept))

    def posed(self, problem: Problem) -> Problem:
        return self.of.posed(problem) if self.apart else super().posed(problem)

    def found(self, result: Result, problem: Problem) -> Any:
        if not self.apart:
            return super().found(result, problem)
        return self.averaged(self.of.found(result, problem), problem)

    def mapped(self, change: Callable[[Any], Any]) -> Mean:
        return Mean(self.over_heads, self.over_batch, self.of.mapped(change))

    def words(self, spell: Callable[[Expression], str]) -> list[str]:
        return [self.name, repr(self.over_heads), repr(self.over_batch), *self.of.words(spell)]


def part(of: Statistic, rows: Any = None, heads: Any = None) -> Part:
    """The statistic of these queries or heads, besides those it is restricted to already."""
    queries = None if rows is None else _given("rows", rows)
    query_heads = None if heads is None else _given("heads", heads)
    if not isinstance(of, Part):
        return Part(of, queries, query_heads)
    for name, old, new in (("rows", of.queries, queries), ("heads", of.query_heads, query_heads)):
        if old is not None and new is not None:
            raise ParameterError(f"{of}.{name}({_shown(new)})", f"{name} said once", f"say the {name} you mean at once")
    return Part(
        of.of,
        of.queries if queries is None else queries,
        of.query_heads if query_heads is None else query_heads,
    )


def mean(of: Statistic, axis: str) -> Mean:
    """The statistic averaged over one more axis."""
    if axis not in ("heads", "batch"):
        raise ParameterError(f"mean({axis!r})", '"heads" or "batch"', 'weights().mean("heads")')
    if not of.averages:
        raise ParameterError(
            f"{of}.mean({axis!r}), which finds keys", "statistics that are numbers", "average what it finds yourself"
        )
    over_heads, over_batch = (of.over_heads, of.over_batch) if isinstance(of, Mean) else (False, False)
    return Mean(over_heads or axis == "heads", over_batch or axis == "batch", inner(of))


def inner(statistic: Statistic) -> Statistic:
    """What a mean is of; the statistic itself otherwise."""
    return statistic.of if isinstance(statistic, Mean) else statistic


def apart(problem: Problem, run: Callable[[Problem], Result]) -> Result:
    """The problem's result by `run`, its statistics apart by `run` of their own problems."""
    own = [statistic for statistic in problem.see if not statistic.apart]
    if len(own) == len(problem.see):
        return run(problem)
    result = run(replace(problem, see=tuple(own)))
    rest = iter(result.seen)
    seen = []
    for statistic in problem.see:
        if statistic.apart:
            seen.append(statistic.found(run(statistic.posed(problem)), problem))
        else:
            seen.append(next(rest))
    return replace(result, seen=tuple(seen))


# -- a problem of fewer queries and heads ------------------------------------------------------------------------------


def restricted(problem: Problem, queries: Indices | None, query_heads: Indices | None) -> Problem:
    """The problem of these queries and heads alone. Formulas read where they were: i and h become lookups."""
    query, key, value, sinks = problem.query, problem.key, problem.value, problem.sinks
    symbols: dict[str, Expression] = {}
    if query_heads is not None:
        chosen = resolved("heads", query_heads, problem.H)
        of_keys = _key_heads([head // problem.group for head in chosen])
        query, key, value = query[..., chosen, :, :], key[..., of_keys, :, :], value[..., of_keys, :, :]
        sinks = None if sinks is None else sinks[chosen]
        symbols["h"] = Table(_positions(tuple(chosen), problem.H, query))[SYMBOLS["h"]]
    if queries is not None:
        places, span = _positions(queries, problem.n, query), spanned(queries, problem.n)
        query = query[..., places, :] if span is None else query[..., span[0] : span[1], :]
        symbols["i"] = Table(places)[SYMBOLS["i"]]
        symbols["n"] = Constant(problem.n, "int")
    tables: dict[int, Table] = {}

    def moved(formula: Expression | None) -> Expression | None:
        return None if formula is None else _moved(formula, symbols, tables)

    return replace(
        problem,
        query=query,
        key=key,
        value=value,
        sinks=sinks,
        mask=moved(problem.mask),
        score=moved(problem.score),
        see=tuple([statistic.mapped(moved) for statistic in problem.see]),
    )


def _moved(formula: Expression, symbols: dict[str, Expression], tables: dict[int, Table]) -> Expression:
    """The formula with others for some symbols; its tables, put into `tables`, no longer promise to span these."""
    for node in walk(formula):
        if isinstance(node, Lookup) and id(node.table) not in tables:
            axes = node.table.axes
            if axes is not None and any(axis in symbols for axis in axes):
                kept = tuple([None if axis in symbols else axis for axis in axes])
                tables[id(node.table)] = Table(node.table.array, kept)
    return formula.replacing(symbols, tables)


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


def resolved(what: str, given: Indices, count: int) -> list[int]:
    """Indices from 0; ParameterError where there is no such one."""
    if isinstance(given, slice):
        return list(range(*given.indices(count)))
    for index in given:
        if not -count <= index < count:
            raise ParameterError(
                f"{what}({_shown(given)}) of {count}", f"indices from {-count} to {count - 1}", f"leave out {index}"
            )
    return [index + count if index < 0 else index for index in given]


def spanned(given: Indices, count: int) -> tuple[int, int] | None:
    """(first, past last) of a slice without steps. `slice.indices` would make numbers of torch.compile's symbols."""
    if not isinstance(given, slice) or given.step not in (None, 1):
        return None
    first, last = (
        usual if end is None else max(end + count, 0) if end < 0 else min(end, count)
        for end, usual in ((given.start, 0), (given.stop, count))
    )
    return first, max(first, last)


def counted(what: str, given: Indices, count: int) -> int:
    """How many indices there are."""
    span = spanned(given, count)
    return len(resolved(what, given, count)) if span is None else span[1] - span[0]


def _positions(given: Indices, count: int, like: Any) -> Any:
    """The indices from 0 as an array in like's place."""
    xp = namespace(like)
    place = {"dtype": xp.int64, "device": like.device}
    span = spanned(given, count)
    if span is not None:
        return xp.arange(*span, **place)
    listed = xp.asarray(resolved("", given, count) if isinstance(given, slice) else list(given), **place)
    return xp.where(listed < 0, listed + count, listed)


def _given(what: str, indices: Any) -> Indices:
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


def _shown(given: Indices) -> str:
    if isinstance(given, slice):
        ends = ["" if end is None else str(end) for end in (given.start, given.stop)]
        return f"{ends[0]}:{ends[1]}" + ("" if given.step is None else f":{given.step}")
    return str(list(given)) if len(given) < 9 else f"{len(given)} indices"
