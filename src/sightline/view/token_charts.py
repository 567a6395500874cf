"""Pictures along a text: arcs from each query to its keys, and the weight that each key receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.operations import Array
from ..errors import ShapeError
from . import plotting
from .palette import LIGHT

MAX_LABELS = 64  # largest number of tokens at which every token is labelled, and every key has a bar
MAX_POSITIONS = 256  # largest number of places along the line; several tokens of a longer text share a place
MAX_ARCS = 1500  # largest number of arcs that are drawn
ARC_SEGMENTS = 48  # number of points of the polyline that draws an arc
MAX_POINTS = 1000  # largest number of points of the line that is drawn for more than `MAX_LABELS` keys


def arcs(
    weights: Any,
    where: Any,
    labels: Sequence[str] | None = None,
    axis: Any = None,
    *,
    least: float = 0.02,
    title: str | None = None,
) -> Any:
    """Draw arcs along a line of tokens, from each query to its heaviest keys: earlier keys above, later keys below.

    Parameters
    ----------
    weights, where : (n, k) arrays; leading axes of length 1 are dropped
        The weights and the key positions, as `top_k(k)` returns them: `arcs(*top)`. Position −1 means that there is no
        key, and nothing is drawn for it.
    labels : sequence of str, optional
        The tokens. Up to 64 tokens are labelled.
    least : float, default 0.02
        Weights below this number are not drawn.
    axis, title : as in `heatmap`

    Returns
    -------
    matplotlib axis
        The opacity and the width of an arc grow with its weight. The weight of a query on its own position is drawn as
        a dot. Of more than 1500 arcs, the 1500 heaviest are drawn. In a text of more than 256 tokens, neighbouring
        tokens share one of 256 places along the line. An arc then stands for the sum of the weights from one place to
        another, divided by the largest sum. The weight within a place is drawn as a dot.

    Raises
    ------
    ShapeError
        The arrays are not (n, k), their shapes differ, or there are fewer labels than tokens.
    MissingExtraError
        matplotlib is not installed.
    """
    cure = "arcs(top.weights[0, head], top.where[0, head], tokens)"
    weights, where = (plotting.as_matrix(array, "(n, k), one head", cure) for array in (weights, where))
    n = max(len(weights), int(where.max(initial=-1)) + 1)
    if weights.shape != where.shape or (labels is not None and len(labels) < n):
        label_text = "" if labels is None else f" with {len(labels)} labels"
        given = f"weights {weights.shape} and where {where.shape}{label_text}"
        raise ShapeError(given, "both (n, k), and n labels", "arcs(*top)")
    starts, ends, sums = _merge_arcs(weights, where, n, least)
    axis = plotting.new_axis(axis, float(np.clip(0.3 * n + 1, 5, 11)), 3.8)
    _draw(axis, starts, ends, sums / max(sums.max(initial=0), 1e-9) if n > MAX_POSITIONS else sums)
    axis.axhline(0, color=LIGHT.cross, linewidth=0.8, zorder=1)
    axis.set_yticks([])
    if not _label_tokens(axis, labels, n, is_turned=True):
        axis.set_xlabel("token")
    back, ahead = (float(length.max(initial=0)) / 2 for length in (starts - ends, ends - starts))
    margin = 0.04 * max(back, ahead, 1)
    axis.set(xlim=(-0.8, n - 0.2), ylim=(-ahead - margin, back + margin))
    return plotting.finish(axis, title)


def _merge_arcs(weights: Array, where: Array, n: int, least: float) -> tuple[Array, Array, Array]:
    """Return the starts, the ends and the weights of the arcs, by ascending weight.

    Arcs of a text with more than `MAX_POSITIONS` tokens are merged if they join the same two places.
    """
    i, entry = np.nonzero((where >= 0) & (weights >= least))
    j, weight = where[i, entry], np.asarray(weights[i, entry], np.float64)
    starts, ends = i.astype(np.float64), j.astype(np.float64)
    if n > MAX_POSITIONS:
        cells, at = np.unique((i * MAX_POSITIONS // n) * MAX_POSITIONS + j * MAX_POSITIONS // n, return_inverse=True)
        weight = np.asarray(np.bincount(at, weight))
        starts, ends = ((cell + 0.5) * n / MAX_POSITIONS - 0.5 for cell in np.divmod(cells, MAX_POSITIONS))
    order = np.argsort(weight, kind="stable")[-MAX_ARCS:]
    return starts[order], ends[order], weight[order]


def _draw(axis: Any, starts: Array, ends: Array, shares: Array) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    angle = np.linspace(0, np.pi, ARC_SEGMENTS)
    middle, half = (starts + ends) / 2, (starts - ends) / 2  # half < 0 if the key is later; its arc is below
    lines = np.stack([middle[:, None] + half[:, None] * np.cos(angle), half[:, None] * np.sin(angle)], -1)
    dots = half == 0
    colours = np.array([to_rgba(LIGHT.blue if h > 0 else LIGHT.orange) for h in half]).reshape(-1, 4)
    colours[:, 3] = np.clip(0.08 + 0.92 * shares, 0, 1)
    drawn = LineCollection(list(lines[~dots]), colors=colours[~dots], linewidths=0.4 + 2.2 * shares[~dots], zorder=2)
    drawn.set_capstyle("round")
    axis.add_collection(drawn)
    axis.scatter(starts[dots], half[dots], s=4 + 40 * shares[dots], color=LIGHT.blue, linewidths=0, zorder=3)


def _label_tokens(axis: Any, labels: Sequence[str] | None, n: int, is_turned: bool) -> bool:
    """Label n tokens, turned if asked or long. Without labels, or for a long text, label positions and return False."""
    if labels is None or n > MAX_LABELS:
        plotting.set_position_ticks(axis, "x")
        return False
    shown = list(map(plotting.token_label, labels[:n]))
    is_turned = is_turned or max(map(len, shown)) * n > 90
    plotting.set_labels(axis, "x", shown, float(np.clip(420 / n, 6, 9)), is_turned)
    return True


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
        given = f"received of shape {np.shape(received)}{label_text}"
        raise ShapeError(given, "(m,) or (H, m), one label per key", "received[0]")
    m = values.shape[1]
    axis = plotting.new_axis(axis, float(np.clip(0.32 * m + 1.2, 4.5, 11)), 2.9)
    (_draw_bars if m <= MAX_LABELS else _draw_line)(axis, values)
    _label_tokens(axis, labels, m, is_turned=False)
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
