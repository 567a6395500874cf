"""The forward kernel's call and its answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import convert, empty, layout, to_numpy
from ...kernel import Result
from ...problem import Problem
from ..codegen.abi import FORWARD, pack
from ..kernels.forward import Forward
from ..runtime.processor import Processor
from ..runtime.thread_team import count
from .arguments import Inputs, block_of, fitted, kernel_of, structure_of
from .bound_call import Prepared
from .decode import decode, decodes
from .statistics import Riders, see

__all__ = ["forward", "run", "source"]

SMALL = 1 << 21  # multiplications below which a second thread costs more than it gives


def run(problem: Problem, threads: int | None, processor: Processor) -> Result:
    """Forward through the generated kernel, statistics beside it or after it."""
    output = empty((*problem.lead, problem.H, problem.n, problem.d_v), problem.dtype, problem.query)
    lse = np.empty((*problem.lead, problem.H, problem.n), np.float64)
    riders = Riders(problem)
    prepared: Prepared | None = None
    if lse.size:
        few = not riders.roles and decodes(problem, processor)
        prepared = decode(problem, output, lse, threads, processor) if few else None
        if prepared is None:
            found = forward(problem, output, lse, threads, processor, riders)
            prepared = None if few else found  # the next such call is the decoding kernel's again
    if prepared is not None and (_reads_more(problem) or riders.roles or not prepared.kept_for(processor)):
        prepared = None
    lse = convert(lse, problem.query)
    seen = see(problem, lse, riders, threads, processor) if problem.see else ()
    return Result(output, lse, seen, prepared)


def source(problem: Problem, processor: Processor) -> str:
    """The forward kernel in LLVM's language."""
    riders = Riders(problem)
    machine = fitted(processor.machine, problem)
    inputs = Inputs(problem, block_of(problem.dtype, machine), riders.formulas)
    structure = structure_of("forward", problem, inputs, vectors=machine.vectors, roles=riders.roles)
    return str(Forward(structure, inputs.formulas, processor.machine).write("sightline_forward"))


def _reads_more(problem: Problem) -> bool:
    """Whether the answer depends on more than query, key and value hold."""
    return bool(problem.tables or problem.sinks is not None or problem.dropout)


def forward(
    problem: Problem, output: Any, lse: Any, threads: int | None, processor: Processor, riders: Riders
) -> Prepared:
    """Fill output, lse and the riders' arrays, and give the call."""
    machine = fitted(processor.machine, problem)
    block = block_of(problem.dtype, machine)
    inputs = Inputs(problem, block, riders.formulas)
    structure = structure_of("forward", problem, inputs, vectors=machine.vectors, roles=riders.roles)
    kernel = kernel_of(structure, inputs, Forward, processor)
    query_blocks = -(-problem.n // block)
    sinks = np.zeros(1) if problem.sinks is None else to_numpy(problem.sinks).astype(np.float64)
    fields = inputs.fields(structure) | {
        "items": problem.B * problem.H * query_blocks,
        "query_blocks": query_blocks,
        "lse": inputs.address(lse),
        "output": layout(output)[0],
        "sinks": inputs.address(sinks),
    }
    words = pack(FORWARD, fields, [*inputs.table_words(), *((x.ctypes.data, (0,), (0,)) for x in riders.arrays)])
    work = problem.B * problem.H * problem.n * problem.m * (problem.d_k + problem.d_v)
    most = 1 if work < SMALL else int(fields["items"])
    processor.call(kernel, words, min(count(threads), most), (*inputs.kept, output, *riders.arrays))
    return Prepared(kernel, words, most, {"counter": 1, "lse": lse.size}, inputs.steady(lse))
