"""The launches of the forward and decoding kernels, and their result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from ...call.kernel import Result
from ...call.problem import Problem
from ...reference.streaming import Streaming
from ..codegen.formula_functions import collect_tables
from ..configurations import Configuration, architecture_of, select
from ..kernels.decode import decode, merge_splits
from ..kernels.forward import forward
from .arguments import GpuOperands, make_schedule
from .bound_launches import RecordedCall
from .launches import KernelLaunch, run_launches
from .weights_pass import GpuFusedStatistics, compute_statistics

NAN_SAFE_ROWS = 32  # most queries (or keys) of a tile in the NaN-safe launch, which recomputes flagged blocks only
NAN_SAFE_WARPS = 4  # most warps of a NaN-safe launch
SMALL_KEYS = 32  # most keys of a tile in a launch for a small problem: with 64, kernels of d 128 spill registers
NAN_SAFE_PROGRAMS = 1024  # most programs of the NaN-safe launch; each program checks the flags of several blocks
MAX_DECODE_QUERIES = 16  # most queries of a head that the decoding kernel serves
MIN_KEYS_PER_SPLIT = 256  # fewest keys of a split, apart from rounding to tiles
# The approximate limit of the programs of a decoding launch with several splits. The limit does not depend on the
# device, so every device gives the same bits.
TARGET_PROGRAMS = 512


def run(problem: Problem, architecture: str | None) -> Result:
    """Return the output, lse and statistics of a problem."""
    rows = (*problem.batch_shape, problem.H, problem.n)
    output = problem.query.new_empty((*rows, problem.d_v))
    lse = problem.query.new_empty(rows, dtype=torch.float64)
    fused_statistics = GpuFusedStatistics(problem)
    architecture = architecture or architecture_of(problem.query.device)
    recorded = None
    if lse.numel():
        if problem.m == 0 or problem.d_v == 0:  # the kernels would have nothing to multiply
            return Streaming().run(problem)
        launches = attention_launches(problem, output, lse, architecture, fused_statistics)
        recorded = record_forward(problem, fused_statistics, launches, output, lse)
    seen = compute_statistics(problem, lse, fused_statistics, architecture) if problem.see else ()
    return Result(output, lse, seen, None if recorded is None else recorded.keep)


def record_forward(
    problem: Problem, fused_statistics: GpuFusedStatistics, launches: Iterable[KernelLaunch], output: Any, lse: Any
) -> RecordedCall | None:
    """Run the launches. Return their record; None if other kernels must compute some statistics.

    The results of the record are output, lse, and the arrays of every statistic except lse.
    """
    done = run_launches(launches, problem.query)
    results = [output, lse]
    for statistic in problem.see:
        arrays = fused_statistics.arrays_of(statistic) if statistic.num_arrays else []
        if arrays is None:
            return None
        results += arrays
    return RecordedCall(problem, done, collect_tables(problem, fused_statistics.formulas), results)


def attention_launches(
    problem: Problem, output: Any, lse: Any, architecture: str, fused_statistics: GpuFusedStatistics | None = None
) -> Iterator[KernelLaunch]:
    """Return the launches that fill output, lse and the arrays of fused statistics, in the order in which they run."""
    if not fused_statistics and uses_decode(problem):
        return decode_launches(problem, output, lse, architecture)
    return forward_launches(problem, output, lse, architecture, fused_statistics)


def forward_launches(
    problem: Problem, output: Any, lse: Any, architecture: str, fused_statistics: GpuFusedStatistics | None = None
) -> Iterator[KernelLaunch]:
    """Yield the forward launch over all blocks of queries, and the NaN-safe launch unless the problem is small.

    The NaN-safe launch recomputes every block whose output has NaN, so that NaN in a row of V whose weight is 0 does
    not reach the output. For a small problem the forward launch itself is NaN-safe.
    """
    sizes = select("forward", problem, architecture)
    sizes = small_sizes(sizes) if problem.is_small_on_gpu else sizes
    operands = GpuOperands(problem, sizes, fused_statistics.formulas if fused_statistics else ())
    blocks = -(-problem.n // sizes.rows)
    items = problem.B * problem.H * blocks
    schedule = make_schedule(problem, sizes.rows, sizes.keys)
    arguments = operands.common_arguments(output=output, lse=lse, schedule=schedule, sinks=operands.sinks())
    arguments = operands.block_arguments(arguments, blocks, items, not problem.is_small_on_gpu)
    first_arguments = fused_statistics.arguments(operands, arguments) if fused_statistics else arguments
    yield KernelLaunch(forward, items, first_arguments, sizes)
    if not problem.is_small_on_gpu:
        yield nan_safe_launch(forward, arguments, operands, sizes, "rows")


def small_sizes(sizes: Configuration, warps: int = NAN_SAFE_WARPS) -> Configuration:
    """Return `sizes` with the smaller tiles of a launch that computes every block NaN-safe."""
    rows, keys = min(sizes.rows, NAN_SAFE_ROWS), min(sizes.keys, SMALL_KEYS)
    return replace(sizes, rows=rows, keys=keys, warps=warps, stages=1)


def nan_safe_launch(
    kernel: Any, arguments: dict[str, Any], operands: GpuOperands, sizes: Configuration, axis: Literal["rows", "keys"]
) -> KernelLaunch:
    """Return the NaN-safe launch of a kernel, which recomputes each flagged block in subblocks of fewer rows or keys.

    A flagged block has the tile sizes `sizes`.
    """
    length = getattr(sizes, axis)
    part = min(length, NAN_SAFE_ROWS)
    sizes = replace(sizes, **{axis: part}, warps=min(sizes.warps, NAN_SAFE_WARPS), stages=1)
    even = operands.problem.m % sizes.keys == 0
    meta = replace(arguments["meta"], rows=sizes.rows, keys=sizes.keys, even=even, subblocks=length // part)
    programs = min(arguments["items"], NAN_SAFE_PROGRAMS)
    return KernelLaunch(kernel, programs, arguments | {"meta": meta}, sizes)


def uses_decode(problem: Problem) -> bool:
    """Return True if a problem has few queries, many keys, and no mask or a mask that is the same for all heads."""
    is_shared = problem.mask is None or "h" not in problem.mask.free_symbols
    return problem.n <= MAX_DECODE_QUERIES and problem.m >= 2 * MIN_KEYS_PER_SPLIT and is_shared


def decode_launches(problem: Problem, output: Any, lse: Any, architecture: str) -> Iterator[KernelLaunch]:
    """Yield the launch that computes every split of the keys, and the launch that merges the splits."""
    sizes = select("decode", problem, architecture)
    operands = GpuOperands(problem, sizes)
    rows_per_group = problem.group * problem.n
    num_blocks = problem.B * problem.G * -(-rows_per_group // sizes.rows)
    tiles = -(-problem.m // sizes.keys)
    max_splits = min(-(-TARGET_PROGRAMS // num_blocks), -(-problem.m // MIN_KEYS_PER_SPLIT))
    split_size = -(-tiles // max_splits)
    num_splits = -(-tiles // split_size)
    shape = (num_splits, problem.B, problem.H, problem.n)
    accumulator = getattr(torch, problem.accumulator)
    split_output = problem.query.new_empty((*shape, problem.d_v), dtype=accumulator)
    splits = {"split_output": split_output, "split_lse": problem.query.new_empty(shape, dtype=torch.float64)}
    splits["schedule"] = make_schedule(problem, MAX_DECODE_QUERIES, sizes.keys)
    common = operands.common_arguments(**splits, output=output, lse=lse, sinks=operands.sinks())
    common["num_splits"] = num_splits
    arguments = common | {"split_size": split_size}
    yield KernelLaunch(decode, num_blocks * num_splits, arguments, sizes)
    sizes = replace(sizes, rows=MAX_DECODE_QUERIES, stages=1)
    meta = operands.meta(sizes, merged_rows=1 << (problem.n - 1).bit_length())
    arguments = common | {"meta": meta, "dropout_scale": operands.dropout_scale()}
    yield KernelLaunch(merge_splits, problem.B * problem.H, arguments, sizes)
