"""The base class of statistics. It defines their arrays, the update by a tile of weights, and the gradient formula.

P are the normalised weights before dropout. S are the final masked scores in nats, −∞ where hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Never, Self

import numpy as np

from ..arrays.operations import accumulator, dtype_name, namespace, resolve_dtype
from ..errors import FormulaError, ParameterError
from ..formula.expression import SYMBOLS, Expression, as_expression, specialize
from ..formula.tables import Table

if TYPE_CHECKING:
    from ..call.problem import Problem
    from .statistic import Statistic

MAX_RESULT_BYTES = 2 << 30  # the default limit of one statistic's result
Outer = tuple[int, ...]  # lengths of the axes before the queries: (*batch_shape, H) without those averaged over


@dataclass(frozen=True)
class Tile:
    """The weights of some queries (`rows`) on some keys (`columns`), before dropout, of shape (..., H, rows, columns).

    Tiles of the same queries follow one another in the order of their keys. Pairs that are in no tile have weight 0.
    """

    rows: slice
    columns: slice
    weights: Any
    scores: Any = None  # the final masked scores, in nats
    lse: Any = None  # (..., H, rows): the lse of these queries


class Extremum(NamedTuple):
    """A largest or smallest number (`value`), and the position j or i of the first pair that has it (`where`)."""

    value: Any
    where: Any

    @property
    def score(self) -> Any:
        """The number, for `max_score`."""
        return self.value


class KeyPart(NamedTuple):
    """A statistic over some of the keys, and the factor by which a merge multiplies the weights of these keys."""

    arrays: Sequence[Any]  # the statistic's arrays over these keys
    total: Any  # (..., H, n): the sum of the weights of these keys, before they are multiplied
    factor: Any  # (..., H, n)


@dataclass(frozen=True)
class ForwardContext:
    """The inputs from which a statistic is computed, besides the tiles. `outer` are the lengths of the leading axes."""

    problem: Problem
    lse: Any  # (*batch_shape, H, n) float64
    outer: Outer

    @property
    def xp(self) -> Any:
        return namespace(self.problem.query)

    def full(self, value: float, shape: tuple[int, ...], dtype: str) -> Any:
        xp = self.xp
        return xp.full(shape, value, dtype=resolve_dtype(xp, dtype), device=self.problem.query.device)


@dataclass(frozen=True)
class BackwardContext:
    """The inputs of `StatisticBase.backward`. Its methods make formulas of b, h, i, j and s; s is the final score."""

    problem: Problem
    lse: Any
    compute: Any  # function that returns the result of another statistic of the problem; see `statistic_gradients`
    gradient: Any  # the gradient of the statistic's first array; its other arrays are integers without gradients
    remaining_axes: str = "bh"  # the leading axes of `gradient`: "bh" without the axes that are averaged over
    arrays: Sequence[Any] = ()  # the statistic's arrays from the forward pass; () if they were not saved

    @property
    def xp(self) -> Any:
        return namespace(self.problem.query)

    @property
    def finite_lse(self) -> Any:
        """lse, with 0 in place of −∞."""
        return self.xp.where(self.lse == -np.inf, self.xp.zeros_like(self.lse), self.lse)

    def lookup(self, array: Any, *index: Expression, remaining_axes: str = "bh") -> Expression:
        """Return the formula that reads an array (*batch_shape, H, ...) at b, h and the index.

        `remaining_axes` says whether the array has the batch axes and the head axis: "bh", "b", "h" or "".
        """
        problem, xp = self.problem, namespace(self.problem.query)
        lengths = [problem.B] * ("b" in remaining_axes) + [problem.H] * ("h" in remaining_axes)
        own = array.shape[array.ndim - len(index) :]
        if not remaining_axes and not index:  # one number
            return Table(xp.reshape(array, (1,)))[as_expression(0)]
        return Table(xp.reshape(array, (*lengths, *own)))[(*(SYMBOLS[name] for name in remaining_axes), *index)]

    def gradient_at(self, *index: Expression) -> Expression:
        """Return the formula that reads the gradient at b, h and the index."""
        return self.lookup(self.gradient, *index, remaining_axes=self.remaining_axes)


@dataclass(frozen=True)
class StatisticGradients:
    """The terms that the statistics' gradients add: `weights` to dP, `scores` to dS, `lse` to d_lse.

    `weights` and `scores` are formulas of b, h, i, j and s, the final score. They are valid at visible pairs only. A
    term is None if the statistics add nothing. `weights_sum` is Σⱼ P ∘ weights of every query, None if it is not known.
    """

    weights: Expression | None = None
    scores: Expression | None = None
    lse: Any = None
    weights_sum: Any = None
    includes_zero_weights: bool = False  # True if `scores` must also be added at pairs whose weight underflowed to 0

    @property
    def needs_weights_sum(self) -> bool:
        """True if `weights_sum` must be computed."""
        return self.weights is not None and self.weights_sum is None

    @property
    def formulas(self) -> dict[str, Expression]:
        """A dict of `weights` and `scores`, without those that are None."""
        named = {"weights": self.weights, "scores": self.scores}
        return {name: formula for name, formula in named.items() if formula is not None}

    def multiply(self, factor: Any, factors: Any) -> StatisticGradients:
        """Return the terms times a number per head: `factor` is this number as a formula of h, `factors` as (H, 1)."""
        formulas = {name: formula * factor for name, formula in self.formulas.items()}
        arrays = {name: getattr(self, name) for name in ("lse", "weights_sum")}
        products = {name: array * factors for name, array in arrays.items() if array is not None}
        return replace(self, **formulas, **products)

    def add_to_d_lse(self, d_lse: Any) -> Any:
        """Return d_lse + lse − weights_sum. A term that is None is left out; the result is None if all three are None.

        dP includes `weights`, so δ = rowsum(P ∘ dP) − d_lse must include `weights_sum`. The last term adds it.
        """
        terms = [term for term in (d_lse, self.lse) if term is not None]
        if self.weights_sum is not None:
            terms.append(-self.weights_sum)
        return reduce(add, terms) if terms else None


class StatisticBase:
    """The base class of every statistic. A statistic is a frozen dataclass of its parameters.

    A subclass defines `name`, the `shapes` of its arrays and their update by a tile (`add`). It overrides another
    method only if the default does not fit.
    """

    name: str
    axes: str = "j"  # the axes of a pair that are reduced: "j", "i", "ij" or ""
    reads_tiles: bool = True  # False if the statistic follows from lse alone
    fill_values: ClassVar[tuple[float, ...]] = (0.0,)  # the number that each array is filled with at first
    has_own_problem: bool = False  # True if a separate call of attention computes it, on `make_own_problem`
    is_mergeable: ClassVar[bool] = False  # True if `merge` computes it from its results over disjoint sets of keys
    fused_role: ClassVar[str | None] = None  # what a forward kernel computes for it; see `Reduction.fused_role`
    is_differentiable: bool = True
    backward_reads_arrays: bool = False  # True if `backward` uses the statistic's arrays from the forward pass
    backward_computes: bool = False  # True if `backward` calls `BackwardContext.compute` whatever arrays are saved

    @property
    def is_linear(self) -> bool:
        """True if the statistic sums its `entries`, so that a mean over heads or batch may average these."""
        return False

    # -- sizes --------------------------------------------------------------------------------------------------------
    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays: by default (*outer, n) for each array, that is one number per query."""
        return ((*outer, n),) * len(self.fill_values)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        """Return the dtypes of the arrays: by default the accumulator's dtype, and int64 for a second array."""
        return (accumulator(dtype_name(problem.query)), "int64")[: len(self.fill_values)]

    def outputs(self, problem: Problem) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Return (shape, dtype) of each array of the statistic, for the whole problem."""
        shapes = self.shapes(problem, (*problem.batch_shape, problem.H), problem.n)
        return tuple(zip(shapes, self.dtypes(problem), strict=True))

    def head_axis(self, batch_ndim: int) -> int | None:
        """Return the index of the arrays' head axis, with `batch_ndim` batch axes; None if there is no head axis."""
        return batch_ndim

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        """Raise if the statistic does not fit the problem. The check reads shapes and dtypes, not entries of arrays."""

    # -- computation --------------------------------------------------------------------------------------------------
    def start(self, context: ForwardContext) -> list[Any]:
        """Return the arrays before the first tile."""
        problem = context.problem
        shapes = self.shapes(problem, context.outer, problem.n)
        return [context.full(*array) for array in zip(self.fill_values, shapes, self.dtypes(problem), strict=True)]

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        """Add a tile to the arrays, in place."""
        raise NotImplementedError(type(self).__name__)

    def entries(self, tile: Tile, context: ForwardContext) -> Any:
        """Return the number of every pair of a tile that a linear statistic sums, (*batch_shape, H, rows, columns)."""
        raise NotImplementedError(type(self).__name__)

    def add_entries(self, arrays: list[Any], entries: Any, tile: Tile, context: ForwardContext) -> None:
        """Add `entries` of a tile, or their mean over some of the leading axes, to the arrays, in place."""
        raise NotImplementedError(type(self).__name__)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        """Return the final arrays; called after the last tile."""
        return arrays

    def merge(self, parts: Sequence[KeyPart], lse: Any) -> list[Any]:
        """Return the statistic's arrays over the keys of all parts; `lse` is the lse over these keys.

        The key positions in the arrays of a part count from the start of the whole sequence.
        """
        raise NotImplementedError(type(self).__name__)

    def build_result(self, arrays: Sequence[Any]) -> Any:
        """Return the user's result: the only array, or a named tuple of several arrays."""
        return arrays[0]

    def backward(self, context: BackwardContext) -> StatisticGradients:
        """Return the terms that the statistic's gradient adds to the gradients of weights, scores and lse."""
        return StatisticGradients()

    # -- parameters ---------------------------------------------------------------------------------------------------
    def map_formulas(self, change: Callable[[Any], Any]) -> Self:
        """Return the statistic with `change` applied to its formula; the statistic itself if it has no formula."""
        return self

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        """Return name and parameters as tokens, which `deserialize` reads. No token has a line break or a "|"."""
        own = [getattr(self, field) for field in self.__match_args__]  # type: ignore[attr-defined]
        return [self.name, *[literal_text(value) for value in own]]

    def _refuse_arithmetic(self, other: Any = None) -> Any:
        raise ParameterError(f"arithmetic with {self!r}", "a request, without numbers", "compute with its results")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __pow__ = __neg__ = _refuse_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = __rtruediv__ = _refuse_arithmetic

    def to_expression(self) -> Never:
        """Raise FormulaError: a formula reads the result of an earlier call, not a request."""
        raise FormulaError(
            f"{self!r} inside a formula",
            "p, s, positions, numbers and tables",
            f"make a first call with see=[{self!r}], then read its result: table(result)[b, h, i] for a number of each "
            "query, [b, h, j] for one of each key",
        )

    def format_over(self, axes: str) -> str | None:
        """Return the text of the sum of this statistic over `axes`, such as "hj"; None if it has another form."""
        return None

    def __repr__(self) -> str:
        fields = {field: getattr(self, field) for field in self.__match_args__}  # type: ignore[attr-defined]
        defaults = {field: getattr(type(self), field, None) for field in fields}
        shown = [f"{field}={value!r}" for field, value in fields.items() if repr(value) != repr(defaults[field])]
        return f"{self.name}({', '.join(shown)})"


