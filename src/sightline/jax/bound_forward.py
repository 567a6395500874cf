"""Forward passes of a call that was run before, without arrays of NumPy in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.operations import layout, memory_layout
from ..cpu.launch.bound_call import BoundCall
from ..dispatch.call_cache import OPERANDS
from ..formula.parameters import structure_of
from ..problem.problem import NUM_OPERANDS, Problem
from .result_indices import LSE, OUTPUT, PRECISE_LSE

if TYPE_CHECKING:
    from ..cpu.calls.launch_record import LaunchRecord
    from .bound_gradients import Inputs
    from .host_calls import ArrayType


@dataclass(frozen=True)
class BoundForward:
    """A bound call of a forward kernel, for a call without dropout, sinks and statistics other than lse.

    Parameters
    ----------
    tables : for each table of the kernel, its index among the arguments
    results : the types of the results
    key : an object with the shape of key
    """

    call: BoundCall
    tables: tuple[int, ...]
    results: tuple[ArrayType, ...]
    key: Any

    @classmethod
    def of(
        cls, call: BoundCall | None, problem: Problem, inputs: Inputs, results: tuple[ArrayType, ...]
    ) -> BoundForward | None:
        """Return the forward pass by a call that computed a problem; None if it read copies of the arrays."""
        if call is None or call.first_operands != tuple([layout(x)[0] for x in inputs[:NUM_OPERANDS]]):
            return None
        place = {id(array): NUM_OPERANDS + k for k, array in enumerate(inputs.tables)}
        tables = {table.origin: table.array for table in structure_of(problem.mask, problem.score).tables}
        read: list[Any] = [tables.get(origin) for origin in call.table_origins]
        are_known = all(id(x) in place for x in read)
        if not are_known or tuple(map(memory_layout, read)) != call.table_layouts:  # the call read a converted table
            return None
        key = SimpleNamespace(shape=inputs.key.shape)
        return cls(call, tuple([place[id(x)] for x in read]), results, key)

    def make_record(self) -> LaunchRecord | None:
        """Return the record for generated code; None if the call has work for more than one thread."""
        return self.call.make_direct_record(None, self.key.shape[-2], 2)

    def run(self, arguments: Sequence[int], results: Sequence[int], threads: int | None) -> bool:
        """Run the call on arrays at these addresses. Return False if it needs the full dispatch."""
        kind, output = self.results[OUTPUT], None
        address = results[OUTPUT]
        if kind.by_position:  # the kernel writes its output in C order
            output = np.empty(kind.shape, kind.numpy_dtype)
            address = layout(output)[0]
        tables = [arguments[place] for place in self.tables]
        fields = dict(zip(OPERANDS, arguments, strict=False)) | {"output": address, "lse": results[PRECISE_LSE]}
        words = self.call.make_words(fields, tables, self.call.numbers)
        if self.call.run(threads, words, self.call.numbers, self.key, ()) is None:
            return False
        if output is not None:
            np.copyto(kind.at(results[OUTPUT]), output)
        precise = self.results[PRECISE_LSE].at(results[PRECISE_LSE]).view(np.float64)[..., 0]
        np.copyto(self.results[LSE].at(results[LSE]), precise, casting="same_kind")
        return True
