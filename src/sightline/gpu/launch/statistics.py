"""Which kernel answers a statistic: riding along with the forward pass, a second pass, or the plain tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...problem import Problem
from ...statistics import Entropy, Mass, MaxScore, Mean, Statistic, collect, inner
from ...statistics.matrix import Matrix
from ...streaming import Work, observe
from .arguments import Operands
from .weights_pass import answered

__all__ = ["Riders", "see"]


class Riders:
    """The statistics that ride along with the forward kernel, and the arrays it puts them into; see `riding`."""

    def __init__(self, problem: Problem) -> None:
        asked = [inner(statistic) for statistic in problem.see]
        masses = {id(statistic): statistic for statistic in asked if isinstance(statistic, Mass)}
        shape, kind = (*problem.lead, problem.H, problem.n), getattr(torch, problem.accumulator)

        def room(wanted: bool = True, dtype: Any = kind) -> Any:
            return problem.query.new_empty(shape, dtype=dtype) if wanted else None

        largest = any(isinstance(statistic, MaxScore) for statistic in asked)
        self.largest = [room(largest), room(largest, torch.int64)]
        self.entropy = room(any(isinstance(statistic, Entropy) for statistic in asked))
        self.sums = {place: room() for place in masses}
        self.names = [f"sum_{k}" for k in range(len(masses))]
        self.formulas = [(name, mass.mask, True) for name, mass in zip(self.names, masses.values(), strict=True)]

    def __bool__(self) -> bool:
        return self.largest[0] is not None or self.entropy is not None or bool(self.sums)

    def arguments(self, given: Operands, without: dict[str, Any]) -> dict[str, Any]:
        """The forward kernel's arguments out of those `without` them; `given` has their formulas among its others."""
        calls = [f"{name}(s, b, h, i, j, n, m, tables)" for name in self.names]
        return without | {
            "seen": (*self.largest, self.entropy, tuple(self.sums.values())),
            "seams": without["seams"]._replace(sums_at=given.together(self.names, calls, "sums_at")),
            "form": replace(without["form"], largest=self.largest[0] is not None, entropy=self.entropy is not None),
        }

    def answer(self, statistic: Statistic) -> list[Any] | None:
        """The arrays of a statistic that rides along."""
        if isinstance(statistic, MaxScore):
            return self.largest
        if isinstance(statistic, Entropy):
            return [self.entropy]
        return [self.sums[id(statistic)]] if isinstance(statistic, Mass) else None


def see(problem: Problem, lse: Any, riders: Riders, architecture: str) -> tuple[Any, ...]:
    """Every statistic of `problem.see`; by `streaming` those that no kernel answers."""
    found: dict[int, Any] = {}
    if 0 in problem.extent:
        return observe(Work(problem), lse)
    for place, statistic in enumerate(problem.see):
        if not statistic.reads:  # made of the normaliser alone
            (found[place],) = collect(problem.asking(statistic), lse, lambda: iter(()))
            continue
        arrays = _arrays(problem, lse, statistic, riders, architecture)
        if arrays is not None:
            found[place] = statistic.joined(arrays)
    rest = [place for place in range(len(problem.see)) if place not in found]
    if rest:
        answers = observe(Work(problem.asking(*(problem.see[place] for place in rest))), lse)
        found |= dict(zip(rest, answers, strict=True))
    return tuple(found[place] for place in range(len(problem.see)))


def _arrays(problem: Problem, lse: Any, statistic: Statistic, riders: Riders, architecture: str) -> list[Any] | None:
    """A statistic's arrays by the kernels, averaged where it is a mean; None where none has it."""
    if isinstance(statistic, Mean) and isinstance(statistic.of, Matrix):
        return answered(problem, lse, statistic, architecture)  # of which all heads' would not be held
    own = inner(statistic)
    arrays = riders.answer(own)
    if arrays is None:
        arrays = answered(problem, lse, own, architecture)
    if arrays is None or not isinstance(statistic, Mean):
        return arrays
    return [statistic.averaged(array, problem) for array in arrays]
