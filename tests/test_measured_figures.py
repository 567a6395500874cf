"""The figures of the first pages: each equals the measured number that docs/figures.toml names, and none is missing."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIGURES = tomllib.loads((ROOT / "docs" / "figures.toml").read_text(encoding="utf-8"))["figure"]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# what states a measurement: a number with a unit, or with decimals
MEASURED = re.compile(r"\d[\d,]*(?:\.\d+)?(?:\*\*)?(?= ?(?:×|times\b|MB\b|GB\b|ms\b|%|th of))|\d[\d,]*\.\d+")
VERSION = re.compile(r"\b(?:Python|torch|Apache|dropout|Apache-|kvpress|below)[ -]?\d+(?:\.\d+)*")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page):
    """Return the text of a page on one line, without code blocks, quoted messages and targets of links."""
    text = re.sub("^>.*$", "", BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8")), flags=re.MULTILINE)
    return re.sub(r"\s+", " ", re.sub(r"\]\([^)]*\)", "]", text))


def words(figure):
    """Return the words of a page that state a figure."""
    return figure["says"].replace("{", "").replace("}", "")


def tables(page):
    """Yield each row of the page's tables as (titles, cells). An empty first cell repeats that of the row above."""
    titles, first = None, ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            titles = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if titles is None:
            titles = cells
        elif not set(line) <= set("|-: "):
            first = cells[0] or first
            yield titles, [first, *cells[1:]]


def source(figure):
    """Return the text in which the figure was measured: one cell of one row, or a sentence."""
    if "text" in figure:
        assert figure["text"] in prose(figure["from"]), f"{figure['from']} does not say {figure['text']!r}"
        return figure["text"]
    found = [
        cells[titles.index(figure["column"])]
        for titles, cells in tables(figure["from"])
        if figure["column"] in titles and " | ".join(cells).startswith(figure["row"] + " |")
    ]
    assert len(found) == 1, f"{len(found)} rows of {figure['from']} begin with {figure['row']!r}"
    return found[0]


def is_rounded(stated, measured):
    """True if the stated number is the measured one, rounded to the digits that are stated."""
    decimals = len(stated.partition(".")[2])
    return abs(float(stated.replace(",", "")) - float(measured.replace(",", ""))) <= 0.5 * 10**-decimals + 1e-9


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure['page']}: {figure['says']}")
def test_a_figure_is_what_was_measured(figure):
    assert words(figure) in prose(figure["page"])
    measured, stated = NUMBER.findall(source(figure)), re.findall(r"{(.*?)}", figure["says"])
    assert stated
    for number in stated:
        assert any(is_rounded(number, other) for other in measured), f"{number} beside {measured}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/messages.md"])
def test_no_figure_of_the_first_pages_is_missing(page):
    text, stated = prose(page), set()
    for figure in FIGURES:
        if figure["page"] == page:
            start = text.index(words(figure))
            stated |= set(range(start, start + len(words(figure))))
    for version in VERSION.finditer(text):
        stated |= set(range(*version.span()))
    assert [found[0] for found in MEASURED.finditer(text) if found.start() not in stated] == []


def test_the_short_calls_that_are_slower_are_counted():
    """The README says how many of the short calls take torch less time, and with how many queries."""
    rows = [
        cells for titles, cells in tables("docs/performance.md") if titles[0] == "B × H × n × d" and "plain" in titles
    ]
    ratios = [(re.split(r"\s×\s", cells[0])[2], float(cell)) for cells in rows for cell in cells[1:]]
    slower = [queries for queries, ratio in ratios if ratio < 1]
    assert f"in {len(slower)} of the {len(ratios)}" in prose("README.md")
    counts = sorted(set(map(int, slower)))
    assert f"have {', '.join(map(str, counts[:-1]))} or {counts[-1]} queries" in prose("README.md")


def test_wrong_figures_are_found():
    assert is_rounded("1.3", "1.33")
    assert not is_rounded("1.3", "1.36")
    assert not is_rounded("17", "18")
    assert MEASURED.findall("2 times, 3 MB, 0.5, 7 heads, n 4096") == ["2", "3", "0.5"]
    missing = {"from": "docs/performance.md", "row": "nothing", "column": "ratio"}
    with pytest.raises(AssertionError, match="0 rows"):
        source(missing)
