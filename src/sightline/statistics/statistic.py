"""The class `Statistic`; statistics made from others: of some queries or heads, sums or means over heads, layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Never, Self

import numpy as np

from ..arrays.caching import cached_property
from ..arrays.operations import accumulator, convert, dtype_name, namespace
from ..errors import FormulaError, ParameterError
from ..formula.expression import SYMBOLS, Expression
from ..formula.tables import Table
from .contexts import BackwardContext, ForwardContext, KeyPart, Outer, StatisticGradients, Tile, literal_text
from .head_factors import HeadFactors, check_factors, format_factors, multiply_heads, parse_factors
from .restriction import (
    AxisIndices,
    contiguous_span,
    format_indices,
    index_array,
    parse_indices,
    resolve_heads,
    resolve_indices,
    restrict,
)

if TYPE_CHECKING:
    from ..call.kernel import Result
    from ..call.problem import Problem


class Statistic:
    """A statistic with methods that restrict it to some queries and heads, or sum or average it over an axis.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.array([0, 1, 2], np.float32).reshape(1, 3, 1, 1)  # 3 heads, with lse 0, 1 and 4
    >>> lse = sightline.lse()
    >>> see = [lse.heads([2, 0]), lse.mean("heads"), lse.sum("heads", weights=[0, -1, 1])]
    >>> _, (some, mean, difference) = sightline.attention(x, x, x, see=see)
    >>> some.ravel(), mean.round(2), difference
    (array([4., 0.], dtype=float32), array([[1.67]], dtype=float32), array([[3.]], dtype=float32))
    """

    # A subclass is a frozen dataclass of its parameters, with a `name`, the `shapes` of its arrays and their update by
    # a tile (`add`). It overrides another member only if the default does not fit.
    name: str
    axes: str = "j"  # the axes of a pair that are reduced: "j", "i", "ij" or ""
    k: int = 0  # the number of largest weights that are listed for each query; 0 if none are listed
    finds: bool = False  # True if the last array has positions, −1 for none
    fill_values: ClassVar[tuple[float, ...]] = (0.0,)  # the number that each array is filled with at first
    has_own_problem: bool = False  # True if a separate call of attention computes it, on `make_own_problem`
    fused_role: ClassVar[str | None] = None  # what a forward kernel computes for it; see `Reduction.fused_role`
    is_differentiable: bool = True
    backward_reads_arrays: bool = False  # True if `backward` uses the statistic's arrays from the forward pass
    backward_computes: bool = False  # True if `backward` calls `BackwardContext.compute` whatever arrays are saved
    is_mean: bool = False  # True for a `Mean`, whose fields are the next three
    over_heads: bool = False
    over_batch: bool = False
    factors: HeadFactors = None

    def rows(self, indices: Any) -> Statistic:
        """Return the statistic restricted to these queries. Only these queries are computed.

        Parameters
        ----------
        indices : whole numbers or a slice
            The positions of the queries, in the order of the result; a negative one counts from the last query. In
            formulas, i stays the position of the query among all queries.

        Raises
        ------
        ParameterError
            indices are neither whole numbers nor a slice, or rows are already selected. Also raised by attention if an
            index is out of range.

        Examples
        --------
        >>> import numpy as np, sightline
        >>> x, mask = np.zeros((4, 1), np.float32), sightline.causal()  # tokens with equal scores
        >>> see = [sightline.weights().rows([1, -1])]
        >>> _, (rows,) = sightline.attention(x, x, x, mask=mask, see=see)
        >>> rows  # queries 1 and 3
        array([[0.5 , 0.5 , 0.  , 0.  ],
               [0.25, 0.25, 0.25, 0.25]], dtype=float32)
        """
        return _select(self, rows=indices)

    def heads(self, indices: Any) -> Statistic:
        """Return the statistic restricted to these query heads. Indices and errors are like those of `rows`."""
        return _select(self, heads=indices)

    def mean(self, axis: str, weights: Any = None) -> Statistic:
        """Return the statistic X averaged over the heads, the batch, or the calls of a watch.

        The mean over heads is Σ_h w_h X_h / Σ_h w_h, as in `numpy.average`; without `weights` every w_h is 1. Of
        `weights()` and `scores()` only the mean is stored: n × m numbers for each batch entry, not H × n × m.

        Parameters
        ----------
        axis : {"heads", "batch", "layers"}
            The axis that is removed: (..., H, n) becomes (..., n) or (H, n). "batch" means all leading axes together.
            "layers" means all calls that a `watch` records. Their results are added while the model runs, so that one
            result is stored instead of one for each call.
        weights : H numbers, or (layers, H) numbers in a watch, optional
            The weight w_h of each head, for the axis "heads" only, as a list or an array that requires no gradient. In
            a watch, row l of a matrix belongs to layer l in the model's order. Each row is divided by its own sum.

        Raises
        ------
        ParameterError
            axis is another word, the axis was removed before, the statistic returns key positions, which have no mean,
            or weights are not finite numbers or have the sum 0. Also raised by attention if there are not as many
            weights as heads, or if axis is "layers" and no watch records the call.
        """
        return _reduce(self, "mean", axis, weights)

    def sum(self, axis: str, weights: Any = None) -> Statistic:
        """Return the sum Σ_h w_h X_h of the statistic X over the heads, or its sum over the batch or a watch's calls.

        The parameters and errors are those of `mean`, but weights whose sum is 0 are allowed.
        """
        return _reduce(self, "sum", axis, weights)

    # -- sizes --------------------------------------------------------------------------------------------------------
    @cached_property
    def num_arrays(self) -> int:
        """The number of arrays that the statistic adds to the output and the lse of a call; 0 for the lse itself.

        The lse follows from the forward pass. Other statistics read tiles of weights.
        """
        return len(self.fill_values)

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

    def select_sizes(self, problem: Problem, outer: Outer, n: int) -> tuple[Outer, int]:
        """Return (outer, n) of the queries and heads of which the statistic is computed: by default all."""
        return outer, n

    # -- computation --------------------------------------------------------------------------------------------------
    def start(self, context: ForwardContext) -> list[Any]:
        """Return the arrays before the first tile."""
        problem = context.problem
        shapes = self.shapes(problem, context.outer, problem.n)
        return [context.full(*array) for array in zip(self.fill_values, shapes, self.dtypes(problem), strict=True)]

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        """Add a tile to the arrays, in place. A matrix has `context.average` of the tile's entries."""
        raise NotImplementedError(type(self).__name__)

    def finish(self, arrays: list[Any], context: ForwardContext) -> list[Any]:
        """Return the final arrays; called after the last tile."""
        return arrays

    @property
    def computed(self) -> Statistic:
        """The statistic that kernels compute; `average_results` makes the result of this one from its result."""
        return self

    @property
    def unaveraged(self) -> Statistic:
        """The statistic that a `Mean` averages; any other statistic itself."""
        return self

    @property
    def is_mergeable(self) -> bool:
        """True if `merge` computes the statistic from its results over disjoint sets of keys."""
        return self.fused_role is not None

    def merge(self, parts: Sequence[KeyPart], lse: Any) -> list[Any]:
        """Return the statistic's arrays over the keys of all parts; `lse` is the lse over these keys.

        The key positions in the arrays of a part count from the start of the whole sequence.
        """
        raise NotImplementedError(type(self).__name__)

    def summed_axes(self, problem: Problem) -> tuple[int, int]:
        """Return (number of batches, number of heads) that are added for each entry of the result."""
        return (problem.B if self.over_batch else 1), (problem.H if self.over_heads else 1)

    def average(self, array: Any, batch_ndim: int, has_heads: bool = True, first: int = 0) -> Any:
        """Return the mean of an array (..., *batch_shape, H, ...), whose batch axes begin with the axis `first`.

        Unless `has_heads`, the array has no axis H. The array of a statistic that is no mean is returned unchanged.
        """
        return array

    def spread(self, gradient: Any, shape: tuple[int, ...], batch_ndim: int, has_heads: bool, first: int = 0) -> Any:
        """Return the gradient of an array of this shape from the gradient of `average(array, ...)`."""
        return gradient

    def make_own_problem(self, problem: Problem) -> Problem:
        """Return a problem with this statistic alone; `extract_result` reads the result of that problem."""
        return problem.with_statistics(self)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        """Return this statistic from the result of its own problem."""
        return result.seen[0]

    def build_result(self, arrays: Sequence[Any]) -> Any:
        """Return the user's result: the only array, or a named tuple of several arrays."""
        return arrays[0]

    def backward(self, context: BackwardContext) -> StatisticGradients:
        """Return the terms that the statistic's gradient adds to the gradients of weights, scores and lse."""
        return StatisticGradients()

    # -- parameters ---------------------------------------------------------------------------------------------------
    @property
    def parameters(self) -> list[Any]:
        """The values of the parameters, in the order in which the constructor takes them."""
        return [getattr(self, field) for field in self.__match_args__]  # type: ignore[attr-defined]

    @cached_property
    def cache_key(self) -> tuple[Any, ...] | None:
        """The class and the parameters without the formula. None if no call with this statistic is cached."""
        return (type(self), *self.parameters) if self.fused_role or self.k else None  # k is that of `top_k`

    def map_formulas(self, change: Callable[[Any], Any]) -> Self:
        """Return the statistic with `change` applied to its formula; the statistic itself if it has no formula."""
        return self

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        """Return name and parameters as tokens, which `deserialize` reads. No token has a line break or a "|"."""
        return [self.name, *map(literal_text, self.parameters)]

    def _refuse_arithmetic(self, *_: Any, **__: Any) -> Any:
        raise ParameterError(f"arithmetic with {self!r}", "a request, without numbers", "compute with its results")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __pow__ = __neg__ = _refuse_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = __rtruediv__ = __array_ufunc__ = __array_function__ = _refuse_arithmetic

    def to_expression(self) -> Never:
        """Raise FormulaError: a formula reads the result of an earlier call, not a request."""
        code = repr(self) if repr(self).isascii() else "statistic"  # signs such as · are no code
        raise FormulaError(
            f"{self!r} inside a formula",
            "p, s, positions, numbers and tables",
            f"make a first call with see=[{code}], then read its result: table(result)[b, h, i] for a number of each "
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


def _read_of(name: str) -> Any:
    """Return the property that has the value of this attribute of `of`."""
    return property(lambda self: getattr(self.of, name))


@dataclass(frozen=True, eq=False, repr=False)
class Derived(Statistic):
    """A statistic that is made from another one, `of`."""

    of: Statistic

    axes, is_differentiable, dtypes, build_result, select_sizes = map(
        _read_of, ("axes", "is_differentiable", "dtypes", "build_result", "select_sizes")
    )

    def map_formulas(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, of=self.of.map_formulas(change))


@dataclass(frozen=True, eq=False, repr=False)
class Selection(Derived):
    """A statistic of some queries and heads. It is computed from a problem that has only these queries and heads."""

    queries: AxisIndices | None = None
    query_heads: AxisIndices | None = None

    name = "selection"
    has_own_problem = True
    finds, fill_values, head_axis = map(_read_of, ("finds", "fill_values", "head_axis"))

    def __repr__(self) -> str:
        shown = [
            f".{name}({format_indices(indices)})"
            for name, indices in (("rows", self.queries), ("heads", self.query_heads))
            if indices is not None
        ]
        return f"{self.of!r}{''.join(shown)}"

    def select_sizes(self, problem: Problem, outer: Outer, n: int) -> tuple[Outer, int]:
        if self.query_heads is not None:
            outer = (*outer[:-1], len(resolve_indices("heads", self.query_heads, problem.H)))
        if self.queries is not None:
            span = contiguous_span(self.queries, n)
            n = len(resolve_indices("rows", self.queries, n)) if span is None else span[1] - span[0]
        return outer, n

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, *self.select_sizes(problem, outer, n))

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        if problem.heads_squeezed and self.query_heads is not None:
            raise ParameterError(f"{self!r} of arrays without heads", "arrays (..., H, n, d)", "omit .heads(...)")
        self.of.check(problem, *self.select_sizes(problem, outer, n))

    def make_own_problem(self, problem: Problem) -> Problem:
        return restrict(self.of.make_own_problem(problem), self.queries, self.query_heads)

    def extract_result(self, result: Result, problem: Problem) -> Any:
        found = self.of.extract_result(result, problem)
        if self.queries is None or not (self.finds and self.axes == "i"):
            return found
        return found.at_positions(index_array(self.queries, problem.n, problem.query))


