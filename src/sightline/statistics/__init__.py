"""The statistics of attention weights that `see=[...]` requests. Their base class is in the module `base`."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Sequence

from ..formula.expression import Expression
from .base import (
    KeyPart,
    StatisticBase,
    StatisticGradients,
    Tile,
    accumulate_statistics,
    arrays_of,
    statistic_gradients,
    weigh,
)
from .head_factors import average_over, multiply_heads
from .matrix import Pooled, Scores, Weights, pooled, scores, weights
from .per_key import Received, received
from .per_query import Entropy, Lse, MaxScore, TopK, entropy, lse, max_score, top_k
from .selection import Mean, OverLayers, Statistic, places_in, solve_selections_separately, spread_mean, unwrap_mean
from .sums import Mass, Sum, mass, sum, weighted_sum

__all__ = [
    "OVERVIEW",
    "STATISTICS",
    "Entropy",
    "KeyPart",
    "Lse",
    "Mass",
    "MaxScore",
    "Mean",
    "OverLayers",
    "Pooled",
    "Received",
    "Scores",
    "Statistic",
    "StatisticBase",
    "StatisticGradients",
    "Sum",
    "Tile",
    "TopK",
    "Weights",
    "accumulate_statistics",
    "arrays_of",
    "average_over",
    "deserialize",
    "entropy",
    "lse",
    "mass",
    "max_score",
    "multiply_heads",
    "places_in",
    "pooled",
    "received",
    "scores",
    "solve_selections_separately",
    "spread_mean",
    "statistic_gradients",
    "sum",
    "top_k",
    "unwrap_mean",
    "weigh",
    "weighted_sum",
    "weights",
]

STATISTICS: dict[str, type[Statistic]] = {
    kind.name: kind for kind in (Lse, MaxScore, Entropy, TopK, Sum, Mass, Received, Pooled, Weights, Scores)
}
"""The statistics that kernels compute, by name. Every other statistic is computed by a separate call of attention."""

OVERVIEW: tuple[Statistic, ...] = (pooled(64, 64), top_k(8), entropy(), received())
"""The statistics that the explorer page shows and that `watch` records by default. Their results take O(n) memory.

For each head they are the weights P as a picture of at most 64 × 64 cells (P itself for up to 64 queries and keys), the
8 keys with the largest weights of each query, the entropy of each query, and the sum of the weights on each key.
"""


def deserialize(tokens: Sequence[str], formula: Callable[[str], Expression]) -> Statistic:
    """Return the statistic that `serialize` turned into these tokens; `formula` parses the text of a formula."""
    name, *rest = tokens
    if name == Mean.name:
        over_heads, over_batch, factors = map(literal_eval, rest[:3])
        return Mean(over_heads, over_batch, deserialize(rest[3:], formula), factors)
    if name in (Sum.name, Mass.name):
        return STATISTICS[name](formula(rest[0]))  # type: ignore[call-arg]
    return STATISTICS[name](*[literal_eval(word) for word in rest])
