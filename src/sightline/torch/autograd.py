"""Attention in torch's graph in eager mode: one `torch.autograd.Function`, without the registered operator.

The results of a call are computed first, and then joined to the graph. The backward passes of calls that the call cache
runs are kept and repeated. The registered operator, in the module `operator`, serves torch.compile, transforms, modes
and gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from ..api.kernels import differentiate, make_plan
from ..arrays.caching import cached_property
from ..arrays.operations import checksum, is_traced, to_numpy
from ..call.backward_calls import BackwardInputs, BackwardPasses, read_inputs
from ..call.call_cache import Entry, EntryResult, Operands
from ..call.kernel import GivenGradients, Plan, Result
from ..call.problem import NUM_OPERANDS, Problem, make_problem
from ..call.request import Request
from ..call.spec import flatten_result, split_arrays, unflatten_gradients
from ..errors import ChangedArrayError
from ..statistics.dispatch import formulas_of
from . import operator
from .derivatives import Derivative, apply_derivative
from .interception import is_intercepted, is_transformed, refuse_old_vmap
from .operator import build_result, make_seed, to_arguments


class _Attention(torch.autograd.Function):
    """The function that connects results to their inputs in torch's graph. The results are computed before."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, results: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.num_inputs = call, len(inputs)
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
            call = replace(call, seed=int(seed) % 2**64)
        count: int = ctx.num_inputs
        has_graph = torch.is_grad_enabled() or is_traced(saved[0])
        d_output = gradients[0]
        if type(d_output) is Tensor and d_output.is_cpu and d_output.stride(-1) != 1:
            gradients = (d_output.contiguous(), *gradients[1:])  # that of a sum, for example, has stride 0
        inputs, given = saved[:count], call.read_gradients(gradients, saved[count:])
        d_inputs = None if has_graph else call.passes.repeat(call.read_inputs(inputs, given))
        if d_inputs is None:
            refuse_old_vmap(gradients)
            known = [gradient for gradient in gradients if gradient is not None]
            if not known:
                return (None,) * (2 + count)
            needs_operator = has_graph or is_intercepted() or any(type(gradient) is not Tensor for gradient in known)
            if needs_operator:
                d_inputs = _differentiate_by_operator(call, inputs, gradients, given.saved)[:count]
            else:
                d_inputs = _differentiate(call, inputs, given)
        return (None, None, *d_inputs)


# Returns the results, connected to the inputs in torch's graph: connect(call, results, *inputs). It is `apply` without
# its steps for transforms of torch.func: no call inside a transform reaches it.
connect: Any = super(torch.autograd.Function, _Attention).apply


def _differentiate(call: GraphCall, inputs: Sequence[Tensor], given: GivenGradients) -> list[Tensor]:
    """Return the gradients of the inputs by the backward pass of the plan's kernel, or else by that of `streaming`."""
    passes, problem = call.passes, call.make_problem(inputs)
    plan = call.plan or make_plan(problem)
    with operator.autocast_disabled(problem.query):
        given_tensors = given._replace(saved=_to_tensors(*given.saved))
        gradients = differentiate(problem, plan, given_tensors)
    if gradients.make_entry is not None and not isinstance(call.source, Problem):
        passes.keep(gradients, call.read_inputs(inputs, given), call.formulas)
    return gradients.flatten(passes.slots, passes.wants_sinks)


def _differentiate_by_operator(
    call: GraphCall, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], saved: tuple[Tensor, Any]
) -> Sequence[Tensor]:
    """Return the gradients of the inputs by the registered operator, which can be differentiated again.

    `gradients` are those of the results, None for 0.
    """
    passes, problem = call.passes, call.make_problem(inputs)
    seed = make_seed(problem.seed) if problem.dropout else None
    call_arrays, spec = to_arguments(problem, seed)
    place = {slot: table for table, slot in spec.table_slots(problem).items()}
    wanted = [place[index] for index in passes.slots]
    known = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
    results = _to_tensors(*saved)
    if is_transformed():
        derivative = Derivative.of(call_arrays, spec).above([*known], wanted)
        return apply_derivative(derivative, *known.values(), *results, *call_arrays.flatten())
    d_inputs: list[Tensor] = operator.attention_backward_op(
        [*known.values()], [*known], wanted, *results, *call_arrays, *spec
    )
    return d_inputs


def _to_tensors(output: Tensor, lse: Any) -> tuple[Tensor, Tensor]:
    """Return output and lse, which may be a NumPy array, as tensors."""
    return output, torch.as_tensor(lse, device=output.device)


def tables_of(problem: Problem) -> list[Any]:
    """Return the arrays that the formulas of a problem and of its statistics read."""
    statistic_tables = [table for formula in formulas_of(problem.see) for table in formula.tables]
    return [table.array for table in (*problem.tables, *statistic_tables)]


