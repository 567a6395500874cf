"""The kernels there are, and a checked problem answered and differentiated by the one chosen among them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from . import streaming
from .cpu import Cpu
from .gpu import Triton
from .kernel import Gradients, Kernel, Result, choose
from .problem import Problem
from .reference import Reference
from .statistics import Statistic, arrays_of, solve_selections_separately, statistic_gradients
from .streaming import Streaming, backward

__all__ = ["KERNELS", "differentiate", "solve", "to_caller_layout"]

KERNELS: tuple[Kernel, ...] = (Cpu(), Triton(), Streaming(), Reference())


def solve(problem: Problem, kernel: str | None = None, threads: int | None = None) -> Result:
    """The problem's result by the chosen kernel, every array with its leading and head axes."""
    return solve_selections_separately(problem, lambda one: choose(KERNELS, one, kernel).kernel.run(one, threads))


def differentiate(
    problem: Problem,
    d_output: Any,
    d_lse: Any,
    d_seen: tuple[Any, ...],
    saved: tuple[Any, Any],
    *,
    wanted_tables: Collection[int],
    kernel: str | None = None,
    threads: int | None = None,
) -> Gradients:
    """Gradients of what `solve` answered: by the kernel that did where it has them, else by `streaming.backward`.

    Parameters
    ----------
    d_output, d_lse, d_seen : gradients of output, lse and each statistic's first array; None for 0
    saved : (output, lse)
    wanted : places in `Problem.tables` of those whose gradients are asked for
    """
    chosen = choose(KERNELS, problem, kernel).kernel
    seen = statistic_gradients(
        problem,
        saved[1],
        lambda: streaming.tiles(streaming.TileOps(problem), saved[1]),
        d_seen,
        lambda statistic: chosen.run(problem.with_statistics(statistic), threads).seen[0],
    )
    gradients = chosen.backward(problem, d_output, d_lse, saved, wanted_tables, threads, seen)
    return backward(problem, d_output, d_lse, d_seen) if gradients is None else gradients


def to_caller_layout(problem: Problem, result: Result) -> tuple[Any, tuple[Any, ...]]:
    """(output, seen) in the layout of the caller's arrays."""

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
