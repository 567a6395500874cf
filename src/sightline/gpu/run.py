"""The forward kernel's call and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..plan import Result
from ..problem import Problem
from ..streaming import Work, observe
from .call import Call
from .chosen import chosen
from .configurations import Configuration
from .forward import careful, forward
from .operands import Operands
from .schedule import schedule

__all__ = ["architecture_of", "forward_calls", "run"]

CAREFUL_ROWS = 32  # queries at a time in the pass that only blocks with NaN take
CAREFUL_PROGRAMS = 1024  # programs that look for such blocks


def run(problem: Problem, architecture: str | None) -> Result:
    """Forward, statistics after it."""
    rows = (*problem.lead, problem.H, problem.n)
    output = problem.query.new_empty((*rows, problem.d_v))
    lse = problem.query.new_empty(rows, dtype=torch.float64)
    if lse.numel():
        if problem.m == 0 or problem.d_v == 0:
            return _without_kernel(problem)
        for call in forward_calls(problem, output, lse, architecture or architecture_of(problem.query.device)):
            call.launch()
    return Result(output, lse, observe(Work(problem), lse) if problem.see else ())


def forward_calls(
    problem: Problem, output: Any, lse: Any, architecture: str, sizes: Configuration | None = None
) -> Iterator[Call]:
    """The calls that fill output and lse, in tiles of these sizes or of those that are chosen for the problem."""
    sizes = sizes or chosen("forward", problem, architecture)
    if sizes.specialised:
        from . import hopper

        yield from hopper.forward_calls(problem, output, lse, architecture, replace(sizes, specialised=False))
        return
    given = Operands(problem, sizes)
    blocks = -(-problem.n // sizes.rows)
    items = problem.B * problem.H * blocks
    hides = problem.mask is not None
    arguments = given.common() | {
        "output": output,
        "lse": lse,
        "tainted": problem.query.new_empty(items, dtype=torch.int32) if hides else None,
        "blocks": blocks,
        "schedule": schedule(problem, sizes.rows, sizes.keys),
        "sinks": given.sinks(),
        "random": given.random(),
        "kept": given.kept(),
    }
    yield Call(forward, items, arguments, sizes, given.sources)
    if hides:
        part = min(sizes.rows, CAREFUL_ROWS)
        more = {"items": items, "form": given.form(part), "PARTS": sizes.rows // part}
        slow = replace(sizes, rows=part, warps=min(sizes.warps, 4), stages=1)
        yield Call(careful, min(items, CAREFUL_PROGRAMS), arguments | more, slow, given.sources)


def _without_kernel(problem: Problem) -> Result:
    """No keys, or values of no width: nothing to multiply."""
    from ..streaming import Streaming

    return Streaming().run(problem)


@lru_cache
def architecture_of(device: Any) -> str:
    """The device's architecture, "sm_90", "gfx942" and the like."""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
