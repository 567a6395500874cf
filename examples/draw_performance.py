"""Draw the chart of docs/performance.md from the tables of docs/measurements.md: torch's time over Sightline's by kind.

    python examples/draw_performance.py [--folder docs/performance]

The script reads every table with a column "torch / Sightline". If this is the first column, the other columns have the
ratios, and their titles are the kinds. Otherwise this column has the ratios, and the column "kind" has the kinds. All
ratios of one kind become one bar, from the smallest ratio to the largest.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from sightline.view import palette, plotting

PAGE = Path(__file__).parents[1] / "docs" / "measurements.md"
FOLDER = PAGE.parent / "performance"
KIND, RATIO = "kind", "torch / Sightline"  # titles of the columns
SHIFT, HEIGHT = 0.2, 0.22  # distance of a bar from the middle of its row, and its height, in rows
DPI = 150

Range = tuple[float, float]


def read_ratios(page: str) -> dict[str, dict[str, Range]]:
    """Return, by section of the page and by kind, the smallest and the largest ratio in the section's tables."""
    found: dict[str, dict[str, Range]] = {}
    section, kind, titles = "", "", []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not line.startswith("|"):
            titles = []
        elif not titles:
            titles = cells
        elif titles[0] == RATIO:
            for title, cell in zip(titles[1:], cells[1:], strict=True):
                add(found, section, title, read_numbers(cell))
        elif {KIND, RATIO} <= set(titles):
            kind = cells[titles.index(KIND)] or kind  # an empty cell repeats the one above
            add(found, section, kind, read_numbers(cells[titles.index(RATIO)]))
    return found


def add(found: dict[str, dict[str, Range]], section: str, kind: str, ratios: list[float]) -> None:
    """Widen the range of a kind so that it has the ratios."""
    if ratios:
        kinds = found.setdefault(section, {})
        ratios = [*ratios, *kinds.get(kind, ())]
        kinds[kind] = min(ratios), max(ratios)


def read_numbers(cell: str) -> list[float]:
    """Return the numbers of a cell, without the targets of its links."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", re.sub(r"\]\(.*?\)", "", cell))]


def ratios_figure(found: dict[str, dict[str, Range]]) -> Any:
    """Draw a row for each kind, with a bar for each section."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    kinds = list(dict.fromkeys(kind for section in found.values() for kind in section))
    figure = plotting.new_figure(6.4, 0.36 * len(kinds) + 1.1)
    axis = figure.add_subplot()
    for number, ranges in enumerate(found.values()):
        for row, kind in enumerate(kinds):
            if kind in ranges:
                draw_range(axis, row + SHIFT * (2 * number - len(found) + 1), ranges[kind], palette.SERIES[number])
    axis.axvline(1, linewidth=1, color=palette.LIGHT.cross, zorder=0)
    axis.set(xscale="log", xlim=(0.5, 90), ylim=(len(kinds) - 0.4, -0.6))
    axis.set_xlabel("torch's time / Sightline's\nright of 1, Sightline is faster", fontsize=9)
    axis.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axis.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 4, 8, 16, 32]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", linewidth=0.5)
    axis.set_axisbelow(True)
    sections = [Patch(color=palette.SERIES[number], label=section) for number, section in enumerate(found)]
    figure.legend(handles=sections, loc="outside upper center", ncols=len(found), fontsize=8, frameon=False)
    plotting.hide_frame(axis)
    return figure


def draw_range(axis: Any, place: float, ends: Range, colour: str) -> None:
    """Draw a bar from the smallest ratio to the largest, or a dot if there is one ratio, and write the numbers."""
    low, high = ends
    axis.barh(place, high - low, HEIGHT, left=low, color=colour)
    if low == high:
        axis.plot(low, place, "o", markersize=4, color=colour)
    text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    axis.annotate(text, (high, place), (5, 0), textcoords="offset points", va="center", fontsize=7.5)


def main(folder: Path = FOLDER) -> list[Path]:
    """Draw the chart to the folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ratios.png"
    ratios_figure(read_ratios(PAGE.read_text(encoding="utf-8"))).savefig(path, dpi=DPI)
    Console(highlight=False).print(f"Wrote {path.name} to {folder}")
    return [path]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
