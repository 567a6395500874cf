"""The registered operators `torch.ops.sightline.attention`, `attention_backward` and `attention_tangent`.

Each operator has a function that computes, and one that makes empty results of the right shapes while torch traces. The
gradient of `attention` is the operator `attention_backward`. The module `derivatives` registers the gradient of
`attention_backward`, and the module `tangents` differentiates `attention_tangent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..arrays.operations import empty, has_heads_in_rows
from ..dispatch.call_text import count_arrays, flatten_result, split_arrays
from ..dispatch.kernel_list import differentiate, make_plan, push_forward, solve
from ..problem.kernel import Gradients, Plan, Tangents
from ..problem.problem import NUM_OPERANDS, Problem
from ..reference import streaming
from .operator_schema import SCHEMA, OperatorArguments


def autocast_disabled(tensor: Tensor) -> Any:
    """Return a context in which torch.autocast is off for the tensor's device, so that sums keep their dtype."""
    device_type = tensor.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _without_autocast(computation: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Wrap the computation so that it runs with torch.autocast off. The module `dispatch` has already cast inputs."""

    @wraps(computation)
    def run(*args: Any) -> list[Tensor]:
        with autocast_disabled(next(x for x in args if isinstance(x, Tensor))):
            return computation(*args)

    return run


@_without_autocast
def _forward(*args: Any) -> list[Tensor]:
    """Return output, lse and the arrays of the statistics, in the order of `flatten_result`."""
    arguments = OperatorArguments(*args)
    problem = arguments.problem()
    output, *others = flatten_result(problem.see, solve(problem, arguments.kernel, arguments.threads))
    if has_heads_in_rows(problem.query):  # as `_forward_shapes` says; only a kernel other than the CPU's needs a copy
        return [output.swapaxes(-3, -2).contiguous().swapaxes(-3, -2), *others]
    return [output.contiguous(), *others]


def _forward_shapes(*args: Any) -> list[Tensor]:
    problem = OperatorArguments(*args).build_problem()
    query, rows = problem.query, problem.query.shape[:-1]
    output = empty((*rows, problem.d_v), problem.dtype, query, has_heads_in_rows(query))
    outputs = [output, query.new_empty(rows, dtype=torch.float64)]
    for statistic in problem.see:
        if count_arrays(statistic):
            made = statistic.outputs(problem)
            outputs += [query.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in made]
    return outputs


attention = torch.library.custom_op("sightline::attention", _forward, mutates_args=(), schema=f"({SCHEMA}) -> Tensor[]")
attention.register_fake(_forward_shapes)


@_without_autocast
def _compute_gradients(
    gradients: list[Tensor],
    gradient_indices: list[int],
    wanted_tables: list[int],
    output: Tensor,
    lse: Tensor,
    *args: Any,
) -> list[Tensor]:
    """Return the gradients of `OperatorArguments.inputs`.

    `gradients` are the gradients of the results at the indices `gradient_indices`. Other results have the gradient 0.
    """
    return apply_chain_rule(gradients, gradient_indices, wanted_tables, OperatorArguments(*args), (output, lse))


def _backward_shapes(
    _: Any, gradient_indices: Any, wanted_tables: list[int], output: Any, lse: Any, *args: Any
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in OperatorArguments(*args).inputs(wanted_tables)]


attention_backward = torch.library.custom_op(
    "sightline::attention_backward",
    _compute_gradients,
    mutates_args=(),
    schema="(Tensor[] gradients, int[] gradient_indices, int[] wanted_tables, Tensor output, Tensor lse, "
    f"{SCHEMA}) -> Tensor[]",
)
attention_backward.register_fake(_backward_shapes)


@_without_autocast
def _compute_tangents(
    directions: list[Tensor], places: list[int], output: Tensor, lse: Tensor, *args: Any
) -> list[Tensor]:
    """Return the tangents of output and lse.

    `directions` are the tangents of the arguments at `places`, which count query, key, value, the tables and the sinks.
    The other tangents are 0.
    """
    arguments = OperatorArguments(*args)
    problem = arguments.problem()
    found = dict(zip(places, directions, strict=True))
    tables: list[Tensor | None] = [None] * len(problem.tables)
    for place, index in enumerate(problem.score_table_indices, start=NUM_OPERANDS + arguments.score_offset):
        tables[index] = found.get(place)
    query, key, value = (found.get(k) for k in range(NUM_OPERANDS))
    given = Tangents(query, key, value, tuple(tables), found.get(NUM_OPERANDS + len(arguments.tables)))
    plan = make_plan(problem, arguments.kernel)
    return list(push_forward(problem, plan, given, (output, lse), arguments.threads))


attention_tangent = torch.library.custom_op(
    "sightline::attention_tangent",
    _compute_tangents,
    mutates_args=(),
    schema=f"(Tensor[] directions, int[] places, Tensor output, Tensor lse, {SCHEMA}) -> Tensor[]",
)
attention_tangent.register_fake(
    lambda directions, places, output, lse, *args: [torch.empty_like(output), torch.empty_like(lse)]
)


def apply_chain_rule(
    gradients: Sequence[Tensor],
    gradient_indices: Sequence[int],
    wanted_tables: Sequence[int],
    arguments: OperatorArguments,
    saved: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """Return the gradients of `arguments.inputs(wanted_tables)`. If `saved` is None, the result is differentiable."""
    problem = arguments.problem()
    gradient_by_index = dict(zip(gradient_indices, gradients, strict=True))
    d_results = [gradient_by_index.get(k) for k in range(2 + sum(map(count_arrays, problem.see)))]
    score_table_indices = problem.score_table_indices
    table_indices = [score_table_indices[k - arguments.score_offset] for k in wanted_tables]
    plan = None if saved is None else make_plan(problem, arguments.kernel)
    found = differentiate_results(problem, plan, d_results, saved, table_indices, arguments.threads)
    return flatten_gradients(problem, found, table_indices)


def differentiate_results(
    problem: Problem,
    plan: Plan | None,
    d_results: Sequence[Tensor | None],
    saved: tuple[Tensor, Tensor] | None,
    table_indices: Sequence[int],
    threads: int | None,
    saved_arrays: Sequence[Sequence[Tensor]] = (),
) -> Gradients:
    """Return the gradients of query, key, value, the tables of the problem at `table_indices`, and the sinks.

    `d_results` are the gradients of the results in the order of `flatten_result`, None for a gradient of 0. If `plan`
    or `saved` is None, the returned gradients can be differentiated again. `saved_arrays` are each statistic's arrays
    from the forward pass, () for arrays that were not saved.
    """
    d_output, d_lse = d_results[:2]
    if d_output is None:
        d_output = problem.query.new_zeros((*problem.query.shape[:-1], problem.d_v))
    d_seen = tuple(arrays[0] if arrays else None for arrays in split_arrays(problem.see, d_results))
    if plan is None or saved is None:
        return streaming.backward(problem, d_output, d_lse, d_seen)
    return differentiate(problem, plan, d_output, d_lse, d_seen, saved, table_indices, threads, saved_arrays)


def flatten_gradients(problem: Problem, found: Gradients, table_indices: Sequence[int]) -> list[Tensor]:
    """Return the gradients of query, key, value, the tables at `table_indices`, and the sinks."""
    tables = [found.tables[index] for index in table_indices]
    return [found.query, found.key, found.value, *tables, *([] if problem.sinks is None else [found.sinks])]


# -- autograd of the operators -------------------------------------------------------------------------------------


def _save_arguments(ctx: Any, arguments: OperatorArguments, *others: Tensor) -> None:
    """Save the tensors with `save_for_backward`, and every other argument as an attribute of the context."""
    ctx.save_for_backward(
        arguments.query, arguments.key, arguments.value, arguments.sinks, arguments.seed, *arguments.tables, *others
    )
    ctx.other_arguments, ctx.tables = arguments[6:], len(arguments.tables)


def _load_arguments(ctx: Any) -> tuple[OperatorArguments, list[Tensor]]:
    query, key, value, sinks, seed, *rest = ctx.saved_tensors
    tables, others = rest[: ctx.tables], rest[ctx.tables :]
    return OperatorArguments(query, key, value, tables, sinks, seed, *ctx.other_arguments), others


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    _save_arguments(ctx, OperatorArguments(*inputs), output[0], output[1])


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    arguments, (output, lse) = _load_arguments(ctx)
    gradient_indices = [k for k, gradient in enumerate(gradients) if gradient is not None]
    wanted_tables = [k for k in arguments.differentiable_tables if ctx.needs_input_grad[3][k]]
    input_gradients = attention_backward(
        [g for g in gradients if g is not None], gradient_indices, wanted_tables, output, lse, *arguments
    )
    return arguments.to_argument_order(input_gradients, wanted_tables)


attention.register_autograd(_backward, setup_context=_setup_forward)