def accumulate_statistics(problem: Problem, lse: Any, tiles: Callable[[], Iterator[Tile]]) -> tuple[Any, ...]:
    """Return every statistic of `problem.see`, from lse and at most one pass over the tiles.

    The tiles must include every pair whose weight is not 0.
    """
    context = ForwardContext(problem, lse, (*problem.batch_shape, problem.H))
    with np.errstate(all="ignore"):
        accumulated = [(statistic, statistic.start(context)) for statistic in problem.see]
        for tile in tiles() if any(statistic.reads_tiles for statistic in problem.see) else ():
            for statistic, arrays in accumulated:
                if statistic.reads_tiles:
                    statistic.add(arrays, tile, context)
        return tuple(statistic.build_result(statistic.finish(arrays, context)) for statistic, arrays in accumulated)


def statistic_gradients(
    problem: Problem,
    lse: Any,
    d_seen: Sequence[Any],
    saved: Sequence[Sequence[Any]] = (),
    compute: Callable[[Statistic], Any] | None = None,
) -> StatisticGradients:
    """Return the sum of the terms that the statistics' gradients add to dP, dS and d_lse.

    `d_seen` holds, for each statistic, the gradient of the first array of its result; None if that array has no
    gradient. `saved` holds each statistic's arrays from the forward pass, () for arrays that were not saved.
    `compute(statistic)` returns the result of another statistic of the problem; None if no statistic needs one, see
    `StatisticBase.backward_computes`.
    """
    requested = zip(problem.see, d_seen, saved or [()] * len(d_seen), strict=False)
    gradients = [
        statistic.backward(BackwardContext(problem, lse, compute, gradient, arrays=arrays))
        for statistic, gradient, arrays in requested
        if gradient is not None
    ]

    def sum_present(field: str) -> Any:
        terms = [getattr(terms_of_statistic, field) for terms_of_statistic in gradients]
        present = [term for term in terms if term is not None]
        return reduce(add, present) if present else None

    sums = [
        terms_of_statistic.weights_sum for terms_of_statistic in gradients if terms_of_statistic.weights is not None
    ]
    return StatisticGradients(
        weights=sum_present("weights"),
        scores=sum_present("scores"),
        lse=sum_present("lse"),
        weights_sum=reduce(add, sums) if sums and all(known is not None for known in sums) else None,
        includes_zero_weights=any(terms_of_statistic.includes_zero_weights for terms_of_statistic in gradients),
    )


def weigh(factor: Any, array: Any) -> Any:
    """Return factor · array. A factor of 0 gives 0, even if the array has NaN or ∞."""
    return factor * namespace(array).where(factor == 0, 0.0, array)


def arrays_of(result: Any) -> tuple[Any, ...]:
    """Return the arrays of a result of `build_result`."""
    return tuple(result) if isinstance(result, tuple) else (result,)


def literal_text(value: Any) -> str:
    """Return a parameter as a Python literal; torch.compile cannot trace `repr` of a tuple."""
    if isinstance(value, tuple):
        return "(" + "".join([literal_text(entry) + "," for entry in value]) + ")"
    if value in (math.inf, -math.inf):
        return "1e999" if value > 0 else "-1e999"  # `ast.literal_eval` reads no "inf"
    return repr(specialize(value))


def format_axes(axes: str) -> str:
    """Return axes such as "hj" as text: "(h, j)", or "j" for one axis."""
    return axes if len(axes) == 1 else f"({', '.join(axes)})"
