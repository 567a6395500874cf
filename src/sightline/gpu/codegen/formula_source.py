"""A problem's formulas as the text of Triton functions, and the tables they read. Needs no triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...arrays import layout
from ...formula.expression import Expression
from ...formula.index_ranges import find_index_ranges
from ...formula.render_triton import render
from ...formula.tables import Table
from ...formula.tensor_cache import TensorCache
from ...problem import Problem

__all__ = ["INT32_MAX", "NamedFormula", "collect_tables", "render_sources"]

INT32_MAX = 2**31 - 1

_RENDERED = TensorCache(1024)

NamedFormula = tuple[str, Expression, bool]  # the function's name, the formula, whether it takes scores


def render_sources(problem: Problem, others: Sequence[NamedFormula] = ()) -> dict[str, str]:
    """The module of each function by its name: `mask_at` and `score_at`, where there are such formulas, and others."""
    named = _named_formulas(problem, others)
    slots = {id(table): slot for slot, table in enumerate(collect_tables(problem, others))}
    ranges = {name: find_index_ranges(formula, problem.extent) for name, formula, _ in named}
    byte_extents = [_byte_extent(table) for table in collect_tables(problem, others)]
    needs_int64 = max([number for number, _ in ranges.values()] + byte_extents, default=0.0) > INT32_MAX

    def source(name: str, formula: Expression, scores: bool) -> str:
        options: dict[str, Any] = {
            "floats": "float64" if formula.kind == "bool" else problem.accumulator,
            "integers": "int64" if needs_int64 else "int32",
            "slots": tuple([slots[id(table)] for table in formula.tables]),
            "clamped": ranges[name][1],
            "scores": scores,
        }
        cache_key = (name, formula.text, tuple([table.kind for table in formula.tables]), *options.values())
        return _RENDERED.get(cache_key, (), lambda: render(formula, name, **options))

    return {name: source(name, formula, scores) for name, formula, scores in named}


def collect_tables(problem: Problem, others: Sequence[NamedFormula] = ()) -> list[Table]:
    """Every table of the formulas once, in the order in which kernels take them."""
    return list(
        {id(table): table for _, formula, _ in _named_formulas(problem, others) for table in formula.tables}.values()
    )


def _named_formulas(problem: Problem, others: Sequence[NamedFormula]) -> list[NamedFormula]:
    own = (("mask_at", problem.mask, False), ("score_at", problem.score, True))
    return [(name, formula, scores) for name, formula, scores in own if formula is not None] + list(others)


def _byte_extent(table: Table) -> float:
    """Bytes between the farthest entries, which a view with gaps may spread far."""
    strides = layout(table.array)[1]
    return float(sum(max(length - 1, 0) * abs(stride) for length, stride in zip(table.shape, strides, strict=True)))
