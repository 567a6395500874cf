"""Entries of the call cache for tensors on a GPU: a repeated call launches its kernels without planning.

    attention(q, k, v, mask=causal())  →  Request  →  GpuEntry  →  BoundLaunches  →  kernels

`call_cache` stores these entries beside those of the CPU. A call is stored if its launches depend only on the layouts
of its arrays and on its formulas, and not on the numbers in its tables (`Table.with_unknown_entries`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention  # bound before `replacing` replaces it

from ..arrays.operations import TORCH
from ..caching import store
from ..call import call_cache
from ..call.backward_calls import MAX_BACKWARD_ENTRIES
from ..call.call_cache import Entry, EntryResult, Hook, Operands, describe_statistics
from ..call.kernel import BACKWARD_OPERANDS, GivenGradients, Gradients, Result
from ..call.lookup import LOOKUP, store_call
from ..call.problem import NUM_OPERANDS, Problem
from ..call.request import Request
from ..formula.expression import Expression
from .autograd import GraphCall, GraphPasses, needs_gradients
from .operator import make_seed

if TYPE_CHECKING:
    from ..gpu.launch.bound_launches import BoundLaunches

NUM_AXES = 4  # of query, key and value, as torch's own kernels take them
MAX_CALLS_BY_NUMBERS = 64  # calls that differ only in the numbers of their formulas: each has kernels of its own


class FusedEntry:
    """A call that torch's own kernels serve; see `fused`."""

    prepared = None  # no generated code can run it; see `cpu.calls.direct_call`

    def __init__(self, problem: Problem) -> None:
        self.scale, self.is_grouped = problem.scale, problem.group > 1

    def run(self, request: Request, operands: Operands, threads: int | None) -> Any:
        """Return (output, seen) of the call."""
        return scaled_dot_product_attention(*operands, scale=self.scale, enable_gqa=self.is_grouped), ()


class EntriesByNumbers:
    """The calls that differ only in the numbers of their formulas, such as the width of a window, by these numbers."""

    prepared = None  # as in `FusedEntry`

    def __init__(self) -> None:
        self.calls: dict[tuple[float, ...], GpuEntry] = {}

    def run(self, request: Request, operands: Operands, threads: int | None) -> Any:
        """Return the answer of the call; None if the call needs the full dispatch."""
        call = self.calls.get(request.numbers)
        return None if call is None else call.run(request, operands)


@dataclass
class GpuEntry(Entry):
    """A cached call of Triton kernels: `launches` are the kernels with their arguments, without addresses and seed."""

    launches: BoundLaunches

    def run(self, request: Request, operands: Operands) -> Any:
        """Return the answer of the call; None if the call needs the full dispatch."""
        inputs = self.launches.read_inputs(operands, request.addresses, request.tables, request.sinks)
        if inputs is None:
            return None
        seed = request.seed or 0
        if request.seed is None and self.launches.has_dropout:
            seed = int(make_seed(None))
        results = self.launches.run(inputs, seed)
        if self.squeezed_axis is not None:
            results = [array.squeeze(self.squeezed_axis) for array in results]
        output, lse, *arrays = results
        return self.hook(self, request, operands, EntryResult(output, lse, arrays, False, seed))


class GpuPasses(GraphPasses):
    """The backward passes of calls on a GPU, which are launches of Triton kernels."""

    def repeat_call(self, call: GraphCall, inputs: Sequence[Tensor], given: GivenGradients) -> Sequence[Tensor] | None:
        kernel_arrays, tables = _kernel_inputs(inputs, given), call.source.tables
        answer = None if kernel_arrays is None else LOOKUP.find_or_run(self.entries, (), (), *kernel_arrays, *tables)
        if kernel_arrays is None or answer is None or answer[0] is None:
            return None
        launches, _, _, *addresses = answer
        read = launches.read_inputs(kernel_arrays, addresses, tables, None)
        return None if read is None else launches.run(read, call.seed or 0)

    def keep_call(self, found: Gradients, call: GraphCall, inputs: Sequence[Tensor], given: GivenGradients) -> None:
        from ..gpu.launch.bound_launches import BoundLaunches  # loads triton, as each call of a kernel does

        recorded, kernel_arrays = found.recorded_call, _kernel_inputs(inputs, given)
        read = None if kernel_arrays is None else LOOKUP.read_arrays(*kernel_arrays, *call.source.tables)
        if read is None or recorded is None:
            return
        layouts, *addresses = read
        expected = [recorded.inputs[name].data_ptr() for name in BACKWARD_OPERANDS]
        launches = BoundLaunches.of(recorded, call.formulas, call.source.tables)
        if launches is not None and addresses[: len(expected)] == expected:
            store(self.entries, (layouts, ()), launches, MAX_BACKWARD_ENTRIES)


def _kernel_inputs(inputs: Sequence[Tensor], given: GivenGradients) -> tuple[Any, ...] | None:
    """Return the arrays that the backward kernels read besides tables; None if the gradients need the full dispatch."""
    d_output, (output, lse) = given.d_output, given.saved
    is_bound = d_output is not None and d_output.dtype is output.dtype and len(inputs) == NUM_OPERANDS
    return (*inputs, output, d_output, lse) if is_bound and given.d_lse is None and not given.d_seen else None


def insert(
    request: Request,
    formulas: Sequence[Expression | None],
    operands: Operands,
    problem: Problem,
    result: Result,
    hook: Hook,
) -> None:
    """Store a call of Triton kernels, if its launches can be repeated. The parameters are as in `call_cache.insert`."""
    from ..gpu.launch.bound_launches import BoundLaunches  # loads triton, as each call of a kernel does

    read, recorded = (problem.query, problem.key, problem.value), result.recorded_call
    if recorded is None or any(x.data_ptr() != y.data_ptr() for x, y in zip(read, operands, strict=True)):
        return
    launches = BoundLaunches.of(recorded, formulas, request.tables)
    if launches is None:
        return
    squeezed_axis = len(problem.batch_shape) if problem.heads_squeezed else None
    statistics, _ = describe_statistics(problem)
    variants: Any = call_cache.calls.get(request.key)
    if not isinstance(variants, EntriesByNumbers) or len(variants.calls) >= MAX_CALLS_BY_NUMBERS:
        variants = EntriesByNumbers()
        store_call(call_cache.calls, request.key, variants)
    variants.calls[request.numbers] = GpuEntry(TORCH, statistics, squeezed_axis, hook, launches)


def insert_fused(request: Request, operands: Operands, problem: Problem) -> None:
    """Store a call that torch's own kernels served, if it needs no gradients and the arrays were passed unchanged."""
    read = problem.query, problem.key, problem.value
    # on AMD GPUs `fused.Fused.run` changes key and value
    is_unchanged = all(x is y for x, y in zip(read, operands, strict=True)) and problem.query.ndim == NUM_AXES
    if is_unchanged and not needs_gradients(problem) and torch.version.hip is None:
        store_call(call_cache.calls, request.key, FusedEntry(problem))
