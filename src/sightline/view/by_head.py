"""Every head at once: small maps of the weights, and their entropy, by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import to_numpy
from ..errors import ShapeError
from . import plotting
from .heatmaps import pooled

__all__ = ["entropy_by_head", "head_grid"]

Array = np.ndarray[Any, np.dtype[Any]]

MAX_CELLS = 64  # cells of a small map each way; longer axes are pooled
GAP = 0.08  # between small maps, as a share of one
MAX_ANNOTATED = 24  # layers or heads up to which each cell tells its number


def head_grid(weights: Any, axis: Any = None, *, names: Sequence[str] | None = None, title: str | None = None) -> Any:
    """Draw all heads of some layers as small maps, a row for each layer, a column for each head.

    Parameters
    ----------
    weights : (H, n, m) array, or one for each layer, or (L, H, n, m); leading axes of length 1 are dropped
        Weights, or what `pooled(...)` made of them. More than 64 queries or keys are pooled: a cell is the mean.
    axis : matplotlib axis, optional
        A new figure by default, reached as `axis.figure`.
    names : one for each layer, optional
    title : str, optional

    Returns
    -------
    matplotlib axis
        Colours follow the square root of the weight, each head up to its own largest; weights of 0 are grey.

    Raises
    ------
    ShapeError
        No (H, n, m), or other numbers of names.
    MissingExtraError
        matplotlib is not installed.
    """
    layers = _as_layers(weights, 3, "(H, n, m)")
    heads = max(map(len, layers))
    axis = plotting.new_axis(axis, min(1.2 + 0.62 * heads, 14), min(0.9 + 0.62 * len(layers), 14))
    _draw_maps(axis, layers)
    axis.set(xlim=(0, heads - GAP), ylim=(len(layers) - GAP, 0), aspect="equal")
    _label_axes(axis, len(layers), heads, names, (1 - GAP) / 2)
    plotting.set_title(axis, title)
    plotting.hide_frame(axis)
    return axis


def _draw_maps(axis: Any, layers: Sequence[Array]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    colours = colormaps[plotting.COLOUR_MAP].with_extremes(bad=plotting.HIDDEN_COLOUR)
    for row, layer in enumerate(layers):
        for column, head in enumerate(layer):
            cells = pooled(head.astype(np.float64), MAX_CELLS)
            shown = np.ma.masked_where(cells == 0, cells)
            scale = PowerNorm(0.5, vmin=0, vmax=float(shown.max()) if shown.count() else 1.0)
            place = (column, column + 1 - GAP, row + 1 - GAP, row)
            axis.imshow(shown, cmap=colours, norm=scale, extent=place, interpolation="nearest", aspect="equal")


def entropy_by_head(
    entropy: Any, axis: Any = None, *, names: Sequence[str] | None = None, title: str | None = None
) -> Any:
    """Draw the mean entropy of each head's queries, a row for each layer: how widely a head looks.

    Parameters
    ----------
    entropy : list of (..., H, n) arrays, one for each layer, or (L, H)
        As `seen["entropy"]` of a watched model gives it, in nats; the mean is taken over all but the heads.
    axis, names, title
        As of `head_grid`.

    Returns
    -------
    matplotlib axis

    Raises
    ------
    ShapeError
        Arrays without heads, or other numbers of names.
    MissingExtraError
        matplotlib is not installed.
    """
    means = _mean_by_head(entropy)
    heads = max(map(len, means))
    values = np.full((len(means), heads), np.nan)
    for row, layer in enumerate(means):
        values[row, : len(layer)] = layer
    axis = plotting.new_axis(axis, min(2.2 + 0.46 * heads, 14), min(1.2 + 0.4 * len(means), 14))
    from matplotlib import colormaps

    colours = colormaps[plotting.COLOUR_MAP].with_extremes(bad=plotting.HIDDEN_COLOUR)
    image = axis.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, aspect="auto", interpolation="nearest")
    plotting.add_colour_bar(axis, image, "mean entropy, nats")
    if max(values.shape) <= MAX_ANNOTATED:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = plotting.text_colour(image, value)
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    _label_axes(axis, len(means), heads, names, 0)
    plotting.set_title(axis, title)
    plotting.hide_frame(axis)
    return axis


def _mean_by_head(entropy: Any) -> list[Array]:
    """(H,) of every layer."""
    if hasattr(entropy, "ndim") and entropy.ndim == 2:
        return list(np.asarray(to_numpy(entropy), np.float64))
    found = []
    for given in entropy:
        layer = np.asarray(to_numpy(given), np.float64)
        if layer.ndim < 2:
            raise ShapeError(f"entropy of shape {layer.shape}", "(..., H, n) for each layer, or (L, H)", "[entropy]")
        found.append(np.moveaxis(layer, -2, 0).reshape(layer.shape[-2], -1).mean(1))
    return found


def _as_layers(weights: Any, ndim: int, allowed: str) -> list[Array]:
    """Arrays of `ndim` axes, one for each layer."""
    if hasattr(weights, "ndim"):
        weights = [weights] if weights.ndim == ndim else weights
    layers = []
    for given in weights:
        layer = np.asarray(to_numpy(given))
        while layer.ndim > ndim and layer.shape[0] == 1:
            layer = layer[0]
        if layer.ndim != ndim or 0 in layer.shape:
            raise ShapeError(
                f"an array of shape {layer.shape}", f"{allowed} for each layer", "choose a text: weights[0]"
            )
        layers.append(layer)
    return layers


def _label_axes(axis: Any, layers: int, heads: int, names: Sequence[str] | None, middle: float) -> None:
    """Numbers of heads below, names of layers at the left, thinned where there are many."""
    if names is not None and len(names) != layers:
        raise ShapeError(f"{len(names)} names for {layers} layers", "one for each", "names=None")
    labels = list(map(str, range(layers))) if names is None else list(names)
    for ruler, count, tick_labels in (("x", heads, list(map(str, range(heads)))), ("y", layers, labels)):
        at = range(0, count, -(-count // 48))
        ticks = getattr(axis, f"set_{ruler}ticks")
        ticks([k + middle for k in at], [tick_labels[k] for k in at], fontsize=8, parse_math=False)
    axis.set(xlabel="head", ylabel="layer" if names is None else "")
