"""A problem restricted to some queries and heads, and the indices that select them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.operations import device_option, framework, namespace
from ..errors import ParameterError
from ..formula.expression import SYMBOLS, Constant, Expression, intern, specialize, table_lookup
from ..formula.tables import Table

if TYPE_CHECKING:
    from ..call.problem import Problem

AxisIndices = tuple[int, ...] | slice


def restrict(problem: Problem, queries: AxisIndices | None, query_heads: AxisIndices | None) -> Problem:
    """Return the problem restricted to these queries and heads; None stands for all queries or all heads.

    Formulas keep their meaning: i and h become lookups in tables of the original indices.
    """
    query, key, value, sinks = problem.query, problem.key, problem.value, problem.sinks
    symbols: dict[str, Expression] = {}
    xp = namespace(query)
    if query_heads is not None:
        heads, key_heads = (index_array(tuple(x), problem.H, query) for x in resolve_heads(problem, query_heads))
        query = xp.take(query, heads, axis=-3)
        key, value = xp.take(key, key_heads, axis=-3), xp.take(value, key_heads, axis=-3)
        sinks = None if sinks is None else xp.take(sinks, heads, axis=-1)
        symbols["h"] = Table(heads)[SYMBOLS["h"]]
    if queries is not None:
        positions, span = index_array(queries, problem.n, query), contiguous_span(queries, problem.n)
        query = xp.take(query, positions, axis=-2) if span is None else query[..., span[0] : span[1], :]
        symbols["i"] = Table(positions)[SYMBOLS["i"]]
        symbols["n"] = intern(Constant(problem.n, "int"))
    lookup = table_lookup(lambda table: table.without_axes(*symbols))
    restricted = replace(problem, query=query, key=key, value=value, sinks=sinks)
    return restricted.map_formulas(lambda formula: formula.rewrite(symbols, lookup))


def resolve_heads(problem: Problem, query_heads: AxisIndices) -> tuple[list[int], list[int]]:
    """Return the selected query heads, and the key heads that a problem with these query heads needs.

    If all runs of query heads with one key head have the same length, each run needs its key head once. Otherwise each
    query head has a key head of its own.
    """
    selected = resolve_indices("heads", query_heads, problem.H)
    of_queries = [head // problem.group for head in selected]
    groups = [list(group) for _, group in itertools.groupby(of_queries)]
    return selected, [group[0] for group in groups] if len({len(group) for group in groups}) == 1 else of_queries


def resolve_indices(what: str, indices: AxisIndices, count: int) -> list[int]:
    """Return a slice or a sequence of indices as a list of numbers from 0 to count − 1.

    Negative indices count from the end. Raise ParameterError if an index of a sequence is out of range; `what` names
    the selection in the error.
    """
    if isinstance(indices, slice):
        return list(range(*indices.indices(count)))
    for index in indices:
        if not -count <= index < count:
            raise ParameterError(
                f"{what}({format_indices(indices)}) of {count}", f"indices {-count} to {count - 1}", f"omit {index}"
            )
    return [index + count if index < 0 else index for index in indices]


def contiguous_span(indices: AxisIndices, count: int) -> tuple[int, int] | None:
    """Return (first, past the last) of a slice with step 1; None if `indices` is anything else.

    `slice.indices` is not used, because it would turn the symbolic lengths of torch.compile into numbers.
    """
    if not isinstance(indices, slice) or indices.step not in (None, 1):
        return None
    first, last = (
        default if end is None else max(end + count, 0) if end < 0 else min(end, count)
        for end, default in ((indices.start, 0), (indices.stop, count))
    )
    return first, max(first, last)


def index_array(indices: AxisIndices, count: int, like: Any) -> Any:
    """Return `resolve_indices` as an int64 array in the library and on the device of `like`, without range checks.

    For JAX, which may have no int64, the result is a NumPy array.
    """
    xp = namespace(like) if framework(like).has_device else np
    options = {"dtype": xp.int64} | device_option(like)
    span = contiguous_span(indices, count)
    if span is not None:
        return xp.arange(*span, **options)
    listed = xp.asarray(resolve_indices("", indices, count) if isinstance(indices, slice) else list(indices), **options)
    return xp.where(listed < 0, listed + count, listed)


def parse_indices(what: str, indices: Any) -> AxisIndices:
    if isinstance(indices, slice):
        ends = [specialize(end) for end in (indices.start, indices.stop, indices.step)]
        if ends[2] != 0 and all(end is None or hasattr(end, "__index__") for end in ends):
            return slice(*ends)
        raise ParameterError(
            f"{what}({indices})", "a slice of whole numbers with a step other than 0", f"{what}(slice(-8, None))"
        )
    if hasattr(indices, "tolist"):
        indices = indices.tolist()
    listed = tuple(indices) if isinstance(indices, list | tuple | range) else None
    if listed is None or not all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in listed):
        raise ParameterError(f"{what}({indices!r})", "whole numbers, or a slice", f"{what}([0, -1])")
    return tuple([int(x) if isinstance(x, np.integer) else x for x in listed])


def format_indices(indices: AxisIndices) -> str:
    if isinstance(indices, slice):
        ends = ["" if end is None else str(end) for end in (indices.start, indices.stop)]
        return f"{ends[0]}:{ends[1]}" + ("" if indices.step is None else f":{indices.step}")
    return str(list(indices)) if len(indices) < 9 else f"{len(indices)} indices"
