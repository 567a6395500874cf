"""Bound launches: the kernel launches of one call, and the call cache's entries, which repeat them without planning.

    first call:      attention(q, k, v, mask=causal())  →  KernelLaunch, ...  →  RecordedCall  →  BoundLaunches
    repeated call:   attention(q, k, v, mask=causal())  →  Request  →  GpuEntry  →  BoundLaunches  →  kernels

The repeated calls have arrays of the same layouts (dtypes, shapes and strides) and the same formulas, which decide the
compiled kernels, grids, tile ranges and numbers. A run allocates the arrays that the kernels write, and passes the
addresses of these arrays and of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from ...call import call_cache
from ...call.backward_calls import BACKWARD_OPERANDS, BackwardInputs, BackwardPasses
from ...call.call_cache import Entry, EntryResult, FirstCall, Operands, store_call
from ...call.problem import Problem
from ...call.request import Request
from ...formula.expression import Expression
from ...formula.parameters import structure_of
from ...formula.tables import Table
from ...formula.tensor_cache import retain, to_device
from ..kernels.tile_loop import GpuSchedule
from ..kernels.tile_ops import KernelArrays
from .arguments import dot_precision, dropout_state, prepare_sinks, prepare_table
from .launches import KernelLaunch

ADDRESS_ALIGNMENT = 16  # bytes; Triton compiles other kernels for arrays that are not so aligned
MAX_CALLS_BY_NUMBERS = 64  # calls that differ only in the numbers of their formulas: each has kernels of its own
# Fields of `KernelArrays` whose arrays a call allocates without filling them. If an array of such a field is an input
# of the call, the call does not allocate it.
WRITTEN_ARRAYS = frozenset(
    {"output", "lse", "nonfinite_flags", "split_output", "split_lse", "seen", "rows", "d_query", "d_key", "d_value"}
)
TUPLES_OF_INPUTS = ("tables", "dropout_state")  # each of these fields holds several inputs


class RecordedCall(NamedTuple):
    """The launches of a call or of its backward pass, and the arrays that they read and write.

    The launches can be bound to other arrays if they depend only on the layouts of these arrays and on the formulas,
    and not on the numbers in the tables (`Table.with_unknown_entries`).

    launches : every launch, and what `KernelLaunch.launch` returned for it
    tables : the tables that the kernels read
    results : the arrays of the call's results
    others : the inputs besides those of the problem, by the fields of `KernelArrays`
    """

    problem: Problem
    launches: Sequence[tuple[KernelLaunch, Any]]
    tables: Sequence[Table]
    results: Sequence[Any]
    others: Mapping[str, Any] | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of the call by the fields of `KernelArrays`: a tensor, or a tuple of tensors or integers."""
        problem = self.problem
        inputs = {"query": problem.query, "key": problem.key, "value": problem.value, **(self.others or {})}
        inputs["tables"] = tuple([table.array for table in self.tables])
        if problem.sinks is not None:
            inputs["sinks"] = problem.sinks
        if problem.dropout and (state := dropout_state(problem, problem.seed)):
            inputs["dropout_state"] = state
        return inputs

    @property
    def is_compiled(self) -> bool:
        """False if Triton's interpreter runs the kernels."""
        return all(isinstance(launch.kernel, JITFunction) for launch, _ in self.launches)

    @property
    def flat_inputs(self) -> list[Any]:
        """The inputs without tuples: tensors and integers."""
        return [x for value in self.inputs.values() for x in (value if isinstance(value, tuple) else (value,))]

    def keep(self, call: FirstCall) -> None:
        """Store an entry; see `Result.keep`."""
        request, problem = call.request, call.problem
        read = problem.query, problem.key, problem.value
        if any(x.data_ptr() != y.data_ptr() for x, y in zip(read, call.operands, strict=True)):
            return
        launches = BoundLaunches.of(self, call.formulas, request.tables)
        if launches is None:
            return
        variants: Any = call_cache.calls.get(request.key)
        if not isinstance(variants, EntriesByNumbers) or len(variants.calls) >= MAX_CALLS_BY_NUMBERS:
            variants = EntriesByNumbers()
            store_call(call_cache.calls, request.key, variants)
        variants.calls[request.numbers] = GpuEntry(*call.describe()[0], launches)

    def make_entry(
        self,
        passes: BackwardPasses,
        inputs: BackwardInputs,
        addresses: Sequence[int],
        formulas: Sequence[Expression | None],
    ) -> BackwardLaunches | None:
        """Return an entry; see `Gradients.make_entry`."""
        own = self.inputs
        expected = [own[name].data_ptr() for name in BACKWARD_OPERANDS]
        if inputs.d_output.dtype is not inputs.output.dtype or [*addresses[: len(expected)]] != expected:
            return None
        launches = BoundLaunches.of(self, formulas, inputs.tables)
        return None if launches is None else BackwardLaunches(launches)


