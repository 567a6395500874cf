"""Which kernel answers a statistic: riding along with the forward pass, a second pass, or the plain tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import convert
from ...problem import Problem
from ...statistics import Entropy, Mass, MaxScore, Mean, Pooled, Received, Statistic, TopK, Weights, collect, inner
from ...streaming import Streaming
from ..runtime.processor import Processor
from . import weights_pass

__all__ = ["Riders", "see"]


class Riders:
    """The statistics that ride along with the forward kernel, and the arrays it puts them into; see `Riding`."""

    def __init__(self, problem: Problem) -> None:
        asked = [inner(statistic) for statistic in problem.see]
        masses = [statistic for statistic in asked if isinstance(statistic, Mass)]
        shape = (*problem.lead, problem.H, problem.n)
        self.formulas = tuple(statistic.mask for statistic in masses)
        self.largest: list[Any] = []
        self.entropy: list[Any] = []
        if any(isinstance(statistic, MaxScore) for statistic in asked):
            self.largest = [np.empty(shape, problem.accumulator), np.empty(shape, np.int64)]
        if any(isinstance(statistic, Entropy) for statistic in asked):
            self.entropy = [np.empty(shape, problem.accumulator)]
        self.masses = {id(statistic): np.empty(shape, problem.accumulator) for statistic in masses}
        self.roles = ("largest",) * bool(self.largest) + ("entropy",) * bool(self.entropy) + ("sum",) * len(masses)

    @property
    def arrays(self) -> list[Any]:
        """In the order of the kernel's words."""
        return [*self.largest, *self.entropy, *self.masses.values()]

    def answer(self, statistic: Statistic) -> list[Any] | None:
        """The arrays of a statistic that rides along."""
        if isinstance(statistic, MaxScore):
            return self.largest
        if isinstance(statistic, Entropy):
            return self.entropy
        return [self.masses[id(statistic)]] if isinstance(statistic, Mass) else None


def see(problem: Problem, lse: Any, riders: Riders, threads: int | None, processor: Processor) -> tuple[Any, ...]:
    """Every statistic of `problem.see`; by `streaming` those that no kernel answers.

    NaN and ∞ among the scores show in lse, and are sorted out by `streaming` too.
    """
    tainted = weights_pass.tainted(problem, lse)
    found: dict[int, Any] = {}
    for place, statistic in enumerate(problem.see):
        if not statistic.reads:  # made of the normaliser alone
            (found[place],) = collect(problem.asking(statistic), lse, lambda: iter(()))
        elif not tainted:
            arrays = _arrays(problem, lse, statistic, riders, threads, processor)
            if arrays is not None:
                found[place] = statistic.joined(arrays)
    rest = [place for place in range(len(problem.see)) if place not in found]
    if rest:
        answers = Streaming().run(problem.asking(*(problem.see[place] for place in rest))).seen
        found |= dict(zip(rest, answers, strict=True))
    return tuple(found[place] for place in range(len(problem.see)))


def _arrays(
    problem: Problem, lse: Any, statistic: Statistic, riders: Riders, threads: int | None, processor: Processor
) -> list[Any] | None:
    """A statistic's arrays by the generated kernels, averaged where it is a mean; None where none has it."""
    own = inner(statistic)
    riding = riders.answer(own)
    if riding is not None:
        arrays: list[Any] | None = [convert(array, problem.query) for array in riding]
    elif isinstance(own, Weights) and own is not statistic:
        return None  # all heads' weights would be held for their mean
    else:
        arrays = _second_pass(problem, lse, own, threads, processor)
    if arrays is None or own is statistic:
        return arrays
    assert isinstance(statistic, Mean)
    return [statistic.averaged(array, problem) for array in arrays]


def _second_pass(
    problem: Problem, lse: Any, statistic: Statistic, threads: int | None, processor: Processor
) -> list[Any] | None:
    options: dict[str, Any] = {"threads": threads, "processor": processor}
    if isinstance(statistic, TopK):
        both = weights_pass.top_k(problem, lse, statistic.k, **options)
        return None if both is None else list(both)
    if isinstance(statistic, Received):
        found = weights_pass.received(problem, lse, statistic.how, **options)
    elif isinstance(statistic, Pooled):
        grid = statistic.down, statistic.across, statistic.how, statistic.within
        found = weights_pass.pooled(problem, lse, *grid, **options)
    elif isinstance(statistic, Weights):
        found = weights_pass.weights(problem, lse, **options)
    else:
        return None
    return None if found is None else [found]
