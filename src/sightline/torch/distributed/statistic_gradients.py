"""The gradients of per-query statistics, for the part of the keys that a rank computes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ...problem import Problem
from ...statistics import Entropy, StatisticGradients
from ...statistics.base import BackwardContext

__all__ = ["part_gradients", "sink_weights"]


def part_gradients(
    part: Problem,
    first_key: int,
    lse: Tensor,
    sinks: Tensor | None,
    d_seen: Sequence[Tensor | None],
    arrays: Sequence[Sequence[Tensor]],
) -> StatisticGradients:
    """Return the terms that the gradients of `part.see` add to the gradients of a part.

    Parameters
    ----------
    part : some queries on the keys from `first_key` on
    lse, arrays : lse and the arrays of each statistic, of these queries on all keys
    sinks : the sinks of the whole problem
    d_seen : the gradient of each statistic's first array; None for 0
    """
    terms = []
    for statistic, gradient, own in zip(part.see, d_seen, arrays, strict=True):
        if gradient is not None:
            local = [*own[:1], *[where - first_key for where in own[1:]]]
            context = BackwardContext(part, lse, lambda: iter(()), _refuse, gradient.double(), arrays=local)
            one = statistic.backward(context)
            if isinstance(statistic, Entropy) and sinks is not None:  # the keys' weights sum to 1 − sink
                one = replace(one, weights_sum=one.weights_sum + gradient * sink_weights(sinks, lse))
            terms.append(one)
    sums: dict[str, Any] = {}
    for name in ("weights", "scores", "lse", "weights_sum"):
        found = [getattr(one, name) for one in terms if getattr(one, name) is not None]
        sums[name] = reduce(add, found) if found else None
    return StatisticGradients(**sums)


def sink_weights(sinks: Any, lse: Tensor) -> Tensor:
    """Return the weight exp(sink − lse) of each head's sink, (..., H, n)."""
    return torch.exp(sinks.double()[:, None] - lse)


def _refuse(statistic: Any) -> Any:
    raise AssertionError(f"{statistic} has saved arrays")
