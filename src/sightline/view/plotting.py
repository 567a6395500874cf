"""Helpers for pictures drawn with matplotlib: figures, axes, colours, labels and files.

matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays.operations import to_numpy
from ..errors import DtypeError, MissingExtraError, ParameterError, ShapeError, name_file
from . import palette
from .palette import LIGHT

SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of this width and height in inches. The figure is not registered in pyplot.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401

        from .styled_figure import StyledFigure
    except ImportError as error:
        given = "a request to draw a picture, without matplotlib"
        raise MissingExtraError(given, "matplotlib 3.9 or later", 'pip install "sightline-attention[plot]"') from error
    return StyledFigure(figsize=(width, height), layout="constrained", facecolor=LIGHT.ground)


def new_axis(axis: Any, width: float, height: float) -> Any:
    """Return the given axis. If `axis` is None, return the axis of a new figure of this width and height in inches."""
    return new_figure(width, height).add_subplot() if axis is None else axis


def set_title(axis: Any, text: str | None) -> None:
    """Set the title of the axis at the left, unless the text is empty or None. A $ in the text is printed as a $."""
    if text:
        axis.set_title(text, loc="left", fontsize=10, pad=8, parse_math=False)


def token_label(token: Any) -> str:
    """Return the token as the explorer page shows it, without the sign Ġ or ▁ of a tokenizer before a word.

    Newlines and tabs become ⏎ and ⇥. Other spaces become ␣, except one space between two words.
    """
    bare = re.sub(r"^[Ġ▁ ]+(?=.)", "", str(token))
    return re.sub(r"[Ġ▁\u00a0]|(?<!\S) | (?!\S)", "␣", bare).replace("\n", "⏎").replace("\t", "⇥")


def set_position_ticks(axis: Any, names: Any, labels: Any = None) -> None:
    """Put a few ticks at whole positions. A tick shows its position, with commas between thousands, or its label.

    `names` has the directions that get ticks: "x", "y" or both.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def write(place: float, _: Any) -> str:
        if labels is None:
            return f"{place:,.0f}"
        return labels[round(place)] if 0 <= round(place) < len(labels) else ""

    for name in names:
        ruler = getattr(axis, f"{name}axis")
        ruler.set_major_locator(MaxNLocator(6, integer=True))
        ruler.set_major_formatter(FuncFormatter(write))
        axis.tick_params(axis=name, labelsize=8)


def set_labels(
    axis: Any, name: str, labels: Any, size: float, is_turned: bool, first: float = 0, step: int = 1
) -> None:
    """Label the positions first, first + step, ... of the direction `name`, "x" or "y". A $ is printed as a $."""
    places, rotation = first + step * np.arange(len(labels)), 90 if is_turned else 0
    getattr(axis, f"set_{name}ticks")(places, labels, fontsize=size, rotation=rotation, parse_math=False)


