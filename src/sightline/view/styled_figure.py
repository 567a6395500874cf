"""The class of the package's figures. It has its own module, because the import of this module needs matplotlib."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from .palette import LIGHT

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


class StyledFigure(Figure):
    """A figure whose axes have lines and texts in the palette's colours."""

    def add_subplot(self, *places: Any, **options: Any) -> Any:
        """Return new axes, as `Figure.add_subplot` does."""
        with rc_context(rc=STYLE):
            return super().add_subplot(*places, **options)
