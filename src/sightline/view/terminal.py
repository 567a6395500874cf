"""Matrices that `draw_matrix` draws with characters: in block shades, or in 24-bit colours of the terminal."""

from __future__ import annotations

import os
import sys

import numpy as np

from ..arrays.operations import Array
from .palette import DARK, RGB, interpolate, rgb

WIDE_CELLS = 32  # largest number of cells per side that are two characters wide, and of shaded cells per side
SHADES = "░▒▓█"
HIDDEN_CELL = " ·"  # text of a hidden cell, visible unlike a blank
RESET = "\x1b[0m"


def has_true_colour() -> bool:
    """Return whether standard output is a terminal with 24-bit colours and NO_COLOR is not set (https://no-color.org)."""
    is_true_colour = os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit")
    return is_true_colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def colour_of(value: float) -> RGB:
    """Return the colour of a number from 0 to 1 in the dark theme. NaN has the colour of hidden pairs."""
    return rgb(DARK.hidden) if np.isnan(value) else interpolate(DARK.weights, value)


def draw_matrix(values: Array, colour: bool, n: int, m: int) -> list[str]:
    """Return lines of text that draw a matrix of numbers from 0 to 1, NaN for hidden cells, for n queries and m keys.

    A shaded cell is two characters wide. A coloured cell is two characters wide if the matrix has at most `WIDE_CELLS`
    rows and columns; otherwise it is one character wide and half a character high. A frame has the numbers of the first
    and the last query and key.
    """
    width = values.shape[1] * (2 if max(values.shape) <= WIDE_CELLS else 1)
    lines, last = _draw_cells(values, colour), f"{n - 1:,}"
    margin = max(len(last), 2)
    labels = ["0", *[""] * (len(lines) - 2), last][: len(lines)]
    body = [f"{label:>{margin}} │{line}│" for label, line in zip(labels, lines, strict=True)]
    end, pad = f"{m - 1:,}", " " * (margin + 1)
    foot = "0" + (end.rjust(width - 1) if len(end) + 1 < width else f" … {end}")
    return [f"{pad}┌{'─' * width}┐", *body, f"{pad}└{'─' * width}┘", f"{pad} {foot}"]


def _draw_cells(values: Array, colour: bool) -> list[str]:
    if not colour:
        count = len(SHADES)
        shades = [
            [HIDDEN_CELL if np.isnan(x) else SHADES[min(int(x * count), count - 1)] * 2 for x in row] for row in values
        ]
        return ["".join(row) for row in shades]
    if max(values.shape) <= WIDE_CELLS:
        return ["".join(f"\x1b[48;2;{_colour_code(value)}m  " for value in row) + RESET for row in values]
    if values.shape[0] % 2:
        values = np.concatenate([values, np.full((1, values.shape[1]), np.nan)])
    return [
        "".join(
            f"\x1b[38;2;{_colour_code(upper)};48;2;{_colour_code(lower)}m▀"
            for upper, lower in zip(above, below, strict=True)
        )
        + RESET
        for above, below in zip(values[0::2], values[1::2], strict=True)
    ]


def _colour_code(value: float) -> str:
    return ";".join(map(str, colour_of(value)))
