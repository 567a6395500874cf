"""The devices of the benchmarks: their contenders and peaks, and how they time calls and measure memory."""

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
    """A kind of device to run benchmarks on.

    Attributes
    ----------
    variants, peers : contenders by name: configurations of Sightline, and other libraries
    benchmarks : the problems for this device
    threads : threads of the host for every contender
    seconds : default timing budget of one problem
    pause : seconds of sleep before every timed turn
    """

    variants: Mapping[str, Implementation]
    peers: Mapping[str, Implementation]
    benchmarks: tuple[Benchmark, ...]
    peaks: Peaks
    device: str = "cpu"  # torch's name of the device
    threads: int = 1
    seconds: float = 10.0
    pause: float = 0.02

    def check(self) -> None:  # noqa: B027
        """Raise a SightlineError if this machine has no such device."""

    @property
    @abstractmethod
    def description(self) -> str:
        """A short name of the device for tables and figures."""

    @abstractmethod
    def time_calls(self, prepared: PreparedCall, repeats: int) -> float:
        """Return the seconds of a call, the mean of `repeats` calls."""

    @abstractmethod
    def memory(self, prepared: PreparedCall) -> int | None:
        """Return a call's peak bytes beyond the memory in use before it, including its outputs; None if unknown."""

    def set_threads(self, threads: int) -> None:  # noqa: B027
        """Set the number of threads before a contender is called."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait until the device has finished its work."""

    def prepare_for_timing(self, prepared: PreparedCall, workload: Workload) -> tuple[PreparedCall, str]:
        """Return the call in the form that this device times, and a note to print; the default changes nothing."""
        return prepared, ""

    def properties(self) -> dict[str, Any]:
        """Return further properties of the device that times depend on."""
        return {}

    def label(self, name: str) -> str:
        """Return a contender's label, or the name itself if there is no such contender."""
        known = {**self.variants, **self.peers}
        return known[name].label if name in known else "the best peer" if name == BEST else name


class Cpu(Device):
    """The CPU; the host's clock times the calls."""

    variants, peers, benchmarks = VARIANTS, PEERS, BENCHMARKS
    pause = 0.25  # threads of other libraries spin for up to 0.2 s after a call

    def __init__(self, threads: int) -> None:
        self.threads, self.peaks = threads, Peaks(threads)

    @property
    def description(self) -> str:
        return f"{self.threads} threads" if self.threads > 1 else "one thread"

    def time_calls(self, prepared: PreparedCall, repeats: int) -> float:
        """Time with the host's clock; if `repeats` > 1, one untimed call comes first."""
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
