"""Problems measured: contenders in turn, round after round, until the time for the problem is spent."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .check import share_of_budget
from .contenders import OWN, Contender, Ready, set_threads
from .first_call import timed
from .memory import peak_memory
from .peaks import Peaks
from .peers import PEERS
from .races import FirstCall, Inputs, Problem, Race, Series
from .report import Entry, Finding, Point

__all__ = ["Settings", "run"]

PAUSE, SHORT_PAUSE = 0.25, 0.02  # s before every turn: other libraries' threads go on spinning for up to 0.2
SHORTEST = 0.005  # s of one turn: shorter calls are repeated within it
PROCESSES = 5  # fresh ones, for first calls
PEAK_TRIES = 3  # beside every problem
ROUNDS = 5  # at least, however slow


@dataclass
class Settings:
    """How a run measures."""

    threads: int
    seconds: float = 10.0  # for the rounds of one race
    quick: bool = False  # small sizes, two rounds
    peers: Sequence[Contender] = tuple(PEERS.values())
    peaks: Peaks = field(init=False)
    step: Callable[[str], Any] = lambda words: None  # told what is being done

    def __post_init__(self) -> None:
        self.peaks = Peaks(self.threads)

    @property
    def rounds(self) -> int:
        return 2 if self.quick else ROUNDS

    @property
    def pause(self) -> float:
        return SHORT_PAUSE if self.quick else PAUSE

    def contender(self, name: str) -> Contender | None:
        """One of our own, or a peer that takes part in this run."""
        return OWN.get(name) or next((peer for peer in self.peers if peer.name == name), None)


def run(problem: Problem, settings: Settings) -> Finding:
    """What is found of a problem; nothing of ours that is wrong is reported."""
    smaller = problem.small() if settings.quick else problem
    if isinstance(smaller, Race):
        return _race(smaller, settings)
    return _series(smaller, settings) if isinstance(smaller, Series) else _first_call(smaller, settings)


def _race(race: Race, settings: Settings) -> Finding:
    finding = Finding(
        race.name,
        race.about,
        flops=race.flops if race.peak else 0,
        bytes_moved=race.bytes_moved,
        peak=settings.peaks.entry(race.peak) if race.peak else "",
        threads=settings.threads,
    )
    try:
        finding.entries = _entries(race, settings, settings.seconds)
        if race.peak:
            settings.peaks.measure(race.peak, PEAK_TRIES)
    except WrongAnswerError as error:
        finding.failed, finding.wrong = str(error), error.wrong
    finding.best = settings.peaks.best.get(finding.peak)
    return finding


def _series(series: Series, settings: Settings) -> Finding:
    finding = Finding(series.name, series.about, axis=series.axis, threads=settings.threads)
    for race in series.points:
        try:
            entries = _entries(race, settings, settings.seconds / len(series.points), f"{series.name}, ")
        except WrongAnswerError as error:
            finding.failed, finding.wrong = f"{race.name}: {error}", error.wrong
            break
        at = race.n if series.axis == "n" else race.allowed / (race.B * race.H * race.n * race.m)
        finding.points.append(Point(at, race.n, race.output_bytes, entries))
    return finding


def _first_call(problem: FirstCall, settings: Settings) -> Finding:
    settings.step(f"{problem.name}: fresh processes")
    finding = Finding(problem.name, problem.about, threads=settings.threads)
    try:
        times = timed(problem.n, problem.d, 1 if settings.quick else PROCESSES)
    except subprocess.CalledProcessError as error:
        finding.failed = (error.stderr.strip().splitlines() or [str(error)])[-1]
    else:
        finding.entries = [Entry(name, name, seconds) for name, seconds in times.items()]
    return finding


class WrongAnswerError(Exception):
    """Ours has no right answer, so nothing of the problem is reported; `wrong` unless it has none at all."""

    def __init__(self, words: str, wrong: bool) -> None:
        super().__init__(words)
        self.wrong = wrong


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
        if name in OWN and entry.wrong:
            raise WrongAnswerError(f"{entry.label} uses {entry.budget:.3g} times its budget of rounding errors", True)
        if name == "sightline" and prepared is None:
            raise WrongAnswerError(f"{entry.label} did not run: {entry.absent}", False)
        if prepared is not None:
            ready[name] = prepared
    settings.step(f"{of}{race.name}: {len(ready)} in turn")
    times = _in_turn(ready, settings, seconds)
    for entry in entries:
        entry.seconds = times.get(entry.name, [])
    for prepared in ready.values():
        prepared.close()
    return entries


def _prepared(contender: Contender, race: Race, inputs: Inputs, settings: Settings, entry: Entry) -> Ready | None:
    """The contender after its first call, checked; None with the reason in the entry where it has no answer."""
    entry.absent = contender.absent() or contender.refuses(race)
    if entry.absent:
        return None
    set_threads(settings.threads)
    started = time.perf_counter()
    try:
        ready = contender.prepare(race, inputs, settings.threads)
        set_threads(ready.threads)
        result = ready.call(ready.start())
        entry.first = time.perf_counter() - started
        answers = ready.answers(result)
        judged = contender.judged_as(race)
        if judged is not None:
            entry.budget = share_of_budget(judged, inputs, answers)
        del result, answers
        if not contender.arena:
            entry.memory = peak_memory(ready.call, ready.start)
    except Exception as error:  # whatever another library may raise; shown, and for ours the end of the problem
        words = [line for line in str(error).splitlines() if line.strip()] or [""]
        entry.absent = f"{type(error).__name__}: {words[0].strip()}"
        return None
    return ready


def _in_turn(ready: dict[str, Ready], settings: Settings, seconds: float) -> dict[str, list[float]]:
    """Seconds of a call, one number a round, for each; who begins changes from round to round."""
    names = list(ready)
    times: dict[str, list[float]] = {name: [] for name in names}
    repeats = {name: _repeats(ready[name], settings.pause) for name in names}
    ends = time.perf_counter() + seconds
    collecting = gc.isenabled()
    gc.disable()
    try:
        turn = 0
        while turn < settings.rounds or time.perf_counter() < ends:
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(_turn(ready[name], repeats[name], settings.pause))
            turn += 1
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return times


def _repeats(ready: Ready, pause: float) -> int:
    """Calls in one turn, so that it is not too short to be timed."""
    count = 1
    while (taken := _turn(ready, count, pause) * count) < SHORTEST:
        count = max(2 * count, min(int(count * SHORTEST / max(taken, 1e-9)), 100 * count))
    return count


def _turn(ready: Ready, repeats: int, pause: float) -> float:
    """Seconds of a call: the mean of so many, after one that counts for nothing where they are short."""
    set_threads(ready.threads)
    time.sleep(pause)
    total, call, start = 0.0, ready.call, ready.start
    if repeats > 1:
        call(start())
    for _ in range(repeats):
        state = start()
        started = time.perf_counter()
        result = call(state)
        total += time.perf_counter() - started
        del result
    return total / repeats
