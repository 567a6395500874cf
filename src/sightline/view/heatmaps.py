"""Attention weights as a heat map, for matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import to_numpy
from ..errors import ShapeError
from . import plotting

__all__ = ["heatmap", "pooled"]

Array = np.ndarray[Any, np.dtype[Any]]
Labels = Sequence[str]

MAX_ANNOTATED = 14  # tokens each way up to which every cell shows its number
MAX_LABELS = 64  # and every row its token
MAX_CELLS = 512  # cells each way; longer axes are pooled


def heatmap(
    weights: Any,
    labels: Labels | tuple[Labels, Labels] | None = None,
    axis: Any = None,
    *,
    title: str | None = None,
    annotate: bool | None = None,
    shape: tuple[int, int] | None = None,
) -> Any:
    """Draw one head's weights: a row for each query, a column for each key.

    Parameters
    ----------
    weights : (n, m) array, or with leading axes of length 1
        Weights of exactly 0, hidden pairs, are grey; colours follow the square root, so that small weights show. More
        than 512 rows or columns are pooled: a cell is the mean.
    labels : tokens, or (tokens of the queries, tokens of the keys), optional
        Shown up to 64 a side.
    axis : matplotlib axis, optional
        Where to draw; a new figure by default, reached as `axis.figure`.
    title : str, optional
        Written above.
    annotate : bool, optional
        Write each weight in its cell; by default up to 14 tokens each way.
    shape : (queries, keys), optional
        How many these cells stand for, where they are `pooled(...)` from `seen`, or a few rows of many.

    Returns
    -------
    matplotlib axis

    Raises
    ------
    ShapeError
        Weights that are no matrix, labels of other lengths.
    MissingExtraError
        matplotlib is not installed.
    """
    values = _as_matrix(weights)
    rows, columns = values.shape
    sides = _split_labels(labels, values)
    if axis is None:
        size = min(max(0.42 * max(rows, columns), 3.2), 9.0)
        axis = plotting.new_figure(size + 1.4, size + 0.5).add_subplot()
    cells = pooled(values, MAX_CELLS)
    whole = (rows, columns) if shape is None else shape
    annotated = max(rows, columns) <= MAX_ANNOTATED if annotate is None else annotate
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    colours = colormaps[plotting.COLOUR_MAP].with_extremes(bad=plotting.HIDDEN_COLOUR)
    frame = (-0.5, whole[1] - 0.5, whole[0] - 0.5, -0.5)
    shown = np.ma.masked_where(cells == 0, cells)
    aspect = "equal" if max(whole) <= 4 * min(whole) else "auto"
    scale = PowerNorm(0.5, vmin=0, vmax=float(shown.max()) if shown.count() else 1.0)
    image = axis.imshow(shown, cmap=colours, norm=scale, extent=frame, interpolation="nearest", aspect=aspect)
    plotting.add_colour_bar(axis, image, "weight, coloured by its square root")
    _label_sides(axis, sides, (rows, columns))
    if annotated and whole == (rows, columns):
        _annotate(axis, image, values)
    if max(whole) <= MAX_LABELS:
        _draw_grid_lines(axis, rows, columns)
    plotting.set_title(axis, title)
    plotting.set_position_ticks(axis, [ruler for ruler, known in zip("xy", sides[::-1], strict=True) if known is None])
    plotting.hide_frame(axis)
    return axis


def pooled(values: Any, max_cells: int) -> Any:
    """The matrix with at most `max_cells` rows and columns: means over blocks of neighbours, nearly equal in size."""
    for axis in (0, 1):
        length = values.shape[axis]
        if length > max_cells:
            edges = np.arange(max_cells + 1) * length // max_cells
            sums = np.add.reduceat(values, edges[:-1], axis=axis)
            values = sums / np.expand_dims(np.diff(edges), 1 - axis)
    return values


def _as_matrix(weights: Any) -> Array:
    values = np.asarray(to_numpy(weights), np.float64)
    shape = values.shape
    while values.ndim > 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 2 or 0 in values.shape:
        raise ShapeError(f"weights of shape {shape}", "(n, m), one head", "choose one: heatmap(weights[0, head])")
    return values


def _split_labels(labels: Any, values: Array) -> tuple[Labels | None, Labels | None]:
    if labels is None:
        return None, None
    sides = (
        labels if isinstance(labels, tuple) and len(labels) == 2 and not isinstance(labels[0], str) else (labels,) * 2
    )
    if tuple(map(len, sides)) != values.shape:
        raise ShapeError(
            f"{len(sides[0])} and {len(sides[1])} labels for weights of shape {values.shape}",
            "one label per query and per key",
            "labels=(queries, keys) where they differ",
        )
    return tuple(list(map(plotting.token_label, side)) for side in sides)  # type: ignore[return-value]


def _label_sides(axis: Any, sides: tuple[Labels | None, Labels | None], shape: tuple[int, int]) -> None:
    queries, keys = sides
    axis.set(xlabel="key", ylabel="query")
    size = float(np.clip(260 / max(shape), 5, 9))
    if queries is not None and shape[0] <= MAX_LABELS:
        axis.set_yticks(range(shape[0]), queries, fontsize=size, parse_math=False)
    if keys is not None and shape[1] <= MAX_LABELS:
        long = shape[1] > MAX_ANNOTATED or max(map(len, keys)) > 4
        axis.set_xticks(range(shape[1]), keys, fontsize=size, rotation=90 if long else 0, parse_math=False)


def _annotate(axis: Any, image: Any, values: Array) -> None:
    """Each weight in two digits, in black or white, whichever reads better."""
    for (i, j), value in np.ndenumerate(values):
        text = "0" if value == 0 else f"{value:.2f}".lstrip("0") if value < 0.995 else f"{value:.1f}"
        axis.text(
            j,
            i,
            text,
            ha="center",
            va="center",
            fontsize=7.5,
            color=plotting.text_colour(image, value) if value else "#9a9a94",
        )


def _draw_grid_lines(axis: Any, rows: int, columns: int) -> None:
    """Thin white lines between cells."""
    axis.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=0.8)
    axis.tick_params(which="minor", length=0)
