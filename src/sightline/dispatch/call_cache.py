"""A cache of attention calls: a call whose structure was met before goes straight to its kernel.

    attention(q, k, v, mask=j < table(lengths)[b])  →  Description  →  Request  →  CachedCall  →  kernel

`call_request` computes the structure of a call, which is a part of the key. `answer` looks the call up and runs it. A
call that was run a few times becomes direct if one thread is enough for its work: then generated code does all that
follows the description; see `cpu.calls.direct_call`. Calls that differ only in lengths and strides form a family. A
call of a family that was met before is bound for its lengths without the full dispatch: each step of a decoding loop
has another number of keys.

A repeated call takes from an earlier call what follows from the key: the kernel, the values of its bound arguments
(lengths, strides, offsets of batches), and the checks of shapes, dtypes and options. The key has the type, dtype, shape
and strides of every array of the call, tables, masks and sinks included, the structure of the formulas and the options.
The rest is of the call itself:

- the addresses of all arrays, of which `KernelInputs.bind` has checked that the kernel reads them with the memory
  layouts that the key has; a table that the kernel cannot read as it is, is converted at each call;
- numbers of formulas, seed, sinks, and the environment variable SIGHTLINE_CPU;
- tile ranges, and the checks of indices and whole numbers, if they depend on entries of tables or on numbers.

A family shares no lengths, so `CallFamily.bind` repeats each check that depends on lengths. A backward pass takes
output and lse from its forward pass, so the entries of all tables must be the same in both: `torch.autograd` compares
them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..arrays import layouts as array_layouts
from ..arrays.adapters import ADAPTERS, ArrayAdapter, addresses_of
from ..arrays.layouts import numpy_address
from ..arrays.operations import memory_layout
from ..cpu.runtime.compile import bound_calls, call_families
from ..formula.expression import Expression
from ..formula.parameters import structure_of
from ..problem.kernel import Result
from ..problem.problem import NUM_OPERANDS, Problem
from ..statistics import Entropy, Lse, Mass, MaxScore, Mean, Statistic, average_over, unwrap_mean
from .call_request import WEIGHTS_STATISTICS, Description, Request, family_key, without_key_length

if TYPE_CHECKING:
    from ..cpu.calls.launch_record import LaunchRecord
    from ..cpu.launch.bound_call import BoundCall

# The least recently used call is dropped beyond this number. Direct calls that return one array do not count as uses.
MAX_CACHED_CALLS = 256
RUNS_BEFORE_RECORD = 6  # a record for direct calls, and its buffer, are made for a call that was run so often
OPERANDS = ("query", "key", "value")  # the first arrays of `Request.addresses`
FIRST_TABLE = NUM_OPERANDS  # index of the first table in `Request.addresses`


def answer(
    description: Description, query: Any, key: Any, value: Any, sinks: Any, seed: int | None, threads: int | None
) -> tuple[Any, Request | None]:
    """Return (output, seen) of a call, and None; None and its request if it needs the full dispatch."""
    structure, mask, score, see, tables, numbers, arrays = description
    entries = bound_calls()
    found = array_layouts.run_or_find(entries, structure, numbers, query, key, value, *arrays)
    if type(found) is not tuple:
        return None if found is None else (found, ()), None
    call, results, layouts, *addresses = found
    request = Request((layouts, structure), tuple(addresses), mask, score, see, tables, numbers, sinks, seed)
    if call is None:
        call = _find_any_key_length(entries, request) or _bind_family(request, query, key, value)
    else:
        _mark_as_used(entries, request.key)
    if call is not None and array_layouts.run_or_find is array_layouts.find_in_python:
        _use_generated_functions()
    if results is not None:
        return call.finish(request, query, key, value, results), None
    result = None if call is None else call.run(request, query, key, value, threads)
    return (None, request) if result is None else (result, None)


def _find_any_key_length(entries: OrderedDict[Any, Any], request: Request) -> CachedCall | None:
    """Return a call that was cached without its number of keys; None if none is cached. See `without_key_length`.

    A copy of the call is stored under the key of the request, because the layers of a model make the same call one
    after another. The copy counts its own runs.
    """
    call = _lookup(entries, without_key_length(request.key))
    if call is not None:
        call = copy(call)
        store(entries, request.key, call)
    return call


def _lookup(entries: OrderedDict[Any, Any], key: tuple[Any, ...]) -> CachedCall | None:
    call: CachedCall | None = entries.get(key)
    if call is not None:
        _mark_as_used(entries, key)
    return call


def _mark_as_used(entries: OrderedDict[Any, Any], key: tuple[Any, ...]) -> None:
    with suppress(KeyError):  # another thread has just dropped the call
        entries.move_to_end(key)


def _bind_family(request: Request, query: Any, key: Any, value: Any) -> CachedCall | None:
    """Return a cached call for a request whose family was met before, with other lengths; None if there is none."""
    shared_key = family_key(request.key)
    member = None if shared_key is None else _lookup(call_families(), shared_key)
    family = None if member is None else member.bound_call.family
    if member is None or family is None:
        return None
    inputs = member.inputs
    tables = [] if inputs is None else [request.tables[table] for table in inputs.tables]
    bound_call = family.bind(query, key, value, tables)
    if bound_call is None:
        return None
    shape = (*query.shape[:-1], value.shape[-1])
    attach = None if member.attach is None else copy(member.attach)
    call = replace(member, bound_call=bound_call, shape=shape, attach=attach, record=None, num_runs=0)
    store(bound_calls(), _cache_key(request, bound_call), call)
    return call


def _cache_key(request: Request, bound_call: BoundCall) -> tuple[Any, ...]:
    """Return the key under which a call is stored: without its number of keys if the call serves every number."""
    return without_key_length(request.key) if bound_call.has_dynamic_key_length else request.key


class CallResult(NamedTuple):
    """The arrays that a cached call computed.

    arrays : the arrays of every statistic except lse, in the order of `CachedCall.statistics`; of a mean, the arrays
        that it averages
    is_lse_imprecise : False if `kernel.is_lse_precise` is true of lse
    seed : the seed of dropout
    """

    output: Any
    lse: Any
    arrays: Sequence[Any]
    is_lse_imprecise: bool
    seed: int


Attacher = Callable[[Request, Any, Any, Any, CallResult], CallResult]


@dataclass(frozen=True)
class KernelInputs:
    """Which tables and numbers of a request are those of a bound call.

    tables : for each table of the kernel, its index in `Request.tables`
    converters : for each table of the kernel, a function that returns the copy that the kernel reads; None if the
        kernel reads the array itself
    numbers : for each number of the kernel, its index in `Request.numbers`
    is_identity : True if the tables and numbers are all those of the request, in the same order
    """

    tables: tuple[int, ...]
    converters: tuple[Callable[[Any], Any] | None, ...]
    numbers: tuple[int, ...]
    is_identity: bool

    @classmethod
    def bind(
        cls, bound_call: BoundCall, request: Request, formulas: Sequence[Expression | None]
    ) -> KernelInputs | None:
        """Return the inputs of a call that was made for a request; None if it has other tables or numbers.

        The result is also None if the call was bound for other memory layouts than those of the request's tables.
        `formulas` are those of the call, from `Request.formulas`.
        """
        origins = [id(table) for table in structure_of(*formulas).tables]
        numbers = [(type(number), number) for number in request.numbers]  # equal numbers are one number of a structure
        needed = [(type(number), number) for number in bound_call.numbers]
        if not set(bound_call.table_origins) <= set(origins) or set(needed) != set(numbers):
            return None
        tables = tuple([origins.index(origin) for origin in bound_call.table_origins])
        number_indices = tuple([numbers.index(number) for number in needed])
        converters: list[Callable[[Any], Any] | None] = []
        for table, bound in zip(tables, bound_call.table_layouts, strict=True):
            array = request.tables[table]
            is_direct = memory_layout(array) == bound
            if not is_direct and memory_layout(bound_call.convert_table(array)) != bound:
                return None
            converters.append(None if is_direct else bound_call.convert_table)
        same_order = tables == tuple(range(len(request.tables))) and number_indices == tuple(range(len(numbers)))
        is_identity = same_order and not any(converters)
        return cls(tables, tuple(converters), number_indices, is_identity)

    def of(self, request: Request) -> tuple[Sequence[Any], Sequence[int], tuple[float, ...]]:
        """Return the arrays that the kernel reads as its tables, their addresses, and the numbers of the kernel."""
        tables, numbers = request.tables, request.numbers
        if self.is_identity:
            return tables, request.addresses[FIRST_TABLE : FIRST_TABLE + len(tables)], numbers
        arrays = [
            tables[table] if convert is None else convert(tables[table])
            for table, convert in zip(self.tables, self.converters, strict=True)
        ]
        return arrays, addresses_of(arrays), tuple([numbers[number] for number in self.numbers])


NO_INPUTS: tuple[Sequence[Any], Sequence[int], tuple[float, ...]] = (), (), ()  # of a call without formulas


class CachedStatistic(NamedTuple):
    """A statistic of a cached call.

    statistic : the statistic without its formula; of a mean, the statistic that is averaged
    outputs : the places of its arrays among the forward kernel's outputs; empty if the kernel does not compute it
    mean_axes : the axes over which the arrays are averaged; None if the statistic is no mean
    """

    statistic: Statistic
    outputs: slice
    mean_axes: tuple[int, ...] | None


@dataclass
class ResultBuilder:
    """How a cached call makes its results from the arrays that its kernels write.

    Parameters
    ----------
    adapter : the adapter of query, key, value and output
    statistics : the statistics
    attach : function that joins the results to a graph of gradients; None for arrays without gradients
        It takes the request, query, key, value and a `CallResult`, and returns the result with joined arrays.
    """

    adapter: ArrayAdapter
    statistics: tuple[CachedStatistic, ...]
    attach: Attacher | None

    def join(self, request: Request, query: Any, key: Any, value: Any, result: CallResult) -> Any:
        """Return (output, seen), joined to a graph of gradients if there is one."""
        if self.attach is not None:
            result = self.attach(request, query, key, value, result)
        return result.output, self.build_seen(result) if self.statistics else ()

    def build_seen(self, result: CallResult) -> tuple[Any, ...]:
        """Return the result of each statistic."""
        seen, arrays = [], iter(result.arrays)
        for statistic, _, mean_axes in self.statistics:
            if isinstance(statistic, Lse):
                own = [self.adapter.finish_lse(result.lse, result.output)]
            else:
                own = list(islice(arrays, len(statistic.fill_values)))
            if self.attach is not None and not statistic.is_differentiable:
                own = [array.detach() for array in own]
            if mean_axes is not None:
                own = [average_over(array, mean_axes) for array in own]
            seen.append(statistic.build_result(own))
        return tuple(seen)


@dataclass
class CachedCall(ResultBuilder):
    """A call that only lacks its inputs. The parameters besides those of `ResultBuilder`:

    Parameters
    ----------
    dtype : the dtype of query, key, value and output
    inputs : the tables and numbers of the kernel; None if it has none
    shape : the shape of the output in the layout of the caller's arrays
    needs_lse : True if a statistic or the backward pass reads lse
    statistic_dtypes : the names of the dtypes of the forward kernel's outputs for statistics, in its order
    bound_passes : the `BoundPass` objects of the statistics that the forward kernel does not compute
    squeezed_axis : the axis of the heads in their arrays if the caller's arrays have no such axis; else None
    has_dropout : True if the call needs a seed
    keeps_lse : True if `join` reads lse, whether or not a statistic or the backward pass does
    num_runs : how often `run` was called, up to `RUNS_BEFORE_RECORD`
    record : the record for direct calls; None if there is none
    """

    dtype: Any
    bound_call: BoundCall
    inputs: KernelInputs | None
    shape: tuple[int, ...]
    needs_lse: bool
    statistic_dtypes: tuple[str, ...]
    bound_passes: tuple[Any, ...]
    squeezed_axis: int | None
    has_dropout: bool
    num_runs: int = 0
    record: LaunchRecord | None = None
    keeps_lse: ClassVar[bool] = False

    def __post_init__(self) -> None:
        make_empty, shape = self.adapter.make_empty, self.shape[:-1]
        makers = [make_empty(self.shape, self.dtype)]
        if self.needs_lse:  # without statistics, only the backward pass reads it
            makers.append(make_empty(shape, "float64") if self.statistics else partial(np.empty, shape))
        makers += [make_empty(shape, dtype) for dtype in self.statistic_dtypes]
        # what `calls.direct_call` reads: functions that allocate the results, and the address of the record
        self.makers = tuple(makers)
        self.direct_record = 0 if self.record is None else self.record.address

    def run(self, request: Request, query: Any, key: Any, value: Any, threads: int | None) -> Any:
        """Return (output, seen) of the call; None if the call needs the full dispatch."""
        adapter, bound = self.adapter, self.bound_call
        results, seed, sinks = [make() for make in self.makers], request.seed, None
        output, lse, outputs = self._divide(results)
        fields = dict(zip(OPERANDS, request.addresses, strict=False))
        fields["output"] = adapter.address(output)
        if lse is not None:
            fields["lse"] = ADAPTERS[type(lse)].address(lse)
        if self.has_dropout:
            seed = adapter.draw_seed() if seed is None and adapter.draw_seed is not None else seed or 0
        if request.sinks is not None:
            sinks = bound.convert_sinks(request.sinks)
            fields["sinks"] = numpy_address(sinks)
        tables, addresses, numbers = NO_INPUTS if self.inputs is None else self.inputs.of(request)
        written = [adapter.address(array) for array in outputs]
        words = bound.make_words(fields, addresses, numbers, written, seed if self.has_dropout and seed else 0)
        keep_alive = query, key, value, results, sinks, tables
        status = bound.run(threads, words, numbers, key, keep_alive)
        if status is None or (status and self.statistics):
            return None
        if self.num_runs < RUNS_BEFORE_RECORD or self.needs_larger_record:
            self.prepare_direct_call(request, key, threads)
        if not (self.statistics or self.needs_lse):
            return output, ()
        arrays = self._compute_statistics(outputs, fields, addresses, numbers, threads, query, keep_alive)
        if arrays is None:
            return None
        return self.join(request, query, key, value, CallResult(output, lse, arrays, bool(status), seed or 0))

    def finish(self, request: Request, query: Any, key: Any, value: Any, results: tuple[Any, ...]) -> Any:
        """Return (output, seen) of a direct call with several results; see `cpu.calls.direct_call`."""
        output, lse, outputs = self._divide(results)
        return self.join(request, query, key, value, CallResult(output, lse, self._select(outputs), False, 0))

    def _divide(self, results: Sequence[Any]) -> tuple[Any, Any, Sequence[Any]]:
        """Return output, lse or None, and the arrays of statistics."""
        return (results[0], results[1], results[2:]) if self.needs_lse else (results[0], None, results[1:])

    @property
    def needs_larger_record(self) -> bool:
        """True if the bound call now has memory for more tile ranges than the record has."""
        search, record = self.bound_call.search, self.record
        return search is not None and record is not None and 0 < record.capacity < search.capacity

    def prepare_direct_call(self, request: Request, key: Any, threads: int | None) -> None:
        """Count one more run. If the call was run often enough, store a copy of it with a record for direct calls.

        The call itself is not changed, because another thread may use its record.
        """
        self.num_runs += 1
        if self.num_runs < RUNS_BEFORE_RECORD or self.has_dropout or request.sinks is not None:
            return
        if self.bound_passes or not (self.inputs is None or self.inputs.is_identity):
            return
        record = self.bound_call.make_direct_record(threads, key.shape[-2], 1 + self.needs_lse)
        if record is not None:
            store(bound_calls(), request.key, replace(self, record=record))

    def _compute_statistics(
        self,
        outputs: Sequence[Any],
        fields: dict[str, int],
        tables: Sequence[int],
        numbers: tuple[float, ...],
        threads: int | None,
        query: Any,
        keep_alive: tuple[Any, ...],
    ) -> list[Any] | None:
        """Return `CallResult.arrays`; None for the full dispatch.

        `outputs` are the forward kernel's arrays. `fields`, `tables` and `numbers` are those of its `make_words`.
        """
        if not self.bound_passes:
            return self._select(outputs)
        read = {name: fields[name] for name in ("query", "key", "lse")}
        found = [outputs[statistic.outputs] for statistic in self.statistics]
        for bound in self.bound_passes:
            arrays = bound.run(threads, read, tables, numbers, query, keep_alive)
            if arrays is None:
                return None
            for index, own in zip(bound.indices, arrays, strict=True):
                axis = self.squeezed_axis
                found[index] = own if axis is None else [array.squeeze(axis) for array in own]
        return [array for arrays in found for array in arrays]

    def _select(self, outputs: Sequence[Any]) -> list[Any]:
        """Return `CallResult.arrays` from the forward kernel's outputs."""
        return [array for statistic in self.statistics for array in outputs[statistic.outputs]]


