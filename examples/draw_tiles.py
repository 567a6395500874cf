"""Draw the pictures of docs/how-it-works.md: the tiles of six masks, and bounds on three rectangles.

python examples/draw_tiles.py [--folder docs/how-it-works]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import sightline
from sightline import i, j
from sightline.view import plotting, tile_map
from sightline.view.palette import LIGHT

FOLDER = Path(__file__).parents[1] / "docs" / "how-it-works"
DPI = 100
N, WINDOW = 1024, 300
RECTANGLES = {(640, 704, 512, 576): "full", (704, 768, 384, 448): "partial", (128, 192, 448, 512): "empty"}
COLOURS = {"empty": LIGHT.muted, "partial": LIGHT.weights[4], "full": LIGHT.weights[6]}


def masks() -> dict[str, Any]:
    """Return the masks to draw, by their titles."""
    return {
        "causal": sightline.causal(),
        f"a causal window of {WINDOW}": sightline.causal() & sightline.window(WINDOW),
        "documents of 400, 100, 350 and 174": sightline.documents(lengths=[400, 100, 350, 174]),
        "prefix of 200, then causal": sightline.causal() | sightline.prefix(200),
        "local, and every 256th key": (abs(i - j) < 64) | (j % 256 == 0),
        "(i · j) % 7 = 0, which bounds cannot decide": (i * j) % 7 == 0,
    }


def tiles_figure() -> Any:
    """Draw the tiles of every mask."""
    figure = plotting.new_figure(9, 9.6)
    axes = figure.subplots(3, 2)
    for axis, (title, mask) in zip(axes.flat, masks().items(), strict=True):
        tile_map(mask, N, axis=axis, title=title)
    return figure


def bounds_figure() -> Any:
    """Draw the pairs that a window allows, and three tiles with the interval of i − j on each."""
    from matplotlib.patches import Rectangle

    figure = plotting.new_figure(6.5, 5)
    axis = figure.add_subplot()
    mask = (i >= j) & (i - j < WINDOW)
    axis.imshow(np.asarray(mask.array(N)), cmap="Blues", vmin=0, vmax=3, interpolation="nearest")
    for (top, bottom, left, right), kind in RECTANGLES.items():
        size = right - left, bottom - top
        axis.add_patch(Rectangle((left, top), *size, fill=False, linewidth=2, edgecolor=COLOURS[kind]))
        low, high = top - (right - 1), bottom - 1 - left  # the smallest and the largest i − j of the rectangle
        text = f"{kind}:\n{low} ≤ i − j ≤ {high}".replace("-", "−")
        place, side = (left - 16, "right") if kind == "partial" else (right + 16, "left")
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        axis.text(place, (top + bottom) / 2, text, va="center", ha=side, color=COLOURS[kind], fontsize=9, bbox=box)
    axis.set(xlabel="key j", ylabel="query i")
    plotting.set_title(axis, f"{mask}")
    plotting.hide_frame(axis)
    return figure


def main(folder: Path = FOLDER) -> list[Path]:
    """Draw both pictures to the folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in {"tiles": tiles_figure(), "bounds": bounds_figure()}.items():
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=DPI)
    Console(highlight=False).print(f"Wrote {len(written)} pictures to {folder}")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
