"""Statistics of the whole matrix: as it is, or pooled into cells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..arrays import dtype_name, framework, namespace
from ..errors import ParameterError, ShapeError
from ..formula.expression import SYMBOLS, where
from .base import MAX_RESULT_BYTES, BackwardContext, ForwardContext, Outer, StatisticGradients, Tile, itemsize
from .selection import Statistic

if TYPE_CHECKING:
    from ..problem import Problem

__all__ = ["MAX_RESULT_BYTES", "Pooled", "Scores", "Weights", "pooled", "scores", "weights"]

Rectangle = tuple[tuple[int, int], tuple[int, int]]

i, j = SYMBOLS["i"], SYMBOLS["j"]


@dataclass(frozen=True, eq=False, repr=False)
class Matrix(Statistic):
    """A number for every pair."""

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
                f'{self.name}().rows([...]), .heads([...]) or .mean("heads") for a part, pooled(64, 64) for a picture, '
                f"sightline.tiles(...) to go through it, or {self.name}(insist=True)",
            )


@dataclass(frozen=True, eq=False, repr=False)
class Weights(Matrix):
    """The weights themselves; see `weights`."""

    name = "weights"

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return (dtype_name(problem.query),)

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        arrays[0][..., tile.rows, tile.columns] = context.xp.astype(tile.weights, arrays[0].dtype)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        return StatisticGradients(weights=context.gradient_at(i, j))


@dataclass(frozen=True, eq=False, repr=False)
class Scores(Matrix):
    """The final scores; see `scores`."""

    name = "scores"
    tile_inputs = ("scores",)
    fill_values = (-math.inf,)

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        arrays[0][..., tile.rows, tile.columns] = context.xp.astype(tile.scores, arrays[0].dtype)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        return StatisticGradients(scores=context.gradient_at(i, j), includes_zero_weights=True)


@dataclass(frozen=True, eq=False, repr=False)
class Pooled(Statistic):
    """The weights by cells of a grid; see `pooled`."""

    down: int
    across: int
    how: Literal["mean", "max"] = "mean"
    within: Rectangle | None = None

    name = "pooled"

    def __repr__(self) -> str:  # by the words of `pooled`; `rows` is a method here
        return super().__repr__().replace("down=", "rows=").replace("across=", "columns=")

    @property
    def is_linear(self) -> bool:
        return self.how == "mean"

    @property
    def is_differentiable(self) -> bool:  # type: ignore[override]
        return self.how == "mean"

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, self.down, self.across),)

    def rectangle(self, n: int, m: int) -> Rectangle:
        """((first, past last) query, (first, past last) key)."""
        return ((0, n), (0, m)) if self.within is None else self.within

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        spans = self.rectangle(n, problem.m)
        for what, (start, stop), length in zip(("queries", "keys"), spans, (n, problem.m), strict=True):
            if not 0 <= start <= stop <= length:
                raise ShapeError(
                    f"pooled(within=...) of {what} {start} to {stop}",
                    f"0 ≤ first ≤ past last ≤ {length}",
                    "within=None",
                )
        for what, cells, (start, stop) in zip(("rows", "columns"), (self.down, self.across), spans, strict=True):
            if cells > stop - start:
                raise ShapeError(
                    f"pooled into {cells} {what}",
                    f"at most {stop - start}, as the rectangle has",
                    f"{what}={stop - start}",
                )

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        spans = self.rectangle(context.problem.n, context.problem.m)
        pooled, target = tile.weights, []
        for axis, part, span, cells in zip(
            (-2, -1), (tile.rows, tile.columns), spans, (self.down, self.across), strict=True
        ):
            start, stop = max(part.start, span[0]), min(part.stop, span[1])
            if start >= stop:
                return
            inside = slice(start - part.start, stop - part.start)
            pooled = pooled[..., inside, :] if axis == -2 else pooled[..., inside]
            segment_ids = cell_of(np.arange(start, stop) - span[0], span[1] - span[0], cells)
            pooled = reduce_segments(pooled, segment_ids - segment_ids[0], axis, self.how)
            target.append(slice(int(segment_ids[0]), int(segment_ids[-1]) + 1))
        current = arrays[0][..., target[0], target[1]]
        pooled = context.xp.astype(pooled, current.dtype)
        arrays[0][..., target[0], target[1]] = (
            context.xp.maximum(current, pooled) if self.how == "max" else current + pooled
        )

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        if self.how == "max":
            return arrays
        return [arrays[0] / context.xp.astype(self._cell_sizes(context.problem, arrays[0]), arrays[0].dtype)]

    def _cell_sizes(self, problem: Problem, like: Any) -> Any:
        """(rows, columns): pairs in each cell, in like's library."""
        down, across = self.rectangle(problem.n, problem.m)
        sizes = np.outer(lengths(*down, self.down), lengths(*across, self.across)).astype(np.float64)
        return like.new_tensor(sizes) if framework(like) == "torch" else sizes

    def backward(self, context: BackwardContext) -> StatisticGradients:
        if self.how == "max":
            return StatisticGradients()
        (i0, i1), (j0, j1) = self.rectangle(context.problem.n, context.problem.m)
        r, c = cell_of(i - i0, i1 - i0, self.down), cell_of(j - j0, j1 - j0, self.across)
        shares = context.gradient / self._cell_sizes(context.problem, context.gradient)
        inside = (i >= i0) & (i < i1) & (j >= j0) & (j < j1)
        return StatisticGradients(
            weights=where(inside, context.lookup(shares, r, c, remaining_axes=context.remaining_axes), 0.0)
        )


