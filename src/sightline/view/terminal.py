"""Matrices drawn with characters: in block shades, or in 24-bit colours if the terminal has them."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from .palette import DARK, RGB, interpolate, rgb

Array = np.ndarray[Any, np.dtype[Any]]

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


def draw_blocks(values: Array, colour: bool) -> list[str]:
    """Return lines of text that draw a matrix of numbers from 0 to 1, with NaN for hidden cells.

    A shaded cell is two characters wide. A coloured cell is two characters wide if the matrix has at most 32 rows and
    at most 32 columns; otherwise it is one character wide and half a character high.
    """
    if not colour:
        count = len(SHADES)
        shades = [
            [HIDDEN_CELL if np.isnan(x) else SHADES[min(int(x * count), count - 1)] * 2 for x in row] for row in values
        ]
        return ["".join(row) for row in shades]
    if max(values.shape) <= 32:
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


def frame_lines(lines: list[str], width: int, rows: tuple[int, int], columns: tuple[int, int]) -> list[str]:
    """Return the lines in a frame, with the numbers of the first and last row and of the first and last column.

    `width` is the number of visible characters in a line. `rows` and `columns` are (first number, last number).
    """
    first, last = f"{rows[0]:,}", f"{rows[1]:,}"
    margin = max(len(first), len(last), 2)
    left = [first, *[""] * (len(lines) - 2), last][: len(lines)]
    body = [f"{label:>{margin}} │{line}│" for label, line in zip(left, lines, strict=True)]
    start, end = f"{columns[0]:,}", f"{columns[1]:,}"
    foot = start + (end.rjust(width - len(start)) if len(start) + len(end) < width else f" … {end}")
    pad = " " * (margin + 1)
    return [f"{pad}┌{'─' * width}┐", *body, f"{pad}└{'─' * width}┘", f"{pad} {foot}"]


def _colour_code(value: float) -> str:
    return ";".join(map(str, colour_of(value)))
