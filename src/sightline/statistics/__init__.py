"""Statistics of the weights: what `see=[...]` asks for.

P are the normalised weights before dropout, S the final masked scores. A statistic is one small class: a kernel hands
it weights tile by tile, and what it keeps is its own affair. A new one is a class and a line in `STATISTICS`.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Sequence

from ..formula.expression import Expression
from .base import Back, Pass, Slopes, StatisticBase, Tile, arrays_of, collect, slopes, width_of
from .matrix import LARGEST, Pooled, Scores, Weights, pooled, scores, weights
from .per_key import Received, received
from .per_query import Entropy, Largest, Lse, Mass, MaxScore, Top, TopK, entropy, lse, mass, max_score, top_k
from .selection import Mean, Part, Statistic, apart, inner, restricted
from .weighted_sums import Applied, applied

__all__ = [
    "LARGEST",
    "STATISTICS",
    "Applied",
    "Back",
    "Entropy",
    "Largest",
    "Lse",
    "Mass",
    "MaxScore",
    "Mean",
    "Part",
    "Pass",
    "Pooled",
    "Received",
    "Scores",
    "Slopes",
    "Statistic",
    "StatisticBase",
    "Tile",
    "Top",
    "TopK",
    "Weights",
    "apart",
    "applied",
    "arrays_of",
    "collect",
    "entropy",
    "from_words",
    "inner",
    "lse",
    "mass",
    "max_score",
    "pooled",
    "received",
    "restricted",
    "scores",
    "slopes",
    "top_k",
    "weights",
    "width_of",
]

STATISTICS: dict[str, type[Statistic]] = {
    kind.name: kind for kind in (Lse, MaxScore, Entropy, TopK, Mass, Received, Pooled, Weights, Scores)
}
"""Those a kernel is asked for, by name; `Mean` may stand around one, parts and products are problems of their own."""


def from_words(words: Sequence[str], formula: Callable[[str], Expression]) -> Statistic:
    """The statistic whose `words` these are; `formula` reads a formula's text."""
    name, *rest = words
    if name == Mean.name:
        return Mean(rest[0] == "True", rest[1] == "True", from_words(rest[2:], formula))
    if name == Mass.name:
        return Mass(formula(rest[0]))
    return STATISTICS[name](*[literal_eval(word) for word in rest])
