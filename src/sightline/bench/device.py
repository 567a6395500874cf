"""Where problems are run: what takes part there, how a call is timed, what memory it holds, what the machine can do."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from .benchmarks import BENCHMARKS
from .implementations import VARIANTS, Implementation, PreparedCall, set_threads
from .peak_memory import peak_memory
from .peaks import Peaks
from .peers import PEERS
from .workloads import BEST, Benchmark, Workload

__all__ = ["Cpu", "Device"]


class Device(ABC):
    """A kind of machine to race on.

    Attributes
    ----------
    variants, peers : who may take part, by name
    benchmarks : what is raced here
    threads : the host's, for every contender
    seconds : for the rounds of one problem, where nobody says otherwise
    pause : seconds of rest before every turn
    """

    variants: Mapping[str, Implementation]
    peers: Mapping[str, Implementation]
    benchmarks: tuple[Benchmark, ...]
    peaks: Peaks
    device: str = "cpu"  # torch's name of where tensors are
    threads: int = 1
    seconds: float = 10.0
    pause: float = 0.02

    def check(self) -> None:  # noqa: B027
        """Raise a SightlineError where there is no such machine."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What the figures are of, in a few words."""

    @abstractmethod
    def time_calls(self, prepared: PreparedCall, repeats: int) -> float:
        """Seconds of a call: the mean of so many."""

    @abstractmethod
    def memory(self, prepared: PreparedCall) -> int | None:
        """Bytes a call holds at most beyond what lay there before, its outputs counted; None where nobody knows."""

    def set_threads(self, threads: int) -> None:  # noqa: B027
        """Before a contender that likes so many threads is called."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait until what was called is done."""

    def prepare_for_timing(self, prepared: PreparedCall, workload: Workload) -> tuple[PreparedCall, str]:
        """The contender as this device times the race, checked and warm; and what is to be said of it."""
        return prepared, ""

    def properties(self) -> dict[str, Any]:
        """What else the machine is, as far as times depend on it."""
        return {}

    def label(self, name: str) -> str:
        """What a contender is called, or the name itself."""
        known = {**self.variants, **self.peers}
        return known[name].label if name in known else "the best peer" if name == BEST else name


class Cpu(Device):
    """The processor, by the host's clock."""

    variants, peers, benchmarks = VARIANTS, PEERS, BENCHMARKS

    pause = 0.25  # other libraries' threads go on spinning for up to 0.2

    def __init__(self, threads: int) -> None:
        self.threads, self.peaks = threads, Peaks(threads)

    @property
    def description(self) -> str:
        return f"{self.threads} threads" if self.threads > 1 else "one thread"

    def time_calls(self, prepared: PreparedCall, repeats: int) -> float:
        """By the host's clock, after a call that counts for nothing where they are short."""
        set_threads(prepared.threads)
        time.sleep(self.pause)
        total, call, setup = 0.0, prepared.call, prepared.setup
        if repeats > 1:
            call(setup())
        for _ in range(repeats):
            state = setup()
            started = time.perf_counter()
            result = call(state)
            total += time.perf_counter() - started
            del result
        return total / repeats

    def memory(self, prepared: PreparedCall) -> int | None:
        return peak_memory(prepared.call, prepared.setup)

    def set_threads(self, threads: int) -> None:
        set_threads(threads)