def describe_statistics(problem: Problem) -> tuple[tuple[CachedStatistic, ...], tuple[str, ...]]:
    """Return the statistics of a problem, and the names of the dtypes of the forward kernel's outputs for them.

    These outputs are two of max_score, one of entropy, and one of each mass.
    """
    statistics = [unwrap_mean(statistic) for statistic in problem.see]
    kinds = [type(statistic) for statistic in statistics]
    first_entropy = 2 * (MaxScore in kinds)
    first_mass = next_mass = first_entropy + (Entropy in kinds)
    batch_axes, head_axes = range(len(problem.batch_shape)), (len(problem.batch_shape),) * (not problem.heads_squeezed)
    described = []
    for given, statistic in zip(problem.see, statistics, strict=True):
        outputs, mean_axes = slice(0, 0), None
        if isinstance(statistic, MaxScore):
            outputs = slice(0, first_entropy)
        elif isinstance(statistic, Entropy):
            outputs = slice(first_entropy, first_mass)
        elif isinstance(statistic, Mass):
            outputs = slice(next_mass, next_mass + 1)
            next_mass += 1
        if isinstance(given, Mean):
            mean_axes = (*batch_axes,) * given.over_batch + head_axes * given.over_heads
        described.append(CachedStatistic(statistic.map_formulas(lambda _: None), outputs, mean_axes))
    accumulator = problem.accumulator
    dtypes = (accumulator, "int64") * (MaxScore in kinds) + (accumulator,) * (next_mass - first_entropy)
    return tuple(described), dtypes