@dataclass(frozen=True, eq=False, repr=False)
class Mean(Derived):
    """A statistic averaged over the heads, the batch or both.

    If `of` has an entry for each pair, kernels average these entries, so that the matrices of all heads are not stored.
    For any other statistic kernels compute `of`, and `average_results` takes the mean of its array.

    `factors` are the numbers by which the heads are multiplied before they are added: one for each head, one row of
    numbers for each layer of a watch, or 1.0 for all. None stands for 1/H. `sums_batch` asks for the sum over the
    batch in place of the mean.
    """

    over_heads: bool = False
    over_batch: bool = False
    factors: HeadFactors = None
    sums_batch: bool = False

    name = "mean"
    is_mean = True

    def __repr__(self) -> str:
        sums = "b" * (self.over_batch and self.sums_batch) + "h" * (self.over_heads and self.factors == 1.0)
        if len(sums) == self.over_batch + self.over_heads and (text := self.of.format_over(sums + self.of.axes)):
            return text
        heads = '.mean("heads")' if self.factors is None else f'.sum("heads"{format_factors(self.factors)})'
        batch = '.sum("batch")' if self.sums_batch else '.mean("batch")'
        return repr(self.of) + heads * self.over_heads + batch * self.over_batch

    def remaining_outer(self, outer: Outer) -> Outer:
        """Return the lengths of the axes (*batch_shape, H) that averaging leaves."""
        return (() if self.over_batch else outer[:-1]) + (() if self.over_heads else outer[-1:])

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(problem, self.remaining_outer(outer), n)

    def head_axis(self, batch_ndim: int) -> int | None:
        return None if self.over_heads else 0 if self.over_batch else batch_ndim

    unaveraged = property(lambda self: self.of)

    @property
    def computed(self) -> Statistic:
        return self.of if self.axes else self

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        self.of.check(problem, outer if self.axes else self.remaining_outer(outer), n)
        check_factors(self.factors, self.select_sizes(problem, outer, n)[0][-1])

    def _average_entries(self, context: ForwardContext) -> ForwardContext:
        """Return the context in which `of` is computed from averaged entries."""
        average = partial(self.average, batch_ndim=len(context.problem.batch_shape))
        return replace(context, outer=self.remaining_outer(context.outer), average=average)

    def start(self, context: ForwardContext) -> list[Any]:
        (array,), axes = self.of.start(self._average_entries(context)), len(context.problem.batch_shape)
        entries = context.full(self.of.fill_values[0], context.outer, self.dtypes(context.problem)[0])
        return [namespace(array).zeros_like(array) + self.average(entries, axes)[..., None, None]]

    def add(self, arrays: list[Any], tile: Tile, context: ForwardContext) -> None:
        self.of.add(arrays, tile, self._average_entries(context))

    def average(self, array: Any, batch_ndim: int, has_heads: bool = True, first: int = 0) -> Any:
        axes, count = self._reduced_axes(array.shape, batch_ndim, has_heads, first)
        array = multiply_heads(array, first + batch_ndim, self.factors)
        total = namespace(array).sum(array, axis=axes, dtype=array.dtype) if axes else array
        return total / max(count, 1) if count is not None else total

    def spread(self, gradient: Any, shape: tuple[int, ...], batch_ndim: int, has_heads: bool, first: int = 0) -> Any:
        xp, (axes, count) = namespace(gradient), self._reduced_axes(shape, batch_ndim, has_heads, first)
        kept = [1 if axis in axes else length for axis, length in enumerate(shape)]
        share = xp.broadcast_to(xp.reshape(gradient / max(count or 1, 1), kept), shape)
        return multiply_heads(share, first + batch_ndim, self.factors)

    def _reduced_axes(
        self, shape: tuple[int, ...], batch_ndim: int, has_heads: bool, first: int
    ) -> tuple[tuple[int, ...], Any]:
        """Return the axes that are summed over, and the number by which the sum is divided; None for a sum."""
        head_axis = first + batch_ndim
        batch, heads = (*range(first, head_axis),) * self.over_batch, (head_axis,) * (self.over_heads and has_heads)
        averaged = batch * (not self.sums_batch) + heads * (self.factors is None)
        return batch + heads, math.prod([shape[axis] for axis in averaged]) if averaged else None

    def divisor(self, problem: Problem) -> int:
        """Return the divisor of the sum over heads and batch; the `factors` of heads contain theirs."""
        batches, heads = self.summed_axes(problem)
        return max((1 if self.sums_batch else batches) * (heads if self.factors is None else 1), 1)

    def backward(self, context: BackwardContext) -> StatisticGradients:
        gradient = context.gradient / self.divisor(context.problem)
        remaining_axes = "b" * (not self.over_batch) + "h" * (not self.over_heads)
        gradients = self.of.backward(replace(context, gradient=gradient, remaining_axes=remaining_axes, arrays=()))
        if not isinstance(self.factors, tuple):
            return gradients
        factors = context.xp.astype(convert(np.asarray(self.factors), context.lse), context.lse.dtype)
        return gradients.multiply(Table(factors)[SYMBOLS["h"]], factors[:, None])

    def serialize(self, to_text: Callable[[Expression], str]) -> list[str]:
        flags = repr(self.over_heads), repr(self.over_batch), literal_text(self.factors), repr(self.sums_batch)
        return [self.name, *flags, *self.of.serialize(to_text)]


