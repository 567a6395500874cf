"""`python -m benchmarks`: time Sightline and other libraries on named problems, in turn."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from rich.console import Console
from rich.progress import track
from rich.text import Text

from sightline.cli.console import make_console, note, section
from sightline.cpu.runtime.thread_count import usable_processors
from sightline.errors import ParameterError, SightlineError

from . import cpu_problems, cuda_problems
from .core import Problem, Row
from .cuda import Gpu
from .measure import Cpu, format_error, measure
from .report import format_ratio, notes_of, save, summarise, table_of

DEVICES: dict[str, type[Cpu]] = {"cpu": Cpu, "cuda": Gpu}
PROBLEMS: dict[str, tuple[Problem, ...]] = {"cpu": cpu_problems.PROBLEMS, "cuda": cuda_problems.PROBLEMS}
QUICK_SECONDS = 0.2  # time of one table in a quick run
QUICK_WARNING = "A quick run: tiny sizes and two rounds. Its times and ratios mean nothing."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected benchmarks. Return 1 for a wrong output or an error of Sightline, and 2 for a wrong option."""
    options = parser().parse_args(arguments)
    try:
        return bench(options)
    except SightlineError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times Sightline and every installed peer library on named problems, alternating between them, "
        "after each output was checked against the float64 definition. The extra `bench` installs the peers.",
    )
    add = command.add_argument
    devices = "cuda: a GPU, CUDA or ROCm, with its own problems and peers"
    add("--device", choices=tuple(DEVICES), default="cpu", help=devices)
    only = "make tables whose name contains WORD or matches it as a pattern"
    add("--only", action="append", metavar="WORD", help=only)
    add("--list", action="store_true", help="list the tables and their targets, and stop")
    add("--seconds", type=float, help="time of one table (default: 10; 2 on a GPU)")
    add("--quick", action="store_true", help="tiny sizes, to test that everything runs; times and ratios mean nothing")
    add("--json", metavar="PATH", help="write all results to PATH, with the time of every round")
    return command


def select(problems: Sequence[Problem], only: Sequence[str] = ()) -> list[list[Problem]]:
    """Return the problems of each table whose name contains one of the patterns; () selects all."""
    patterns = [f"*{word}*" for word in only or ("",)]
    tables = groupby(problems, lambda problem: problem.title)
    selected = [list(found) for name, found in tables if any(fnmatchcase(name, each) for each in patterns)]
    if not selected:
        raise ParameterError(
            f"no problem called {' or '.join(only)}",
            "names from `python -m benchmarks --list` with the same --device, or patterns of names",
            f'--only "{problems[0].title}"',
        )
    return selected


def bench(options: argparse.Namespace) -> int:
    """Run the selected benchmarks. Return 1 if Sightline gave a wrong output or raised an error, else 0."""
    console = make_console()
    kind = DEVICES[options.device]
    seconds = kind.seconds if options.seconds is None else options.seconds
    if not 0 < seconds < math.inf:
        raise ParameterError(f"--seconds {seconds}", "a time above 0 seconds", "--seconds 10")
    tables = select(PROBLEMS[options.device], options.only or ())
    if options.list:
        for first, *_ in tables:
            console.print(Text.assemble((first.title, "cyan"), "  ", (first.about, "dim")))
            for name, limit in first.targets.items():
                console.print(f"    {name}: at least {limit:g} times Sightline's time")
        return 0
    device = kind(usable_processors())
    console.print(Text("softmax(Q Kᵀ / √d_k + M) V   beside other libraries and measured peaks", style="bold"))
    note(console, device.description)
    rows = run(console, tables, device, seconds, options.quick, options.json)
    for group in dict.fromkeys(problem.group for problem, _ in rows if problem.group):
        section(console, f"All {group}")
        for title, (mean, worst, where) in summarise([row for row in rows if row[0].group == group]).items():
            console.print(f"{title}: geometric mean {format_ratio(mean)}, worst {format_ratio(worst)} ({where})")
    if options.quick:
        console.print(Text(f"\n{QUICK_WARNING}", style="yellow"))
    if options.json:
        console.print(f"Wrote {options.json}")
    return 1 if any(each.has_failed for _, found in rows for each in found) else 0


def run(
    console: Console, tables: list[list[Problem]], device: Cpu, seconds: float, is_quick: bool, path: str | None
) -> list[Row]:
    """Measure one table after the other, and print it. Unless `path` is None, all results are saved after each."""
    rows = list[Row]()
    hidden = not console.is_terminal
    for problems in track(tables, "timing", console=console, transient=True, auto_refresh=False, disable=hidden):
        found = list[Row]()
        for problem in problems:
            sized, of_problem = (problem.small(), QUICK_SECONDS) if is_quick else (problem, seconds)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecation warnings of peer libraries
                found.append((sized, measure(sized, device, of_problem / len(problems), is_quick)))
        section(console, problems[0].title, found[0][0].about)
        if any(each.seconds for _, measurements in found for each in measurements):
            console.print(table_of(found))
        for remark in notes_of(found):
            note(console, remark)
        rows += found
        if path:
            save(path, rows, device=device.description, threads=device.threads, seconds=seconds, quick=is_quick)
        try:
            device.synchronize()
        except Exception as error:  # after some errors every later call of a CUDA device fails
            console.print(f"The device no longer responds; the run stops here: {format_error(error)}")
            break
    return rows


if __name__ == "__main__":
    sys.exit(main())
