"""The forward and decoding kernels' calls and their answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...kernel import Result
from ...problem import Problem
from ..kernels.decode import decode, merge
from ..kernels.forward import forward
from ..tuning.configurations import Configuration
from ..tuning.selection import architecture_of, chosen
from .arguments import Operands
from .launcher import Call
from .schedule import schedule
from .statistics import Riders, see

__all__ = ["calls_of", "careful_call", "decode_calls", "decodes", "forward_calls", "run"]

CAREFUL_ROWS = 32  # queries, or keys, at a time in the pass that only marked blocks take
CAREFUL_PROGRAMS = 1024  # that look for such blocks
FEW = 16  # queries that decoding takes at a time, of each head
LEAST = 256  # keys worth a part of their own
PROGRAMS = 512  # wanted of decoding; the problem alone decides, so that every device gives the same bits


def run(problem: Problem, architecture: str | None) -> Result:
    """Forward, statistics beside it or after it."""
    rows = (*problem.lead, problem.H, problem.n)
    output = problem.query.new_empty((*rows, problem.d_v))
    lse = problem.query.new_empty(rows, dtype=torch.float64)
    riders = Riders(problem)
    architecture = architecture or architecture_of(problem.query.device)
    if lse.numel():
        if problem.m == 0 or problem.d_v == 0:
            return _without_kernel(problem)
        with torch.cuda.device_of(problem.query):  # type: ignore[no-untyped-call]
            for call in calls_of(problem, output, lse, architecture, riders):
                call.launch()
    return Result(output, lse, see(problem, lse, riders, architecture) if problem.see else ())


def calls_of(
    problem: Problem, output: Any, lse: Any, architecture: str, riders: Riders | None = None
) -> Iterator[Call]:
    """The calls that fill output, lse and the riders' arrays, in order."""
    if not riders and decodes(problem):
        return decode_calls(problem, output, lse, architecture)
    return forward_calls(problem, output, lse, architecture, riders)


def forward_calls(
    problem: Problem,
    output: Any,
    lse: Any,
    architecture: str,
    riders: Riders | None = None,
    sizes: Configuration | None = None,
) -> Iterator[Call]:
    """Blocks of queries, and those once more whose output has NaN that a weight of 0 may keep out.

    In tiles of these sizes, or of those that are chosen for the problem.
    """
    sizes = sizes or chosen("forward", problem, architecture)
    on_hopper, sizes = sizes.specialised, replace(sizes, specialised=False)
    riders = Riders(problem.asking()) if riders is None else riders
    given = Operands(problem, sizes, riders.formulas)
    blocks = -(-problem.n // sizes.rows)
    items = problem.B * problem.H * blocks
    arguments = given.common() | {
        "output": output,
        "lse": lse,
        "tainted": given.marks(items),
        "blocks": blocks,
        "items": items,
        "schedule": schedule(problem, sizes.rows, sizes.keys),
        "sinks": given.sinks(),
        "random": given.random(),
        "kept": given.kept(),
        "seen": None,
        "PARTS": 0,
    }
    call = Call(forward, items, riders.arguments(given, arguments), sizes, given.sources)
    if on_hopper:
        from ..hopper.launch import specialised

        call = specialised(call)
    yield call
    yield careful_call(forward, arguments, given, sizes, replace(sizes, rows=min(sizes.rows, CAREFUL_ROWS)))


def careful_call(
    kernel: Any, arguments: dict[str, Any], given: Operands, sizes: Configuration, few: Configuration
) -> Call:
    """The call of a kernel for blocks of `sizes` that it marked, in parts of `few` rows or keys: see `forward`."""
    few = replace(few, warps=min(sizes.warps, 4), stages=1)
    parts = sizes.rows // few.rows * (sizes.keys // few.keys)
    more = {"form": given.form(few), "PARTS": parts}
    return Call(kernel, min(arguments["items"], CAREFUL_PROGRAMS), arguments | more, few, given.sources)


def decodes(problem: Problem) -> bool:
    """Whether few queries look at many keys, and at the same ones for all heads."""
    shared = problem.mask is None or "h" not in problem.mask.reads
    return problem.n <= FEW and problem.m >= 2 * LEAST and shared


def decode_calls(problem: Problem, output: Any, lse: Any, architecture: str) -> Iterator[Call]:
    """Parts of the keys, and what joins them."""
    sizes = chosen("decode", problem, architecture)
    given = Operands(problem, sizes)
    together = problem.group * problem.n
    apart = problem.B * problem.G * -(-together // sizes.rows)
    tiles = -(-problem.m // sizes.keys)
    wanted = min(-(-PROGRAMS // apart), -(-problem.m // LEAST))
    chunk = -(-tiles // wanted)
    parts = -(-tiles // chunk)
    shape = (parts, problem.B, problem.H, problem.n)
    accumulator = getattr(torch, problem.accumulator)
    arguments = given.common() | {
        "part_output": problem.query.new_empty((*shape, problem.d_v), dtype=accumulator),
        "part_lse": problem.query.new_empty(shape, dtype=torch.float64),
        "parts": parts,
        "schedule": schedule(problem, FEW, sizes.keys),
        "random": given.random(),
    }
    yield Call(decode, apart * parts, arguments | {"chunk": chunk}, sizes, given.sources)
    few = replace(sizes, rows=FEW, stages=1)
    rows = replace(few, rows=1 << (problem.n - 1).bit_length())
    joined = {"output": output, "lse": lse, "sinks": given.sinks(), "kept": given.kept()}
    joined |= {"form": given.form(rows), "careful": given.form(few)}
    yield Call(merge, problem.B * problem.H, arguments | joined, few, given.sources)


def _without_kernel(problem: Problem) -> Result:
    """No keys, or values of no width: nothing to multiply."""
    from ...streaming import Streaming

    return Streaming().run(problem)
