"""The class of the package's figures, and their dark colours. The import of this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_rgba_array
from matplotlib.figure import Figure

from .palette import DARK, LIGHT, dark_twins

STYLE: Any = {  # settings of matplotlib while axes are made
    "axes.facecolor": "none",
    "axes.edgecolor": LIGHT.muted,
    "axes.labelcolor": LIGHT.ink,
    "axes.linewidth": 0.8,
    "grid.color": LIGHT.line,
    "grid.linewidth": 0.7,
    "text.color": LIGHT.ink,
    "xtick.color": LIGHT.muted,
    "ytick.color": LIGHT.muted,
    "xtick.labelcolor": LIGHT.ink,
    "ytick.labelcolor": LIGHT.ink,
}
TWINS = dark_twins()
# properties with colours; after a change of a colour map, numbers in cells have the colour that their cell asks for
PROPERTIES = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor", "cmap")


class StyledFigure(Figure):
    """A figure whose axes have lines and texts in the palette's colours."""

    def add_subplot(self, *places: Any, **options: Any) -> Any:
        """Return new axes, as `Figure.add_subplot` does."""
        with rc_context(rc=STYLE):
            return super().add_subplot(*places, **options)


@contextmanager
def dark_colours(figure: Figure) -> Iterator[None]:
    """Replace the light theme's colours in a figure by those of the dark theme, until the context ends."""
    figure.draw_without_rendering()  # makes the ticks, which have colours too
    artists: list[Any] = figure.findobj()
    artists += [text.get_bbox_patch() for text in artists if hasattr(text, "get_bbox_patch")]
    artists += [text.arrow_patch for text in artists if hasattr(text, "arrow_patch")]
    undo = []
    for name in PROPERTIES:
        for artist in artists:
            old = getattr(artist, f"get_{name}", lambda: None)()
            new = _dark_map(old) if name == "cmap" else _dark(old)
            if new is not None:
                getattr(artist, f"set_{name}")(new)
                undo.append((getattr(artist, f"set_{name}"), old))
    try:
        yield
    finally:
        for restore, old in reversed(undo):
            restore(old)


def _dark(colours: Any) -> Any:
    """Return a colour or several, as RGBA, with the dark theme's colours; None if no colour is of the light theme."""
    rows = to_rgba_array("none" if colours is None else colours)
    twins = [TWINS.get(tuple(np.rint(255 * row[:3]).astype(int))) if row[3] else None for row in rows]
    for row, twin in zip(rows, twins, strict=True):
        row[:3] = row[:3] if twin is None else np.divide(twin, 255)
    return None if not any(twins) else rows[0] if len(rows) == 1 else rows


def _dark_map(colours: Colormap | None) -> Colormap | None:
    """Return a colour map with the dark theme's colours; None if the map has no colour of the light theme."""
    stops = _dark(colours.name.split()) if colours is not None and colours.name.startswith("#") else None
    return None if stops is None else LinearSegmentedColormap.from_list("dark", stops).with_extremes(bad=DARK.hidden)
