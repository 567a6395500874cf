"""The registered operators `torch.ops.sightline.attention`, `attention_backward` and `attention_tangent`.

The arguments of an operator are the tensors of `Arrays` and the plain values of `CallSpec`. torch.compile can trace
`to_arguments`, so a compiled function may build formulas. Each operator has a function that computes, and one such as
`_forward_shapes` that makes empty results while torch traces. The module `derivatives` registers the gradients of
`attention` and `attention_backward`, and their rules of `torch.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..api.kernels import differentiate, make_plan, push_forward, solve
from ..arrays.operations import has_heads_in_rows, is_traced
from ..arrays.unreadable import check_device
from ..call.kernel import Result
from ..call.problem import Problem, validate
from ..call.spec import Arrays, CallSpec, build_seen, flatten_result, unflatten_gradients
from ..formula.tables import Table
from ..formula.tensor_cache import to_device
from ..reference import streaming
from ..statistics import Statistic

# the fields of `Arrays`, and then those of `CallSpec`; the seed is int64, and a tensor, so that torch's generator can
# draw it inside a compiled function
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tables, Tensor? sinks, Tensor? seed, str mask, str score, "
    "str table_axes, float scale, float dropout, str see, bool has_sinks, str? kernel, int? threads"
)


def to_arguments(problem: Problem, seed: Tensor | None) -> tuple[Arrays, CallSpec]:
    """Return the arguments for a problem that `problem.parse` has checked. No table is read."""
    spec, tables = CallSpec.of(problem)
    tensors = [_to_tensor(table, problem.query) for table in tables]
    return Arrays(problem.query, problem.key, problem.value, tensors, problem.sinks, seed), spec


def read_arguments(arguments: Sequence[Any]) -> tuple[Arrays, CallSpec]:
    """Return the arrays and the specification in the arguments of the operator."""
    count = len(Arrays._fields)
    return Arrays(*arguments[:count]), CallSpec(*arguments[count:])


def restore_problem(arrays: Arrays, spec: CallSpec) -> Problem:
    """Return the validated problem."""
    seed = 0 if arrays.seed is None else int(arrays.seed) % 2**64
    return validate(spec.problem(arrays, spec.formulas(arrays.tables), seed))


def find_float_tables(arrays: Arrays, spec: CallSpec) -> list[int]:
    """Return the indices of the tables that may have gradients: tables of floats that the score reads."""
    return [k for k in spec.score_tables if arrays.tables[k].is_floating_point()]


def _to_tensor(table: Table, query: Tensor) -> Tensor:
    if isinstance(table.array, Tensor):
        check_device("table", table.array, query)
        return table.array
    is_compiled = is_traced(query)
    tensor: Tensor = torch.as_tensor(table.array, device=query.device) if is_compiled else to_device(table.array, query)
    # a backward pass reads the entries again, when the caller may have changed the array
    return tensor.clone() if torch.is_grad_enabled() else tensor


def make_seed(seed: int | None) -> Tensor:
    """Return the seed as an int64 tensor. None draws a seed from torch's generator, which torch.manual_seed sets."""
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    return torch.tensor(seed - (2**64 if seed >= 2**63 else 0), dtype=torch.int64, device="cpu")


def build_result(see: Sequence[Statistic], results: Sequence[Tensor]) -> Result:
    """Return the `Result` whose arrays, in the order of `flatten_result`, are `results`."""
    return Result(results[0], results[1], build_seen(see, results, Tensor.detach))


# -- the operators -----------------------------------------------------------------------------------------------------


