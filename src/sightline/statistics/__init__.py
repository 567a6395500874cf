"""Statistics of the weights: what `see=[...]` asks for.

P are the normalised weights before dropout, S the final masked scores. A statistic is one small class: a kernel hands
it weights tile by tile, and what it keeps is its own affair. A new one is a class and a line in `STATISTICS`.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Sequence

from ..formula.expression import Expression
from .base import (
    BackwardContext,
    ForwardContext,
    StatisticBase,
    StatisticGradients,
    Tile,
    accumulate_statistics,
    arrays_of,
    itemsize,
    statistic_gradients,
)
from .matrix import MAX_RESULT_BYTES, Pooled, Scores, Weights, pooled, scores, weights
from .per_key import Received, received
from .per_query import Entropy, Largest, Lse, Mass, MaxScore, Top, TopK, entropy, lse, mass, max_score, top_k
from .selection import Mean, Selection, Statistic, restrict, solve_selections_separately, unwrap_mean
from .weighted_sums import WeightedSum, weighted_sum

__all__ = [
    "MAX_RESULT_BYTES",
    "STATISTICS",
    "BackwardContext",
    "Entropy",
    "ForwardContext",
    "Largest",
    "Lse",
    "Mass",
    "MaxScore",
    "Mean",
    "Pooled",
    "Received",
    "Scores",
    "Selection",
    "Statistic",
    "StatisticBase",
    "StatisticGradients",
    "Tile",
    "Top",
    "TopK",
    "WeightedSum",
    "Weights",
    "accumulate_statistics",
    "arrays_of",
    "deserialize",
    "entropy",
    "itemsize",
    "lse",
    "mass",
    "max_score",
    "pooled",
    "received",
    "restrict",
    "scores",
    "solve_selections_separately",
    "statistic_gradients",
    "top_k",
    "unwrap_mean",
    "weighted_sum",
    "weights",
]

STATISTICS: dict[str, type[Statistic]] = {
    kind.name: kind for kind in (Lse, MaxScore, Entropy, TopK, Mass, Received, Pooled, Weights, Scores)
}
"""Those a kernel is asked for, by name; `Mean` may stand around one, parts and products are problems of their own."""


def deserialize(tokens: Sequence[str], formula: Callable[[str], Expression]) -> Statistic:
    """The statistic whose `tokens` these are; `formula` reads a formula's text."""
    name, *rest = tokens
    if name == Mean.name:
        return Mean(rest[0] == "True", rest[1] == "True", deserialize(rest[2:], formula))
    if name == Mass.name:
        return Mass(formula(rest[0]))
    return STATISTICS[name](*[literal_eval(word) for word in rest])
