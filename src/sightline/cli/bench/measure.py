"""Measure benchmarks. In every round each contender is timed once, until the problem's timing budget is used."""

from __future__ import annotations

import gc
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from . import first_call, mask_planning
from .cases import Case, CaseContender, CaseGroup
from .check import share_of_budget
from .device import Device
from .implementations import Implementation, PreparedCall
from .peaks import Peaks
from .report import CaseResult, Entry, Finding, Point
from .workloads import Benchmark, FirstCall, Inputs, Planning, Series, Workload

MIN_TIMED_SECONDS = 0.005  # least seconds of a contender's turn; a shorter call is repeated within the turn
FRESH_PROCESSES = 5  # number of processes that time first calls
PEAK_TRIES = 3  # number of tries of the device's peak after every problem
MIN_ROUNDS = 5
CALIBRATION_TRIES = 3  # turns of a case's contender by which its calls are counted; a disturbance of one does not count
CASE_PAUSE = 0.02  # seconds of sleep before a turn in a group of cases, whose contenders share torch's threads


@dataclass
class Settings:
    """The settings of a benchmark run."""

    device: Device
    seconds: float = 10.0  # timing budget of one problem
    quick: bool = False  # True for small versions of the problems and at least two rounds instead of `MIN_ROUNDS`
    peers: Sequence[Implementation] | None = None  # the peers of this run; None for those of the device
    on_progress: Callable[[str], Any] = lambda message: None  # a function called with a description of each step

    @property
    def threads(self) -> int:
        return self.device.threads

    @property
    def peaks(self) -> Peaks:
        return self.device.peaks

    @property
    def rounds(self) -> int:
        return 2 if self.quick else MIN_ROUNDS

    def implementation(self, name: str) -> Implementation | None:
        """Return the variant of Sightline or the peer called `name`; None if this run has no contender of that name."""
        peers = self.device.peers.values() if self.peers is None else self.peers
        return self.device.variants.get(name) or next((peer for peer in peers if peer.name == name), None)


def run(benchmark: Benchmark, settings: Settings) -> Finding:
    """Measure a benchmark and return its finding. If an output of Sightline is wrong, the finding reports no times."""
    selected = benchmark.small() if settings.quick else benchmark
    if isinstance(selected, Workload):
        return _measure_workload(selected, settings)
    if isinstance(selected, Series):
        return _measure_series(selected, settings)
    if isinstance(selected, CaseGroup):
        return _measure_cases(selected, settings)
    return _measure_host(selected, settings)


def _measure_workload(workload: Workload, settings: Settings) -> Finding:
    finding = Finding(
        workload.name,
        workload.description,
        flops=workload.flops if workload.peak else 0,
        bytes_moved=workload.bytes_moved,
        peak=settings.peaks.measured_name(workload.peak) if workload.peak else "",
        threads=settings.threads,
        published=workload.published,
        peers=tuple(name for name in workload.baselines if name not in settings.device.variants),
    )
    try:
        finding.entries = _measure_entries(workload, settings, settings.seconds)
        if workload.peak:
            settings.peaks.measure(workload.peak, PEAK_TRIES)
    except Exception as error:  # the failure is recorded, and the run continues with the other problems
        _record_failure(finding, error)
    finding.best = settings.peaks.best.get(finding.peak)
    return finding


def _measure_series(series: Series, settings: Settings) -> Finding:
    finding = Finding(series.name, series.description, axis=series.axis, threads=settings.threads)
    for workload in series.points:
        try:
            entries = _measure_entries(workload, settings, settings.seconds / len(series.points), f"{series.name}, ")
        except Exception as error:  # as in `_measure_workload`
            _record_failure(finding, error, f"{workload.name}: ")
            break
        at = workload.n if series.axis == "n" else workload.allowed / math.prod(workload.extent)
        finding.points.append(Point(at, workload.n, workload.output_bytes, entries))
    return finding


def _measure_cases(group: CaseGroup, settings: Settings) -> Finding:
    peers = (group.peer, *([group.subtracted] if group.subtracted else []))
    finding = Finding(group.name, group.description, threads=settings.threads, group=group.group, peers=peers)
    finding.subtracted = group.subtracted
    missing = group.skip_reason()
    if missing:
        finding.failed, finding.refused = missing, True
        return finding
    with _pause_at_most(settings.device, CASE_PAUSE):
        for case in group.cases:
            result = CaseResult(case.name)
            finding.cases.append(result)
            try:
                result.entries = _measure_case(case, settings, settings.seconds / len(group.cases), f"{group.name}: ")
            except Exception as error:  # as in `_measure_workload`
                _record_failure(result, error)
    return finding


