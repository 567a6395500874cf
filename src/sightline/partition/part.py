"""Restrict a problem of attention to consecutive queries, keys and heads; its mask and score keep their meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..call.problem import Problem
from ..errors import ParameterError
from ..formula.expression import SYMBOLS, Expression, Offset, as_expression, intern
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
    """Return the problem of some consecutive queries, keys and heads of `problem`.

    `sightline.merge` joins the results of parts. A part has no sinks, since a sink counts once. A kernel counts the
    heads h, queries i and keys j of a part from 0. So the formulas of the part read h + first_head, i + first_row and
    j + first_key instead; n and m stay the lengths of `problem`. `first_row` and `first_key` become `Offset`s: numbers
    that a kernel receives as arguments. So one compiled kernel serves all parts.

    Parameters
    ----------
    problem : the whole problem; only the shapes of its arrays are read
    query, key, value : the arrays of the part, with a head axis and the batch axes of `problem`
    first_head, first_row, first_key : the positions h, i and j in `problem` of the part's first head, query and key;
        `first_row` is None if the part has all queries, and `first_key` is None if it has all keys
    see : the statistics of the part, with formulas for the whole problem

    Raises
    ------
    ParameterError
        The problem has dropout, which counts keys in groups of 4, and `first_key` is no multiple of 4.
    """
    if problem.dropout and (first_key or 0) % 4:
        raise ParameterError(
            f"dropout on a part whose keys begin at {first_key}",
            "parts whose keys begin at multiples of 4",
            "divide the keys at multiples of 4",
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
