"""Entries of the call cache for the CPU's kernels, and their families: calls that differ in lengths and strides alone.

A family has one entry. For other lengths, its call is bound again, without the full dispatch; `CallFamily.bind` repeats
each check that depends on lengths. A call that serves any number of keys is stored under its key without this number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from ...arrays.caching import cached_property
from ...arrays.layouts import unpack
from ...arrays.operations import NUMPY, has_heads_in_rows
from ...call import call_cache
from ...call.call_cache import Entry, EntryResult, FirstCall, Operands, build_answer, mark_as_used, store_call
from ...call.problem import NUM_OPERANDS, OPERANDS, Problem
from ...call.request import Request
from ...formula.parameters import Structure, structure_of
from ...statistics.dispatch import is_in_weights_pass
from .bound_call import BoundCall, PreparedCall
from .decode import min_decode_keys
from .weights_pass import StatisticsPass

MAX_SMALL_LENGTH = 64  # up to this number of queries, the number may change the kernel's code


@dataclass
class ForwardEntry(Entry):
    """A cached call of kernels of the CPU. It has these parameters besides those of `Entry`.

    prepared : the call of the forward kernel; its results are output, lse if it is needed, and arrays of statistics
    passes : the weights passes of the statistics that the forward kernel does not compute, each with the object that
        makes the statistics' arrays from those of the pass; the operands of a pass are query, key and lse
    make_makers : function (shape of the output, heads_in_rows) that returns the makers of the forward kernel's results;
        `heads_in_rows` is as in `Framework.make_empty`
    needs_lse : True if a statistic, a weights pass or the hook reads lse
    has_dropout : True if the call needs a seed
    """

    prepared: PreparedCall
    passes: tuple[tuple[PreparedCall, StatisticsPass], ...]
    make_makers: Callable[[tuple[int, ...], bool], list[Callable[[], Any]]]
    needs_lse: bool
    has_dropout: bool

    @cached_property
    def returns_results(self) -> bool:
        arrays = [(one.outputs, one.statistic.num_arrays) for one in self.statistics]
        expected = [(slice(k, k + 1), 1) for k in range(len(arrays))]
        return not self.needs_lse and arrays == expected

    def run(self, request: Request, operands: Operands, results: Sequence[Any] | None) -> Any:
        seed: int | None = 0
        status: int | None = 0
        if results is None:
            if self.has_dropout:
                seed = request.seed
                if seed is None and self.framework.draw_seed is not None:
                    seed = self.framework.draw_seed()
            inputs = request.addresses, request.tables, request.numbers, operands
            status, results = self.prepared.run(*inputs, sinks=request.sinks, seed=seed or 0)
            if status is None or (status and self.statistics):
                return None
            if not self.needs_lse and not self.statistics:
                return results[0], ()
        output, lse, outputs = (*results[:2], results[2:]) if self.needs_lse else (results[0], None, results[1:])
        by_statistic = [outputs[statistic.outputs] for statistic in self.statistics] if self.statistics else []
        for prepared, bound in self.passes:
            own = *request.addresses[:2], self.framework.address(lse), *request.addresses[NUM_OPERANDS:]
            status, arrays = prepared.run(own, request.tables, request.numbers, (*operands, lse))
            if status is None:
                return None
            axis = self.squeezed_axis
            for index, finished in zip(bound.indices, bound.finish(arrays), strict=True):
                by_statistic[index] = finished if axis is None else [array.squeeze(axis) for array in finished]
        arrays = by_statistic[0] if len(by_statistic) == 1 else [array for one in by_statistic for array in one]
        return self.hook(self, request, operands, EntryResult(output, lse, arrays, bool(status), seed or 0))

    def store(self, request: Request) -> None:
        """Store the entry: without the number of keys if its call serves every number."""
        is_dynamic = self.prepared.call.has_dynamic_key_length and not self.passes
        store_call(call_cache.calls, request.key_of_any_length if is_dynamic else request.key, self)


def keep_forward(forward: BoundCall, statistics_passes: Sequence[StatisticsPass], first_call: FirstCall) -> None:
    """Store an entry; see `Result.keep`.

    forward : the bound call of the forward or decoding kernel
    statistics_passes : the weights passes of statistics of `Problem.see`; the forward kernel computes the others
    """
    request, problem, output = first_call.request, first_call.problem, first_call.result.output
    library = problem.framework
    num_in_passes = sum([len(bound.indices) for bound in statistics_passes])
    is_complete = num_in_passes == sum(map(is_in_weights_pass, problem.see))
    if forward.first_operands != request.addresses[:NUM_OPERANDS] or not is_complete:
        return
    structure, statistics = structure_of(*first_call.formulas), problem.see
    passes = _prepare_passes(statistics_passes, request, problem, structure)
    if passes is None:
        return
    shape, dtype = tuple(problem.squeeze_heads(output, 2).shape), output.dtype
    shared, statistic_dtypes = first_call.describe()
    # the result of a direct call with one result reaches no hook, so a call with a hook also returns lse
    needs_lse = first_call.hook is not build_answer or bool(passes) or any(not one.num_arrays for one in statistics)
    # the results with one number per query; without statistics the caller does not get lse: a NumPy array suffices
    per_query = [(library if statistics else NUMPY, "float64")] * needs_lse
    per_query += [(library, name) for name in statistic_dtypes]

    def make_makers(shape: tuple[int, ...], heads_in_rows: bool) -> list[Callable[[], Any]]:
        others = [other.make_empty(shape[:-1], name) for other, name in per_query]
        return [library.make_empty(shape, dtype, heads_in_rows), *others]

    num_sums = sum(statistic.fused_role == "sum" for statistic in statistics)
    prepared = forward.prepare(
        request.tables,
        structure.first(2 + num_sums),  # mask, score and factors
        OPERANDS,
        ("output", "lse") if needs_lse else ("output",),
        make_makers(shape, has_heads_in_rows(first_call.operands[0])),
        problem.m,
        can_be_direct=problem.dropout == 0 and request.sinks is None,
    )
    if prepared is None:
        return
    entry = ForwardEntry(*shared, prepared, passes, make_makers, needs_lse, problem.dropout > 0)
    entry.store(request)
    shared_key = None if forward.family is None or passes else family_key(request.key)
    if shared_key is not None:
        store_call(call_cache.families, shared_key, entry)


def _prepare_passes(
    bound_passes: Sequence[StatisticsPass], request: Request, problem: Problem, structure: Structure
) -> tuple[tuple[PreparedCall, StatisticsPass], ...] | None:
    """Return `passes` of `ForwardEntry`; None if a pass cannot be repeated. `structure` is that of all formulas."""
    passes = []
    for bound in bound_passes:
        makers = bound.make_makers(problem.framework)
        own = structure if bound.reads_formulas else structure.first(2)  # mask and score
        call = bound.call.prepare(request.tables, own, ("query", "key", "lse"), (), makers, problem.m)
        if call is None:
            return None
        passes.append((call, bound))
    return tuple(passes)


# -- families ----------------------------------------------------------------------------------------------------------


def find_relative(request: Request, operands: Operands) -> ForwardEntry | None:
    """Return a new entry for a request, made from that of a call with other lengths; None if no call fits."""
    return _find_any_key_length(request, operands) or _bind_family(request, operands)


def _find_any_key_length(request: Request, operands: Operands) -> ForwardEntry | None:
    """Return an entry that was stored without its number of keys; None if no entry fits.

    A copy of the entry is stored under the key of the request, because the layers of a model make the same call one
    after another. The copy has the same launch records.
    """
    entry = _lookup(call_cache.calls, request.key_of_any_length)
    if entry is not None:
        entry = replace(entry, prepared=entry.prepared.copy(operands[1].shape[-2]))
        store_call(call_cache.calls, request.key, entry)
    return entry


def _bind_family(request: Request, operands: Operands) -> ForwardEntry | None:
    """Return the entry of a family, bound for a request, and store it; None if the arrays fit no family."""
    shared_key = family_key(request.key)
    member = None if shared_key is None else _lookup(call_cache.families, shared_key)
    family = None if member is None else member.prepared.call.family
    if member is None or family is None:
        return None
    tables = [request.tables[table] for table in member.prepared.tables]
    bound_call = family.bind(*operands, tables)
    if bound_call is None:
        return None
    query, key, _ = operands
    makers = member.make_makers((*query.shape[:-1], family.arguments.spec.d_v), has_heads_in_rows(query))
    prepared = replace(member.prepared, call=bound_call, makers=tuple(makers), num_keys=key.shape[-2])
    entry = replace(member, prepared=prepared, hook=copy(member.hook))
    entry.store(request)
    return entry


def _lookup(entries: OrderedDict[Any, Any], key: tuple[Any, ...]) -> ForwardEntry | None:
    entry: ForwardEntry | None = entries.get(key)
    if entry is not None:
        mark_as_used(entries, key)
    return entry


def family_key(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the key of the call's family: the key without lengths and strides; None if the call has no family.

    A call has a family only if query, key and value have four axes and equal batch axes. The choice of a kernel depends
    on the number of queries if that number is small, and on whether there are many keys. The key has both facts.
    """
    layouts, structure = key
    arrays = unpack(layouts)
    query, keys, values = [array.shape for array in arrays[:3]]
    if not (len(query) == len(keys) == len(values) == 4 and query[0] == keys[0] == values[0] and keys[2] == values[2]):
        return None
    sizes = query[1], keys[1], values[1], query[3], keys[3], values[3], query[0]
    choice = min(query[2], MAX_SMALL_LENGTH), keys[2] >= min_decode_keys(query[2])
    lengths = arrays[-1].shape if structure.has_sinks else ()  # other lengths of sinks are errors
    # what a layout has besides lengths and strides: the kind, the axes of length 1, and whether entries are adjacent
    forms = [(x.kind, tuple([n == 1 for n in x.shape]), x.strides[-1:] == (x.itemsize,)) for x in arrays]
    return sizes, choice, lengths, *forms, structure
