"""Attention in torch's graph in eager mode: one `torch.autograd.Function`, without the registered operator.

The registered operator, in the module `operator`, serves torch.compile, transforms, modes and gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..api.kernels import make_plan
from ..arrays.operations import checksum, to_numpy
from ..call.backward_calls import split_saved
from ..call.problem import Problem
from ..errors import ChangedArrayError
from ..statistics.computation import formulas_of
from . import operator
from .derivatives import Derivative, apply
from .interception import is_intercepted, is_transformed, refuse_old_vmap
from .operator import make_seed, to_arguments

if TYPE_CHECKING:
    from .graph_attacher import GraphCall


class BackwardArrays(NamedTuple):
    """The tensors of a backward pass: the gradients of the results, None for 0, and the saved inputs and results."""

    gradients: Sequence[Tensor | None]
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]


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
            call = replace(call, seed=int(seed) % 2**64)
        count: int = call.attacher.num_inputs
        has_graph = torch.is_grad_enabled() or torch.compiler.is_compiling()
        gradients = (_with_contiguous_rows(gradients[0]), *gradients[1:])
        arrays = BackwardArrays(gradients, saved[:count], saved[count:])
        found = None if has_graph else call.attacher.repeat(call, arrays)
        if found is None:
            refuse_old_vmap(gradients)
            given = [gradient for gradient in gradients if gradient is not None]
            if not given:
                return (None,) * (2 + count)
            needs_operator = has_graph or is_intercepted() or any(type(gradient) is not Tensor for gradient in given)
            differentiate = _differentiate_by_operator if needs_operator else _differentiate
            found = differentiate(call, arrays)[:count]
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


def _differentiate(call: GraphCall, arrays: BackwardArrays) -> list[Tensor]:
    """Return the gradients of the inputs by the backward pass of the plan's kernel, or else by that of `streaming`."""
    attacher, problem = call.attacher, call.make_problem(arrays.inputs)
    plan, tables = call.plan or make_plan(problem, attacher.kernel), attacher.backward.slots
    output, lse = _read_saved(call, arrays.results)
    if arrays.gradients[0] is None:
        arrays = arrays._replace(gradients=(torch.zeros_like(output), *arrays.gradients[1:]))
    gradients = arrays.gradients
    d_results = [*gradients, None] if len(gradients) == 1 else gradients  # lse is a result only beside statistics
    with operator.autocast_disabled(output):
        own = split_saved(problem.see, arrays.results)
        found = operator.differentiate_results(problem, plan, d_results, (output, lse), tables, attacher.threads, own)
    if found.bound_call is not None or found.recorded_call is not None:
        attacher.keep(found, call, arrays)
    return operator.flatten_gradients(problem, found, tables)


def _differentiate_by_operator(call: GraphCall, arrays: BackwardArrays) -> Sequence[Tensor]:
    """Return the gradients of the inputs by the registered operator, which can be differentiated again."""
    attacher, problem = call.attacher, call.make_problem(arrays.inputs)
    seed = make_seed(problem.seed) if problem.dropout else None
    own, spec = to_arguments(problem, seed, attacher.kernel, attacher.threads)
    place = {slot: table for table, slot in spec.table_slots(problem).items()}
    wanted = [place[index] for index in attacher.backward.slots]
    given = {index: gradient for index, gradient in enumerate(arrays.gradients) if gradient is not None}
    saved = _read_saved(call, arrays.results)
    if is_transformed():
        derivative = Derivative.of(own, spec).above([*given], wanted)
        return apply(derivative, *given.values(), *saved, *own.flatten())
    found: list[Tensor] = operator.attention_backward([*given.values()], [*given], wanted, *saved, *own, *spec)
    return found


def _read_saved(call: GraphCall, results: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and lse as tensors."""
    return results[0], torch.as_tensor(call.find_lse(results), device=results[0].device)


def tables_of(problem: Problem) -> list[Any]:
    """Return the arrays that the formulas of a problem and of its statistics read."""
    own = [table for formula in formulas_of(problem.see) for table in formula.tables]
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


def trainable_inputs(problem: Problem) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return the tensors that may need gradients, and the indices in `problem.tables` of the tables among them."""
    arrays = [table.array for table in problem.tables]
    wanted = tuple([k for k in problem.score_table_indices if getattr(arrays[k], "requires_grad", False)])
    sinks = [problem.sinks] if problem.sinks is not None and problem.sinks.requires_grad else []
    return [problem.query, problem.key, problem.value, *[arrays[k] for k in wanted], *sinks], wanted


def needs_gradients(problem: Problem) -> bool:
    """True if torch records a graph and any input requires a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in trainable_inputs(problem)[0])
