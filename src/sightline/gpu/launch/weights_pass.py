"""The second pass's calls: what is asked of the weights, cut into programs as the problem alone decides."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...problem import Problem
from ...statistics import Mean, Pooled, Received, Scores, Statistic, TopK, Weights
from ...statistics.base import Pass
from ..kernels.weights_dense import written
from ..kernels.weights_pooled import pooled
from ..kernels.weights_received import received
from ..kernels.weights_top_k import top_k
from ..tuning.configurations import Configuration
from ..tuning.selection import chosen
from .arguments import Operands
from .launcher import Call
from .schedule import schedule

__all__ = ["MOST", "answered", "call_of", "room", "serves"]

MOST = 128  # of top_k's k: lists of a block of queries lie in registers
LISTED = 2048  # numbers in these lists at most
CELLS = (16, 64)  # cells of a program at most, below each other and side by side


def answered(problem: Problem, lse: Any, statistic: Statistic, architecture: str) -> list[Any] | None:
    """A statistic's arrays by a second pass of a kernel; None where none has it.

    None has it: top_k of more than `MOST` keys, whose lists do not fit registers; the mean of scores, whose −∞ a sum
    over heads would have to keep apart; on AMD the mean of weights, as a program's barrier does not wait there for what
    its threads wrote to memory, to which the next head adds.
    """
    shared = isinstance(statistic, Mean)  # of weights
    if not serves(problem, statistic) or (shared and architecture.startswith("gfx")):
        return None
    arrays = room(problem, statistic)
    with torch.cuda.device_of(problem.query):  # type: ignore[no-untyped-call]
        call_of(problem, lse, statistic, arrays, architecture).launch()
    if shared:
        arrays = [arrays[0] / math.prod(added(problem, statistic))]
    else:
        arrays = statistic.finish(arrays, Pass(problem, lse, (*problem.lead, problem.H)))
    return [array.to(getattr(torch, name)) for array, name in zip(arrays, statistic.dtypes(problem), strict=True)]


def serves(problem: Problem, statistic: Statistic) -> bool:
    """Whether a kernel here answers the statistic."""
    if isinstance(statistic, TopK):
        return min(statistic.k, problem.m) <= MOST
    if isinstance(statistic, Mean):
        return isinstance(statistic.of, Weights)
    return isinstance(statistic, Received | Pooled | Weights | Scores)


def room(problem: Problem, statistic: Statistic) -> list[Any]:
    """The arrays a kernel writes, holding what it does not write."""
    shapes, kinds = statistic.shapes(problem, (*problem.lead, problem.H), problem.n), statistic.dtypes(problem)
    fills = statistic.fills if isinstance(statistic, Scores) else (0.0, -1)
    if isinstance(statistic, Mean):  # added up before it is rounded
        kinds = (problem.accumulator,)
    if isinstance(statistic, Pooled):
        kinds = ("float64",)
    return [
        problem.query.new_full(shape, fill, dtype=getattr(torch, kind))
        for shape, fill, kind in zip(shapes, fills, kinds, strict=False)
    ]


def added(problem: Problem, statistic: Statistic) -> tuple[int, int]:
    """(batches, heads) whose weights are added up."""
    if not isinstance(statistic, Mean):
        return 1, 1
    return (problem.B if statistic.over_batch else 1), (problem.H if statistic.over_heads else 1)


def call_of(problem: Problem, lse: Any, statistic: Statistic, arrays: list[Any], architecture: str) -> Call:
    """The call that fills a statistic's arrays."""
    sizes = chosen("observe", problem, architecture)
    heads, blocks = problem.B * problem.H, -(-problem.n // sizes.rows)
    more: dict[str, Any] = {"blocks": blocks}
    if isinstance(statistic, Received):
        blocks = -(-problem.m // sizes.keys)
        more = {"blocks": blocks, "MAXIMA": statistic.how == "max"}
        return _call(problem, lse, received, heads * blocks, arrays, sizes, more, of_keys=True)
    if isinstance(statistic, TopK):
        lanes = 1 << max(min(statistic.k, problem.m) - 1, 1).bit_length()
        rows = min(sizes.rows, max(LISTED // lanes, 16))
        blocks = -(-problem.n // rows)
        more = {"blocks": blocks, "where": arrays[1], "k": statistic.k, "K": lanes}
        return _call(problem, lse, top_k, heads * blocks, arrays, replace(sizes, rows=rows), more)
    if isinstance(statistic, Pooled):
        more, programs = _grid(problem, statistic, sizes)
        return _call(problem, lse, pooled, heads * programs, arrays, sizes, more)
    batches, together = added(problem, statistic)
    what = {Weights: "weights", Scores: "scores", Mean: "sums"}[type(statistic)]
    more |= {"batches": batches, "heads": together, "WHAT": what}
    return _call(problem, lse, written, heads // (batches * together) * blocks, arrays, sizes, more)


def _grid(problem: Problem, statistic: Pooled, sizes: Configuration) -> tuple[dict[str, Any], int]:
    """What the kernel of cells is told of them, and programs to a head."""
    (i0, i1), (j0, j1) = statistic.rectangle(problem.n, problem.m)
    rows, columns = statistic.down, statistic.across
    down = min(max(sizes.rows * rows // (i1 - i0), 1), CELLS[0], rows)  # those that one block of queries holds
    across = min(columns, CELLS[1])
    more = {"i_start": i0, "i_stop": i1, "j_start": j0, "j_stop": j1, "rows": rows, "columns": columns}
    more |= {"down": down, "across": across, "MAXIMA": statistic.how == "max"}
    more |= {"DOWN": 1 << (down - 1).bit_length(), "ACROSS": 1 << (across - 1).bit_length()}
    return more, -(-rows // down) * -(-columns // across)


def _call(
    problem: Problem,
    lse: Any,
    kernel: Any,
    programs: int,
    arrays: list[Any],
    sizes: Configuration,
    more: dict[str, Any],
    of_keys: bool = False,
) -> Call:
    given = Operands(problem, sizes)
    arguments = {name: value for name, value in given.common().items() if name != "value"} | {
        "lse": lse,
        "output": arrays[0],
        "schedule": schedule(problem, sizes.rows, sizes.keys, of_keys),
    }
    return Call(kernel, programs, arguments | more, sizes, given.sources)
