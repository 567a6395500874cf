"""Statistics of attention weights, which `see=[...]` requests, and their recordings. Their base is in `statistic`."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Sequence

from ..formula.expression import Expression
from .contexts import KeyPart, StatisticGradients, Tile, accumulate_statistics, arrays_of, statistic_gradients, weigh
from .library import entropy, mass, max, max_score, min, pooled, received, scores, sum, weighted_sum, weights
from .per_query import Lse, TopK, lse, top_k
from .reduction import Reduction
from .statistic import (
    Mean,
    OverLayers,
    Selection,
    Statistic,
    average_results,
    places_in,
    solve_selections_separately,
    spread_gradients,
)

__all__ = [
    "OVERVIEW",
    "STATISTICS",
    "KeyPart",
    "Mean",
    "OverLayers",
    "Reduction",
    "Selection",
    "Statistic",
    "StatisticGradients",
    "Tile",
    "TopK",
    "accumulate_statistics",
    "arrays_of",
    "average_results",
    "deserialize",
    "entropy",
    "lse",
    "mass",
    "max",
    "max_score",
    "min",
    "places_in",
    "pooled",
    "received",
    "scores",
    "solve_selections_separately",
    "spread_gradients",
    "statistic_gradients",
    "sum",
    "top_k",
    "weigh",
    "weighted_sum",
    "weights",
]

STATISTICS: dict[str, type[Statistic]] = {
    "lse": Lse,
    "top_k": TopK,
    **dict.fromkeys(("sum", "max", "min", "mass", "entropy", "max_score"), Reduction),
    **dict.fromkeys(("received", "pooled", "weights", "scores"), Reduction),
}
"""The statistics by name. A call also computes a `Mean` of one, a watch `OverLayers`; others need a separate call."""

OVERVIEW: tuple[Statistic, ...] = (pooled(64, 64), top_k(8), entropy(), received())
"""The statistics that the explorer page shows and that `watch` records by default. Their results take O(n) memory.

For each head they are the weights P as a picture of at most 64 × 64 cells (P itself for up to 64 queries and keys), the
8 keys with the largest weights of each query, the entropy of each query, and the sum of the weights on each key.
"""


def deserialize(tokens: Sequence[str], formula: Callable[[str], Expression]) -> Statistic:
    """Return the statistic that `serialize` turned into these tokens; `formula` parses the text of a formula."""
    name, *rest = tokens
    if name == Mean.name:
        over_heads, over_batch, factors, sums_batch = map(literal_eval, rest[:4])
        return Mean(deserialize(rest[4:], formula), over_heads, over_batch, factors, sums_batch)
    kind = STATISTICS[name]
    if kind is Reduction:
        *others, text = rest
        how, axes, cells, within, hidden, limit = map(literal_eval, others)
        return Reduction(formula(text), how, axes, cells, within, name, hidden, limit)
    return kind(*[literal_eval(word) for word in rest])
