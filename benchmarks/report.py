"""The results of a benchmark run: times, ratios, verdicts, and the JSON file that stores them.

`cli.bench_command` prints the results, and `figures` draws them. Times are medians over rounds. The ratio of two
contenders is computed in every round, since a disturbance of a round affects both contenders. Its median is reported.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sightline import __version__
from sightline.errors import name_file

from .cases import BEST, SERIES_MEASURES, Target
from .peaks import UNITS

PAGE = 4096  # size of a page of memory in bytes
LIBRARIES = ("numpy", "llvmlite", "torch", "triton", "transformers", "onnxruntime", "openvino", "jax")


@dataclass
class Entry:
    """The results of one contender, which is Sightline or another library, on one case."""

    name: str
    label: str
    seconds: list[float] = field(default_factory=list)  # seconds per call, one number per round
    # seconds of the preparation and the first call, compilation included; None if not called
    first_seconds: float | None = None
    # peak bytes during a call, outputs included, minus the bytes in use before it; None if unknown
    memory: int | None = None
    budget: float | None = None  # largest error / rounding-error budget; above 1 if wrong; None if not checked
    skip_reason: str | None = None  # why the contender has no times; None if it has times
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def wrong(self) -> bool:
        return self.budget is not None and not self.budget <= 1

    def speedup_over(self, other: Entry) -> float:
        """Return the median, over the rounds, of the other contender's seconds divided by this contender's."""
        return statistics.median(y / x for x, y in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True)
class Verdict:
    """A target and the measured quantity that it limits; `value` is None if the quantity was not measured."""

    target: Target
    value: float | None

    @property
    def reached(self) -> bool | None:
        """True if the quantity is within the limit; None if it was not measured."""
        if self.value is None:
            return None
        return bool(self.value >= self.target.limit if self.target.at_least else self.value <= self.target.limit)


@dataclass(kw_only=True)
class Outcome:
    """Why a benchmark or a case has no times. All fields have their defaults if there are times."""

    failed: str | None = None  # why there are no times: Sightline's output is wrong or missing; None if there are times
    wrong: bool = False  # True if Sightline's output is wrong
    refused: bool = False  # True if Sightline refuses the problem on this host, which is not an error


@dataclass
class Row(Outcome):
    """The results of one case of a benchmark."""

    name: str
    entries: list[Entry] = field(default_factory=list)  # the contenders' results, Sightline's first
    peaks: list[float] = field(default_factory=list)  # the peak in every round, in `Finding.unit`; [] without a peak
    coordinate: float = 0.0  # for a point of a series: n, or the fraction of the pairs that the mask allows
    n: int = 0
    outputs: int = 0  # bytes of the output and the statistics together

    def extra_bytes(self, entry: Entry) -> int | None:
        """Return the peak bytes of a call beyond its inputs and outputs, at least `PAGE`; None if unknown."""
        return None if entry.memory is None else max(entry.memory - self.outputs, PAGE)

    def entry(self, name: str) -> Entry | None:
        """Return the results of the contender called `name`; None if it has no times or is not in the case."""
        return next((entry for entry in self.entries if entry.name == name and entry.seconds), None)


@dataclass
class Finding(Outcome):
    """The results of one benchmark.

    If a case of a group has no times, the reason is in the row of the case. For a single case it is in the finding.
    """

    name: str
    description: str
    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    flops: int = 0  # FLOPs of one call; 0 if `peak` is ""
    bytes_moved: int = 0  # bytes of the inputs and outputs of one call
    peak: str = ""  # name of the peak that the rate is divided by; "" if no share of a peak is printed
    axis: str = ""  # coordinate of the points of a series: "n" or "allowed"; "" for other benchmarks
    published: str = ""  # a published figure to print, with its source; "" for none
    peers: tuple[str, ...] = ()  # names of the contenders that are other libraries
    group: str = ""  # name of the groups that are summarised together; "" for other benchmarks
    beside: str = ""  # name of a contender; a column has Sightline's time divided by this contender's; "" for none

    @property
    def entries(self) -> list[Entry]:
        """The results of the contenders of a single case; [] for a group."""
        return self.rows[0].entries if self.rows and not self.group else []

    @property
    def unit(self) -> str:
        """The unit of a contender's rate: "B/s" if the peak is a bandwidth, else "FLOP/s"."""
        return UNITS.get(self.peak, "FLOP/s")

    @property
    def work(self) -> int:
        """The FLOPs of a call; if the peak is a bandwidth, the bytes that the call moves."""
        return self.bytes_moved if self.unit == "B/s" else self.flops

    def labels(self, timed: bool = False) -> dict[str, str]:
        """Return the labels of the contenders of all rows by name; only those with times if `timed` is True."""
        entries = (entry for row in self.rows for entry in row.entries)
        return {entry.name: entry.label for entry in entries if entry.seconds or not timed}

    def entry(self, name: str) -> Entry | None:
        """Return the results of the contender called `name`; None if it has no times or is not in the finding."""
        return self.rows[0].entry(name) if self.entries else None

    def target_entry(self, target: Target) -> Entry | None:
        """Return the results of the contender that a target names; None if that contender has no times.

        `BEST` names the fastest peer whose results are not wrong.
        """
        if target.implementation != BEST:
            return self.entry(target.implementation)
        timed = [entry for entry in map(self.entry, self.peers) if entry is not None and not entry.wrong]
        return min(timed, key=lambda entry: entry.median, default=None)

    def share(self, entry: Entry) -> float | None:
        """Return the contender's rate divided by the peak, the median of the rounds; None if either is unknown."""
        if not (self.work and entry.seconds and self.rows[0].peaks):
            return None
        return statistics.median(self.work / x / y for x, y in zip(entry.seconds, self.rows[0].peaks, strict=True))

    def ratio(self, row: Row, entry: Entry) -> float | None:
        """Return, for one row of the table, the first peer's time divided by the contender's time.

        The result is None if the contender is a peer or a time is missing.
        """
        other = None if entry.name in self.peers or not self.peers else row.entry(self.peers[0])
        return entry.speedup_over(other) if entry.seconds and other is not None else None

    def evaluate(self, targets: Iterable[Target]) -> None:
        """Set `verdicts` by comparing the measurements with the targets."""
        self.verdicts = [Verdict(target, None if self.failed else self._measure(target)) for target in targets]

    def _measure(self, target: Target) -> float | None:
        ours, other = self.entry("sightline"), self.target_entry(target)
        if target.measure in SERIES_MEASURES:
            return self._measure_series(target.measure)
        if target.measure == "seconds":
            return other.median if other else None
        if ours is None or other is None:
            return None
        if target.measure == "share":
            return self.share(ours)
        if target.measure == "slower":
            return other.speedup_over(ours)
        return ours.speedup_over(other)

    def _measure_series(self, measure: str) -> float | None:
        """Return a quantity of all points (`SERIES_MEASURES`); None if it is unknown, or for fewer than two points."""
        points = [(row, row.entries[0]) for row in self.rows if row.entries and row.entries[0].seconds]
        extra = [row.extra_bytes(ours) for row, ours in points]
        if len(points) < 2 or (measure != "spread" and None in extra):
            return None
        if measure == "spread":
            times = [ours.median / row.n for row, ours in points]
            return max(times) / min(times)
        if measure == "growth":
            return extra[-1] / extra[0]  # type: ignore[operator]
        return max(x / row.outputs for x, (row, _) in zip(extra, points, strict=True))  # type: ignore[operator]