@dataclass(frozen=True, eq=False, repr=False)
class OverLayers(Derived):
    """The sum or mean of a statistic over the calls that a watch records; see `Statistic.mean`.

    A watch requests `of` for each call. `recording.Total` adds the results.
    """

    how: str

    name = "over_layers"
    has_own_problem = True

    def __repr__(self) -> str:
        return f'{self.of!r}.{self.how}("layers")'

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        raise ParameterError(
            f"{self!r} of one call of attention",
            "sums and means over layers in a watch, which sees all layers",
            f'request it in `watch(model, see=...)`, or leave out .{self.how}("layers")',
        )


def _select(of: Statistic, rows: Any = None, heads: Any = None) -> Statistic:
    """Return the statistic restricted to these queries or heads, and to those that were selected earlier."""
    if isinstance(of, OverLayers) or of.computed is not of:
        assert isinstance(of, Derived)
        return replace(of, of=_select(of.of, rows, heads))
    queries = None if rows is None else parse_indices("rows", rows)
    query_heads = None if heads is None else parse_indices("heads", heads)
    if not isinstance(of, Selection):
        return Selection(of, queries, query_heads)
    for name, old, new in (("rows", of.queries, queries), ("heads", of.query_heads, query_heads)):
        if old is not None and new is not None:
            raise ParameterError(
                f"{of}.{name}({format_indices(new)})", f"{name} selected once", f"select all {name} in one call"
            )
    queries = of.queries if queries is None else queries
    return Selection(of.of, queries, of.query_heads if query_heads is None else query_heads)


