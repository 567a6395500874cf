"""`python -m benchmarks`: time Sightline and other libraries on named problems, and compare rates with measured peaks.

The command prints tables, and writes JSON and figures if they are requested.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sightline.cli.console import key_value_table, make_console, note, section, table
from sightline.cpu.runtime.thread_count import usable_processors
from sightline.errors import ParameterError, SightlineError

from .cases import MEASURES, SERIES_MEASURES, Benchmark, Target
from .cpu_problems import select
from .cuda import CudaDevice
from .device import CpuDevice, Device
from .measure import Settings, run
from .peaks import UNITS
from .report import (
    Entry,
    Finding,
    Outcome,
    Report,
    Row,
    Verdict,
    format_amount,
    format_duration,
    format_ratio,
    summarise,
)

DEVICES: dict[str, type[CpuDevice] | type[CudaDevice]] = {"cpu": CpuDevice, "cuda": CudaDevice}
QUICK_WARNING = "A quick run: tiny sizes and two rounds. Its times and ratios mean nothing."
NAME = ""  # the title of the column of names
MIN_PEAK_SHARE = 0.05  # least share of the peak that is printed; a share with a target is always printed

Cells = dict[str, Any]  # a row of a table: its cells by the titles of their columns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected benchmarks. Return 1 for a wrong output or an error of Sightline, and 2 for a wrong option."""
    options = parser().parse_args(arguments)
    try:
        if options.ranks:
            from .rank_scaling import bench_ranks

            bench_ranks(options.quick)
            return 0
        return bench(options)
    except SightlineError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times Sightline and every installed peer library on named problems, alternating between them, "
        "after each output was checked against the float64 definition. The extra `bench` installs the peers.",
    )
    add = command.add_argument
    devices = "cuda: a GPU, CUDA or ROCm, with its own problems and peers"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=devices)
    only = "run problems whose name contains WORD or matches it as a pattern"
    add("--only", action="append", metavar="WORD", help=only)
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="run problems of this dtype")
    add("--list", action="store_true", help="list the problems and their targets, and stop")
    add("--threads", type=int, help="threads of every contender (default: all usable processors)")
    add("--seconds", type=float, help="timing budget of one problem (default: 10; 2 on a GPU)")
    add("--quick", action="store_true", help="tiny sizes, to test that everything runs; times and ratios mean nothing")
    ranks = "instead, time attention over 1, 2 and 4 processes and compare with the times that the cost model predicts"
    add("--ranks", action="store_true", help=ranks)
    add("--json", metavar="PATH", help="write all results to PATH, with the time of every round")
    add("--figures", metavar="FOLDER", help="draw the results to FOLDER")
    return command


def bench(options: argparse.Namespace) -> int:
    """Run the selected benchmarks. Return 1 if Sightline gave a wrong output or raised an error, else 0."""
    console = make_console()
    threads = usable_processors() if options.threads is None else options.threads
    device = DEVICES[options.device](threads)
    seconds = device.seconds if options.seconds is None else options.seconds
    if threads < 1 or not 0 < seconds < math.inf:
        raise ParameterError(
            f"--threads {threads} --seconds {seconds}", "at least one thread, a time above 0 seconds", "--threads 2"
        )
    selected = select(device.benchmarks, options.only or (), options.dtype)
    if options.list:
        _print_list(console, selected, device)
        return 0
    device.check()
    device.pause = 0.02 if options.quick else device.pause
    settings = Settings(device, seconds if not options.quick else min(seconds, 0.2), options.quick)
    report = Report(threads, settings.seconds, options.quick, settings.device.peaks.best, device=device.description)
    report.machine = device.properties()
    console.print(Text("softmax(Q Kᵀ / √d_k + M) V   against other libraries and measured peaks", style="bold"))
    note(console, device.description)
    if options.quick:
        console.print(Text(QUICK_WARNING, style="yellow"))
    _run_benchmarks(console, selected, settings, report, options.json)
    _print_groups(console, report)
    _print_summary(console, report, device)
    if options.quick:
        console.print(Text(f"\n{QUICK_WARNING}", style="yellow"))
    if options.json:
        console.print(f"Wrote {report.save(options.json)}")
    if options.figures:
        from .figures import draw

        for path in draw(report, Path(options.figures)):
            console.print(f"Wrote {path}")
    return 1 if report.failed else 0


def _print_list(console: Console, benchmarks: Sequence[Benchmark], device: Device) -> None:
    for benchmark in benchmarks:
        console.print(Text.assemble((benchmark.name, "cyan"), "  ", (benchmark.description, "dim")))
        for target in benchmark.targets:
            console.print(f"    {_describe_target(target, device)}")
        if benchmark.published:
            console.print(f"    {benchmark.published}", style="dim")


