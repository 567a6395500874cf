"""A cache of attention calls: a call with the layouts and the structure of an earlier call goes straight to its kernel.

    attention(q, k, v, mask=j < table(lengths)[b])  →  Request  →  Entry  →  kernel

`request` computes the structure of a call: its options, and its formulas without numbers and tables. `answer` looks the
call up by `CallLookup.find_or_run`, and runs it. A call that is not found needs the full dispatch, the way of a first
call: all checks, the choice of a kernel, and its planning. Calls that differ only in lengths and strides form a family,
such as the steps of a decoding loop. A call of a known family is bound for its lengths without the full dispatch. The
entries and families of the CPU's kernels are in `cpu.launch.forward_entry`, those of Triton's kernels in
`gpu.launch.bound_launches`.

A repeated call takes from an earlier call what follows from the key: the kernel, the values of its bound arguments
(lengths, strides, offsets of batches), and the checks of shapes, dtypes and options. The key has the type, dtype, shape
and strides of every array of the call, tables, masks and sinks included, the structure of the formulas and the options.
A repeated call reads or computes anew:

- the addresses of all arrays, and a conversion of each table that the kernel cannot read as it is (an entry is made
  only if the kernel reads the caller's own query, key and value, and `BoundCall.prepare` checks the layout of each
  table);
- numbers of formulas, seed, sinks, and the environment variable SIGHTLINE_CPU;
- tile ranges, and the checks that indices stay inside their tables and that whole numbers are not too large, if they
  depend on entries of tables or on numbers.

A backward pass takes output and lse from its forward pass, so the entries of all tables must be the same in both
passes: `sightline.torch.autograd` compares counts of writes to tensors, and checksums of NumPy arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.caching import store_entry
from ..arrays.layouts import NO_TENSORS, Tensors, read_arrays
from ..arrays.operations import Framework
from ..formula.expression import Expression
from ..statistics import Statistic
from ..statistics.dispatch import FusedStatistics
from .problem import Problem
from .request import Request, make_tuple
from .spec import build_seen

if TYPE_CHECKING:
    from .kernel import Result

Operands = tuple[Any, Any, Any]  # query, key and value
MAX_CACHED_CALLS = 256  # a call that was used is moved to the end, so the least recently used is dropped

calls: OrderedDict[Any, Any] = OrderedDict()  # calls and appends by key; the least recently used is the first
families: OrderedDict[Any, Any] = OrderedDict()  # one of these calls for each family


def clear() -> None:
    """Forget all calls."""
    calls.clear()
    families.clear()


def answer(request: Request, operands: Operands) -> tuple[Any, Request | None]:
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
        entry = LOOKUP.find_relative(request, operands)
    else:
        mark_as_used(calls, request.key)
    if entry is not None and not LOOKUP.is_generated:
        LOOKUP.generate()
    result = None if entry is None else entry.run(request, operands, results)
    return (None, request) if result is None else (result, None)


def store_call(calls: dict[Any, Any], key: Any, entry: Any) -> None:
    """Store a call. The dict keeps `MAX_CACHED_CALLS` calls."""
    store_entry(calls, key, entry, MAX_CACHED_CALLS)


def mark_as_used(entries: OrderedDict[Any, Any], key: tuple[Any, ...]) -> None:
    """Move an entry to the end of its dict, so that it is dropped last."""
    try:  # noqa: SIM105 (`contextlib.suppress` takes eight times as long)
        entries.move_to_end(key)
    except KeyError:  # another thread has just dropped the entry
        pass


class CallLookup:
    """Reads arrays and looks calls up in Python. The first repeated call generates code that does so in later calls.

        find_or_run(entries, structure, numbers, operand, ..., table, ...)
            →  (entry, results, layouts, address of operand, ..., address of table, ...), or the only result

    `entries` is a dict of earlier calls: the call cache for forward passes and appends, or the backward passes of one
    cached call. Its keys are (layouts, structure). The attribute `prepared` of an entry is a `PreparedCall` or None. If
    that call is direct, generated code runs it, and `results` is a tuple of its results. A single result of a direct
    call is returned alone. If the call is not direct, `results` is None, and the caller runs the entry. If no entry has
    the key, the entry is None. If only the full dispatch can read the arrays (see `arrays.layouts`), None is returned.

    find_or_run : this function
    tensors : how tensors of torch are read
    is_generated : False until `generate` was called

    `sightline.cpu` sets these two, because the CPU's kernels and generated code have them:

    make_find_or_run : function (tensors) that returns the generated `find_or_run`, or None
    find_relative : function (request, operands) that returns an entry made from a call with other lengths, or None
    """

    make_find_or_run: Callable[[Tensors], Callable[..., Any] | None]
    find_relative: Callable[[Request, Operands], Entry | None]

    def __init__(self) -> None:
        self.serve_tensors(NO_TENSORS)

    def serve_tensors(self, tensors: Tensors) -> None:
        """From now on, read tensors of torch as `tensors` describes, in Python until the next call that is found."""
        self.tensors, self.is_generated = tensors, False
        self.find_or_run: Callable[..., Any] = self.find_in_python

    def generate(self) -> None:
        """From now on, read arrays and run direct calls by a generated function, if there is one."""
        self.find_or_run = self.make_find_or_run(self.tensors) or self.find_or_run
        self.is_generated = True

    def read_arrays(self, *arrays: Any) -> tuple[Any, ...] | None:
        """Return the layouts and addresses of the arrays; None if only the full dispatch can read them."""
        return read_arrays(self.tensors, *arrays)

    def find_in_python(
        self, entries: Mapping[Any, Any], structure: Any, numbers: tuple[float, ...], *arrays: Any
    ) -> tuple[Any, ...] | None:
        """Return (entry or None, None, layouts, *addresses); None if only the full dispatch can read the arrays.

        `numbers` are the numbers of the call's formulas, which only generated code uses.
        """
        found = self.read_arrays(*arrays)
        return None if found is None else (entries.get((found[0], structure)), None, *found)


LOOKUP = CallLookup()


class EntryResult(NamedTuple):
    """The arrays that a cached call computed.

    arrays : the arrays of every statistic except lse, in the order of `Entry.statistics`
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

    statistic : the statistic without its formula
    outputs : places of the statistic's arrays among the forward kernel's outputs; empty if a weights pass computes it
    """

    statistic: Statistic
    outputs: slice


@dataclass
class Entry(ABC):
    """A cached call, which lacks only its inputs.

    framework : the library of query, key, value and output
    statistics : the statistics
    squeezed_axis : the axis of the heads in the arrays of kernels if the caller's arrays have no such axis; else None
    hook : function (entry, request, operands, `EntryResult`) that returns the answer, by default `build_answer`
        Another hook always receives lse. A copy of the hook (`copy.copy`) serves the other calls of the same family.
    prepared, returns_results : subclasses set them: the `PreparedCall` that generated code can run, or None; and True
        if its results are the output and the result of each statistic, in this order
    """

    framework: Framework
    statistics: tuple[CachedStatistic, ...]
    squeezed_axis: int | None
    hook: Hook

    @abstractmethod
    def run(self, request: Request, operands: Operands, results: Sequence[Any] | None) -> Any:
        """Return the answer of the call; None if the call needs the full dispatch.

        `results` has the results of `prepared` if generated code has run that call. Else it is None.
        """

    def build_seen(self, results: Sequence[Any], detach: Any = None) -> tuple[Any, ...]:
        """Return the result of each statistic, as `spec.build_seen` does."""
        return build_seen([statistic for statistic, _ in self.statistics], results, detach)


Hook = Callable[[Any, Request, Operands, EntryResult], Any]
EntryArguments = tuple[Framework, tuple[CachedStatistic, ...], int | None, Hook]


def build_answer(entry: Entry, request: Request, operands: Operands, result: EntryResult) -> tuple[Any, Any]:
    """Return (output, seen) of a cached call."""
    return result.output, entry.build_seen((*result[:2], *result.arrays)) if entry.statistics else ()


class FirstCall(NamedTuple):
    """A call that went through the full dispatch. `store` stores the call, if it can be repeated.

    formulas : the formulas of the call, from `Request.formulas`
    operands : the caller's query, key and value
    problem, result : the problem that was made from the formulas, and its result
    hook : see `Entry`
    """

    request: Request
    formulas: Sequence[Expression | None]
    operands: Operands
    problem: Problem
    result: Result
    hook: Hook = build_answer

    def store(self) -> None:
        if self.result.keep is not None:
            self.result.keep(self)

    def describe(self) -> tuple[EntryArguments, tuple[str, ...]]:
        """Return the arguments of `Entry`, and the dtypes of the forward kernel's outputs for the statistics."""
        problem, fused = self.problem, FusedStatistics(self.problem)
        statistics = [CachedStatistic(x.map_formulas(lambda _: None), fused.places_of(x)) for x in problem.see]
        squeezed_axis = len(problem.batch_shape) if problem.heads_squeezed else None
        dtypes = tuple([dtype for _, dtype in fused.outputs])
        return (problem.framework, tuple(statistics), squeezed_axis, self.hook), dtypes
