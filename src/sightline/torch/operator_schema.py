"""The arguments and results of the registered operator: the tensors of `Arrays`, and the plain values of `CallSpec`.

torch.compile can trace `to_arguments`, so a compiled function may build formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.kernel import Result
from ..call.problem import Problem, validate
from ..call.spec import Arrays, CallSpec, split_arrays
from ..call.validation import check_device
from ..formula.tables import Table
from ..formula.tensor_cache import to_device
from ..statistics import Statistic

# the fields of `Arrays`, and then those of `CallSpec`; the seed is int64, and a tensor, so that torch's generator can
# draw it inside a compiled function
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tables, Tensor? sinks, Tensor? seed, str mask, str score, "
    "str table_axes, float scale, float dropout, str see, bool has_sinks, str? kernel, int? threads"
)


def to_arguments(
    problem: Problem, seed: Tensor | None, kernel: str | None, threads: int | None
) -> tuple[Arrays, CallSpec]:
    """Return the arguments for a problem that `problem.parse` has checked. No table is read."""
    spec, tables = CallSpec.of(problem, kernel, threads)
    tensors = [_to_tensor(table, problem.query) for table in tables]
    return Arrays(problem.query, problem.key, problem.value, tensors, problem.sinks, seed), spec


def read_arguments(arguments: Sequence[Any]) -> tuple[Arrays, CallSpec]:
    """Return the arrays and the specification in the arguments of the operator."""
    count = len(Arrays._fields)
    return Arrays(*arguments[:count]), CallSpec(*arguments[count:])


def make_problem(arrays: Arrays, spec: CallSpec) -> Problem:
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
    tensor: Tensor
    if torch.compiler.is_compiling():
        tensor = torch.as_tensor(table.array, device=query.device)
    else:
        tensor = to_device(table.array, query)
    # a backward pass reads the entries again, when the caller may have changed the array
    return tensor.clone() if torch.is_grad_enabled() else tensor


def make_seed(seed: int | None) -> Tensor:
    """Return the seed as an int64 tensor. None draws a seed from torch's generator, which torch.manual_seed sets."""
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    return torch.tensor(seed - (2**64 if seed >= 2**63 else 0), dtype=torch.int64, device="cpu")


# -- results -------------------------------------------------------------------------------------------------------


def build_result(see: Sequence[Statistic], results: Sequence[Tensor]) -> Result:
    """Return the `Result` whose arrays, in the order of `flatten_result`, are `results`."""
    output, lse = results[:2]
    returned_lse = lse if output.dtype == torch.float64 else lse.float()
    seen = []
    for statistic, arrays in zip(see, split_arrays(see, results), strict=True):
        constant = [array.detach() for array in arrays]
        entry = statistic.build_result(arrays if statistic.is_differentiable else constant) if arrays else returned_lse
        seen.append(entry)
    return Result(output, lse, tuple(seen))
