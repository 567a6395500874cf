"""The forward and decoding kernels' calls and their answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...kernel import Result
from ...problem import Problem
from ..kernels.decode import decode, merge_splits
from ..kernels.forward import forward
from ..tuning.configurations import Configuration
from ..tuning.selection import architecture_of, select
from .arguments import Operands
from .launcher import KernelLaunch
from .schedule import make_schedule
from .statistics import FusedStatistics, compute_statistics

__all__ = ["attention_launches", "decode_launches", "forward_launches", "nan_safe_launch", "run", "uses_decode"]

NAN_SAFE_ROWS = 32  # queries, or keys, at a time in the pass that only marked blocks take
NAN_SAFE_PROGRAMS = 1024  # that look for such blocks
MAX_DECODE_QUERIES = 16  # queries that decoding takes at a time, of each head
MIN_KEYS_PER_SPLIT = 256  # keys worth a part of their own
TARGET_PROGRAMS = 512  # wanted of decoding; the problem alone decides, so that every device gives the same bits


def run(problem: Problem, architecture: str | None) -> Result:
    """Forward, statistics beside it or after it."""
    rows = (*problem.batch_shape, problem.H, problem.n)
    output = problem.query.new_empty((*rows, problem.d_v))
    lse = problem.query.new_empty(rows, dtype=torch.float64)
    fused_statistics = FusedStatistics(problem)
    architecture = architecture or architecture_of(problem.query.device)
    if lse.numel():
        if problem.m == 0 or problem.d_v == 0:
            return _without_kernel(problem)
        with torch.cuda.device_of(problem.query):  # type: ignore[no-untyped-call]
            for call in attention_launches(problem, output, lse, architecture, fused_statistics):
                call.launch()
    return Result(output, lse, compute_statistics(problem, lse, fused_statistics, architecture) if problem.see else ())


def attention_launches(
    problem: Problem, output: Any, lse: Any, architecture: str, fused_statistics: FusedStatistics | None = None
) -> Iterator[KernelLaunch]:
    """The calls that fill output, lse and the riders' arrays, in order."""
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
    """Blocks of queries, and those once more whose output has NaN that a weight of 0 may keep out.

    In tiles of these sizes, or of those that are chosen for the problem.
    """
    sizes = sizes or select("forward", problem, architecture)
    on_hopper, sizes = sizes.specialised, replace(sizes, specialised=False)
    fused_statistics = FusedStatistics(problem.with_statistics()) if fused_statistics is None else fused_statistics
    operands = Operands(problem, sizes, fused_statistics.formulas)
    blocks = -(-problem.n // sizes.rows)
    items = problem.B * problem.H * blocks
    arguments = operands.common_arguments() | {
        "output": output,
        "lse": lse,
        "nonfinite_flags": operands.allocate_flags(items),
        "blocks": blocks,
        "items": items,
        "schedule": make_schedule(problem, sizes.rows, sizes.keys),
        "sinks": operands.sinks(),
        "dropout_state": operands.dropout_state(),
        "dropout_scale": operands.dropout_scale(),
        "seen": None,
        "SUBBLOCKS": 0,
    }
    call = KernelLaunch(forward, items, fused_statistics.arguments(operands, arguments), sizes, operands.sources)
    if on_hopper:
        from ..hopper.launch import specialise

        call = specialise(call)
    yield call
    yield nan_safe_launch(forward, arguments, operands, sizes, replace(sizes, rows=min(sizes.rows, NAN_SAFE_ROWS)))


def nan_safe_launch(
    kernel: Any, arguments: dict[str, Any], operands: Operands, sizes: Configuration, small_sizes: Configuration
) -> KernelLaunch:
    """The call of a kernel for blocks of `sizes` that it marked, in parts of `small_sizes` rows or keys: see `forward`."""
    small_sizes = replace(small_sizes, warps=min(sizes.warps, 4), stages=1)
    num_splits = sizes.rows // small_sizes.rows * (sizes.keys // small_sizes.keys)
    more = {"meta": operands.meta(small_sizes), "SUBBLOCKS": num_splits}
    return KernelLaunch(
        kernel, min(arguments["items"], NAN_SAFE_PROGRAMS), arguments | more, small_sizes, operands.sources
    )


def uses_decode(problem: Problem) -> bool:
    """Whether few queries look at many keys, and at the same ones for all heads."""
    shared = problem.mask is None or "h" not in problem.mask.free_symbols
    return problem.n <= MAX_DECODE_QUERIES and problem.m >= 2 * MIN_KEYS_PER_SPLIT and shared


def decode_launches(problem: Problem, output: Any, lse: Any, architecture: str) -> Iterator[KernelLaunch]:
    """Parts of the keys, and what joins them."""
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
    arguments = operands.common_arguments() | {
        "split_output": problem.query.new_empty((*shape, problem.d_v), dtype=accumulator),
        "split_lse": problem.query.new_empty(shape, dtype=torch.float64),
        "num_splits": num_splits,
        "schedule": make_schedule(problem, MAX_DECODE_QUERIES, sizes.keys),
        "dropout_state": operands.dropout_state(),
    }
    yield KernelLaunch(decode, num_blocks * num_splits, arguments | {"split_size": split_size}, sizes, operands.sources)
    small_sizes = replace(sizes, rows=MAX_DECODE_QUERIES, stages=1)
    rows = replace(small_sizes, rows=1 << (problem.n - 1).bit_length())
    merge_arguments = {
        "output": output,
        "lse": lse,
        "sinks": operands.sinks(),
        "dropout_scale": operands.dropout_scale(),
    }
    merge_arguments |= {"meta": operands.meta(rows), "nan_safe_meta": operands.meta(small_sizes)}
    yield KernelLaunch(merge_splits, problem.B * problem.H, arguments | merge_arguments, small_sizes, operands.sources)


def _without_kernel(problem: Problem) -> Result:
    """No keys, or values of no width: nothing to multiply."""
    from ...streaming import Streaming

    return Streaming().run(problem)
