"""Kernels, and the choice of a kernel with its reasons.

A kernel yields every reason why it cannot serve a problem (`refuses`, `refuses_backward`), each with its cure. `choose`
takes the cheapest kernel that yields no reason. No other place says what a kernel can do: `choose`, `explain`,
`sightline info` and the tests read these two methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import KernelRefusedError, ParameterError
from .problem import Problem
from .statistics import StatisticGradients

__all__ = ["Gradients", "Kernel", "Plan", "Refusal", "Result", "choose"]


@dataclass(frozen=True)
class Refusal:
    """A reason why a kernel cannot serve a problem, and the cure."""

    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.cure})"


@dataclass(frozen=True)
class Result:
    """The result of a forward pass.

    output : (*batch_shape, H, n, d_v), the problem's dtype
    lse : (*batch_shape, H, n) float64: weights computed from the lse inherit its error
    seen : one entry for each statistic of `problem.see`
    bound_call : a `cpu.launch.bound_call.BoundCall` that repeats the call for other arrays of the same layout, or None
    """

    output: Any
    lse: Any
    seen: tuple[Any, ...] = ()
    bound_call: Any = None


@dataclass(frozen=True)
class Gradients:
    """Gradients of query, key, value and sinks, and one entry for each of `Problem.tables`: None without a gradient."""

    query: Any
    key: Any
    value: Any
    tables: tuple[Any, ...]
    sinks: Any


class Kernel(ABC):
    """One way to compute attention. A new kernel is a subclass in its own file and an entry in `dispatch.KERNELS`."""

    name: str
    description: str

    @abstractmethod
    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Yield every reason why this kernel cannot serve the problem. No reason means that it can."""

    @abstractmethod
    def cost(self, problem: Problem) -> float:
        """Return a cost relative to the other kernels. The cheapest kernel that can serve the problem is taken."""

    def cost_reason(self, problem: Problem) -> str:
        """Return the reason for the cost, or "" if there is nothing to explain."""
        return ""

    @abstractmethod
    def run(self, problem: Problem, threads: int | None = None) -> Result:
        """Compute the output, the lse and the statistics."""

    def sources(self, problem: Problem) -> dict[str, str]:
        """Return the generated code for the problem, by name; {} for a kernel that generates none."""
        return {}

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        """Yield every reason why this kernel has no backward pass for the problem. Streaming then differentiates.

        `wanted_tables` are the indices in `Problem.tables` of the tables whose gradients are requested; None for every
        table of floats.
        """
        yield Refusal(f"{self.name} has no backward pass", "leave kernel=None")

    def backward(
        self,
        problem: Problem,
        d_output: Any,
        d_lse: Any,
        saved: tuple[Any, Any],
        wanted_tables: Collection[int],
        threads: int | None = None,
        statistic_gradients: StatisticGradients | None = None,
    ) -> Gradients | None:
        """Return the gradients of Σ d_output ∘ output + Σ d_lse ∘ lse, or None if the kernel cannot compute them.

        None means that `refuses_backward` yields a reason, or that values decide it: a gradient is NaN or ∞.

        Parameters
        ----------
        d_output, d_lse : gradients of the shapes of output and lse; d_lse is None for 0
        saved : (output, lse) of `run`
        wanted_tables : the indices in `Problem.tables` of the tables whose gradients are requested
        statistic_gradients : what the statistics' gradients add to the gradients of weights, scores and lse
        """
        return None


@dataclass(frozen=True)
class Plan:
    """The kernel of a call, and the reasons why every other kernel was not taken."""

    kernel: Kernel
    refusals: dict[str, tuple[Refusal, ...]]  # of every kernel, by its name
    forced: bool  # the caller named the kernel
    kernels: Sequence[Kernel] = ()  # the kernels that were compared
    backward_refusals: tuple[Refusal, ...] = ()  # if an input requires a gradient: why streaming computes it


def choose(kernels: Sequence[Kernel], problem: Problem, forced: str | None = None) -> Plan:
    """Return the plan: the cheapest kernel that does not refuse, or the kernel named `forced`.

    Raises
    ------
    ParameterError
        `forced` is not the name of a kernel.
    KernelRefusedError
        The kernel named `forced` refuses. The message holds every reason with its cure.
    """
    refusals = {kernel.name: tuple(kernel.refuses(problem)) for kernel in kernels}
    if forced is None:
        candidates = [kernel for kernel in kernels if not refusals[kernel.name]]
        kernel = min(candidates, key=lambda kernel: kernel.cost(problem))
    elif forced not in refusals:
        names = ", ".join(map(repr, refusals))
        raise ParameterError(f"kernel={forced!r}", f"one of {names}, or None", "leave kernel=None to have one chosen")
    elif refusals[forced]:
        raise KernelRefusedError(
            f"kernel={forced!r} cannot serve this problem: " + "; ".join(r.reason for r in refusals[forced]),
            "problems it serves; sightline.explain(...) names kernels that serve this one",
            "; ".join(r.cure for r in refusals[forced]) + "; or leave kernel=None",
        )
    else:
        kernel = next(kernel for kernel in kernels if kernel.name == forced)
    inputs = [problem.query, problem.key, problem.value, problem.sinks, *(table.array for table in problem.tables)]
    needs_gradients = any(getattr(x, "requires_grad", False) for x in inputs)
    return Plan(
        kernel,
        refusals,
        forced is not None,
        kernels,
        tuple(kernel.refuses_backward(problem)) if needs_gradients else (),
    )
