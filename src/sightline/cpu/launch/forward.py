"""The call of the forward kernel, and the result of a forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import convert, empty, layout
from ...kernel import Result
from ...problem import Problem
from ..codegen.abi import FORWARD_FIELDS
from ..kernels.forward import Forward
from ..kernels.kernel_spec import KernelSpec
from ..runtime.processor import Processor
from ..runtime.thread_count import thread_count
from .arguments import KernelArguments, compile_kernel, prepare, write_kernel
from .bound_call import BoundCall
from .decode import can_decode, decode
from .statistics import FusedStatistics, compute_statistics

__all__ = ["forward", "run", "source"]

MIN_PARALLEL_MULTIPLICATIONS = 1 << 21  # with fewer multiplications a second thread costs more than it saves


def run(problem: Problem, threads: int | None, processor: Processor) -> Result:
    """Return output, lse and statistics of a problem from the generated kernels."""
    output = empty((*problem.batch_shape, problem.H, problem.n, problem.d_v), problem.dtype, problem.query)
    lse = np.empty((*problem.batch_shape, problem.H, problem.n), np.float64)
    fused_statistics = FusedStatistics(problem)
    bound_call: BoundCall | None = None
    if lse.size:
        uses_decode = not fused_statistics.roles and can_decode(problem, processor)
        bound_call = decode(problem, output, lse, threads, processor) if uses_decode else None
        if bound_call is None:
            call = forward(problem, output, lse, threads, processor, fused_statistics)
            bound_call = None if uses_decode else call  # so the next call tries to decode again
    has_other_inputs = problem.tables or problem.sinks is not None or problem.dropout or fused_statistics.roles
    if bound_call is not None and (has_other_inputs or not bound_call.is_cacheable(processor)):
        bound_call = None
    lse = convert(lse, problem.query)
    seen = compute_statistics(problem, lse, fused_statistics, threads, processor) if problem.see else ()
    return Result(output, lse, seen, bound_call)


def source(problem: Problem, processor: Processor) -> str:
    """Return the LLVM text of the forward kernel."""
    arguments, spec = _prepare(problem, processor, FusedStatistics(problem))
    return str(write_kernel(spec, arguments, Forward, processor))


def _prepare(problem: Problem, processor: Processor, fused: FusedStatistics) -> tuple[KernelArguments, KernelSpec]:
    return prepare("forward", problem, processor.machine, fused.formulas, roles=fused.roles)


def forward(
    problem: Problem, output: Any, lse: Any, threads: int | None, processor: Processor, fused: FusedStatistics
) -> BoundCall:
    """Fill output, lse and the arrays of the fused statistics, and return the bound call."""
    arguments, spec = _prepare(problem, processor, fused)
    kernel = compile_kernel(spec, arguments, Forward, processor)
    counter = np.zeros(1, np.int64)
    fields = arguments.fields(spec)
    fields |= {
        "counter": arguments.retain(counter),
        "items": problem.B * problem.H * fields["query_blocks"],
        "lse": arguments.retain(lse),
        "output": layout(output)[0],
        "sinks": arguments.retain_sinks(),
    }
    statistic_fields = [(x.ctypes.data, 0, 0) for x in fused.arrays]
    packed = arguments.pack(FORWARD_FIELDS, fields, statistic_fields)
    work = problem.B * problem.H * problem.n * problem.m * (problem.d_k + problem.d_v)
    max_threads = 1 if work < MIN_PARALLEL_MULTIPLICATIONS else int(fields["items"])
    keep_alive = (*arguments.keep_alive, output, *fused.arrays)
    processor.call(kernel, packed, min(thread_count(threads), max_threads), keep_alive)
    workspace = {"counter": 1, "lse": lse.size}
    return BoundCall(kernel, packed, max_threads, workspace, arguments.constant_arrays(lse, counter))