def add_colour_bar(axis: Any, image: Any, label: str) -> None:
    """Draw a colour bar for the image beside the axis, with a label and without a frame."""
    bar = axis.figure.colorbar(image, ax=axis, shrink=0.7, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.set_label(label, fontsize=8)


def text_colour(image: Any, value: float) -> str:
    """Return black or white, whichever contrasts better with the colour of the number `value` in the image."""
    red, green, blue, _ = image.cmap(image.norm(value), bytes=True)
    return palette.to_hex(palette.text_on((int(red), int(green), int(blue))))


def write_number(axis: Any, image: Any, place: tuple[int, int], value: float, text: str) -> None:
    """Write a text into the cell (row, column) of an image, in black or white, also after a change of its colours."""
    drawn = axis.text(*place[::-1], text, ha="center", va="center", fontsize=7.5, color=text_colour(image, value))
    image.callbacks.connect("changed", lambda shown: drawn.set_color(text_colour(shown, value)))


def draw_grid_lines(axis: Any, rows: int, columns: int, size: int = 1) -> None:
    """Draw thin lines between cells of `size` × `size` pairs."""
    axis.set_xticks(np.arange(columns + 1) * size - 0.5, minor=True)
    axis.set_yticks(np.arange(rows + 1) * size - 0.5, minor=True)
    axis.grid(which="minor", color=LIGHT.ground, linewidth=min(0.8, 16 / max(rows, columns)))
    axis.tick_params(which="minor", length=0)


def colour_map(colours: tuple[str, ...] = LIGHT.weights) -> Any:
    """Return the colour map through these colours. Masked cells have the colour of hidden pairs."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(" ".join(colours), list(colours)).with_extremes(bad=LIGHT.hidden)


def draw_weights(axis: Any, cells: Any, frame: tuple[float, ...], aspect: str) -> Any:
    """Draw a matrix of weights and return the matplotlib image.

    Colours follow the square root of the weight; weights of 0 have the colour of hidden pairs. `frame` is (left, right,
    bottom, top).
    """
    from matplotlib.colors import PowerNorm

    check_weights(cells)
    shown = np.ma.masked_where(cells == 0, cells)
    norm = PowerNorm(0.5, vmin=0, vmax=float(shown.max()) if shown.count() else 1.0)
    return axis.imshow(shown, cmap=colour_map(), norm=norm, extent=frame, interpolation="nearest", aspect=aspect)


def drop_leading_axes(array: Any, ndim: int) -> Any:
    """Return the array as a NumPy array, without its leading axes of length 1 if it has more than `ndim` axes."""
    given = array
    with suppress(ValueError):  # of an object whose items differ in length
        array = np.asarray(to_numpy(array))
    if getattr(array, "dtype", np.dtype(object)).kind in "OSUMmc":
        cure = 'matplotlib.image.imread(path) reads a file of an image; seen["weights"][0] of a recording are weights'
        raise DtypeError(f"a {type(given).__name__} to draw", "arrays of numbers", cure)
    while array.ndim > ndim and array.shape[0] == 1:
        array = array[0]
    return array


def as_matrix(given: Any, allowed: str, cure: str) -> Any:
    """Return the array as a matrix, without its leading axes of length 1; ShapeError if it is none, or is empty."""
    array = drop_leading_axes(given, 2)
    if array.ndim != 2 or 0 in array.shape:
        raise ShapeError(f"an array of shape {array.shape}", allowed, cure)
    return array


def check_weights(weights: Any) -> None:
    """Raise ParameterError if a weight is negative, since it would have the colour of 0."""
    if (weights < 0).any():
        raise ParameterError(f"weights down to {weights.min():.3g}", "numbers from 0", "draw weights(), not scores()")


def hide_frame(axis: Any) -> None:
    """Hide the frame of the axis and its tick marks."""
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def finish(axis: Any, title: str | None) -> Any:
    """Return the axis with the title at the left and without a frame."""
    set_title(axis, title)
    hide_frame(axis)
    return axis


def save(figure: Any, path: str | Path, *, dpi: float = 180, dark: bool = False, transparent: bool = False) -> Path:
    """Write a picture to a file. The ending .png, .svg or .pdf chooses the format.

    Parameters
    ----------
    figure : matplotlib figure, an axis of a figure, or a picture of a formula
    path : str or Path
    dpi : float, default 180
        The dots per inch of a PNG.
    dark : bool, default False
        True writes the picture in the colours of the dark theme. The figure itself stays as it is.
    transparent : bool, default False
        True leaves the background out.

    Returns
    -------
    Path
        The path of the file.

    Raises
    ------
    ParameterError
        The path does not end in .png, .svg or .pdf, or `figure` is no figure.
    OSError
        The file cannot be written, for example because the folder is missing or the disk is full.

    Examples
    --------
    >>> import tempfile, sightline.view
    >>> axis = sightline.view.tile_map(sightline.causal(), 512)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sightline.view.save(axis, f"{folder}/causal.png").name
    'causal.png'
    """
    own = figure.figure() if callable(getattr(figure, "figure", None)) else getattr(figure, "figure", None)
    if own is None or not hasattr(own, "savefig") or not isinstance(path, str | PathLike):
        given = f"save of a {type(figure).__name__} to a {type(path).__name__}"
        allowed = "what a function of sightline.view returned, and then a path"
        raise ParameterError(given, allowed, 'save(heatmap(weights), "picture.png")')
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ParameterError(f"a picture at {str(path)!r}", f"a path ending in {', '.join(SUFFIXES)}", "picture.png")
    from .styled_figure import dark_colours

    with name_file(path), dark_colours(own) if dark else nullcontext():
        own.savefig(path, dpi=dpi, transparent=transparent)
    return path
