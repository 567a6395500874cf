"""Sums, maxima and minima of a formula f of every weight p: over keys, queries, cells of pairs, or over nothing.

    S_ij = the final score    p = P_ij = exp(S_ij − lse_i)    ln p = S_ij − lse_i, which is exact where p is 0

Hidden pairs take no part. Forward kernels compute sums over keys of an f that is p times a formula without p.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.caching import cached_property
from ..arrays.operations import TORCH, convert, dtype_name, framework, itemsize, namespace, needs_gradient
from ..errors import ParameterError, ShapeError
from ..formula.derivative import ONE, ZERO, derivative, vanishes_with
from ..formula.evaluate_array import evaluate
from ..formula.expression import SYMBOLS, Apply, Expression, Lookup, apply, walk, where
from ..formula.tables import Table
from .contexts import (
    MAX_RESULT_BYTES,
    BackwardContext,
    ForwardContext,
    KeyPart,
    Outer,
    StatisticGradients,
    Tile,
    format_axes,
    literal_text,
    weigh,
)
from .statistic import Statistic
from .weight_formulas import LOG_P, degree_in, is_entropy, split_logarithms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..call.problem import Problem

Rectangle = tuple[tuple[int, int], tuple[int, int]]

i, j, s, p = (SYMBOLS[name] for name in "ijsp")
EXTREMES = {"max": -math.inf, "min": math.inf}  # the results of no pairs


class Extremum(NamedTuple):
    """A largest or smallest number (`value`), and the position j or i of the first pair that has it (`where`).

    NaN counts as larger, or smaller, than every number. A position of −1 stands for no pair.
    """

    value: Any
    where: Any

    @property
    def score(self) -> Any:
        """The number, for `max_score`."""
        return self.value

    def at_positions(self, positions: Any) -> Extremum:
        """Return the extremum with the numbers of `positions`, (count,) or (B, 1, count), at `where`; −1 stays −1."""
        where, xp = self.where, namespace(self.where)
        if 0 in positions.shape:
            return self
        shape = *where.shape[:-1], positions.shape[-1]
        numbers = xp.broadcast_to(xp.astype(convert(positions, where), where.dtype), shape)
        found = xp.take_along_axis(numbers, xp.where(where < 0, 0, where), axis=-1)
        return self._replace(where=xp.where(where < 0, where, found))


def find_extremum(how: str, values: Any, positions: Any, axis: int) -> Extremum:
    """Return the largest ("max") or smallest ("min") entry along an axis, and the position of the first such entry.

    `positions` broadcasts to `values`. Position −1 means no pair; it is returned only if all positions are −1.
    """
    xp = namespace(values)
    ordered, positions = values if how == "max" else -values, xp.broadcast_to(positions, values.shape)
    least = float(np.finfo(dtype_name(values)).min)  # so that −∞ with a position is above every entry without one
    ordered = xp.where(positions < 0, -math.inf, xp.where(ordered < least, least, ordered))
    first = xp.argmax(ordered, axis=axis, keepdims=True)
    return Extremum(*[xp.squeeze(xp.take_along_axis(x, first, axis=axis), axis=axis) for x in (values, positions)])


def join_extrema(how: str, one: Any, other: Any) -> Extremum:
    """Return the larger or smaller of two (values, positions); of equal values, that of the smaller position."""
    (value, where), (other_value, other_where) = one, other
    xp = namespace(value)
    is_beyond = other_value > value if how == "max" else other_value < value
    is_beyond = is_beyond | (xp.isnan(other_value) & ~xp.isnan(value))
    is_equal = (other_value == value) | (xp.isnan(other_value) & xp.isnan(value))
    is_new = (other_where >= 0) & ((where < 0) | is_beyond | (is_equal & (other_where < where)))
    return Extremum(xp.where(is_new, other_value, value), xp.where(is_new, other_where, where))


@dataclass(frozen=True, eq=False, repr=False)
class Reduction(Statistic):
    """The sum, mean, maximum or minimum of f_ij; see `sum`, `max`, `received`, `pooled`, `weights` and `scores`.

    formula : f, a formula of p, s, b, h, i, j, n, m and tables; a condition stands for p where it is true, and 0
    how, axes : "sum", "mean", "max" or "min", over "i", "j", "ij" or ""
    cells : (rows, columns) of the grid of cells, for "ij"; None for one number
    within : the pairs that the grid divides; None for all
    name : the function that made the statistic, for its text
    hidden : what a hidden pair counts as, which is also the result of no pairs
    limit : the largest size in bytes of the result of ""; None for no limit
    """

    formula: Expression
    how: str
    axes: str
    cells: tuple[int, int] | None = None
    within: Rectangle | None = None
    name: str = "sum"
    hidden: float = 0.0
    limit: int | None = MAX_RESULT_BYTES

    def __repr__(self) -> str:
        match self.name:
            case "received":
                return f"received({'' if self.how == 'sum' else f'how={self.how!r}'})"
            case "pooled":
                rows, columns = self.cells or (1, 1)
                how = "" if self.how == "mean" else f", how={self.how!r}"
                within = "" if self.within is None else f", within={self.within!r}"
                return f"pooled(rows={rows}, columns={columns}{how}{within})"
            case "mass":
                return f"mass({self.formula!r})"
            case "entropy" | "max_score":
                return f"{self.name}()"
            case "weights" | "scores":
                limit = "insist=True" if self.limit is None else f"limit={self.limit}"
                return f"{self.name}({'' if self.limit == MAX_RESULT_BYTES else limit})"
        return self.format_over(self.axes) or ""

    def format_over(self, axes: str) -> str | None:
        if self.name not in ("sum", "max", "min"):
            return None
        cells = "" if self.cells is None else f", cells={self.cells}"
        return f"{self.name}({self.formula}, over={format_axes(axes)}{cells})"

    # -- properties ---------------------------------------------------------------------------------------------------
    @cached_property
    def cache_key(self) -> tuple[Any, ...] | None:
        of_formula = self.is_plain, self.fused_role  # the two choose a kernel; the formula has its own place in the key
        return (Reduction, of_formula, *self.parameters[1:]) if isinstance(self.formula, Expression) else None

    @property
    def is_extremum(self) -> bool:
        return self.how in ("max", "min")

    @property
    def finds(self) -> bool:  # type: ignore[override]
        """True if the result says where the maximum or minimum is."""
        return self.is_extremum and len(self.axes) == 1 and self.hidden != 0

    @property
    def is_differentiable(self) -> bool:  # type: ignore[override]
        return not (self.is_extremum and len(self.axes) == 2)

    @property
    def fill_values(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.hidden, -1) if self.finds else (self.hidden,)

    @property
    def backward_reads_arrays(self) -> bool:  # type: ignore[override]
        return self.finds or self.degree is not None or self.fused_role == "entropy"

    @property
    def backward_computes(self) -> bool:  # type: ignore[override]
        by_log = ZERO if self._is_condition else self.slopes[1]
        return by_log is not ZERO or (self.is_extremum and len(self.axes) == 1 and not self.finds)

    @property
    def _is_condition(self) -> bool:
        """True if f is a condition, also if it is a boolean array or a function that is not yet a formula."""
        return not isinstance(self.formula, Expression) or self.formula.kind == "bool"

    @cached_property
    def pair_formula(self) -> Expression:
        """f with the symbol "ln p" in place of the logarithm of p."""
        return where(self.formula, p, 0.0) if self.formula.kind == "bool" else split_logarithms(self.formula)

    @cached_property
    def slopes(self) -> tuple[Expression, Expression, Expression]:
        """∂f/∂p, ∂f/∂ln p and ∂f/∂s. If ∂f/∂ln p is p · g, then g is added to ∂f/∂p, and 0 stands for ∂f/∂ln p."""
        by_weight, by_log, by_score = (derivative(self.pair_formula, symbol) for symbol in (p, LOG_P, s))
        if degree_in(by_log, p) == 1:
            quotient = derivative(by_log, p)
            return quotient if by_weight is ZERO else by_weight + quotient, ZERO, by_score
        return by_weight, by_log, by_score

    @cached_property
    def factor(self) -> Expression | None:
        """The formula g of a sum over keys of p · g; None for any other reduction."""
        if self._is_condition:
            return self.formula
        if (self.how, self.axes) != ("sum", "j") or not vanishes_with(self.formula, p):
            return None
        factor = derivative(self.formula, p)
        match factor:
            case Apply("where", (condition, first, second)) if first is ONE and second is ZERO:
                factor = condition
        return None if any(node is p for node in walk(factor)) else factor

    @cached_property
    def fused_role(self) -> str | None:
        """How forward kernels compute it beside the output: as "sum", "entropy" or "max_score"; None if they do not.

        Over keys, "sum" is Σ p · `factor`, "entropy" is Σ −p ln p, and "max_score" is the maximum of s.
        """
        if self.finds:
            return "max_score" if self.formula is s and (self.how, self.axes) == ("max", "j") else None
        if self.factor is not None:
            return "sum"
        return "entropy" if (self.how, self.axes) == ("sum", "j") and is_entropy(self.pair_formula) else None

    @cached_property
    def degree(self) -> float | None:
        """The d of a sum over keys with p · ∂f/∂p = d · f for every weight; None if the form of f shows no such d."""
        if self.fused_role == "sum":
            return 1.0
        is_sum = (self.how, self.axes) == ("sum", "j") and "ln p" not in self.pair_formula.free_symbols
        return degree_in(self.pair_formula, p) if is_sum else None

    @cached_property
    def vanishes(self) -> bool:
        """True if f is 0 where p is 0."""
        return vanishes_with(self.pair_formula, p)

    @property
    def is_plain(self) -> bool:
        """True if f is p, and hidden pairs count as 0, so that the entries are the weights themselves."""
        return self.formula is p and self.hidden == 0

    # -- sizes --------------------------------------------------------------------------------------------------------
    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        lengths = {"j": (n,), "i": (problem.m,), "": (n, problem.m)}
        own = lengths.get(self.axes, () if self.cells is None else self.grid(n, problem.m))
        return ((*outer, *own),) * len(self.fill_values)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return (dtype_name(problem.query),) if self.is_plain and not self.axes else super().dtypes(problem)

    def rectangle(self, n: int, m: int) -> Rectangle:
        """Return the pairs that the grid divides, ((first query, past the last), (first key, past the last))."""
        return ((0, n), (0, m)) if self.within is None else self.within

    def grid(self, n: int, m: int) -> tuple[int, int]:
        """Return the number of rows and of columns of cells. A cell has at least one query and one key."""
        (i0, i1), (j0, j1) = self.rectangle(n, m)
        rows, columns = (1, 1) if self.cells is None else self.cells
        return min(rows, i1 - i0), min(columns, j1 - j0)

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        refuse_learned([self], lambda table: needs_gradient(table.array))
        for what, (start, stop), length in zip(("queries", "keys"), self.within or (), (n, problem.m), strict=False):
            if not 0 <= start <= stop <= length:
                given = f"pooled(within=...), {what} {start} to {stop}"
                raise ShapeError(given, f"0 ≤ first ≤ past last ≤ {length}", "within=None")
        if not self.axes:
            self._check_size(problem, (*outer, n, problem.m))

    def _check_size(self, problem: Problem, shape: tuple[int, ...]) -> None:
        size = math.prod(shape) * itemsize(self.dtypes(problem)[0])
        if self.limit is not None and size > self.limit:
            own = f"{self.name}(insist=True)" if self.name in ("weights", "scores") else "a sum over i or j"
            raise ParameterError(
                f"{self!r} of {' × '.join([str(length) for length in shape])}, {size:,} bytes",
                f"{self.limit:,} bytes",
                f'.rows([...]), .heads([...]) or .mean("heads") for less, pooled(64, 64) for a picture, '
                f"sightline.tiles(...) for one tile at a time, or {own}",
            )

    # -- computation --------------------------------------------------------------------------------------------------
    def entries(self, tile: Tile, context: ForwardContext) -> Any:
        """Return f of every pair of a tile, (*batch_shape, H, rows, columns); `hidden` at hidden pairs."""
        if self.is_plain:
            return tile.weights
        xp, problem = context.xp, context.problem
        b, h, rows, columns = problem.positions(xp, tile.rows, tile.columns)
        is_hidden = tile.scores == -math.inf
        scores = xp.where(is_hidden, xp.zeros_like(tile.scores), tile.scores)
        symbols = {"b": b, "h": h, "i": rows, "j": columns, "n": problem.n, "m": problem.m, "s": scores}
        symbols |= {"p": tile.weights, "ln p": scores - tile.lse[..., None]}
        values = evaluate(self.pair_formula, symbols, xp=xp, float_dtype=xp.float64, like=problem.query)
        return self.hide(xp.astype(values, xp.float64), tile.weights, is_hidden)

    def hide(self, values: Any, weights: Any, is_hidden: Any) -> Any:
        """Return the results of `pair_formula` with `hidden` at hidden pairs. If f vanishes, f is 0 where p is 0.

        If a query has a score that is NaN or ∞, its weights are NaN at every pair, and so are the values of f.
        """
        xp = namespace(weights)
        if self.vanishes:
            values = xp.where(weights == 0, xp.zeros_like(values), values)
        return xp.where(is_hidden & ~xp.isnan(weights), xp.full_like(values, self.hidden), values)

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        array, entries = arrays[0], self.entries(tile, context)
        if not self.axes:
            array[..., tile.rows, tile.columns] = context.xp.astype(context.average(entries), array.dtype)
        elif self.finds:
            self._find(arrays, entries, tile, context)
        elif len(self.axes) == 1:
            axis, positions = (-2, tile.columns) if self.axes == "i" else (-1, tile.rows)
            array[..., positions] = self.combine(array[..., positions], self.reduce(entries, axis))
        elif self.cells is None:
            array[...] = self.combine(array, self.reduce(self.reduce(entries, -1), -1))
        else:
            self._add_to_cells(array, entries, tile, context)

    def reduce(self, array: Any, axis: int) -> Any:
        """Return the sum, maximum or minimum along an axis."""
        xp = namespace(array)
        return {"max": xp.max, "min": xp.min}.get(self.how, xp.sum)(array, axis=axis)

    def combine(self, array: Any, more: Any) -> Any:
        """Return the sum, maximum or minimum of two arrays, in the dtype of the first one."""
        xp, more = namespace(array), namespace(array).astype(more, array.dtype)
        return array + more if not self.is_extremum else (xp.maximum if self.how == "max" else xp.minimum)(array, more)

    def _find(self, arrays: list[Any], entries: Any, tile: Tile, context: ForwardContext) -> None:
        """Update the maximum or minimum and its position."""
        xp, (_, _, i, j) = context.xp, context.problem.positions(context.xp, tile.rows, tile.columns)
        axis, kept, reduced = (-2, tile.columns, i) if self.axes == "i" else (-1, tile.rows, j)
        positions = xp.where(tile.scores == -math.inf, -1, reduced)
        value, where = find_extremum(self.how, entries, positions, axis)
        found = xp.astype(value, arrays[0].dtype), where
        joined = join_extrema(self.how, [array[..., kept] for array in arrays], found)
        arrays[0][..., kept], arrays[1][..., kept] = joined

    def _add_to_cells(self, array: Any, entries: Any, tile: Tile, context: ForwardContext) -> None:
        lengths, target = (context.problem.n, context.problem.m), []
        axes = zip((-2, -1), (tile.rows, tile.columns), self.rectangle(*lengths), self.grid(*lengths), strict=True)
        for axis, positions, span, count in axes:
            start, stop = max(positions.start, span[0]), min(positions.stop, span[1])
            if start >= stop:
                return
            inside = slice(start - positions.start, stop - positions.start)
            entries = entries[..., inside, :] if axis == -2 else entries[..., inside]
            segment_ids = cell_of(np.arange(start, stop) - span[0], span[1] - span[0], count)
            entries = self._reduce_segments(entries, segment_ids - segment_ids[0], axis)
            target.append(slice(int(segment_ids[0]), int(segment_ids[-1]) + 1))
        array[(..., *target)] = self.combine(array[(..., *target)], entries)

    def _reduce_segments(self, array: Any, segment_ids: Any, axis: int) -> Any:
        """Return the sum, maximum or minimum of the entries of each segment along an axis, −1 or −2.

        `segment_ids` has the segment of each index of the axis. The ids ascend from 0 without gaps.
        """
        if isinstance(array, np.ndarray):
            starts = np.flatnonzero(np.diff(segment_ids, prepend=-1))
            return {"max": np.maximum, "min": np.minimum}.get(self.how, np.add).reduceat(array, starts, axis=axis)
        if self.is_extremum or framework(array) is not TORCH:
            ends = np.cumsum(np.unique(segment_ids, return_counts=True)[1]).tolist()
            after = [slice(None)] * (-1 - axis)
            segments = [array[(..., slice(*pair), *after)] for pair in itertools.pairwise([0, *ends])]
            return namespace(array).stack([self.reduce(segment, axis) for segment in segments], axis=axis)
        shape = list(array.shape)
        shape[axis] = int(segment_ids[-1]) + 1
        return array.new_zeros(shape).index_add(axis, array.new_tensor(segment_ids).long(), array)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        problem = context.problem
        return [self.divide(arrays[0], problem.n, problem.m)] if self.how == "mean" else arrays

    def divide(self, array: Any, n: int, m: int) -> Any:
        """Return the means from the sums."""
        if self.axes == "i":
            return array / max(n, 1)
        return array / namespace(array).astype(convert(self.cell_sizes(n, m), array), array.dtype)

    def cell_sizes(self, n: int, m: int) -> Any:
        """Return the number of pairs in each cell, a NumPy array (rows, columns)."""
        (down, across), (rows, columns) = self.rectangle(n, m), self.grid(n, m)
        return np.outer(np.diff(cell_edges(*down, rows)), np.diff(cell_edges(*across, columns))).astype(np.float64)

    def merge(self, parts: Sequence[KeyPart], lse: Any) -> list[Any]:
        if self.fused_role == "max_score":
            scores: list[Any] = [part.arrays for part in parts]
            return list(reduce(partial(join_extrema, "max"), scores))
        if self.fused_role == "entropy":  # −Σ P ln P is Σ w (H' − ln w ΣP') of parts with factors w and weights P'
            xp = namespace(lse)
            logarithms = [xp.log(xp.where(part.factor == 0, 1.0, part.factor)) for part in parts]
            shares = [part.arrays[0] - part.total * one for part, one in zip(parts, logarithms, strict=True)]
            return [reduce(add, [weigh(part.factor, share) for part, share in zip(parts, shares, strict=True)])]
        return [reduce(add, [weigh(part.factor, part.arrays[0]) for part in parts])]

    def build_result(self, arrays: Sequence[Any]) -> Any:
        return Extremum(*arrays) if self.finds else arrays[0]

    # -- gradient -----------------------------------------------------------------------------------------------------
    def backward(self, context: BackwardContext) -> StatisticGradients:
        """Return the terms g ∂f/∂p of dP_ij and g ∂f/∂s of dS_ij, where g is the gradient of the result that reads ij.

        If f reads ln p, ∂f/∂ln p counts to ∂f/∂s, and −Σⱼ g ∂f/∂ln p is a term of the gradient of lse.
        """
        if not self.is_differentiable or 0 in (context.problem.n, context.problem.m):
            return StatisticGradients()
        gradient = self._gradient_of_pair(context)
        logarithm = s - context.lookup(context.xp.where(context.lse == -math.inf, 0.0, context.lse), i)
        values = {"ln p": logarithm, "p": apply("exp", logarithm)}
        by_weight, by_log, by_score = self.slopes
        terms = {"weights": by_weight, "scores": by_score if by_log is ZERO else by_score + by_log}
        formulas = {
            name: times_factor(gradient, term.rewrite(values)) for name, term in terms.items() if term is not ZERO
        }
        needs_all = by_log is not ZERO or (by_score is not ZERO and not vanishes_with(by_score, p))
        if self.fused_role == "max_score":
            needs_all = _may_underflow(context, (context.arrays or context.compute(self))[0])
        if by_log is not ZERO:  # ln p = s − lse
            formulas["lse"] = -context.compute(Reduction(times_factor(gradient, by_log), "sum", "j"))
        known_sum = self._known_weights_sum(context) if "weights" in formulas else None
        return StatisticGradients(**formulas, weights_sum=known_sum, includes_zero_weights=needs_all)

    def _known_weights_sum(self, context: BackwardContext) -> Any:
        """Return Σⱼ P ∘ `StatisticGradients.weights` if it follows from the result of the forward pass, else None."""
        if context.arrays and self.degree is not None:
            return context.gradient * context.arrays[0] * self.degree
        if not context.arrays or self.fused_role != "entropy" or context.problem.sinks is not None:
            return None
        return context.gradient * (context.arrays[0] - 1)  # it is gradient · (H − Σⱼ P), and Σⱼ P is 1 without sinks

    def _gradient_of_pair(self, context: BackwardContext) -> Expression:
        """Return the formula of the gradient that a change of f_ij adds to."""
        n, m = context.problem.n, context.problem.m
        if self.is_extremum:
            kept, reduced = (j, i) if self.axes == "i" else (i, j)
            return where(reduced == context.lookup(self._positions(context), kept), context.gradient_at(kept), 0.0)
        if self.axes != "ij":
            index = {"j": (i,), "i": (j,), "": (i, j)}[self.axes]
            share = 1 / max(n, 1) if self.how == "mean" else 1.0
            entry = context.gradient_at(*index)
            return entry if share == 1 else entry * share
        gradient = context.gradient
        if self.how == "mean":
            gradient = self.divide(gradient, n, m)
        if self.cells is None:
            return context.lookup(gradient)
        (i0, i1), (j0, j1) = self.rectangle(n, m)
        rows, columns = self.grid(n, m)
        if 0 in (rows, columns):
            return ZERO
        cell = cell_of(i - i0, i1 - i0, rows), cell_of(j - j0, j1 - j0, columns)
        inside = (i >= i0) & (i < i1) & (j >= j0) & (j < j1)
        return where(inside, context.lookup(gradient, *cell), 0.0)

    def _positions(self, context: BackwardContext) -> Any:
        """Return where each maximum or minimum is; −1 for none."""
        if self.finds:
            return (context.arrays or context.compute(self))[1]
        extremum = context.compute(replace(self, hidden=EXTREMES[self.how]))
        return namespace(extremum.value).where(extremum.value > 0, extremum.where, -1)  # a hidden pair counts as 0

    # -- parameters ---------------------------------------------------------------------------------------------------
    def map_formulas(self, change: Callable[[Any], Any]) -> Reduction:
        return replace(self, formula=change(self.formula))

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        others = [literal_text(getattr(self, field)) for field in self.__match_args__[1:] if field != "name"]
        return [self.name, *others, to_text(self.formula)]


def _may_underflow(context: BackwardContext, largest: Any) -> bool:
    """True if the weight of some query's largest score may have underflowed to 0.

    Without sinks the result is False, because the largest weight of a query is then at least 1/m.
    """
    if context.problem.sinks is None:
        return False
    xp, smallest = namespace(context.lse), math.log(np.finfo(context.problem.accumulator).tiny)
    return bool(xp.any((largest != -math.inf) & (largest - context.lse < smallest)))


def cell_of(position: Any, length: int, cells: int) -> Any:
    """Return the index of the cell that contains the position, which is a number or a formula.

    `length` positions are divided among `cells` cells. Cell r has the positions p with
    ⌊r · length / cells⌋ ≤ p < ⌊(r + 1) · length / cells⌋.
    """
    return ((position + 1) * cells - 1) // length


def cell_edges(first: int, stop: int, cells: int) -> Any:
    """Return the first position of each cell, then `stop`: a NumPy array. The cells divide first ≤ p < stop."""
    return first + np.arange(cells + 1) * (stop - first) // max(cells, 1)


def times_factor(x: Expression, factor: Expression) -> Expression:
    """Return x · f as a formula. A condition f counts as 1 and 0."""
    return where(factor, x, 0.0) if factor.kind == "bool" else x if factor is ONE else x * factor


def refuse_learned(see: Sequence[Statistic], is_learned: Callable[[Table], bool]) -> None:
    """Raise ParameterError if the formula of a statistic needs the gradient of a learned table."""

    def check(formula: Any, statistic: Statistic) -> Any:
        for node in walk(formula) if isinstance(formula, Expression) else ():
            if isinstance(node, Lookup) and is_learned(node.table) and derivative(formula, node) is not ZERO:
                given = f"see=[{statistic!r}], with a table that requires a gradient"
                raise ParameterError(given, "tables without gradients", "t.detach() or jax.lax.stop_gradient(t)")
        return formula

    for statistic in see:
        statistic.map_formulas(partial(check, statistic=statistic))
