"""Where problems are run: what takes part there, how a call is timed, what memory it holds, what the machine can do."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from .contenders import OWN, Contender, Ready, set_threads
from .memory import peak_memory
from .peaks import Peaks
from .peers import PEERS
from .problems import PROBLEMS
from .races import BEST, Problem, Race

__all__ = ["Cpu", "Device"]


class Device(ABC):
    """A kind of machine to race on.

    Attributes
    ----------
    own, peers : who may take part, by name
    problems : what is raced here
    threads : the host's, for every contender
    seconds : for the rounds of one problem, where nobody says otherwise
    pause : seconds of rest before every turn
    """

    own: Mapping[str, Contender]
    peers: Mapping[str, Contender]
    problems: tuple[Problem, ...]
    peaks: Peaks
    device: str = "cpu"  # torch's name of where tensors are
    threads: int = 1
    seconds: float = 10.0
    pause: float = 0.02

    def check(self) -> None:  # noqa: B027
        """Raise a SightlineError where there is no such machine."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What the figures are of, in a few words."""

    @abstractmethod
    def turn(self, ready: Ready, repeats: int) -> float:
        """Seconds of a call: the mean of so many."""

    @abstractmethod
    def memory(self, ready: Ready) -> int | None:
        """Bytes a call holds at most beyond what lay there before, its outputs counted; None where nobody knows."""

    def enter(self, threads: int) -> None:  # noqa: B027
        """Before a contender that likes so many threads is called."""

    def finish(self) -> None:  # noqa: B027
        """Wait until what was called is done."""

    def readied(self, ready: Ready, race: Race) -> tuple[Ready, str]:
        """The contender as this device times the race, checked and warm; and what is to be said of it."""
        return ready, ""

    def facts(self) -> dict[str, Any]:
        """What else the machine is, as far as times depend on it."""
        return {}

    def label(self, name: str) -> str:
        """What a contender is called, or the name itself."""
        known = {**self.own, **self.peers}
        return known[name].label if name in known else "the best peer" if name == BEST else name


class Cpu(Device):
    """The processor, by the host's clock."""

    own, peers, problems = OWN, PEERS, PROBLEMS

    pause = 0.25  # other libraries' threads go on spinning for up to 0.2

    def __init__(self, threads: int) -> None:
        self.threads, self.peaks = threads, Peaks(threads)

    @property
    def words(self) -> str:
        return f"{self.threads} threads" if self.threads > 1 else "one thread"

    def turn(self, ready: Ready, repeats: int) -> float:
        """By the host's clock, after a call that counts for nothing where they are short."""
        set_threads(ready.threads)
        time.sleep(self.pause)
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

    def memory(self, ready: Ready) -> int | None:
        return peak_memory(ready.call, ready.start)

    def enter(self, threads: int) -> None:
        set_threads(threads)
