"""Triton functions compiled from the generated source of the mask, score and statistics formulas."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["FormulaFunctions", "combine_functions", "compile_function"]


class FormulaFunctions(NamedTuple):
    """The formulas of a kernel as functions of a block of pairs; None for a formula that the problem lacks.

    `mask_at` takes (b, h, i, j, n, m, tables), the others also a score before them: `score_at`, `score_derivative_at`
    and `table_gradients_at` the scaled product s, the others the final score.
    """

    mask_at: Any = None  # True where the pair is visible
    score_at: Any = None  # the final score
    summands_at: Any = None  # a tuple: the factors f of the sums Σ P f in `fused_statistics`
    score_derivative_at: Any = None  # d score / d s
    d_weights_at: Any = None  # the term that statistics add to dP
    d_scores_at: Any = None  # the term that statistics add to the gradient of the final score
    table_gradients_at: Any = None  # a tuple: (d score / d entry, index of the entry) per lookup, see `table_gradient`


@lru_cache(1024)
def compile_function(source: str, name: str, language: str = "triton.language") -> Any:
    """Return the function `name` of a module's source, which imports the module `language` as `tl`.

    The source is added to `linecache`, from which Triton reads the source of a function.
    """
    source = source.replace("import triton.language as tl", f"import {language} as tl")
    filename = f"<sightline {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module: dict[str, Any] = {"__name__": f"sightline.gpu.generated.{name}"}
    exec(compile(source, filename, "exec"), module)
    return module[name]


def combine_functions(sources: Sequence[str], expressions: Sequence[str], name: str) -> Any:
    """Return a function of the scores that returns the expressions as a tuple; they call functions of the sources."""
    body = f"@triton.jit\ndef {name}(s, b, h, i, j, n, m, tables):\n    return ({', '.join(expressions)},)\n"
    return compile_function("\n\n".join([*sources, body]), name)
