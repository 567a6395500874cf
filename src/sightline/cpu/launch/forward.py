"""The calls of the forward kernel and of the tangent kernel, its forward-mode derivative, and their results."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...arrays.operations import convert, detach, empty, has_heads_in_rows, to_numpy
from ...call.gradient_parts import is_lse_too_large, sink_weights
from ...call.kernel import Result, Tangents
from ...call.problem import Problem
from ...formula.derivative import score_tangent
from ...formula.expression import Expression
from ...reference.streaming import Streaming
from ...statistics import Statistic
from ...statistics.dispatch import dispatch_statistics
from ..codegen.abi import TANGENT_CALL_FIELDS
from ..kernels.forward import Forward
from ..kernels.kernel_spec import max_blocks_per_item
from ..kernels.tangent import SCORE, Tangent
from ..runtime.processor import Processor
from ..runtime.thread_count import available_processors
from . import weights_pass
from .arguments import (
    CpuFusedStatistics,
    KernelArguments,
    operand_fields,
    output_strides,
    prepare,
    with_contiguous_rows,
    write_kernel,
)
from .bound_call import BoundCall, CallFamily
from .decode import can_decode, decode
from .forward_entry import keep_forward

MIN_ITEMS_PER_PROCESSOR = 2  # so that threads end at about the same time


def run(problem: Problem, processor: Processor) -> Result:
    """Return output, lse and statistics of a problem from the generated kernels."""
    output, lse = make_results(problem)
    fused_statistics = CpuFusedStatistics(problem)
    bound_call: BoundCall | None = None
    if lse.size:
        uses_decode = can_decode(problem, processor, fused_statistics.roles)
        bound_call = decode(problem, output, lse, processor, fused_statistics) if uses_decode else None
        if bound_call is None:
            call = forward(problem, output, lse, processor, fused_statistics)
            bound_call = None if uses_decode else call  # so the next call tries to decode again
    lse = convert(lse, problem.query)
    seen, passes = compute_statistics(problem, lse, fused_statistics, processor) if problem.see else ((), ())
    is_repeatable = bound_call is not None and all(x.is_cacheable for x in (bound_call, *[one.call for one in passes]))
    return Result(
        output, lse, seen, partial(keep_forward, bound_call, passes) if bound_call and is_repeatable else None
    )


def make_results(problem: Problem) -> tuple[Any, Any]:
    """Return the arrays that the kernel of a problem writes output and lse to."""
    rows, in_rows = problem.query.shape[:-1], has_heads_in_rows(problem.query)
    return empty((*rows, problem.d_v), problem.dtype, problem.query, in_rows), np.empty(rows)


def source(problem: Problem, processor: Processor) -> str:
    """Return the LLVM text of the forward kernel."""
    return str(write_kernel(_prepare(problem, processor, CpuFusedStatistics(problem)), Forward))


def _prepare(problem: Problem, processor: Processor, fused: CpuFusedStatistics) -> KernelArguments:
    return prepare("forward", problem, processor, fused.factors, fused.unread, roles=fused.roles)


def forward(problem: Problem, output: Any, lse: Any, processor: Processor, fused: CpuFusedStatistics) -> BoundCall:
    """Fill output, lse and the arrays of the statistics `fused`, and return the call for repetition."""
    arguments = _prepare(problem, processor, fused)
    call = _bind(arguments)
    call.run_first(arguments, {"output": output, "lse": lse}, fused.arrays)
    call.family = None if arguments.spec.extra_formulas else CallFamily.of(arguments, _bind)
    return call


def _bind(arguments: KernelArguments) -> BoundCall:
    problem = arguments.problem
    key_heads = problem.B * problem.G
    blocks = problem.group * -(-problem.n // arguments.query_block)  # of all heads of a key head
    share = key_heads * blocks // (MIN_ITEMS_PER_PROCESSOR * available_processors())
    most = max_blocks_per_item(arguments.spec, arguments.query_block, np.dtype(problem.accumulator).itemsize)
    per_item = max(min(most, share), 1)
    values = {"items": key_heads * -(-blocks // per_item), "blocks_per_item": per_item, **output_strides(problem)}
    return BoundCall(arguments, Forward, values)


def compute_statistics(
    problem: Problem, lse: Any, fused_statistics: CpuFusedStatistics, processor: Processor
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return two tuples: the result of each statistic of `problem.see`, and the bound weights passes.

    A weights pass is a second kernel, for statistics that the forward kernel does not compute. The kernel `Streaming`
    computes the statistics that no CPU kernel computes, and all that need weights if an lse is NaN, +∞ or too large.
    """
    is_imprecise = is_lse_too_large(lse, problem.accumulator, or_nonfinite=True)
    passes: list[Any] = []
    arrays: dict[int, list[Any]] = {}
    for bound in [] if is_imprecise else weights_pass.bind_passes(problem, processor):
        computed = weights_pass.run_first(problem, lse, bound)
        if computed is not None:
            passes.append(bound[1])
            arrays |= {id(problem.see[k]): own for k, own in zip(bound[1].indices, computed, strict=True)}

    def compute_arrays(statistic: Statistic) -> list[Any] | None:
        fused_arrays = None if is_imprecise else fused_statistics.arrays_of(statistic)
        if fused_arrays is not None:
            return [convert(array, problem.query) for array in fused_arrays]
        return arrays.get(id(statistic))

    seen = dispatch_statistics(problem, lse, compute_arrays, lambda rest: Streaming().run(rest).seen)
    return seen, tuple(passes)


