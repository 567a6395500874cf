"""Check and time the contenders of a benchmark: Sightline and other libraries.

In a round each contender has one timed turn. Rounds follow one another until the problem's timing budget is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sightline.cli.timing import interleave

from .cases import Benchmark, Case, Contender, HostCase, TimedCall
from .device import Device
from .report import Entry, Finding, Row

PEAK_TRIES = 2  # number of tries of the device's peak in every round
MIN_ROUNDS = 5
CALIBRATION_TRIES = 3  # untimed turns that decide how often a call of a group is repeated in a turn; the fastest counts
GROUP_PAUSE = 0.02  # seconds of sleep before a turn in a group of cases, whose contenders all use torch's threads


@dataclass
class Settings:
    """The settings of a run of `python -m benchmarks`."""

    device: Device
    seconds: float = 10.0  # timing budget of one problem
    quick: bool = False  # True for small versions of the problems and at least two rounds instead of `MIN_ROUNDS`
    on_progress: Callable[[str], Any] = lambda message: None  # a function called with a description of each step

    @property
    def rounds(self) -> int:
        return 2 if self.quick else MIN_ROUNDS

    def contenders(self, case: Case) -> list[Contender]:
        """Return the contenders of a case. Names that stand for no contender of the device are left out."""
        found = map(self.device.contender, case.contenders)
        return [contender for contender in found if contender is not None]


def run(benchmark: Benchmark, settings: Settings) -> Finding:
    """Measure a benchmark and return its finding. `python -m benchmarks` calls this function for each benchmark.

    If an output of Sightline is wrong, the finding has no times of that case, and says why.
    """
    selected: Benchmark = benchmark.small() if settings.quick else benchmark
    contenders = [each for case in selected.cases for each in settings.contenders(case)]
    missing = next((reason for each in contenders if not each.is_peer and (reason := each.skip_reason())), None)
    finding = Finding(
        selected.name,
        selected.description,
        flops=selected.flops if selected.peak else 0,
        bytes_moved=selected.bytes_moved,
        peak=settings.device.peaks.measured_name(selected.peak) if selected.peak else "",
        axis=selected.axis,
        published=selected.published,
        group=selected.group,
        peers=selected.peers or tuple(dict.fromkeys(each.name for each in contenders if each.is_peer)),
        beside=selected.beside,
        failed=missing,
        refused=missing is not None,
    )
    with _pause_at_most(settings.device, GROUP_PAUSE if selected.group else settings.device.pause):
        for case in selected.cases if finding.failed is None else ():
            row = Row(case.name)
            outcome = row if selected.group else finding
            try:
                _measure_case(case, selected, settings, row)
            except Exception as error:  # the failure is recorded, and the run continues with the other problems
                outcome.failed = str(error) if isinstance(error, WrongAnswerError) else _format_error(error)
                outcome.wrong, outcome.refused = getattr(error, "wrong", False), getattr(error, "refused", False)
            if selected.axis and not row.failed:
                row.n, row.outputs = case.n, case.output_bytes
                row.coordinate = case.n if selected.axis == "n" else case.allowed / math.prod(case.extent)
            if not finding.failed:
                finding.rows.append(row)
    return finding


@contextmanager
def _pause_at_most(device: Device, seconds: float) -> Iterator[None]:
    before, device.pause = device.pause, min(device.pause, seconds)
    try:
        yield
    finally:
        device.pause = before


class WrongAnswerError(Exception):
    """Sightline has no correct output for a case.

    `wrong` is True if there is a wrong output. `refused` is True if Sightline cannot compute the problem on this host.
    If `wrong` and `refused` are False, Sightline raised an error.
    """

    def __init__(self, message: str, *, wrong: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.wrong, self.refused = wrong, refused


def _measure_case(case: Case, benchmark: Benchmark, settings: Settings, row: Row) -> None:
    """Check and time every contender of a case. Store in `row` the contenders' entries, Sightline's first."""
    title = case.name if case is benchmark else f"{benchmark.name}: {case.name}"
    if isinstance(case, HostCase):
        settings.on_progress(title)
        row.entries = [Entry(name, name, seconds) for name, seconds in case.measure_seconds(settings.device).items()]
        return
    inputs, entries, prepared = case.make_inputs(), list[Entry](), dict[str, TimedCall]()
    with ExitStack() as stack:
        for contender in settings.contenders(case):
            settings.on_progress(f"{title}: {contender.label}, first call and check")
            entry = Entry(contender.name, contender.label, note=contender.note)
            entry.skip_reason = refusal = contender.skip_reason() or contender.refuses(case)
            if not refusal:
                try:
                    measures_memory = not contender.has_arena and bool(benchmark.axis or not benchmark.group)
                    call = _prepare_and_check(contender, case, inputs, settings, entry, stack, measures_memory)
                    prepared[entry.name] = call
                except Exception as error:  # peers raise many kinds of errors
                    entry.skip_reason = _format_error(error)
            may_be_missing = contender.is_peer or bool(refusal and entries)  # as a variant that refuses the case
            entries.append(entry)
            if entry.wrong and not contender.is_peer:
                message = f"{entry.label} uses {entry.budget:.3g} times its rounding-error budget"
                raise WrongAnswerError(message, wrong=True)
            if entry.skip_reason and not may_be_missing:
                raise WrongAnswerError(f"{entry.label} did not run: {entry.skip_reason}", refused=bool(refusal))
        settings.on_progress(f"{title}: timing {len(prepared)} contenders")
        tries, seconds = CALIBRATION_TRIES if benchmark.group else 1, settings.seconds / len(benchmark.cases)

        def measure_peak() -> None:
            if benchmark.peak:
                row.peaks.append(settings.device.peaks.measure(benchmark.peak, PEAK_TRIES))

        turns = {name: partial(settings.device.time_calls, call) for name, call in prepared.items()}
        times = interleave(turns, settings.rounds, seconds, tries, measure_peak)
    for entry in entries:
        entry.seconds = times.get(entry.name, [])
    row.entries = entries


def _prepare_and_check(
    contender: Contender,
    case: Case,
    inputs: Any,
    settings: Settings,
    entry: Entry,
    stack: ExitStack,
    measures_memory: bool,
) -> TimedCall:
    """Return the contender's call, after a first call and a check of its results.

    The time and the memory of the first call, and the result of the check, are stored in `entry`. `stack` gets the
    function that releases the contender's memory.
    """
    device = settings.device
    device.set_threads(settings.device.threads)
    started = time.perf_counter()
    prepared = contender.prepare(case, inputs, settings.device.threads)
    stack.callback(prepared.close)
    device.set_threads(prepared.threads)
    prepared.call(prepared.setup())
    device.synchronize()
    entry.first_seconds = time.perf_counter() - started
    if measures_memory:
        entry.memory = device.memory(prepared)
    prepared, note = device.prepare_for_timing(prepared, case)
    entry.note = "; ".join(message for message in (entry.note, note) if message)
    reference = contender.reference(case)
    if reference is not None:  # the checked call has the form that is timed, such as a CUDA graph
        entry.budget = reference.share_of_budget(prepared, inputs)
    return prepared


def _format_error(error: Exception) -> str:
    """Return the error's type and its whole message, since the last line of a message may say what to do."""
    return f"{type(error).__name__}: {str(error).strip()}"
