"""The forward kernel's call and its answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import convert, empty, layout, to_numpy
from ...kernel import Result
from ...problem import Problem
from ..codegen.abi import FORWARD_FIELDS, pack
from ..kernels.forward import Forward
from ..runtime.processor import Processor
from ..runtime.thread_team import thread_count
from .arguments import KernelArguments, compile_kernel, fit_machine, make_spec, query_block_size
from .bound_call import BoundCall
from .decode import can_decode, decode
from .statistics import FusedStatistics, compute_statistics

__all__ = ["forward", "run", "source"]

MIN_PARALLEL_MULTIPLICATIONS = 1 << 21  # multiplications below which a second thread costs more than it gives


def run(problem: Problem, threads: int | None, processor: Processor) -> Result:
    """Forward through the generated kernel, statistics beside it or after it."""
    output = empty((*problem.batch_shape, problem.H, problem.n, problem.d_v), problem.dtype, problem.query)
    lse = np.empty((*problem.batch_shape, problem.H, problem.n), np.float64)
    fused_statistics = FusedStatistics(problem)
    bound_call: BoundCall | None = None
    if lse.size:
        uses_decode = not fused_statistics.roles and can_decode(problem, processor)
        bound_call = decode(problem, output, lse, threads, processor) if uses_decode else None
        if bound_call is None:
            call = forward(problem, output, lse, threads, processor, fused_statistics)
            bound_call = None if uses_decode else call  # the next such call is the decoding kernel's again
    if bound_call is not None and (
        _reads_other_arrays(problem) or fused_statistics.roles or not bound_call.is_cacheable(processor)
    ):
        bound_call = None
    lse = convert(lse, problem.query)
    seen = compute_statistics(problem, lse, fused_statistics, threads, processor) if problem.see else ()
    return Result(output, lse, seen, bound_call)


def source(problem: Problem, processor: Processor) -> str:
    """The forward kernel in LLVM's language."""
    fused_statistics = FusedStatistics(problem)
    machine = fit_machine(processor.machine, problem)
    kernel_arguments = KernelArguments(problem, query_block_size(problem.dtype, machine), fused_statistics.formulas)
    spec = make_spec("forward", problem, kernel_arguments, vectors=machine.vectors, roles=fused_statistics.roles)
    return str(Forward(spec, kernel_arguments.formulas, processor.machine).write("sightline_forward"))


def _reads_other_arrays(problem: Problem) -> bool:
    """Whether the answer depends on more than query, key and value hold."""
    return bool(problem.tables or problem.sinks is not None or problem.dropout)


def forward(
    problem: Problem,
    output: Any,
    lse: Any,
    threads: int | None,
    processor: Processor,
    fused_statistics: FusedStatistics,
) -> BoundCall:
    """Fill output, lse and the riders' arrays, and give the call."""
    machine = fit_machine(processor.machine, problem)
    block = query_block_size(problem.dtype, machine)
    kernel_arguments = KernelArguments(problem, block, fused_statistics.formulas)
    spec = make_spec("forward", problem, kernel_arguments, vectors=machine.vectors, roles=fused_statistics.roles)
    kernel = compile_kernel(spec, kernel_arguments, Forward, processor)
    query_blocks = -(-problem.n // block)
    sinks = np.zeros(1) if problem.sinks is None else to_numpy(problem.sinks).astype(np.float64)
    fields = kernel_arguments.fields(spec) | {
        "items": problem.B * problem.H * query_blocks,
        "query_blocks": query_blocks,
        "lse": kernel_arguments.address(lse),
        "output": layout(output)[0],
        "sinks": kernel_arguments.address(sinks),
    }
    argument_words = pack(
        FORWARD_FIELDS,
        fields,
        [*kernel_arguments.table_fields(), *((x.ctypes.data, (0,), (0,)) for x in fused_statistics.arrays)],
    )
    work = problem.B * problem.H * problem.n * problem.m * (problem.d_k + problem.d_v)
    max_threads = 1 if work < MIN_PARALLEL_MULTIPLICATIONS else int(fields["items"])
    processor.call(
        kernel,
        argument_words,
        min(thread_count(threads), max_threads),
        (*kernel_arguments.keep_alive, output, *fused_statistics.arrays),
    )
    return BoundCall(
        kernel, argument_words, max_threads, {"counter": 1, "lse": lse.size}, kernel_arguments.constant_arrays(lse)
    )
