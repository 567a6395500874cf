"""The ratios of a group of cases in three numbers: how many there are, their geometric mean, and the worst."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Finding


@dataclass(frozen=True)
class RatioSummary:
    """The ratios of one contender over all cases of a group. A ratio is the peer's time over the contender's time."""

    contender: str
    label: str
    count: int
    geometric_mean: float
    worst: float  # the smallest ratio
    worst_finding: str  # the name of the finding and of the case with the smallest ratio
    worst_case: str


def summarise(findings: Sequence[Finding]) -> list[RatioSummary]:
    """Return one summary for each contender that is compared with a peer, over all cases of the findings."""
    labels: dict[str, str] = {}
    ratios: dict[str, dict[tuple[str, str], float]] = {}
    for finding in findings:
        for case in finding.cases:
            for entry in case.entries:
                ratio = None if entry.name in finding.peers else case.ratio(entry, finding.peers[0])
                if ratio is not None:
                    labels[entry.name] = entry.label
                    ratios.setdefault(entry.name, {})[finding.name, case.name] = ratio
    return [_summarise_contender(name, label, ratios[name]) for name, label in labels.items()]


def _summarise_contender(name: str, label: str, ratios: dict[tuple[str, str], float]) -> RatioSummary:
    worst = min(ratios, key=lambda case: ratios[case])
    mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
    return RatioSummary(name, label, len(ratios), mean, ratios[worst], *worst)