def cell_of(position: Any, length: int, cells: int) -> Any:
    """The r with ⌊r · length / cells⌋ ≤ position < ⌊(r + 1) · length / cells⌋, of a number or a formula."""
    return ((position + 1) * cells - 1) // length


def lengths(first: int, last: int, cells: int) -> Any:
    """How many of the positions from `first` to before `last` each cell takes."""
    return np.diff(np.arange(cells + 1) * (last - first) // cells)


def reduce_segments(array: Any, segment_ids: Any, axis: int, how: str) -> Any:
    """Sums, or maxima of numbers not below 0, of the entries along an axis that share a place 0, 1, ..., ascending."""
    if framework(array) != "torch":
        starts = np.flatnonzero(np.diff(segment_ids, prepend=-1))
        return (np.maximum if how == "max" else np.add).reduceat(array, starts, axis=axis)
    if how == "max":
        lengths = np.unique(segment_ids, return_counts=True)[1].tolist()
        return namespace(array).stack([part.amax(axis) for part in array.split(lengths, axis)], axis=axis)
    shape = list(array.shape)
    shape[axis] = int(segment_ids[-1]) + 1
    return array.new_zeros(shape).index_add(axis, array.new_tensor(segment_ids).long(), array)


def weights(limit: int = MAX_RESULT_BYTES, insist: bool = False) -> Statistic:
    """P_ij = exp(S_ij − lse_i), 0 where hidden: the whole matrix, before dropout.

    Parameters
    ----------
    limit : int, default 2 GiB
        Bytes the matrix may take.
    insist : bool, default False
        Take it whatever its size.

    Returns, in `seen`, (..., H, n, m) in the input's dtype: n × m memory. `.rows`, `.heads` and `.mean` hold less.

    Raises
    ------
    ParameterError
        The matrix takes more than the limit, when the question is asked.

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
    """S_ij, the scores that softmax is taken of: after scale, score formula and mask. Parameters as in `weights`.

    Returns, in `seen`, (..., H, n, m) in the accumulator's dtype, in nats; −∞ where hidden. Its mean over heads is −∞
    where any of them hides the pair.
    """
    return Scores(*_check_limit("scores", limit, insist))


def pooled(rows: int, columns: int, how: Literal["mean", "max"] = "mean", within: Rectangle | None = None) -> Statistic:
    """The exact mean or maximum of P over every cell of a grid: the matrix as a picture of any size.

    Cell (r, c) holds queries ⌊r·N / rows⌋ to ⌊(r + 1)·N / rows⌋ of the rectangle's N, the last left out, and keys
    likewise.

    Parameters
    ----------
    rows, columns : int
        Cells down and across; at most the rectangle's queries and keys.
    how : {"mean", "max"}, default "mean"
        Hidden pairs count as 0.
    within : ((first query, past last), (first key, past last)), optional
        The rectangle; all by default.

    Returns, in `seen`, (..., H, rows, columns) in the accumulator's dtype. The maximum has no gradient.

    Raises
    ------
    ParameterError
        Cells that are no whole numbers of at least 1, another word, a rectangle that is none.
    ShapeError
        More cells than queries or keys, or a rectangle outside the matrix, when the question is asked.
    """
    for what, cells in (("rows", rows), ("columns", columns)):
        if isinstance(cells, bool) or not isinstance(cells, int) or cells < 1:
            raise ParameterError(f"pooled({what}={cells!r})", "a whole number of at least 1", "pooled(64, 64)")
    if how not in ("mean", "max"):
        raise ParameterError(f"pooled(how={how!r})", '"mean" or "max"', 'pooled(64, 64, "mean")')
    return Pooled(rows, columns, how, None if within is None else _parse_rectangle(within))


def _parse_rectangle(within: Any) -> Rectangle:
    try:
        (i0, i1), (j0, j1) = within
        whole = all(isinstance(end, int) for end in (i0, i1, j0, j1))
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise ParameterError(
            f"pooled(within={within!r})",
            "((first query, past last), (first key, past last))",
            "within=((0, 8), (0, 8))",
        )
    return (i0, i1), (j0, j1)


def _check_limit(name: str, limit: Any, insist: Any) -> tuple[int, bool]:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ParameterError(f"{name}(limit={limit!r})", "bytes, a whole number", f"{name}(insist=True) for any size")
    return limit, bool(insist)
