"""A problem's formulas as the text of Triton functions, and the tables they read. Needs no triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...arrays import layout
from ...formula.expression import Expression
from ...formula.index_ranges import range_of
from ...formula.render_triton import render
from ...formula.tables import Table
from ...formula.tensor_cache import Memory
from ...problem import Problem

__all__ = ["INT32_MAX", "Named", "sources_of", "tables_of"]

INT32_MAX = 2**31 - 1

_RENDERED = Memory(1024)

Named = tuple[str, Expression, bool]  # the function's name, the formula, whether it takes scores


def sources_of(problem: Problem, others: Sequence[Named] = ()) -> dict[str, str]:
    """The module of each function by its name: `mask_at` and `score_at`, where there are such formulas, and others."""
    named = _named(problem, others)
    slots = {id(table): slot for slot, table in enumerate(tables_of(problem, others))}
    ranges = {name: range_of(formula, problem.extent) for name, formula, _ in named}
    reaches = [_reach(table) for table in tables_of(problem, others)]
    wide = max([number for number, _ in ranges.values()] + reaches, default=0.0) > INT32_MAX

    def source(name: str, formula: Expression, scores: bool) -> str:
        options: dict[str, Any] = {
            "floats": "float64" if formula.kind == "bool" else problem.accumulator,
            "integers": "int64" if wide else "int32",
            "slots": tuple([slots[id(table)] for table in formula.tables]),
            "clamped": ranges[name][1],
            "scores": scores,
        }
        question = (name, formula.text, tuple([table.kind for table in formula.tables]), *options.values())
        return _RENDERED.get(question, (), lambda: render(formula, name, **options))

    return {name: source(name, formula, scores) for name, formula, scores in named}


def tables_of(problem: Problem, others: Sequence[Named] = ()) -> list[Table]:
    """Every table of the formulas once, in the order in which kernels take them."""
    return list({id(table): table for _, formula, _ in _named(problem, others) for table in formula.tables}.values())


def _named(problem: Problem, others: Sequence[Named]) -> list[Named]:
    own = (("mask_at", problem.mask, False), ("score_at", problem.score, True))
    return [(name, formula, scores) for name, formula, scores in own if formula is not None] + list(others)


def _reach(table: Table) -> float:
    """Bytes between the farthest entries, which a view with gaps may spread far."""
    strides = layout(table.array)[1]
    return float(sum(max(length - 1, 0) * abs(stride) for length, stride in zip(table.shape, strides, strict=True)))
