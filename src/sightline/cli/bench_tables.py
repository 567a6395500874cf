"""The tables of `sightline bench`.

A table has a row for each contender of a problem, each point of a series, each case of a group, or each verdict.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from .bench.cases import MEASURES, SERIES_MEASURES, Target
from .bench.report import (
    Entry,
    Finding,
    Row,
    Verdict,
    format_amount,
    format_duration,
    format_ratio,
    summarise,
)
from .console import table

Cells = dict[str, Any]  # a row of a table: its cells by the titles of their columns

NAME = ""  # the title of the column of names
MIN_PEAK_SHARE = 0.05  # least share of the peak that is printed; a share with a target is always printed


def finding_table(finding: Finding) -> Table:
    """Return the table of a finding, without the columns that are empty in every row.

    A row is a contender of a single case, a point of a series, or a case of a group.
    """
    if finding.kind == "entries":
        rows = [_contender_cells(finding, entry) for entry in finding.entries if entry.seconds]
    else:
        rows = [(_point_cells if finding.axis else _case_cells)(finding, row) for row in finding.rows]
        rows += _summary_rows(finding) if finding.group and len(rows) > 1 else []
    titles = dict.fromkeys(title for row in rows for title in row if title == NAME or str(row[title]))
    return table(*titles, rows=[[row.get(title, "") for title in titles] for row in rows])


def _contender_cells(finding: Finding, entry: Entry) -> Cells:
    ours, is_first, share = finding.entry("sightline"), entry.name == "sightline", finding.share(entry)
    judged = [verdict for verdict in finding.verdicts if verdict.target.measure not in SERIES_MEASURES]
    verdict = next((each for each in judged if finding.target_entry(each.target) is entry), None)
    measure = verdict.target.measure if verdict else ""
    if is_first:
        comparison = f"{share:.2f} of peak" if share and (measure == "share" or share >= MIN_PEAK_SHARE) else ""
    elif ours is None:
        comparison = ""
    else:
        comparison = format_ratio(entry.speedup_over(ours) if measure == "slower" else ours.speedup_over(entry))
    limit, sign = verdict_cells(verdict, finding.threads)
    return {
        NAME: Text(entry.label, style="bold" if is_first else "red" if entry.wrong else ""),
        "time": format_duration(entry.median),
        "rate": format_amount(finding.work / entry.median, finding.unit) if finding.work else "",
        "memory": "" if entry.memory is None else format_amount(entry.memory, "B"),
        "ratio": comparison,
        "target": limit,
        " ": sign,
    }


def _point_cells(finding: Finding, row: Row) -> Cells:
    """Return the cells of a point of a series: Sightline's time and memory, and the others' times over Sightline's."""
    ours, labels = row.entries[0], finding.labels(timed=True)
    others = {name: row.entry(name) for name in labels if name != ours.name}
    at = f"{row.n:,}" if finding.axis == "n" else f"{row.coordinate:.1%}"
    return {
        "tokens" if finding.axis == "n" else "pairs allowed": Text(at, style="bold"),
        "time": format_duration(ours.median),
        "per token": format_duration(ours.median / row.n),
        "extra memory": "–" if row.extra_bytes is None else format_amount(row.extra_bytes, "B"),
    } | {labels[name]: format_ratio(ours.speedup_over(other)) if other else "–" for name, other in others.items()}


def _case_cells(finding: Finding, row: Row) -> Cells:
    """Return the cells of a case of a group.

    They are the time of every contender, then the ratio of every contender that is no peer, then Sightline's time minus
    the time of the contender `finding.subtracted`.
    """
    labels, cells = finding.labels(), Cells({NAME: Text(row.name, style="bold")})
    entries = {name: row.entry(name) for name in labels}
    for name, entry in entries.items():
        cells[labels[name]] = format_duration(entry.median) if entry else "–"
    for name, entry in entries.items():
        if name not in finding.peers:
            cells[_ratio_title(name, labels[name])] = (entry and format_ratio(finding.ratio(row, entry))) or "–"
    ours, other = entries.get("sightline"), entries.get(finding.subtracted)
    if ours and other:
        cells[f"beyond {other.label}"] = format_duration(ours.excess_over(other))
    return cells


def _summary_rows(finding: Finding) -> list[Cells]:
    """Return the last rows of a group: the geometric mean and the worst of the ratios of each contender."""
    summaries = summarise([finding])
    mean = {_ratio_title(each.contender, each.label): format_ratio(each.geometric_mean) for each in summaries}
    worst = {_ratio_title(each.contender, each.label): format_ratio(each.worst) for each in summaries}
    return [{NAME: Text("geometric mean", style="dim")} | mean, {NAME: Text("worst", style="dim")} | worst]


def _ratio_title(name: str, label: str) -> str:
    return "ratio" if name == "sightline" else f"{label} ratio"


def verdict_row(verdict: Verdict) -> list[Any]:
    """Return the cells of a row of the table of quantities that are computed from all points of a series."""
    value = "–" if verdict.value is None else f"{verdict.value:.3f}"
    return [MEASURES[verdict.target.measure].title, value, *verdict_cells(verdict)]


def verdict_cells(verdict: Verdict | None, threads: int = 1) -> list[Any]:
    """Return the limit of a verdict's target, and the sign for reached or missed; two empty cells without a verdict."""
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
