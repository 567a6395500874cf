"""Pictures of formulas at any length: a mask's allowed pairs, or what a score adds.

A picture has as many cells as it has room for, each standing for a rectangle of (i, j). Bounds tell which cells are
empty and which are full, at any length; the others are sampled. Memory is that of the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import namespace
from ..errors import ParameterError
from ..formula.bounds import compute_intervals
from ..formula.expression import Expression
from ..formula.render_array import evaluate
from ..formula.tile_ranges import make_box
from ..formula.validate import check_formulas
from . import plotting, terminal

__all__ = ["Picture", "formula_picture", "validate_extent"]

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLES_PER_SIDE = 8  # points looked at in a cell, each way
FILE_CELLS = 256  # cells each way in files; terminals have TERMINAL_CELLS, or twice that with colours
TERMINAL_CELLS = 32
MAX_COUNTED_PAIRS = 1 << 20  # pairs up to which those a mask allows are counted


@dataclass(frozen=True, repr=False, eq=False)
class Picture:
    """A picture of n queries on m keys that prints itself, shows itself in notebooks, and saves itself.

    Parameters
    ----------
    title : str
    n, m : int
    kind : {"mask", "numbers"}
        Shares of allowed pairs, or values; hidden cells are NaN.
    cells : function
        (rows, columns) → values of at most so many cells, float64. Cells are a power of two positions wide and high.
    """

    title: str
    n: int
    m: int
    kind: str
    cells: Callable[[int, int], Array]

    def text(self, colour: bool | None = None) -> str:
        """The drawing as lines of at most 80 characters.

        Parameters
        ----------
        colour : bool, optional
            24-bit colours, or shades of blocks; by default whichever standard output can show.
        """
        colour = terminal.has_true_colour() if colour is None else colour
        if 0 in (self.n, self.m):
            return f"{self.title}   {self.n:,} queries × {self.m:,} keys"
        max_cells = 2 * TERMINAL_CELLS if colour and max(self.n, self.m) > TERMINAL_CELLS else TERMINAL_CELLS
        values = self.cells(min(self.n, max_cells), min(self.m, max_cells))
        shown, low, high = self._normalise(values)
        width = values.shape[1] * (2 if max_cells == TERMINAL_CELLS else 1)
        lines = terminal.frame_lines(terminal.draw_blocks(shown, colour), width, (0, self.n - 1), (0, self.m - 1))
        size = f"{self.n:,} queries × {self.m:,} keys"
        note = f"{size}, {self._share(values)}" if self.kind == "mask" else f"{size}, {_legend(low, high, colour)}"
        head = f"{self.title}   {note}"
        return "\n".join([head] if len(head) <= 80 else [self.title, note]) + "\n" + "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """Write PNG, SVG or PDF, by the path's ending.

        Raises
        ------
        MissingExtraError
            matplotlib is not installed.
        ParameterError
            Another ending.
        """
        return plotting.save(self.figure(), path)

    def figure(self) -> Any:
        """The picture as a matplotlib figure."""
        figure = plotting.new_figure(4.6, 4.6)
        axis = figure.add_subplot()
        if 0 not in (self.n, self.m):
            self._draw(axis, self.cells(min(self.n, FILE_CELLS), min(self.m, FILE_CELLS)))
        axis.set(xlabel="key j", ylabel="query i")
        axis.set_title(self.title, loc="left", fontsize=10)
        plotting.hide_frame(axis)
        return figure

    def _draw(self, axis: Any, values: Array) -> None:
        from matplotlib import colormaps
        from matplotlib.ticker import MaxNLocator, StrMethodFormatter

        values = _displayed_shares(values) if self.kind == "mask" else values
        colours = colormaps[plotting.COLOUR_MAP].with_extremes(bad=plotting.HIDDEN_COLOUR)
        limits = {"vmin": 0, "vmax": 1} if self.kind == "mask" else {}
        high, wide = (_cell_edges(length, FILE_CELLS)[1] for length in (self.n, self.m))
        frame = (-0.5, values.shape[1] * wide - 0.5, values.shape[0] * high - 0.5, -0.5)
        image = axis.imshow(
            np.ma.masked_invalid(values),
            cmap=colours,
            extent=frame,
            aspect=self.m / self.n,
            interpolation="nearest",
            **limits,
        )
        axis.set(xlim=(-0.5, self.m - 0.5), ylim=(self.n - 0.5, -0.5))
        for ruler in (axis.xaxis, axis.yaxis):
            ruler.set_major_locator(MaxNLocator(5, integer=True))
            ruler.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if self.kind == "numbers" and np.isfinite(values).any():
            bar = axis.figure.colorbar(image, ax=axis, shrink=0.8)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=8, length=0)

    def _normalise(self, values: Array) -> tuple[Array, float, float]:
        """Values from 0 to 1, and the ends they had."""
        if self.kind == "mask":
            return _displayed_shares(values), 0.0, 1.0
        if not np.isfinite(values).any():
            return values, np.nan, np.nan
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        return (values - low) / (high - low) if high > low else values * 0 + 0.5, low, high

    def _share(self, values: Array) -> str:
        pairs = self.n * self.m
        if pairs > MAX_COUNTED_PAIRS:
            empty, full = int((values == 0).sum()), int((values == 1).sum())
            return f"{empty:,} cells empty, {full:,} full, {values.size - empty - full:,} between"
        allowed = round(float(self.cells(self.n, self.m).sum()))
        return f"{allowed:,} of {pairs:,} pairs allowed ({allowed / pairs:.1%})"

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_png_(self) -> bytes | None:
        if not plotting.has_matplotlib():
            return None
        buffer = BytesIO()
        self.figure().savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def _repr_html_(self) -> str | None:
        """Shades in a notebook without matplotlib; where it is there, the PNG is shown."""
        if plotting.has_matplotlib():
            return None
        text = self.text(colour=False).replace("&", "&amp;").replace("<", "&lt;")
        return f'<pre style="line-height: 1.1">{text}</pre>'


def formula_picture(formula: Expression, n: int, m: int, *, batch: int = 0, head: int = 0) -> Picture:
    """The picture of a mask, or of the number a formula gives where s = 0: what a score adds.

    Parameters
    ----------
    formula : Expression
        A condition, or a number.
    n, m : int
        Numbers of queries and keys.
    batch, head : int
        The b and h shown.

    Raises
    ------
    ParameterError
        A negative number.
    TableError, ShapeError
        The formula reads outside its tables at these lengths.
    """
    if not all(hasattr(number, "__index__") and number >= 0 for number in (n, m, batch, head)):
        raise ParameterError(f"n={n}, m={m}, batch={batch}, head={head}", "whole numbers ≥ 0", "formula.show(64)")
    extent = validate_extent(formula, n, m, batch, head)
    mask = formula.kind == "bool"
    at = [f"{name} = {value}" for name, value in (("b", batch), ("h", head), ("s", 0)) if name in formula.free_symbols]
    title = f"{formula}" + (f"   at {', '.join(at)}" if at else "")

    def cells(rows: int, columns: int) -> Array:
        edges = _cell_edges(n, rows), _cell_edges(m, columns)
        values = _sample_cells(formula, extent, batch, head, edges)
        if not mask:
            return _finite_mean(values)
        share = values.mean(axis=(1, 3))
        return _apply_bounds(formula, extent, batch, head, edges, share)

    return Picture(title, n, m, "mask" if mask else "numbers", cells)


def validate_extent(formula: Expression, n: int, m: int, batch: int, head: int) -> tuple[int, int, int, int]:
    """(B, H, n, m) that holds the b and h shown, once it is sure that the formula's tables fit it."""
    extent = (_axis_length(formula, "b", batch), _axis_length(formula, "h", head), n, m)
    check_formulas(formula, None, extent)
    return extent


