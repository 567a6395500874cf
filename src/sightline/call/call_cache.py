"""A cache of attention calls: a call with the layouts and the structure of an earlier call goes straight to its kernel.

    attention(q, k, v, mask=j < table(lengths)[b])  →  Request  →  ForwardEntry  →  kernel

`request` computes the structure of a call: its options, and its formulas without numbers and tables. `answer` looks the
call up by `CallLookup.find_or_run`, and runs it. `cpu.launch.prepared_call` decides how a call is repeated. Calls that
differ only in lengths and strides form a family, such as the steps of a decoding loop. A call of a known family is
bound for its lengths without the full dispatch, which has all checks, the choice of a kernel and its planning.

A repeated call takes from an earlier call what follows from the key: the kernel, the values of its bound arguments
(lengths, strides, offsets of batches), and the checks of shapes, dtypes and options. The key has the type, dtype, shape
and strides of every array of the call, tables, masks and sinks included, the structure of the formulas and the options.
A repeated call reads or computes anew:

- the addresses of all arrays, and a conversion of each table that the kernel cannot read as it is (`insert` has checked
  that the kernel reads the caller's own query, key and value, and `BoundCall.prepare` the layout of each table);
- numbers of formulas, seed, sinks, and the environment variable SIGHTLINE_CPU;
- tile ranges, and the checks that indices stay inside their tables and that whole numbers are not too large, if they
  depend on entries of tables or on numbers.

Calls of a family have different lengths, so `CallFamily.bind` repeats each check that depends on lengths. A backward
pass takes output and lse from its forward pass, so the entries of all tables must be the same in both passes:
`sightline.torch.autograd` compares counts of writes to tensors, and checksums of NumPy arrays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.operations import NUMPY, Framework, has_heads_in_rows
from ..caching import cached_property
from ..formula.expression import Expression
from ..formula.parameters import structure_of
from ..statistics import Statistic, lse, unwrap_mean
from ..statistics.dispatch import FusedStatistics, is_in_weights_pass
from .kernel import Result
from .lookup import LOOKUP, store_call
from .problem import NUM_OPERANDS, OPERANDS, Problem
from .request import Request, family_key, make_tuple, without_key_length

if TYPE_CHECKING:
    from ..cpu.launch.bound_call import BoundCall
    from ..cpu.launch.prepared_call import PreparedCall
    from ..cpu.launch.weights_pass import StatisticsPass

Operands = tuple[Any, Any, Any]  # query, key and value

calls: OrderedDict[Any, Any] = OrderedDict()  # the calls that were met, by key; the least recently used is the first
families: OrderedDict[Any, Any] = OrderedDict()  # one of these calls for each family


def clear() -> None:
    """Forget all calls."""
    calls.clear()
    families.clear()


def answer(request: Request, operands: Operands, threads: int | None) -> tuple[Any, Request | None]:
    """Return (the answer, None) for a call that the cache repeats, else (None, request with all its fields).

    The answer is (output, seen), or what the hook of the entry returns; see `Entry`. The result is (None, None) if only
    the full dispatch can read the arrays.
    """
    arrays = request.tables if request.sinks is None else request.arrays  # the property takes time
    found = LOOKUP.find_or_run(calls, request.structure, request.numbers, *operands, *arrays)
    if type(found) is not tuple:
        return (None if found is None else (found, ())), None
    entry, results, layouts, *addresses = found
    if results is not None and entry.returns_results:
        return (results[0], results[1:]), None
    request = make_tuple(Request, *request[:-2], layouts, tuple(addresses))
    if entry is None:
        entry = _find_any_key_length(request, operands) or _bind_family(request, operands)
    else:
        _mark_as_used(calls, request.key)
    if entry is not None and not LOOKUP.is_generated:
        LOOKUP.generate()
    if results is not None:
        result = entry.finish(request, operands, results, threads)
    else:
        result = None if entry is None else entry.run(request, operands, threads)
    return (None, request) if result is None else (result, None)


def _find_any_key_length(request: Request, operands: Operands) -> ForwardEntry | None:
    """Return an entry that was stored without its number of keys (see `without_key_length`); None if no entry fits.

    A copy of the entry is stored under the key of the request, because the layers of a model make the same call one
    after another. The copy has the same launch records.
    """
    entry = _lookup(calls, without_key_length(request.key))
    if entry is not None:
        entry = replace(entry, prepared=entry.prepared.copy(operands[1].shape[-2]))
        store_call(calls, request.key, entry)
    return entry


def _lookup(entries: OrderedDict[Any, Any], key: tuple[Any, ...]) -> ForwardEntry | None:
    entry: ForwardEntry | None = entries.get(key)
    if entry is not None:
        _mark_as_used(entries, key)
    return entry


def _mark_as_used(entries: OrderedDict[Any, Any], key: tuple[Any, ...]) -> None:
    try:  # noqa: SIM105 (`contextlib.suppress` takes eight times as long)
        entries.move_to_end(key)
    except KeyError:  # another thread has just dropped the entry
        pass


def _bind_family(request: Request, operands: Operands) -> ForwardEntry | None:
    """Return a new entry for a request whose call family is known from a call with other lengths, and store the entry.

    Return None if the family is unknown, or if the arrays do not fit it.
    """
    shared_key = family_key(request.key)
    member = None if shared_key is None else _lookup(families, shared_key)
    family = None if member is None else member.prepared.call.family
    if member is None or family is None:
        return None
    tables = [request.tables[table] for table in member.prepared.tables]
    bound_call = family.bind(*operands, tables)
    if bound_call is None:
        return None
    query, key, _ = operands
    makers = member.make_makers((*query.shape[:-1], family.spec.d_v), has_heads_in_rows(query))
    prepared = member.prepared.rebind(bound_call, makers, key.shape[-2])
    entry = replace(member, prepared=prepared, hook=copy(member.hook))
    store_call(calls, _cache_key(request, bound_call), entry)
    return entry


def _cache_key(request: Request, bound_call: BoundCall) -> tuple[Any, ...]:
    """Return the key under which a call is stored: without its number of keys if the call serves every number."""
    return without_key_length(request.key) if bound_call.has_dynamic_key_length else request.key


class EntryResult(NamedTuple):
    """The arrays that a cached call computed.

    arrays : the arrays of every statistic except lse, in the order of `ForwardEntry.statistics`; for a mean, the arrays
        before they are averaged
    is_lse_imprecise : True if an lse is NaN, ∞ or too large for exact weights (`imprecise_lse_flag` of the kernel)
    seed : the seed of dropout
    """

    output: Any
    lse: Any
    arrays: Sequence[Any]
    is_lse_imprecise: bool
    seed: int


class CachedStatistic(NamedTuple):
    """A statistic of a cached call.

    statistic : the statistic without its formula; for a mean, the statistic that is averaged
    outputs : places of the statistic's arrays among the forward kernel's outputs; empty if a weights pass computes it
    mean : the mean or sum over heads or batch, whose `of` is not read; None if there is none
    batch_ndim : the number of batch axes of the arrays
    """

    statistic: Statistic
    outputs: slice
    mean: Statistic | None
    batch_ndim: int


@dataclass
class Entry:
    """A cached call, which lacks only its inputs.

    Parameters
    ----------
    framework : the library of query, key, value and output
    statistics : the statistics
    squeezed_axis : the axis of the heads in the arrays of kernels if the caller's arrays have no such axis; else None
    hook : function (entry, request, operands, `EntryResult`) that returns the answer, by default `build_answer`
        Another hook always receives lse. A copy of the hook (`copy.copy`) serves the other calls of the same family.
    """

    framework: Framework
    statistics: tuple[CachedStatistic, ...]
    squeezed_axis: int | None
    hook: Hook

    def build_seen(self, output: Any, lse: Any, arrays: Sequence[Any], in_graph: bool = False) -> tuple[Any, ...]:
        """Return the result of each statistic. `in_graph` is true for tensors in torch's graph of gradients."""
        seen, start = [], 0
        for statistic, _, mean, batch_ndim in self.statistics:
            if count := statistic.num_arrays:
                own: Sequence[Any] = arrays[start : start + count]
                start += count
            else:
                own = [self.framework.finish_lse(lse, output)]
            if in_graph and not statistic.is_differentiable:
                own = [array.detach() for array in own]
            if mean is not None:
                own = [mean.average(array, batch_ndim) for array in own]
            seen.append(statistic.build_result(own))
        return tuple(seen)


