"""What a statistic is: sizes of its arrays, what a tile of weights adds to them, and its gradient as a formula.

P are the normalised weights before dropout, S the final masked scores in nats, −∞ where hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..arrays import accumulator, dtype_name, namespace, resolve
from ..formula.expression import SYMBOLS, Expression
from ..formula.tables import Table

if TYPE_CHECKING:
    from ..problem import Problem
    from .selection import Statistic

__all__ = ["LARGEST", "Back", "Pass", "Slopes", "StatisticBase", "Tile", "arrays_of", "collect", "slopes", "width_of"]

LARGEST = 2 << 30  # bytes of an answer held without insisting
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
class Pass:
    """What statistics are made from besides the tiles."""

    problem: Problem
    lse: Any  # (*lead, H, n) float64
    outer: Outer

    @property
    def xp(self) -> Any:
        return namespace(self.problem.query)

    def full(self, value: float, shape: tuple[int, ...], dtype: str) -> Any:
        xp = self.xp
        return xp.full(shape, value, dtype=resolve(xp, dtype), device=self.problem.query.device)


@dataclass(frozen=True)
class Back:
    """What a statistic's gradient is made from. Formulas made here read b, h, i, j, and s as the final score S."""

    problem: Problem
    lse: Any
    tiles: Callable[[], Iterator[Tile]]
    answer: Callable[[Statistic], Any]  # to another statistic of the problem
    gradient: Any  # of the statistic's first array: the others are whole numbers
    kept: str = "bh"  # the axes averaging has left of the gradient's

    def read(self, array: Any, *index: Expression, kept: str = "bh") -> Expression:
        """The entry of an array (*lead, H, ...) at b, h and the index."""
        problem, xp = self.problem, namespace(self.problem.query)
        lengths = [problem.B] * ("b" in kept) + [problem.H] * ("h" in kept)
        own = array.shape[array.ndim - len(index) :]
        return Table(xp.reshape(array, (*lengths, *own)))[(*(SYMBOLS[name] for name in kept), *index)]

    def slope(self, *index: Expression) -> Expression:
        """The gradient at b, h and the index."""
        return self.read(self.gradient, *index, kept=self.kept)


@dataclass(frozen=True)
class Slopes:
    """What gradients of statistics add to those of the weights: `weights` to dP, `scores` to dS itself, `lse` to dlse.

    The first two are formulas of b, h, i, j and s, the final score; they mean something at visible pairs alone.
    """

    weights: Expression | None = None
    scores: Expression | None = None
    lse: Any = None
    everywhere: bool = False  # `scores` counts at pairs whose weight has become 0 by rounding too


