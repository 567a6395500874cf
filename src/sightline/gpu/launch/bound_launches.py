"""Bound launches: the kernel launches of one call, which are repeated without planning.

The repeated calls have arrays of the same layouts (dtypes, shapes and strides) and the same formulas, which decide the
compiled kernels, grids, tile ranges and numbers. A run allocates the arrays that the kernels write, and passes the
addresses of these arrays and of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from triton.runtime.driver import driver

from ...formula.expression import Expression
from ...formula.parameters import structure_of
from ...formula.tensor_cache import retain, to_device
from .arguments import dot_precision, dropout_state, prepare_sinks, prepare_table
from .launches import LaunchBinder, RecordedCall, UnboundArgumentError

ADDRESS_ALIGNMENT = 16  # bytes; Triton compiles other kernels for arrays that are not so aligned


class BoundTable(NamedTuple):
    """A table of the kernels.

    place : its index in `Request.tables`
    strides : its strides on the device
    must_move : True if the kernels cannot read the array of the request, so that every run copies it to the device
    """

    place: int
    strides: tuple[int, ...]
    must_move: bool


class BoundLaunches:
    """The launches of a recorded call. They can run again for other arrays of the same layouts.

    The class method `of` makes the object. `LaunchBinder` explains `launches`, `makers` and `schedules`.

    Parameters
    ----------
    recorded : the call
    tables : the tables that the kernels read
    """

    def __init__(self, recorded: RecordedCall, tables: Sequence[BoundTable], binder: LaunchBinder) -> None:
        problem = recorded.problem
        self.tables, self.is_compiled = tables, recorded.is_compiled
        self.has_sinks, self.has_dropout = problem.sinks is not None, "dropout_state" in recorded.inputs
        # the parameters of the problem, without its arrays
        self.problem = replace(problem, query=None, key=None, value=None, sinks=None, mask=None, score=None, see=())
        self.precision = dot_precision(problem.query)
        self.launches = [binder.bind(*one) for one in recorded.launches]
        self.makers, self.schedules = binder.makers, binder.schedules
        self.results = [binder.written[id(array)] for array in recorded.results]  # indices in `makers`
        self.streams: set[int] = set()  # the streams that have read the schedules

    @classmethod
    def of(
        cls, recorded: RecordedCall, formulas: Sequence[Expression | None], tables: Sequence[Any]
    ) -> BoundLaunches | None:
        """Return the launches of a recorded call; None if they depend on more than layouts and formulas.

        The launches may depend on the entries of a table, on an address that is not aligned, or on an array that a run
        does not have. `formulas` and `tables` are the attributes of the call's `Request`.
        """
        bound_tables = _bind_tables(recorded, formulas, tables)
        addresses = [x.data_ptr() for x in recorded.flat_inputs if isinstance(x, torch.Tensor)]
        has_kernels = not recorded.is_compiled or all(compiled is not None for _, compiled in recorded.launches)
        if bound_tables is None or not has_kernels or reduce(or_, addresses) % ADDRESS_ALIGNMENT:
            return None
        try:
            return cls(recorded, bound_tables, LaunchBinder(recorded))
        except UnboundArgumentError:
            return None

    def read_inputs(
        self, arrays: Sequence[Any], addresses: Sequence[int], tables: Sequence[Any], sinks: Any
    ) -> tuple[list[Any], list[int]] | None:
        """Return the arrays that the kernels read, query first, and their addresses.

        The result is None if these launches cannot serve the call, which must then be planned.

        Parameters
        ----------
        arrays : the tensors that the kernels read besides tables and sinks; query is the first
        addresses : the addresses of these tensors, and of `tables`
        tables, sinks : the tables and the sinks of the request
        """
        query = arrays[0]
        if query.dtype is torch.float32 and dot_precision(query) != self.precision:
            return None
        read, values = list(arrays), list(addresses[: len(arrays)])
        for place, strides, must_move in self.tables:
            table, address = tables[place], addresses[len(arrays) + place]
            if must_move:
                table = prepare_table(table, query)
                address = table.data_ptr()
                if table.stride() != strides:
                    return None
            read.append(table)
            values.append(address)
        if self.has_sinks:
            read.append(prepare_sinks(to_device(sinks, query)))
            values.append(read[-1].data_ptr())
        return None if reduce(or_, values) % ADDRESS_ALIGNMENT else (read, values)

    def run(self, inputs: tuple[list[Any], list[int]], seed: int) -> list[Any]:
        """Launch the kernels on the current stream for the inputs of `read_inputs`, and return the results.

        `seed` is the seed of dropout.
        """
        arrays, addresses = inputs
        query = arrays[0]
        device = query.get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.run(inputs, seed)
        words = dropout_state(self.problem, seed) if self.has_dropout else ()
        written = [make() for make in self.makers]
        if self.is_compiled:
            self._launch([*addresses, *words, *[array.data_ptr() for array in written]], query)
        else:
            for launch, pack, constants in self.launches:
                launch(*pack([*arrays, *words, *written], constants))
        return [written[index] for index in self.results]

    def _launch(self, values: Sequence[Any], query: Any) -> None:
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        if self.schedules:
            self._retain_schedules(query, stream)
        for launch, pack, constants in self.launches:
            launch(*pack(values, constants), stream=stream)

    def _retain_schedules(self, query: Any, stream: int) -> None:
        """Keep the memory of the schedules from being reused while kernels on the stream read it; see `retain`.

        One call of `retain` covers all later work of the stream, but not the work that a CUDA graph captures.
        """
        if stream in self.streams and not (query.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        for schedule in self.schedules:
            retain(schedule, query)
        self.streams.add(stream)


def _bind_tables(
    recorded: RecordedCall, formulas: Sequence[Expression | None], tables: Sequence[Any]
) -> list[BoundTable] | None:
    """Return the tables of the kernels; None if the launches may depend on the entries of a table."""
    origins, bound = [id(table) for table in structure_of(*formulas).tables], []
    for table in recorded.tables:
        if not (table.has_unknown_entries and table.origin in origins):
            return None
        place, prepared = origins.index(table.origin), prepare_table(table.array, recorded.problem.query)
        array = tables[place]
        must_move = not (isinstance(array, torch.Tensor) and array.data_ptr() == prepared.data_ptr())
        bound.append(BoundTable(place, prepared.stride(), must_move))
    return bound
