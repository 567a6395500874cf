"""The devices of the benchmarks. A device has contenders and peak rates. It times calls and measures their memory."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from sightline.cli.info_command import processor_name
from sightline.cli.timing import time_calls

from .cases import BEST, Benchmark, Case, Contender, TimedCall
from .contenders import VARIANTS, set_threads
from .cpu_problems import BENCHMARKS
from .peak_memory import peak_memory
from .peaks import Peaks, kernel_instructions
from .peers import PEERS


class Device(ABC):
    """A kind of device to run benchmarks on: its contenders, its clock, its memory counter and its peaks."""

    variants: Mapping[str, Contender]  # the configurations of Sightline by name
    peers: Mapping[str, Contender]  # the other libraries by name
    benchmarks: tuple[Benchmark, ...]  # the benchmarks for this device
    peaks: Peaks  # the measured peaks of the device
    device: str = "cpu"  # torch's name of the device
    threads: int = 1  # number of threads of the host that every contender may use
    seconds: float = 10.0  # default timing budget of one problem
    pause: float = 0.02  # seconds of sleep before every timed turn of a contender

    def check(self) -> None:  # noqa: B027
        """Raise a SightlineError if the host has no such device."""

    @property
    @abstractmethod
    def description(self) -> str:
        """A short name of the device for tables and figures."""

    @abstractmethod
    def time_calls(self, prepared: TimedCall, repeats: int) -> float:
        """Return the mean seconds of one call over `repeats` calls."""

    @abstractmethod
    def memory(self, prepared: TimedCall) -> int | None:
        """Return the peak bytes of a call beyond the memory in use before the call, including the call's outputs.

        The result is None if the system cannot measure the peak.
        """

    def set_threads(self, threads: int) -> None:  # noqa: B027
        """Set the number of threads of the host, before a contender is called."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait until the device has finished all work that was queued."""

    def prepare_for_timing(self, prepared: TimedCall, case: Case) -> tuple[TimedCall, str]:
        """Return the call in the form that this device times, and a note to print.

        By default the call is unchanged and the note is empty.
        """
        return prepared, ""

    def properties(self) -> dict[str, Any]:
        """Return the properties of the device that its times depend on; by default none."""
        return {}

    def contender(self, each: Contender | str) -> Contender | None:
        """Return the contender whose name is `each`, or `each` if it is a contender; None for an unknown name."""
        return self.variants.get(each, self.peers.get(each)) if isinstance(each, str) else each

    def label(self, name: str) -> str:
        """Return the label of the contender called `name`. If no contender has this name, return the name itself."""
        known = self.contender(name)
        return known.label if known else "the best peer" if name == BEST else name


class CpuDevice(Device):
    """The CPU as a benchmark device; the host's clock times the calls."""

    variants, peers, benchmarks = VARIANTS, PEERS, BENCHMARKS
    pause = 0.25  # after a call, threads of other libraries wait in a loop for up to 0.2 s

    def __init__(self, threads: int) -> None:
        self.threads, self.peaks = threads, Peaks(threads)

    @property
    def description(self) -> str:
        threads = f"{self.threads} threads" if self.threads > 1 else "one thread"
        return f"{processor_name()}, {kernel_instructions()} kernels, {threads}"

    def time_calls(self, prepared: TimedCall, repeats: int) -> float:
        """Return the mean seconds of a call by the host's clock. If `repeats` > 1, one untimed call comes first."""
        set_threads(prepared.threads)
        time.sleep(self.pause)
        return time_calls(prepared.call, repeats, prepared.setup)

    def memory(self, prepared: TimedCall) -> int | None:
        return peak_memory(prepared.call, prepared.setup)

    def set_threads(self, threads: int) -> None:
        set_threads(threads)
