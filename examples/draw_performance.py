"""Draw the charts of docs/performance.md from its tables: torch's time over Sightline's by kind.

    python examples/draw_performance.py [--folder docs/performance]

The script reads every table with a column "torch / Sightline". If this is the first column, the other columns have the
ratios, and their titles are the kinds. Otherwise this column has the ratios, and the column "kind" has the kinds. All
ratios of one kind become one bar, from the smallest ratio to the largest. The chart is drawn wide, and narrow for
phones. A small picture for the first page has no text. Each has a dark twin.
"""

from __future__ import annotations

import argparse
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich.console import Console

from sightline.view import plotting
from sightline.view.palette import LIGHT

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
FOLDER = PAGE.parent / "performance"
KIND, RATIO = "kind", "torch / Sightline"  # titles of the columns
CARD_BARS = 5
DPI = 200

Range = tuple[Decimal, Decimal]  # a Decimal keeps the digits that the table prints


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


def add(found: dict[str, dict[str, Range]], section: str, kind: str, ratios: list[Decimal]) -> None:
    """Widen the range of a kind so that it has the ratios."""
    if ratios:
        kinds = found.setdefault(section, {})
        ratios = [*ratios, *kinds.get(kind, ())]
        kinds[kind] = min(ratios), max(ratios)


def read_numbers(cell: str) -> list[Decimal]:
    """Return the numbers of a cell, without the targets of its links."""
    return [Decimal(number) for number in re.findall(r"\d+(?:\.\d+)?", re.sub(r"\]\(.*?\)", "", cell))]


def ratios_figure(found: dict[str, dict[str, Range]], *, narrow: bool = False) -> Any:
    """Draw a row for each kind, with a bar for each section. A narrow figure has the kinds above their bars."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    kinds = list(dict.fromkeys(kind for section in found.values() for kind in section))
    row_height = 0.54 if narrow else 0.36  # in inches
    size, shift, height = (8.6, 0.13, 0.2) if narrow else (8, 0.2, 0.22)
    colours = LIGHT.blue, LIGHT.orange
    figure = plotting.new_figure(3.8 if narrow else 6.4, row_height * len(kinds) + 1.1)
    axis = figure.add_subplot()
    for number, section in enumerate(found.values()):
        for row, kind in enumerate(kinds):
            if kind in section:
                place, style = row + shift * (2 * number - len(found) + 1), {"fontsize": size - 0.4, "color": LIGHT.ink}
                draw_range(axis, place, section[kind], height, colours[number], style)
    axis.axvline(1, linewidth=1, color=LIGHT.cross, zorder=0)
    axis.set(xscale="log", xlim=(0.5, 90), ylim=(len(kinds) - 0.4, -0.6))
    axis.set_xlabel("torch's time / Sightline's\nright of 1, Sightline is faster", fontsize=size + 0.8, color=LIGHT.ink)
    axis.set_yticks(range(len(kinds)), kinds)
    if narrow:
        axis.set_yticks([])
        for row, kind in enumerate(kinds):
            place = {"xy": (0, row - 0.3), "xycoords": axis.get_yaxis_transform(), "va": "bottom"}
            behind = {"facecolor": LIGHT.ground, "edgecolor": "none", "pad": 0.5}
            axis.annotate(kind, fontsize=size, color=LIGHT.ink, weight="bold", bbox=behind, **place)
    axis.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 4, 8, 16, 32]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(labelsize=size, labelcolor=LIGHT.ink, labeltop=True)  # the first screen of a page shows the top
    axis.xaxis.set_label_position("top")
    axis.grid(axis="x", linewidth=0.5, color=LIGHT.line)
    axis.set_axisbelow(True)
    sections = [Patch(color=colours[number], label=section) for number, section in enumerate(found)]
    options = {"ncols": 1 if narrow else len(found), "fontsize": size, "labelcolor": LIGHT.ink, "frameon": False}
    figure.legend(handles=sections, loc="outside upper center", **options)
    plotting.hide_frame(axis)
    return figure


def draw_range(axis: Any, place: float, ends: Range, height: float, colour: str, style: dict[str, Any]) -> None:
    """Draw a bar from the smallest ratio to the largest, or a dot if there is one ratio, and write the numbers."""
    low, high = map(float, ends)
    axis.barh(place, high - low, height, left=low, color=colour)
    if low == high:
        axis.plot(low, place, "o", markersize=4, color=colour)
    text = " to ".join(dict.fromkeys(map(str, ends)))
    axis.annotate(text, (high, place), (5, 0), textcoords="offset points", va="center", **style)


def card_figure(found: dict[str, dict[str, Range]]) -> Any:
    """Draw the largest ratio of five kinds, without text: those with the largest ratios in the first section."""
    largest = sorted((float(high) for _, high in next(iter(found.values())).values()), reverse=True)[:CARD_BARS]
    figure = plotting.new_figure(1.7, 0.85)
    figure.set_layout_engine("none")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.barh(range(len(largest)), [ratio - 1 for ratio in largest], 0.62, left=1, color=LIGHT.blue)
    axis.axvline(1, linewidth=1, color=LIGHT.cross)
    axis.set(xscale="log", xlim=(0.75, 50), ylim=(CARD_BARS - 0.3, -0.7))
    axis.axis("off")
    return figure


def main(folder: Path = FOLDER) -> list[Path]:
    """Draw the pictures to the folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = read_ratios(PAGE.read_text(encoding="utf-8"))
    narrow = ratios_figure(found, narrow=True)
    figures = {"card": card_figure(found), "ratios": ratios_figure(found), "ratios-narrow": narrow}
    for name, figure in figures.items():
        plotting.save(figure, folder / f"{name}.png", dpi=DPI)
        plotting.save(figure, folder / f"{name}-dark.png", dpi=DPI, dark=True)
    Console(highlight=False).print(f"Wrote {len(figures)} pictures to {folder}, in light and in dark")
    return [folder / f"{name}.png" for name in figures]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
