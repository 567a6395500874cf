"""Documentation: the API reference has every public name, and links and anchors of the pages exist.

Pages are read on a code host and as a site, which `make docs` builds.
"""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import sightline

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
# modules of `sightline` with public names
PUBLIC = ("", *sightline.SUBMODULES, "torch.distributed", "torch.flex", "errors", "reference", "view.explorer")
LINK = re.compile(r"\]\(([^)\s]+)\)")
API = re.compile(r"^```\{api\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def public_names(module):
    """Return the full names of `__all__` of a module, without an import."""
    path = Path(sightline.__file__).parent.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return {".".join(filter(None, ("sightline", module, name))) for name in ast.literal_eval(node.value)}
    return set()


def documented_names(texts):
    """Return the names that the `api` blocks of all pages list."""
    blocks = [block for text in texts for block in API.findall(text)]
    return [line for block in blocks for line in block.split("\n") if line and not line.startswith(":")]


def anchors(text):
    """Return the anchors of a page's headings, as a code host makes them."""
    lines = BLOCK.sub("", text).split("\n")
    headings = [line.lstrip("#").strip().lower() for line in lines if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def broken_links(page, text):
    """Return the links of a page to files and anchors that do not exist."""
    broken = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", BLOCK.sub("", text))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = page.parent / name
        if not path.exists() or (anchor and anchor not in anchors(path.read_text("utf-8") if name else text)):
            broken.append(link)
    return broken


def test_the_api_reference_has_every_public_name_once():
    names = documented_names(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    expected = set().union(*map(public_names, PUBLIC))
    assert len(expected) > 80
    assert sorted(expected - set(names)) == []
    assert sorted(names) == sorted(set(names))


def test_names_are_read_from_blocks_of_pages():
    page = "`sightline.b`\n```{api}\n:members: append\nsightline.KVCache\n```\n```python\nsightline.i\n```\n"
    assert documented_names([page]) == ["sightline.KVCache"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_to_files_and_anchors_and_no_code_is_cut_at_its_edge_or_quoted(page):
    assert broken_links(page, text := page.read_text(encoding="utf-8")) == []
    assert not re.findall(r"(?m)^(?:>>>|\.\.\.) .{95,}$", text) + re.findall("(?m)^>", BLOCK.sub("", text))


def test_broken_links_are_found():
    text = "# A: `it`\n[a](#a-it) [`b`](#b) [c](gone.md) [d](limits.md#numbers) [e](limits.md#gone) `x](y)`\n"
    assert broken_links(DOCS / "explain.md", text) == ["#b", "gone.md", "limits.md#gone"]


def test_the_sidebar_has_at_most_twelve_entries():
    trees = re.findall(r"^```\{toctree\}\n(.*?)```$", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    entries = [line for tree in trees for line in tree.split("\n") if line and not line.startswith(":")]
    assert 10 <= len(set(entries)) == len(entries) <= 12


def test_the_site_has_at_most_28_pages_and_55_000_words():
    """Beside the API reference, the recipes, and the two pages that mirror files of the root."""
    own = [x for x in PAGES if x.parent in (DOCS, DOCS / "course") and x.stem not in ("contributing", "changelog")]
    assert len(own) <= 28
    assert 40_000 < sum(len(page.read_text("utf-8").split()) for page in own) <= 55_000


def test_the_index_lists_every_recipe():
    pages = {page: page.read_text(encoding="utf-8") for page in sorted((DOCS / "recipes").glob("*.md"))}
    index = pages.pop(DOCS / "recipes" / "index.md")
    recipes = [f"{page.name}#{anchor}" for page, text in pages.items() for anchor in anchors(text[text.index("## ") :])]
    assert len(recipes) > 40
    assert [recipe for recipe in recipes if f"({recipe})" not in index] == []


def test_the_layers_of_the_page_are_those_of_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [layer.replace("sightline.", "") for layer in contracts[0]["layers"]]
    section = (DOCS / "architecture.md").read_text("utf-8").partition("## Imports\n")[2]
    assert re.findall(r"^    (.+)$", section, re.MULTILINE)[: len(layers)] == layers


def test_outputs_of_commands_on_pages_are_checked_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "extensions")
    commands = importlib.import_module("commands")
    monkeypatch.setattr(commands, "output", {"sightline --version": "sightline 1.0"}.get)
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```console\n$ sightline --version\nsightline 0.0\n```\n")
    assert commands.main([page], write=False) == 1
    assert "page.md:5" in capsys.readouterr().out
    commands.main([page], write=True)
    assert page.read_text() == "Text.\n\n```console\n$ sightline --version\nsightline 1.0\n```\n"
    assert commands.main([page], write=False) == 0


@pytest.mark.parametrize("lengths", [(30, 90), (90, 30)], ids=str)
def test_masks_of_flash_attention_are_those_of_the_page(lengths):
    """Its rule: key j is visible to query i if −left ≤ j − (i + m − n) ≤ right, where −1 is no limit."""
    n, m = lengths
    page = (DOCS / "swap-one-line.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(causal=|window_size=)(.*?)` \| `(.*?)` \|$", page, re.MULTILINE)
    assert len(rows) == 6
    scope = vars(sightline) | {"left": 5, "right": 3}
    distance = np.arange(m) - (np.arange(n)[:, None] + m - n)
    for name, value, code in rows:
        left, right = (-1, 0) if name == "causal=" else eval(value, scope)
        visible = ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
        formula = eval(code, scope)
        assert np.array_equal(visible if formula is None else formula.array(n, m), visible), code
        assert formula is not None or visible.all()
    slopes, score = sightline.alibi([0.5]), np.zeros((n, m))  # the page's alibi, up to a number for each query
    difference = np.where(distance <= 0, slopes.array(n, m, s=score) + 0.5 * abs(distance), np.nan)
    seen = difference[(distance <= 0).any(1)]
    assert np.array_equal(np.nanmin(seen, 1), np.nanmax(seen, 1))
