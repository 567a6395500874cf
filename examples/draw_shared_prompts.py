"""Draw the picture of docs/decoding.md: what a fork and what copies store, and a tree of drafts with its mask.

    python examples/draw_shared_prompts.py [--folder docs/shared-prompts]

The caches are real: the bytes are those of `KVCache.nbytes`, the positions those of `KVCache.positions`, and the mask
shows where the weights of attention on the drafts are above 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import sightline
from sightline.view import plotting
from sightline.view.palette import LIGHT, SIGNED

FOLDER = Path(__file__).parents[1] / "docs" / "shared-prompts"
DPI = 120
PROMPT, OWN, BRANCHES = 256, 64, 8  # tokens of the prompt, tokens of a branch, branches
STORED, DRAFTS = ["The", "sea", "is"], ["calm", "and", "today", "blue", "deep"]
PARENTS, ACCEPTED = [-1, 0, 0, 1, -1], [0, 1]
WIDTH, HEIGHT = 0.84, 0.42  # of the box of a token, in positions and in rows of the tree
PALE, LINE = SIGNED[2], LIGHT.cross  # drafts that are dropped; lines between boxes


def projected(sequences: int, heads: int, length: int) -> Any:
    """Return a random array (sequences, heads, length, 64) in place of what a layer's projection makes."""
    return np.random.default_rng(0).normal(size=(sequences, heads, length, 64)).astype(np.float32)


def append(cache: sightline.KVCache, sequences: int, length: int, **options: Any) -> None:
    cache.append(projected(sequences, 2, length), projected(sequences, 2, length), **options)


def stored_bytes(shares: bool) -> int:
    """Return the bytes of a cache of a prompt with eight continuations: a fork if `shares` is true, else copies."""
    cache = sightline.KVCache(capacity=PROMPT if shares else PROMPT + OWN)
    append(cache, 1, PROMPT)
    if shares:
        cache.fork(BRANCHES)
    else:
        cache.reorder([0] * BRANCHES)
    append(cache, BRANCHES, OWN)
    return cache.nbytes


def tree_and_mask() -> tuple[Any, Any]:
    """Return the positions of the drafts, and which keys each of them sees."""
    cache = sightline.KVCache()
    append(cache, 1, len(STORED))
    append(cache, 1, len(DRAFTS), parents=PARENTS)
    query = projected(1, 2, len(DRAFTS))
    _, (weights,) = sightline.attention(query, cache, mask=sightline.causal(), see=[sightline.weights()])
    return cache.positions()[0], weights[0, 0] > 0


def draw_rows(axis: Any, shares: bool) -> None:
    """Draw what is stored as bars: tokens of the prompt in blue, those of each branch in orange."""
    gap = 56 if shares else 4  # between the prompt and what follows
    places = [(BRANCHES - 1) / 2] if shares else list(range(BRANCHES))
    axis.barh(places, PROMPT, height=0.7, color=LIGHT.blue)
    axis.barh(range(BRANCHES), OWN, left=PROMPT + gap, height=0.7, color=LIGHT.orange)
    if shares:
        for branch in range(BRANCHES):
            connect(axis, (PROMPT + 3, places[0]), (PROMPT + gap - 3, branch))
    style = {"color": "white", "fontsize": 9, "ha": "center", "va": "center_baseline"}
    axis.text(PROMPT / 2, places[0], "prompt, stored once" if shares else "prompt", **style)
    axis.text(PROMPT + gap + OWN / 2, 0, "own", **style)
    axis.set(xlim=(-4, PROMPT + 56 + OWN + 4), ylim=(BRANCHES - 0.4, -0.6))
    size = f"{stored_bytes(shares) / 2**20:.2f} MiB"
    plotting.set_title(axis, f"cache.fork({BRANCHES}): {size}" if shares else f"{BRANCHES} copies: {size}")


