"""What a monitor of training keeps of a step: three statistics of each head, and the numbers for a log."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operations import namespace, to_numpy
from ..formula.expression import SYMBOLS
from . import entropy, mass, max_score

__all__ = ["HeadStatistics", "MonitoredStep", "StepSums"]

MONITORED = (max_score(), entropy(), mass(SYMBOLS["j"] == 0))


class HeadStatistics(NamedTuple):
    """Three statistics of the heads of a layer in one step, over all batch entries, queries and calls.

    A query that sees no key is in none of the means. Each field is a float64 array of shape (H,).

    Attributes
    ----------
    max_score : the largest score, max over b, i and j of S_ij; −∞ if no query sees a key
    entropy : the mean of the entropy −Σⱼ P_ij ln P_ij, in nats; 0 if no query sees a key
    first_key : the mean weight on the first key, P_i0; 0 if no query sees a key
    queries : the number of queries that see a key
    """

    max_score: Any
    entropy: Any
    first_key: Any
    queries: Any

    def merge(self, other: HeadStatistics) -> HeadStatistics:
        """Return the statistics over the queries of `self` and of `other` together."""
        queries = self.queries + other.queries
        shares = self.queries / np.maximum(queries, 1), other.queries / np.maximum(queries, 1)
        entropy, first_key = (shares[0] * self[k] + shares[1] * other[k] for k in (1, 2))
        return HeadStatistics(np.maximum(self.max_score, other.max_score), entropy, first_key, queries)


class MonitoredStep(NamedTuple):
    """What a monitor has recorded of one step of training.

    Attributes
    ----------
    number : the number of the step
    layers : dict from the paths of the layers to `HeadStatistics`, in the order in which the layers first ran
    """

    number: int
    layers: dict[str, HeadStatistics]

    @property
    def max_scores(self) -> dict[str, Any]:
        """For each layer, the largest score of each head, of shape (H,): what `sightline.torch.qk_clip` takes."""
        return {layer: heads.max_score for layer, heads in self.layers.items()}

    def merge(self, other: MonitoredStep) -> MonitoredStep:
        """Return the step whose two parts are `self` and `other`."""
        layers = dict(self.layers)
        for layer, heads in other.layers.items():
            layers[layer] = layers[layer].merge(heads) if layer in layers else heads
        return MonitoredStep(other.number, layers)

    def summary(self) -> dict[str, float]:
        """Return a few numbers for a log, by name.

        For each layer: "attention/LAYER/max_score" of the head with the largest score, "…/max_score_head" with the
        number of this head, "…/min_entropy" of the head with the lowest mean entropy, and "…/max_first_key" of the head
        with the largest mean weight on the first key. Names without a layer ("attention/max_score") cover all layers.
        """
        found: dict[str, float] = {}
        for layer, heads in self.layers.items():
            found |= {f"attention/{layer}/{name}": number for name, number in _extremes([heads]).items()}
            found[f"attention/{layer}/max_score_head"] = int(np.argmax(heads.max_score))
        return found | {f"attention/{name}": number for name, number in _extremes([*self.layers.values()]).items()}


def _extremes(layers: Sequence[HeadStatistics]) -> dict[str, float]:
    """Return the largest score, the lowest mean entropy and the largest mean weight on the first key."""
    scores, entropies, masses, _ = map(np.concatenate, zip(*layers, strict=True))
    return {
        "max_score": float(scores.max()),  # NaN if there is one
        "min_entropy": float(entropies.min()),
        "max_first_key": float(masses.max()),
    }


class StepSums:
    """The sums of a step, added up call by call on the device of the arrays.

    Attributes
    ----------
    maxima : dict from paths of layers to the largest score of each head, (H,)
    totals : dict from paths of layers to (3, H) float64: sum of entropies, sum of weights on key 0, number of queries
    """

    def __init__(self) -> None:
        self.maxima: dict[str, Any] = {}
        self.totals: dict[str, Any] = {}
        self.lock = threading.Lock()

    def add(self, layer: str, results: Sequence[Any]) -> None:
        """Add the results of the statistics `MONITORED` in one call: arrays (B, H, n)."""
        scores, *others = results[0].score, *results[1:]
        xp = namespace(scores)
        sees = scores != -np.inf
        columns = [xp.where(sees, array, xp.zeros_like(array)) for array in others]
        sums = xp.stack([xp.sum(xp.astype(array, xp.float64), axis=(0, 2)) for array in (*columns, sees)])
        maximum = xp.full_like(sums[0], -np.inf) if 0 in scores.shape else xp.max(scores, axis=(0, 2))
        if layer in self.maxima:
            maximum, sums = xp.maximum(maximum, self.maxima[layer]), sums + self.totals[layer]
        self.maxima[layer], self.totals[layer] = maximum, sums

    def finish(self, number: int, layers: Sequence[str]) -> MonitoredStep:
        """Return step `number`, with the statistics of these layers."""
        by_layer = {}
        for layer in layers:
            maximum = np.asarray(to_numpy(self.maxima[layer]), np.float64)
            entropies, masses, queries = np.asarray(to_numpy(self.totals[layer]), np.float64)
            count = np.maximum(queries, 1)
            by_layer[layer] = HeadStatistics(maximum, entropies / count, masses / count, queries)
        return MonitoredStep(number, by_layer)
