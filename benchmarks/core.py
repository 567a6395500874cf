"""The three nouns of the benchmarks: a problem, the contenders that compute it, and the measurement of a contender."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

SEED = 1706  # seed of the random numbers in all arrays of the bench

# The results of a contender by name, in float32 NumPy arrays with the axis of heads before that of positions: "output",
# the gradients "query", "key", "value" and "bias", and by the repr of a statistic the tuple of its arrays.
Results = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """What a contender prepares: a function that is ready to be timed."""

    run: Callable[[Any], Any] = lambda given: None  # the timed function; its argument is the result of `setup`
    results: Callable[[Any], Results] = lambda result: result  # converts the result of `run` to what the problem checks
    setup: Callable[[], Any] = lambda: None  # runs before every call, and is not timed
    close: Callable[[], None] = lambda: None  # releases what the contender holds
    seconds: Callable[[], float] | None = None  # replaces the clock, for a contender that measures itself
    factor: float = 1.0  # the measured seconds are multiplied by this number


@dataclass(frozen=True, eq=False)
class Contender:
    """A name and a function that prepares a problem: Sightline, a variant of Sightline, or a peer (another library).

    prepare : function of (problem, inputs, threads) that does what is not timed, such as conversion and compilation
    """

    name: str
    prepare: Callable[[Any, Any, int], Call]
    is_ours: bool = False  # a wrong result or an error of Sightline ends the problem
    needs: tuple[str, ...] = ("torch",)  # modules that must be installed
    lacks: tuple[str, ...] = ()  # names of missing features, as in `Problem.features`
    changes: dict[str, Any] = field(default_factory=dict)  # attributes of the problem that the contender replaces
    threads: int | None = None  # None for as many as the other contenders use
    is_checked: bool = True
    has_arena: bool = False  # True if the library keeps memory between calls, which hides the memory of a call

    def refusal(self, problem: Problem) -> str:
        """Return why the contender cannot compute the problem, or ""."""
        missing = [module for module in self.needs if find_spec(module) is None]
        if missing:
            return f"not installed: pip install {' '.join(missing)}"
        lacking = [feature for feature in problem.features if feature in self.lacks]
        return f"no {lacking[0]}" if lacking else ""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is computed. A problem has a table of its own, with a row for each contender, or is a row of a larger table.

    Subclasses make the inputs, and compare results with the true ones.
    """

    name: str
    contenders: tuple[Contender, ...] = ()  # the contender that the others are compared with comes first
    table: str = ""  # name of a table with a row for each of its problems; "" for a table of this problem alone
    group: str = ""  # name of the tables that are summarised together; "" if there is no such summary
    about: str = ""  # description of the table
    beside: Contender | None = None  # a column has the first contender's time divided by this one's
    is_series: bool = False  # True if the table also has the time per token and the memory, by length
    # least ratios by the name of a contender; a ratio is this contender's time divided by the first contender's
    targets: dict[str, float] = field(default_factory=dict, hash=False)
    dtype: str = "float32"
    dropout: float = 0.0  # a peer is not checked with dropout, because it drops other weights
    device: str = "cpu"  # torch's name of the device
    unit: str = "FLOP/s"  # that of a rate; "B/s" if the bytes that a call moves limit its speed

    @property
    def title(self) -> str:
        return self.table or self.name

    @property
    def features(self) -> tuple[str, ...]:
        """What not every library can compute."""
        return ()

    @property
    def work(self) -> int:
        """The FLOPs of a call, or its bytes if `unit` is B/s; 0 for no rate."""
        return 0

    def inputs(self) -> Any:
        """Return the inputs that all contenders get; None if each contender makes its own."""

    def error(self, call: Call, inputs: Any) -> float:
        """Return the share of the budget of rounding errors that the results of a call use: up to 1 if correct."""
        raise NotImplementedError

    def small(self) -> Problem:
        """Return the problem with small sizes, for tests and quick runs."""
        return self


@dataclass
class Measurement:
    """What was measured of one contender on one problem."""

    contender: str
    is_ours: bool = False
    seconds: list[float] = field(default_factory=list)  # seconds per call, one number per round
    error: float | None = None  # share of the budget of rounding errors; above 1 if wrong, None if not checked
    memory: int | None = None  # peak bytes of a call beyond those before it, outputs included; None if unknown
    reason: str = ""  # why there are no times
    has_failed: bool = False  # True if Sightline's result is wrong, or Sightline raised an error

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def is_wrong(self) -> bool:
        return self.error is not None and not self.error <= 1

    def ratio(self, other: Measurement) -> float:
        """Return the median over the rounds of a ratio: seconds of the other contender, divided by those of this one.

        A disturbance of a whole round affects both contenders, and cancels.
        """
        return statistics.median(y / x for x, y in zip(self.seconds, other.seconds, strict=True))


Row = tuple[Problem, list[Measurement]]  # a problem and the measurements of its contenders, in their order


def timed(row: Row) -> dict[str, Measurement]:
    """Return the measurements of a row that have times, by the name of the contender."""
    return {each.contender: each for each in row[1] if each.seconds}
