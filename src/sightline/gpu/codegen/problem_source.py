"""The source of the Triton functions for a problem's formulas, and the tables that the formulas read.

This module does not import triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...arrays import layout
from ...formula.expression import Expression
from ...formula.table_index_ranges import find_index_ranges
from ...formula.tables import Table
from ...formula.tensor_cache import TensorCache
from ...problem import Problem
from .render_triton import render

__all__ = ["INT32_MAX", "NamedFormula", "collect_tables", "render_sources"]

INT32_MAX = 2**31 - 1

_RENDERED = TensorCache(1024)

NamedFormula = tuple[str, Expression, bool]  # (name of the function, formula, True if the function takes scores)


def render_sources(problem: Problem, others: Sequence[NamedFormula] = ()) -> dict[str, str]:
    """Return the source of one module for each formula, by the name of the formula's function.

    The formulas are the mask (`mask_at`) and the score (`score_at`), if the problem has them, and `others`.
    """
    named = _named_formulas(problem, others)
    tables = collect_tables(problem, others)
    slots = {id(table): slot for slot, table in enumerate(tables)}
    ranges = {name: find_index_ranges(formula, problem.extent) for name, formula, _ in named}
    largest = max([number for number, _ in ranges.values()] + [_byte_extent(table) for table in tables], default=0.0)

    def source(name: str, formula: Expression, scores: bool) -> str:
        options: dict[str, Any] = {
            "floats": "float64" if formula.kind == "bool" else problem.accumulator,
            "integers": "int64" if largest > INT32_MAX else "int32",
            "slots": tuple([slots[id(table)] for table in formula.tables]),
            "clamped": ranges[name][1],
            "scores": scores,
        }
        cache_key = (name, formula.text, tuple([table.kind for table in formula.tables]), *options.values())
        return _RENDERED.get(cache_key, (), lambda: render(formula, name, **options))

    return {name: source(name, formula, scores) for name, formula, scores in named}


def collect_tables(problem: Problem, others: Sequence[NamedFormula] = ()) -> list[Table]:
    """Return every table that mask, score and `others` read, once, in the order of the kernels' argument `tables`."""
    formulas = [formula for _, formula, _ in _named_formulas(problem, others)]
    return list({id(table): table for formula in formulas for table in formula.tables}.values())


def _named_formulas(problem: Problem, others: Sequence[NamedFormula]) -> list[NamedFormula]:
    own = (("mask_at", problem.mask, False), ("score_at", problem.score, True))
    return [(name, formula, scores) for name, formula, scores in own if formula is not None] + list(others)


def _byte_extent(table: Table) -> float:
    """Return the bytes between the first and the last entry of a table. Strides can make them exceed its size."""
    strides = layout(table.array)[1]
    return float(sum(max(length - 1, 0) * abs(stride) for length, stride in zip(table.shape, strides, strict=True)))
