"""The tables of `sightline bench`.

A table has a row for each contender of a problem, each point of a series, each case of a group, or each verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

from .bench.ratio_summary import summarise
from .bench.report import SERIES_MEASURES, CaseResult, Entry, Finding, Verdict, format_amount, format_duration
from .bench.workloads import Target
from .console import table

MIN_PEAK_SHARE = 0.05  # least share of the peak that is printed; a share with a target is always printed


def workload_table(finding: Finding) -> Table:
    """Return a table with one row per contender that has times, without the columns that are empty in every row."""
    rows = [_workload_row(finding, entry) for entry in finding.entries if entry.seconds]
    titles = ("", "time", "rate", "memory", "ratio", "target", "")
    shown = [k for k in range(len(titles)) if k == 0 or any(str(row[k]) for row in rows)]
    return table(*(titles[k] for k in shown), rows=[[row[k] for k in shown] for row in rows])


def _workload_row(finding: Finding, entry: Entry) -> list[Any]:
    ours, first = finding.entry("sightline"), entry.name == "sightline"
    verdict = _entry_verdict(finding, entry)
    measure = verdict.target.measure if verdict else ""
    share = finding.share(entry)
    if first:
        comparison = f"{share:.2f} of peak" if share and (measure == "share" or share >= MIN_PEAK_SHARE) else ""
    elif ours is None:
        comparison = ""
    else:
        comparison = format_ratio(entry.speedup_over(ours) if measure == "slower" else ours.speedup_over(entry))
    rate = format_amount(finding.work / entry.median, finding.unit) if finding.work else ""
    memory = "" if entry.memory is None else format_amount(entry.memory, "B")
    name = Text(entry.label, style="bold" if first else "red" if entry.wrong else "")
    return [name, format_duration(entry.median), rate, memory, comparison, *verdict_cells(verdict, finding.threads)]


def _entry_verdict(finding: Finding, entry: Entry) -> Verdict | None:
    """Return the verdict whose target is printed in the contender's row; None if no target names the contender."""
    judged = [v for v in finding.verdicts if v.target.measure not in SERIES_MEASURES]
    return next((v for v in judged if finding.target_entry(v.target) is entry), None)


def series_table(finding: Finding) -> Table:
    """Return a table with one row per point of the series. The last columns have the peers' times over Sightline's."""
    peers = {entry.name: entry.label for point in finding.points for entry in point.entries[1:] if entry.seconds}
    rows = []
    for point in finding.points:
        ours, timed = point.entries[0], {entry.name: entry for entry in point.entries if entry.seconds}
        at = Text(f"{point.n:,}" if finding.axis == "n" else f"{point.coordinate:.1%}", style="bold")
        times = format_duration(ours.median), format_duration(ours.median / point.n)
        memory = "–" if point.extra_bytes is None else format_amount(point.extra_bytes, "B")
        ratios = [format_ratio(ours.speedup_over(timed[name])) if name in timed else "–" for name in peers]
        rows.append((at, *times, memory, *ratios))
    first = "tokens" if finding.axis == "n" else "pairs allowed"
    return table(first, "time", "per token", "extra memory", *peers.values(), rows=rows)


def case_table(finding: Finding) -> Table:
    """Return a table with one row per case: every contender's time, and the peer's time over each other contender's.

    The geometric mean and the worst of these ratios follow. If the finding has a contender to subtract, the last column
    has Sightline's time beyond that contender's.
    """
    labels = {entry.name: entry.label for case in finding.cases for entry in case.entries}
    compared = [name for name in labels if name not in finding.peers]
    rows: list[list[Any]] = [
        [Text(case.name, style="bold"), *_case_cells(finding, case, labels, compared)] for case in finding.cases
    ]
    if len(rows) > 1:
        summaries = {summary.contender: summary for summary in summarise([finding])}
        means = [format_ratio(summaries[name].geometric_mean) if name in summaries else "" for name in compared]
        worst = [format_ratio(summaries[name].worst) if name in summaries else "" for name in compared]
        blank = [""] * len(labels)
        rows += [[Text("geometric mean", style="dim"), *blank, *means], [Text("worst", style="dim"), *blank, *worst]]
    titles = ["ratio" if name == "sightline" else f"{labels[name]} ratio" for name in compared]
    beyond = [f"beyond {labels[finding.subtracted]}"] if finding.subtracted in labels else []
    width = 1 + len(labels) + len(titles) + len(beyond)
    return table("", *labels.values(), *titles, *beyond, rows=[[*row, *[""] * (width - len(row))] for row in rows])


def _case_cells(finding: Finding, case: CaseResult, labels: Iterable[str], compared: Iterable[str]) -> list[str]:
    """Return the cells of a case after its name: times, ratios and, if a contender is subtracted, the difference."""
    entries = {entry.name: entry for entry in case.entries if entry.seconds}
    cells = [format_duration(entries[name].median) if name in entries else "–" for name in labels]
    ratios = [case.ratio(entries[name], finding.peers[0]) if name in entries else None for name in compared]
    cells += [format_ratio(ratio) or "–" for ratio in ratios]
    if finding.subtracted in entries:
        cells.append(format_duration(entries["sightline"].excess_over(entries[finding.subtracted])))
    return cells


def verdict_row(verdict: Verdict) -> list[Any]:
    labels = {
        "spread": "time per token, largest over smallest",
        "growth": "extra memory, last point over first",
        "extra": "extra memory over outputs, largest",
    }
    value = "–" if verdict.value is None else f"{verdict.value:.3f}"
    return [labels[verdict.target.measure], value, *verdict_cells(verdict)]


def verdict_cells(verdict: Verdict | None, threads: int = 1) -> list[Any]:
    if verdict is None:
        return ["", ""]
    sign, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "dim")}[verdict.reached]
    return [_format_limit(verdict.target, threads), Text(sign, style=style)]


def _format_limit(target: Target, threads: int) -> str:
    """Return the limit of a target as text for the column "target" of a table."""
    sign = "≥" if target.at_least else "≤"
    if target.measure == "seconds":
        return f"{sign} {format_duration(target.limit)}"
    limit = target.limit * threads if target.measure == "efficiency" else target.limit
    return f"{sign} {limit:g}" + ("×" if target.measure in ("faster", "slower", "efficiency") else "")


def format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2g}×" if ratio < 0.1 else f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}×"
