"""Tables of measurements, summaries of their ratios, and the JSON file that stores them.

A time is the median over the rounds. A ratio is the median, over the rounds, of the ratios of two contenders' times.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from sightline.call.explanation import format_amount
from sightline.cli.console import make_table
from sightline.cli.timing import speedups

from .core import Row, timed

LIBRARIES = ("sightline-attention", "numpy", "llvmlite", "torch", "triton", "transformers", "onnxruntime", "jax")


def table_of(rows: Sequence[Row]) -> Table:
    """Return the table of a problem, with a row for each contender, or that of several, with a row for each problem."""
    cells = [_problem_cells(row) for row in rows] if rows[0][0].table else _contender_cells(rows[0])
    summary = summarise(rows) if len(rows) > 1 else {}
    for place, name in enumerate(("geometric mean", "worst") if summary else ()):
        cells.append({"": name} | {title: format_ratio(float(each[place])) for title, each in summary.items()})
    titles = dict.fromkeys(title for row in cells for title in row if title == "" or str(row[title]))
    return make_table(*titles, rows=[[row.get(title, "") for title in titles] for row in cells])


def _contender_cells(row: Row) -> list[dict[str, Any]]:
    problem, found = row[0], list(timed(row).values())
    ratios = {each.contender: found[0].ratio(each) for each in found}
    targets = {
        name: f"≥ {least:g}× {'✓' if ratios[name] >= least else '✗'}"
        for name, least in problem.targets.items()
        if name in ratios
    }
    return [
        {
            "": Text(each.contender, style="red" if each.is_wrong else "bold" if each.is_ours else ""),
            "time": format_duration(each.median),
            "fastest": format_duration(min(each.seconds)),
            "rate": format_amount(problem.work / each.median, 1000, problem.unit) if problem.work else "",
            "memory": "" if each.memory is None else format_amount(each.memory, 1024, "B"),
            "ratio": format_ratio(ratios[each.contender]),
            "target": targets.get(each.contender, ""),
        }
        for each in found
    ]


def _problem_cells(row: Row) -> dict[str, Any]:
    """Return every contender's time, the ratios, and in a series the time per token and the memory of Sightline."""
    problem, times = row[0], timed(row)
    cells: dict[str, Any] = {"": Text(problem.name, style="bold")}
    for contender in problem.contenders:
        each = times.get(contender.name)
        cells[contender.name] = format_duration(each.median) if each else "–"
    ours, beside = times.get(problem.contenders[0].name), problem.beside
    cells |= {title: format_ratio(ratio) for title, ratio in ratios_of(row).items()}
    if ours and beside and beside.name in times:
        cells[f"over {beside.name}"] = format_ratio(times[beside.name].ratio(ours))
    if ours and problem.is_series:
        cells["per token"] = format_duration(ours.median / problem.n)  # type: ignore[attr-defined]
        cells["memory"] = "–" if ours.memory is None else format_amount(ours.memory, 1024, "B")
    return cells


def ratios_of(row: Row) -> dict[str, float]:
    """Return the first peer's time divided by that of each contender that is Sightline, by the title of the column."""
    problem, times = row[0], timed(row)
    peer = next((each.name for each in problem.contenders if not each.is_ours), "")
    ours = [each for each in problem.contenders if each.is_ours and each is not problem.beside and each.name in times]
    titles = ["ratio" if each is problem.contenders[0] else f"{each.name} ratio" for each in ours]
    pairs = zip(titles, ours, strict=True) if peer in times else ()
    return {title: times[each.name].ratio(times[peer]) for title, each in pairs}


def summarise(rows: Sequence[Row]) -> dict[str, tuple[float, float, str]]:
    """Return (geometric mean, worst ratio, name of the worst problem) of each column of ratios."""
    found: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        for title, ratio in ratios_of(row).items():
            found.setdefault(title, []).append((ratio, f"{row[0].title}, {row[0].name}"))
    return {
        title: (statistics.geometric_mean(ratio for ratio, _ in pairs), *min(pairs)) for title, pairs in found.items()
    }


def notes_of(rows: Sequence[Row]) -> list[str]:
    """Return the remarks below a table, each once: why contenders have no times, and which ratios to distrust."""
    notes = []
    for row in rows:
        problem, times = row[0], list(timed(row).values())
        for each in row[1]:
            if each.reason:
                of_problem = f"{problem.name}: " if problem.table and each.has_failed else ""
                notes.append(f"{of_problem}{each.contender}: {each.reason.splitlines()[0]}")  # the JSON has every line
            elif each.is_wrong:
                notes.append(f"{each.contender}: wrong, {each.error:.3g} times the budget of rounding errors")
        for each in times:
            if speedups(times[0].seconds, each.seconds) is None:
                notes.append(f"{problem.name}: this machine is busy, distrust the ratio of {each.contender}")
    return list(dict.fromkeys(notes))


def save(path: str | Path, rows: Sequence[Row], **about: Any) -> None:
    """Write the measurements as JSON with the times of every round."""
    problems = [
        {
            "table": problem.title,
            "name": problem.name,
            "about": problem.about,
            "work": problem.work,
            "unit": problem.unit,
            "targets": problem.targets,
            "ratios": ratios_of((problem, found)),
            "measurements": [asdict(each) | {"median": each.median if each.seconds else None} for each in found],
        }
        for problem, found in rows
    ]
    versions = {each.name: each.version for each in distributions() if each.name in LIBRARIES}
    document = about | {"processors": os.cpu_count(), "versions": versions, "problems": problems}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def format_duration(seconds: float) -> str:
    """Return a number of seconds as text, with three digits and the unit s, ms, µs or ns."""
    unit, size = next((pair for pair in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if seconds >= pair[1]), ("ns", 1e-9))
    return f"{seconds / size:.3g} {unit}"


def format_ratio(ratio: float) -> str:
    """Return a ratio as text with the sign ×."""
    return f"{ratio:.2g}×" if ratio < 0.1 else f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}×"
