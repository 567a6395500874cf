"""Why scores are divided by √d_k: measure and draw what the division does to softmax.

python -m examples.scale_scores [--save scaling.png]

If the components of q and k are independent with mean 0 and variance 1, the dot product q · k has variance d_k (Vaswani
et al., 2017, footnote 4). Without the division, at large d_k, the key with the largest score receives nearly all the
weight and the gradient of softmax vanishes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from sightline.statistics.per_query import entropy_of
from sightline.view import plotting
from sightline.view.palette import LIGHT

Array = np.ndarray[Any, np.dtype[Any]]

WIDTHS = (1, 16, 64, 256, 512)
KEYS, QUERIES = 16, 512
PLAIN, SCALED = "q · k", "q · k / √d_k"


@dataclass(frozen=True)
class SoftmaxEffect:
    """Properties of the weights that softmax gives to `KEYS` keys, as means over the queries."""

    ranked: Array  # (KEYS,): the weights of each query in descending order
    keys: float  # exp(entropy), the number of keys over which the weight is spread, 1 to KEYS
    gradient: float  # Frobenius norm of d weights / d scores = diag(p) − p pᵀ, in 1/logit


@dataclass(frozen=True)
class ScalingEffect:
    """The softmax of random scores with and without division by √d_k, at one width d_k.

    d_k : number of components of a query and a key
    plain, scaled : the effect of softmax on the scores q · k, and on the scores q · k / √d_k
    """

    d_k: int
    plain: SoftmaxEffect
    scaled: SoftmaxEffect


def effect_of_scaling(widths: Sequence[int] = WIDTHS, seed: int = 0) -> list[ScalingEffect]:
    """Measure the softmax of random scores of 512 queries on 16 keys each, with and without division by √d_k."""
    rng = np.random.default_rng(seed)
    effects = []
    for d_k in widths:
        query, key = rng.standard_normal((QUERIES, 1, d_k)), rng.standard_normal((QUERIES, KEYS, d_k))
        scores = (query * key).sum(-1)
        effects.append(ScalingEffect(d_k, _effect(scores), _effect(scores / np.sqrt(d_k))))
    return effects


def _effect(scores: Array) -> SoftmaxEffect:
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    square = (p**2).sum(-1)
    gradient = np.sqrt(np.maximum(square - 2 * (p**3).sum(-1) + square**2, 0))
    return SoftmaxEffect(np.sort(p)[:, ::-1].mean(0), float(np.exp(entropy_of(p)).mean()), float(gradient.mean()))


def scaling_figure(effects: Sequence[ScalingEffect]) -> Any:
    """Draw the effect of the division by √d_k on softmax.

    The upper panels show the weights at each width. The lower left panel shows for each width over how many keys the
    weight is spread. The lower right panel shows the size of softmax's gradient.
    """
    figure = plotting.new_figure(9.6, 5.6)
    grid = figure.add_gridspec(2, 2 * len(effects), height_ratios=(1, 1.25))
    figure.get_layout_engine().set(hspace=0.08)
    first: Any = None
    for place, effect in enumerate(effects):
        axis = figure.add_subplot(grid[0, 2 * place : 2 * place + 2], sharey=first)
        first = first or axis
        _weights_panel(axis, effect, is_labelled=place == len(effects) - 1)
        axis.tick_params(labelleft=axis is first)
    first.set_ylabel("mean weight", fontsize=9)
    spread = figure.add_subplot(grid[1, : len(effects)])
    _line_panel(spread, effects, "keys", f"keys the weight is spread over, of {KEYS}: exp(entropy)")
    spread.set_ylim(0, KEYS * 0.8)
    gradient = figure.add_subplot(grid[1, len(effects) :])
    _line_panel(gradient, effects, "gradient", "size of softmax's gradient, ‖diag(p) − p pᵀ‖")
    gradient.set_ylim(0, None)
    figure.suptitle("Scores divided by √d_k keep softmax soft, and its gradient alive, at any width", fontsize=11)
    return figure


def _weights_panel(axis: Any, effect: ScalingEffect, is_labelled: bool) -> None:
    ranks = np.arange(1, KEYS + 1)
    axis.bar(ranks, effect.plain.ranked, width=0.86, color=LIGHT.orange, alpha=0.45)
    axis.step(
        np.append(ranks, KEYS + 1) - 0.5,
        np.append(effect.scaled.ranked, effect.scaled.ranked[-1]),
        where="post",
        color=LIGHT.blue,
    )
    axis.set_title(f"d_k = {effect.d_k}", fontsize=9)
    axis.set_xticks([1, KEYS])
    axis.set_xlabel("keys, most attended first", fontsize=7.5)
    axis.tick_params(labelsize=8)
    if is_labelled:
        axis.text(3.2, effect.plain.ranked[0] * 0.8, PLAIN, color=LIGHT.orange, fontsize=9)
        axis.text(3.2, effect.scaled.ranked[0] * 0.9, SCALED, color=LIGHT.blue, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)


def _line_panel(axis: Any, effects: Sequence[ScalingEffect], field: str, title: str) -> None:
    widths = [effect.d_k for effect in effects]
    for name, colour, side, at in (
        (PLAIN, LIGHT.orange, "plain", len(widths) // 2),
        (SCALED, LIGHT.blue, "scaled", -1),
    ):
        values = [getattr(getattr(effect, side), field) for effect in effects]
        axis.plot(widths, values, "o-", color=colour, markersize=4.5)
        place = {"xytext": (-6, -15), "textcoords": "offset points", "ha": "right"}
        axis.annotate(name, (widths[at], values[at]), color=colour, fontsize=9, **place)
    axis.set_xscale("log", base=2)
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.minorticks_off()
    axis.set_xlabel("d_k", fontsize=9)
    axis.set_title(title, loc="left", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color=LIGHT.line, linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)


def main(save: str | None = None, widths: Sequence[int] = WIDTHS) -> list[ScalingEffect]:
    """Print over how many keys the weight is spread at each width; draw the figure to the file `save`."""
    effects = effect_of_scaling(widths)
    for effect in effects:
        spread = f"{effect.plain.keys:.1f} of {KEYS} keys; divided by √d_k {effect.scaled.keys:.1f}"
        Console().print(f"d_k = {effect.d_k}: weight spread over {spread}")
    if save is not None:
        scaling_figure(effects).savefig(save)
    return effects


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="PATH", help="draw the figure to a file")
    main(parser.parse_args().save)