@dataclass
class Report:
    """The results of a whole benchmark run."""

    threads: int
    seconds: float  # timing budget of one problem, in seconds
    quick: bool
    peaks: dict[str, float]
    findings: list[Finding] = field(default_factory=list)
    device: str = ""  # description of the device that was measured
    machine: dict[str, Any] = field(default_factory=dict)  # properties of the device that times depend on
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def failed(self) -> bool:
        """True if in any benchmark Sightline's output was wrong or Sightline raised an error."""
        outcomes: list[Outcome] = [*self.findings, *(row for finding in self.findings for row in finding.rows)]
        return any(outcome.failed and not outcome.refused for outcome in outcomes)

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for finding in self.findings for verdict in finding.verdicts]

    @property
    def groups(self) -> dict[str, list[RatioSummary]]:
        """The summaries of the ratios of every group of cases, by the group's name."""
        groups = dict.fromkeys(finding.group for finding in self.findings if finding.group and finding.rows)
        return {group: summarise([f for f in self.findings if f.group == group]) for group in groups}

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON with the times of every round, and return the path.

        An existing file is replaced atomically.
        """
        document = asdict(self)
        for finding, saved in zip(self.findings, document["findings"], strict=True):
            for verdict, saved_verdict in zip(finding.verdicts, saved["verdicts"], strict=True):
                saved_verdict["reached"] = verdict.reached
            for row, saved_row in zip(finding.rows, saved["rows"], strict=True):
                for entry, saved_entry in zip(row.entries, saved_row["entries"], strict=True):
                    saved_entry["median"] = entry.median if entry.seconds else None
                    saved_entry["share"] = finding.share(entry)
                    if finding.group:
                        saved_entry["ratio"] = finding.ratio(row, entry)
        document["groups"] = {group: list(map(asdict, summaries)) for group, summaries in self.groups.items()}
        document["machine"] = machine() | self.machine
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        with name_file(part):
            part.write_text(json.dumps(document, indent=1, default=str) + "\n")
        os.replace(part, path)
        return path


@dataclass(frozen=True)
class RatioSummary:
    """The ratios of one contender in all cases of a group. A ratio is the peer's time / the contender's time."""

    contender: str
    label: str
    count: int
    geometric_mean: float
    worst: float  # the smallest ratio
    worst_finding: str  # the name of the finding and of the case with the smallest ratio
    worst_case: str


def summarise(findings: Sequence[Finding]) -> list[RatioSummary]:
    """Return one summary of all cases of the findings for each contender that is compared with a peer."""
    labels: dict[str, str] = {}
    ratios: dict[str, dict[tuple[str, str], float]] = {}
    for finding in findings:
        for row in finding.rows:
            for entry in row.entries:
                if (ratio := finding.ratio(row, entry)) is not None:
                    labels[entry.name] = entry.label
                    ratios.setdefault(entry.name, {})[finding.name, row.name] = ratio
    summaries = []
    for name, found in ratios.items():
        worst = min(found, key=lambda case: found[case])
        mean = statistics.geometric_mean(found.values())
        summaries.append(RatioSummary(name, labels[name], len(found), mean, found[worst], *worst))
    return summaries


def machine() -> dict[str, Any]:
    """Return what times depend on: the host's properties, and each library's version (None if it is not installed)."""
    properties: dict[str, Any] = {"processors": os.cpu_count(), "machine": platform.machine(), "sightline": __version__}
    for name in LIBRARIES:
        try:
            properties[name] = version(name)
        except PackageNotFoundError:
            properties[name] = None
    return properties


def format_duration(seconds: float) -> str:
    """Return a number of seconds as text, with three digits and the unit s, ms, µs or ns."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= size or unit == "ns":
            return f"{_three_digits(seconds / size)} {unit}"
    raise AssertionError


def format_amount(value: float, unit: str) -> str:
    """Return a number of FLOP/s, B/s or B as text, with three digits, a prefix and the unit.

    The prefixes are powers of 1024 for B and powers of 1000 for other units.
    """
    step, prefixes = (1024, ("", "Ki", "Mi", "Gi")) if unit == "B" else (1000, ("", "k", "M", "G", "T"))
    power = 0
    while abs(value) >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    return f"{_three_digits(value)} {prefixes[power]}{unit}"


def format_ratio(ratio: float | None) -> str:
    """Return a ratio as text with the sign ×; "" for None."""
    if ratio is None:
        return ""
    return f"{ratio:.2g}×" if ratio < 0.1 else f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}×"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
