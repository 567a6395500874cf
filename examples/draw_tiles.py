"""Draw the pictures of docs/how-it-works.md: the tiles of six masks, bounds on three rectangles, and a register tile.

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
KEYS, VECTORS, LANES = 6, 4, 16  # a register tile with AVX-512 in float32


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
    colours = plotting.colour_map((LIGHT.hidden, LIGHT.weights[1]))
    axis.imshow(np.asarray(mask.array(N)), cmap=colours, interpolation="nearest")
    for (top, bottom, left, right), kind in RECTANGLES.items():
        size = right - left, bottom - top
        axis.add_patch(Rectangle((left, top), *size, fill=False, linewidth=2, edgecolor=COLOURS[kind]))
        low, high = top - (right - 1), bottom - 1 - left  # the smallest and the largest i − j of the rectangle
        text = f"{kind}:\n{low} ≤ i − j ≤ {high}".replace("-", "−")
        place, side = (left - 16, "right") if kind == "partial" else (right + 16, "left")
        box = {"facecolor": LIGHT.ground, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        axis.text(place, (top + bottom) / 2, text, va="center", ha=side, color=COLOURS[kind], fontsize=9, bbox=box)
    axis.set(xlabel="key j", ylabel="query i")
    plotting.set_title(axis, f"{mask}")
    plotting.hide_frame(axis)
    return figure


def register_tile_figure() -> Any:
    """Draw one step of the product Sᵀ = K Qᵀ: numbers of six keys, four vectors of queries, and their 24 sums."""
    from matplotlib.patches import Rectangle

    figure = plotting.new_figure(7.2, 3.6)
    axis = figure.add_subplot()
    keys, queries = LIGHT.orange, LIGHT.blue

    def draw_cell(x: float, y: float, width: float, colour: str, fill: str, lanes: int = 1) -> None:
        axis.add_patch(Rectangle((x, y), width, 0.7, facecolor=fill, edgecolor=colour, linewidth=1.2))
        for lane in range(1, lanes):
            axis.plot([x + lane * width / lanes] * 2, [y, y + 0.7], color=colour, linewidth=0.4)

    def draw_arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0})

    for vector in range(VECTORS):
        draw_cell(2.2 * vector, -1.6, 2, queries, LIGHT.weights[0], LANES)
        draw_arrow((2.2 * vector + 1, -0.8), (2.2 * vector + 1, -0.08), queries)
    for key in range(KEYS):
        draw_cell(-2.3, key, 0.9, keys, LIGHT.raised)
        axis.text(-1.85, key + 0.35, f"j + {key}" if key else "j", color=keys, ha="center", va="center", fontsize=9)
        draw_arrow((-1.3, key + 0.35), (-0.08, key + 0.35), keys)
        for vector in range(VECTORS):
            draw_cell(2.2 * vector, key, 2, LIGHT.cross, LIGHT.hidden, LANES)
    texts = [
        (0, -1.8, f"Qᵀ[d]: {VECTORS} vectors of {LANES} queries, loaded once", queries),
        (-2.5, 0, f"K[j][d]: one number\nof each of {KEYS} keys", keys),
        (-2.5, 2.5, f"each step of d:\n{VECTORS} loads of vectors,\n{KEYS} loads of numbers", LIGHT.ink),
        (0, KEYS, f"Sᵀ[j] += K[j][d] · Qᵀ[d]: {KEYS} × {VECTORS} sums, which stay in registers", LIGHT.ink),
    ]
    for x, y, text, colour in texts:
        place = {"ha": "right" if x < 0 else "left", "va": "bottom" if y < 0 else "top"}
        axis.text(x, y, text, color=colour, fontsize=9, **place)
    axis.set(xlim=(-6.4, 8.8), ylim=(KEYS + 0.5, -2.3))
    axis.axis("off")
    return figure


def main(folder: Path = FOLDER) -> list[Path]:
    """Draw the pictures to the folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"tiles": tiles_figure(), "bounds": bounds_figure(), "register_tile": register_tile_figure()}
    written = []
    for name, figure in pictures.items():
        written.append(plotting.save(figure, folder / f"{name}.png", dpi=DPI))
        plotting.save(figure, folder / f"{name}-dark.png", dpi=DPI, dark=True)
    Console(highlight=False).print(f"Wrote {len(written)} pictures to {folder}")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
