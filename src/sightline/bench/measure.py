"""Measure benchmarks: contenders are timed alternately, in rounds, until the problem's time budget is used."""

from __future__ import annotations

import gc
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import first_call, mask_planning
from .check import share_of_budget
from .device import Device
from .implementations import Implementation, PreparedCall
from .peaks import Peaks
from .report import Entry, Finding, Point
from .workloads import Benchmark, FirstCall, Inputs, Planning, Series, Workload

__all__ = ["Settings", "run"]

MIN_TIMED_SECONDS = 0.005  # of one turn: shorter calls are repeated within a turn
FRESH_PROCESSES = 5  # processes that time first calls
PEAK_TRIES = 3  # tries of the peak after every problem
MIN_ROUNDS = 5


@dataclass
class Settings:
    """Settings of a run."""

    device: Device
    seconds: float = 10.0  # timing budget of one problem
    quick: bool = False  # small sizes, two rounds
    peers: Sequence[Implementation] | None = None  # replaces the device's peers
    on_progress: Callable[[str], Any] = lambda message: None  # called with a description of each step

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
        """Return the variant of Sightline or the peer of that name; None if this run has none."""
        peers = self.device.peers.values() if self.peers is None else self.peers
        return self.device.variants.get(name) or next((peer for peer in peers if peer.name == name), None)


def run(benchmark: Benchmark, settings: Settings) -> Finding:
    """Measure a benchmark. If an output of Sightline is wrong, the finding has no times."""
    selected = benchmark.small() if settings.quick else benchmark
    if isinstance(selected, Workload):
        return _measure_workload(selected, settings)
    if isinstance(selected, Series):
        return _measure_series(selected, settings)
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
    except Exception as error:  # the run continues with the other problems
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


def _measure_host(benchmark: FirstCall | Planning, settings: Settings) -> Finding:
    """Measure a benchmark without contenders: first calls, or the planning of masks."""
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
    """Sightline has no correct output: it is `wrong`, the problem is `refused`, or an error was raised."""

    def __init__(self, message: str, *, wrong: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.wrong, self.refused = wrong, refused


def _record_failure(finding: Finding, error: Exception, prefix: str = "") -> None:
    """Store in the finding why the problem has no times."""
    if isinstance(error, WrongAnswerError):
        finding.failed, finding.wrong, finding.refused = f"{prefix}{error}", error.wrong, error.refused
    else:
        finding.failed = prefix + _format_error(error)


def _measure_entries(workload: Workload, settings: Settings, seconds: float, prefix: str = "") -> list[Entry]:
    """Check and time every contender of a workload; the entry of Sightline is the first."""
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
    """Return why a contender cannot run the workload here, which is not an error; None if it can."""
    return implementation.skip_reason() or implementation.refuses(workload)


def _prepare_and_check(
    implementation: Implementation, workload: Workload, inputs: Inputs, settings: Settings, entry: Entry
) -> PreparedCall | None:
    """Return the contender's call after a first call and a check of its output.

    None if there is no output; then the entry has the reason.
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
        if reference is not None:  # the check uses the call in the form that is timed
            entry.budget = _budget_used(prepared, reference, inputs)
    except Exception as error:  # peers raise many kinds of errors; for Sightline, `_measure_entries` ends the problem
        entry.skip_reason = _format_error(error)
        return None
    return prepared


def _budget_used(prepared: PreparedCall, workload: Workload, inputs: Inputs) -> float:
    """Return the share of the rounding-error budget that a contender uses; a long d_output is sampled."""
    checked_inputs = inputs if prepared.set_d_output is None else inputs.with_sampled_d_output
    if prepared.set_d_output is not None:
        prepared.set_d_output(checked_inputs.d_output)
    share = share_of_budget(workload, checked_inputs, prepared.results(prepared.call(prepared.setup())))
    if prepared.set_d_output is not None:
        prepared.set_d_output(inputs.d_output)
    return share


def _format_error(error: Exception) -> str:
    """Return the type and the whole message, since the last line may hold the cure."""
    return f"{type(error).__name__}: {str(error).strip()}"


def _interleave(prepared: dict[str, PreparedCall], settings: Settings, seconds: float) -> dict[str, list[float]]:
    """Return the seconds per call of every contender, one number per round; the order rotates from round to round."""
    names = list(prepared)
    times: dict[str, list[float]] = {name: [] for name in names}
    repeats = {name: _calibrate_repeats(prepared[name], settings.device) for name in names}
    deadline = time.perf_counter() + seconds
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        round_index = 0
        while round_index < settings.rounds or time.perf_counter() < deadline:
            for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
                times[name].append(settings.device.time_calls(prepared[name], repeats[name]))
            round_index += 1
            gc.collect()
    finally:
        if gc_was_enabled:
            gc.enable()
    return times


def _calibrate_repeats(prepared: PreparedCall, device: Device) -> int:
    """Return the number of calls that take at least `MIN_TIMED_SECONDS`."""
    count = 1
    while (taken := device.time_calls(prepared, count) * count) < MIN_TIMED_SECONDS:
        count = max(2 * count, min(int(count * MIN_TIMED_SECONDS / max(taken, 1e-9)), 100 * count))
    return count