class BoundLaunch(NamedTuple):
    """One launch of a kernel, without the values that change from call to call.

    run : the function that launches the kernel
    pack : a function of (values, constants) that returns the arguments of `run`; `LaunchBinder` explains the values
    constants : the list for `pack` of what is the same in every call
    """

    run: Callable[..., Any]
    pack: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]
    constants: Sequence[Any]


class UnboundArgumentError(Exception):
    """`LaunchBinder` met an array that is no input, that the call did not allocate, and that no schedule holds."""


class LaunchBinder:
    """Makes a `BoundLaunch` of each launch of a recorded call.

    The values of a call are numbered: first `RecordedCall.flat_inputs`, then the arrays that the call allocates. An
    array's value is its address, or in Triton's interpreter the tensor itself.

    Parameters
    ----------
    recorded : the call

    Attributes
    ----------
    makers : functions that allocate the arrays of a call
    schedules : the schedules that the launches read

    Raises
    ------
    UnboundArgumentError
        A launch reads an array that a repeated call does not have.
    """

    def __init__(self, recorded: RecordedCall) -> None:
        self.is_compiled = recorded.is_compiled
        self.numbers: dict[str, int] = {}  # the number of the first value of each input
        self.num_inputs = 0
        for name, given in recorded.inputs.items():
            self.numbers[name] = self.num_inputs
            self.num_inputs += len(given) if isinstance(given, tuple) else 1
        self.written: dict[int, int] = {}  # the index in `makers` of each allocated array, by the array's id
        self.makers: list[Callable[[], Any]] = []
        self.schedules: list[GpuSchedule] = []
        self.constants: list[Any] = []  # of the launch that is being bound

    def bind(self, launch: KernelLaunch, compiled: Any) -> BoundLaunch:
        """Return the bound launch; `compiled` is what `KernelLaunch.launch` returned."""
        self.constants = []
        arguments = launch.kernel_arguments()
        text = ", ".join([self._expression(name, arguments[name]) for name in launch.kernel.arg_names])
        run = compiled[(launch.programs, 1, 1)] if self.is_compiled else launch.kernel[(launch.programs,)]
        return BoundLaunch(run, _compile(f"lambda values, constants: ({text},)"), self.constants)

    def _expression(self, name: str, value: Any) -> str:
        """Return the Python expression of an argument or of a field, which reads the lists `values` and `constants`."""
        if value is None:
            return "None"
        if name in self.numbers:
            number = self.numbers[name]
            if name in TUPLES_OF_INPUTS:
                return self._tuple(value, [self._input(number + k, member) for k, member in enumerate(value)])
            return self._input(number, value)
        if isinstance(value, GpuSchedule):
            self.schedules.append(value)
            if self.is_compiled:
                value = value._replace(rows=value.rows.data_ptr(), ranges=value.ranges.data_ptr())
        elif isinstance(value, torch.Tensor):
            return f"values[{self.num_inputs + self._index_of_written(name, value)}]"
        elif isinstance(value, tuple) and any(isinstance(x, torch.Tensor | tuple) for x in value):
            names = value._fields if isinstance(value, KernelArrays) else [name] * len(value)
            return self._tuple(value, [self._expression(*field) for field in zip(names, value, strict=True)])
        return self._constant(value)

    def _input(self, number: int, value: Any) -> str:
        """Return the expression of an input: an array, an integer, or a tuple that begins with the array."""
        if not isinstance(value, tuple):
            return f"values[{number}]"
        return self._tuple(value, [f"values[{number}]", *map(self._constant, value[1:])])

    def _constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"constants[{len(self.constants) - 1}]"

    def _tuple(self, value: tuple[Any, ...], parts: Sequence[str]) -> str:
        """Return the expression of a tuple with these parts.

        In Triton's interpreter a named tuple keeps its class, because kernels read its fields by name.
        """
        text = f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        return text if self.is_compiled or type(value) is tuple else self._constant(type(value)) + text

    def _index_of_written(self, name: str, array: Any) -> int:
        if name not in WRITTEN_ARRAYS:
            raise UnboundArgumentError(name)
        if id(array) not in self.written:
            self.written[id(array)] = len(self.makers)
            # `empty_like` takes half the time of `torch.empty` with a dtype; the example has the memory of one number
            example = array.new_empty(()).expand(array.shape)
            self.makers.append(lambda: torch.empty_like(example))
        return self.written[id(array)]