def autocast_disabled(tensor: Tensor) -> Any:
    """Return a context in which torch.autocast is off for the tensor's device, so that sums keep their dtype."""
    device_type = tensor.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _define(name: str, arguments: str, compute: Callable[..., Any], make_empty: Callable[..., Any]) -> Any:
    """Return the operator that computes with torch.autocast off. The module `dispatch` has already cast inputs.

    `arguments` are those before SCHEMA. `make_empty` returns results without entries, while torch traces.
    """

    @wraps(compute)
    def run(*args: Any) -> list[Tensor]:
        with autocast_disabled(next(x for x in args if isinstance(x, Tensor))):
            found: list[Tensor] = compute(*args)
            return found

    schema = f"({arguments}{SCHEMA}) -> Tensor[]"
    operator = torch.library.custom_op(f"sightline::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(make_empty)
    return operator


def _forward(*args: Any) -> list[Tensor]:
    """Return output, lse and the arrays of the statistics, in the order of `flatten_result`."""
    arrays, spec = read_arguments(args)
    problem = restore_problem(arrays, spec)
    output, *others = flatten_result(problem.see, solve(problem))
    return [_order_heads(output, problem.query), *others]


def _order_heads(output: Tensor, query: Tensor) -> Tensor:
    """Return the output in the order of memory that the operator promises; only a kernel for GPUs needs a copy."""
    if has_heads_in_rows(query):
        return output.swapaxes(-3, -2).contiguous().swapaxes(-3, -2)
    return output.contiguous()


def _forward_shapes(*args: Any) -> list[Tensor]:
    arrays, spec = read_arguments(args)
    problem = spec.problem(arrays)
    query, rows = problem.query, problem.query.shape[:-1]
    output = _order_heads(query.new_empty((*rows, problem.d_v)), query)
    outputs = [output, query.new_empty(rows, dtype=torch.float64)]
    for statistic in problem.see:
        if statistic.num_arrays:
            made = statistic.outputs(problem)
            outputs += [query.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in made]
    return outputs


attention_op = _define("attention", "", _forward, _forward_shapes)


def _backward_shapes(
    _: Any, gradient_indices: Any, wanted_tables: list[int], output: Any, lse: Any, *args: Any
) -> list[Tensor]:
    arrays, spec = read_arguments(args)
    flat = arrays.flatten()
    return [flat[place].new_empty(flat[place].shape) for place in spec.find_places(wanted_tables)]


attention_backward_op = _define(
    "attention_backward",
    "Tensor[] gradients, int[] gradient_indices, int[] wanted_tables, Tensor output, Tensor lse, ",
    lambda gradients, indices, tables, output, lse, *args: apply_chain_rule(
        gradients, indices, tables, *read_arguments(args), (output, lse)
    ),
    _backward_shapes,
)


def _compute_tangents(
    directions: list[Tensor], places: list[int], output: Tensor, lse: Tensor, *args: Any
) -> list[Tensor]:
    """Return the tangents of output and lse.

    `directions` are the tangents of the arrays at `places` in the list of `Arrays.flatten`. The other tangents are 0.
    """
    arrays, spec = read_arguments(args)
    problem = restore_problem(arrays, spec)
    tangents = spec.tangents(problem, places, directions)
    return list(push_forward(problem, make_plan(problem), tangents, (output, lse)))


attention_tangent_op = _define(
    "attention_tangent",
    "Tensor[] directions, int[] places, Tensor output, Tensor lse, ",
    _compute_tangents,
    lambda directions, places, output, lse, *args: [torch.empty_like(output), torch.empty_like(lse)],
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

    `gradients` are the gradients of the results at the indices `gradient_indices`. Other results have the gradient 0.
    If `saved`, output and lse, is None, the result is differentiable.
    """
    problem = restore_problem(arrays, spec)
    slots = spec.table_slots(problem)
    slots_of_wanted = [slots[table] for table in wanted_tables]
    gradient_of = dict(zip(gradient_indices, gradients, strict=True))
    given = unflatten_gradients(problem.see, gradient_of, saved, slots_of_wanted)
    result = streaming.backward(problem, given) if saved is None else differentiate(problem, make_plan(problem), given)
    return result.flatten(slots_of_wanted, spec.has_sinks)
