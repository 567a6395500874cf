"""Statistics as one has them in torch: of the whole matrix of weights, which is made and held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..statistics import Pooled
from .contenders import Contender, Ready, tensor, through_autograd
from .races import Inputs, Race

__all__ = ["OF_SCORES", "OF_WEIGHTS", "Dense", "uneven", "ways"]

Way = Callable[[Any, Any], Any]  # of scores and weights (B, H, n, m)


def _mass(statistic: Any, race: Race, device: str) -> Way:
    counted = tensor(np.array(statistic.mask.array(race.n, race.m)), race.dtype, device)
    return lambda s, p: (p * counted).sum(-1)


def _entropy(statistic: Any, race: Race, device: str) -> Way:
    import torch

    return lambda s, p: torch.special.entr(p).sum(-1)


def _received(statistic: Any, race: Race, device: str) -> Way:
    return {"sum": lambda s, p: p.sum(-2), "mean": lambda s, p: p.mean(-2), "max": lambda s, p: p.amax(-2)}[
        statistic.how
    ]


def _pooled(statistic: Any, race: Race, device: str) -> Way:
    def cells(p: Any) -> Any:
        return p.unflatten(-1, (statistic.across, -1)).unflatten(-3, (statistic.down, -1))

    if statistic.how == "max":
        return lambda s, p: cells(p).amax((-3, -1))
    return lambda s, p: cells(p).mean((-3, -1))


OF_WEIGHTS: dict[str, Callable[[Any, Race, str], Way]] = {
    "entropy": _entropy,
    "mass": _mass,
    "top_k": lambda statistic, race, device: lambda s, p: tuple(p.topk(statistic.k)),
    "received": _received,
    "pooled": _pooled,
}
OF_SCORES: dict[str, Callable[[Any, Race, str], Way]] = {
    "lse": lambda statistic, race, device: lambda s, p: s.logsumexp(-1),
    "max_score": lambda statistic, race, device: lambda s, p: tuple(s.max(-1)),
}


def ways(race: Race, device: str = "cpu") -> Sequence[Way]:
    """How each of the race's statistics is had."""
    known = OF_WEIGHTS | OF_SCORES
    return [known[statistic.name](statistic, race, device) for statistic in race.see]


def uneven(race: Race) -> bool:
    """Whether some statistic has cells of several sizes, which no reshaping gives."""
    grids = [statistic for statistic in race.see if isinstance(statistic, Pooled)]
    return any(grid.within is not None or race.n % grid.down or race.m % grid.across for grid in grids)


class Dense(Contender):
    """softmax(Q Kᵀ / √d_k) V in torch, every matrix made, and statistics of the weights."""

    name, label, packages, pip = "dense", "torch, dense", ("torch",), "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def refuses(self, race: Race) -> str | None:
        """All but forward passes without score, dropout and bias, key heads for all, cells of one size."""
        if race.passes != "forward" or race.score or race.dropout or race.bias or race.G != race.H:
            return "not set up"
        return "cells of one size alone" if uneven(race) else None

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        import torch

        found, scale, hidden = ways(race, self.device), race.d_k**-0.5, None
        if race.formula is not None:
            hidden = ~tensor(np.array(race.formula.array(race.n, race.m)), "bool", self.device)

        def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
            scores = (query * scale) @ key.mT
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            weights = scores.softmax(-1)
            output = weights @ value
            return (output, [way(scores, weights) for way in found]) if found else output

        return through_autograd(race, inputs, forward, threads, self.device)