def _run_benchmarks(
    console: Console, benchmarks: Sequence[Benchmark], settings: Settings, report: Report, path: str | None
) -> None:
    """Measure the benchmarks one after the other and print each finding.

    Unless `path` is None, the report is saved to `path` after each benchmark, in case a later benchmark crashes.
    """
    description = TextColumn("{task.description}", style="dim")
    columns = BarColumn(bar_width=24, complete_style="cyan"), MofNCompleteColumn(), TimeElapsedColumn(), description
    is_interactive = console.is_terminal  # no thread redraws the bar, because such a thread would slow the timed calls
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not is_interactive) as bar:
        task = bar.add_task("peaks", total=len(benchmarks))
        settings.on_progress = lambda message: bar.update(task, description=message, refresh=True)
        for name in settings.device.peaks.names:
            settings.on_progress(f"peak: {name}")
            settings.device.peaks.measure(name)
        _print_header(console, settings)
        for benchmark in benchmarks:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecation warnings of peer libraries
                finding = run(benchmark, settings)
            finding.evaluate(() if settings.quick else benchmark.targets)
            report.findings.append(finding)
            _print_finding(console, finding)
            bar.advance(task)
            if path:
                report.save(path)
            if finding.failed and (error := _device_error(settings.device)):
                console.print(Text(f"The device no longer responds; the run stops here: {error}", style="red"))
                break


def _device_error(device: Device) -> Exception | None:
    """Return the error that a synchronisation of the device raises; None if it raises none.

    After some CUDA errors every later CUDA call of the process fails.
    """
    try:
        device.synchronize()
    except Exception as error:
        return error
    return None


def _print_header(console: Console, settings: Settings) -> None:
    _print_peaks(console, settings.device.peaks.best, "before the run")
    absent = [(peer.label, reason) for peer in settings.device.peers.values() if (reason := peer.skip_reason())]
    if absent:
        section(console, "Missing peers")
        console.print(key_value_table(absent))


def _print_peaks(console: Console, best: dict[str, float], note: str) -> None:
    section(console, "Peaks", note)
    console.print(key_value_table((name, format_amount(value, UNITS[name])) for name, value in best.items()))


def _print_finding(console: Console, finding: Finding) -> None:
    """Print the finding of one problem: a table of times, ratios and targets, or the reason why there are no times."""
    section(console, finding.name, finding.description)
    if finding.failed:
        console.print(_describe_failure(finding))
        return
    console.print(finding_table(finding))
    for verdict in (each for each in finding.verdicts if each.target.measure in SERIES_MEASURES):
        words = MEASURES[verdict.target.measure].words.format(limit=verdict.target.limit)
        console.print(Text.assemble(f"{words}: {_format_value(verdict)} ", verdict_cells(verdict)[1]))
    for remark in _notes(finding):
        note(console, remark)
    for row in finding.rows:
        if row.failed:
            console.print(Text.assemble(f"{row.name}: ", _describe_failure(row)))


def _describe_failure(outcome: Outcome) -> Text:
    """Return the reason why an outcome has no times, after words that say whether the output was wrong."""
    label = "wrong, not reported: " if outcome.wrong else "not measured: "
    return Text(f"{label}{outcome.failed}", style="red" if outcome.wrong else "yellow")


def _describe_target(target: Target, device: Device) -> str:
    """Return the target in words."""
    label, duration = device.label(target.implementation), format_duration(target.limit)
    return MEASURES[target.measure].words.format(limit=target.limit, label=label, duration=duration)


def _notes(finding: Finding) -> list[str]:
    """Return the lines to print below a finding's table, each line once.

    The lines say which contenders have no times and why, which outputs are wrong, and what the contenders' notes and
    the published figure say.
    """
    notes = []
    for entry in (entry for row in finding.rows for entry in row.entries):
        note = entry.skip_reason.splitlines()[0] if entry.skip_reason else entry.note  # the JSON file has every line
        if entry.wrong and not entry.skip_reason:
            note = f"wrong, {entry.budget:.3g} times the budget of rounding errors"
        if note and not note.startswith("not installed"):  # the list of missing peers has these
            notes.append(f"{entry.label}: {note}")
    return [*dict.fromkeys(notes), *([finding.published] if finding.published else [])]


def _print_groups(console: Console, report: Report) -> None:
    """Print a summary of the ratios of every group of cases that several findings belong to."""
    for group, summaries in report.groups.items():
        if sum(finding.group == group for finding in report.findings) > 1:
            section(console, f"All {group}")
            for summary in summaries:
                worst = f"{format_ratio(summary.worst)} ({summary.worst_finding}, {summary.worst_case})"
                mean = f"{format_ratio(summary.geometric_mean)} (geometric)"
                rows = (summary.label, f"{summary.count} cases"), ("  mean", mean), ("  worst", worst)
                console.print(key_value_table(rows))