def _reduce(of: Statistic, how: str, axis: Any, weights: Any) -> Statistic:
    """Return the sum or mean of a statistic over an axis.

    Sums over layers come last. Means come after selections, except those that kernels compute; see `Mean`.
    """
    if axis not in ("heads", "batch", "layers"):
        cure = f'weights().{how}("heads"), or sightline.sum(formula, over=(i, j)) for queries and keys'
        raise ParameterError(f"{how}({axis!r})", '"heads", "batch" or "layers"', cure)
    if isinstance(of, OverLayers) and axis == "layers":
        raise ParameterError(f'a sum or mean over "layers" of {of!r}', "one sum or mean over layers", "leave one out")
    if isinstance(of, OverLayers) or (isinstance(of, Selection) and axis != "layers" and not of.axes):
        return replace(of, of=_reduce(of.of, how, axis, weights))
    if of.finds:
        given = f"{of}.{how}({axis!r}), which finds positions"
        raise ParameterError(given, "statistics without positions", "average its arrays yourself")
    if weights is not None and axis != "heads":
        raise ParameterError(f"{how}({axis!r}, weights=...)", 'weights for "heads"', f'{how}("heads", weights=...)')
    if axis == "layers":
        return OverLayers(of, how)
    mean = of if isinstance(of, Mean) else Mean(of)
    if axis == "batch":
        if mean.over_batch and (how == "sum") != mean.sums_batch:
            raise ParameterError(f'{of}.{how}("batch")', "one sum or mean over the batch", "leave one out")
        return replace(mean, over_batch=True, sums_batch=how == "sum")
    factors = parse_factors(how, weights)
    if mean.over_heads and (factors, mean.factors) != (None, None):
        raise ParameterError(f'{of}.{how}("heads")', "one sum or mean over heads", "leave one out")
    return replace(mean, over_heads=True, factors=factors)


