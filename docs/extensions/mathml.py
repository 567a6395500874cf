"""Formulas between $ as MathML, which browsers draw without a script and without a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

# latex2mathml writes names of functions and the sign of the transpose as operators, which browsers put between spaces
NAME = re.compile(r"<mo>([A-Za-z]{2,}|&#x022A4;)</mo>")


def to_mathml(node: Any, display: str) -> str:
    """Return the MathML of a node's formula, in which names are identifiers."""
    return NAME.sub(r"<mi>\1</mi>", convert(node.astext(), display=display))


def write_inline(translator: Any, node: nodes.math) -> None:
    """Write a formula inside a line. The word joiner behind it keeps a full stop on the same line."""
    translator.body.append(f"{to_mathml(node, 'inline')}&#8288;")
    raise nodes.SkipNode


def write_block(translator: Any, node: nodes.math_block) -> None:
    """Write a formula on a line of its own."""
    translator.body.append(f'<div class="formula">{to_mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Add the writer under the name that `html_math_renderer` has."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