def table_versions(tables: Sequence[Any]) -> list[Any]:
    """Return a value for each table that changes if the table is written to.

    The value is torch's count of writes to a tensor. torch does not count writes to inference tensors and arrays of
    NumPy, so their value is a checksum. Tensors that require a gradient are left out, since torch checks them itself.
    """
    return [_version(x) for x in tables if isinstance(x, np.ndarray) or (isinstance(x, Tensor) and not x.requires_grad)]


def check_versions(versions: Sequence[Any], tables: Sequence[Any]) -> None:
    """Raise ChangedArrayError unless `table_versions(tables)` still are `versions`."""
    if versions != table_versions(tables):
        given = "a mask, a bias or a table of a formula was changed in place between forward and backward pass"
        cure = "clone the array before the forward pass, or change it after the backward pass"
        raise ChangedArrayError(given, "tables with the entries of the forward pass", cure)


def _version(table: Any) -> Any:
    if isinstance(table, np.ndarray):
        return checksum(table)
    if not table.is_inference():
        return table._version
    return None if table.is_meta else checksum(to_numpy(table.cpu()))


def trainable_inputs(problem: Problem) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return the tensors that may need gradients, and the indices in `problem.tables` of the tables among them."""
    arrays = [table.array for table in problem.tables]
    wanted = tuple([k for k in problem.score_table_indices if getattr(arrays[k], "requires_grad", False)])
    sinks = [problem.sinks] if problem.sinks is not None and problem.sinks.requires_grad else []
    return [problem.query, problem.key, problem.value, *[arrays[k] for k in wanted], *sinks], wanted


def needs_gradients(problem: Problem) -> bool:
    """True if torch records a graph and any input requires a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in trainable_inputs(problem)[0])


