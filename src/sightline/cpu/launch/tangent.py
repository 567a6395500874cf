"""The call of the tangent kernel, which computes forward-mode derivatives of attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.operations import convert, detach, empty, to_numpy
from ...call.gradient_parts import is_lse_too_large, sink_weights
from ...call.kernel import Tangents
from ...call.problem import Problem
from ...formula.derivative import score_tangent
from ...formula.expression import Expression
from ..codegen.abi import TANGENT_CALL_FIELDS
from ..kernels.tangent import SCORE, Tangent
from ..runtime.processor import Processor
from .arguments import operand_fields, prepare, with_contiguous_rows
from .bound_call import BoundCall


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
    given = {name: getattr(tangents, name) for name in ("query", "key", "value")}
    operands = {name: with_contiguous_rows(detach(x)) for name, x in given.items() if x is not None}
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
