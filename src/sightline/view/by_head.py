"""Pictures with a place for every head, by layer and head: small maps of the weights, and the mean entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.operations import to_numpy
from ..errors import ShapeError
from ..recording import Seen
from . import plotting
from .heatmaps import pooled

Array = np.ndarray[Any, np.dtype[Any]]

MAX_CELLS = 64  # largest number of cells per side of a small map; more queries or keys are pooled
GAP = 0.08  # width of the gap between small maps, in units of the distance from one map to the next
MAX_ANNOTATED = 24  # largest number of layers and of heads at which every cell shows its number


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
        Weights of 0 are grey.

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
            frame = (column, column + 1 - GAP, row + 1 - GAP, row)
            plotting.draw_weights(axis, pooled(head.astype(np.float64), MAX_CELLS), frame, "equal")
    axis.set(xlim=(0, heads - GAP), ylim=(len(layers) - GAP, 0), aspect="equal")
    _label_axes(axis, len(layers), heads, names, (1 - GAP) / 2)
    return plotting.finish(axis, title)


def entropy_by_head(
    entropy: Any, axis: Any = None, *, names: Sequence[str] | None = None, title: str | None = None
) -> Any:
    """Draw the mean entropy over the queries of each head, in nats: a row for each layer, a column for each head.

    Parameters
    ----------
    entropy : list of (..., H, n) arrays, one for each layer, or (L, H) array
        Entropies in nats, as `seen["entropy"]` of a watched model returns them. The mean is taken over all axes except
        the axis of heads. An (L, H) array holds means and is drawn as it is.
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
    means = _mean_by_head(entropy)
    heads = max(map(len, means))
    values = np.full((len(means), heads), np.nan)
    for row, layer in enumerate(means):
        values[row, : len(layer)] = layer
    axis = plotting.new_axis(axis, min(2.2 + 0.46 * heads, 14), min(1.2 + 0.4 * len(means), 14))
    shown = np.ma.masked_invalid(values)
    image = axis.imshow(shown, cmap=plotting.colour_map(), vmin=0, aspect="auto", interpolation="nearest")
    plotting.add_colour_bar(axis, image, "mean entropy, nats")
    if max(values.shape) <= MAX_ANNOTATED:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = plotting.text_colour(image, value)
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    _label_axes(axis, len(means), heads, names, 0)
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
            raise ShapeError(
                f"an array of shape {layer.shape}",
                "(H, n, m) for each layer",
                "[array[None]] for one head (n, m), weights[0] for the first of several texts",
            )
    return layers


def _refuse_recording(given: Any, name: str) -> None:
    """Raise ShapeError if `given` is a whole recording instead of the results of one of its statistics."""
    if isinstance(given, Seen):
        raise ShapeError("a whole recording", "one of its statistics", f'seen["{name}"], after see=sightline.{name}()')


def _label_axes(axis: Any, layers: int, heads: int, names: Sequence[str] | None, middle: float) -> None:
    """Label heads below the picture and layers at its left, at index + `middle`, with at most 48 labels per side."""
    if names is not None and len(names) != layers:
        raise ShapeError(f"{len(names)} names for {layers} layers", "one name for each layer", "names=None")
    labels = list(map(str, range(layers))) if names is None else list(names)
    for set_ticks, tick_labels in ((axis.set_xticks, list(map(str, range(heads)))), (axis.set_yticks, labels)):
        at = range(0, len(tick_labels), -(-len(tick_labels) // 48))
        set_ticks([k + middle for k in at], [tick_labels[k] for k in at], fontsize=8, parse_math=False)
    axis.set(xlabel="head", ylabel="layer" if names is None else "")
