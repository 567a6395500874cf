"""The public function `attention_vjp`: attention on NumPy arrays, and the function that computes its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial, reduce
from operator import add
from typing import Any

import numpy as np

from ..arrays.caching import cached_property
from ..arrays.operations import checksum, to_numpy
from ..call import call_cache
from ..call.backward_calls import BackwardInputs, BackwardPasses, read_inputs
from ..call.call_cache import EntryResult, Operands
from ..call.kernel import GivenGradients, Gradients
from ..call.problem import NUM_OPERANDS, OPERANDS, Options, Problem, parse, validate
from ..call.request import Request, describe
from ..call.spec import flatten_result, split_arrays
from ..call.validation import read_score, split_names
from ..errors import ChangedArrayError, DtypeError, ParameterError, ShapeError
from ..formula.expression import Expression
from ..formula.from_function import refuse_draws
from ..formula.tables import Table
from ..statistics import Statistic, arrays_of, average_results, places_in, spread_gradients
from ..statistics.reduction import refuse_learned
from .kernels import differentiate, make_plan, solve, to_caller
from .tangent import INPUTS, check_numpy, find_uses, include_scale, read_floats

MAX_WHOLE_BYTES, NUM_SAMPLES = 4096, 64

Input = str | Table
Vjp = Callable[..., dict[Input, Any]]


def attention_vjp(
    query: Any,
    key: Any,
    value: Any,
    *,
    wrt: Sequence[str | Table] = OPERANDS,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Statistic | Sequence[Statistic] | dict[str, Statistic] | None = None,
    kernel: str | None = None,
    threads: int | None = None,
) -> tuple[Any, Any, Vjp]:
    """Return (output, seen, vjp): attention on NumPy arrays, and the function that computes its gradients.

    `vjp` is the vector-Jacobian product, or backward pass. With P = softmax(S), S the final scores, dO the gradient of
    the output and δ = rowsum(dO ∘ O), the gradients are

        dV = Pᵀ dO,    dS = P ∘ (dO Vᵀ − δ),    dQ = scale · dS K,    dK = scale · dSᵀ Q.

    The memory is O(n). For torch tensors use `loss.backward()` after `attention`, for JAX arrays `jax.grad`.

    Parameters
    ----------
    query, key, value, mask, score, scale, sinks, dropout, seed, see, kernel, threads
        As in `attention`; query, key and value are NumPy arrays.
    wrt : sequence of inputs, default ("query", "key", "value")
        The inputs whose gradients `vjp` returns: names among "query", "key", "value", "sinks" and "scale", and `Table`s
        of floats that the score reads.

    Returns
    -------
    output : (..., H, n, d_v)
    seen : tuple, or dict if `see` is a dict
        The result of each statistic; () without `see`.
    vjp : function (d_output=None, d_seen=None) → dict
        `d_output` has the shape of the output. `d_seen` is a sequence, or a dict with the names of `see`: for each
        statistic the gradient of its result, or of the first array of its result. None stands for a gradient of 0. The
        result maps each input of `wrt` to its gradient, which has the input's shape and dtype. The gradient of "scale"
        is a float. `vjp` may be called more than once. It reads the arrays and the results of the call, so do not
        change these arrays before the last call of `vjp`.

    Raises
    ------
    ParameterError
        `wrt` names an unknown input, an input that is not given, or a table that the score does not read. `vjp` raises
        this error if `d_seen` has a gradient of a statistic that cannot be differentiated.
    ShapeError, DtypeError
        A gradient has another shape than its result, or holds no floats. Query, key or value is not a NumPy array.
    ChangedArrayError
        `vjp` was called after an array of the call had changed. Of large queries, keys, values and results, a few
        entries are compared, so a change of other entries is not found.
    SightlineError
        The errors of `attention`.

    References
    ----------
    Dao et al., "FlashAttention", 2022, appendix B.2 (the gradients with O(n) memory). Griewank and Walther, "Evaluating
    Derivatives", 2008, chapter 3 (reverse mode).

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(2)
    >>> output, seen, vjp = sightline.attention_vjp(x, x, x, see=[sightline.entropy()])
    >>> vjp(np.ones((2, 2)))["value"].round(2)  # the columns of the weights sum to 1 here
    array([[1., 1.],
           [1., 1.]])
    >>> vjp(d_seen=[np.ones(2)])["query"].round(2)  # the gradient of the sum of the entropies
    array([[-0.11,  0.11],
           [ 0.11, -0.11]])
    """
    check_numpy("attention_vjp", query)
    for name, array in (("key", key), ("value", value)):
        if not isinstance(array, np.ndarray):
            kind = type(array).__name__
            raise DtypeError(f"attention_vjp of a {name} that is a {kind}", "NumPy arrays", "numpy.asarray(array)")
    names, statistics = split_names(see)
    statistics = list(statistics or ())
    formula, scale_table = read_score(score), None
    if isinstance(wrt, str | Table | Expression) or not isinstance(wrt, Iterable):
        raise ParameterError(f"wrt is {wrt!r}", "a list of names and tables", _suggest_wrt(wrt))
    wrt = [*wrt]
    if any(isinstance(name, str) and name == "scale" for name in wrt):
        formula, scale, scale_table = include_scale(query, formula, scale)
    tables = _read_wrt(wrt, {"query": query, "key": key, "value": value, "sinks": sinks}, formula, scale_table)
    refuse_learned(statistics, lambda table: bool(tables.keys() & {table, table.source}))
    options = Options(mask, formula, statistics or None, scale, sinks, dropout, seed, kernel, threads)
    call = _Call((query, key, value), options, [table for uses in tables.values() for table in uses])
    if call.result is None:
        refuse_draws(mask, score)
    results = zip(call.see, call.computed, strict=True)
    arrays = [array for one, result in results if one.backward_reads_arrays for array in arrays_of(result)]
    read, others = [query, key, value, call.output, *arrays], [sinks, *call.table_arrays]
    versions = [*map(_sample, read), *map(_version, others)]

    def vjp(d_output: Any = None, d_seen: Any = None) -> dict[Input, Any]:
        if d_output is None and d_seen is None:
            allowed = "d_output, the gradient of the output, d_seen, or both"
            raise ParameterError("vjp without a gradient", allowed, "vjp(numpy.ones_like(output))")
        if [*map(_sample, read), *map(_version, others)] != versions:
            given = "an array of the call, or of its results, was changed in place before vjp was called"
            allowed = "arrays with the entries of the call"
            raise ChangedArrayError(given, allowed, "copy the array before the call, or change it after vjp")
        d_statistics = _read_gradients(d_seen, names, call.statistics, call.seen)
        gradients = call.differentiate(_read_gradient("output", d_output, call.output), d_statistics)
        for name, uses in tables.items():
            gradients[name] = sum(gradients[id(table)] for table in uses)
        by_input = {name: gradients[name] for name in wrt}
        return by_input | ({"scale": float(by_input["scale"][0])} if "scale" in by_input else {})

    return call.output, tuple(call.seen) if names is None else dict(zip(names, call.seen, strict=True)), vjp


class _Passes(BackwardPasses):
    """The backward passes of a cached call, and the hook of its forward pass."""

    def __call__(self, *cached: Any) -> Any:
        """Return these passes, and then entry, request, operands and result of a cached call as the answer."""
        return self, *cached


class _Call:
    """One call: its arguments, the results of its forward pass, and its backward pass.

    output, seen : as in `attention`
    see, computed : `Statistic.computed` of the statistics, and its results
    result : the result of the call cache; None if the cache had no answer
    request : the request of the call; None if the call cannot be cached
    saved : output and lse with the head axis, as the backward pass reads them
    inputs : the operands, the sinks and the seed, as `read_inputs` reads them
    arrays : the arrays of `see` in the order of `flatten_result`
    table_arrays : the arrays that the formulas read
    """

    def __init__(self, operands: Operands, options: Options, tables: list[Table]) -> None:
        self.operands, self.options, self.statistics, self.tables = operands, options, options.see or [], tables
        self.result: EntryResult | None = None
        self.arrays: Sequence[Any]
        answer, self.request = self.look_up()
        if answer is not None:
            self.passes, entry, request, _, self.result = answer
            self.request, (self.output, lse, self.arrays, _, seed) = request, self.result
            self.see, self.computed = request.see, entry.build_seen((self.output, lse, *self.arrays))
            sinks = None if request.sinks is None else to_numpy(request.sinks)
            self.saved, self.table_arrays = (self.output, lse), [*request.tables]
        else:
            problem = self.problem
            result = solve(problem)
            self.see = problem.see
            self.output, self.computed = to_caller(problem, result, self.see)
            output, lse, *self.arrays = flatten_result(problem.see, result)
            self.saved, sinks, seed = (output, lse), problem.sinks, problem.seed
            self.table_arrays = [table.array for table in problem.tables]
            if self.request is not None:
                call_cache.FirstCall(self.request, self.formulas, operands, problem, result, self.passes).store()
        self.inputs = operands, sinks, seed
        has_heads = operands[0].ndim > 3
        self.axes = self.output.ndim - 2 - has_heads, has_heads  # the number of batch axes, and whether heads follow
        self.seen = average_results(self.statistics, self.computed, *self.axes) if self.statistics else ()

    def look_up(self) -> tuple[Any, Request | None]:
        """Return (answer of the call cache, None). If there is no answer, return (None, request to store the call by).

        The result is (None, None) if the call cannot be cached.
        """
        query = self.operands[0]
        shapes = [getattr(x, "shape", ())[:-3] for x in self.operands]
        if min(map(np.ndim, self.operands)) < 4 or shapes[0] != shapes[1] or shapes[0] != shapes[2]:
            return None, None
        request = describe(query, self.options)
        if request is None:
            return None, None
        score_tables = () if request.score is None else request.score.tables
        places = tuple([[x.origin for x in score_tables].index(table.origin) for table in self.tables])
        request = request._replace(structure=request.structure._replace(wanted_tables=places))
        return call_cache.answer(request, self.operands)

    @cached_property
    def formulas(self) -> tuple[Expression | None, ...]:
        """The mask, the score and the formulas of the statistics; () if the call cannot be cached."""
        return () if self.request is None else self.request.formulas()

    @cached_property
    def problem(self) -> Problem:
        """The checked problem."""
        options = self.options
        if self.formulas:
            mask, score, *_ = self.formulas
            options = options.replace(mask=mask, score=score)
        return validate(parse(*self.operands, options))

    @cached_property
    def passes(self) -> _Passes:
        """The backward passes: those of the cached call, or new ones."""
        problem = self.problem
        slot_of = {problem.tables[slot].origin: slot for slot in problem.score_table_indices}
        slots = [slot_of[table.origin] for table in self.tables]
        return _Passes.of(problem, self.formulas[:2], slots, problem.sinks is not None)

    def differentiate(self, d_output: Any, d_seen: list[Any]) -> dict[Any, Any]:
        """Return the gradients of query, key, value and sinks by name, and of each table by its id."""
        d_seen = spread_gradients(self.statistics, d_seen, self.computed, *self.axes) if self.statistics else d_seen
        d_output = np.zeros_like(self.output) if d_output is None else d_output
        passes, inputs = self.passes, self.read_inputs(d_output, d_seen)
        gradients = passes.differentiate(inputs, partial(self.dispatch, passes.slots, d_output, d_seen))
        named: dict[Any, Any] = dict(zip(OPERANDS, gradients, strict=False))
        for table, d_table in zip(self.tables, gradients[NUM_OPERANDS:], strict=False):
            named[id(table)] = _sum_to(d_table, table.array)
        if passes.wants_sinks:
            named["sinks"] = gradients[-1]
        return named

    def read_inputs(self, d_output: Any, d_seen: list[Any]) -> BackwardInputs | None:
        """Return the inputs of a backward pass that the cache may repeat; None if only the full dispatch can do it."""
        if self.request is None or self.result is None or self.result.is_lse_imprecise:
            return None
        return read_inputs(self.request, self.passes.problem, self.join_gradients(d_output, d_seen), *self.inputs)

    def join_gradients(self, d_output: Any, d_seen: Sequence[Any]) -> GivenGradients:
        """Return the gradients of all results. Those of `lse()` are added to the gradient of lse."""
        of_lse = [d for d, x in zip(d_seen, self.see, strict=True) if d is not None and not x.num_arrays]
        others = [d if x.num_arrays else None for d, x in zip(d_seen, self.see, strict=True)]
        d_lse = reduce(add, of_lse) if of_lse else None
        arrays = split_arrays(self.see, self.arrays, 0)
        return GivenGradients(d_output, d_lse, self.saved, d_seen=others, arrays=arrays)

    def dispatch(
        self, slots: Sequence[int], d_output: Any, d_seen: list[Any]
    ) -> tuple[Gradients, Sequence[Expression | None]]:
        """Compute the gradients without the call cache. Return (gradients, (mask, score) of the call)."""
        problem = self.problem
        if problem.heads_squeezed:
            d_output = d_output[..., None, :, :]
            d_seen = [_add_head_axis(d, x, problem) for d, x in zip(d_seen, self.see, strict=True)]
        given = self.join_gradients(d_output, d_seen)._replace(wanted_tables=slots)
        gradients = differentiate(problem, make_plan(problem), given)
        for statistic, d in zip(self.see, d_seen, strict=True):
            if statistic.has_own_problem and d is not None:
                gradients = self.add_own_problem(problem, gradients, statistic, d, slots)
        d_operands = zip((gradients.query, gradients.key, gradients.value), self.operands, strict=True)
        query, key, value = (_sum_to(problem.squeeze_heads(d, 2), array) for d, array in d_operands)
        return replace(gradients, query=query, key=key, value=value), self.formulas[:2]

    def add_own_problem(
        self, problem: Problem, gradients: Gradients, statistic: Statistic, d: Any, slots: Sequence[int]
    ) -> Gradients:
        """Return `gradients` plus those of a statistic that a second problem computes; d is its gradient."""
        own_problem = statistic.make_own_problem(problem)
        result = solve(own_problem)
        d_own = np.zeros_like(result.output)
        if not own_problem.see:  # the statistic is the output of its own problem
            d_own[...] = d
        slot_of = {own_problem.tables[slot].origin: slot for slot in own_problem.score_table_indices}
        own_slots = [slot_of[problem.tables[slot].origin] for slot in slots]
        d_seen = (d,) if own_problem.see else ()
        given = GivenGradients(d_own, None, (result.output, result.lse), own_slots, d_seen=d_seen)
        added = differentiate(own_problem, make_plan(own_problem), given)
        rows, heads, key_heads = (np.array(places, np.int64) for places in places_in(problem, statistic))
        tables = list(gradients.tables)
        for slot, own_slot in zip(slots, own_slots, strict=True):
            tables[slot] = tables[slot] + added.tables[own_slot]
        query = _add_at(gradients.query, (..., heads[:, None], rows, slice(None)), added.query)
        key = _add_at(gradients.key, (..., key_heads, slice(None), slice(None)), added.key)
        sinks = None if gradients.sinks is None else _add_at(gradients.sinks, heads, added.sinks)
        return replace(gradients, query=query, key=key, tables=tuple(tables), sinks=sinks)


def _read_wrt(
    wrt: Any, inputs: Mapping[str, Any], score: Expression | None, scale_table: Table | None
) -> dict[Input, list[Table]]:
    """Return, for each table and "scale" in `wrt`, the tables that the score reads of it.

    An input without gradient is a ParameterError.
    """
    tables: dict[Input, list[Table]] = {}
    for name in wrt:
        if isinstance(name, Table) and (uses := find_uses(name, score)):
            tables[name] = uses
        elif isinstance(name, str) and name == "scale" and scale_table is not None:
            tables[name] = [scale_table]
        elif not isinstance(name, str) or inputs.get(name) is None:
            raise ParameterError(f"wrt has {name!r}", INPUTS, _suggest_wrt(name))
    return tables


def _suggest_wrt(entry: Any) -> str:
    """Return the cure for an entry of `wrt`, or for a `wrt` that is no list."""
    if isinstance(entry, Table):
        return "wrt=[t] with a table t of floats that the score reads; masks have no gradients"
    if isinstance(entry, Expression) or hasattr(entry, "shape"):
        return "t = sightline.table(array), then t in the score, relative_bias(t) for example, and wrt=[t]"
    return 'wrt=["query", "key", "value"]'


def _read_gradients(d_seen: Any, names: Sequence[str] | None, see: Sequence[Statistic], seen: Any) -> list[Any]:
    """Return for each statistic the gradient of its first array, where None stands for 0."""
    if d_seen is None:
        return [None] * len(see)
    if isinstance(d_seen, Mapping):
        unknown = [name for name in d_seen if names is None or name not in names]
        allowed = "a sequence" if names is None else f"the names {list(names)}"
        if unknown:
            raise ParameterError(f"d_seen names {unknown}", f"{allowed}, as in `see`", "leave the other names out")
        d_seen = [d_seen.get(name) for name in names or ()]
    if not hasattr(d_seen, "__len__"):
        raise ParameterError(f"d_seen={d_seen!r}", "a sequence, or a dict with the names of `see`", "d_seen=[gradient]")
    if len(d_seen) != len(see):
        allowed = f"{len(see)}, one for each statistic of `see`"
        raise ParameterError(f"{len(d_seen)} gradients in d_seen", allowed, "None for a statistic without gradient")
    gradients = []
    for statistic, d, result in zip(see, d_seen, seen, strict=True):
        if d is not None and not statistic.is_differentiable:
            raise ParameterError(f"a gradient of {statistic}", "statistics with gradients", "None in its place")
        gradients.append(_read_gradient(repr(statistic), d, arrays_of(result)[0]))
    return gradients


def _read_gradient(name: str, gradient: Any, result: Any) -> Any:
    """Return the gradient of a result as an array of its dtype, or raise the error of a wrong shape or dtype."""
    if gradient is None:
        return None
    array = read_floats("gradient", name, gradient)
    if array.shape != result.shape:
        given, allowed = f"a gradient of {name} of shape {array.shape}", f"the shape of the result, {result.shape}"
        raise ShapeError(given, allowed, "numpy.broadcast_to(gradient, result.shape)")
    return np.asarray(array, result.dtype, order="C")


def _version(array: Any) -> Any:
    """Return a value that changes if the array is written to."""
    return None if array is None else checksum(to_numpy(array))


def _sample(array: Any) -> bytes:
    """Return the bytes of a small array, or of a few entries of a large one. To read all would slow a short call."""
    entries = array if array.nbytes <= MAX_WHOLE_BYTES else array.flat[_places(array.size)]
    return bytes(entries.tobytes())


@lru_cache(64)
def _places(size: int) -> Any:
    """Return the indices of `NUM_SAMPLES` entries of a large array, from the first to the last."""
    return np.linspace(0, size - 1, NUM_SAMPLES).astype(np.int64)


def _add_head_axis(gradient: Any, statistic: Statistic, problem: Problem) -> Any:
    """Return a statistic's gradient with a head axis, for a call on arrays without heads; None for None."""
    axis = statistic.head_axis(len(problem.batch_shape))
    return gradient if gradient is None or axis is None else np.expand_dims(gradient, axis)


def _add_at(array: Any, places: Any, terms: Any) -> Any:
    """Return the array plus terms at places, which may repeat."""
    total = np.array(array, np.result_type(array, np.float32))
    np.add.at(total, places, terms)
    return total.astype(array.dtype)


def _sum_to(gradient: Any, array: Any) -> Any:
    """Return the gradient summed over the axes along which the array was broadcast, in the array's shape and dtype."""
    gradient, array = to_numpy(gradient), to_numpy(array)  # a table may hold a tensor
    lead = gradient.ndim - array.ndim
    total = gradient.sum(tuple(range(lead))) if lead else gradient
    axes = tuple([axis for axis, length in enumerate(array.shape) if length == 1 and total.shape[axis] != 1])
    total = total.sum(axes, keepdims=True) if axes else total
    return total.astype(array.dtype, copy=False).reshape(array.shape)