Hook = Callable[[Entry, Request, Operands, EntryResult], Any]


def build_answer(entry: Entry, request: Request, operands: Operands, result: EntryResult) -> tuple[Any, Any]:
    """Return (output, seen) of a cached call."""
    return result.output, entry.build_seen(*result[:3]) if entry.statistics else ()


class PreparedPass(NamedTuple):
    """The weights pass of one or several statistics of a cached call.

    prepared : the call of the weights pass, whose operands are query, key and lse
    bound : the object that makes the statistics' arrays from the arrays of the pass
    """

    prepared: PreparedCall
    bound: StatisticsPass


@dataclass
class ForwardEntry(Entry):
    """A cached call of kernels of the CPU. It has these parameters besides those of `Entry`.

    Parameters
    ----------
    prepared : the call of the forward kernel; its results are output, lse if it is needed, and arrays of statistics
    passes : the weights passes of the statistics that the forward kernel does not compute
    make_makers : function (shape of the output, heads_in_rows) that returns the makers of the forward kernel's results;
        see `_make_makers`
    needs_lse : True if a statistic, a weights pass or the hook reads lse
    has_dropout : True if the call needs a seed
    """

    prepared: PreparedCall
    passes: tuple[PreparedPass, ...]
    make_makers: Callable[[tuple[int, ...], bool], list[Callable[[], Any]]]
    needs_lse: bool
    has_dropout: bool

    @cached_property
    def returns_results(self) -> bool:
        """True if the results of the forward kernel are the output and the result of each statistic, in this order."""
        arrays = [(one.outputs, one.mean, one.statistic.num_arrays) for one in self.statistics]
        expected = [(slice(k, k + 1), None, 1) for k in range(len(arrays))]
        return not self.needs_lse and arrays == expected

    def run(self, request: Request, operands: Operands, threads: int | None) -> Any:
        """Return the answer of the call; None if the call needs the full dispatch."""
        seed = request.seed if self.has_dropout else 0
        if seed is None and self.framework.draw_seed is not None:
            seed = self.framework.draw_seed()
        status, results = self.prepared.run(
            request.addresses, request.tables, request.numbers, threads, operands, sinks=request.sinks, seed=seed or 0
        )
        if status is None or (status and self.statistics):
            return None
        if not self.needs_lse and not self.statistics:
            return results[0], ()
        return self.finish(request, operands, results, threads, bool(status), seed or 0)

    def finish(
        self,
        request: Request,
        operands: Operands,
        results: Sequence[Any],
        threads: int | None,
        is_lse_imprecise: bool = False,
        seed: int = 0,
    ) -> Any:
        """Return the answer from the results of the forward kernel; None if a pass needs the full dispatch."""
        output, lse, outputs = (*results[:2], results[2:]) if self.needs_lse else (results[0], None, results[1:])
        by_statistic = [outputs[statistic.outputs] for statistic in self.statistics] if self.statistics else []
        for prepared, bound in self.passes:
            addresses = *request.addresses[:2], self.framework.address(lse), *request.addresses[NUM_OPERANDS:]
            keep_alive = *operands, lse
            status, arrays = prepared.run(addresses, request.tables, request.numbers, threads, keep_alive)
            if status is None:
                return None
            axis = self.squeezed_axis
            for index, finished in zip(bound.indices, bound.finish(arrays), strict=True):
                by_statistic[index] = finished if axis is None else [array.squeeze(axis) for array in finished]
        arrays = by_statistic[0] if len(by_statistic) == 1 else [array for one in by_statistic for array in one]
        return self.hook(self, request, operands, EntryResult(output, lse, arrays, is_lse_imprecise, seed))


