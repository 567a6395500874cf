"""Triton functions compiled from the generated source of the mask, score and statistics formulas."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["FormulaFunctions", "combine_functions", "compile_function"]


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


def combine_functions(sources: Sequence[str], expressions: Sequence[str], name: str) -> Any:
    """Return a Triton function `name` that takes scores and returns the tuple of `expressions`.

    The expressions call functions that the texts in `sources` define.
    """
    body = f"@triton.jit\ndef {name}(s, b, h, i, j, n, m, tables):\n    return ({', '.join(expressions)},)\n"
    return compile_function("\n\n".join([*sources, body]), name)
