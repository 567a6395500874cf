"""The look of the figures of the course: sizes, colours and fonts, and the drawing of matrices with their numbers.

Every figure has the same width, so letters have the same size everywhere. The colours are those of
`sightline.view.palette`. The site shows each figure in the colours of its theme, and a notebook in light colours.
"""

from __future__ import annotations

import base64
import html
import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sightline.view import plotting
from sightline.view.palette import LIGHT, SERIES, SIGNED
from sightline.view.styled_figure import STYLE, dark_colours

BLUE, ORANGE, GREEN, PURPLE = SERIES[:4]
INK, GREY = LIGHT.ink, LIGHT.muted
WIDTH, DPI = 7.5, 160  # inches, and dots per inch

SETTINGS = STYLE | {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": matplotlib.cycler(color=[BLUE, ORANGE, GREEN, PURPLE]),
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}


class Picture:
    """A finished figure, which notebooks and pages show with its description for readers who do not see it."""

    def __init__(self, light: bytes, dark: bytes, description: str) -> None:
        self.light, self.dark, self.description = light, dark, description

    def _repr_html_(self) -> str:
        alt, look = (
            html.escape(self.description, quote=True),
            "width:100%;max-width:750px;height:auto;border-radius:6px",
        )
        images = []
        for theme, png, shown in (("light", self.light, "block"), ("dark", self.dark, "none")):
            source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
            images.append(f'<img class="only-{theme}" src="{source}" alt="{alt}" style="display:{shown};{look}">')
        return "".join(images)

    def __repr__(self) -> str:
        return f"Picture: {self.description}"


def use() -> None:
    """Set matplotlib's defaults for the figures that follow."""
    matplotlib.rcParams.update(SETTINGS)


def new_figure(rows: int = 1, columns: int = 1, height: float = 3.0, **options: Any) -> tuple[Figure, Any]:
    """Return a figure of the common width and its axes; the height is in inches. `subplots` takes the options."""
    figure = _empty_figure(height)
    return figure, figure.subplots(rows, columns, **options)


def new_mosaic(layout: str, height: float, **options: Any) -> tuple[Figure, dict[str, Any]]:
    """Return a figure and its axes by letter. Each row of the layout, such as "AAB;CCC", is a row of the figure."""
    figure = _empty_figure(height)
    return figure, figure.subplot_mosaic(layout, **options)


def _empty_figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=LIGHT.ground)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.04)
    return figure


def show(figure: Figure, description: str) -> Picture:
    """Draw the figure. The description says in words what the figure shows."""
    light, dark = io.BytesIO(), io.BytesIO()
    figure.savefig(light, format="png", dpi=DPI)
    with dark_colours(figure):
        figure.savefig(dark, format="png", dpi=DPI)
    return Picture(light.getvalue(), dark.getvalue(), description)


def draw_arrow(axis: Any, point: Any, label: str, colour: Any) -> None:
    """Draw an arrow from the origin to a point of the plane, with a label at its end."""
    look = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", point, (0, 0), arrowprops=look)
    axis.text(1.16 * point[0], 1.16 * point[1], label, color=INK, ha="center", va="center", fontsize=9.5)


def set_plane(axis: Any, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Show a part of the plane without frame and ticks."""
    axis.set(xlim=x, ylim=y, aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def set_powers_of_two(axis: Any, ticks: Any) -> None:
    """Make the x axis logarithmic, with these numbers as ticks."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.tick_params(axis="x", which="minor", bottom=False)


def draw_matrix(
    axis: Any,
    values: Any,
    title: str,
    *,
    rows: Any = None,
    columns: Any = None,
    numbers: str | None = "{:.2f}",
    signed: bool = False,
    largest: float | None = None,
) -> Any:
    """Draw a matrix as coloured cells, and return the image.

    Parameters
    ----------
    axis : matplotlib axis
    values : (rows, columns)
        Cells with NaN, ±∞ or, if the matrix is not signed, 0 are grey.
    title : str
    rows, columns : sequences of labels, optional
    numbers : format of the number in each cell, or None for no numbers
    signed : bool
        True: colours show sign and size, for scores, queries, keys and values. False: colours show weights.
    largest : float, optional
        The weight with the brightest colour, so that several matrices can share their colours. Default: the largest
        weight of the matrix.
    """
    values = np.asarray(values, float)
    if signed:
        shown = np.ma.masked_invalid(values)
        limit = max(float(np.abs(shown).max()), 1e-30) if shown.count() else 1.0
        colours = plotting.colour_map(SIGNED)
        image = axis.imshow(shown, cmap=colours, vmin=-1.3 * limit, vmax=1.3 * limit, aspect="auto")
    else:
        height, width = values.shape
        image = plotting.draw_weights(axis, values, (-0.5, width - 0.5, height - 0.5, -0.5), "auto")
        if largest is not None:
            image.set_clim(0, largest)
    axis.set_title(title)
    plotting.hide_frame(axis)
    for labels, ticks in ((columns, axis.set_xticks), (rows, axis.set_yticks)):
        if labels is None:
            ticks([])
        else:
            ticks(range(len(labels)), labels)
    if numbers is not None:
        _write_numbers(axis, image, values, numbers, signed)
    return image


def mark_crossing(axis: Any, x: float, y: float, label: str) -> None:
    """Draw a ring around a point, and a label to the lower right of the point."""
    axis.plot([x], [y], "o", markerfacecolor="none", markeredgecolor=INK, markersize=11)
    line = {"arrowstyle": "-", "color": INK, "lw": 0.8, "shrinkB": 6}
    axis.annotate(label, (x, y), (14, -24), textcoords="offset points", arrowprops=line)


def frame_row(axis: Any, row: int, width: int) -> None:
    """Draw a frame around a row of a matrix with this number of columns."""
    axis.add_patch(Rectangle((-0.5, row - 0.5), width, 1, fill=False, edgecolor=ORANGE, linewidth=1.6))


def _write_numbers(axis: Any, image: Any, values: Any, form: str, signed: bool) -> None:
    for (row, column), value in np.ndenumerate(values):
        text = form.format(value)
        text = (
            text.removeprefix("-")
            if float(text) == 0
            else text.replace("-", "−").replace("inf", "∞").replace("nan", "NaN")
        )
        grey = not np.isfinite(value) or (value == 0 and not signed)
        if grey:
            axis.text(column, row, text, ha="center", va="center", fontsize=7.5, color=INK)
        else:
            plotting.write_number(axis, image, (row, column), value, text)
