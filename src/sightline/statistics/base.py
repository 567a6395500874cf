"""What a statistic is: sizes of its arrays, what a tile of weights adds to them, and its gradient as a formula.

P are the normalised weights before dropout, S the final masked scores in nats, −∞ where hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..arrays import accumulator, dtype_name, namespace, resolve_dtype
from ..formula.expression import SYMBOLS, Expression
from ..formula.tables import Table

if TYPE_CHECKING:
    from ..problem import Problem
    from .selection import Statistic

__all__ = [
    "MAX_RESULT_BYTES",
    "BackwardContext",
    "ForwardContext",
    "StatisticBase",
    "StatisticGradients",
    "Tile",
    "accumulate_statistics",
    "arrays_of",
    "itemsize",
    "statistic_gradients",
]

MAX_RESULT_BYTES = 2 << 30  # bytes of an answer held without insisting
Outer = tuple[int, ...]  # the axes before the queries: (*lead, H), or what averaging leaves of them


@dataclass(frozen=True)
class Tile:
    """Weights of some queries on some keys, (..., H, rows, columns), before dropout.

    Tiles of the same queries come one after another, in the order of their keys; pairs in no tile have no weight.
    """

    rows: slice
    columns: slice
    weights: Any
    scores: Any = None  # the final masked scores, in nats
    lse: Any = None  # (..., H, rows): the normaliser of these queries


@dataclass(frozen=True)
class ForwardContext:
    """What statistics are made from besides the tiles."""

    problem: Problem
    lse: Any  # (*lead, H, n) float64
    outer: Outer

    @property
    def xp(self) -> Any:
        return namespace(self.problem.query)

    def full(self, value: float, shape: tuple[int, ...], dtype: str) -> Any:
        xp = self.xp
        return xp.full(shape, value, dtype=resolve_dtype(xp, dtype), device=self.problem.query.device)


@dataclass(frozen=True)
class BackwardContext:
    """What a statistic's gradient is made from. Formulas made here read b, h, i, j, and s as the final score S."""

    problem: Problem
    lse: Any
    tiles: Callable[[], Iterator[Tile]]
    compute: Callable[[Statistic], Any]  # to another statistic of the problem
    gradient: Any  # of the statistic's first array: the others are whole numbers
    remaining_axes: str = "bh"  # the axes averaging has left of the gradient's

    def lookup(self, array: Any, *index: Expression, remaining_axes: str = "bh") -> Expression:
        """The entry of an array (*lead, H, ...) at b, h and the index."""
        problem, xp = self.problem, namespace(self.problem.query)
        lengths = [problem.B] * ("b" in remaining_axes) + [problem.H] * ("h" in remaining_axes)
        own = array.shape[array.ndim - len(index) :]
        return Table(xp.reshape(array, (*lengths, *own)))[(*(SYMBOLS[name] for name in remaining_axes), *index)]

    def gradient_at(self, *index: Expression) -> Expression:
        """The gradient at b, h and the index."""
        return self.lookup(self.gradient, *index, remaining_axes=self.remaining_axes)


@dataclass(frozen=True)
class StatisticGradients:
    """What gradients of statistics add to those of the weights: `weights` to dP, `scores` to dS itself, `lse` to dlse.

    The first two are formulas of b, h, i, j and s, the final score; they mean something at visible pairs alone.
    """

    weights: Expression | None = None
    scores: Expression | None = None
    lse: Any = None
    includes_zero_weights: bool = False  # `scores` counts at pairs whose weight has become 0 by rounding too


