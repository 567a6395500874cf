"""`sightline bench`: named problems, ours and peers in turn, beside what the machine can do; table, JSON, pictures."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..bench.contenders import usable
from ..bench.cuda import Cuda
from ..bench.device import Cpu, Device
from ..bench.measure import Settings, run
from ..bench.peaks import UNITS
from ..bench.problems import select
from ..bench.races import Problem, Race, Target
from ..bench.report import Entry, Finding, Report, Verdict, amount, duration
from ..errors import ParameterError
from .console import facts, make_console, section, table

__all__ = ["bench", "show"]

KINDS: dict[str, type[Cpu] | type[Cuda]] = {"cpu": Cpu, "cuda": Cuda}
OF_SERIES = ("spread", "growth")  # targets over all points, not of one contender
LEAST_SHARE = 0.05  # of a peak, below which a problem is not about it


def bench(options: argparse.Namespace) -> int:
    """Run it; 1 where an answer of ours is wrong, or there is none."""
    console = make_console()
    threads = usable() if options.threads is None else options.threads
    device = KINDS[options.device](threads)
    seconds = device.seconds if options.seconds is None else options.seconds
    if threads < 1 or not 0 < seconds < math.inf:
        raise ParameterError(
            f"--threads {threads} --seconds {seconds}", "one or more threads, a time above 0", "--threads 2"
        )
    chosen = select(device.problems, options.only or (), options.dtype)
    if options.list:
        _list(console, chosen, device)
        return 0
    device.check()
    device.pause = 0.02 if options.quick else device.pause
    settings = Settings(device, seconds if not options.quick else min(seconds, 0.2), options.quick)
    report = Report(threads, settings.seconds, options.quick, settings.peaks.best, device=device.words)
    report.machine = device.facts()
    console.print(
        Text("softmax(Q Kᵀ / √d_k + M) V   beside its peers and beside the machine's own peaks", style="bold")
    )
    _run(console, chosen, settings, report, options.json)
    _end(console, report, device)
    if options.json:
        console.print(f"Wrote {report.save(options.json)}")
    if options.figures:
        from ..bench.pictures import draw

        for path in draw(report, Path(options.figures)):
            console.print(f"Wrote {path}")
    return 1 if report.failed else 0


def _list(console: Console, problems: Sequence[Problem], device: Device) -> None:
    for problem in problems:
        console.print(Text.assemble((problem.name, "cyan"), "  ", (problem.about, "dim")))
        for target in problem.targets:
            console.print(f"    {_goal(target, device)}")
        if isinstance(problem, Race) and problem.published:
            console.print(f"    {problem.published}", style="dim")


def _run(console: Console, problems: Sequence[Problem], settings: Settings, report: Report, path: str | None) -> None:
    """Problem by problem, kept in `path` after each: what comes later may take the process with it."""
    columns = (
        BarColumn(bar_width=24, complete_style="cyan"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", style="dim"),
    )
    drawn = console.is_terminal  # and by hand: a thread that redraws would take time from what is timed
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not drawn) as bar:
        task = bar.add_task("peaks", total=len(problems))
        settings.step = lambda words: bar.update(task, description=words, refresh=True)
        for name in settings.peaks.names:
            settings.step(f"peak: {name}")
            settings.peaks.measure(name)
        _head(console, settings)
        for problem in problems:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other libraries' words on their own futures
                finding = run(problem, settings)
            finding.judge(() if settings.quick else problem.targets)
            report.findings.append(finding)
            show(console, finding)
            bar.advance(task)
            if path:
                report.save(path)
            if finding.failed and (error := _broken(settings.device)):
                console.print(Text(f"The device answers no more, so this is the last problem: {error}", style="red"))
                break
    for finding, problem in zip(report.findings, problems, strict=False):  # fewer where the device broke
        finding.best = settings.peaks.best.get(finding.peak)  # the best of the whole run
        finding.judge(() if settings.quick else problem.targets)


def _broken(device: Device) -> Exception | None:
    """What the device says where it can be used no more: after some errors every later call of the process fails."""
    try:
        device.finish()
    except Exception as error:
        return error
    return None


def _head(console: Console, settings: Settings) -> None:
    _peaks(console, settings.peaks.best, f"{settings.device.words}, so far")
    absent = [(peer.label, reason) for peer in settings.device.peers.values() if (reason := peer.absent())]
    if absent:
        section(console, "Absent peers")
        console.print(facts(absent))


def _peaks(console: Console, best: dict[str, float], note: str) -> None:
    section(console, "Peaks", note)
    console.print(facts((name, amount(value, UNITS[name])) for name, value in best.items()))


def show(console: Console, finding: Finding) -> None:
    """One problem: its times at the left, what they are held against at the right."""
    section(console, finding.name, finding.about)
    if finding.failed:
        sign = "wrong, not reported: " if finding.wrong else "not measured: "
        console.print(Text(sign + finding.failed, style="red" if finding.wrong else "yellow"))
        return
    console.print(_series(finding) if finding.points else _race(finding))
    rows = [_verdict_row(verdict) for verdict in finding.verdicts if verdict.target.measure in OF_SERIES]
    if rows:
        console.print(table("over all of them", "found", "target", "", rows=rows))
    for note in _notes(finding):
        console.print(Text(note, style="dim"))


def _race(finding: Finding) -> Table:
    """A row a contender; columns nothing stands in are left out."""
    rows = [_row(finding, entry) for entry in finding.entries if entry.seconds]
    heads = ("", "time", "rate", "memory", "ratio", "target", "")
    kept = [k for k in range(len(heads)) if k == 0 or any(str(row[k]) for row in rows)]
    return table(*(heads[k] for k in kept), rows=[[row[k] for k in kept] for row in rows])


def _row(finding: Finding, entry: Entry) -> list[Any]:
    ours, first = finding.entry("sightline"), entry.name == "sightline"
    verdict = _verdict_of(finding, entry)
    measure = verdict.target.measure if verdict else ""
    share = finding.share(entry)
    if first:
        said = f"{share:.2f} of peak" if share and (measure == "share" or share >= LEAST_SHARE) else ""
    elif ours is None:
        said = ""
    else:
        said = _times(entry.over(ours) if measure == "slower" else ours.over(entry))
    rate = amount(finding.work / entry.median, finding.unit) if finding.work else ""
    memory = "" if entry.memory is None else amount(entry.memory, "B")
    name = Text(entry.label, style="bold" if first else "red" if entry.wrong else "")
    return [name, duration(entry.median), rate, memory, said, *_judged(verdict, finding.threads)]


def _verdict_of(finding: Finding, entry: Entry) -> Verdict | None:
    """The target that stands in a contender's row."""
    judged = [v for v in finding.verdicts if v.target.measure not in OF_SERIES]
    return next((v for v in judged if finding.rival(v.target) is entry), None)