def describe_statistics(problem: Problem) -> tuple[tuple[CachedStatistic, ...], tuple[str, ...]]:
    """Return two tuples: the statistics of a problem, and the dtypes of the forward kernel's outputs for them."""
    dtypes: list[str] = []

    def next_index(_: tuple[int, ...], dtype: str) -> int:  # in place of a new array
        dtypes.append(dtype)
        return len(dtypes) - 1

    fused = FusedStatistics(problem, next_index)
    described = []
    given: Any
    for given in problem.see:
        statistic, mean = unwrap_mean(given), None
        if given.is_mean:  # the arrays have no head axis if the caller's have none
            mean = replace(given, of=lse(), over_heads=given.over_heads and not problem.heads_squeezed)
        indices = fused.arrays_of(statistic) or [0, -1]
        outputs = slice(indices[0], indices[-1] + 1)
        cached = CachedStatistic(statistic.map_formulas(lambda _: None), outputs, mean, len(problem.batch_shape))
        described.append(cached)
    return tuple(described), tuple(dtypes)


def insert(
    request: Request,
    formulas: Sequence[Expression | None],
    operands: Operands,
    problem: Problem,
    result: Result,
    hook: Hook = build_answer,
) -> None:
    """Store a call that went through the full dispatch.

    The call is stored only if its kernel returned a bound call that read the caller's own arrays. Query, key and value
    must have the same addresses, and all tables must be those of the request.

    Parameters
    ----------
    formulas : the formulas of the call, from `Request.formulas`
    operands : the caller's query, key and value
    problem, result : the problem that was made from the formulas, and its result
    hook : see `Entry`
    """
    bound_call, library = result.bound_call, problem.framework
    if bound_call is None or bound_call.first_operands != request.addresses[:NUM_OPERANDS]:
        return
    structure = structure_of(*formulas)
    num_in_passes = sum(is_in_weights_pass(statistic) for statistic in map(unwrap_mean, problem.see))
    if num_in_passes != sum(len(bound.indices) for bound in result.bound_passes):
        return
    passes = []
    for bound in result.bound_passes:
        makers = bound.make_makers(library)
        structure_of_pass = structure if bound.reads_formulas else structure.first(2)  # mask and score
        call = bound.call.prepare(request.tables, structure_of_pass, ("query", "key", "lse"), (), makers, problem.m)
        if call is None:
            return
        passes.append(PreparedPass(call, bound))
    output = problem.squeeze_heads(result.output, 2)
    statistics, statistic_dtypes = describe_statistics(problem)
    # the result of a direct call with one result reaches no hook, so a call with a hook also returns lse
    needs_lse = hook is not build_answer or bool(passes) or any(not one.statistic.num_arrays for one in statistics)
    # without statistics the caller does not get the lse, so a NumPy array suffices
    per_query = [(library if statistics else NUMPY, "float64")] * needs_lse
    per_query += [(library, dtype) for dtype in statistic_dtypes]
    make_makers = partial(_make_makers, library, output.dtype, per_query)
    num_sums = sum(statistic.fused_role == "sum" for statistic in map(unwrap_mean, problem.see))
    prepared = bound_call.prepare(
        request.tables,
        structure.first(2 + num_sums),  # mask, score and factors
        OPERANDS,
        ("output", "lse") if needs_lse else ("output",),
        make_makers(tuple(output.shape), has_heads_in_rows(operands[0])),
        problem.m,
        can_be_direct=problem.dropout == 0 and request.sinks is None,
    )
    if prepared is None:
        return
    squeezed_axis = len(problem.batch_shape) if problem.heads_squeezed else None
    shared = library, statistics, squeezed_axis, hook
    entry = ForwardEntry(*shared, prepared, tuple(passes), make_makers, needs_lse, problem.dropout > 0)
    store_call(calls, request.key if passes else _cache_key(request, bound_call), entry)
    shared_key = None if bound_call.family is None or passes else family_key(request.key)
    if shared_key is not None:
        store_call(families, shared_key, entry)


def _make_makers(
    library: Framework,
    dtype: Any,
    per_query: Sequence[tuple[Framework, str]],
    shape: tuple[int, ...],
    heads_in_rows: bool,
) -> list[Callable[[], Any]]:
    """Return the functions that allocate the results of a forward kernel, for an output of this shape and dtype.

    `per_query` has the library and the dtype of each other result: lse and the arrays of statistics, which have one
    number per query. `heads_in_rows` is as in `Framework.make_empty`.
    """
    others = [other.make_empty(shape[:-1], name) for other, name in per_query]
    return [library.make_empty(shape, dtype, heads_in_rows), *others]
