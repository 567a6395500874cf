"""Attention weights as a heat map, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError
from . import plotting
from .palette import LIGHT

Array = np.ndarray[Any, np.dtype[Any]]
Labels = Sequence[str]

MAX_ANNOTATED = 14  # largest number of tokens per side at which every cell shows its weight by default
MAX_LABELS = 64  # largest number of tokens per side at which every token is labelled
MAX_CELLS = 512  # largest number of cells per side; more queries or keys are pooled


def heatmap(
    weights: Any,
    labels: Labels | tuple[Labels, Labels] | None = None,
    axis: Any = None,
    *,
    title: str | None = None,
    annotate: bool | None = None,
    shape: tuple[int, int] | None = None,
) -> Any:
    """Draw the weights of one head: a row for each query, a column for each key.

    Parameters
    ----------
    weights : (n, m) array; leading axes of length 1 are dropped
        Weights of exactly 0, such as those of hidden pairs, are pale grey. Colours follow the square root of the
        weight, so that small weights are visible. More than 512 rows or columns are pooled: a cell then shows the mean
        of the weights that it covers.
    labels : sequence of str, or (labels of the queries, labels of the keys), optional
        The tokens. If a side has up to 64 tokens, every token is labelled; otherwise a few tokens are.
    axis : matplotlib axis, optional
        The axis to draw on; by default that of a new figure, which is `axis.figure`.
    title : str, optional
    annotate : bool, optional
        True writes each weight into its cell. By default the weights are written if there are up to 14 tokens per side.
    shape : (queries, keys), optional
        The numbers of queries and keys that the rows and columns stand for, if `weights` are the cells of
        `pooled(...)` or only some rows of the weights.

    Returns
    -------
    matplotlib axis

    Raises
    ------
    ShapeError
        The weights are not a matrix, or the numbers of labels differ from the numbers of queries and keys.
    MissingExtraError
        matplotlib is not installed.

    Examples
    --------
    >>> import sightline.view
    >>> cat = sightline.data.load("minilm_cat")
    >>> weights = cat.layers[0].weights[0, 2, :7, :7]  # layer 0, head 2, no padding
    >>> axis = sightline.view.heatmap(weights, cat.tokens[0][:7])
    >>> weights.argmax(-1)  # a diagonal: each token attends to the token before it
    array([0, 0, 1, 2, 3, 4, 5])
    """
    values = _as_matrix(weights)
    rows, columns = values.shape
    sides = _split_labels(labels, values)
    size = min(max(0.42 * max(rows, columns), 3.2), 9.0)
    axis = plotting.new_axis(axis, size + 1.4, size + 0.5)
    whole = (rows, columns) if shape is None else shape
    annotated = max(rows, columns) <= MAX_ANNOTATED if annotate is None else annotate
    frame = (-0.5, whole[1] - 0.5, whole[0] - 0.5, -0.5)
    aspect = "equal" if max(whole) <= 4 * min(whole) else "auto"
    image = plotting.draw_weights(axis, pooled(values, MAX_CELLS), frame, aspect)
    plotting.add_colour_bar(axis, image, "weight, coloured by its square root")
    _label_sides(axis, sides, (rows, columns))
    if annotated and whole == (rows, columns):
        _annotate(axis, image, values)
    if max(whole) <= MAX_LABELS:
        _draw_grid_lines(axis, rows, columns)
    for name, side in zip("xy", sides[::-1], strict=True):
        if side is None or len(side) > MAX_LABELS:
            plotting.set_position_ticks(axis, name, side if whole == (rows, columns) else None)
    return plotting.finish(axis, title)


def pooled(values: Any, max_cells: int) -> Any:
    """Return the matrix `values` pooled to at most `max_cells` rows and columns.

    A pooled cell is the mean of a rectangle of the matrix; all rectangles have nearly equal sizes.
    """
    for axis in (0, 1):
        length = values.shape[axis]
        if length > max_cells:
            edges = np.arange(max_cells + 1) * length // max_cells
            sums = np.add.reduceat(values, edges[:-1], axis=axis)
            values = sums / np.expand_dims(np.diff(edges), 1 - axis)
    return values


def _as_matrix(weights: Any) -> Array:
    values: Array = np.asarray(plotting.drop_leading_axes(weights, 2), np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise ShapeError(f"weights of shape {np.shape(weights)}", "(n, m), one head", "heatmap(weights[0, head])")
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
            "labels=(queries, keys) if the two sides differ",
        )
    return tuple(list(map(plotting.token_label, side)) for side in sides)  # type: ignore[return-value]


def _label_sides(axis: Any, sides: tuple[Labels | None, Labels | None], shape: tuple[int, int]) -> None:
    queries, keys = sides
    axis.set(xlabel="key", ylabel="query")
    size = [float(np.clip(260 / count, 5, 9)) for count in shape]
    if queries is not None and shape[0] <= MAX_LABELS:
        axis.set_yticks(range(shape[0]), queries, fontsize=size[0], parse_math=False)
    if keys is not None and shape[1] <= MAX_LABELS:
        long = shape[1] > MAX_ANNOTATED or max(map(len, keys)) > 4
        axis.set_xticks(range(shape[1]), keys, fontsize=size[1], rotation=90 if long else 0, parse_math=False)


def _annotate(axis: Any, image: Any, values: Array) -> None:
    """Write each weight with two decimals into its cell, in black or white. A weight of 0 is written as a grey 0."""
    for (i, j), value in np.ndenumerate(values):
        text = "0" if value == 0 else f"{value:.2f}".lstrip("0") if value < 0.995 else f"{value:.1f}"
        colour = plotting.text_colour(image, value) if value else LIGHT.muted
        axis.text(j, i, text, ha="center", va="center", fontsize=7.5, color=colour)


def _draw_grid_lines(axis: Any, rows: int, columns: int) -> None:
    """Draw thin white lines between the cells."""
    axis.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axis.grid(which="minor", color=LIGHT.ground, linewidth=0.8)
    axis.tick_params(which="minor", length=0)
