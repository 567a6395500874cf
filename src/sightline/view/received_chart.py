"""How much weight each key receives: which tokens a head, or a layer, looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import to_numpy
from ..errors import ShapeError
from . import plotting

__all__ = ["received_by_key"]

Array = np.ndarray[Any, np.dtype[Any]]

MAX_BARS = 64  # keys up to which each has a bar with its token
MAX_POINTS = 1000  # of a longer text; each is the mean of its keys, and their largest


def received_by_key(
    received: Any, labels: Sequence[str] | None = None, axis: Any = None, *, title: str | None = None
) -> Any:
    """Draw what each key receives.

    Parameters
    ----------
    received : (m,) or (H, m) array; leading axes of length 1 are dropped
        As `received()` gives it. Of several heads the mean is drawn, and the range from the least to the most.
    labels : m tokens, optional
        Shown up to 64.
    axis : matplotlib axis, optional
        A new figure by default, reached as `axis.figure`.
    title : str, optional

    Returns
    -------
    matplotlib axis
        Bars up to 64 keys; beyond, a line. More than 1000 keys are pooled: the line is the mean of neighbours, and what
        is shaded reaches to the largest of them.

    Raises
    ------
    ShapeError
        No (m,) or (H, m), or other numbers of labels.
    MissingExtraError
        matplotlib is not installed.
    """
    values = np.asarray(to_numpy(received), np.float64)
    shape = values.shape
    while values.ndim > 2 and values.shape[0] == 1:
        values = values[0]
    values = np.atleast_2d(values)
    if values.ndim != 2 or 0 in values.shape or (labels is not None and len(labels) != values.shape[1]):
        label_text = "" if labels is None else f" with {len(labels)} labels"
        raise ShapeError(
            f"received of shape {shape}{label_text}", "(m,) or (H, m), a label for each key", "received[0]"
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
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    plotting.set_title(axis, title)
    plotting.hide_frame(axis)
    return axis


def _draw_bars(axis: Any, values: Array) -> None:
    mean = values.mean(0)
    axis.bar(range(mean.size), mean, width=0.8, color=plotting.BLUE)
    if len(values) > 1:
        ends = np.stack([mean - values.min(0), values.max(0) - mean])
        axis.errorbar(range(mean.size), mean, ends, fmt="none", ecolor="#444444", elinewidth=0.8)


def _draw_line(axis: Any, values: Array) -> None:
    m = values.shape[1]
    edges = np.arange(min(m, MAX_POINTS) + 1) * m // min(m, MAX_POINTS)
    places = (edges[:-1] + edges[1:] - 1) / 2
    mean = np.add.reduceat(values.mean(0), edges[:-1]) / np.diff(edges)
    maxima = np.maximum.reduceat(values.max(0), edges[:-1])
    axis.fill_between(places, mean, maxima, color=plotting.BLUE, alpha=0.22, linewidth=0)
    axis.plot(places, mean, color=plotting.BLUE, linewidth=1)
