"""What every picture file shares: matplotlib, loaded when the first one is drawn, sizes and colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, ParameterError

__all__ = ["BLUE", "COLOURS", "HIDDEN", "ORANGE", "has_matplotlib", "new_figure", "quiet", "save"]

COLOURS = "cividis"  # the same to eyes with and without a colour vision deficiency (Nuñez et al., 2018)
HIDDEN = "#e9e9e4"  # pairs that a mask hides: no colour of the map
BLUE, ORANGE = "#0072b2", "#d55e00"  # Okabe and Ito's
FORMATS = (".png", ".svg", ".pdf")


def has_matplotlib() -> bool:
    """Whether picture files can be written here."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, size in inches, that no global state knows of.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "a picture to be drawn, and no matplotlib",
            "matplotlib 3.8 or later",
            'pip install "sightline-attention[plot]"',
        ) from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def quiet(axis: Any) -> None:
    """No frame and no tick marks: the picture speaks."""
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.tick_params(length=0)


def save(figure: Any, path: str | Path) -> Path:
    """Write a matplotlib figure as PNG, SVG or PDF, by the path's ending.

    Raises
    ------
    ParameterError
        Another ending.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ParameterError(
            f"a picture at {str(path)!r}", "a path ending in " + ", ".join(FORMATS), f"{path.stem}.png"
        )
    figure.savefig(path, dpi=180)
    return path
