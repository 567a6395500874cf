"""The launches of the forward and decoding kernels, and their result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...kernel import Result
from ...problem import Problem
from ...streaming import Streaming
from ..kernels.decode import decode, merge_splits
from ..kernels.forward import forward
from ..tuning.default_configurations import Configuration
from ..tuning.selection import architecture_of, select
from .arguments import Operands
from .launcher import KernelLaunch
from .schedule import make_schedule
from .statistics import FusedStatistics, compute_statistics

__all__ = ["attention_launches", "decode_launches", "forward_launches", "nan_safe_launch", "run", "uses_decode"]

NAN_SAFE_ROWS = 32  # most queries (or keys) of a tile in the NaN-safe launch, which recomputes flagged blocks only
NAN_SAFE_PROGRAMS = 1024  # most programs of the NaN-safe launch; each program checks the flags of several blocks
MAX_DECODE_QUERIES = 16  # most queries of a head that the decoding kernel serves
MIN_KEYS_PER_SPLIT = 256  # fewest keys of a split, apart from rounding to tiles
# About the most programs of a decoding launch with several splits. The number does not depend on the device, so every
# device gives the same bits.
TARGET_PROGRAMS = 512


def run(problem: Problem, architecture: str | None) -> Result:
    """Return the output, lse and statistics of a problem."""
    rows = (*problem.batch_shape, problem.H, problem.n)
    output = problem.query.new_empty((*rows, problem.d_v))
    lse = problem.query.new_empty(rows, dtype=torch.float64)
    fused_statistics = FusedStatistics(problem)
    architecture = architecture or architecture_of(problem.query.device)
    if lse.numel():
        if problem.m == 0 or problem.d_v == 0:  # the kernels would have nothing to multiply
            return Streaming().run(problem)
        with torch.cuda.device_of(problem.query):  # type: ignore[no-untyped-call]
            for launch in attention_launches(problem, output, lse, architecture, fused_statistics):
                launch.launch()
    return Result(output, lse, compute_statistics(problem, lse, fused_statistics, architecture) if problem.see else ())


def attention_launches(
    problem: Problem, output: Any, lse: Any, architecture: str, fused_statistics: FusedStatistics | None = None
) -> Iterator[KernelLaunch]:
    """Return the launches that fill output, lse and the arrays of fused statistics, in the order in which they run."""
    if not fused_statistics and uses_decode(problem):
        return decode_launches(problem, output, lse, architecture)
    return forward_launches(problem, output, lse, architecture, fused_statistics)


def forward_launches(
    problem: Problem,
    output: Any,
    lse: Any,
    architecture: str,
    fused_statistics: FusedStatistics | None = None,
    sizes: Configuration | None = None,
) -> Iterator[KernelLaunch]:
    """Yield the forward launch over all blocks of queries, and the NaN-safe launch.

    The NaN-safe launch recomputes every block whose output has NaN, so that NaN in a row of V whose weight is 0 does
    not reach the output. The tile sizes are `sizes`, or by default those that `select` returns for the problem.
    """
    sizes = sizes or select("forward", problem, architecture)
    on_hopper, sizes = sizes.specialised, replace(sizes, specialised=False)
    operands = Operands(problem, sizes, fused_statistics.formulas if fused_statistics else ())
    blocks = -(-problem.n // sizes.rows)
    items = problem.B * problem.H * blocks
    schedule = make_schedule(problem, sizes.rows, sizes.keys)
    arguments = operands.common_arguments() | operands.dropout_arguments() | operands.block_arguments(blocks, items)
    arguments |= {"output": output, "lse": lse, "schedule": schedule, "sinks": operands.sinks()}
    arguments |= {"seen": (None, None, None, ())}
    first_arguments = fused_statistics.arguments(operands, arguments) if fused_statistics else arguments
    launch = KernelLaunch(forward, items, first_arguments, sizes, operands.sources)
    if on_hopper:
        from ..hopper.launch import specialise

        launch = specialise(launch)
    yield launch
    yield nan_safe_launch(forward, arguments, operands, sizes, replace(sizes, rows=min(sizes.rows, NAN_SAFE_ROWS)))


def nan_safe_launch(
    kernel: Any, arguments: dict[str, Any], operands: Operands, sizes: Configuration, small_sizes: Configuration
) -> KernelLaunch:
    """Return the NaN-safe launch of a kernel, which recomputes each flagged block in smaller subblocks.

    A flagged block has the tile sizes `sizes`, and a subblock the tile sizes `small_sizes`.
    """
    small_sizes = replace(small_sizes, warps=min(sizes.warps, 4), stages=1)
    subblocks = sizes.rows // small_sizes.rows * (sizes.keys // small_sizes.keys)
    arguments = arguments | {"meta": operands.meta(small_sizes), "SUBBLOCKS": subblocks}
    programs = min(arguments["items"], NAN_SAFE_PROGRAMS)
    return KernelLaunch(kernel, programs, arguments, small_sizes, operands.sources)


def uses_decode(problem: Problem) -> bool:
    """Return True if a problem has few queries, many keys, and no mask or a mask that is the same for all heads."""
    is_shared = problem.mask is None or "h" not in problem.mask.free_symbols
    return problem.n <= MAX_DECODE_QUERIES and problem.m >= 2 * MIN_KEYS_PER_SPLIT and is_shared


def decode_launches(problem: Problem, output: Any, lse: Any, architecture: str) -> Iterator[KernelLaunch]:
    """Yield the launch that computes every split of the keys, and the launch that merges the splits."""
    sizes = select("decode", problem, architecture)
    operands = Operands(problem, sizes)
    rows_per_group = problem.group * problem.n
    num_blocks = problem.B * problem.G * -(-rows_per_group // sizes.rows)
    tiles = -(-problem.m // sizes.keys)
    max_splits = min(-(-TARGET_PROGRAMS // num_blocks), -(-problem.m // MIN_KEYS_PER_SPLIT))
    split_size = -(-tiles // max_splits)
    num_splits = -(-tiles // split_size)
    shape = (num_splits, problem.B, problem.H, problem.n)
    accumulator = getattr(torch, problem.accumulator)
    dropout = operands.dropout_arguments()
    common = operands.common_arguments() | {
        "split_output": problem.query.new_empty((*shape, problem.d_v), dtype=accumulator),
        "split_lse": problem.query.new_empty(shape, dtype=torch.float64),
        "num_splits": num_splits,
        "schedule": make_schedule(problem, MAX_DECODE_QUERIES, sizes.keys),
    }
    arguments = common | {"split_size": split_size, "dropout_state": dropout["dropout_state"]}
    yield KernelLaunch(decode, num_blocks * num_splits, arguments, sizes, operands.sources)
    sizes = replace(sizes, rows=MAX_DECODE_QUERIES, stages=1)
    padded_rows = 1 << (problem.n - 1).bit_length()
    metas = {"meta": operands.meta(replace(sizes, rows=padded_rows)), "nan_safe_meta": operands.meta(sizes)}
    arguments = common | dropout | metas | {"output": output, "lse": lse, "sinks": operands.sinks()}
    yield KernelLaunch(merge_splits, problem.B * problem.H, arguments, sizes, operands.sources)
