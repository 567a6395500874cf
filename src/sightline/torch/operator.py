"""The registered operators `torch.ops.sightline.attention`, `attention_backward` and `attention_tangent`.

Each operator has a function that computes, and one that makes empty results of the right shapes while torch traces. The
module `derivatives` registers the gradients of `attention` and `attention_backward`, and their rules of `torch.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..api.kernels import differentiate, make_plan, push_forward, solve
from ..arrays.operations import empty, has_heads_in_rows
from ..call.kernel import Gradients, Plan
from ..call.problem import Problem
from ..call.spec import Arrays, CallSpec, count_arrays, flatten_result, split_arrays
from ..reference import streaming
from .operator_schema import SCHEMA, make_problem, read_arguments


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
    arrays, spec = read_arguments(args)
    problem = make_problem(arrays, spec)
    output, *others = flatten_result(problem.see, solve(problem, spec.kernel, spec.threads))
    if has_heads_in_rows(problem.query):  # as `_forward_shapes` says; only a kernel other than the CPU's needs a copy
        return [output.swapaxes(-3, -2).contiguous().swapaxes(-3, -2), *others]
    return [output.contiguous(), *others]


def _forward_shapes(*args: Any) -> list[Tensor]:
    arrays, spec = read_arguments(args)
    problem = spec.problem(arrays)
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
    """Return the gradients of query, key, value, the tables `wanted_tables` and the sinks.

    `gradients` are the gradients of the results at the indices `gradient_indices`. Other results have the gradient 0.
    """
    return apply_chain_rule(gradients, gradient_indices, wanted_tables, *read_arguments(args), (output, lse))


def _backward_shapes(
    _: Any, gradient_indices: Any, wanted_tables: list[int], output: Any, lse: Any, *args: Any
) -> list[Tensor]:
    arrays, spec = read_arguments(args)
    given = arrays.flatten()
    return [given[place].new_empty(given[place].shape) for place in spec.find_places(wanted_tables)]


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

    `directions` are the tangents of the arrays at `places` in the list of `Arrays.flatten`. The other tangents are 0.
    """
    arrays, spec = read_arguments(args)
    problem = make_problem(arrays, spec)
    given = spec.tangents(problem, places, directions)
    return list(push_forward(problem, make_plan(problem, spec.kernel), given, (output, lse), spec.threads))


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
    arrays: Arrays,
    spec: CallSpec,
    saved: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """Return the gradients of query, key, value, the tables `wanted_tables` and the sinks.

    If `saved` is None, the result is differentiable.
    """
    problem = make_problem(arrays, spec)
    gradient_by_index = dict(zip(gradient_indices, gradients, strict=True))
    d_results = [gradient_by_index.get(k) for k in range(2 + sum(map(count_arrays, problem.see)))]
    slots = spec.table_slots(problem)
    table_indices = [slots[table] for table in wanted_tables]
    plan = None if saved is None else make_plan(problem, spec.kernel)
    found = differentiate_results(problem, plan, d_results, saved, table_indices, spec.threads)
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
