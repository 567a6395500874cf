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
from .statistics import Statistic, apart, arrays_of, slopes
from .streaming import Streaming, backward

__all__ = ["KERNELS", "differentiate", "shaped", "solve"]

KERNELS: tuple[Kernel, ...] = (Cpu(), Triton(), Streaming(), Reference())


def solve(problem: Problem, kernel: str | None = None, threads: int | None = None) -> Result:
    """The problem's result by the chosen kernel, every array with its leading and head axes."""
    return apart(problem, lambda one: choose(KERNELS, one, kernel).kernel.run(one, threads))


def differentiate(
    problem: Problem,
    d_output: Any,
    d_lse: Any,
    d_seen: tuple[Any, ...],
    saved: tuple[Any, Any],
    *,
    wanted: Collection[int],
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
    taken = choose(KERNELS, problem, kernel).kernel
    seen = slopes(
        problem,
        saved[1],
        lambda: streaming.tiles(streaming.Work(problem), saved[1]),
        d_seen,
        lambda statistic: taken.run(problem.asking(statistic), threads).seen[0],
    )
    found = taken.gradients(problem, d_output, d_lse, saved, wanted, threads, seen)
    return backward(problem, d_output, d_lse, d_seen) if found is None else found


def shaped(problem: Problem, result: Result) -> tuple[Any, tuple[Any, ...]]:
    """(output, seen) in the layout of the caller's arrays."""

    def without_heads(statistic: Statistic, answer: Any) -> Any:
        axis = statistic.head_axis(len(problem.lead))
        if axis is None:
            return answer
        return statistic.joined([problem.headed(array, array.ndim - axis - 1) for array in arrays_of(answer)])

    if not problem.headless:
        return result.output, tuple(result.seen)
    seen = zip(problem.see, result.seen, strict=True)
    return problem.headed(result.output, 2), tuple([without_heads(*one) for one in seen])
