"""Run the code cells of a notebook of docs/course in order, in one namespace, without Jupyter.

Usage: python tests/helpers/course_notebooks.py docs/course/01-dot-product-to-attention.md
"""

import os
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "course"
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(r"\A(?:---\n.*?^---\n|(?::[^\n]*\n)+)", re.MULTILINE | re.DOTALL)


def notebooks():
    """Return the paths of the notebooks, in their order."""
    return sorted(FOLDER.glob("0*.md"))


def cells(path):
    """Return the options and the code of each code cell of a MyST Markdown notebook."""
    found = []
    for text in CELL.findall(path.read_text(encoding="utf-8")):
        options = OPTIONS.match(text)
        length = options.end() if options else 0
        found.append((text[:length], text[length:]))
    return found


def compile_cells(path):
    """Return the compiled code of every cell. Raises SyntaxError if a cell is no Python."""
    return [compile(code, f"{path.name}, cell {number}", "exec") for number, (_, code) in enumerate(cells(path), 1)]


def run(path):
    """Run all cells with the folder of the notebook as the current one, as Jupyter does."""
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    namespace = {"__name__": "__main__"}
    for code in compile_cells(path):
        exec(code, namespace)


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())
