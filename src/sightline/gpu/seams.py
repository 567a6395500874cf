"""Generated text → Triton functions, kept by their text."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

__all__ = ["function", "together"]


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


def together(sources: Sequence[str], names: Sequence[str], name: str) -> str:
    """The source of one function that answers with what these functions of scores do, as a tuple."""
    given = "s, b, h, i, j, n, m, tables"
    calls = ", ".join([f"{each}({given})" for each in names])
    return "\n\n".join([*sources, f"@triton.jit\ndef {name}({given}):\n    return ({calls},)\n"])
