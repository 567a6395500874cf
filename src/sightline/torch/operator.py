"""The registered operators `torch.ops.sightline.attention` and `attention_backward`, with gradients to any order.

Each operator has a computation and, for tracing, a function of shapes. The gradient of `attention` is the operator
`attention_backward`. torch differentiates `attention_backward` through `streaming`, whose plain operations have
gradients of every order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .. import streaming
from ..dispatch import differentiate, make_plan, solve
from ..statistics import Lse, arrays_of
from .operator_schema import SCHEMA, OperatorArguments

__all__ = ["attention", "attention_backward", "autocast_disabled"]


def autocast_disabled(tensor: Tensor) -> Any:
    """Return a context in which torch.autocast is off for the tensor's device: sums keep their accumulator's dtype."""
    device_type = tensor.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _without_autocast(computation: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Wrap the computation so that it runs with torch.autocast off; `dispatch` has cast its inputs already."""

    @wraps(computation)
    def run(*args: Any) -> list[Tensor]:
        with autocast_disabled(next(x for x in args if isinstance(x, Tensor))):
            return computation(*args)

    return run


@_without_autocast
def _forward(*args: Any) -> list[Tensor]:
    """Return [output, lse, *arrays]: the arrays of every requested statistic except `lse()`."""
    arguments = OperatorArguments(*args)
    problem = arguments.problem()
    result = solve(problem, arguments.kernel, arguments.threads)
    seen = zip(problem.see, result.seen, strict=True)
    others = [arrays_of(answer) for statistic, answer in seen if not isinstance(statistic, Lse)]
    return [result.output, result.lse, *(array for arrays in others for array in arrays)]


def _forward_shapes(*args: Any) -> list[Tensor]:
    problem = OperatorArguments(*args).build_problem()
    query, rows = problem.query, problem.query.shape[:-1]
    outputs = [query.new_empty((*rows, problem.d_v)), query.new_empty(rows, dtype=torch.float64)]
    for statistic in problem.see:
        if not isinstance(statistic, Lse):
            made = statistic.outputs(problem)
            outputs += [query.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in made]
    return outputs


attention = torch.library.custom_op("sightline::attention", _forward, mutates_args=(), schema=f"({SCHEMA}) -> Tensor[]")
attention.register_fake(_forward_shapes)


@_without_autocast
def compute_gradients(
    gradients: list[Tensor],
    gradient_indices: list[int],
    wanted_tables: list[int],
    output: Tensor,
    lse: Tensor,
    *args: Any,
) -> list[Tensor]:
    """Return the gradients of `OperatorArguments.inputs`.

    `gradients` are the gradients of the results at the indices `gradient_indices`; the others are 0.
    """
    return _apply_chain_rule(gradients, gradient_indices, wanted_tables, OperatorArguments(*args), (output, lse))


def _backward_shapes(
    _: Any, gradient_indices: Any, wanted_tables: list[int], output: Any, lse: Any, *args: Any
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in OperatorArguments(*args).inputs(wanted_tables)]


attention_backward = torch.library.custom_op(
    "sightline::attention_backward",
    compute_gradients,
    mutates_args=(),
    schema="(Tensor[] gradients, int[] gradient_indices, int[] wanted_tables, Tensor output, Tensor lse, "
    f"{SCHEMA}) -> Tensor[]",
)
attention_backward.register_fake(_backward_shapes)


def _apply_chain_rule(
    gradients: Sequence[Tensor],
    gradient_indices: Sequence[int],
    wanted_tables: Sequence[int],
    arguments: OperatorArguments,
    saved: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """Apply the chain rule through attention, tile by tile. The result is differentiable if `saved` is None."""
    problem = arguments.problem()
    gradient_by_index = dict(zip(gradient_indices, gradients, strict=True))
    d_output = gradient_by_index.get(0)
    if d_output is None:
        d_output = problem.query.new_zeros((*problem.query.shape[:-1], problem.d_v))
    offset, d_seen = 2, []
    for statistic in problem.see:
        d_seen.append(None if isinstance(statistic, Lse) else gradient_by_index.get(offset))
        offset += 0 if isinstance(statistic, Lse) else len(statistic.outputs(problem))
    tables = [arguments.tables[k] for k in wanted_tables]
    if saved is None:
        input_gradients = streaming.backward(problem, d_output, gradient_by_index.get(1), tuple(d_seen))
    else:
        table_indices = [k for k, table in enumerate(problem.tables) if any(table.array is tensor for tensor in tables)]
        plan, d_lse = make_plan(problem, arguments.kernel), gradient_by_index.get(1)
        input_gradients = differentiate(
            problem, plan, d_output, d_lse, tuple(d_seen), saved, table_indices, arguments.threads
        )
    by_tensor: dict[int, Tensor] = {}  # one tensor may be the array of two tables: its gradient is the sum
    for table, gradient in zip(problem.tables, input_gradients.tables, strict=True):
        if gradient is not None:
            previous = by_tensor.get(id(table.array))
            by_tensor[id(table.array)] = gradient if previous is None else previous + gradient
    gradients_of_tables = [by_tensor.pop(id(table), None) for table in tables]
    table_gradients = [
        torch.zeros_like(t) if g is None else g for t, g in zip(tables, gradients_of_tables, strict=True)
    ]
    return [
        input_gradients.query,
        input_gradients.key,
        input_gradients.value,
        *table_gradients,
        *([] if input_gradients.sinks is None else [input_gradients.sinks]),
    ]


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


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    gradients, ctx.gradient_indices, ctx.wanted_tables, _, _, *args = inputs
    _save_arguments(ctx, OperatorArguments(*args), *gradients)


def _double_backward(ctx: Any, directions: list[Tensor | None]) -> tuple[Any, ...]:
    """Differentiate the gradient. The forward pass is repeated, so the saved output and lse receive no gradient."""
    arguments, gradients = _load_arguments(ctx)
    create_graph = torch.is_grad_enabled()

    def make_variable(tensor: Tensor) -> Tensor:
        """Return the tensor as a new variable. It stays in the caller's graph if higher orders may be requested."""
        if not tensor.requires_grad:
            return tensor
        return tensor.view_as(tensor) if create_graph else tensor.detach().requires_grad_()

    with torch.enable_grad():
        variables = [make_variable(tensor) for tensor in (*gradients, *arguments.inputs(ctx.wanted_tables))]
        count = len(gradients)
        fresh_arguments = arguments.with_inputs(variables[count:], ctx.wanted_tables)
        input_gradients = _apply_chain_rule(
            variables[:count], ctx.gradient_indices, ctx.wanted_tables, fresh_arguments, None
        )
        pairs = [(f, d) for f, d in zip(input_gradients, directions, strict=True) if d is not None and f.requires_grad]
        leaves = [variable for variable in variables if variable.requires_grad]
        results = torch.autograd.grad(
            [f for f, _ in pairs], leaves, [d for _, d in pairs], create_graph=create_graph, allow_unused=True
        )
    rest = iter(results)
    all_gradients = [next(rest) if variable.requires_grad else None for variable in variables]
    nothing: Any = None if ctx.wanted_tables else []  # torch would take an empty list for a list of tensors
    return (
        all_gradients[:count],
        None,
        nothing,
        None,
        None,
        *arguments.to_argument_order(all_gradients[count:], ctx.wanted_tables),
    )


attention.register_autograd(_backward, setup_context=_setup_forward)
attention_backward.register_autograd(_double_backward, setup_context=_setup_backward)
