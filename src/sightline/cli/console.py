"""Functions with which the subcommands print: the console, section headings, tables, matrices and progress bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ..arrays.operations import Array
from ..view.formula_pictures import Picture
from ..view.palette import text_on, to_hex
from ..view.terminal import SHADES, colour_of

MAX_WIDTH = 100  # largest number of columns of the console, since longer lines are hard to read
MAX_ROWS = 11  # largest number of rows of a matrix
MAX_LABEL = 10  # largest number of characters of a row's label
ELLIPSIS = "⋯"


def make_console() -> Console:
    """Return a console for standard output: with styles in a terminal, as plain text of 80 columns elsewhere."""
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        return Console(highlight=False, emoji=False, markup=False, width=80, no_color=True)
    return Console(highlight=False, emoji=False, markup=False, width=min(console.width, MAX_WIDTH))


def section(console: Console, title: str, note: str = "") -> None:
    """Print the heading of a section, with a note at the right, such as the shape of an array."""
    console.print()
    if not note:
        console.print(title, style="bold")
        return
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(style="bold")
    line.add_column(justify="right", style="dim", no_wrap=True)
    line.add_row(title, note)
    console.print(line)


def note(console: Console, text: str) -> None:
    """Print a remark in a dim style."""
    console.print(text, style="dim")


def make_table(*titles: str, rows: Sequence[Sequence[Any]], left: int = 1) -> Table:
    """Return a table without border lines. The first `left` columns are aligned left, the other columns right."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column, title in enumerate(titles):
        result.add_column(title, justify="left" if column < left else "right", overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return result


def key_value_table(named: Iterable[tuple[str, str]]) -> Table:
    """Return a table of two columns: names, and a text for each name."""
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
    width: int = 80,
    weights: bool = False,
    mark: tuple[int, int] | None = None,
) -> Table:
    """Return a table of at most `width` characters that shows a matrix with labels of its rows and columns.

    Middle rows are left out if there are more than `MAX_ROWS`, and middle columns if the width is too small for all.
    Long labels are shortened. If `weights` is True, each cell is coloured by the number in it. `mark` is the
    (row, column) of a cell that is put in brackets, or None.
    """
    result = Table(box=None, pad_edge=False, padding=(0, 0), show_header=True)
    result.add_column("", style="cyan", no_wrap=True)
    cell_width = 6 if weights else 7
    shown_rows = visible_indices(values.shape[0], MAX_ROWS)
    labels = [ELLIPSIS if i is None else shorten(rows[i], MAX_LABEL) for i in shown_rows]
    space = width - max(map(cell_len, labels))
    is_cut = values.shape[1] > space // cell_width  # then one column of two characters replaces the middle columns
    fitting = (space - 2) // cell_width + 1 if is_cut else values.shape[1]
    shown_columns = visible_indices(values.shape[1], max(fitting, 3))
    for j in shown_columns:
        title = ELLIPSIS if j is None else shorten(columns[j], cell_width - 1)
        result.add_column(Text(title, style="cyan"), justify="right", no_wrap=True)
    for i, label in zip(shown_rows, labels, strict=True):
        pairs = ((None if i is None or j is None else (i, j)) for j in shown_columns)
        gap = Text(f" {ELLIPSIS}", style="dim")
        cells = [gap if pair is None else _cell(float(values[pair]), weights, pair == mark) for pair in pairs]
        result.add_row(Text(label), *cells)
    return result


def shorten(text: str, width: int) -> str:
    """Return the text, cut to `width` characters of the terminal with … at its end if it is longer."""
    shown = Text(text)
    shown.truncate(width, overflow="ellipsis")
    return shown.plain


def visible_indices(length: int, maximum: int, last: int | None = None) -> list[int | None]:
    """Return the indices from 0 to `length` − 1 that are shown: at most `maximum` entries.

    If there are more indices, one None takes the place of those in the middle. `last` is the number of indices after
    None, by default about half.
    """
    if length <= maximum:
        return list(range(length))
    last = (maximum - 1) // 2 if last is None else last
    return [*range(maximum - 1 - last), None, *range(length - last, length)]


def _cell(value: float, weights: bool, marked: bool) -> Text:
    style = _cell_style(value**0.5) if weights and value > 0 else "dim" if weights or value == -np.inf else ""
    text = number(value, 2) if not weights else "0" if value == 0 else f"{value:.2f}"
    text = f"[{text}]" if marked else f"{text} "
    return Text(f"{text:>{6 if weights else 7}}", style=f"bold {style}" if marked else style)


def _cell_style(value: float) -> str:
    background = colour_of(value)
    return f"{to_hex(text_on(background))} on {to_hex(background)}"


def weight_style(console: Console, weight: float) -> str:
    """Return the style of a weight's cell, its background and text colour; "" if the console lacks 256 colours."""
    return _cell_style(weight**0.5) if console.color_system in ("truecolor", "256") else ""


def weight_map(console: Console, weights: Array, tokens: Sequence[str]) -> Text:
    """Return a heat map of the weights with three characters per cell.

    A cell shows the weight in hundredths on a coloured background, or a block shade if the console lacks 256 colours.
    """
    result = Text()
    margin = max(map(len, tokens)) + 4
    result.append(" " * margin + "".join(f"{j:>3}" for j in range(len(tokens))) + "\n", style="dim")
    coloured = bool(weight_style(console, 0.0))
    for i, token in enumerate(tokens):
        result.append(f"{i:>2} {token:<{margin - 3}}", style="cyan")
        for value in map(float, weights[i]):
            if coloured:
                hundredths = f"{min(round(100 * value), 99):>2} " if value >= 0.01 else " · "
                result.append(hundredths, style=_cell_style(value**0.5))
            else:
                result.append(" " + ("··" if value < 0.01 else SHADES[min(int(value**0.5 * 4), 3)] * 2))
        result.append("\n")
    result.rstrip()
    return result


def render_picture(console: Console, drawing: Picture) -> Text:
    """Return the picture as text, in colours if the console has 24-bit colours.

    A picture that is wider than the console is left out, and only its heading is returned.
    """
    text = Text.from_ansi(drawing.text(colour=console.color_system == "truecolor"))
    lines = text.split()
    if max(line.cell_len for line in lines) <= console.width:
        return text
    frame = next(index for index, line in enumerate(lines) if "┌" in line.plain)
    return Text("\n").join(lines[:frame])


def number(value: float, digits: int = 4) -> str:
    """Return a number as text, with `digits` decimals and the minus sign − of mathematics; infinity is ∞ or −∞."""
    if np.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}f}".replace("-", "−")


def progress(console: Console) -> Progress:
    """Return a progress bar that disappears when the work is done. Outside a terminal the bar is not shown."""
    columns = (TextColumn("{task.description}", style="dim"), BarColumn(bar_width=30, complete_style="cyan"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
