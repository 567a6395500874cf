"""Attention weights as matrices, drawn with matplotlib: of one head, on the patches of an image, of all heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ..arrays.operations import Array, to_numpy
from ..errors import ShapeError
from ..statistics.recording import Seen
from ..statistics.reduction import cell_edges
from . import plotting
from .palette import LIGHT

Labels = Sequence[str]

MAX_ANNOTATED = 14  # largest number of tokens per side at which every cell shows its weight by default
MAX_LABELS = 64  # largest number of tokens per side at which every token is labelled
MAX_CELLS = 512  # largest number of cells per side; more queries or keys are pooled
DARKEST = 0.82  # the part of the light that the patch of the smallest weight loses; the image stays visible there
MAX_HEADS_IN_ROW = 6  # largest number of heads in a row
IMAGE_GAP = 0.04  # between two images, in widths of an image
CAPTION = 0.1  # height of a head's caption, as a share of the longer side of an image
MAX_MAP_CELLS = 64  # largest number of cells per side of a small map; more queries or keys are pooled
MAP_GAP = 0.08  # width of the gap between small maps, in units of the distance from one map to the next
MAX_ANNOTATED_HEADS = 24  # largest number of layers and of heads at which every cell shows its number


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
        Weights of exactly 0, as of hidden pairs, are nearly of the background's colour. Colours follow the root of the
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
    values = plotting.as_matrix(weights, "(n, m), one head", "heatmap(weights[0, head])").astype(np.float64)
    rows, columns = values.shape
    sides = _split_labels(labels, values)
    size = min(max(0.42 * max(rows, columns), 3.2), 9.0)
    axis = plotting.new_axis(axis, size + 1.4, size + 0.5)
    whole = (rows, columns) if shape is None else shape
    annotated = max(rows, columns) <= MAX_ANNOTATED if annotate is None else annotate
    frame = (-0.5, whole[1] - 0.5, whole[0] - 0.5, -0.5)
    aspect = "equal" if max(whole) <= 4 * min(whole) else "auto"
    image = plotting.draw_weights(axis, pool_cells(values, MAX_CELLS), frame, aspect)
    plotting.add_colour_bar(axis, image, "weight, coloured by its square root")
    axis.set(xlabel="key", ylabel="query")
    for name, side in zip("yx", sides, strict=True):
        if side is None or len(side) > MAX_LABELS:
            plotting.set_position_ticks(axis, name, side if whole == (rows, columns) else None)
        else:
            is_turned = name == "x" and (len(side) > MAX_ANNOTATED or max(map(len, side)) > 4)
            plotting.set_labels(axis, name, side, float(np.clip(260 / len(side), 5, 9)), is_turned)
    if annotated and whole == (rows, columns):
        _annotate(axis, image, values)
    if max(whole) <= MAX_LABELS:
        plotting.draw_grid_lines(axis, rows, columns)
    return plotting.finish(axis, title)


def pool_cells(values: Any, max_cells: int) -> Any:
    """Return the matrix `values` pooled to at most `max_cells` rows and columns.

    A pooled cell is the mean of a rectangle of the matrix; all rectangles have nearly equal sizes.
    """
    for axis in (0, 1):
        length = values.shape[axis]
        if length > max_cells:
            edges = cell_edges(0, length, max_cells)
            sums = np.add.reduceat(values, edges[:-1], axis=axis)
            values = sums / np.expand_dims(np.diff(edges), 1 - axis)
    return values


def _split_labels(labels: Any, values: Array) -> tuple[Labels | None, Labels | None]:
    if labels is None:
        return None, None
    is_pair = isinstance(labels, tuple) and len(labels) == 2 and not isinstance(labels[0], str)
    sides = labels if is_pair else (labels, labels)
    if tuple(map(len, sides)) != values.shape:
        given = f"{len(sides[0])} and {len(sides[1])} labels for weights of shape {values.shape}"
        raise ShapeError(given, "one label per query and per key", "labels=(queries, keys) if the two sides differ")
    return tuple(list(map(plotting.token_label, side)) for side in sides)  # type: ignore[return-value]


def _annotate(axis: Any, image: Any, values: Array) -> None:
    """Write each weight with two decimals into its cell. A weight of 0 is written as a grey 0."""
    for place, value in np.ndenumerate(values):
        if value:
            text = f"{value:.2f}".lstrip("0") if value < 0.995 else f"{value:.1f}"
            plotting.write_number(axis, image, place, value, text)
        else:
            axis.text(*place[::-1], "0", ha="center", va="center", fontsize=7.5, color=LIGHT.muted)


def over_image(weights: Any, image: Any, axis: Any = None, *, title: str | None = None) -> Any:
    """Draw an image, darker where its patches have less weight, such as the weights of a class token on the patches.

    Parameters
    ----------
    weights : (rows, columns) or (H, rows, columns) array; leading axes of length 1 are dropped
        A number ≥ 0 for each patch. In each head, the patch with the smallest weight is dark, and that with the largest
        is unchanged; if all weights are equal, all patches are. Between them the light grows with the square root of
        the weight minus the smallest. Both are written below the image. At most six heads are drawn side by side.
    image : (height, width), (height, width, 3) or (height, width, 4) array
        Grey values or colours as matplotlib takes them: integers from 0 to 255, or floats from 0 to 1. The patches
        divide the image into equal rectangles.
    axis, title : as in `heatmap`

    Returns
    -------
    matplotlib axis

    Raises
    ------
    ShapeError
        The weights or the image have another shape, or there are no patches.
    ParameterError
        A weight is negative.
    MissingExtraError
        matplotlib is not installed.
    """
    values = np.asarray(plotting.drop_leading_axes(weights, 2), np.float64)
    if values.ndim not in (2, 3) or 0 in values.shape:
        given = f"weights of shape {np.shape(weights)}"
        cure = "over_image(weights_of_one_query[..., num_prefix_tokens:].unflatten(-1, grid_size), image)"
        raise ShapeError(given, "(rows, columns) of patches, or (heads, rows, columns)", cure)
    plotting.check_weights(values)
    pixels = plotting.drop_leading_axes(image, 3)
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))):
        given = f"an image of shape {np.shape(image)}"
        cure = "over_image(weights, image.squeeze(0).permute(1, 2, 0)) for a tensor (3, height, width)"
        raise ShapeError(given, "(height, width), (height, width, 3) or (height, width, 4)", cure)
    height, width = pixels.shape[:2]
    heads = values.reshape(-1, *values.shape[-2:])
    is_one, columns = len(heads) == 1, min(len(heads), MAX_HEADS_IN_ROW)
    rows = -(-len(heads) // columns)
    right, down = width * (1 + IMAGE_GAP), height * (1 + IMAGE_GAP) + max(height, width) * CAPTION
    scale = (4.2 if is_one else 2.2) / max(height, width)  # inches for each pixel
    axis = plotting.new_axis(axis, columns * right * scale + 0.3, rows * down * scale + 0.5)
    for number, head in enumerate(heads):
        row, column = divmod(number, columns)
        frame = (column * right, column * right + width, row * down + height, row * down)
        low, high = float(head.min()), float(head.max())
        shade = np.zeros((*head.shape, 4))  # black; the last number is its opacity
        shade[..., 3] = DARKEST * (1 - np.sqrt((head - low) / (high - low))) if high > low else 0
        axis.imshow(pixels, cmap="gray", extent=frame)
        axis.imshow(shade, extent=frame, interpolation="nearest")
        text = f"{'' if is_one else f'head {number}: '}{low:.2g} to {high:.2g}"
        axis.text(frame[0], frame[2] + height * 0.02, text, va="top", fontsize=8, color=LIGHT.ink)
    axis.set(xlim=(0, columns * right - width * IMAGE_GAP), ylim=(rows * down - height * IMAGE_GAP, 0))
    axis.set(xticks=[], yticks=[], xlabel="smallest: dark, largest: unchanged")
    return plotting.finish(axis, title)


def head_grid(weights: Any, axis: Any = None, *, names: Sequence[str] | None = None, title: str | None = None) -> Any:
    """Draw all heads of some layers as small maps: a row for each layer, a column for each head.

    Parameters
    ----------
    weights : (H, n, m) or (L, H, n, m) array, or a list with one (H, n, m) array for each layer
        The weights, or the cells of weights that the statistic `pooled(...)` returns. Leading axes of length 1 are
        dropped. More than 64 queries or keys are pooled: a cell then shows the mean of the weights that it covers.
    names : sequence of str, optional
        The name of each layer; by default 0 to L − 1.
    axis, title : as in `heatmap`

    Returns
    -------
    matplotlib axis
        The colours of a map follow the square root of the weight, and are scaled by the largest weight of the head.
        Weights of 0 are nearly of the background's colour.

    Raises
    ------
    ShapeError
        A layer is not (H, n, m), or the number of names differs from the number of layers.
    MissingExtraError
        matplotlib is not installed.
    """
    layers = _as_layers(weights)
    heads = max(map(len, layers))
    axis = plotting.new_axis(axis, min(1.2 + 0.62 * heads, 14), min(0.9 + 0.62 * len(layers), 14))
    for row, layer in enumerate(layers):
        for column, head in enumerate(layer):
            frame = (column, column + 1 - MAP_GAP, row + 1 - MAP_GAP, row)
            plotting.draw_weights(axis, pool_cells(head.astype(np.float64), MAX_MAP_CELLS), frame, "equal")
    axis.set(xlim=(0, heads - MAP_GAP), ylim=(len(layers) - MAP_GAP, 0), aspect="equal")
    _label_axes(axis, len(layers), heads, names, (1 - MAP_GAP) / 2)
    return plotting.finish(axis, title)


def entropy_by_head(
    entropy: Any, axis: Any = None, *, names: Sequence[str] | None = None, title: str | None = None
) -> Any:
    """Draw the mean entropy over the queries of each head, in nats: a row for each layer, a column for each head.

    Parameters
    ----------
    entropy : list of (..., H, n) arrays, one for each layer, or (L, H) array
        Entropies in nats, as `seen["entropy"]` of a watched model returns them. The mean is taken over all axes except
        the axis of heads, padded queries included. An (L, H) array holds means and is drawn as it is.
    names : sequence of str, optional
        The name of each layer; by default 0 to L − 1.
    axis, title : as in `heatmap`

    Returns
    -------
    matplotlib axis

    Raises
    ------
    ShapeError
        An array has no axis of heads, or the number of names differs from the number of layers.
    MissingExtraError
        matplotlib is not installed.
    """
    values = np.array([*zip_longest(*_mean_by_head(entropy), fillvalue=np.nan)]).T  # layers may differ in heads
    axis = plotting.new_axis(axis, min(2.2 + 0.46 * values.shape[1], 14), min(1.2 + 0.4 * len(values), 14))
    shown = np.ma.masked_invalid(values)
    image = axis.imshow(shown, cmap=plotting.colour_map(), vmin=0, aspect="auto", interpolation="nearest")
    plotting.add_colour_bar(axis, image, "mean entropy, nats")
    if max(values.shape) <= MAX_ANNOTATED_HEADS:
        for place, value in np.ndenumerate(values):
            if np.isfinite(value):
                plotting.write_number(axis, image, place, value, f"{value:.2f}")
    _label_axes(axis, len(values), values.shape[1], names, 0)
    return plotting.finish(axis, title)


def _mean_by_head(entropy: Any) -> list[Array]:
    """Return for every layer an (H,) array with the mean entropy of each head."""
    _refuse_recording(entropy, "entropy")
    if hasattr(entropy, "ndim") and entropy.ndim == 2:
        return list(np.asarray(to_numpy(entropy), np.float64))
    found = []
    for given in entropy:
        layer = np.asarray(to_numpy(given), np.float64)
        if layer.ndim < 2:
            raise ShapeError(f"entropy of shape {layer.shape}", "(..., H, n) for each layer, or (L, H)", "[entropy]")
        found.append(np.moveaxis(layer, -2, 0).reshape(layer.shape[-2], -1).mean(1))
    return found


def _as_layers(weights: Any) -> list[Array]:
    """Return one (H, n, m) array for each layer."""
    _refuse_recording(weights, "weights")
    layers = [plotting.drop_leading_axes(x, 3) for x in ([weights] if getattr(weights, "ndim", None) == 3 else weights)]
    for layer in layers:
        if layer.ndim != 3 or 0 in layer.shape:
            cure = "[array[None]] for one head (n, m), weights[0] for the first of several texts"
            raise ShapeError(f"an array of shape {layer.shape}", "(H, n, m) for each layer", cure)
    return layers


def _refuse_recording(given: Any, name: str) -> None:
    """Raise ShapeError if `given` is a whole recording instead of the results of one of its statistics."""
    if isinstance(given, Seen):
        raise ShapeError("a whole recording", "one of its statistics", f'seen["{name}"], after see=sightline.{name}()')


def _label_axes(axis: Any, layers: int, heads: int, names: Sequence[str] | None, middle: float) -> None:
    """Label heads below the picture and layers at its left, at index + `middle`, with at most 48 labels per side."""
    if names is not None and len(names) != layers:
        raise ShapeError(f"{len(names)} names for {layers} layers", "one name for each layer", "names=None")
    for name, labels in (("x", range(heads)), ("y", range(layers) if names is None else names)):
        step = -(-len(labels) // 48)
        plotting.set_labels(axis, name, list(map(str, labels[::step])), 8, False, middle, step)
    axis.set(xlabel="head", ylabel="layer" if names is None else "")
