"""The choice of a kernel, with its reasons.

A kernel says why it cannot serve a problem (`refuses`), each reason with its cure; the cheapest of the others is taken.
`refuses` is the one source of truth on what a kernel can do: the planner, `explain`, `sightline info` and the tests
read it.
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
    """Why a kernel cannot serve a problem, and what would let it."""

    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.cure})"


@dataclass(frozen=True)
class Result:
    """What a kernel answers: output (..., H, n, d_v), lse (..., H, n) float64, and one entry for each asked statistic.

    Weights made from lse take on its error, so it is kept wide. `bound_call` is the kernel's call made ready for other
    arrays of the same layout, where it has such: a `cpu.bound_call.BoundCall`.
    """

    output: Any
    lse: Any
    seen: tuple[Any, ...] = ()
    bound_call: Any = None


@dataclass(frozen=True)
class Gradients:
    """Gradients of query, key, value, sinks, and of the tables in `Problem.tables`' order (None for whole numbers)."""

    query: Any
    key: Any
    value: Any
    tables: tuple[Any, ...]
    sinks: Any


class Kernel(ABC):
    """One way to compute attention: a file of its own and a line in `attention.KERNELS`."""

    name: str
    description: str

    @abstractmethod
    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Every reason this kernel cannot serve the problem; none means that it can."""

    @abstractmethod
    def cost(self, problem: Problem) -> float:
        """Relative cost among the kernels that can serve the problem; the smallest is taken."""

    def cost_reason(self, problem: Problem) -> str:
        """What the cost rests on, where that is worth saying."""
        return ""

    @abstractmethod
    def run(self, problem: Problem, threads: int | None = None) -> Result:
        """The answer."""

    def sources(self, problem: Problem) -> dict[str, str]:
        """The text of what is generated for the problem, by name; empty where nothing is."""
        return {}

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
        """Gradients of Σ d_output ∘ output + Σ d_lse ∘ lse with respect to what `Gradients` names.

        Parameters
        ----------
        d_output, d_lse : the shapes of output and lse; d_lse None for 0
        saved : (output, lse) of `run`
        wanted : places in `Problem.tables` of those whose gradients are asked for
        statistic_gradients : what statistics add to the gradients of weights and scores

        Returns None where the kernel has none for this problem; `streaming.backward` has them for every problem.
        """
        return None


@dataclass(frozen=True)
class Plan:
    """The kernel taken and why each other was not."""

    kernel: Kernel
    refusals: dict[str, tuple[Refusal, ...]]
    forced: bool
    kernels: Sequence[Kernel] = ()  # among which it was chosen


def choose(kernels: Sequence[Kernel], problem: Problem, forced: str | None = None) -> Plan:
    """The cheapest kernel that does not refuse, or the one asked for by name.

    Raises
    ------
    ParameterError
        `forced` is no kernel's name.
    KernelRefusedError
        The kernel asked for refuses; the message holds every reason with its cure.
    """
    refusals = {kernel.name: tuple(kernel.refuses(problem)) for kernel in kernels}
    if forced is None:
        candidates = [kernel for kernel in kernels if not refusals[kernel.name]]
        return Plan(min(candidates, key=lambda kernel: kernel.cost(problem)), refusals, False, kernels)
    for kernel in kernels:
        if kernel.name == forced:
            if refusals[forced]:
                raise KernelRefusedError(
                    f"kernel={forced!r} cannot serve this problem: " + "; ".join(r.reason for r in refusals[forced]),
                    "problems it serves; sightline.explain(...) names kernels that serve this one",
                    "; ".join(r.cure for r in refusals[forced]) + "; or leave kernel=None",
                )
            return Plan(kernel, refusals, True, kernels)
    names = ", ".join(repr(kernel.name) for kernel in kernels)
    raise ParameterError(f"kernel={forced!r}", f"one of {names}, or None", "leave kernel=None to have one chosen")
