"""Draw the picture of docs/distributed.md: the predicted efficiency of attention on 1 to 1,024 ranks.

python -m examples.draw_scaling [--folder docs/distributed]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import sightline
from benchmarks.cost_model import predict_problem
from sightline.call.problem import make_problem
from sightline.view import plotting
from sightline.view.palette import LIGHT, SERIES

FOLDER = Path(__file__).parents[1] / "docs" / "distributed"
DPI = 100
RANKS = (1, 4, 16, 64, 256, 1024)
PER_RANK, WHOLE = 8192, 1 << 20  # positions of a rank where the sequence grows, and of the sequence that does not
HEADS, KEY_HEADS, WIDTH = 32, 8, 128
DOCUMENT = 4_000  # the mean length of a packed document
COLOURS = {
    "causal": LIGHT.muted,
    "causal, zigzag": LIGHT.blue,
    "window of 4,096": LIGHT.orange,
    "packed documents": SERIES[2],
}


def masks(n: int) -> dict[str, tuple[Any, str]]:
    """Return (mask, layout) of each line of the picture, by its name."""
    rng = np.random.default_rng(0)
    lengths = rng.multinomial(n, rng.dirichlet(np.full(max(n // DOCUMENT, 1), 2.0)))
    return {
        "causal": (sightline.causal(), "contiguous"),
        "causal, zigzag": (sightline.causal(), "zigzag"),
        "window of 4,096": (sightline.causal() & sightline.window(4096), "contiguous"),
        "packed documents": (sightline.causal() & sightline.documents(lengths=lengths), "contiguous"),
    }


def efficiency(n: int, ranks: int) -> dict[str, float]:
    """Return the predicted share of the ideal speed, of forward and backward pass on `ranks` ranks, by mask."""
    query, key = (np.broadcast_to(np.float16(0), (1, heads, n, WIDTH)) for heads in (HEADS, KEY_HEADS))
    found = {}
    for name, (mask, layout) in masks(n).items():
        problem = make_problem(query, key, key, mask=mask)
        found[name] = predict_problem(problem, ranks, layout).efficiency  # type: ignore[arg-type]
    return found


def scaling_figure(ranks: tuple[int, ...] = RANKS, per_rank: int = PER_RANK, whole: int = WHOLE) -> Any:
    """Draw weak scaling at the left and strong scaling at the right."""
    figure = plotting.new_figure(9.5, 4.1)
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, title, lengths in (
        (left, f"the sequence grows: {per_rank:,} positions per rank", [per_rank * count for count in ranks]),
        (right, f"the sequence stays: {whole:,} positions", [whole] * len(ranks)),
    ):
        points = [efficiency(n, count) for n, count in zip(lengths, ranks, strict=True)]
        for name, colour in COLOURS.items():
            axis.plot(ranks, [point[name] for point in points], marker="o", markersize=4, color=colour, label=name)
        plotting.set_title(axis, title)
        plotting.hide_upper_spines(axis)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [f"{count:,}" for count in ranks])
        axis.minorticks_off()
        axis.set(xlabel="ranks", ylim=(0, 1.03))
        axis.grid(axis="y", color=LIGHT.line, linewidth=0.8)
        axis.tick_params(labelsize=8, length=0)
    left.set_ylabel("share of the ideal speed")
    left.yaxis.set_major_formatter("{x:.0%}")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def main(folder: Path = FOLDER, **sizes: Any) -> list[Path]:
    """Draw the picture to the folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "scaling.png"
    scaling_figure(**sizes).savefig(path, dpi=DPI)
    Console(highlight=False).print(f"Wrote {path}")
    return [path]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