def _print_summary(console: Console, report: Report, device: Device) -> None:
    verdicts = report.verdicts
    if not verdicts:
        return
    reached = [verdict.reached for verdict in verdicts]
    counts = {"reached": True, "missed": False, "not measured": None}.items()
    section(console, "Targets", ", ".join(f"{reached.count(answer)} {name}" for name, answer in counts))
    rows = [
        (finding.name, _describe_target(verdict.target, device), _format_value(verdict), verdict_cells(verdict)[1])
        for finding in report.findings
        for verdict in finding.verdicts
        if verdict.reached is not True
    ]
    missed = table("missed or not measured", "target", "measured", "", rows=rows, left=2)
    console.print(missed if rows else "All targets are reached.")
    _print_peaks(console, report.peaks, "best of the whole run")


def _format_value(verdict: Verdict) -> str:
    if verdict.value is None:
        return "–"
    return format_duration(verdict.value) if verdict.target.measure == "seconds" else f"{verdict.value:.3g}"


# -- tables ----------------------------------------------------------------------------------------------------------


def finding_table(finding: Finding) -> Table:
    """Return the table of a finding, without the columns that are empty in every row.

    A finding of a single case has a row for each contender with times. A finding of a group has a row for each case; if
    there are two or more, it also has rows with the geometric mean and the worst of the ratios.
    """
    if finding.group:
        rows = [_case_cells(finding, row) for row in finding.rows]
        rows += _summary_rows(finding) if len(rows) > 1 else []
    else:
        rows = [_contender_cells(finding, entry) for entry in finding.entries if entry.seconds]
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
    limit, sign = verdict_cells(verdict)
    return {
        NAME: Text(entry.label, style="bold" if is_first else "red" if entry.wrong else ""),
        "time": format_duration(entry.median),
        "rate": format_amount(finding.work / entry.median, finding.unit) if finding.work else "",
        "memory": "" if entry.memory is None else format_amount(entry.memory, "B"),
        "ratio": comparison,
        "target": limit,
        " ": sign,
    }


def _case_cells(finding: Finding, row: Row) -> Cells:
    """Return the cells of a case of a group.

    The cells are the case's name, the time of every contender, the ratio of every contender that is no peer, and
    Sightline's time divided by that of the contender `finding.beside`. A point of a series also has two cells of
    Sightline: the time per token, and the memory beyond inputs and outputs.
    """
    labels, cells = finding.labels(), Cells({NAME: Text(row.name, style="bold")})
    entries = {name: row.entry(name) for name in labels}
    for name, entry in entries.items():
        cells[labels[name]] = format_duration(entry.median) if entry else "–"
    for name, entry in entries.items():
        if name not in finding.peers:
            cells[_ratio_title(name, labels[name])] = format_ratio(finding.ratio(row, entry)) if entry else "–"
    ours, other = entries.get("sightline"), entries.get(finding.beside)
    if ours and other:
        cells[f"over {other.label}"] = format_ratio(other.speedup_over(ours))
    if ours and finding.axis:
        extra = row.extra_bytes(ours)
        cells["per token"] = format_duration(ours.median / row.n)
        cells["extra memory"] = "–" if extra is None else format_amount(extra, "B")
    return cells


def _summary_rows(finding: Finding) -> list[Cells]:
    """Return the last rows of a group's table: the geometric mean and the worst of the ratios; [] without ratios."""
    summaries = summarise([finding])
    if not summaries:
        return []
    mean = {_ratio_title(each.contender, each.label): format_ratio(each.geometric_mean) for each in summaries}
    worst = {_ratio_title(each.contender, each.label): format_ratio(each.worst) for each in summaries}
    return [{NAME: Text("geometric mean", style="dim")} | mean, {NAME: Text("worst", style="dim")} | worst]


def _ratio_title(name: str, label: str) -> str:
    return "ratio" if name == "sightline" else f"{label} ratio"


def verdict_cells(verdict: Verdict | None) -> list[Any]:
    """Return the limit of a verdict's target, and the sign for reached or missed; two empty cells without a verdict."""
    if verdict is None:
        return ["", ""]
    sign, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "dim")}[verdict.reached]
    return [_format_limit(verdict.target), Text(sign, style=style)]


def _format_limit(target: Target) -> str:
    """Return the limit of a target as text for the column "target" of a table."""
    sign = "≥" if target.at_least else "≤"
    if target.measure == "seconds":
        return f"{sign} {format_duration(target.limit)}"
    return f"{sign} {target.limit:g}" + ("×" if target.measure in ("faster", "slower") else "")


if __name__ == "__main__":
    sys.exit(main())
