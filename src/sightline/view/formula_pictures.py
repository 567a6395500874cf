"""Pictures of formulas for any numbers of queries and keys: the allowed pairs of a mask, or what a score formula adds.

A picture is drawn in cells. The size of the picture limits their number. Each cell stands for a rectangle of pairs
(i, j). Interval bounds show which cells of a mask have no allowed pair and which have only allowed pairs. The other
cells are sampled. The memory is proportional to the number of cells.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays.operations import Array
from ..errors import MissingExtraError, ParameterError
from ..formula.evaluate_array import evaluate_at
from ..formula.expression import Expression
from ..formula.formula_checks import check_formula
from ..formula.interval_arithmetic import compute_intervals
from ..formula.tile_ranges import make_box
from . import plotting, terminal

SAMPLES_PER_SIDE = 8  # largest number of sampled points per side of a cell
FILE_CELLS = 256  # largest number of cells per side of a picture in a file
MAX_LINED_CELLS = 64  # largest number of queries and of keys at which lines separate the pairs of a picture in a file
MAX_COUNTED_PAIRS = 1 << 20  # largest number of pairs at which the allowed pairs of a mask are counted


@dataclass(frozen=True, repr=False, eq=False)
class Picture:
    """A picture of a formula for n queries and m keys: `print` draws it, a notebook displays it, and `save` writes it.

    Parameters
    ----------
    title : str
    n, m : int
        Numbers of queries and keys.
    kind : {"mask", "numbers"}
        What a cell holds. "mask": the share of allowed pairs, from 0 to 1. "numbers": the mean of the finite values of
        the formula at sampled pairs, NaN if there are none.
    cells : function
        (rows, columns) → a float64 matrix with at most `rows` rows and `columns` columns of cells. The numbers of
        queries and of keys in a cell are powers of two. The last row and column of cells may have fewer.
    """

    title: str
    n: int
    m: int
    kind: str
    cells: Callable[[int, int], Array]

    def text(self, colour: bool | None = None) -> str:
        """Return the picture as text for a terminal, in lines of at most 80 characters unless the title is longer.

        Parameters
        ----------
        colour : bool, optional
            True draws 24-bit colours, False block shades. By default colours are drawn if standard output shows them.

        Returns
        -------
        str
        """
        colour = terminal.has_true_colour() if colour is None else colour
        if 0 in (self.n, self.m):
            return f"{self.title}   {self.n:,} queries × {self.m:,} keys"
        max_cells = terminal.WIDE_CELLS * (2 if colour else 1)
        values = self.cells(min(self.n, max_cells), min(self.m, max_cells))
        shown, low, high = self._normalise(values)
        lines = terminal.draw_matrix(shown, colour, self.n, self.m)
        size = f"{self.n:,} queries × {self.m:,} keys"
        note = f"{size}, {self._share(values)}" if self.kind == "mask" else f"{size}, {_legend(low, high, colour)}"
        head = f"{self.title}   {note}"
        return "\n".join([head] if len(head) <= 80 else [self.title, note]) + "\n" + "\n".join(lines)

    def save(self, path: str | Path, *, dpi: float = 180, dark: bool = False, transparent: bool = False) -> Path:
        """Write the picture to a file and return the path.

        The parameters, the formats and the errors are those of `sightline.view.save`.
        """
        return plotting.save(self.figure(), path, dpi=dpi, dark=dark, transparent=transparent)

    def figure(self) -> Any:
        """Return the picture as a matplotlib figure.

        Raises
        ------
        MissingExtraError
            matplotlib is not installed.
        """
        axis = plotting.new_axis(None, 4.6, 4.6)
        if 0 not in (self.n, self.m):
            self._draw(axis, self.cells(min(self.n, FILE_CELLS), min(self.m, FILE_CELLS)))
        axis.set(xlabel="key j", ylabel="query i")
        return plotting.finish(axis, self.title).figure

    def _draw(self, axis: Any, values: Array) -> None:
        values = _displayed_shares(values) if self.kind == "mask" else values
        limits = {"vmin": 0, "vmax": 1} if self.kind == "mask" else {}
        height, width = (_cell_edges(length, FILE_CELLS)[1] for length in (self.n, self.m))
        frame = (-0.5, values.shape[1] * width - 0.5, values.shape[0] * height - 0.5, -0.5)
        image = axis.imshow(
            np.ma.masked_invalid(values),
            cmap=plotting.colour_map(),
            extent=frame,
            aspect=self.m / self.n,
            interpolation="nearest",
            **limits,
        )
        axis.set(xlim=(-0.5, self.m - 0.5), ylim=(self.n - 0.5, -0.5))
        if max(self.n, self.m) <= MAX_LINED_CELLS:
            plotting.draw_grid_lines(axis, self.n, self.m)
        plotting.set_position_ticks(axis, "xy")
        if self.kind == "numbers" and np.isfinite(values).any():
            plotting.add_colour_bar(axis, image, "")

    def _normalise(self, values: Array) -> tuple[Array, float, float]:
        """Return the cells as they are drawn, from 0 to 1, and the minimum and the maximum that the colours stand for.

        The minimum and the maximum are NaN if every cell is hidden.
        """
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
            return f"{empty:,} cells empty, {full:,} full, {values.size - empty - full:,} partial"
        allowed = round(float(self.cells(self.n, self.m).sum()))
        return f"{allowed:,} of {pairs:,} pairs allowed ({allowed / pairs:.1%})"

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_png_(self) -> bytes | None:
        buffer = BytesIO()
        with suppress(MissingExtraError):
            self.figure().savefig(buffer, format="png", dpi=110)
        return buffer.getvalue() or None


def formula_picture(formula: Expression, n: int, m: int, *, batch: int = 0, head: int = 0) -> Picture:
    """Return the `Picture` of a mask, or of what a score formula adds: the number that it gives for s = 0.

    Parameters
    ----------
    formula : Expression
        A condition or a number. Its method `show` calls this function.
    n, m : int
        Numbers of queries and keys.
    batch, head : int, default 0
        The batch b and the head h of the picture.

    Raises
    ------
    ParameterError
        n, m, batch or head is not a whole number of at least 0.
    TableError, ShapeError
        The formula reads outside its tables for some i or j below n or m, or a table does not fit its axes.
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
            means: Array = np.ma.masked_invalid(values).mean(axis=(1, 3)).filled(np.nan)
            return means
        share = values.mean(axis=(1, 3))
        return _apply_bounds(formula, extent, batch, head, edges, share)

    return Picture(title, n, m, "mask" if mask else "numbers", cells)


