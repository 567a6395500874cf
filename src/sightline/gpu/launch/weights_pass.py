"""The computation of statistics: in the forward kernel, by a second pass over the tiles, or by `reference.streaming`.

The second pass (weights pass) recomputes the weights of each tile from the saved lse. Only the problem and the tile
sizes decide its number of programs, so every device gives the same bits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...call.problem import Problem
from ...formula.expression import SYMBOLS
from ...reference.streaming import TileOps
from ...reference.streaming import compute_statistics as compute_by_streaming
from ...statistics import Statistic
from ...statistics.contexts import ForwardContext
from ...statistics.dispatch import FusedStatistics, dispatch_statistics, is_in_weights_pass
from ..configurations import Configuration, architecture_of, select
from ..kernels.weights_pass import dense_weights, received
from ..kernels.weights_pooled import pooled
from ..kernels.weights_top_k import top_k
from .arguments import GpuOperands, make_schedule
from .launches import KernelLaunch, run_launches

MAX_TOP_K = 128  # largest k of `top_k`, whose kernel keeps the k largest weights of each query of a block in registers
MAX_TOP_K_ENTRIES = 2048  # most entries in all lists of largest weights of a block of queries
MAX_PROGRAM_CELLS = (16, 64)  # most (rows, columns) of cells that one program of `pooled` computes


class GpuFusedStatistics(FusedStatistics):
    """The statistics that the forward kernel computes, and their output arrays; see `kernels.fused_statistics`."""

    def __init__(self, problem: Problem) -> None:
        query = problem.query
        super().__init__(problem, lambda shape, dtype: query.new_empty(shape, dtype=getattr(torch, dtype)))
        self.formulas = [(f"sum_{k}", factor, True) for k, factor in enumerate(self.factors)]

    def __bool__(self) -> bool:
        return bool(self.arrays)

    def arguments(self, operands: GpuOperands, base_arguments: dict[str, Any]) -> dict[str, Any]:
        """Return `base_arguments` with the output arrays, formulas and compile-time constants of the statistics.

        The extra formulas of `operands` must include `self.formulas`.
        """
        names = [name for name, _, _ in self.formulas]
        calls = [f"{name}(s, b, h, i, j, n, m, tables)" for name in names]
        summands_at = operands.combine_functions(names, calls, "summands_at")
        max_score, entropy = (self.arrays[self.places_of(name)] for name in ("max_score", "entropy"))
        flags, sums = {"max_score": bool(max_score), "entropy": bool(entropy)}, self.arrays[len(max_score + entropy) :]
        seen = *(max_score or (None, None)), *(entropy or (None,)), tuple(sums)
        return base_arguments | {
            "arrays": base_arguments["arrays"]._replace(seen=seen),
            "formulas": base_arguments["formulas"]._replace(summands_at=summands_at),
            "meta": replace(base_arguments["meta"], **flags),
        }


def compute_statistics(
    problem: Problem, lse: Any, fused_statistics: GpuFusedStatistics, architecture: str
) -> tuple[Any, ...]:
    """Return the result of every statistic of `problem.see`.

    The forward kernel has computed some of them (`fused_statistics`), and a weights pass computes others. The module
    `streaming` computes the rest.
    """

    def compute_arrays(statistic: Statistic) -> list[Any] | None:
        if 0 in problem.extent:
            return None
        arrays = fused_statistics.arrays_of(statistic)
        return run_weights_pass(problem, lse, statistic, architecture) if arrays is None else arrays

    return dispatch_statistics(problem, lse, compute_arrays, lambda rest: compute_by_streaming(TileOps(rest), lse))


def can_serve(problem: Problem, statistic: Any, architecture: str | None) -> bool:
    """Return True if a kernel of the second pass computes the statistic. `run_weights_pass` names those without one."""
    of: Any = statistic.unaveraged
    if of.k:
        return bool(min(of.k, problem.m) <= MAX_TOP_K)
    if not is_in_weights_pass(of) or 0 in of.grid(problem.n, problem.m):
        return False
    if statistic.is_mean:
        is_ordered = not (architecture or architecture_of(problem.query.device)).startswith("gfx")
        return is_ordered and statistic.factors is None and not statistic.sums_batch and bool(of.is_plain)
    return bool(of.is_plain or (of.formula is SYMBOLS["s"] and of.hidden == -math.inf and not of.axes))


def run_weights_pass(problem: Problem, lse: Any, statistic: Any, architecture: str) -> list[Any] | None:
    """Return a statistic's arrays, computed by a second pass over the tiles; None if no kernel computes the statistic.

    No kernel computes
    - `top_k` of more than `MAX_TOP_K` keys, whose lists do not fit registers;
    - the mean of scores, since a sum over heads would lose the −∞ of hidden pairs, and weighted means of weights;
    - on AMD the mean of weights: a program adds one head's weights to the sums of the previous heads in memory, and on
      AMD Triton's barrier does not make a thread's writes to memory visible to the other threads of the program.
    """
    if not can_serve(problem, statistic, architecture):
        return None
    arrays = allocate_outputs(problem, statistic)
    run_launches([statistic_launch(problem, lse, statistic, arrays, architecture)], problem.query)
    if statistic.is_mean:  # the mean of weights, since no kernel computes another mean
        arrays = [arrays[0] / statistic.divisor(problem)]
    else:
        arrays = statistic.finish(arrays, ForwardContext(problem, lse, (*problem.batch_shape, problem.H)))
    return [array.to(getattr(torch, name)) for array, name in zip(arrays, statistic.dtypes(problem), strict=True)]


def allocate_outputs(problem: Problem, statistic: Statistic) -> list[Any]:
    """Return the output arrays of a kernel. Entries that the kernel does not write already hold their result."""
    shapes, dtypes = statistic.shapes(problem, (*problem.batch_shape, problem.H), problem.n), statistic.dtypes(problem)
    if statistic.is_mean:  # so that the sum over batches and heads is rounded once, after its division
        dtypes = (problem.accumulator,)
    if statistic.axes == "ij":
        dtypes = ("float64",)
    return [
        problem.query.new_full(shape, fill, dtype=getattr(torch, dtype))
        for shape, fill, dtype in zip(shapes, statistic.fill_values, dtypes, strict=True)
    ]


def statistic_launch(problem: Problem, lse: Any, statistic: Any, arrays: list[Any], architecture: str) -> KernelLaunch:
    """Return the launch of the kernel that fills a statistic's arrays."""
    sizes = select("weights_pass", problem, architecture)
    kernel, heads, blocks, output_kind = dense_weights, problem.B * problem.H, -(-problem.n // sizes.rows), ""
    if statistic.axes == "i":
        kernel, blocks = received, -(-problem.m // sizes.keys)
        options, programs = {"blocks": blocks, "USE_MAX": statistic.how == "max"}, heads * blocks
    elif statistic.k:
        padded_k = 1 << max(min(statistic.k, problem.m) - 1, 1).bit_length()
        sizes = replace(sizes, rows=min(sizes.rows, max(MAX_TOP_K_ENTRIES // padded_k, 16)))
        kernel, blocks = top_k, -(-problem.n // sizes.rows)
        options, programs = {"blocks": blocks, "k": statistic.k, "K": padded_k}, heads * blocks
    elif statistic.axes == "ij":
        kernel, (options, programs) = pooled, _grid_arguments(problem, statistic, sizes)
        programs *= heads
    else:
        batches, summed_heads = statistic.summed_axes(problem)
        output_kind = "sums" if statistic.is_mean else "weights" if statistic.is_plain else "scores"
        options = {"blocks": blocks, "batches": batches, "heads": summed_heads}
        programs = heads // (batches * summed_heads) * blocks
    operands = GpuOperands(problem, sizes)
    schedule = make_schedule(problem, sizes.rows, sizes.keys, of_keys=kernel is received)
    arguments = operands.common_arguments(lse=lse, seen=tuple(arrays), schedule=schedule) | options
    arguments["meta"] = operands.meta(output_kind=output_kind)
    return KernelLaunch(kernel, programs, arguments, sizes)


def _grid_arguments(problem: Problem, statistic: Any, sizes: Configuration) -> tuple[dict[str, Any], int]:
    """Return the arguments of `pooled` that describe the grid of cells, and the number of programs of a head."""
    (i0, i1), (j0, j1) = statistic.rectangle(problem.n, problem.m)
    rows, columns = statistic.grid(problem.n, problem.m)
    rows_of_block = max(sizes.rows * rows // (i1 - i0), 1)  # rows of cells in a block of queries
    down, across = min(rows_of_block, MAX_PROGRAM_CELLS[0], rows), min(columns, MAX_PROGRAM_CELLS[1])
    options = {"i_start": i0, "i_stop": i1, "j_start": j0, "j_stop": j1, "rows": rows, "columns": columns}
    options |= {"down": down, "across": across, "USE_MAX": statistic.how == "max"}
    options |= {"DOWN": 1 << (down - 1).bit_length(), "ACROSS": 1 << (across - 1).bit_length()}
    return options, -(-rows // down) * -(-columns // across)