class StatisticBase:
    """Something to be known of the weights: one class of its own, a frozen dataclass of its parameters.

    A subclass says `name`, the `shapes` of its arrays and what a tile adds to them (`add`); the rest where it differs.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ("weights",)  # of a tile; () needs none
    fills: ClassVar[tuple[float, ...]] = (0.0,)  # what the arrays hold where no tile says otherwise
    apart: bool = False  # answered by a problem of its own, `posed`
    averages: bool = True  # whether a mean of it over heads or batch means anything
    differentiable: bool = True

    @property
    def linear(self) -> bool:
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
        shapes = self.shapes(problem, (*problem.lead, problem.H), problem.n)
        return tuple(zip(shapes, self.dtypes(problem), strict=True))

    def head_axis(self, lead: int) -> int | None:
        """Which axis of its arrays is the heads', where there are that many leading ones."""
        return lead

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        """Raise where its parameters do not fit the problem; shapes and dtypes are known, no array's values."""

    # -- the answer ---------------------------------------------------------------------------------------------------
    def start(self, over: Pass) -> list[Any]:
        """Its arrays before the first tile."""
        problem = over.problem
        shapes = self.shapes(problem, over.outer, problem.n)
        return [over.full(*one) for one in zip(self.fills, shapes, self.dtypes(problem), strict=True)]

    def add(self, arrays: list[Any], tile: Tile, over: Pass) -> None:
        """Put a tile into its arrays."""
        raise NotImplementedError(type(self).__name__)

    def finish(self, arrays: list[Any], over: Pass) -> list[Any]:
        """Its arrays after the last tile."""
        return arrays

    def joined(self, arrays: Sequence[Any]) -> Any:
        """What the user gets: the one array, or a named tuple of several."""
        return arrays[0]

    def slopes(self, back: Back) -> Slopes:
        """Its gradient's share in those of the weights and the scores."""
        return Slopes()

    # -- parameters ---------------------------------------------------------------------------------------------------
    def mapped(self, change: Callable[[Any], Any]) -> Self:
        """The same statistic with its formula changed, where it has one."""
        return self

    def words(self, spell: Callable[[Expression], str]) -> list[str]:
        """Its name and parameters as words without line breaks or bars; `from_words` reads them back."""
        own = [getattr(self, field) for field in self.__match_args__]  # type: ignore[attr-defined]
        return [self.name, *[_word(value) for value in own]]

    def __repr__(self) -> str:
        fields = {field: getattr(self, field) for field in self.__match_args__}  # type: ignore[attr-defined]
        usual = {field: getattr(type(self), field, None) for field in fields}
        said = [f"{field}={value!r}" for field, value in fields.items() if repr(value) != repr(usual[field])]
        return f"{self.name}({', '.join(said)})"


def collect(problem: Problem, lse: Any, tiles: Callable[[], Iterator[Tile]]) -> tuple[Any, ...]:
    """Every statistic of `problem.see`, from the normaliser and at most one pass of the tiles that hold any weight."""
    over = Pass(problem, lse, (*problem.lead, problem.H))
    with np.errstate(all="ignore"):
        gathered = [(statistic, statistic.start(over)) for statistic in problem.see]
        for tile in tiles() if any(statistic.reads for statistic in problem.see) else ():
            for statistic, arrays in gathered:
                if statistic.reads:
                    statistic.add(arrays, tile, over)
        return tuple(statistic.joined(statistic.finish(arrays, over)) for statistic, arrays in gathered)


def slopes(
    problem: Problem,
    lse: Any,
    tiles: Callable[[], Iterator[Tile]],
    d_seen: Sequence[Any],
    answer: Callable[[Statistic], Any] | None = None,
) -> Slopes:
    """The sum of what the statistics' gradients add; `d_seen` has the gradient of each one's first array, or None.

    `answer` answers another statistic of the problem; from the tiles where it is not given.
    """

    def collected(statistic: Statistic) -> Any:
        return collect(problem.asking(statistic), lse, tiles)[0]

    found = [
        statistic.slopes(Back(problem, lse, tiles, answer or collected, gradient))
        for statistic, gradient in zip(problem.see, d_seen, strict=False)
        if gradient is not None
    ]

    def total(parts: list[Any]) -> Any:
        kept = [part for part in parts if part is not None]
        return reduce(lambda x, y: x + y, kept) if kept else None

    return Slopes(
        total([one.weights for one in found]),
        total([one.scores for one in found]),
        total([one.lse for one in found]),
        any(one.everywhere for one in found),
    )


def arrays_of(answer: Any) -> tuple[Any, ...]:
    """The arrays of what `joined` made."""
    return tuple(answer) if isinstance(answer, tuple) else (answer,)


def width_of(dtype: str) -> int:
    """Bytes of one number."""
    return {"float16": 2, "bfloat16": 2, "float32": 4}.get(dtype, 8)


def _word(value: Any) -> str:
    """A parameter as Python writes it. `repr` of a tuple is closed to torch.compile."""
    if isinstance(value, tuple):
        return "(" + "".join([_word(entry) + "," for entry in value]) + ")"
    return repr(value)