class BoundTable(NamedTuple):
    """A table of the kernels.

    place : its index in `Request.tables`
    strides : its strides on the device
    must_move : True if the kernels cannot read the array of the request, so that every run copies it to the device
    """

    place: int
    strides: tuple[int, ...]
    must_move: bool


class BoundLaunches:
    """The launches of a recorded call. They can run again for other arrays of the same layouts.

    The class method `of` makes the object. `LaunchBinder` explains `launches`, `makers` and `schedules`.

    Parameters
    ----------
    recorded : the call
    tables : the tables that the kernels read
    """

    def __init__(self, recorded: RecordedCall, tables: Sequence[BoundTable], binder: LaunchBinder) -> None:
        problem = recorded.problem
        self.tables, self.is_compiled = tables, recorded.is_compiled
        self.has_sinks, self.has_dropout = problem.sinks is not None, "dropout_state" in recorded.inputs
        # the parameters of the problem, without its arrays
        self.problem = replace(problem, query=None, key=None, value=None, sinks=None, mask=None, score=None, see=())
        self.precision = dot_precision(problem.query)
        self.launches = [binder.bind(*one) for one in recorded.launches]
        self.makers, self.schedules = binder.makers, binder.schedules
        self.results = [binder.written[id(array)] for array in recorded.results]  # indices in `makers`
        self.streams: set[int] = set()  # the streams that have read the schedules

    @classmethod
    def of(
        cls, recorded: RecordedCall, formulas: Sequence[Expression | None], tables: Sequence[Any]
    ) -> BoundLaunches | None:
        """Return the launches of a recorded call; None if they depend on more than layouts and formulas.

        The launches may depend on the entries of a table, on an address that is not aligned, or on an array that a run
        does not have. `formulas` and `tables` are the attributes of the call's `Request`.
        """
        bound_tables = _bind_tables(recorded, formulas, tables)
        addresses = [x.data_ptr() for x in recorded.flat_inputs if isinstance(x, torch.Tensor)]
        has_kernels = not recorded.is_compiled or all(compiled is not None for _, compiled in recorded.launches)
        if bound_tables is None or not has_kernels or reduce(or_, addresses) % ADDRESS_ALIGNMENT:
            return None
        try:
            return cls(recorded, bound_tables, LaunchBinder(recorded))
        except UnboundArgumentError:
            return None

    def read_inputs(
        self, arrays: Sequence[Any], addresses: Sequence[int], tables: Sequence[Any], sinks: Any
    ) -> tuple[list[Any], list[int]] | None:
        """Return the arrays that the kernels read, query first, and their addresses.

        The result is None if these launches cannot serve the call, which must then be planned.

        Parameters
        ----------
        arrays : the tensors that the kernels read besides tables and sinks; query is the first
        addresses : the addresses of these tensors, and of `tables`
        tables, sinks : the tables and the sinks of the request
        """
        query = arrays[0]
        if query.dtype is torch.float32 and dot_precision(query) != self.precision:
            return None
        read, values = list(arrays), list(addresses[: len(arrays)])
        for place, strides, must_move in self.tables:
            table, address = tables[place], addresses[len(arrays) + place]
            if must_move:
                table = prepare_table(table, query)
                address = table.data_ptr()
                if table.stride() != strides:
                    return None
            read.append(table)
            values.append(address)
        if self.has_sinks:
            read.append(prepare_sinks(to_device(sinks, query)))
            values.append(read[-1].data_ptr())
        return None if reduce(or_, values) % ADDRESS_ALIGNMENT else (read, values)

    def run(self, inputs: tuple[list[Any], list[int]], seed: int) -> list[Any]:
        """Launch the kernels on the current stream for the inputs of `read_inputs`, and return the results.

        `seed` is the seed of dropout.
        """
        arrays, addresses = inputs
        query = arrays[0]
        device = query.get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.run(inputs, seed)
        words = dropout_state(self.problem, seed) if self.has_dropout else ()
        written = [make() for make in self.makers]
        if self.is_compiled:
            self._launch([*addresses, *words, *[array.data_ptr() for array in written]], query)
        else:
            for launch, pack, constants in self.launches:
                launch(*pack([*arrays, *words, *written], constants))
        return [written[index] for index in self.results]

    def _launch(self, values: Sequence[Any], query: Any) -> None:
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        if self.schedules:
            self._retain_schedules(query, stream)
        for launch, pack, constants in self.launches:
            launch(*pack(values, constants), stream=stream)

    def _retain_schedules(self, query: Any, stream: int) -> None:
        """Keep the memory of the schedules from being reused while kernels on the stream read it; see `retain`.

        One call of `retain` covers all later work of the stream, but not the work that a CUDA graph captures.
        """
        if stream in self.streams and not (query.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        for schedule in self.schedules:
            retain(schedule, query)
        self.streams.add(stream)


def _bind_tables(
    recorded: RecordedCall, formulas: Sequence[Expression | None], tables: Sequence[Any]
) -> list[BoundTable] | None:
    """Return the tables of the kernels; None if the launches may depend on the entries of a table."""
    origins, bound = [id(table) for table in structure_of(*formulas).tables], []
    for table in recorded.tables:
        if not (table.has_unknown_entries and table.origin in origins):
            return None
        place, prepared = origins.index(table.origin), prepare_table(table.array, recorded.problem.query)
        array = tables[place]
        must_move = not (isinstance(array, torch.Tensor) and array.data_ptr() == prepared.data_ptr())
        bound.append(BoundTable(place, prepared.stride(), must_move))
    return bound


@lru_cache(1024)
def _compile(source: str) -> Any:
    return eval(source)


@dataclass
class GpuEntry(Entry):
    """A cached call of Triton kernels: `launches` are the kernels with their arguments, without addresses and seed."""

    launches: BoundLaunches

    def run(self, request: Request, operands: Operands, results: Sequence[Any] | None) -> Any:
        inputs = self.launches.read_inputs(operands, request.addresses, request.tables, request.sinks)
        if inputs is None:
            return None
        seed = request.seed or 0
        if request.seed is None and self.launches.has_dropout and self.framework.draw_seed is not None:
            seed = self.framework.draw_seed()
        arrays = self.launches.run(inputs, seed)
        if self.squeezed_axis is not None:
            arrays = [array.squeeze(self.squeezed_axis) for array in arrays]
        output, lse, *others = arrays
        return self.hook(self, request, operands, EntryResult(output, lse, others, False, seed))


class EntriesByNumbers:
    """The calls that differ only in the numbers of their formulas, such as the width of a window, by these numbers."""

    prepared = None  # no generated code can run it; see `cpu.calls.direct_call`

    def __init__(self) -> None:
        self.calls: dict[tuple[float, ...], GpuEntry] = {}

    def run(self, request: Request, operands: Operands, results: Sequence[Any] | None) -> Any:
        """Return the answer of the call; None if the call needs the full dispatch."""
        call = self.calls.get(request.numbers)
        return None if call is None else call.run(request, operands, results)


class BackwardLaunches(NamedTuple):
    """A backward pass of Triton kernels that lacks only its inputs."""

    launches: BoundLaunches
    prepared: None = None

    def run(
        self, passes: BackwardPasses, inputs: BackwardInputs, addresses: Sequence[int], results: Any
    ) -> list[Any] | None:
        """Return the gradients; see `BackwardPasses.entries`."""
        arrays = inputs.arrays[: len(BACKWARD_OPERANDS)]
        read = self.launches.read_inputs(arrays, addresses, inputs.tables, None)
        return None if read is None else self.launches.run(read, inputs.seed)
