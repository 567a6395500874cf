"""What the commands print with: one console, matrices, sections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ..view.picture import Picture
from ..view.terminal import colour_of, text_colour_on

__all__ = [
    "key_value_table",
    "make_console",
    "matrix",
    "number",
    "progress",
    "render_picture",
    "section",
    "table",
    "weight_map",
    "weight_style",
]

Array = np.ndarray[Any, np.dtype[Any]]

MAX_WIDTH = 100  # longer lines are hard to read
ELLIPSIS = "⋯"


def make_console() -> Console:
    """Standard output: styled in a terminal, plain text of 80 columns in a pipe."""
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        return Console(highlight=False, emoji=False, markup=False, width=80, no_color=True)
    return Console(highlight=False, emoji=False, markup=False, width=min(console.width, MAX_WIDTH))


def section(console: Console, title: str, note: str = "") -> None:
    """A heading, with a note of shapes or formulas at its right."""
    console.print()
    line = Table.grid(expand=True)
    line.add_column(style="bold")
    line.add_column(justify="right", style="dim")
    line.add_row(title, note)
    console.print(line)


def table(*heads: str, rows: Sequence[Sequence[Any]], left: int = 1) -> Table:
    """A table with no lines but one under its head; the first `left` columns are words, the others numbers."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, head in enumerate(heads):
        result.add_column(head, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return result


def key_value_table(named: Iterable[tuple[str, str]]) -> Table:
    """Names at the left, what is said of them at the right."""
    result = Table.grid(padding=(0, 2, 0, 0))
    result.add_column(style="cyan", no_wrap=True, min_width=12)
    result.add_column(overflow="fold")
    for name, text in named:
        result.add_row(name, text)
    return result


def matrix(
    values: Array,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    max_shape: tuple[int, int] = (11, 11),
    weights: bool = False,
    mark: tuple[int, int] | None = None,
) -> Table:
    """A matrix with labels; beyond `max_shape` rows and columns its middle is left out.

    Weights are coloured, and `mark` is the entry to point at.
    """
    result = Table(box=None, pad_edge=False, padding=(0, 0), show_header=True)
    result.add_column("", style="cyan", no_wrap=True)
    shown_rows, shown_columns = (
        _visible_indices(values.shape[0], max_shape[0]),
        _visible_indices(values.shape[1], max_shape[1]),
    )
    for j in shown_columns:
        result.add_column(Text(ELLIPSIS if j is None else columns[j], style="cyan"), justify="right", no_wrap=True)
    for i in shown_rows:
        cells = [
            Text(f" {ELLIPSIS}", style="dim")
            if i is None or j is None
            else _cell(float(values[i, j]), weights, (i, j) == mark)
            for j in shown_columns
        ]
        result.add_row(ELLIPSIS if i is None else rows[i], *cells)
    return result


def _visible_indices(length: int, max_shape: int) -> list[int | None]:
    """Indices shown, None where the middle is left out."""
    if length <= max_shape:
        return list(range(length))
    return [*range(max_shape // 2), None, *range(length - (max_shape - max_shape // 2 - 1), length)]


def _cell(value: float, weights: bool, marked: bool) -> Text:
    style = (
        _cell_style(value**0.5)
        if weights and value > 0
        else "dim"
        if value == -np.inf or (weights and value == 0)
        else ""
    )
    text = number(value, 2) if not weights else "0" if value == 0 else f"{value:.2f}"
    text = f"[{text}]" if marked else f"{text} "
    return Text(f"{text:>7}" if not weights else f"{text:>6}", style=f"bold {style}" if marked else style)


def _cell_style(value: float) -> str:
    background = colour_of(value)
    ink = text_colour_on(background)
    return f"#{ink[0]:02x}{ink[1]:02x}{ink[2]:02x} on #{background[0]:02x}{background[1]:02x}{background[2]:02x}"


def weight_style(console: Console, weight: float) -> str:
    """The style of a weight's cell: its colour and an ink that reads on it; none where there are few colours."""
    return _cell_style(weight**0.5) if console.color_system in ("truecolor", "256") else ""


def weight_map(console: Console, weights: Array, tokens: Sequence[str]) -> Text:
    """A heat map of weights, three characters a cell: hundredths on colours, or shades where there are none."""
    result = Text()
    margin = max(map(len, tokens)) + 4
    result.append(" " * margin + "".join(f"{j:>3}" for j in range(len(tokens))) + "\n", style="dim")
    coloured = bool(weight_style(console, 0.0))
    for i, token in enumerate(tokens):
        result.append(f"{i:>2} {token:<{margin - 3}}", style="cyan")
        for value in map(float, weights[i]):
            if coloured:
                result.append(
                    f"{min(round(100 * value), 99):>2} " if value >= 0.01 else " · ", style=_cell_style(value**0.5)
                )
            else:
                result.append(" " + ("··" if value < 0.01 else "░▒▓█"[min(int(value**0.5 * 4), 3)] * 2))
        result.append("\n")
    result.rstrip()
    return result


def render_picture(console: Console, drawing: Picture) -> Text:
    """A picture with colours where the console has them."""
    return Text.from_ansi(drawing.text(colour=console.color_system == "truecolor"))


def number(value: float, digits: int = 4) -> str:
    """A number as mathematics writes it, with −."""
    if np.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}f}".replace("-", "−")


def progress(console: Console) -> Progress:
    """A bar for long work, gone when done; none in a pipe."""
    columns = (TextColumn("{task.description}", style="dim"), BarColumn(bar_width=30, complete_style="cyan"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
