"""Helpers that all picture files share: matplotlib, imported when the first picture is drawn, sizes and colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import to_numpy
from ..errors import MissingExtraError, ParameterError

__all__ = [
    "BLUE",
    "HIDDEN_COLOUR",
    "ORANGE",
    "add_colour_bar",
    "colour_map",
    "draw_weights",
    "drop_leading_axes",
    "has_matplotlib",
    "hide_frame",
    "hide_upper_spines",
    "new_axis",
    "new_figure",
    "save",
    "set_position_ticks",
    "set_title",
    "text_colour",
    "token_label",
]

COLOUR_MAP = "cividis"  # looks the same with a colour vision deficiency (Nuñez et al., 2018)
HIDDEN_COLOUR = "#e9e9e4"  # for pairs that a mask hides; the colour map does not contain this colour
BLUE, ORANGE = "#0072b2", "#d55e00"  # from the palette of Okabe and Ito
FORMATS = (".png", ".svg", ".pdf")


def has_matplotlib() -> bool:
    """True if matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, size in inches, that is not registered in pyplot.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "a request to draw a picture, without matplotlib",
            "matplotlib 3.8 or later",
            'pip install "sightline-attention[plot]"',
        ) from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def new_axis(axis: Any, width: float, height: float) -> Any:
    """Return the given axis, or the axis of a new figure of this size in inches if the given one is None."""
    return new_figure(width, height).add_subplot() if axis is None else axis


def set_title(axis: Any, text: str | None) -> None:
    """Set a title at the left if the text is not empty. A $ is printed as a $."""
    if text:
        axis.set_title(text, loc="left", fontsize=10, pad=8, parse_math=False)


def token_label(token: Any) -> str:
    """Return a token as a label, with visible signs in place of spaces, newlines and tabs."""
    return str(token).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def set_position_ticks(axis: Any, names: Any) -> None:
    """Put a few whole-number ticks on these axes, "x" or "y" or both, with commas between thousands."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for name in names:
        ruler = getattr(axis, f"{name}axis")
        ruler.set_major_locator(MaxNLocator(6, integer=True))
        ruler.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.tick_params(axis=name, labelsize=8)


def add_colour_bar(axis: Any, image: Any, label: str) -> None:
    """Draw a colour bar without a frame and with a label."""
    bar = axis.figure.colorbar(image, ax=axis, shrink=0.7, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.set_label(label, fontsize=8)


def text_colour(image: Any, value: float) -> str:
    """Return "black" or "white", whichever contrasts better with the image's colour for the value."""
    red, green, blue, _ = image.cmap(image.norm(value))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def colour_map() -> Any:
    """Return the colour map of the pictures, with `HIDDEN_COLOUR` for masked cells and NaN."""
    from matplotlib import colormaps

    return colormaps[COLOUR_MAP].with_extremes(bad=HIDDEN_COLOUR)


def draw_weights(axis: Any, cells: Any, frame: tuple[float, ...], aspect: str) -> Any:
    """Draw a matrix of weights, coloured by the square root, 0 in grey, and return the matplotlib image."""
    from matplotlib.colors import PowerNorm

    shown = np.ma.masked_where(cells == 0, cells)
    norm = PowerNorm(0.5, vmin=0, vmax=float(shown.max()) if shown.count() else 1.0)
    return axis.imshow(shown, cmap=colour_map(), norm=norm, extent=frame, interpolation="nearest", aspect=aspect)


def drop_leading_axes(array: Any, ndim: int) -> Any:
    """Return a NumPy array without leading axes of length 1, as long as more than `ndim` axes are left."""
    array = np.asarray(to_numpy(array))
    while array.ndim > ndim and array.shape[0] == 1:
        array = array[0]
    return array


def hide_upper_spines(axis: Any) -> None:
    """Hide the spines at the top and at the right, and draw the grid behind the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)


def hide_frame(axis: Any) -> None:
    """Hide the frame and the tick marks."""
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def save(figure: Any, path: str | Path) -> Path:
    """Write a matplotlib figure as PNG, SVG or PDF, chosen by the ending of the path, at 180 dots per inch.

    Parameters
    ----------
    figure : matplotlib figure, or an axis of a figure
    path : str or Path

    Returns
    -------
    Path
        The path of the file.

    Raises
    ------
    ParameterError
        The path has another ending.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ParameterError(
            f"a picture at {str(path)!r}", "a path ending in " + ", ".join(FORMATS), f"{path.stem}.png"
        )
    figure.figure.savefig(path, dpi=180)  # the `figure` of a figure is the figure itself
    return path
