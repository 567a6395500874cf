"""Backward passes of a call that was differentiated before, without the full dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operations import accumulator, dtype_name, layout
from ..cpu.launch.backward import OPERANDS, SUMS, BoundBackwardCall
from ..cpu.launch.table_gradients import differentiate_sinks, sum_table_gradients
from ..formula.parameters import structure_of
from ..problem.kernel import is_lse_precise
from ..problem.problem import NUM_OPERANDS, Problem
from .result_indices import LSE, OUTPUT


class Inputs(NamedTuple):
    """The arrays of a call: query, key, value, the tables, the sinks and the seed."""

    query: Any
    key: Any
    value: Any
    tables: list[Any]
    sinks: Any
    seed: int


@dataclass(frozen=True)
class BoundGradients:
    """A bound call of the backward kernel for arrays in C order.

    Parameters
    ----------
    tables : for each table of the kernel, its index in `Inputs.tables`
    slots : the index in `Problem.tables` of each argument that is a table with a gradient
    """

    call: BoundBackwardCall
    tables: tuple[int, ...]
    slots: dict[int, int]

    @classmethod
    def of(
        cls, call: BoundBackwardCall, problem: Problem, inputs: Inputs, slots: dict[int, int]
    ) -> BoundGradients | None:
        """Return the gradients by a call that computed them for a problem; None if it read copies of the arrays."""
        if call.first_operands[:NUM_OPERANDS] != tuple([layout(x)[0] for x in inputs[:NUM_OPERANDS]]):
            return None
        place = {id(array): k for k, array in enumerate(inputs.tables)}
        read = {table.origin: place.get(id(table.array)) for table in structure_of(problem.mask, problem.score).tables}
        tables = [read.get(origin) for origin in call.table_origins]
        known = tuple([k for k in tables if k is not None])
        return cls(call, known, slots) if len(known) == len(tables) else None

    def run(
        self, inputs: Inputs, saved: tuple[Any, Any], gradients: dict[int, Any], threads: int | None
    ) -> dict[int, Any] | None:
        """Return the gradient of each argument; None if the call needs the full dispatch.

        `saved` is (output, lse) of the forward pass. `gradients` maps the index of a result to its gradient.
        """
        call, (output, lse) = self.call, saved
        d_output, d_lse, dtype = gradients[OUTPUT], gradients.get(LSE), accumulator(dtype_name(output))
        if not gradients.keys() <= {OUTPUT, LSE} or not is_lse_precise(lse, dtype):
            return None
        d_lse = None if d_lse is None else np.ascontiguousarray(d_lse, np.float64)
        sums = [np.empty(shape, dtype) for shape in call.sum_shapes]
        table_sums, tables = call.make_table_sums(), [call.convert_table(inputs.tables[k]) for k in self.tables]
        operands = [*inputs[:NUM_OPERANDS], output, d_output, lse]
        fields = dict(zip((*OPERANDS, *SUMS), _addresses([*operands, *sums]), strict=True))
        if d_lse is not None:
            fields["d_lse"] = layout(d_lse)[0]
        words = call.make_words(fields, _addresses(tables), call.numbers, _addresses(table_sums), inputs.seed)
        keep_alive = operands, d_lse, sums, table_sums, tables
        if call.run(threads, words, call.numbers, inputs.key, keep_alive) is None:
            return None
        found = dict(enumerate(call.combine(sums)))
        arrays = {slot: inputs.tables[k - NUM_OPERANDS] for k, slot in self.slots.items()}
        totals = sum_table_gradients(call.table_gradients, table_sums, arrays)
        found |= {k: totals.get(slot) for k, slot in self.slots.items()}
        if inputs.sinks is not None:
            sinks_place = NUM_OPERANDS + len(inputs.tables)
            found[sinks_place] = differentiate_sinks(inputs.sinks, d_output, d_lse, output, lse)
        return found


def _addresses(arrays: Sequence[Any]) -> list[int]:
    return [layout(array)[0] for array in arrays]