def validate_extent(formula: Expression, n: int, m: int, batch: int, head: int) -> tuple[int, int, int, int]:
    """Return an extent (B, H, n, m) with batch < B and head < H, after checking that the formula's tables fit it."""
    extent = (_axis_length(formula, "b", batch), _axis_length(formula, "h", head), n, m)
    check_formula(formula, extent)
    return extent


def _axis_length(formula: Expression, name: str, shown: int) -> int:
    """Return a length of the axis `name`, b or h, that is above the index `shown`.

    The length fits the formula's tables that must span the axis.
    """
    spans = (pair for table in formula.tables for pair in table.span_lengths)
    return max(shown + 1, *(length for axis, length in spans if axis == name), 0)


def _cell_edges(length: int, max_cells: int) -> Array:
    """Return the first position of every cell along an axis, followed by the length of the axis.

    The width of a cell is a power of two, because interval bounds of tables are exact for such widths.
    """
    width = 1 << max(-(-length // max(max_cells, 1)) - 1, 0).bit_length()
    return np.append(np.arange(0, length, width), length)


def _sample_cells(
    formula: Expression, extent: tuple[int, int, int, int], batch: int, head: int, edges: tuple[Array, Array]
) -> Array:
    """Return what the formula gives at up to SAMPLES_PER_SIDE² pairs of every cell, in float64.

    The array is (rows, points, columns, points): rows and columns of cells, and points per side of a cell.
    """

    def points(edge: Array) -> Array:
        sizes = edge[1:] - edge[:-1]
        count = min(int(sizes.max(initial=1)), SAMPLES_PER_SIDE)
        share = np.arange(count) / max(count - 1, 1)
        positions: Array = edge[:-1, None] + np.rint(share * (sizes[:, None] - 1)).astype(np.int64)
        return positions

    i, j = points(edges[0]), points(edges[1])
    at: dict[str, Any] = {"b": batch, "h": head, "i": i.reshape(-1, 1), "j": j.reshape(-1), "s": np.zeros(())}
    values = evaluate_at(formula, n=extent[2], m=extent[3], **at)
    whole = np.broadcast_to(values, (i.size, j.size)).astype(np.float64)
    cells: Array = whole.reshape(*i.shape, *j.shape)
    return cells


def _displayed_shares(share: Array) -> Array:
    """Return the numbers by which shares of allowed pairs are coloured, so that a few allowed pairs are visible.

    A share of 0 becomes NaN, a share of 1 stays 1, and other shares become numbers from 0.2 to 0.7.
    """
    displayed: Array = np.where(share == 0, np.nan, np.where(share == 1, 1.0, 0.2 + 0.5 * share))
    return displayed


def _apply_bounds(
    mask: Expression, extent: tuple[int, int, int, int], batch: int, head: int, edges: tuple[Array, Array], share: Array
) -> Array:
    """Return the shares of allowed pairs, corrected by the interval bounds of the mask.

    The share is 0 if the bounds prove that the cell has no allowed pair, and 1 if they prove that it has no hidden
    pair. If they prove neither and some pairs were not sampled, the share is kept between 1/s and 1 − 1/s, where s is
    SAMPLES_PER_SIDE².
    """
    i, j = edges
    box = make_box(
        extent, b=(batch, batch), h=(head, head), i=(i[:-1, None], i[1:, None] - 1), j=(j[None, :-1], j[None, 1:] - 1)
    )
    low, high = (np.broadcast_to(end, share.shape) for end in compute_intervals(mask, box)[id(mask)])
    is_exact = max(np.diff(i).max(initial=0), np.diff(j).max(initial=0)) <= SAMPLES_PER_SIDE
    between = share if is_exact else np.clip(share, 1 / SAMPLES_PER_SIDE**2, 1 - 1 / SAMPLES_PER_SIDE**2)
    bounded: Array = np.where(low == 1, 1.0, np.where(high == 0, 0.0, between))
    return bounded


def _legend(low: float, high: float, colour: bool) -> str:
    if np.isnan(low):
        return "all hidden"
    shades = terminal.SHADES
    if colour:
        codes = (";".join(map(str, terminal.colour_of(k / 7))) for k in range(8))
        shades = "".join(f"\x1b[48;2;{code}m " for code in codes) + terminal.RESET
    return f"{low:.4g} {shades} {high:.4g}".replace("-", "−")