def average_results(see: Sequence[Statistic], seen: Sequence[Any], batch_ndim: int, has_heads: bool) -> tuple[Any, ...]:
    """Return the results of the statistics from those of `Statistic.computed`.

    The arrays are (*batch_shape, H, ...), or (*batch_shape, ...) unless `has_heads`.
    """
    pairs = zip(see, seen, strict=True)
    return tuple([x if one.computed is one else one.average(x, batch_ndim, has_heads) for one, x in pairs])


def spread_gradients(
    see: Sequence[Statistic], gradients: Sequence[Any], seen: Sequence[Any], batch_ndim: int, has_heads: bool
) -> list[Any]:
    """Return the gradients of `seen` from those of `average_results(see, seen, batch_ndim, has_heads)`; None is 0."""
    return [
        d if d is None or one.computed is one else one.spread(d, x.shape, batch_ndim, has_heads)
        for one, d, x in zip(see, gradients, seen, strict=True)
    ]


def solve_selections_separately(problem: Problem, run: Callable[[Problem], Result]) -> Result:
    """Return the result of `run` for the problem. Each statistic with its own problem needs a further call of `run`."""
    together = [statistic for statistic in problem.see if not statistic.has_own_problem]
    if len(together) == len(problem.see):
        return run(problem)
    result = run(replace(problem, see=tuple(together)))
    rest = iter(result.seen)
    seen = [
        one.extract_result(run(one.make_own_problem(problem)), problem) if one.has_own_problem else next(rest)
        for one in problem.see
    ]
    return replace(result, seen=tuple(seen))


def places_in(problem: Problem, statistic: Statistic) -> tuple[list[int], list[int], list[int]]:
    """Return the indices in `problem` of the queries, query heads and key heads of the statistic's own problem."""
    queries, heads = (statistic.queries, statistic.query_heads) if isinstance(statistic, Selection) else (None, None)
    rows, heads = (slice(None) if indices is None else indices for indices in (queries, heads))
    return resolve_indices("rows", rows, problem.n), *resolve_heads(problem, heads)