def _axis_length(formula: Expression, name: str, shown: int) -> int:
    """A range of b or h that holds the one shown and fits the tables that promise to span it."""
    spans = (pair for table in formula.tables for pair in zip(table.axes or (), table.shape, strict=False))
    return max(shown + 1, *(length for axis, length in spans if axis == name), 0)


def _cell_edges(length: int, max_cells: int) -> Array:
    """The first position of every cell, and the end; cells a power of two wide, for which tables' bounds are exact."""
    width = 1 << max(-(-length // max(max_cells, 1)) - 1, 0).bit_length()
    return np.append(np.arange(0, length, width), length)


def _sample_cells(
    formula: Expression, extent: tuple[int, int, int, int], batch: int, head: int, edges: tuple[Array, Array]
) -> Array:
    """Values at up to SAMPLES² points of every cell, (rows, points, columns, points) float64."""

    def points(edge: Array) -> Array:
        sizes = edge[1:] - edge[:-1]
        count = min(int(sizes.max(initial=1)), SAMPLES_PER_SIDE)
        share = np.arange(count) / max(count - 1, 1)
        places: Array = edge[:-1, None] + np.rint(share * (sizes[:, None] - 1)).astype(np.int64)
        return places

    i, j = points(edges[0]), points(edges[1])
    symbols: dict[str, Any] = {
        "b": np.asarray(batch),
        "h": np.asarray(head),
        "i": i.reshape(-1, 1),
        "j": j.reshape(-1),
        "n": extent[2],
        "m": extent[3],
        "s": np.zeros(()),
    }
    with np.errstate(all="ignore"):
        values = evaluate(formula, symbols, xp=namespace(i), float_dtype=np.dtype("float64"), like=i)
    whole = np.broadcast_to(values, (i.size, j.size)).astype(np.float64)
    cells: Array = whole.reshape(*i.shape, *j.shape)
    return cells


def _displayed_shares(share: Array) -> Array:
    """Shares as they are drawn: hidden NaN, full 1, and what is between lifted, so that a few pairs in a cell show."""
    seen: Array = np.where(share == 0, np.nan, np.where(share == 1, 1.0, 0.2 + 0.5 * share))
    return seen


def _finite_mean(values: Array) -> Array:
    """The mean over a cell's points of what is finite; NaN where nothing is."""
    finite = np.isfinite(values)
    count = finite.sum(axis=(1, 3))
    total = np.where(finite, values, 0).sum(axis=(1, 3))
    mean: Array = np.where(count == 0, np.nan, total / np.maximum(count, 1))
    return mean


def _apply_bounds(
    mask: Expression, extent: tuple[int, int, int, int], batch: int, head: int, edges: tuple[Array, Array], share: Array
) -> Array:
    """Shares with what bounds know: 0 empty, 1 full. Cells they leave open and samples do not exhaust are between."""
    i, j = edges
    box = make_box(
        extent, b=(batch, batch), h=(head, head), i=(i[:-1, None], i[1:, None] - 1), j=(j[None, :-1], j[None, 1:] - 1)
    )
    low, high = (np.broadcast_to(end, share.shape) for end in compute_intervals(mask, box)[id(mask)])
    seen_whole = max(np.diff(i).max(initial=0), np.diff(j).max(initial=0)) <= SAMPLES_PER_SIDE
    between = share if seen_whole else np.clip(share, 1 / SAMPLES_PER_SIDE**2, 1 - 1 / SAMPLES_PER_SIDE**2)
    bounded: Array = np.where(low == 1, 1.0, np.where(high == 0, 0.0, between))
    return bounded


def _legend(low: float, high: float, colour: bool) -> str:
    if np.isnan(low):
        return "all hidden"
    if colour:
        shades = (
            "".join(f"\x1b[48;2;{';'.join(map(str, terminal.colour_of(k / 7)))}m " for k in range(8)) + terminal.RESET
        )
    else:
        shades = terminal.SHADES
    return f"{low:.4g} {shades} {high:.4g}".replace("-", "−")