@dataclass(eq=False)
class GraphCall:
    """The data of a call that its backward pass needs, besides the tensors that torch saves.

    passes : what this call shares with calls that differ only in arrays and numbers
    source : the request of a call that the call cache ran; for another call the problem, without what torch saves
    seed : the seed of dropout; None without dropout
    own_lse : lse, a tensor or a NumPy array, if it is no result
    is_lse_imprecise : see `EntryResult`
    plan : the plan of the forward pass, if `source` is a problem
    """

    passes: GraphPasses
    source: Request | Problem
    seed: int | None
    own_lse: Any
    is_lse_imprecise: bool = False
    plan: Plan | None = None

    def make_problem(self, inputs: Sequence[Tensor]) -> Problem:
        """Return the problem with the saved tensors as query, key, value, the learned tables and the learned sinks."""
        query, key, value, *rest = inputs
        sinks, shared = self.sinks(inputs), self.passes
        if isinstance(self.source, Problem):
            seed = self.source.seed if self.seed is None else self.seed
            problem = replace(self.source, query=query, key=key, value=value, sinks=sinks, seed=seed)
        else:
            mask, score = self.formulas
            formulas = {"mask": mask, "score": score, "see": self.source.see}
            names = "scale", "dropout", "row_formats", "kernel", "threads"
            options = {name: getattr(shared.problem, name) for name in names}
            problem = make_problem(query, key, value, sinks=sinks, seed=self.seed, **formulas, **options)
        tables, saved = [table.array for table in problem.tables], dict(zip(shared.slots, rest, strict=False))
        if all(tables[slot] is tensor for slot, tensor in saved.items()):
            return problem
        return problem.with_tables([saved.get(slot, array) for slot, array in enumerate(tables)])  # hooks replaced them

    @cached_property
    def formulas(self) -> Sequence[Any]:
        """Mask and score of a call that the call cache ran, as `make_problem` reads them."""
        return cast(Request, self.source).formulas()[:2]

    def tables(self) -> Sequence[Any]:
        """Return the arrays that the formulas read, and the sinks."""
        source = self.source
        return [*tables_of(source), source.sinks] if isinstance(source, Problem) else source.arrays

    def results_to_save(self, results: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the results, with None in place of arrays of statistics that the backward pass does not read."""
        if len(results) <= 2:
            return results
        arrays = zip(self.source.see, split_arrays(self.source.see, results), strict=True)
        return *results[:2], *[array if one.backward_reads_arrays else None for one, own in arrays for array in own]

    def read_gradients(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> GivenGradients:
        """Return the gradients of the results. `saved` are what `results_to_save` returned."""
        results = saved if self.own_lse is None else (saved[0], self.own_lse)
        slots = self.passes.slots
        if len(gradients) == 1 or not any(gradient is not None for gradient in gradients[1:]):
            return GivenGradients(gradients[0], None, results[:2], slots)
        return unflatten_gradients(self.source.see, dict(enumerate(gradients)), results, slots)

    def read_inputs(self, inputs: Sequence[Tensor], given: GivenGradients) -> BackwardInputs | None:
        """Return what an entry of the backward pass reads. Saved tensors replace the learned tables.

        The result is None if no entry can serve the pass: those of a GPU have no gradients of lse and statistics.
        """
        passes, is_served = self.passes, inputs[0].is_cpu or (given.d_lse is None and not given.d_seen)
        if isinstance(self.source, Problem) or self.is_lse_imprecise or not is_served:
            return None
        rest = self.sinks(inputs), self.seed or 0
        found = read_inputs(self.source, passes.problem, given, inputs[:NUM_OPERANDS], *rest)
        if found is not None and passes.places:
            tables = list(found.tables)
            for place, tensor in zip(passes.places, inputs[NUM_OPERANDS:], strict=False):
                tables[place] = tensor
            found = found._replace(tables=tuple(tables))
        return found

    def sinks(self, inputs: Sequence[Tensor]) -> Any:
        """Return the sinks: the saved tensor if they are learned, else the array of the call."""
        return inputs[-1] if self.passes.wants_sinks else self.source.sinks


class GraphPasses(BackwardPasses):
    """The backward passes of calls in torch's graph, and the hook that joins a cached call's results to the graph."""

    @classmethod
    def of_call(cls, problem: Problem, formulas: Sequence[Any]) -> Self:
        """Return the passes of a call with gradients; its other parameters are those of `BackwardPasses.of`."""
        inputs, wanted = trainable_inputs(problem)
        has_learned_sinks = len(inputs) > NUM_OPERANDS + len(wanted)
        return cls.of(problem, formulas, wanted, has_learned_sinks)

    def reads(self, request: Request, operands: Operands, problem: Problem) -> bool:
        """True if the problem's inputs are the caller's tensors, so that a repeated call has the same graph."""
        own = [*operands, *[request.tables[place] for place in self.places]]
        own += [request.sinks] * self.wants_sinks
        pairs = list(zip(own, trainable_inputs(problem)[0], strict=True))
        if problem.heads_squeezed and all(_adds_head_axis(x, y) for x, y in pairs[:NUM_OPERANDS]):
            pairs = pairs[NUM_OPERANDS:]
        return all(x is y for x, y in pairs)

    def __call__(self, entry: Entry, request: Request, operands: Operands, result: EntryResult) -> Any:
        axis, lse, has_statistics = entry.squeezed_axis, result.lse, bool(entry.statistics)
        inputs: tuple[Any, ...] = operands
        results = (result.output, lse, *result.arrays) if has_statistics else (result.output,)
        if axis is not None:  # the graph has the head axis
            inputs = tuple([x.unsqueeze(-3) for x in operands])
            results, lse = tuple([x.unsqueeze(axis) for x in results]), lse[..., None, :]
        if self.places:
            inputs += tuple([request.tables[place] for place in self.places])
        if self.wants_sinks:
            inputs += (request.sinks,)
        elif isinstance(request.sinks, np.ndarray):  # the caller may change them before the backward pass
            request = request._replace(sinks=request.sinks.copy())
        seed, own_lse = result.seed if self.problem.dropout else None, None if has_statistics else lse
        results = connect(GraphCall(self, request, seed, own_lse, result.is_lse_imprecise), results, *inputs)
        if axis is not None:
            results = tuple([x.squeeze(axis) for x in results])
        return results[0], entry.build_seen(results, Tensor.detach) if has_statistics else ()


def attach_to_graph(problem: Problem, plan: Plan, result: Result) -> Result:
    """Return the result with its arrays in torch's graph. If no input needs a gradient, return it unchanged."""
    if not needs_gradients(problem):
        return result
    passes = GraphPasses.of_call(problem, ())
    sinks = () if passes.wants_sinks else problem.sinks
    constants = replace(problem, query=None, key=None, value=None, sinks=sinks)  # it keeps no saved tensor alive
    results, own_lse = tuple(flatten_result(problem.see, result)), None
    if not problem.see:  # a checkpoint may repeat this call as a cached one, which must save as many tensors
        results, own_lse = results[:1], results[1]
    seed = problem.seed if problem.dropout else None
    call = GraphCall(passes, constants, seed, own_lse, plan=plan)
    attached = connect(call, results, *trainable_inputs(problem)[0])
    joined = build_result(problem.see, attached if own_lse is None else (*attached, own_lse))
    return replace(result, output=joined.output, lse=joined.lse, seen=joined.seen)


def _adds_head_axis(array: Tensor, operand: Tensor) -> bool:
    """True if `operand` is a view of the array with one more axis, a head axis of length 1."""
    has_shape = operand.ndim == array.ndim + 1 and operand.numel() == array.numel()
    return has_shape and operand.data_ptr() == array.data_ptr() and operand.requires_grad == array.requires_grad
