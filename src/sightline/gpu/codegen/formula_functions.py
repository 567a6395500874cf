"""The seams of the kernels: functions of a formula each, out of their generated text."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["FormulaFunctions", "combine_functions", "compile_function"]


class FormulaFunctions(NamedTuple):
    """What a kernel is told of formulas, as functions of a block of pairs; None for what a problem has not."""

    mask_at: Any = None  # (b, h, i, j, n, m, tables): who is seen; all others take the score s before them
    score_at: Any = None  # the final score
    summands_at: Any = None  # what weights are summed with as they ride along, a tuple; see `riding`
    score_derivative_at: Any = None  # d score / d s
    d_weights_at: Any = None  # what statistics add to dP
    d_scores_at: Any = None  # what statistics add to the gradient of the final score
    table_gradients_at: Any = None  # what tables gain, see `gains`


@lru_cache(1024)
def compile_function(source: str, name: str, language: str = "triton.language") -> Any:
    """The function of that name in a module's source; Triton reads its lines back where Python keeps those of files.

    `language` is the module that it calls `tl`.
    """
    source = source.replace("import triton.language as tl", f"import {language} as tl")
    filename = f"<sightline {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module: dict[str, Any] = {"__name__": f"sightline.gpu.generated.{name}"}
    exec(compile(source, filename, "exec"), module)
    return module[name]


def combine_functions(sources: Sequence[str], expressions: Sequence[str], name: str) -> Any:
    """The function of scores that answers with a tuple of what these expressions call in these sources."""
    body = f"@triton.jit\ndef {name}(s, b, h, i, j, n, m, tables):\n    return ({', '.join(expressions)},)\n"
    return compile_function("\n\n".join([*sources, body]), name)
