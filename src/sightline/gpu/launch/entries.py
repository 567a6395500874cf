"""Entries of the call cache for tensors on a GPU: a repeated call launches its kernels without planning.

    attention(q, k, v, mask=causal())  →  Request  →  GpuEntry  →  BoundLaunches  →  kernels

A call is stored if its launches depend only on the layouts of its arrays and on its formulas, and not on the numbers in
its tables (`Table.with_unknown_entries`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...call import call_cache
from ...call.backward_calls import BACKWARD_OPERANDS, BackwardInputs, BackwardPasses
from ...call.call_cache import Entry, EntryResult, FirstCall, Operands, store_call
from ...call.request import Request
from ...formula.expression import Expression
from .bound_launches import BoundLaunches
from .launches import RecordedCall

MAX_CALLS_BY_NUMBERS = 64  # calls that differ only in the numbers of their formulas: each has kernels of its own


@dataclass
class GpuEntry(Entry):
    """A cached call of Triton kernels: `launches` are the kernels with their arguments, without addresses and seed."""

    launches: BoundLaunches

    def run(self, request: Request, operands: Operands, results: Sequence[Any] | None) -> Any:
        inputs = self.launches.read_inputs(operands, request.addresses, request.tables, request.sinks)
        if inputs is None:
            return None
        seed = request.seed or 0
        if request.seed is None and self.launches.has_dropout and self.framework.draw_seed is not None:
            seed = self.framework.draw_seed()
        arrays = self.launches.run(inputs, seed)
        if self.squeezed_axis is not None:
            arrays = [array.squeeze(self.squeezed_axis) for array in arrays]
        output, lse, *others = arrays
        return self.hook(self, request, operands, EntryResult(output, lse, others, False, seed))


class EntriesByNumbers:
    """The calls that differ only in the numbers of their formulas, such as the width of a window, by these numbers."""

    prepared = None  # no generated code can run it; see `cpu.calls.direct_call`

    def __init__(self) -> None:
        self.calls: dict[tuple[float, ...], GpuEntry] = {}

    def run(self, request: Request, operands: Operands, results: Sequence[Any] | None) -> Any:
        """Return the answer of the call; None if the call needs the full dispatch."""
        call = self.calls.get(request.numbers)
        return None if call is None else call.run(request, operands, results)


class BackwardLaunches(NamedTuple):
    """A backward pass of Triton kernels that lacks only its inputs."""

    launches: BoundLaunches
    prepared: None = None

    def run(
        self, passes: BackwardPasses, inputs: BackwardInputs, addresses: Sequence[int], results: Any
    ) -> list[Any] | None:
        """Return the gradients; see `BackwardPasses.entries`."""
        arrays = inputs.arrays[: len(BACKWARD_OPERANDS)]
        read = self.launches.read_inputs(arrays, addresses, inputs.tables, None)
        return None if read is None else self.launches.run(read, inputs.seed)


class Launched(RecordedCall):
    """The launches of a call or of its backward pass, from which an entry can be made."""

    def keep(self, call: FirstCall) -> None:
        """Store an entry; see `Result.keep`."""
        request, problem = call.request, call.problem
        read = problem.query, problem.key, problem.value
        if any(x.data_ptr() != y.data_ptr() for x, y in zip(read, call.operands, strict=True)):
            return
        launches = BoundLaunches.of(self, call.formulas, request.tables)
        if launches is None:
            return
        variants: Any = call_cache.calls.get(request.key)
        if not isinstance(variants, EntriesByNumbers) or len(variants.calls) >= MAX_CALLS_BY_NUMBERS:
            variants = EntriesByNumbers()
            store_call(call_cache.calls, request.key, variants)
        variants.calls[request.numbers] = GpuEntry(*call.describe()[0], launches)

    def make_entry(
        self,
        passes: BackwardPasses,
        inputs: BackwardInputs,
        addresses: Sequence[int],
        formulas: Sequence[Expression | None],
    ) -> BackwardLaunches | None:
        """Return an entry; see `Gradients.make_entry`."""
        own = self.inputs
        expected = [own[name].data_ptr() for name in BACKWARD_OPERANDS]
        if inputs.d_output.dtype is not inputs.output.dtype or [*addresses[: len(expected)]] != expected:
            return None
        launches = BoundLaunches.of(self, formulas, inputs.tables)
        return None if launches is None else BackwardLaunches(launches)