def insert(
    request: Request,
    formulas: Sequence[Expression | None],
    arrays: tuple[Any, Any, Any],
    problem: Problem,
    result: Result,
    attach: Attacher | None = None,
    kind: type[CachedCall] = CachedCall,
) -> None:
    """Store a call that went through the full dispatch.

    The call is stored only if its kernel returned a bound call, and if that bound call read the caller's own arrays:
    query, key and value at the same addresses, and no tables but those of the request.

    Parameters
    ----------
    formulas : the formulas of the call, from `Request.formulas`
    arrays : the caller's query, key and value
    problem, result : the problem that was made from the formulas, and its result
    attach : see `CachedCall`
    kind : the class of the stored call
    """
    bound_call, adapter = result.bound_call, ADAPTERS[type(arrays[0])]
    if bound_call is None or bound_call.first_operands != request.addresses[:FIRST_TABLE]:
        return
    inputs = KernelInputs.bind(bound_call, request, formulas)
    passes = [statistic for statistic in map(unwrap_mean, problem.see) if isinstance(statistic, WEIGHTS_STATISTICS)]
    if inputs is None or len(passes) != sum(len(bound.indices) for bound in result.bound_passes):
        return
    output = problem.squeeze_heads(result.output, 2)
    statistics, statistic_dtypes = describe_statistics(problem)
    needs_lse = kind.keeps_lse or attach is not None or bool(passes)
    entry = kind(
        adapter,
        statistics,
        attach,
        output.dtype,
        bound_call,
        inputs if inputs.tables or inputs.numbers else None,
        tuple(output.shape),
        needs_lse or any(isinstance(one.statistic, Lse) for one in statistics),
        statistic_dtypes,
        result.bound_passes,
        len(problem.batch_shape) if problem.heads_squeezed else None,
        problem.dropout > 0,
    )
    store(bound_calls(), request.key if passes else _cache_key(request, bound_call), entry)
    shared_key = None if bound_call.family is None or passes else family_key(request.key)
    if shared_key is not None:
        store(call_families(), shared_key, entry)


def _use_generated_functions() -> None:
    """Read arrays and run direct calls in generated code from now on, where that is possible."""
    from ..cpu.calls.python_functions import make_array_functions  # loads llvmlite, as each call of a kernel does

    functions = make_array_functions(array_layouts.tensors())
    if functions is not None:
        array_layouts.use(*functions)


def store(entries: OrderedDict[Any, Any], key: tuple[Any, ...], call: Any) -> None:
    """Store a call, and drop the least recently used calls beyond `MAX_CACHED_CALLS`."""
    entries[key] = call  # each operation on the dict is atomic, so that no thread waits for a lock
    while len(entries) > MAX_CACHED_CALLS:
        try:
            entries.popitem(last=False)
        except KeyError:  # other threads have removed the last entries
            break
