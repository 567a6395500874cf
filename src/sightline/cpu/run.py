"""The forward kernel's call and its answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import convert, empty, layout, to_numpy
from ..observe import Lse
from ..plan import Result
from ..problem import Problem
from ..streaming import Streaming
from .arguments import FORWARD, pack
from .call import Inputs, block_of, fitted, kernel_of, structure_of
from .decoding import decode, decodes
from .forward import Forward
from .prepared import Prepared
from .processor import Processor
from .threads import count

__all__ = ["run"]

SMALL = 1 << 21  # multiplications below which a second thread costs more than it gives


def run(problem: Problem, threads: int | None, processor: Processor) -> Result:
    """Forward through the generated kernel; statistics beyond lse through `streaming`, scores and normaliser alike."""
    output = empty((*problem.lead, problem.H, problem.n, problem.d_v), problem.dtype, problem.query)
    lse = np.empty((*problem.lead, problem.H, problem.n), np.float64)
    prepared: Prepared | None = None
    if lse.size:
        few = decodes(problem, processor)
        prepared = decode(problem, output, lse, threads, processor) if few else None
        if prepared is None:
            found = _forward(problem, output, lse, threads, processor)
            prepared = None if few else found  # the next such call is the decoding kernel's again
    if (
        problem.tables
        or problem.sinks is not None
        or problem.dropout
        or not (prepared and prepared.kept_for(processor))
    ):
        prepared = None
    lse = convert(lse, problem.query)
    if all(isinstance(statistic, Lse) for statistic in problem.see):
        seen = tuple(statistic.collect(problem, lse, lambda: iter(())) for statistic in problem.see)
    else:
        seen = Streaming().run(problem).seen
    return Result(output, lse, seen, prepared)


def _reads_more(problem: Problem) -> bool:
    """Whether the answer depends on more than query, key and value hold."""
    return bool(problem.tables or problem.sinks is not None or problem.dropout)


def _forward(problem: Problem, output: Any, lse: Any, threads: int | None, processor: Processor) -> Prepared:
    machine = fitted(processor.machine, problem)
    block = block_of(problem.dtype, machine)
    inputs = Inputs(problem, block)
    structure = structure_of("forward", problem, inputs, vectors=machine.vectors)
    kernel = kernel_of(structure, problem, Forward, processor)
    query_blocks = -(-problem.n // block)
    sinks = np.zeros(1) if problem.sinks is None else to_numpy(problem.sinks).astype(np.float64)
    fields = inputs.fields(structure) | {
        "items": problem.B * problem.H * query_blocks,
        "query_blocks": query_blocks,
        "lse": inputs.address(lse),
        "output": layout(output)[0],
        "sinks": inputs.address(sinks),
    }
    words = pack(FORWARD, fields, inputs.table_words())
    work = problem.B * problem.H * problem.n * problem.m * (problem.d_k + problem.d_v)
    most = 1 if work < SMALL else int(fields["items"])
    processor.call(kernel, words, min(count(threads), most), (*inputs.kept, output))
    return Prepared(kernel, words, most, {"counter": 1, "lse": lse.size}, inputs.steady(lse))
