"""What was found: times, ratios, verdicts; as JSON. `cli.bench` prints it, `pictures` draws it.

Times are medians of rounds. A ratio of two contenders is the median of the ratios of each round, since what disturbs a
round disturbs both.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from .peaks import UNITS
from .workloads import BEST, Target

__all__ = ["Entry", "Finding", "Report", "Verdict", "format_amount", "format_duration"]

PAGE = 4096  # bytes
LIBRARIES = ("numpy", "llvmlite", "torch", "triton", "onnxruntime", "openvino", "jax")


@dataclass
class Entry:
    """A contender in a race. Seconds are of one call, one number a round."""

    name: str
    label: str
    seconds: list[float] = field(default_factory=list)
    first_seconds: float | None = None  # seconds of its first call, with whatever it compiles
    memory: int | None = None  # bytes a call needs at most beyond what lay there before, its outputs counted
    budget: float | None = None  # the share of its budget of rounding errors; None: not compared
    skip_reason: str | None = None  # why it has no times
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def wrong(self) -> bool:
        return self.budget is not None and not self.budget <= 1

    def speedup_over(self, other: Entry) -> float:
        """The other's time over this one's: how many times as fast this one is."""
        return statistics.median(y / x for x, y in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured; None where nothing could be."""

    target: Target
    value: float | None

    @property
    def reached(self) -> bool | None:
        return None if self.value is None else self.target.is_met(self.value)


@dataclass
class Point:
    """One point of a series."""

    coordinate: float  # n, or the share of pairs the mask allows
    n: int
    outputs: int  # bytes a call must return
    entries: list[Entry]

    @property
    def extra_bytes(self) -> int | None:
        """Bytes our call holds at most beyond its inputs and outputs."""
        used = self.entries[0].memory
        return None if used is None else max(used - self.outputs, 0)


@dataclass
class Finding:
    """What was found of one problem."""

    name: str
    description: str
    entries: list[Entry] = field(default_factory=list)  # ours first
    points: list[Point] = field(default_factory=list)  # of a series
    verdicts: list[Verdict] = field(default_factory=list)
    flops: int = 0  # of one call
    bytes_moved: int = 0
    peak: str = ""  # the peak a share is taken of
    threads: int = 1
    axis: str = ""  # of a series
    failed: str | None = None  # why nothing is reported: our answer is wrong, or there is none
    wrong: bool = False
    refused: bool = False  # there is none since something is missing here, which is no fault of ours
    best: float | None = None  # the peak itself, FLOP/s or bytes/s, the best of the run
    published: str = ""  # a figure to look at beside, and whose it is
    peers: tuple[str, ...] = ()  # names of those that are not ours

    @property
    def unit(self) -> str:
        """What work is counted in per second."""
        return UNITS.get(self.peak, "FLOP/s")

    @property
    def work(self) -> int:
        """FLOPs, or bytes where moving them is the limit."""
        return self.bytes_moved if self.unit == "B/s" else self.flops

    def entry(self, name: str) -> Entry | None:
        """The contender of that name, where it was timed."""
        found = [entry for entry in self.entries if entry.name == name and entry.seconds]
        return found[0] if found else None

    def target_entry(self, target: Target) -> Entry | None:
        """The contender a target means, where it was timed; no peer that is wrong is the best."""
        if target.implementation != BEST:
            return self.entry(target.implementation)
        timed = [entry for entry in map(self.entry, self.peers) if entry is not None and not entry.wrong]
        return min(timed, key=lambda entry: entry.median, default=None)

    def share(self, entry: Entry) -> float | None:
        """What the entry does in a second over the machine's peak."""
        if not (self.best and entry.seconds and self.work):
            return None
        return self.work / entry.median / self.best

    def evaluate(self, targets: Iterable[Target]) -> None:
        """Measure the problem by its targets; shares need `best`."""
        self.verdicts = [Verdict(target, None if self.failed else self._measure(target)) for target in targets]

    def _measure(self, target: Target) -> float | None:
        ours, other = self.entry("sightline"), self.target_entry(target)
        if target.measure == "seconds":
            return other.median if other else None
        if target.measure == "share":
            return self.share(ours) if ours else None
        if target.measure in ("spread", "growth"):
            return self._time_spread() if target.measure == "spread" else self._memory_growth()
        if ours is None or other is None:
            return None
        if target.measure == "slower":
            return other.speedup_over(ours)
        if target.measure == "efficiency":
            return ours.speedup_over(other) / self.threads if self.threads > 1 else None
        return ours.speedup_over(other)

    def _time_spread(self) -> float | None:
        each = [point.entries[0].median / point.n for point in self.points if point.entries[0].seconds]
        return max(each) / min(each) if len(each) > 1 else None

    def _memory_growth(self) -> float | None:
        """Memory beyond inputs and outputs, the last point's over the first's; less than a page counts as one."""
        beyond = [point.extra_bytes for point in self.points]
        if len(beyond) < 2 or beyond[0] is None or beyond[-1] is None:
            return None
        return max(beyond[-1], PAGE) / max(beyond[0], PAGE)


@dataclass
class Report:
    """A whole run."""

    threads: int
    seconds: float  # budget of a race
    quick: bool
    peaks: dict[str, float]
    findings: list[Finding] = field(default_factory=list)
    device: str = ""  # in words
    machine: dict[str, Any] = field(default_factory=dict)  # what else it is, as far as times depend on it
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def failed(self) -> bool:
        """Whether ours was wrong, or failed, anywhere."""
        return any(finding.failed and not finding.refused for finding in self.findings)

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for finding in self.findings for verdict in finding.verdicts]

    def save(self, path: str | Path) -> Path:
        """Write all of it as JSON, every round's time, not only medians; at any time the file is whole or not there."""
        document = asdict(self)
        for finding, saved in zip(self.findings, document["findings"], strict=True):
            for verdict, row in zip(finding.verdicts, saved["verdicts"], strict=True):
                row["reached"] = verdict.reached
            for entry, row in zip(finding.entries, saved["entries"], strict=True):
                row["median"] = entry.median if entry.seconds else None
                row["share"] = finding.share(entry)
        document["machine"] = machine() | self.machine
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(document, indent=1, default=str) + "\n")
        os.replace(part, path)
        return path


def machine() -> dict[str, Any]:
    """The machine and the libraries, as far as times depend on them."""
    found: dict[str, Any] = {"processors": os.cpu_count(), "machine": platform.machine(), "sightline": __version__}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def format_duration(seconds: float) -> str:
    """Seconds in the unit that suits them, three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= size or unit == "ns":
            return f"{_three_digits(seconds / size)} {unit}"
    raise AssertionError


def format_amount(value: float, unit: str) -> str:
    """A number of FLOP/s, B/s or bytes with its prefix, three digits: powers of 1024 for bytes, 1000 else."""
    step, prefixes = (1024, ("", "Ki", "Mi", "Gi")) if unit == "B" else (1000, ("", "k", "M", "G", "T"))
    power = 0
    while abs(value) >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    return f"{_three_digits(value)} {prefixes[power]}{unit}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
