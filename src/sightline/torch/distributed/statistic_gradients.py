"""The gradients of per-query statistics, for the part of the keys that a rank computes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...problem.problem import Problem
from ...statistics import Entropy, MaxScore, StatisticGradients, statistic_gradients


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
    wide = [None if gradient is None else gradient.double() for gradient in d_seen]
    local = [[*own[:1], *[where - first_key for where in own[1:]]] for own in arrays]
    found = statistic_gradients(part, lse, lambda: iter(()), wide, saved=local)
    if sinks is not None and any(isinstance(one, MaxScore) for one in part.see):
        # beside a large sink, the weight of the largest score may underflow
        beside = statistic_gradients(replace(part, sinks=sinks), lse, lambda: iter(()), wide, saved=local)
        found = replace(found, includes_zero_weights=beside.includes_zero_weights)
    for statistic, gradient in zip(part.see, wide, strict=True):
        if isinstance(statistic, Entropy) and gradient is not None and sinks is not None:
            # the weights of the keys and of the sink sum to 1, and `weights_sum` counts the keys alone
            found = replace(found, weights_sum=found.weights_sum + gradient * sink_weights(sinks, lse))
    return found


def sink_weights(sinks: Tensor, lse: Tensor) -> Tensor:
    """Return the weight exp(sink − lse) of each head's sink, (..., H, n)."""
    return torch.exp(sinks.double()[:, None] - lse)
