"""The seams of the kernels: functions of a formula each, out of their generated text."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["Seams", "function", "together"]


class Seams(NamedTuple):
    """What a kernel is told of formulas, as functions of a block of pairs; None for what a problem has not."""

    mask_at: Any = None  # (b, h, i, j, n, m, tables): who is seen; all others take the score s before them
    score_at: Any = None  # the final score
    sums_at: Any = None  # what weights are summed with as they ride along, a tuple; see `riding`
    slope_at: Any = None  # d score / d s
    weights_at: Any = None  # what statistics add to dP
    scores_at: Any = None  # what statistics add to the gradient of the final score
    gains_at: Any = None  # what tables gain, see `gains`


@lru_cache(1024)
def function(source: str, name: str, language: str = "triton.language") -> Any:
    """The function of that name in a module's source; Triton reads its lines back where Python keeps those of files.

    `language` is the module that it calls `tl`.
    """
    source = source.replace("import triton.language as tl", f"import {language} as tl")
    place = f"<sightline {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    module: dict[str, Any] = {"__name__": f"sightline.gpu.generated.{name}"}
    exec(compile(source, place, "exec"), module)
    return module[name]


def together(sources: Sequence[str], answers: Sequence[str], name: str) -> Any:
    """The function of scores that answers with a tuple of what these expressions call in these sources."""
    body = f"@triton.jit\ndef {name}(s, b, h, i, j, n, m, tables):\n    return ({', '.join(answers)},)\n"
    return function("\n\n".join([*sources, body]), name)
