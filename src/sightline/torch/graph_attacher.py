"""The calls of the call cache in torch's graph: the attacher of their results, and their bound backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import layouts as array_layouts
from ..dispatch.call_cache import NO_INPUTS, CallResult, KernelInputs
from ..dispatch.call_request import Request
from ..dispatch.kernel_list import make_plan
from ..formula.parameters import structure_of
from ..problem.kernel import Gradients, Plan
from ..problem.problem import NUM_OPERANDS, Problem, make_problem
from ..statistics import Statistic, unwrap_mean
from .autograd import GraphCall, connect, trainable_inputs, with_saved_tables, without_tensors
from .backward_inputs import BackwardInputs, WeightsSum, read_inputs

if TYPE_CHECKING:
    from ..cpu.calls.launch_record import LaunchRecord
    from ..cpu.launch.backward import BoundBackwardCall

NUM_READ = 6  # what the backward kernel reads besides the tables: query, key, value, output, d_output and lse
MAX_BACKWARD_CALLS = 8  # bound calls of the backward pass of one cached call


class CachedGraphCall(GraphCall):
    """A call that the call cache ran."""

    def __init__(self, attacher: GraphAttacher, request: Request, result: CallResult) -> None:
        if isinstance(request.sinks, np.ndarray):
            request = request._replace(
                sinks=request.sinks.copy()
            )  # the caller may change them before the backward pass
        self.wanted_tables, self.num_inputs = attacher.wanted_tables, attacher.num_inputs
        self.attacher, self.request, self.seed = attacher, request, result.seed
        self.own_lse = None if attacher.has_statistics else result.lse
        self.is_lse_imprecise = result.is_lse_imprecise
        self.kernel, self.threads = attacher.kernel, attacher.threads

    def with_inputs(self, inputs: Sequence[Tensor]) -> Problem:
        query, key, value, *rest = inputs
        mask, score = self.formulas = self.request.formulas()[:2]
        options = {"mask": mask, "score": score, "see": self.statistics, "sinks": self.sinks(inputs), "seed": self.seed}
        problem = make_problem(query, key, value, **options, **self.attacher.options)
        return with_saved_tables(problem, dict(zip(self.wanted_tables, rest, strict=False)))

    def plan(self, problem: Problem) -> Plan:
        return make_plan(problem, self.kernel)

    def tables(self) -> Sequence[Any]:
        return [*self.request.tables, self.request.sinks]

    @property
    def statistics(self) -> Sequence[Statistic]:
        return [unwrap_mean(statistic) for statistic in self.request.see]

    def lse(self, results: Sequence[Tensor]) -> Any:
        return results[1] if self.own_lse is None else self.own_lse

    def sinks(self, inputs: Sequence[Tensor]) -> Any:
        """Return the sinks: the saved tensor if they are learned, else the array of the request."""
        return inputs[-1] if self.attacher.has_learned_sinks else self.request.sinks


class _HostGraphCall(CachedGraphCall):
    """A call whose arrays are in the processor's memory."""

    def differentiate_bound(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> Sequence[Tensor] | None:
        given = None if self.is_lse_imprecise else self.read_inputs(gradients, inputs, results)
        found = None if given is None else self.find(inputs, results, given)
        if given is None or found is None or found[0] is None:
            return None
        bound, sums, _, *addresses = found
        if bound.weights_sum is not None:
            request, sinks = self.request_for(given, addresses), self.sinks(inputs)
            d_lse = bound.weights_sum.subtract(given.d_lse, request, inputs[1], results[0], sinks, self.threads)
            if d_lse is None:
                return None
            given = given._replace(d_lse=d_lse)
        table_sums: Sequence[Any] = ()
        if sums is None:
            computed = self.run(bound, addresses, given, (inputs, results))
            if computed is None:
                return None
            sums, table_sums = computed
        combined: list[Tensor] = bound.call.combine(sums)
        dtype = inputs[0].dtype
        if dtype is not self.attacher.accumulator:
            combined = [gradient.to(dtype) for gradient in combined]
        if self.num_inputs > NUM_OPERANDS:
            combined += self.differentiate_learned(bound.call, inputs, results, given, table_sums)
        return combined

    def differentiate_learned(
        self,
        call: BoundBackwardCall,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        given: BackwardInputs,
        table_sums: Sequence[Any],
    ) -> list[Tensor]:
        """Return the gradients of the learned tables and of the learned sinks."""
        from ..cpu.launch.table_gradients import differentiate_sinks, sum_table_gradients

        learned = dict(zip(self.wanted_tables, inputs[NUM_OPERANDS:], strict=False))
        found = sum_table_gradients(call.table_gradients, table_sums, learned)
        gradients: list[Tensor] = [found[index] for index in self.wanted_tables]
        if self.attacher.has_learned_sinks:
            lse = torch.as_tensor(self.lse(results))
            gradients.append(differentiate_sinks(inputs[-1], given.d_output, given.d_lse, results[0], lse))
        return gradients

    def read_inputs(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> BackwardInputs | None:
        """Return what a bound call reads, with the saved tensors in place of the learned tables; None if none can."""
        attacher, lse = self.attacher, self.lse(results)
        given = read_inputs(self.request, attacher.shapes, gradients, inputs[:NUM_OPERANDS], lse, results)
        if given is None or not attacher.learned_places:
            return given
        tables = list(given.tables)
        for place, tensor in zip(attacher.learned_places, inputs[NUM_OPERANDS:], strict=False):
            tables[place] = tensor
        return given._replace(tables=tuple(tables))

    def request_for(self, given: BackwardInputs, addresses: Sequence[int]) -> Request:
        """Return the request for arrays at these addresses: those of `read_arrays`."""
        used = *addresses[:NUM_OPERANDS], *addresses[NUM_READ:]
        return self.request._replace(tables=given.tables, numbers=given.numbers, addresses=used)

    def find(self, inputs: Sequence[Tensor], results: Sequence[Tensor], given: BackwardInputs) -> Any:
        """Return the result of `run_or_find` for the inputs, output, d_output, lse and the tables.

        Hooks on saved tensors may have changed the layouts of the inputs.
        """
        calls, arrays = self.attacher.backward_calls, self.read_arrays(inputs, results, given)
        return array_layouts.run_or_find(calls, given.structure, given.numbers, *arrays)

    def read_arrays(
        self, inputs: Sequence[Tensor], results: Sequence[Tensor], given: BackwardInputs
    ) -> tuple[Any, ...]:
        """Return the arrays that a bound call reads."""
        return *inputs[:NUM_OPERANDS], results[0], given.d_output, self.lse(results), *given.tables

    def run(
        self, bound: _BackwardCall, addresses: Sequence[int], given: BackwardInputs, keep_alive: tuple[Any, ...]
    ) -> Any:
        """Run the call. Return the sums of the gradients and those of the tables; None if a sum is not finite.

        `addresses` are those of the operands and the tables, and `keep_alive` begins with the inputs.
        """
        call, sums, inputs = bound.call, [make() for make in bound.makers], keep_alive[0]
        table_sums = call.make_table_sums()
        fields = dict(zip(call.read_fields, addresses, strict=False))
        fields |= dict(zip(call.sum_fields, [array.data_ptr() for array in sums], strict=True))
        if given.d_lse is not None:
            fields["d_lse"] = given.d_lse.data_ptr()
        request = self.request_for(given, addresses)
        tables, table_addresses, numbers = NO_INPUTS if bound.inputs is None else bound.inputs.of(request)
        outputs = [array_layouts.numpy_address(array) for array in table_sums]
        words = call.make_words(fields, table_addresses, numbers, outputs, self.seed or 0)
        status = call.run(self.threads, words, numbers, inputs[1], (*keep_alive, given, sums, table_sums, tables))
        self.prepare_direct_call(bound, inputs[1].shape[-2])
        return None if status is None else (sums, table_sums)

    def prepare_direct_call(self, bound: _BackwardCall, num_keys: int) -> None:
        """Store a copy of the call with a record for direct calls, if generated code can run the call."""
        call, has_dropout = bound.call, bool(self.attacher.options["dropout"])
        reads_given_inputs = not bound.key[1] and (bound.inputs is None or bound.inputs.is_identity)
        if bound.needs_record and reads_given_inputs and not call.table_sums and not has_dropout:
            record = call.make_direct_record(self.threads, num_keys, len(bound.makers))
            if record is not None:
                self.attacher.backward_calls[bound.key] = replace(bound, record=record)

    def keep(
        self,
        found: Gradients,
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        call, calls = found.bound_call, self.attacher.backward_calls
        given = self.read_inputs(gradients, inputs, results)
        if given is None or len(calls) >= MAX_BACKWARD_CALLS:
            return
        request = self.request._replace(tables=given.tables, numbers=given.numbers)
        own = KernelInputs.bind(call, request, (*self.formulas, *found.bound_formulas))
        read = array_layouts.read_arrays(*self.read_arrays(inputs, results, given))
        if own is None or read is None or read[1:][: len(call.first_operands)] != call.first_operands:
            return
        weights_sum = None
        if given.needs_weights_sum:
            weights_sum = WeightsSum.bind(found.bound_sum, request, (*self.formulas, found.bound_formulas[0]))
            if weights_sum is None:
                return
        makers = tuple([make_empty(shape, self.attacher.accumulator) for shape in call.sum_shapes])
        key = read[0], given.structure
        calls.setdefault(key, _BackwardCall(key, call, own if own.tables or own.numbers else None, makers, weights_sum))


@dataclass(frozen=True)
class _BackwardCall:
    """A bound call of the backward pass, an entry for `arrays.layouts.run_or_find`.

    key : its key in `GraphAttacher.backward_calls`
    inputs : its tables and numbers; None if it has none
    makers : functions that allocate the sums of the gradients of query, key and value
    weights_sum : the sum that is subtracted from d_lse; None for 0
    record : the record for direct calls; None if there is none
    """

    key: tuple[bytes, tuple[Any, ...]]
    call: BoundBackwardCall
    inputs: KernelInputs | None
    makers: tuple[Callable[[], Tensor], ...]
    weights_sum: WeightsSum | None = None
    record: LaunchRecord | None = None

    @property
    def direct_record(self) -> int:
        return 0 if self.record is None else self.record.address

    @property
    def needs_record(self) -> bool:
        """True if the call has no record, or one with memory for fewer tile ranges than the bound call has."""
        search = self.call.search
        return self.record is None or (search is not None and 0 < self.record.capacity < search.capacity)


def make_empty(shape: tuple[int, ...], dtype: torch.dtype | str) -> Callable[[], Tensor]:
    """Return a function that allocates a tensor of this shape and dtype."""
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    example = torch.empty((), dtype=dtype).expand(shape)  # it has the memory of one number
    return partial(torch.empty_like, example)  # half the time of `torch.empty` with a dtype


class GraphAttacher:
    """The function that joins the results of a cached call to torch's graph; see `call_cache.CachedCall`.

    Attributes
    ----------
    options : the arguments of `make_problem` that are the same in every call
    wanted_tables : the indices in `Problem.tables` of the learned tables
    learned_places : the indices in `Request.tables` of the learned tables
    has_learned_sinks : True if the sinks require a gradient
    num_inputs : how many inputs the graph has: query, key, value, the learned tables and the learned sinks
    squeezed_axis : the axis of the heads in the graph's results if the caller's arrays have no such axis; else None
    backward_calls : the bound calls of the backward pass by the layouts of the arrays that they read
    graph_call : the class of the calls in the graph
    """

    @classmethod
    def of(
        cls,
        request: Request,
        formulas: Sequence[Any],
        caller_inputs: Sequence[Tensor],
        problem: Problem,
        kernel: str | None,
        threads: int | None,
        graph_call: type[CachedGraphCall] | None = None,
    ) -> GraphAttacher | None:
        """Return the attacher of a call with gradients; None if the problem's inputs are not those of the caller.

        `formulas` are those of the call, from `Request.formulas`. `graph_call` is the class of the calls in the graph,
        by default that of arrays in the processor's memory.
        """
        inputs, wanted = trainable_inputs(problem)
        origins = [id(table) for table in structure_of(*formulas).tables]
        places = [origins.index(problem.tables[index].origin) for index in wanted]
        own = [*caller_inputs, *[request.tables[place] for place in places]]
        has_learned_sinks = problem.sinks is not None and bool(problem.sinks.requires_grad)
        if has_learned_sinks:
            own.append(request.sinks)
        pairs = list(zip(own, inputs, strict=False))
        if problem.heads_squeezed and all(_adds_head_axis(x, y) for x, y in pairs[:NUM_OPERANDS]):
            pairs = pairs[NUM_OPERANDS:]
        if not all(x is y for x, y in pairs):
            return None
        attacher = cls(problem, kernel, threads)
        attacher.graph_call = graph_call or _HostGraphCall
        attacher.wanted_tables, attacher.learned_places = wanted, tuple(places)
        attacher.has_learned_sinks, attacher.num_inputs = has_learned_sinks, len(own)
        return attacher

    wanted_tables: tuple[int, ...] = ()
    learned_places: tuple[int, ...] = ()
    has_learned_sinks, num_inputs = False, NUM_OPERANDS
    graph_call: type[CachedGraphCall] = _HostGraphCall

    def __init__(self, problem: Problem, kernel: str | None, threads: int | None) -> None:
        self.options = {"scale": problem.scale, "dropout": problem.dropout}
        self.shapes = replace(without_tensors(problem), mask=None, score=None, see=())
        self.has_statistics = bool(problem.see)  # if there are none, lse is no result
        self.squeezed_axis = len(problem.batch_shape) if problem.heads_squeezed else None
        self.kernel, self.threads = kernel, threads
        self.accumulator = getattr(torch, problem.accumulator)
        self.backward_calls: dict[Any, Any] = {}

    def __copy__(self) -> GraphAttacher:
        """Return an attacher for calls with other lengths: the same options, and no bound backward calls."""
        other = object.__new__(GraphAttacher)
        other.__dict__ |= self.__dict__ | {"backward_calls": {}}
        return other

    def __call__(self, request: Request, query: Tensor, key: Tensor, value: Tensor, result: CallResult) -> CallResult:
        axis, lse, operands = self.squeezed_axis, result.lse, (query, key, value)
        results = (result.output, lse, *result.arrays) if self.has_statistics else (result.output,)
        if axis is not None:  # the graph has the head axis
            operands = query.unsqueeze(-3), key.unsqueeze(-3), value.unsqueeze(-3)
            results, lse = tuple([x.unsqueeze(axis) for x in results]), lse[..., None, :]
        call = self.graph_call(self, request, result._replace(lse=lse))
        learned = [request.tables[place] for place in self.learned_places]
        if self.has_learned_sinks:
            learned.append(request.sinks)
        results = connect(call, results, [*operands, *learned])
        if axis is not None:
            results = tuple([x.squeeze(axis) for x in results])
        lse = results[1] if self.has_statistics else None
        return CallResult(results[0], lse, results[2:], result.is_lse_imprecise, result.seed)


def _adds_head_axis(array: Tensor, operand: Tensor) -> bool:
    """True if `operand` is a view of the array with one more axis, a head axis of length 1."""
    has_shape = operand.ndim == array.ndim + 1 and operand.numel() == array.numel()
    return has_shape and operand.data_ptr() == array.data_ptr() and operand.requires_grad == array.requires_grad
