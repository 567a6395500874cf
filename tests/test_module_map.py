"""The map of modules in CONTRIBUTING.md: the first paragraph of every docstring. `python` with this file renews it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/sightline", "benchmarks", "tests/helpers", "docs/extensions", ".ci")
START = "```text\n"


def first_paragraph(module):
    """Return the first paragraph of a module's docstring as one line."""
    return " ".join((ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())


def module_map():
    """Return the lines of the map."""
    return [line for name in FOLDERS for line in (name + "/", *entries(ROOT / name))]


def entries(folder, depth=1):
    """Return a line for each module and package of a folder, indented by its depth."""
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            lines += [f"{'  ' * depth}{path.name}/  {first_paragraph(path / '__init__.py')}".rstrip()]
            lines += entries(path, depth + 1)
        elif path.suffix == ".py" and not path.name.startswith("__"):
            lines.append(f"{'  ' * depth}{path.name:23} {first_paragraph(path)}")
    return lines


def split(page):
    """Return the page's text before the map, the lines of the map, and the text after it."""
    before, _, rest = page.partition("## Modules\n")
    introduction, _, rest = rest.partition(START)
    block, end, after = rest.partition("\n```\n")
    return before + "## Modules\n" + introduction + START, block.split("\n"), end + after


def test_the_map_lists_every_module_by_its_docstring():
    _, lines, _ = split((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert lines == module_map(), "run python tests/test_module_map.py"
    without = [line for line in lines if line.startswith(" ") and len(line.split()) == 1]
    assert without == [], "these modules or packages have no docstring"


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    before, _, after = split(page.read_text(encoding="utf-8"))
    page.write_text(before + "\n".join(module_map()) + after, encoding="utf-8")
