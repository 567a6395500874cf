"""Charts of the weight that each key receives, in one head or in several heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError
from . import plotting
from .palette import LIGHT

Array = np.ndarray[Any, np.dtype[Any]]

MAX_BARS = 64  # largest number of keys at which every key has a bar and a label
MAX_POINTS = 1000  # largest number of points of the line that is drawn for more than `MAX_BARS` keys


def received_by_key(
    received: Any, labels: Sequence[str] | None = None, axis: Any = None, *, title: str | None = None
) -> Any:
    """Draw the weight that each key receives, summed over the queries.

    Parameters
    ----------
    received : (m,) or (H, m) array; leading axes of length 1 are dropped
        The weight that each key receives, as the statistic `received()` returns it. For several heads the chart shows
        their mean. A thin line on each bar reaches from the smallest number of a head to the largest.
    labels : sequence of str, optional
        The m tokens. Up to 64 tokens are labelled.
    axis, title : as in `heatmap`

    Returns
    -------
    matplotlib axis
        The axis has bars for up to 64 keys, otherwise a line. More than 1000 keys are pooled to 1000 points. The line
        shows the mean over the keys of a point and over the heads. A shaded area reaches up to the maximum.

    Raises
    ------
    ShapeError
        The array is not (m,) or (H, m), or the number of labels is not m.
    MissingExtraError
        matplotlib is not installed.
    """
    values = np.atleast_2d(np.asarray(plotting.drop_leading_axes(received, 2), np.float64))
    if values.ndim != 2 or 0 in values.shape or (labels is not None and len(labels) != values.shape[1]):
        label_text = "" if labels is None else f" with {len(labels)} labels"
        raise ShapeError(
            f"received of shape {np.shape(received)}{label_text}", "(m,) or (H, m), one label per key", "received[0]"
        )
    m = values.shape[1]
    axis = plotting.new_axis(axis, float(np.clip(0.32 * m + 1.2, 4.5, 11)), 2.9)
    (_draw_bars if m <= MAX_BARS else _draw_line)(axis, values)
    if labels is not None and m <= MAX_BARS:
        tick_labels, size = list(map(plotting.token_label, labels)), float(np.clip(420 / m, 6, 9))
        rotation = 90 if max(map(len, tick_labels)) * m > 90 else 0
        axis.set_xticks(range(m), tick_labels, rotation=rotation, fontsize=size, parse_math=False)
    else:
        plotting.set_position_ticks(axis, "x")
    axis.set(xlabel="key", ylabel="received", xlim=(-0.7, m - 0.3), ylim=(0, None))
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(axis="y", color=LIGHT.line, linewidth=0.7)
    axis.set_axisbelow(True)
    return plotting.finish(axis, title)


def _draw_bars(axis: Any, values: Array) -> None:
    mean = values.mean(0)
    axis.bar(range(mean.size), mean, width=0.8, color=LIGHT.blue)
    if len(values) > 1:
        ends = np.stack([mean - values.min(0), values.max(0) - mean])
        axis.errorbar(range(mean.size), mean, ends, fmt="none", ecolor=LIGHT.ink, elinewidth=0.8)


def _draw_line(axis: Any, values: Array) -> None:
    m = values.shape[1]
    count = min(m, MAX_POINTS)
    edges = np.arange(count + 1) * m // count
    places = (edges[:-1] + edges[1:] - 1) / 2
    mean = np.add.reduceat(values.mean(0), edges[:-1]) / np.diff(edges)
    maxima = np.maximum.reduceat(values.max(0), edges[:-1])
    axis.fill_between(places, mean, maxima, color=LIGHT.blue, alpha=0.22, linewidth=0)
    axis.plot(places, mean, color=LIGHT.blue, linewidth=1)
