"""The list `KERNELS`, and the forward and backward passes of a validated problem by the kernel that is chosen.

`call.kernel.choose` chooses the kernel. `sightline.torch.dispatch` adds the kernel "fused", which is torch's own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..call.gradient_parts import is_lse_too_large
from ..call.kernel import GivenGradients, Gradients, Kernel, Plan, Result, Tangents, choose
from ..call.problem import Problem
from ..cpu import Cpu
from ..gpu import Triton
from ..reference import streaming, streaming_tangent
from ..reference.definition import Reference
from ..reference.gathered_keys import Gather
from ..reference.streaming import Streaming
from ..statistics import Statistic, arrays_of, solve_selections_separately, statistic_gradients

_BY_TILES: tuple[Kernel, ...] = (Cpu(), Triton(), Streaming())
KERNELS: tuple[Kernel, ...] = (*_BY_TILES, Gather(_BY_TILES), Reference())


def make_plan(problem: Problem, kernel: str | None = None) -> Plan:
    """Choose a kernel of `KERNELS` for a problem. `kernel` is the name that the caller gave; None if none was given."""
    return choose(KERNELS, problem, kernel)


def solve(problem: Problem, kernel: str | None = None, threads: int | None = None) -> Result:
    """Choose a kernel and run it. The arrays of the result have a head axis even if the caller's arrays have none."""
    return solve_selections_separately(problem, lambda one: make_plan(one, kernel).kernel.run(one, threads))


def differentiate(
    problem: Problem,
    plan: Plan,
    d_output: Any,
    d_lse: Any,
    d_seen: tuple[Any, ...],
    saved: tuple[Any, Any],
    wanted_tables: Collection[int],
    threads: int | None = None,
    saved_arrays: Sequence[Sequence[Any]] = (),
) -> Gradients:
    """Return the gradients of a result, by the backward pass of the plan's kernel or else by the streaming kernel's.

    Streaming computes the gradients if the kernel refuses the backward pass (`Plan.backward_refusals`), if a gradient
    is NaN or ∞, or if an |lse| is above `MAX_LSE`. In the last case streaming repeats the forward pass. In the
    other cases it uses the saved output and lse.

    Parameters
    ----------
    plan : the plan of the forward pass
    d_output, d_lse, d_seen : gradients of output, of lse and of each statistic's first array; None if a gradient is 0
    saved : (output, lse) of the forward pass
    wanted_tables : indices in `Problem.tables` of the tables whose gradients are requested
    saved_arrays : each statistic's arrays from the forward pass, () for arrays that were not saved
    """
    with np.errstate(all="ignore"):  # hidden scores may overflow
        added = statistic_gradients(
            problem,
            saved[1],
            d_seen,
            saved_arrays,
            lambda statistic: plan.kernel.run(problem.with_statistics(statistic), threads).seen[0],
        )
        gradients = plan.kernel.backward(problem, GivenGradients(d_output, d_lse, saved, wanted_tables, added), threads)
        if gradients is not None:
            return gradients
        if is_lse_too_large(saved[1], problem.accumulator):
            return streaming.backward(problem, d_output, d_lse, d_seen)
        return streaming.backward(problem, d_output, d_lse, (), saved, added)


def push_forward(
    problem: Problem, plan: Plan, tangents: Tangents, saved: tuple[Any, Any], threads: int | None = None
) -> tuple[Any, Any]:
    """Return the tangents of output and lse for tangents of the inputs, by the plan's kernel or else by streaming.

    `saved` is (output, lse) of the forward pass by `plan`.
    """
    found = plan.kernel.tangent(problem, tangents, saved, threads)
    return streaming_tangent.tangent(problem, tangents, saved) if found is None else found


def to_caller_layout(problem: Problem, result: Result) -> tuple[Any, tuple[Any, ...]]:
    """Return (output, seen) in the layout of the caller's arrays: without a head axis if those arrays have none."""

    def squeeze_statistic(statistic: Statistic, answer: Any) -> Any:
        axis = statistic.head_axis(len(problem.batch_shape))
        if axis is None:
            return answer
        return statistic.build_result(
            [problem.squeeze_heads(array, array.ndim - axis - 1) for array in arrays_of(answer)]
        )

    if not problem.heads_squeezed:
        return result.output, tuple(result.seen)
    seen = zip(problem.see, result.seen, strict=True)
    return problem.squeeze_heads(result.output, 2), tuple([squeeze_statistic(*one) for one in seen])