@contextmanager
def _pause_at_most(device: Device, seconds: float) -> Iterator[None]:
    before, device.pause = device.pause, min(device.pause, seconds)
    try:
        yield
    finally:
        device.pause = before


def _measure_case(case: Case, settings: Settings, seconds: float, prefix: str) -> list[Entry]:
    """Check and time every contender of a case. Return the contenders' entries, Sightline's first."""
    entries: list[Entry] = []
    prepared: dict[str, PreparedCall] = {}
    settings.device.set_threads(settings.threads)
    with ExitStack() as stack:
        for contender in case.contenders(settings.threads):
            stack.callback(contender.prepared.close)
            settings.on_progress(f"{prefix}{case.name}: {contender.label}, first call and check")
            entries.append(_check_contender(contender))
            if entries[-1].skip_reason is None:
                prepared[contender.name] = contender.prepared
        settings.on_progress(f"{prefix}{case.name}: timing {len(prepared)} contenders")
        times = _interleave(prepared, settings, seconds, CALIBRATION_TRIES)
    for entry in entries:
        entry.seconds = times.get(entry.name, [])
    return entries


def _check_contender(contender: CaseContender) -> Entry:
    """Call a contender of a case, check its results and return its entry without times.

    Raises
    ------
    WrongAnswerError
        The contender is Sightline's, and its results are wrong or it raised an error.
    """
    entry = Entry(contender.name, contender.label)
    try:
        contender.prepared.call(contender.prepared.setup())
        if contender.share_of_budget is not None:
            entry.budget = contender.share_of_budget()
    except Exception as error:  # peers raise many kinds of errors
        entry.skip_reason = _format_error(error)
        if not contender.is_peer:
            raise WrongAnswerError(f"{entry.label} did not run: {entry.skip_reason}") from error
    if entry.wrong and not contender.is_peer:
        raise WrongAnswerError(f"{entry.label} uses {entry.budget:.3g} times its rounding-error budget", wrong=True)
    return entry


def _measure_host(benchmark: FirstCall | Planning, settings: Settings) -> Finding:
    """Measure a benchmark without contenders: the first calls of a problem, or the host's work for new masks."""
    settings.on_progress(benchmark.name)
    finding = Finding(benchmark.name, benchmark.description, threads=settings.threads)
    try:
        if isinstance(benchmark, Planning):
            times = mask_planning.measure_seconds(benchmark, settings.device, settings.rounds)
        else:
            times = first_call.measure_seconds(benchmark.n, benchmark.d, 1 if settings.quick else FRESH_PROCESSES)
        finding.entries = [Entry(name, name, seconds) for name, seconds in times.items()]
    except subprocess.CalledProcessError as error:
        finding.failed = error.stderr.strip() or str(error)
    except Exception as error:  # as in `_measure_workload`
        _record_failure(finding, error)
    return finding


