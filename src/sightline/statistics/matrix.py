"""Statistics of the whole matrix of weights or scores: all its entries, or the weights pooled into cells of a grid."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..arrays.operations import TORCH, convert, dtype_name, framework, itemsize, namespace
from ..errors import ParameterError, ShapeError, check_count
from ..formula.expression import SYMBOLS, where
from .base import MAX_RESULT_BYTES, BackwardContext, ForwardContext, Outer, StatisticGradients, Tile
from .selection import Statistic

if TYPE_CHECKING:
    from ..call.problem import Problem

Rectangle = tuple[tuple[int, int], tuple[int, int]]

i, j = SYMBOLS["i"], SYMBOLS["j"]


@dataclass(frozen=True, eq=False, repr=False)
class Matrix(Statistic):
    """The base class of statistics with one number for every pair of a query and a key."""

    limit: int = MAX_RESULT_BYTES
    insist: bool = False

    @property
    def is_linear(self) -> bool:
        return True

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, n, problem.m),)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        size = math.prod((*outer, n, problem.m)) * itemsize(self.dtypes(problem)[0])
        if not self.insist and size > self.limit:
            shape = " × ".join([str(length) for length in (*outer, n, problem.m)])
            raise ParameterError(
                f"{self.name}() of {shape}, {size:,} bytes",
                f"{self.limit:,} bytes",
                f'{self.name}().rows([...]), .heads([...]) or .mean("heads") for less, pooled(64, 64) for a picture, '
                f"sightline.tiles(...) for one tile at a time, or {self.name}(insist=True)",
            )

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        entries = getattr(tile, self.tile_inputs[0])
        arrays[0][..., tile.rows, tile.columns] = context.xp.astype(entries, arrays[0].dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Weights(Matrix):
    """The matrix of weights; see `weights`."""

    name = "weights"

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return (dtype_name(problem.query),)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        return StatisticGradients(weights=context.gradient_at(i, j))


@dataclass(frozen=True, eq=False, repr=False)
class Scores(Matrix):
    """The matrix of final scores; see `scores`."""

    name = "scores"
    tile_inputs = ("scores",)
    fill_values = (-math.inf,)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        return StatisticGradients(scores=context.gradient_at(i, j), includes_zero_weights=True)


@dataclass(frozen=True, eq=False, repr=False)
class Pooled(Statistic):
    """The weights pooled into the cells of a grid; see `pooled`."""

    down: int
    across: int
    how: Literal["mean", "max"] = "mean"
    within: Rectangle | None = None

    name = "pooled"

    def __repr__(self) -> str:  # the parameter `rows` of `pooled` is the field `down`, because `rows` is a method
        return super().__repr__().replace("down=", "rows=").replace("across=", "columns=")

    @property
    def is_linear(self) -> bool:
        return self.how == "mean"

    @property
    def is_differentiable(self) -> bool:  # type: ignore[override]
        return self.how == "mean"

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, *self.grid(n, problem.m)),)

    def rectangle(self, n: int, m: int) -> Rectangle:
        """Return the pooled rectangle, ((first query, past the last), (first key, past the last))."""
        return ((0, n), (0, m)) if self.within is None else self.within

    def grid(self, n: int, m: int) -> tuple[int, int]:
        """Return the number of rows and of columns of cells. A cell has at least one query and one key."""
        (i0, i1), (j0, j1) = self.rectangle(n, m)
        return min(self.down, i1 - i0), min(self.across, j1 - j0)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        spans = self.rectangle(n, problem.m)
        for what, (start, stop), length in zip(("queries", "keys"), spans, (n, problem.m), strict=True):
            if not 0 <= start <= stop <= length:
                raise ShapeError(
                    f"pooled(within=...), {what} {start} to {stop}", f"0 ≤ first ≤ past last ≤ {length}", "within=None"
                )

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        lengths = context.problem.n, context.problem.m
        pooled, target = tile.weights, []
        axes = zip((-2, -1), (tile.rows, tile.columns), self.rectangle(*lengths), self.grid(*lengths), strict=True)
        for axis, positions, span, count in axes:
            start, stop = max(positions.start, span[0]), min(positions.stop, span[1])
            if start >= stop:
                return
            inside = slice(start - positions.start, stop - positions.start)
            pooled = pooled[..., inside, :] if axis == -2 else pooled[..., inside]
            segment_ids = cell_of(np.arange(start, stop) - span[0], span[1] - span[0], count)
            pooled = reduce_segments(pooled, segment_ids - segment_ids[0], axis, self.how)
            target.append(slice(int(segment_ids[0]), int(segment_ids[-1]) + 1))
        xp, cells = context.xp, (..., *target)
        current = arrays[0][cells]
        pooled = xp.astype(pooled, current.dtype)
        arrays[0][cells] = xp.maximum(current, pooled) if self.how == "max" else current + pooled

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        if self.how == "max":
            return arrays
        sizes = convert(self.cell_sizes(context.problem.n, context.problem.m), arrays[0])
        return [arrays[0] / context.xp.astype(sizes, arrays[0].dtype)]

    def cell_sizes(self, n: int, m: int) -> Any:
        """Return the number of pairs in each cell, a NumPy array (rows, columns)."""
        (down, across), (rows, columns) = self.rectangle(n, m), self.grid(n, m)
        return np.outer(cell_lengths(*down, rows), cell_lengths(*across, columns)).astype(np.float64)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        lengths = context.problem.n, context.problem.m
        (i0, i1), (j0, j1) = self.rectangle(*lengths)
        rows, columns = self.grid(*lengths)
        if self.how == "max" or 0 in (rows, columns):
            return StatisticGradients()
        r, c = cell_of(i - i0, i1 - i0, rows), cell_of(j - j0, j1 - j0, columns)
        sizes = convert(self.cell_sizes(context.problem.n, context.problem.m), context.gradient)
        shares = context.gradient / context.xp.astype(sizes, context.gradient.dtype)
        inside = (i >= i0) & (i < i1) & (j >= j0) & (j < j1)
        share = context.lookup(shares, r, c, remaining_axes=context.remaining_axes)
        return StatisticGradients(weights=where(inside, share, 0.0))


def cell_of(position: Any, length: int, cells: int) -> Any:
    """Return the index of the cell that contains the position, which is a number or a formula.

    `length` positions are divided among `cells` cells. Cell r has the positions p with
    ⌊r · length / cells⌋ ≤ p < ⌊(r + 1) · length / cells⌋.
    """
    return ((position + 1) * cells - 1) // length


def cell_lengths(first: int, stop: int, cells: int) -> Any:
    """Return the number of positions in each cell, a NumPy array. The cells divide the positions first ≤ p < stop."""
    return np.diff(np.arange(cells + 1) * (stop - first) // max(cells, 1))


def reduce_segments(array: Any, segment_ids: Any, axis: int, how: str) -> Any:
    """Return the sum, or for `how` "max" the maximum, of the entries of each segment along an axis, −1 or −2.

    `segment_ids` has the segment of each index of the axis. The ids ascend from 0 without gaps.
    """
    if isinstance(array, np.ndarray):
        starts = np.flatnonzero(np.diff(segment_ids, prepend=-1))
        return (np.maximum if how == "max" else np.add).reduceat(array, starts, axis=axis)
    if how == "max" or framework(array) is not TORCH:
        xp, ends = namespace(array), np.cumsum(np.unique(segment_ids, return_counts=True)[1]).tolist()
        after = [slice(None)] * (-1 - axis)
        segments = [array[(..., slice(*pair), *after)] for pair in itertools.pairwise([0, *ends])]
        return xp.stack([(xp.max if how == "max" else xp.sum)(segment, axis=axis) for segment in segments], axis=axis)
    shape = list(array.shape)
    shape[axis] = int(segment_ids[-1]) + 1
    return array.new_zeros(shape).index_add(axis, array.new_tensor(segment_ids).long(), array)


def weights(limit: int = MAX_RESULT_BYTES, insist: bool = False) -> Statistic:
    """Request P_ij = exp(S_ij − lse_i), 0 where hidden: the whole matrix of weights, before dropout.

    The result is (..., H, n, m) in the query's dtype, with a gradient. `.rows(...)`, `.heads(...)` and `.mean(...)`
    make smaller results.

    Parameters
    ----------
    limit : int, default 2 GiB
        The largest size of the matrix in bytes.
    insist : bool, default False
        Ignore the limit.

    Raises
    ------
    ParameterError
        limit is not a whole number ≥ 0. Also raised by attention if the matrix takes more bytes than the limit.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(4, dtype=np.float32)
    >>> _, (last,) = sightline.attention(x, x, x, see=[sightline.weights().rows([-1])])
    >>> last.round(2)
    array([[0.22, 0.22, 0.22, 0.35]], dtype=float32)
    """
    return Weights(*_check_limit("weights", limit, insist))


def scores(limit: int = MAX_RESULT_BYTES, insist: bool = False) -> Statistic:
    """Request S_ij, the scores that softmax reads: after scale, score formula and mask.

    The result is (..., H, n, m) in the accumulator's dtype (float64 for float64 arrays, else float32), in nats; −∞
    where hidden. The scores have a gradient. The mean over heads is −∞ where any head hides the pair.

    Parameters
    ----------
    limit, insist
        As in `weights`, with the same errors.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.array([[2], [-1]], np.float32), sightline.causal()
    >>> _, (scores,) = sightline.attention(x, x, x, mask=mask, see=[sightline.scores()])
    >>> scores  # the products 2·2, −1·2 and −1·−1
    array([[  4., -inf],
           [ -2.,   1.]], dtype=float32)
    """
    return Scores(*_check_limit("scores", limit, insist))


def pooled(rows: int, columns: int, how: Literal["mean", "max"] = "mean", within: Rectangle | None = None) -> Statistic:
    """Request the exact mean or maximum of P over every cell of a grid: the matrix as a picture of any size.

    The rectangle that is pooled has N queries and M keys. With R = min(rows, N), row r of cells covers the queries i,
    counted within the rectangle, with ⌊r·N / R⌋ ≤ i < ⌊(r + 1)·N / R⌋. Columns of cells divide the keys in this way.

    The result is (..., H, min(rows, N), min(columns, M)) in the accumulator's dtype (float64 for float64 arrays, else
    float32). The mean has a gradient, the maximum has none.

    Parameters
    ----------
    rows, columns : int
        The number of cells along queries and along keys. If the rectangle has fewer queries or keys, each has its own
        cell: `pooled(64, 64)` of 10 queries on 10 keys is P itself.
    how : {"mean", "max"}, default "mean"
        Hidden pairs count as 0.
    within : ((first query, past the last), (first key, past the last)), optional
        The rectangle. Default: the whole matrix.

    Raises
    ------
    ParameterError
        rows or columns is not a whole number of at least 1, how is another word, or within is not a rectangle.
    ShapeError
        Raised by attention if the rectangle is not within the matrix.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((4, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> _, (cells,) = sightline.attention(x, x, x, mask=mask, see=[sightline.pooled(2, 2)])
    >>> cells.round(2)  # the upper left cell is the mean of 1, 0, 1/2 and 1/2
    array([[0.5 , 0.  ],
           [0.29, 0.21]], dtype=float32)
    """
    rows = check_count("pooled(rows={!r})", rows, 1, "pooled(64, 64)")
    columns = check_count("pooled(columns={!r})", columns, 1, "pooled(64, 64)")
    if how not in ("mean", "max"):
        raise ParameterError(f"pooled(how={how!r})", '"mean" or "max"', 'pooled(64, 64, "mean")')
    return Pooled(rows, columns, how, None if within is None else _parse_rectangle(within))


def _parse_rectangle(within: Any) -> Rectangle:
    try:
        (i0, i1), (j0, j1) = within
        return (index(i0), index(i1)), (index(j0), index(j1))
    except (TypeError, ValueError):
        raise ParameterError(
            f"pooled(within={within!r})", "((first query, past last), (first key, past last))", "((0, 8), (0, 8))"
        ) from None


def _check_limit(name: str, limit: Any, insist: Any) -> tuple[int, bool]:
    given, cure = name + "(limit={!r}), a number of bytes", f"{name}(insist=True) for any size"
    return check_count(given, limit, 0, cure), bool(insist)
