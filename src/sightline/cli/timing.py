"""Times and ratios of calls that take turns, and whether the machine is too busy for a ratio to mean something."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

MIN_TURN_SECONDS = 0.005  # least seconds of a turn; a shorter call is repeated within the turn
MAX_DISAGREEMENT = 1.25  # the most by which the ratios of median and of fastest calls may differ, as a factor

Turn = Callable[[int], float]  # makes so many calls, and returns the mean seconds of one


def interleave(
    turns: Mapping[str, Turn],
    rounds: int,
    seconds: float = 0.0,
    tries: int = 1,
    on_round: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds per call of every contender by name, one number per round.

    There are at least `rounds` rounds, and more until `seconds` have passed. In each round another contender comes
    first. `tries` is the number of turns before the first round, which decide how often a call is repeated in a turn.
    `on_round` is called after each round.
    """
    names = list(turns)
    times: dict[str, list[float]] = {name: [] for name in names}
    repeats = {name: _calibrate_repeats(turn, tries) for name, turn in turns.items()}
    deadline = time.perf_counter() + seconds
    with _frozen_objects():
        finished = 0
        while finished < rounds or time.perf_counter() < deadline:
            for name in names[finished % len(names) :] + names[: finished % len(names)]:
                times[name].append(turns[name](repeats[name]))
            finished += 1
            on_round()
            gc.collect()
    return times


def _calibrate_repeats(turn: Turn, tries: int) -> int:
    """Return a number of calls that take at least `MIN_TURN_SECONDS` even in the shortest of `tries` turns."""
    count = 1
    while (taken := min([turn(count) for _ in range(tries)]) * count) < MIN_TURN_SECONDS:
        count = max(2 * count, min(int(count * MIN_TURN_SECONDS / max(taken, 1e-9)), 100 * count))
    return count


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Collect garbage only when asked, and then visit only objects that were made since."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def time_calls(call: Callable[[Any], Any], repeats: int, setup: Callable[[], Any] = lambda: None) -> float:
    """Return the mean seconds of `call(setup())`, without those of `setup`. Before several calls, an untimed one."""
    total = 0.0
    if repeats > 1:
        call(setup())
    for _ in range(repeats):
        state = setup()
        started = time.perf_counter()
        result = call(state)
        total += time.perf_counter() - started
        del result
    return total / repeats


def speedups(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Return how many times as long the others' calls take, by the median of all rounds and by the fastest calls.

    The smaller one comes first. The result is None if the two disagree, because other programs disturbed the rounds.
    """
    median = statistics.median([other / own for own, other in zip(ours, others, strict=True)])
    low, high = sorted((median, min(others) / min(ours)))
    return None if high > MAX_DISAGREEMENT * low else (low, high)


def format_speedups(low: float, high: float) -> str:
    """Return both numbers, with two digits each, as a text: "2.0", or "110 to 120"."""
    rounded = [float(f"{ratio:.1e}") for ratio in (low, high)]  # to two digits
    return " to ".join(dict.fromkeys(f"{ratio:.{1 if ratio < 10 else 0}f}" for ratio in rounded))
