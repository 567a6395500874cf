"""One part of a problem: some consecutive queries, keys and heads, with formulas that keep their meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ParameterError
from ..formula.expression import SYMBOLS, Expression, Offset, as_expression, intern
from ..problem.problem import Problem
from ..statistics import Statistic


def part_of(
    problem: Problem,
    query: Any,
    key: Any,
    value: Any,
    *,
    first_head: int = 0,
    first_row: int | None = None,
    first_key: int | None = None,
    see: tuple[Statistic, ...] = (),
) -> Problem:
    """Return the problem of some queries on some keys.

    `sightline.merge` joins the results of parts. A part has no sinks, since a sink counts once. In the formulas of a
    part, h, i and j count from the first head, query and key of the part, and n and m stay the lengths of `problem`.
    The first query and the first key are `Offset`s, which are arguments of a kernel. So one kernel serves all parts.

    Parameters
    ----------
    problem : the whole problem; its arrays are read for their shapes alone
    query, key, value : the arrays of the part, with a head axis and the batch axes of `problem`
    first_head, first_row, first_key : the positions h, i and j in `problem` of the part's first head, query and key;
        `first_row` is None if the part has all queries, and `first_key` is None if it has all keys
    see : the statistics of the part; their formulas are those of the whole problem

    Raises
    ------
    ParameterError
        The problem has dropout, which counts keys in groups of 4, and `first_key` is no multiple of 4.
    """
    if problem.dropout and (first_key or 0) % 4:
        raise ParameterError(
            f"dropout with keys from {first_key} on",
            "parts that begin at multiples of 4",
            "align the parts of the keys",
        )
    symbols: dict[str, Expression] = {"n": as_expression(problem.n), "m": as_expression(problem.m)}
    for name, first in (("i", first_row), ("j", first_key)):
        if first is not None:
            symbols[name] = SYMBOLS[name] + intern(Offset(first, "int", name=name))
    if first_head:
        symbols["h"] = SYMBOLS["h"] + first_head
    part = replace(problem, query=query, key=key, value=value, sinks=None, see=see)
    part = part.map_formulas(lambda f: f.rewrite(symbols) if symbols.keys() & f.free_symbols else f)
    b, h, i, j = problem.dropout_origin
    return replace(part, dropout_origin=(b, h + first_head, i + (first_row or 0), j + (first_key or 0)))
