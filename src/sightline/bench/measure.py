"""Problems measured: contenders in turn, round after round, until the time for the problem is spent."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import first_call, planning
from .check import share_of_budget
from .contenders import Contender, Ready
from .device import Device
from .peaks import Peaks
from .races import FirstCall, Inputs, Planning, Problem, Race, Series
from .report import Entry, Finding, Point

__all__ = ["Settings", "run"]

SHORTEST = 0.005  # s of one turn: shorter calls are repeated within it
PROCESSES = 5  # fresh ones, for first calls
PEAK_TRIES = 3  # beside every problem
ROUNDS = 5  # at least, however slow


@dataclass
class Settings:
    """How a run measures."""

    device: Device
    seconds: float = 10.0  # for the rounds of one race
    quick: bool = False  # small sizes, two rounds
    peers: Sequence[Contender] | None = None  # in place of the device's
    step: Callable[[str], Any] = lambda words: None  # told what is being done

    @property
    def threads(self) -> int:
        return self.device.threads

    @property
    def peaks(self) -> Peaks:
        return self.device.peaks

    @property
    def rounds(self) -> int:
        return 2 if self.quick else ROUNDS

    def contender(self, name: str) -> Contender | None:
        """One of our own, or a peer that takes part in this run."""
        peers = self.device.peers.values() if self.peers is None else self.peers
        return self.device.own.get(name) or next((peer for peer in peers if peer.name == name), None)


def run(problem: Problem, settings: Settings) -> Finding:
    """What is found of a problem; nothing of ours that is wrong is reported."""
    smaller = problem.small() if settings.quick else problem
    if isinstance(smaller, Race):
        return _race(smaller, settings)
    if isinstance(smaller, Series):
        return _series(smaller, settings)
    return _planning(smaller, settings) if isinstance(smaller, Planning) else _first_call(smaller, settings)


def _race(race: Race, settings: Settings) -> Finding:
    finding = Finding(
        race.name,
        race.about,
        flops=race.flops if race.peak else 0,
        bytes_moved=race.bytes_moved,
        peak=settings.peaks.entry(race.peak) if race.peak else "",
        threads=settings.threads,
        published=race.published,
        peers=tuple(name for name in race.against if name not in settings.device.own),
    )
    try:
        finding.entries = _entries(race, settings, settings.seconds)
        if race.peak:
            settings.peaks.measure(race.peak, PEAK_TRIES)
    except Exception as error:  # so that what was found of other problems is not lost
        _fail(finding, error)
    finding.best = settings.peaks.best.get(finding.peak)
    return finding


def _series(series: Series, settings: Settings) -> Finding:
    finding = Finding(series.name, series.about, axis=series.axis, threads=settings.threads)
    for race in series.points:
        try:
            entries = _entries(race, settings, settings.seconds / len(series.points), f"{series.name}, ")
        except Exception as error:  # as in `_race`
            _fail(finding, error, f"{race.name}: ")
            break
        at = race.n if series.axis == "n" else race.allowed / (race.B * race.H * race.n * race.m)
        finding.points.append(Point(at, race.n, race.output_bytes, entries))
    return finding


def _first_call(problem: FirstCall, settings: Settings) -> Finding:
    settings.step(f"{problem.name}: fresh processes")
    finding = Finding(problem.name, problem.about, threads=settings.threads)
    try:
        times = first_call.timed(problem.n, problem.d, 1 if settings.quick else PROCESSES)
    except subprocess.CalledProcessError as error:
        finding.failed = error.stderr.strip() or str(error)
    else:
        finding.entries = [Entry(name, name, seconds) for name, seconds in times.items()]
    return finding


def _planning(problem: Planning, settings: Settings) -> Finding:
    settings.step(f"{problem.name}: new masks")
    finding = Finding(problem.name, problem.about, threads=settings.threads)
    try:
        times = planning.timed(problem, settings.device, settings.rounds)
    except Exception as error:  # as in `_race`
        _fail(finding, error)
    else:
        finding.entries = [Entry(name, name, seconds) for name, seconds in times.items()]
    return finding


class WrongAnswerError(Exception):
    """Ours has no right answer, so nothing of the problem is reported: it is `wrong`, `refused`, or an error came."""

    def __init__(self, words: str, *, wrong: bool = False, refused: bool = False) -> None:
        super().__init__(words)
        self.wrong, self.refused = wrong, refused


def _fail(finding: Finding, error: Exception, of: str = "") -> None:
    """Put down why nothing of a problem is reported."""
    if isinstance(error, WrongAnswerError):
        finding.failed, finding.wrong, finding.refused = f"{of}{error}", error.wrong, error.refused
    else:
        finding.failed = of + _said(error)


def _entries(race: Race, settings: Settings, seconds: float, of: str = "") -> list[Entry]:
    """Every contender of a race, ours first."""
    inputs = Inputs.of(race)
    entries: list[Entry] = []
    ready: dict[str, Ready] = {}
    for name in ("sightline", *race.against):
        contender = settings.contender(name)
        if contender is None:
            continue
        settings.step(f"{of}{race.name}: {contender.label}, first call and check")
        entry = Entry(name, contender.label, note=contender.note)
        entries.append(entry)
        prepared = _prepared(contender, race, inputs, settings, entry)
        if name in settings.device.own and entry.wrong:
            words = f"{entry.label} uses {entry.budget:.3g} times its budget of rounding errors"
            raise WrongAnswerError(words, wrong=True)
        refused = entry.absent is not None and entry.absent == _reason(contender, race)
        if prepared is None and (name == "sightline" or (name in settings.device.own and not refused)):
            raise WrongAnswerError(f"{entry.label} did not run: {entry.absent}", refused=refused)
        if prepared is not None:
            ready[name] = prepared
    settings.step(f"{of}{race.name}: {len(ready)} in turn")
    times = _in_turn(ready, settings, seconds)
    for entry in entries:
        entry.seconds = times.get(entry.name, [])
    for prepared in ready.values():
        prepared.close()
    return entries


def _reason(contender: Contender, race: Race) -> str | None:
    """Why a contender takes no part, which is no fault of it."""
    return contender.absent() or contender.refuses(race)


def _prepared(contender: Contender, race: Race, inputs: Inputs, settings: Settings, entry: Entry) -> Ready | None:
    """The contender after its first call, checked; None with the reason in the entry where it has no answer."""
    entry.absent = _reason(contender, race)
    if entry.absent:
        return None
    device = settings.device
    device.enter(settings.threads)
    started = time.perf_counter()
    try:
        ready = contender.prepare(race, inputs, settings.threads)
        device.enter(ready.threads)
        ready.call(ready.start())
        device.finish()
        entry.first = time.perf_counter() - started
        if not contender.arena:
            entry.memory = device.memory(ready)
        ready, note = device.readied(ready, race)
        entry.note = "; ".join(words for words in (entry.note, note) if words)
        judged = contender.judged_as(race)
        if judged is not None:  # as it will be timed
            entry.budget = _budget(ready, judged, inputs)
    except Exception as error:  # whatever another library may raise; shown, and for ours the end of the problem
        entry.absent = _said(error)
        return None
    return ready


def _budget(ready: Ready, race: Race, inputs: Inputs) -> float:
    """The share of its budget of errors that a contender uses, of long gradients by some queries' part in them."""
    looked_at = inputs if ready.reseed is None else inputs.checked
    if ready.reseed is not None:
        ready.reseed(looked_at.d_output)
    found = share_of_budget(race, looked_at, ready.answers(ready.call(ready.start())))
    if ready.reseed is not None:
        ready.reseed(inputs.d_output)
    return found


def _said(error: Exception) -> str:
    """All of it: the cure may stand in the last line."""
    return f"{type(error).__name__}: {str(error).strip()}"


def _in_turn(ready: dict[str, Ready], settings: Settings, seconds: float) -> dict[str, list[float]]:
    """Seconds of a call, one number a round, for each; who begins changes from round to round."""
    names = list(ready)
    times: dict[str, list[float]] = {name: [] for name in names}
    repeats = {name: _repeats(ready[name], settings.device) for name in names}
    ends = time.perf_counter() + seconds
    collecting = gc.isenabled()
    gc.disable()
    try:
        turn = 0
        while turn < settings.rounds or time.perf_counter() < ends:
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(settings.device.turn(ready[name], repeats[name]))
            turn += 1
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return times


def _repeats(ready: Ready, device: Device) -> int:
    """Calls in one turn, so that it is not too short to be timed."""
    count = 1
    while (taken := device.turn(ready, count) * count) < SHORTEST:
        count = max(2 * count, min(int(count * SHORTEST / max(taken, 1e-9)), 100 * count))
    return count
