"""The arguments and results of the registered operator: tensors and plain values.

A formula becomes text, and the tables that it reads become tensors. torch.compile can trace
`OperatorArguments.from_problem`, so a compiled function may build formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch.call_text import CallText, split_arrays
from ..formula.expression import Expression
from ..formula.tables import Table
from ..formula.tensor_cache import to_device
from ..problem.kernel import Result
from ..problem.problem import Problem, validate
from ..problem.validation import check_device
from ..statistics import Statistic

SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tables, Tensor? sinks, Tensor? seed, "
    "str mask, str score, str table_axes, float scale, float dropout, str see, str? kernel, int? threads"
)


class OperatorArguments(NamedTuple):
    """The arguments of the operator, in the order of `SCHEMA`."""

    query: Tensor  # (*batch_shape, H, n, d_k), as in Problem
    key: Tensor
    value: Tensor
    tables: list[Tensor]  # the tables of the mask, then of the score, then of the statistics
    sinks: Tensor | None
    seed: Tensor | None  # int64; a tensor, so that torch's generator can draw it inside a compiled function
    # the six fields of `CallText`, because an operator of torch takes each value as an argument of its own
    mask: str
    score: str
    table_axes: str
    scale: float
    dropout: float
    see: str
    kernel: str | None
    threads: int | None

    @classmethod
    def from_problem(
        cls, problem: Problem, seed: Tensor | None, kernel: str | None, threads: int | None
    ) -> OperatorArguments:
        """Return the arguments for a problem that `problem.parse` has checked. No table is read."""
        text, tables = CallText.of(problem)
        tensors = [_to_tensor(table, problem.query) for table in tables]
        arrays = problem.query, problem.key, problem.value, tensors, problem.sinks, seed
        return cls(*arrays, *text, kernel, threads)

    @property
    def text(self) -> CallText:
        """The formulas as text, and the other plain values of the call."""
        return CallText(self.mask, self.score, self.table_axes, self.scale, self.dropout, self.see)

    def problem(self) -> Problem:
        """Return the validated problem."""
        mask, score = self.text.formulas(self.tables)
        return validate(self.build_problem(mask, score, 0 if self.seed is None else int(self.seed) % 2**64))

    def build_problem(self, mask: Expression | None = None, score: Expression | None = None, seed: int = 0) -> Problem:
        """Return a problem with this mask, score and seed. The defaults suffice to infer shapes and read no tensor."""
        operands = self.query, self.key, self.value
        return self.text.problem(operands, self.tables, (mask, score), self.sinks, seed)

    @property
    def differentiable_tables(self) -> list[int]:
        """The indices of the tables that may have gradients: tables of floats that the score reads."""
        return [k for k in self.text.score_tables if self.tables[k].is_floating_point()]

    @property
    def score_offset(self) -> int:
        """The index of the score's first table, which is the number of the mask's tables."""
        return self.text.score_tables.start

    def inputs(self, wanted_tables: Sequence[int]) -> list[Tensor]:
        """Return the tensors that may have gradients: query, key, value, the tables at `wanted_tables`, the sinks."""
        tables = [self.tables[k] for k in wanted_tables]
        return [self.query, self.key, self.value, *tables, *([] if self.sinks is None else [self.sinks])]

    def with_inputs(self, inputs: Sequence[Tensor], wanted_tables: Sequence[int]) -> OperatorArguments:
        """Return the arguments with these tensors in place of those that `self.inputs(wanted_tables)` returns."""
        query, key, value, new, sinks, *_ = self.to_argument_order(inputs, wanted_tables)
        tables = [old if table is None else table for old, table in zip(self.tables, new, strict=True)]
        return self._replace(query=query, key=key, value=value, tables=tables, sinks=sinks)

    def to_argument_order(self, gradients: Sequence[Tensor | None], wanted_tables: Sequence[int]) -> tuple[Any, ...]:
        """Return the gradients in the order of the operator's arguments; None for an argument without a gradient."""
        query, key, value, *rest = gradients
        tables: list[Tensor | None] = [None] * len(self.tables)
        for k in wanted_tables:
            tables[k] = rest.pop(0)
        return (query, key, value, tables, rest[0] if rest else None) + (None,) * (len(self) - 5)


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
