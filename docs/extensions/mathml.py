"""Formulas between $ as MathML, which browsers draw without a script and without a network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert


def write_inline(translator: Any, node: nodes.math) -> None:
    """Write a formula inside a line. The word joiner behind it keeps a full stop on the same line."""
    translator.body.append(f"{convert(node.astext())}&#8288;")
    raise nodes.SkipNode


def write_block(translator: Any, node: nodes.math_block) -> None:
    """Write a formula on a line of its own."""
    translator.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Add the writer under the name that `html_math_renderer` has."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
