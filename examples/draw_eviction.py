"""Draw what eviction costs in quality, from the table of docs/decoding.md, whose figures evict_prompts.py measures."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from sightline.view import plotting
from sightline.view.palette import LIGHT, SERIES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "eviction"
FIRST_TITLE = "keys"  # of the table
STYLES = {  # colour, marker and line of each policy; a policy of kvpress has no line
    "SnapKV": (SERIES[0], "o", "-"),
    "H2O": (SERIES[1], "s", "-"),
    "TOVA": (SERIES[2], "D", "-"),
    "first keys and a window": (SERIES[3], "^", "-"),
    "kvpress.SnapKVPress": (SERIES[0], "o", ""),
    "kvpress.ObservedAttentionPress": (SERIES[7], "x", ""),
}


def read_rows(page: Path) -> list[dict[str, str]]:
    """Return the rows of the table whose first column has the title FIRST_TITLE, each as a dict by column title."""
    text = page.read_text(encoding="utf-8")
    lines = [line.strip("| \n").split(" | ") if line[:1] == "|" else [] for line in text.splitlines()]
    start = next(k for k, cells in enumerate(lines) if cells[:1] == [FIRST_TITLE])
    found = []
    for cells in lines[start + 2 :]:
        if len(cells) != len(lines[start]):
            break
        found.append(dict(zip(lines[start], cells, strict=True)))
    return found


def quality_figure(rows: list[dict[str, str]]) -> Any:
    """Draw the perplexity, and the share of repeated numbers, of each policy by the share of keys that stay."""
    figure = plotting.new_figure(9.2, 3.9)
    left, right = figure.subplots(1, 2)
    points: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for row in rows:
        recall = row["recall by depth"]
        share = float(row["share"].rstrip("%")) / 100
        points[row["keys"]].append((share, float(row["perplexity"]), recall.count("●") / len(recall)))
    ((_, every, found),) = points.pop("all keys")
    for axis, column, reference in ((left, 1, every), (right, 2, found)):
        axis.axhline(reference, color=LIGHT.muted, linewidth=1.1, linestyle=":")
        axis.text(1.0, reference, "all keys", color=LIGHT.muted, fontsize=8, ha="right", va="bottom")
        for name, values in points.items():
            colour, marker, line = STYLES[name]
            face = colour if line else "none"
            shares, heights = [v[0] for v in values], [v[column] for v in values]
            label = name.replace("kvpress.", "kvpress: ").replace("Press", "")
            axis.plot(
                shares, heights, marker=marker, linestyle=line or "none", color=colour, label=label,
                markerfacecolor=face, markersize=6 if line else 10, linewidth=1.6,
            )  # fmt: skip
        axis.set(xscale="log", xlabel="share of the keys that stay")
        axis.set_xticks([0.1, 0.25, 0.5, 1], ["10 %", "25 %", "50 %", "100 %"])
        axis.minorticks_off()
        axis.grid(axis="y")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    left.set_title("perplexity of the next 512 tokens; lower is better", loc="left", fontsize=9)
    right.set_title("share of five numbers that the model repeats", loc="left", fontsize=9)
    right.set_ylim(-0.05, 1.12)
    right.yaxis.set_major_formatter("{x:.0%}")
    left.legend(frameon=False, fontsize=8)
    return figure


def main(folder: Path = FOLDER) -> list[Path]:
    """Write eviction.png and eviction-dark.png into a folder, and return the path of the first one in a list."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = quality_figure(read_rows(ROOT / "docs" / "decoding.md"))
    plotting.save(figure, folder / "eviction-dark.png", dark=True)
    return [plotting.save(figure, folder / "eviction.png")]


if __name__ == "__main__":
    main()
