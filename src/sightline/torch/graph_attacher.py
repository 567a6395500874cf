"""Join the results of repeated calls, which the call cache runs, to torch's graph, and repeat their backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ..api.kernels import make_plan
from ..call.backward_calls import BackwardInputs, BackwardPasses, ForwardPass, read_inputs
from ..call.call_cache import EntryResult
from ..call.kernel import Gradients, Plan
from ..call.problem import NUM_OPERANDS, Problem, make_problem
from ..call.request import Request
from ..statistics import Statistic, unwrap_mean
from .autograd import GraphCall, connect, trainable_inputs, with_saved_tables


class CachedGraphCall(GraphCall):
    """A call that the call cache ran."""

    def __init__(self, attacher: GraphAttacher, request: Request, result: EntryResult, lse: Any) -> None:
        if isinstance(request.sinks, np.ndarray):
            # the caller may change them before the backward pass
            request = request._replace(sinks=request.sinks.copy())
        self.wanted_tables, self.num_inputs = attacher.backward.slots, attacher.num_inputs
        self.attacher, self.request = attacher, request
        self.seed = result.seed if attacher.options["dropout"] else None
        self.own_lse = None if attacher.has_statistics else lse
        self.is_lse_imprecise = result.is_lse_imprecise
        self.kernel, self.threads = attacher.kernel, attacher.threads

    def with_inputs(self, inputs: Sequence[Tensor]) -> Problem:
        query, key, value, *rest = inputs
        mask, score = self.formulas = self.request.formulas()[:2]
        options = {"mask": mask, "score": score, "see": self.statistics, "sinks": self.sinks(inputs), "seed": self.seed}
        problem = make_problem(query, key, value, **options, **self.attacher.options)
        return with_saved_tables(problem, dict(zip(self.wanted_tables, rest, strict=False)))

    def with_seed(self, seed: int) -> GraphCall:
        other = copy(self)
        other.seed = seed
        return other

    def plan(self, problem: Problem) -> Plan:
        return make_plan(problem, self.kernel)

    def tables(self) -> Sequence[Any]:
        tables, sinks = self.request.tables, self.request.sinks
        return tables if sinks is None else (*tables, sinks)

    @property
    def statistics(self) -> Sequence[Statistic]:
        return [unwrap_mean(statistic) for statistic in self.request.see]

    def lse(self, results: Sequence[Tensor]) -> Any:
        return results[1] if self.own_lse is None else self.own_lse

    def sinks(self, inputs: Sequence[Tensor]) -> Any:
        """Return the sinks: the saved tensor if they are learned, else the array of the request."""
        return inputs[-1] if self.attacher.backward.wants_sinks else self.request.sinks


class _CpuGraphCall(CachedGraphCall):
    """A call whose arrays are in the processor's memory."""

    def repeat(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> Sequence[Tensor] | None:
        given, forward = self.read_inputs(gradients, inputs, results)
        return self.attacher.backward.repeat(None if self.is_lse_imprecise else given, forward)

    def read_inputs(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> tuple[BackwardInputs | None, ForwardPass]:
        """Return (the inputs to repeat a backward call, the forward pass). Saved tensors replace the learned tables.

        The inputs are None if no kept call can serve. For example, hooks may have changed layouts of saved tensors.
        """
        backward, lse, sinks = self.attacher.backward, self.lse(results), self.sinks(inputs)
        forward = ForwardPass(inputs[:NUM_OPERANDS], results[0], lse, sinks, self.seed or 0, self.threads)
        given = read_inputs(self.request, backward.problem, gradients, forward, results)
        if given is not None and backward.places:
            tables = list(given.tables)
            for place, tensor in zip(backward.places, inputs[NUM_OPERANDS:], strict=False):
                tables[place] = tensor
            given = given._replace(tables=tuple(tables))
        return given, forward

    def keep(
        self,
        found: Gradients,
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        given, forward = self.read_inputs(gradients, inputs, results)
        self.attacher.backward.keep(found, given, self.formulas, forward)


class GraphAttacher:
    """The function that joins the results of a cached call to torch's graph; see `call_cache.ForwardEntry`.

    Attributes
    ----------
    options : the arguments of `make_problem` that are the same in every call
    backward : the kept backward passes; its `slots` and `places` are the positions of the learned tables
    num_inputs : how many inputs the graph has: query, key, value, the learned tables and the learned sinks
    squeezed_axis : the axis of the heads in the graph's results if the caller's arrays have no such axis; else None
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
        """Return the attacher of a call with gradients; None if the problem's inputs are not the caller's tensors.

        `formulas` are the formulas of the call, from `Request.formulas`. `graph_call` is the class of the calls in the
        graph, by default the class for arrays in the processor's memory.
        """
        inputs, wanted = trainable_inputs(problem)
        has_learned_sinks = problem.sinks is not None and bool(problem.sinks.requires_grad)
        backward = BackwardPasses.of(problem, formulas, wanted, has_learned_sinks)
        own = [*caller_inputs, *[request.tables[place] for place in backward.places]]
        if has_learned_sinks:
            own.append(request.sinks)
        pairs = list(zip(own, inputs, strict=False))
        if problem.heads_squeezed and all(_adds_head_axis(x, y) for x, y in pairs[:NUM_OPERANDS]):
            pairs = pairs[NUM_OPERANDS:]
        if not all(x is y for x, y in pairs):
            return None
        return cls(problem, backward, kernel, threads, len(own), graph_call or _CpuGraphCall)

    def __init__(
        self,
        problem: Problem,
        backward: BackwardPasses,
        kernel: str | None,
        threads: int | None,
        num_inputs: int,
        graph_call: type[CachedGraphCall],
    ) -> None:
        self.options = {"scale": problem.scale, "dropout": problem.dropout, "row_formats": problem.row_formats}
        self.backward, self.num_inputs, self.graph_call = backward, num_inputs, graph_call
        self.has_statistics = bool(problem.see)  # if there are none, lse is no result
        self.squeezed_axis = len(problem.batch_shape) if problem.heads_squeezed else None
        self.kernel, self.threads = kernel, threads

    def __copy__(self) -> GraphAttacher:
        """Return an attacher for calls with other lengths: with the same options, but without kept backward passes."""
        other = object.__new__(GraphAttacher)
        other.__dict__ |= self.__dict__ | {"backward": replace(self.backward)}
        return other

    def __call__(self, request: Request, query: Tensor, key: Tensor, value: Tensor, result: EntryResult) -> EntryResult:
        axis, lse = self.squeezed_axis, result.lse
        inputs: tuple[Any, ...] = query, key, value
        results = (result.output, lse, *result.arrays) if self.has_statistics else (result.output,)
        if axis is not None:  # the graph has the head axis
            inputs = query.unsqueeze(-3), key.unsqueeze(-3), value.unsqueeze(-3)
            results, lse = tuple([x.unsqueeze(axis) for x in results]), lse[..., None, :]
        call, backward = self.graph_call(self, request, result, lse), self.backward
        if backward.places:
            inputs += tuple([request.tables[place] for place in backward.places])
        if backward.wants_sinks:
            inputs += (request.sinks,)
        results = connect(call, results, inputs)
        if axis is not None:
            results = tuple([x.squeeze(axis) for x in results])
        lse = results[1] if self.has_statistics else None
        return EntryResult(results[0], lse, results[2:], result.is_lse_imprecise, result.seed)


def _adds_head_axis(array: Tensor, operand: Tensor) -> bool:
    """True if `operand` is a view of the array with one more axis, a head axis of length 1."""
    has_shape = operand.ndim == array.ndim + 1 and operand.numel() == array.numel()
    return has_shape and operand.data_ptr() == array.data_ptr() and operand.requires_grad == array.requires_grad
