"""The list `KERNELS`, and the forward and backward passes of a validated problem by the kernel that is chosen.

`call.kernel.choose` chooses the kernel. `sightline.torch.dispatch` adds the kernel "fused", which is torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..call.kernel import GivenGradients, Gradients, Kernel, Plan, Result, Tangents, choose
from ..call.problem import Problem
from ..cpu import Cpu
from ..gpu import Triton
from ..reference import streaming
from ..reference.definition import Reference
from ..reference.gathered_keys import Gather
from ..reference.streaming import Streaming
from ..statistics import Statistic, arrays_of, average_results, solve_selections_separately, statistic_gradients

_BY_TILES: tuple[Kernel, ...] = (Cpu(), Triton(), Streaming())
KERNELS: tuple[Kernel, ...] = (*_BY_TILES, Gather(_BY_TILES), Reference())


def make_plan(problem: Problem) -> Plan:
    """Choose a kernel of `KERNELS` for a problem."""
    return choose(KERNELS, problem, problem.kernel)


def solve(problem: Problem) -> Result:
    """Choose a kernel and run it. The arrays of the result have a head axis even if the caller's arrays have none."""
    return solve_selections_separately(problem, lambda one: make_plan(one).kernel.run(one))


def differentiate(problem: Problem, plan: Plan, given: GivenGradients) -> Gradients:
    """Return the gradients of a result, by the backward pass of the plan's kernel or else by the streaming kernel's.

    `plan` is that of the forward pass. Streaming computes the gradients if the kernel refuses the backward pass
    (`Plan.backward_refusals`), if a gradient is NaN or ∞, or if an |lse| is above `MAX_LSE`.
    """

    def compute(statistic: Statistic) -> Any:
        return plan.kernel.run(problem.with_statistics(statistic)).seen[0]

    with np.errstate(all="ignore"):  # hidden scores may overflow
        terms = statistic_gradients(problem, given.saved[1], given.d_seen, given.arrays, compute)
        return streaming.backward_by(plan.kernel, problem, given._replace(statistics=terms))


def push_forward(problem: Problem, plan: Plan, tangents: Tangents, saved: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the tangents of output and lse for tangents of the inputs, by the plan's kernel or else by streaming.

    `saved` is (output, lse) of the forward pass by `plan`.
    """
    result = plan.kernel.tangent(problem, tangents, saved)
    return streaming.tangent(problem, tangents, saved) if result is None else result


def to_caller(problem: Problem, result: Result, see: Sequence[Statistic] | None) -> tuple[Any, tuple[Any, ...]]:
    """Return (output, seen) of the requested statistics, without a head axis if the caller's arrays have none."""

    def squeeze_statistic(statistic: Statistic, answer: Any) -> Any:
        axis = statistic.head_axis(len(problem.batch_shape))
        if axis is None:
            return answer
        squeezed = [problem.squeeze_heads(array, array.ndim - axis - 1) for array in arrays_of(answer)]
        return statistic.build_result(squeezed)

    output, seen = problem.squeeze_heads(result.output, 2), result.seen
    if problem.heads_squeezed:
        seen = tuple([squeeze_statistic(*one) for one in zip(problem.see, seen, strict=True)])
    return output, average_results(see or (), seen, len(problem.batch_shape), not problem.heads_squeezed)
