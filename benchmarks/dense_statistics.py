"""Statistics computed with torch from the dense (B, H, n, m) matrix of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sightline.statistics import Pooled

from .cases import TimedCall
from .contenders import Peer, prepare_with_autograd, to_tensor
from .workloads import Inputs, Workload

StatisticFunction = Callable[[Any, Any], Any]  # a function (scores, weights) → statistic; both arrays are (B, H, n, m)


def _entropy(weights: Any) -> Any:
    import torch

    return torch.special.entr(weights).sum(-1)


def _pool(statistic: Pooled, weights: Any) -> Any:
    cells = weights.unflatten(-1, (statistic.across, -1)).unflatten(-3, (statistic.down, -1))
    return cells.amax((-3, -1)) if statistic.how == "max" else cells.mean((-3, -1))


# The arguments of each function are (statistic, scores s, weights p, counted). `counted` is the mask of a `mass` as a
# tensor (n, m) of 0 and 1, and None for other statistics.
SCORE_STATISTICS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "lse": lambda _, s, p, counted: s.logsumexp(-1),
    "max_score": lambda _, s, p, counted: tuple(s.max(-1)),
}
WEIGHT_STATISTICS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "entropy": lambda _, s, p, counted: _entropy(p),
    "mass": lambda _, s, p, counted: (p * counted).sum(-1),
    "top_k": lambda of, s, p, counted: tuple(p.topk(of.k)),
    "received": lambda of, s, p, counted: {"sum": p.sum, "mean": p.mean, "max": p.amax}[of.how](-2),
    "pooled": lambda of, s, p, counted: _pool(of, p),
}


def dense_statistics(workload: Workload, device: str = "cpu") -> Sequence[StatisticFunction]:
    """Return for each of the workload's statistics a function that computes it from dense scores and weights."""

    def prepare(statistic: Any) -> StatisticFunction:
        counted, compute = None, (WEIGHT_STATISTICS | SCORE_STATISTICS)[statistic.name]
        if statistic.name == "mass":
            counted = to_tensor(np.array(statistic.mask.array(workload.n, workload.m)), workload.dtype, device)
        return lambda scores, weights: compute(statistic, scores, weights, counted)

    return [prepare(statistic) for statistic in workload.see]


def has_uneven_cells(workload: Workload) -> bool:
    """Return True if a pooled statistic of the workload has cells of different sizes, or pools only a part (`within`).

    The dense computation forms the cells by a reshape, which needs equal cells that cover the whole matrix of weights.
    """
    grids = [statistic for statistic in workload.see if isinstance(statistic, Pooled)]
    return any(grid.within is not None or workload.n % grid.down or workload.m % grid.across for grid in grids)


class Dense(Peer):
    """A contender: softmax(Q Kᵀ / √d_k) V in torch with dense matrices, and statistics of these matrices."""

    name, label, packages, pip = "dense", "torch, dense", ("torch",), "torch"
    lacks = ("backward pass", "score", "dropout", "bias", "grouped heads")

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def refuses(self, workload: Workload) -> str | None:
        """Return why this contender cannot compute the workload, such as pooled cells of unequal size, or None."""
        return super().refuses(workload) or ("only cells of equal size" if has_uneven_cells(workload) else None)

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        import torch

        statistics, scale, hidden = dense_statistics(workload, self.device), workload.d_k**-0.5, None
        if workload.formula is not None:
            hidden = ~to_tensor(np.array(workload.formula.array(workload.n, workload.m)), "bool", self.device)

        def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
            scores = (query * scale) @ key.mT
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            weights = scores.softmax(-1)
            output = weights @ value
            return (output, [compute(scores, weights) for compute in statistics]) if statistics else output

        return prepare_with_autograd(workload, inputs, forward, threads, self.device)
