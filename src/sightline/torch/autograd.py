"""Attention in torch's graph in eager mode: one `torch.autograd.Function`, without the registered operator.

The registered operator, in the module `operator`, serves torch.compile, transforms, modes and gradients of gradients.
The module `graph_attacher` joins repeated calls, which the call cache runs, to the graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ..arrays.operations import checksum, to_numpy
from ..call.backward_calls import arrays_to_save, split_saved
from ..call.kernel import Gradients, Plan, Result
from ..call.problem import Problem
from ..call.spec import flatten_result
from ..errors import ChangedArrayError
from ..statistics import Statistic
from ..statistics.computation import conditions_of
from . import operator
from .derivatives import Derivative, apply, is_transformed, refuse_old_vmap
from .operator_schema import build_result, make_seed, to_arguments


class GraphCall(ABC):
    """The data of a call that its backward pass needs, besides the tensors that torch saves.

    kernel : the name that the caller gave
    seed : the seed of dropout; None without dropout
    """

    kernel: str | None
    seed: int | None
    threads: int | None
    wanted_tables: tuple[int, ...]  # indices in `Problem.tables` of the tables in the graph
    num_inputs: int  # how many of the saved tensors are inputs; results follow

    @abstractmethod
    def with_inputs(self, inputs: Sequence[Tensor]) -> Problem:
        """Return the problem with these tensors as query, key, value, the wanted tables and the sinks."""

    @abstractmethod
    def with_seed(self, seed: int) -> GraphCall:
        """Return the call with another seed."""

    @abstractmethod
    def plan(self, problem: Problem) -> Plan:
        """Return the plan of the forward pass."""

    @abstractmethod
    def tables(self) -> Sequence[Any]:
        """Return the arrays that the formulas read."""

    @property
    @abstractmethod
    def statistics(self) -> Sequence[Statistic]:
        """The statistics whose arrays are results. In cached calls, a mean is replaced by the statistic it averages."""

    def results_to_save(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the results that the backward pass reads: output, lse if it is a result, and arrays of statistics."""
        return results if len(results) <= 2 else (*results[:2], *arrays_to_save(self.statistics, results))

    def lse(self, results: Sequence[Tensor]) -> Any:
        """Return lse, a tensor or a NumPy array. `results` are what `results_to_save` returned."""
        return results[1]

    def repeat(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> Sequence[Tensor] | None:
        """Return the gradients of the inputs by a kernel call that `keep` has kept; None if no such call can serve."""
        return None

    def keep(
        self,
        found: Gradients,
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        """Keep the kernel call that computed `found` for later backward passes with the same layouts."""
        return


@dataclass(frozen=True)
class _DispatchedCall(GraphCall):
    """A call that no cache served, so that all checks and the choice of a kernel have run."""

    problem: Problem  # holds the tables and constant sinks; query, key, value and learned sinks are saved tensors
    own_plan: Plan
    kernel: str | None
    seed: int | None
    threads: int | None
    wanted_tables: tuple[int, ...]
    num_inputs: int
    own_lse: Tensor | None  # lse if it is no result

    def lse(self, results: Sequence[Tensor]) -> Any:
        return results[1] if self.own_lse is None else self.own_lse

    def with_inputs(self, inputs: Sequence[Tensor]) -> Problem:
        query, key, value, *rest = inputs
        problem = with_saved_tables(self.problem, dict(zip(self.wanted_tables, rest, strict=False)))
        sinks = rest[-1] if len(rest) > len(self.wanted_tables) else problem.sinks
        return replace(problem, query=query, key=key, value=value, sinks=sinks)

    def with_seed(self, seed: int) -> GraphCall:
        return replace(self, problem=replace(self.problem, seed=seed), seed=seed)

    def plan(self, problem: Problem) -> Plan:
        return self.own_plan

    def tables(self) -> Sequence[Any]:
        return [*tables_of(self.problem), self.problem.sinks]

    @property
    def statistics(self) -> Sequence[Statistic]:
        return self.problem.see


class _Attention(torch.autograd.Function):
    """The function that connects results to their inputs in torch's graph. The results are computed before."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, results: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        tables = call.tables()
        ctx.versions = table_versions(tables) if tables else None
        seeds = () if call.seed is None else (make_seed(call.seed),)
        ctx.save_for_backward(*inputs, *call.results_to_save(results), *seeds)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        if ctx.versions:
            check_versions(ctx.versions, call.tables())
        if call.seed is not None:  # a checkpoint saves the results of a second run, which may have drawn another seed
            *saved, seed = saved
            call = call.with_seed(int(seed) % 2**64)
        inputs, results = saved[: call.num_inputs], saved[call.num_inputs :]
        has_graph = torch.is_grad_enabled() or torch.compiler.is_compiling()
        gradients = (_with_contiguous_rows(gradients[0]), *gradients[1:])
        found = None if has_graph else call.repeat(gradients, inputs, results)
        if found is None:
            refuse_old_vmap(gradients)
            given = [gradient for gradient in gradients if gradient is not None]
            if not given:
                return (None,) * (2 + len(inputs))
            needs_operator = has_graph or is_intercepted() or any(type(gradient) is not Tensor for gradient in given)
            differentiate = _differentiate_by_operator if needs_operator else _differentiate
            found = differentiate(call, inputs, gradients, results)
        return (None, None, *found)


# `apply` without its steps for transforms of torch.func: no call inside a transform reaches `connect`
_apply: Any = super(torch.autograd.Function, _Attention).apply


def connect(call: GraphCall, results: tuple[Tensor, ...], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results, connected to the inputs in torch's graph."""
    connected: tuple[Tensor, ...] = _apply(call, results, *inputs)
    return connected


def _with_contiguous_rows(d_output: Tensor | None) -> Tensor | None:
    """Return the gradient with stride 1 on the last axis. The gradient of a sum, for example, has stride 0."""
    if type(d_output) is Tensor and d_output.is_cpu and d_output.stride(-1) != 1:
        return d_output.contiguous()
    return d_output


def tables_of(problem: Problem) -> list[Any]:
    """Return the arrays that the formulas of a problem and of its statistics read."""
    own = [table for condition in conditions_of(problem.see) for table in condition.tables]
    return [table.array for table in (*problem.tables, *own)]


def table_versions(tables: Sequence[Any]) -> list[Any]:
    """Return a value for each table that changes if the table is written to.

    The value is torch's count of writes to a tensor. torch does not count writes to inference tensors and arrays of
    NumPy, so their value is a checksum. Tensors that require a gradient are left out, since torch checks them itself.
    """
    return [_version(x) for x in tables if isinstance(x, np.ndarray) or (isinstance(x, Tensor) and not x.requires_grad)]


def check_versions(versions: Sequence[Any], tables: Sequence[Any]) -> None:
    """Raise ChangedArrayError unless `table_versions(tables)` still are `versions`."""
    if versions != table_versions(tables):
        raise ChangedArrayError(
            "a mask, a bias or a table of a formula was changed in place between forward and backward pass",
            "tables with the entries of the forward pass",
            "clone the array before the forward pass, or change it after the backward pass",
        )


def _version(table: Any) -> Any:
    if isinstance(table, np.ndarray):
        return checksum(table)
    if not table.is_inference():
        return table._version
    return None if table.is_meta else checksum(to_numpy(table.cpu()))


def _differentiate(
    call: GraphCall, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], results: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the inputs by the backward pass of the plan's kernel, or else by that of `streaming`."""
    problem, tables = call.with_inputs(inputs), call.wanted_tables
    plan, saved = call.plan(problem), (results[0], torch.as_tensor(call.lse(results), device=results[0].device))
    if gradients[0] is None:
        gradients = torch.zeros_like(results[0]), *gradients[1:]
    d_results = [*gradients, None] if len(gradients) == 1 else gradients  # lse is a result only beside statistics
    with operator.autocast_disabled(saved[0]):
        arrays = split_saved(call.statistics, results)
        found = operator.differentiate_results(problem, plan, d_results, saved, tables, call.threads, arrays)
    if found.bound_call is not None or found.recorded_call is not None:
        call.keep(found, gradients, inputs, results)
    return operator.flatten_gradients(problem, found, tables)[: call.num_inputs]


def _differentiate_by_operator(
    call: GraphCall, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], results: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the inputs by the registered operator, which can be differentiated again."""
    problem = call.with_inputs(inputs)
    seed = make_seed(problem.seed) if problem.dropout else None
    arrays, spec = to_arguments(problem, seed, call.kernel, call.threads)
    place = {slot: table for table, slot in spec.table_slots(problem).items()}
    wanted = [place[index] for index in call.wanted_tables]
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    given = [gradient for gradient in gradients if gradient is not None]
    lse = torch.as_tensor(call.lse(results), device=results[0].device)
    if is_transformed():
        derivative = Derivative.of(arrays, spec, 1, tuple(indices), tuple(wanted))
        return list(apply(derivative, *given, results[0], lse, *arrays.flatten()))[: call.num_inputs]
    found: list[Tensor] = operator.attention_backward(given, indices, wanted, results[0], lse, *arrays, *spec)
    return found[: call.num_inputs]


def with_saved_tables(problem: Problem, saved: dict[int, Tensor]) -> Problem:
    """Return the problem with the tensors `saved` as its tables, by index. Hooks may have replaced saved tensors."""
    tables = [table.array for table in problem.tables]
    if all(tables[index] is tensor for index, tensor in saved.items()):
        return problem
    return problem.with_tables([saved.get(index, array) for index, array in enumerate(tables)])


def trainable_inputs(problem: Problem) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return the tensors that may need gradients, and the indices in `problem.tables` of the tables among them."""
    arrays = [table.array for table in problem.tables]
    wanted = tuple([k for k in problem.score_table_indices if getattr(arrays[k], "requires_grad", False)])
    tables = [arrays[k] for k in wanted]
    sinks = [] if problem.sinks is None else [problem.sinks]
    return [problem.query, problem.key, problem.value, *tables, *sinks], wanted


def attach_to_graph(problem: Problem, plan: Plan, kernel: str | None, threads: int | None, result: Result) -> Result:
    """Return the result with its arrays in torch's graph. If no input needs a gradient, return it unchanged."""
    if not needs_gradients(problem):
        return result
    inputs, wanted = trainable_inputs(problem)
    own_problem = without_tensors(problem)
    if problem.sinks is not None and not problem.sinks.requires_grad:
        inputs, own_problem = inputs[:-1], replace(own_problem, sinks=problem.sinks)
    results = tuple(flatten_result(problem.see, result))
    own_lse = None
    if not problem.see:  # a checkpoint may repeat this call as a cached one, which must save as many tensors
        results, own_lse = results[:1], results[1]
    seed = problem.seed if problem.dropout else None
    call = _DispatchedCall(own_problem, plan, kernel, seed, threads, wanted, len(inputs), own_lse)
    attached = connect(call, results, inputs)
    if own_lse is not None:
        attached = *attached, own_lse
    joined = build_result(problem.see, attached)
    return replace(result, output=joined.output, lse=joined.lse, seen=joined.seen)


def without_tensors(problem: Problem) -> Problem:
    """Return the problem without query, key, value and sinks, so that it keeps none of these tensors alive."""
    return replace(problem, query=None, key=None, value=None, sinks=None if problem.sinks is None else ())


def needs_gradients(problem: Problem) -> bool:
    """True if torch records a graph and any input requires a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in trainable_inputs(problem)[0])


def _has_function_mode_or_tangents() -> bool:
    """True if a mode of functions, but no default device, is active in this thread, or a forward derivative in any."""
    count = _C._len_torch_function_stack()  # a default device, below other modes, moves no tensor of named device
    is_mode = count and not isinstance(_C._get_function_stack_at(count - 1), DeviceContext)
    return bool(is_mode) or forward_ad._current_level >= 0


INTERCEPTIONS = (  # functions whose results are true if a mode, a transform, a tracer or a forward derivative is active
    _has_function_mode_or_tangents,
    _C._len_torch_dispatch_stack,
    _C._functorch.peek_interpreter_stack,
    _C._get_tracing_state,
)


def is_intercepted() -> bool:
    """True if a mode, a transform or a tracer is active in this thread, or a forward derivative in any thread."""
    return any(function() for function in INTERCEPTIONS)
