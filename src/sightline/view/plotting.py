"""What every picture file shares: matplotlib, loaded when the first one is drawn, sizes and colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, ParameterError

__all__ = [
    "BLUE",
    "COLOUR_MAP",
    "HIDDEN_COLOUR",
    "ORANGE",
    "add_colour_bar",
    "has_matplotlib",
    "hide_frame",
    "new_axis",
    "new_figure",
    "save",
    "set_position_ticks",
    "set_title",
    "text_colour",
    "token_label",
]

COLOUR_MAP = "cividis"  # the same to eyes with and without a colour vision deficiency (Nuñez et al., 2018)
HIDDEN_COLOUR = "#e9e9e4"  # pairs that a mask hides: no colour of the map
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


def new_axis(axis: Any, width: float, height: float) -> Any:
    """The axis given, or that of a new figure of this size in inches."""
    return new_figure(width, height).add_subplot() if axis is None else axis


def set_title(axis: Any, text: str | None) -> None:
    """A title at the left, where there is one; a $ in it is a $."""
    if text:
        axis.set_title(text, loc="left", fontsize=10, pad=8, parse_math=False)


def token_label(token: Any) -> str:
    """A token as a label: what cannot be seen gets a sign."""
    return str(token).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def set_position_ticks(axis: Any, rulers: Any) -> None:
    """A few whole numbers along these rulers, "x" or "y", with commas in thousands."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for name in rulers:
        ruler = getattr(axis, f"{name}axis")
        ruler.set_major_locator(MaxNLocator(6, integer=True))
        ruler.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.tick_params(axis=name, labelsize=8)


def add_colour_bar(axis: Any, image: Any, label: str) -> None:
    """A quiet bar that tells what the colours stand for."""
    bar = axis.figure.colorbar(image, ax=axis, shrink=0.7, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.set_label(label, fontsize=8)


def text_colour(image: Any, value: float) -> str:
    """Black or white, whichever reads better on the colour an image gives a value."""
    red, green, blue, _ = image.cmap(image.norm(value))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def hide_frame(axis: Any) -> None:
    """No frame and no tick marks: the picture speaks."""
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.tick_params(length=0)


def save(figure: Any, path: str | Path) -> Path:
    """Write a matplotlib figure as PNG, SVG or PDF, by the path's ending, and give the path.

    Parameters
    ----------
    figure : matplotlib figure, or an axis of one
    path : str or Path

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
    figure.figure.savefig(path, dpi=180)  # a figure is its own
    return path