def connect(axis: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw a curve that is horizontal at both ends."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    middle = (start[0] + end[0]) / 2
    points = [start, (middle, start[1]), (middle, end[1]), end]
    axis.add_patch(PathPatch(Curve(points, [Curve.MOVETO, *[Curve.CURVE4] * 3]), fill=False, edgecolor=LINE))


def draw_tree(axis: Any, positions: Any) -> None:
    """Draw the stored tokens in a row, and each draft behind its parent, at its position."""
    leaves = [draft for draft in (3, 1, 0, 2, 4) if draft not in PARENTS]
    heights = {draft: float(place) for place, draft in enumerate(leaves)}
    for draft in sorted(set(range(len(DRAFTS))) - set(leaves), reverse=True):  # a parent is beside its first child
        heights[draft] = heights[PARENTS.index(draft)]
    root = (len(STORED) - 1, heights[0])
    places = [(positions[draft], heights[draft]) for draft in range(len(DRAFTS))]
    for draft, parent in enumerate(PARENTS):
        start = root if parent < 0 else places[parent]
        connect(axis, (start[0] + WIDTH / 2, start[1]), (places[draft][0] - WIDTH / 2, places[draft][1]))
    for place, word in enumerate(STORED):
        write(axis, word, (place, root[1]), LIGHT.blue, "white")
    for draft, word in enumerate(DRAFTS):
        colours = (LIGHT.orange, "white") if draft in ACCEPTED else (PALE, "black")
        write(axis, f"{draft} {word}", places[draft], *colours)
    axis.set(xlim=(-0.6, max(positions) + 0.6), ylim=(len(leaves) - 0.4, -0.6), xlabel="position")
    axis.set_xticks(range(max(positions) + 1))
    plotting.set_title(axis, f"parents={PARENTS}, then accept({ACCEPTED})")


def write(axis: Any, text: str, place: tuple[float, float], colour: str, text_colour: str) -> None:
    """Draw a box with a text."""
    from matplotlib.patches import FancyBboxPatch

    corner, size = (place[0] - WIDTH / 2, place[1] - HEIGHT / 2), (WIDTH, HEIGHT)
    style = "round,pad=0,rounding_size=0.08"
    axis.add_patch(
        FancyBboxPatch(corner, *size, boxstyle=style, facecolor=colour, edgecolor="none", mutation_aspect=0.8)
    )
    axis.text(*place, text, color=text_colour, fontsize=9, ha="center", va="center_baseline")


def draw_mask(axis: Any, seen: Any) -> None:
    """Draw which keys each draft sees: stored tokens in blue, drafts in orange."""
    kinds = np.where(seen, np.where(np.arange(seen.shape[1]) < len(STORED), 1, 2), 0)
    colours = plotting.colour_map((LIGHT.hidden, LIGHT.blue, LIGHT.orange))
    axis.pcolormesh(kinds, cmap=colours, vmin=0, vmax=2, edgecolors=LIGHT.ground, linewidth=2)
    axis.set(ylim=(len(DRAFTS), 0), aspect="equal", anchor="NW")
    axis.set_xticks(np.arange(seen.shape[1]) + 0.5, [*STORED, *DRAFTS], fontsize=9)
    axis.set_yticks(np.arange(len(DRAFTS)) + 0.5, DRAFTS, fontsize=9)
    plotting.set_title(axis, "the keys that each draft sees")


def shared_figure() -> Any:
    """Draw copies beside a fork, and below them a tree of drafts beside its mask."""
    figure = plotting.new_figure(10, 6.6)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.18, wspace=0.05, hspace=0.1)
    axes = figure.subplots(2, 2)
    for axis, shares in zip(axes[0], (False, True), strict=True):
        draw_rows(axis, shares)
        axis.set(xticks=[], yticks=[])
    positions, seen = tree_and_mask()
    draw_tree(axes[1, 0], positions)
    axes[1, 0].set_yticks([])
    draw_mask(axes[1, 1], seen)
    for axis in axes.flat:
        plotting.hide_frame(axis)
    return figure


def main(folder: Path = FOLDER) -> list[Path]:
    """Draw the picture to the folder and return its path in a list."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fork-and-tree.png"
    figure = shared_figure()
    plotting.save(figure, path, dpi=DPI)
    plotting.save(figure, folder / "fork-and-tree-dark.png", dpi=DPI, dark=True)
    Console(highlight=False).print(f"Wrote {path}")
    return [path]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
