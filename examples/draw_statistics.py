"""Draw the pictures of docs/looking-inside.md: one per statistic, from activations of a trained encoder.

    python examples/draw_statistics.py [--folder docs/looking-inside]

The activations are shipped with the library: layer 3 of all-MiniLM-L6-v2, on a paragraph of 135 tokens and on two
sentences.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import sightline
import sightline.data
from sightline import i, j
from sightline.view import arcs, heatmap, plotting, received_by_key, tile_map

FOLDER = Path(__file__).parents[1] / "docs" / "looking-inside"
LAYER, LOCAL_HEAD, SHARP_HEAD = 3, 8, 1  # a head that attends to near tokens, and a head of low entropy
DPI = 100


def see_layer(name: str, see: list[Any], **options: Any) -> tuple[Any, ...]:
    """Return the statistics of layer `LAYER` on a shipped text."""
    layer = sightline.data.load(name).layers[LAYER]
    _, seen = sightline.attention(layer.query, layer.key, layer.value, see=see, **options)
    return seen


def by_query(values: Any, label: str) -> Any:
    """Draw an array (H, n) as a map with a row per head and a column per query."""
    figure = plotting.new_figure(8, 2.2)
    axis = figure.add_subplot()
    image = axis.imshow(values, cmap=plotting.colour_map(), aspect="auto", interpolation="nearest")
    plotting.add_colour_bar(axis, image, label)
    axis.set(xlabel="query", ylabel="head")
    plotting.hide_frame(axis)
    return figure


def query_figures() -> dict[str, Any]:
    """Draw the statistics that have a number per query, on the paragraph."""
    positions = np.arange(135, dtype=np.float32)[:, None]
    statistics = [sightline.lse(), sightline.max_score(), sightline.entropy(), sightline.mass(abs(i - j) <= 2)]
    lse, largest, entropy, near, mean = see_layer("minilm_moby", [*statistics, sightline.weighted_sum(positions)])
    return {
        "lse": by_query(lse[0], "nats"),
        "max_score": by_query(largest.score[0], "nats"),
        "entropy": by_query(entropy[0], "nats"),
        "mass": by_query(near[0], "within 2 tokens"),
        "weighted_sum": by_query(mean[0, :, :, 0], "mean position"),
    }


def sentence_figures() -> dict[str, Any]:
    """Draw statistics of the longer sentence with its tokens, and the scores of the shorter, which has padding."""
    cat = sightline.data.load("minilm_cat")
    mask, tokens = sightline.padding(cat.lengths), cat.tokens
    statistics = [sightline.top_k(3), sightline.received(), sightline.weights(), sightline.scores()]
    top, received, weights, scores = see_layer("minilm_cat", statistics, mask=mask)
    return {
        "top_k": arcs(top.weights[1, SHARP_HEAD], top.where[1, SHARP_HEAD], tokens[1]).figure,
        "received": received_by_key(received[1], tokens[1]).figure,
        "weights": heatmap(weights[1, SHARP_HEAD], tokens[1]).figure,
        "scores": scores_map(scores[0, SHARP_HEAD], tokens[0]),
    }


def scores_map(scores: Any, tokens: Any) -> Any:
    """Draw a map of one head's scores; hidden pairs, whose scores are −∞, are grey."""
    figure = plotting.new_figure(6, 5)
    axis = figure.add_subplot()
    colours = plotting.colour_map()
    image = axis.imshow(np.ma.masked_invalid(scores), cmap=colours, interpolation="nearest")
    plotting.add_colour_bar(axis, image, "score, nats")
    axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=8)
    axis.set_yticks(range(len(tokens)), tokens, fontsize=8)
    axis.set(xlabel="key", ylabel="query")
    plotting.hide_frame(axis)
    return figure


def grid_figures() -> dict[str, Any]:
    """Draw pooled weights, and the tiles of a mask."""
    (pooled,) = see_layer("minilm_moby", [sightline.pooled(27, 27)])
    return {
        "pooled": heatmap(pooled[0, LOCAL_HEAD], shape=(135, 135)).figure,
        "tiles": tile_map(sightline.causal() & sightline.window(300), 1024).figure,
    }


def main(folder: Path = FOLDER) -> list[Path]:
    """Draw all pictures to the folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (query_figures() | sentence_figures() | grid_figures()).items():
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=DPI)
    size = sum(path.stat().st_size for path in written)
    Console(highlight=False).print(f"Wrote {len(written)} pictures, {size / 1000:.0f} kB, to {folder}")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