def tangent(
    problem: Problem, tangents: Tangents, saved: tuple[Any, Any], processor: Processor
) -> tuple[Any, Any] | None:
    """Return the tangents of output and lse. `saved` is (output, lse) of the forward pass.

    Returns None if a tangent is NaN or ∞, or if an lse exceeds `MAX_LSE`. The kernel `Streaming` must then
    compute the tangents.
    """
    output, lse = saved
    if is_lse_too_large(lse, problem.accumulator):
        return None
    by_name = {name: getattr(tangents, name) for name in ("query", "key", "value")}
    operands = {name: with_contiguous_rows(detach(x)) for name, x in by_name.items() if x is not None}
    formula = score_tangent(problem.score, dict(zip(problem.tables, tangents.tables, strict=False)))
    formulas: tuple[Expression, ...] = () if formula is None else (formula,)
    roles = (*operands, *([SCORE] if formulas else []))
    arguments = prepare("tangent", problem, processor, formulas, roles=roles)
    output = with_contiguous_rows(detach(output))
    values: dict[str, Any] = operand_fields("output", output, arguments.keep_alive)
    for name, array in operands.items():
        values |= operand_fields(f"{name}_tangent", array, arguments.keep_alive)
    values["items"] = problem.B * problem.H * -(-problem.n // arguments.query_block)
    call = BoundTangent(arguments, Tangent, values)
    rows = (*problem.batch_shape, problem.H, problem.n)
    output_tangent, lse_tangent = empty((*rows, problem.d_v), problem.dtype, problem.query), np.empty(rows)
    arrays = {
        "output": output,
        **{f"{name}_tangent": array for name, array in operands.items()},
        "lse": np.ascontiguousarray(to_numpy(lse), np.float64),
        "sink_tangent": sink_tangent(problem, tangents.sinks, lse),
        "output_tangent": output_tangent,
        "lse_tangent": lse_tangent,
    }
    if call.run_first(arguments, arrays) is None:
        return None
    return output_tangent, convert(lse_tangent, problem.query)


class BoundTangent(BoundCall):
    """A call of the tangent kernel; see `BoundCall`."""

    call_fields = TANGENT_CALL_FIELDS
    min_parallel_multiplications = 1 << 20


def sink_tangent(problem: Problem, tangent: Any, lse: Any) -> Any:
    """Return the tangent of lse from the sinks, exp(sink − lse) · tangent for every query, in float64; None for 0."""
    if tangent is None or problem.sinks is None:
        return None
    sinks, direction, lse = (np.asarray(to_numpy(x), np.float64) for x in (problem.sinks, tangent, lse))
    return np.ascontiguousarray(sink_weights(sinks, lse) * direction[:, None])