class WrongAnswerError(Exception):
    """Sightline has no correct output.

    `wrong` is True if there is a wrong output, `refused` if Sightline cannot compute the problem here. If both are
    False, Sightline raised an error.
    """

    def __init__(self, message: str, *, wrong: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.wrong, self.refused = wrong, refused


def _record_failure(result: Finding | CaseResult, error: Exception, prefix: str = "") -> None:
    """Store in the result why its problem has no times, as a text that starts with `prefix`."""
    if isinstance(error, WrongAnswerError):
        result.failed, result.wrong, result.refused = f"{prefix}{error}", error.wrong, error.refused
    else:
        result.failed = prefix + _format_error(error)


def _measure_entries(workload: Workload, settings: Settings, seconds: float, prefix: str = "") -> list[Entry]:
    """Check and time every contender of a workload. Return the contenders' entries, Sightline's first."""
    inputs = Inputs.of(workload)
    entries: list[Entry] = []
    prepared: dict[str, PreparedCall] = {}
    for name in ("sightline", *workload.baselines):
        implementation = settings.implementation(name)
        if implementation is None:
            continue
        settings.on_progress(f"{prefix}{workload.name}: {implementation.label}, first call and check")
        entry = Entry(name, implementation.label, note=implementation.note)
        entries.append(entry)
        prepared_call = _prepare_and_check(implementation, workload, inputs, settings, entry)
        if name in settings.device.variants and entry.wrong:
            message = f"{entry.label} uses {entry.budget:.3g} times its rounding-error budget"
            raise WrongAnswerError(message, wrong=True)
        refused = entry.skip_reason is not None and entry.skip_reason == _skip_reason(implementation, workload)
        if prepared_call is None and (name == "sightline" or (name in settings.device.variants and not refused)):
            raise WrongAnswerError(f"{entry.label} did not run: {entry.skip_reason}", refused=refused)
        if prepared_call is not None:
            prepared[name] = prepared_call
    settings.on_progress(f"{prefix}{workload.name}: timing {len(prepared)} contenders")
    times = _interleave(prepared, settings, seconds)
    for entry in entries:
        entry.seconds = times.get(entry.name, [])
    for prepared_call in prepared.values():
        prepared_call.close()
    return entries


def _skip_reason(implementation: Implementation, workload: Workload) -> str | None:
    """Return why a contender cannot run the workload here; None if it can. Such a refusal is not an error."""
    return implementation.skip_reason() or implementation.refuses(workload)


def _prepare_and_check(
    implementation: Implementation, workload: Workload, inputs: Inputs, settings: Settings, entry: Entry
) -> PreparedCall | None:
    """Return the contender's call after a first call and a check of its results.

    None if the contender refuses the workload or raises an error; then `entry.skip_reason` says why.
    """
    entry.skip_reason = _skip_reason(implementation, workload)
    if entry.skip_reason:
        return None
    device = settings.device
    device.set_threads(settings.threads)
    started = time.perf_counter()
    try:
        prepared = implementation.prepare(workload, inputs, settings.threads)
        device.set_threads(prepared.threads)
        prepared.call(prepared.setup())
        device.synchronize()
        entry.first_seconds = time.perf_counter() - started
        if not implementation.has_arena:
            entry.memory = device.memory(prepared)
        prepared, note = device.prepare_for_timing(prepared, workload)
        entry.note = "; ".join(message for message in (entry.note, note) if message)
        reference = implementation.reference_workload(workload)
        if reference is not None:  # the checked call has the form that is timed, such as a CUDA graph
            entry.budget = _budget_used(prepared, reference, inputs)
    except Exception as error:  # peers raise many kinds of errors; if Sightline raises one, `_measure_entries` stops
        entry.skip_reason = _format_error(error)
        return None
    return prepared


def _budget_used(prepared: PreparedCall, workload: Workload, inputs: Inputs) -> float:
    """Return the share of the rounding-error budget that a contender's results use.

    If the contender can replace d_output, a d_output of many queries is replaced by a sample of them.
    """
    checked_inputs = inputs if prepared.set_d_output is None else inputs.with_sampled_d_output
    if prepared.set_d_output is not None:
        prepared.set_d_output(checked_inputs.d_output)
    share = share_of_budget(workload, checked_inputs, prepared.results(prepared.call(prepared.setup())))
    if prepared.set_d_output is not None:
        prepared.set_d_output(inputs.d_output)
    return share


def _format_error(error: Exception) -> str:
    """Return the error's type and its whole message, since the last line of a message may say what to do."""
    return f"{type(error).__name__}: {str(error).strip()}"


def _interleave(
    prepared: dict[str, PreparedCall], settings: Settings, seconds: float, tries: int = 1
) -> dict[str, list[float]]:
    """Return the seconds per call of every contender by name, one number per round.

    The order of the contenders within a round rotates from round to round.
    """
    names = list(prepared)
    times: dict[str, list[float]] = {name: [] for name in names}
    repeats = {name: _calibrate_repeats(prepared[name], settings.device, tries) for name in names}
    deadline = time.perf_counter() + seconds
    gc_was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # collections between rounds then visit only the objects of the timed calls
    try:
        round_index = 0
        while round_index < settings.rounds or time.perf_counter() < deadline:
            for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
                times[name].append(settings.device.time_calls(prepared[name], repeats[name]))
            round_index += 1
            gc.collect()
    finally:
        gc.unfreeze()
        if gc_was_enabled:
            gc.enable()
    return times


def _calibrate_repeats(prepared: PreparedCall, device: Device, tries: int = 1) -> int:
    """Return a number of calls that together take at least `MIN_TIMED_SECONDS`, by the shortest of `tries` turns."""
    count = 1
    while (taken := min(device.time_calls(prepared, count) for _ in range(tries)) * count) < MIN_TIMED_SECONDS:
        count = max(2 * count, min(int(count * MIN_TIMED_SECONDS / max(taken, 1e-9)), 100 * count))
    return count