def _series(finding: Finding) -> Table:
    """A row a point; how many times as long the peers take at the right."""
    peers = {entry.name: entry.label for point in finding.points for entry in point.entries[1:] if entry.seconds}
    rows = []
    for point in finding.points:
        ours, timed = point.entries[0], {entry.name: entry for entry in point.entries if entry.seconds}
        at = f"{point.n:,}" if finding.axis == "n" else f"{point.at:.1%}"
        beyond = "–" if point.extra is None else amount(point.extra, "B")
        others = [_times(ours.over(timed[name])) if name in timed else "–" for name in peers]
        rows.append((Text(at, style="bold"), duration(ours.median), duration(ours.median / point.n), beyond, *others))
    first = "tokens" if finding.axis == "n" else "pairs allowed"
    return table(first, "time", "a token", "memory beyond", *peers.values(), rows=rows)


def _verdict_row(verdict: Verdict) -> list[Any]:
    what = {"spread": "time of a token, most over least", "growth": "memory beyond, at the last over the first"}
    value = "–" if verdict.value is None else f"{verdict.value:.3f}"
    return [what[verdict.target.measure], value, *_judged(verdict)]


def _judged(verdict: Verdict | None, threads: int = 1) -> list[Any]:
    if verdict is None:
        return ["", ""]
    sign, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "dim")}[verdict.reached]
    return [_limit(verdict.target, threads), Text(sign, style=style)]


def _limit(target: Target, threads: int) -> str:
    """The limit as it stands in the table."""
    sign = "≥" if target.at_least else "≤"
    if target.measure == "seconds":
        return f"{sign} {duration(target.limit)}"
    limit = target.limit * threads if target.measure == "efficiency" else target.limit
    return f"{sign} {limit:g}" + ("×" if target.measure in ("faster", "slower", "efficiency") else "")


def _goal(target: Target, device: Device) -> str:
    """The target in words."""
    limit, label = f"{target.limit:g}", device.label(target.who)
    return {
        "share": f"at least {limit} of the machine's peak",
        "faster": f"at least {limit} times as fast as {label}",
        "slower": f"at most {limit} times as long as {label}",
        "efficiency": f"at least {limit} of as many times as fast as {label} as there are threads",
        "seconds": f"{label}: at most {duration(target.limit)}",
        "spread": f"time per token within a factor of {limit}",
        "growth": f"memory beyond inputs and outputs within a factor of {limit}",
    }[target.measure]


def _times(ratio: float | None) -> str:
    return (
        "" if ratio is None else f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×" if ratio < 100 else f"{ratio:.0f}×"
    )


def _notes(finding: Finding) -> list[str]:
    entries = finding.entries or [entry for point in finding.points for entry in point.entries]
    notes: dict[str, None] = {}
    for entry in entries:
        if entry.absent:
            notes[f"{entry.label}: {entry.absent.splitlines()[0]}"] = None  # all of it is in the JSON
        elif entry.wrong:
            notes[f"{entry.label}: wrong, {entry.budget:.3g} times the budget of rounding errors"] = None
        elif entry.note:
            notes[f"{entry.label}: {entry.note}"] = None
    return [*notes, *([finding.published] if finding.published else [])]


def _end(console: Console, report: Report, device: Device) -> None:
    verdicts = report.verdicts
    if not verdicts:
        return
    reached = [verdict.reached for verdict in verdicts]
    section(
        console, "Targets", f"{reached.count(True)} reached, {reached.count(False)} missed, {reached.count(None)} open"
    )
    rows = [
        (finding.name, _goal(verdict.target, device), _value(verdict), _judged(verdict)[1])
        for finding in report.findings
        for verdict in finding.verdicts
        if verdict.reached is not True
    ]
    console.print(table("missed or open", "target", "found", "", rows=rows, left=2) if rows else "All of them.")
    _peaks(console, report.peaks, "best of the whole run, by which the targets are judged")


def _value(verdict: Verdict) -> str:
    if verdict.value is None:
        return "–"
    return duration(verdict.value) if verdict.target.measure == "seconds" else f"{verdict.value:.3g}"
