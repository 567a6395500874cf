"""The Triton functions of a problem's formulas: their source, the tables that they read, and the compiled functions.

This module does not import triton; the source that it compiles does.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ...arrays.operations import strides_of
from ...call.problem import Problem
from ...formula.expression import Expression
from ...formula.formula_checks import find_index_ranges
from ...formula.tables import Table
from ...formula.tensor_cache import TensorCache
from .render_triton import render

INT32_MAX = 2**31 - 1

_RENDERED = TensorCache(1024)

NamedFormula = tuple[str, Expression, bool]  # (name of the function, formula, True if the function takes scores)


class FormulaFunctions(NamedTuple):
    """The formulas of a kernel as functions of a block of pairs. A function is None if the problem lacks its formula.

    `mask_at` takes the arguments (b, h, i, j, n, m, tables). Every other function takes a score before these arguments:
    `score_at`, `score_derivative_at` and `table_gradients_at` take the scaled product s; `summands_at`, `d_weights_at`
    and `d_scores_at` take the final score.
    """

    mask_at: Any = None  # returns True where the pair is visible
    score_at: Any = None  # returns the final score
    summands_at: Any = None  # returns a tuple: the factors f of the sums Σ P f in `fused_statistics`
    score_derivative_at: Any = None  # returns d score / d s
    d_weights_at: Any = None  # returns the term that statistics add to dP
    d_scores_at: Any = None  # returns the term that statistics add to the gradient of the final score
    # Returns a tuple: for each lookup (d score / d entry, index of the table entry), see `kernels.table_gradient`.
    table_gradients_at: Any = None


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
    """Return the bytes between the first and the last entry of a table, gaps between entries included."""
    strides = strides_of(table.array)
    return float(sum(max(length - 1, 0) * abs(stride) for length, stride in zip(table.shape, strides, strict=True)))


@lru_cache(1024)
def compile_function(source: str, name: str) -> Any:
    """Return the function `name` of a generated module. `source` is the module's text.

    The text is added to `linecache`, from which Triton reads the source of a function.
    """
    filename = f"<sightline {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module: dict[str, Any] = {"__name__": f"sightline.gpu.generated.{name}"}
    exec(compile(source, filename, "exec"), module)
    return module[name]