class StatisticBase:
    """Something to be known of the weights: one class of its own, a frozen dataclass of its parameters.

    A subclass says `name`, the `shapes` of its arrays and what a tile adds to them (`add`); the rest where it differs.
    """

    name: ClassVar[str]
    tile_inputs: ClassVar[tuple[str, ...]] = ("weights",)  # of a tile; () needs none
    fill_values: ClassVar[tuple[float, ...]] = (0.0,)  # what the arrays hold where no tile says otherwise
    has_own_problem: bool = False  # answered by a problem of its own, `make_own_problem`
    supports_mean: bool = True  # whether a mean of it over heads or batch means anything
    is_differentiable: bool = True

    @property
    def is_linear(self) -> bool:
        """Whether the mean of it is it of the mean of the tiles."""
        return False

    # -- sizes --------------------------------------------------------------------------------------------------------
    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of its arrays for n queries behind the axes `outer`."""
        raise NotImplementedError(type(self).__name__)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        """Dtypes of its arrays: the accumulator's unless it says otherwise."""
        return (accumulator(dtype_name(problem.query)),)

    def outputs(self, problem: Problem) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(shape, dtype) of each of its arrays."""
        shapes = self.shapes(problem, (*problem.batch_shape, problem.H), problem.n)
        return tuple(zip(shapes, self.dtypes(problem), strict=True))

    def head_axis(self, lead: int) -> int | None:
        """Which axis of its arrays is the heads', where there are that many leading ones."""
        return lead

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        """Raise where its parameters do not fit the problem; shapes and dtypes are known, no array's values."""

    # -- the answer ---------------------------------------------------------------------------------------------------
    def start(self, context: ForwardContext) -> list[Any]:
        """Its arrays before the first tile."""
        problem = context.problem
        shapes = self.shapes(problem, context.outer, problem.n)
        return [context.full(*one) for one in zip(self.fill_values, shapes, self.dtypes(problem), strict=True)]

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        """Put a tile into its arrays."""
        raise NotImplementedError(type(self).__name__)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        """Its arrays after the last tile."""
        return arrays

    def build_result(self, arrays: Sequence[Any]) -> Any:
        """What the user gets: the one array, or a named tuple of several."""
        return arrays[0]

    def backward(self, context: BackwardContext) -> StatisticGradients:
        """Its gradient's share in those of the weights and the scores."""
        return StatisticGradients()

    # -- parameters ---------------------------------------------------------------------------------------------------
    def map_formulas(self, change: Callable[[Any], Any]) -> Self:
        """The same statistic with its formula changed, where it has one."""
        return self

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        """Its name and parameters as words without line breaks or bars; `deserialize` reads them back."""
        own = [getattr(self, field) for field in self.__match_args__]  # type: ignore[attr-defined]
        return [self.name, *[_literal_text(value) for value in own]]

    def __repr__(self) -> str:
        fields = {field: getattr(self, field) for field in self.__match_args__}  # type: ignore[attr-defined]
        defaults = {field: getattr(type(self), field, None) for field in fields}
        shown = [f"{field}={value!r}" for field, value in fields.items() if repr(value) != repr(defaults[field])]
        return f"{self.name}({', '.join(shown)})"


def accumulate_statistics(problem: Problem, lse: Any, tiles: Callable[[], Iterator[Tile]]) -> tuple[Any, ...]:
    """Every statistic of `problem.see`, from the normaliser and at most one pass of the tiles that hold any weight."""
    context = ForwardContext(problem, lse, (*problem.batch_shape, problem.H))
    with np.errstate(all="ignore"):
        accumulated = [(statistic, statistic.start(context)) for statistic in problem.see]
        for tile in tiles() if any(statistic.tile_inputs for statistic in problem.see) else ():
            for statistic, arrays in accumulated:
                if statistic.tile_inputs:
                    statistic.add(arrays, tile, context)
        return tuple(statistic.build_result(statistic.finish(arrays, context)) for statistic, arrays in accumulated)


def statistic_gradients(
    problem: Problem,
    lse: Any,
    tiles: Callable[[], Iterator[Tile]],
    d_seen: Sequence[Any],
    compute: Callable[[Statistic], Any] | None = None,
) -> StatisticGradients:
    """The sum of what the statistics' gradients add; `d_seen` has the gradient of each one's first array, or None.

    `compute` answers another statistic of the problem; from the tiles where it is not given.
    """

    def compute_from_tiles(statistic: Statistic) -> Any:
        return accumulate_statistics(problem.with_statistics(statistic), lse, tiles)[0]

    gradients = [
        statistic.backward(BackwardContext(problem, lse, tiles, compute or compute_from_tiles, gradient))
        for statistic, gradient in zip(problem.see, d_seen, strict=False)
        if gradient is not None
    ]

    def sum_present(parts: list[Any]) -> Any:
        present = [one for one in parts if one is not None]
        return reduce(lambda x, y: x + y, present) if present else None

    return StatisticGradients(
        sum_present([one.weights for one in gradients]),
        sum_present([one.scores for one in gradients]),
        sum_present([one.lse for one in gradients]),
        any(one.includes_zero_weights for one in gradients),
    )


def arrays_of(result: Any) -> tuple[Any, ...]:
    """The arrays of what `build_result` made."""
    return tuple(result) if isinstance(result, tuple) else (result,)


def itemsize(dtype: str) -> int:
    """Bytes of one number."""
    return {"float16": 2, "bfloat16": 2, "float32": 4}.get(dtype, 8)


def _literal_text(value: Any) -> str:
    """A parameter as Python writes it. `repr` of a tuple is closed to torch.compile."""
    if isinstance(value, tuple):
        return "(" + "".join([_literal_text(entry) + "," for entry in value]) + ")"
    return repr(value)
