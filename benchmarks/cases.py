"""What every benchmark is made of: cases, the contenders that compute them, and groups of cases.

A `Case` is one problem: it makes the inputs, names its contenders and knows the true results. A `Contender`, Sightline
or another library, prepares the call that is timed. A benchmark is a single case, whose table has a row for each
contender, or a `CaseGroup`, whose table has a row for each case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .device import Device

BEST = "best peer"
SEED = 1706  # seed of the random numbers in all arrays of the bench

# The results of a contender by name, in float32 NumPy arrays with the axis of heads before the axis of positions:
# "output", the gradients "query", "key", "value" and "bias", and for the repr of a statistic the tuple of its arrays.
Results = dict[str, Any]


class Measure(NamedTuple):
    """A quantity that a target limits: a lower limit if `at_least` is True, else an upper limit.

    `words` is a format string that describes the target, with fields for the limit and for the label of a contender.
    """

    at_least: bool
    words: str


SERIES_MEASURES = {  # computed from all points of a series
    "spread": Measure(False, "largest time per token at most {limit:.3g} times the smallest"),
    "growth": Measure(False, "memory beyond inputs and outputs at most {limit:.3g} times the first point's"),
    "extra": Measure(False, "memory beyond inputs and outputs at most {limit:.3g} of the outputs"),
}
MEASURES = SERIES_MEASURES | {
    "share": Measure(True, "at least {limit:g} of the machine's peak"),
    "faster": Measure(True, "at least {limit:g} times as fast as {label}"),
    "slower": Measure(False, "at most {limit:g} times as long as {label}"),
    "seconds": Measure(False, "{label}: at most {duration}"),
}


@dataclass(frozen=True)
class Target:
    """A limit for one measured quantity of a benchmark."""

    measure: str  # name of the quantity in `MEASURES`
    limit: float
    # name of the other contender in a ratio, or of the contender whose seconds are limited; `BEST` is the fastest peer
    implementation: str = "sightline"

    @property
    def at_least(self) -> bool:
        return MEASURES[self.measure].at_least


@dataclass
class TimedCall:
    """A contender that is ready to be called on its arrays.

    If only the backward pass is timed, `setup` runs the forward pass.
    """

    call: Callable[[Any], Any]  # the timed function; its argument is the result of `setup`
    results: Callable[[Any], Results] = lambda result: result  # converts the result of `call` to what the case checks
    setup: Callable[[], Any] = lambda: None  # runs before every call, and is not timed
    threads: int = 1  # number of threads that torch uses during the call
    close: Callable[[], None] = lambda: None  # releases the contender's memory
    set_d_output: Callable[[Any], Any] | None = None  # replaces d_output; None if the contender cannot replace it
    includes_host: bool = False  # True if on a GPU the host's clock times consecutive calls, instead of CUDA's events


def missing_packages(packages: tuple[str, ...]) -> list[str]:
    """Return those of the named modules that are not installed."""
    return [package for package in packages if find_spec(package) is None]


class Contender(ABC):
    """What computes a case: a configuration of Sightline, or a peer (another library). Subclasses define each one."""

    name: str
    label: str
    is_peer: bool = True  # False for a configuration of Sightline, whose wrong output or error ends the case
    packages: tuple[str, ...] = ()  # names of the modules that must be installed
    pip: str = ""  # arguments of `pip install` that install the modules in `packages`
    note: str = ""  # printed remark on what the times include
    has_arena: bool = False  # True if the library reuses memory between calls, which hides a call's peak memory
    device: str = "cpu"  # torch's name of the device that has the contender's tensors

    def skip_reason(self) -> str | None:
        """Return how to install missing packages, as the reason why the contender cannot run; None if it has all."""
        return f"not installed: pip install {self.pip}" if missing_packages(self.packages) else None

    def refuses(self, case: Any) -> str | None:
        """Return why the contender cannot compute this case; None if it can."""
        return None

    def reference(self, case: Any) -> Any:
        """Return the case whose true results the contender's results are checked against.

        The result is None if the contender has no results, or if its results cannot be checked because they depend on
        random numbers that a peer draws.
        """
        return case

    @abstractmethod
    def prepare(self, case: Any, inputs: Any, threads: int) -> TimedCall:
        """Return the call to time, after work that is not timed, such as conversion, compilation and layout."""


class Benchmark:
    """A case or a group of cases. If a subclass does not set an attribute, the attribute has the default given here."""

    name: str
    description: str
    cases: tuple[Any, ...]
    targets: tuple[Target, ...] = ()
    dtype: str = "float32"
    flops: int = 0  # FLOPs of one call
    bytes_moved: int = 0  # bytes of the inputs and outputs of one call
    peak: str = ""  # name in `peaks.Peaks` of the peak by which a contender's rate is divided; "" for none
    published: str = ""  # a published figure to print, with its source; "" for none
    axis: str = ""  # `CaseGroup` explains this attribute and the next two
    group: str = ""
    beside: str = ""
    peers: tuple[str, ...] = ()  # names of the contenders that Sightline is compared with; () for all other libraries

    def small(self) -> Any:
        """Return the benchmark with small sizes and without targets, for tests."""
        raise NotImplementedError


class Case(Benchmark):
    """A benchmark of one problem: it makes the inputs, names the contenders that compute it, and checks the results."""

    contenders: tuple[Contender | str, ...]  # Sightline first; a name stands for a variant or a peer of the device
    cuda_graph: bool = False  # True times a CUDA graph on a GPU, since a short call takes the host longer than the GPU

    @property
    def cases(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (self,)

    def make_inputs(self) -> Any:
        """Return the inputs that all contenders of the case get; None if each contender makes its own."""

    def share_of_budget(self, prepared: TimedCall, inputs: Any) -> float:
        """Return the share of the rounding-error budget that a contender's results use; correct results use up to 1."""
        raise NotImplementedError


class HostCase(Case):
    """A problem without contenders, which times itself."""

    contenders = ()

    def measure_seconds(self, device: Device) -> dict[str, list[float]]:
        """Return the seconds of each timed piece of work by name."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CaseGroup(Benchmark):
    """A benchmark of several cases, whose table has a row for each case.

    Groups with the same `group` are summarised together. A group with an `axis` is a series: its cases are workloads by
    ascending n, or by ascending share of the pairs that the mask allows. The memory of their calls is measured. The
    ratio of a contender is the time of `peer` divided by the contender's time.
    """

    name: str
    description: str
    cases: tuple[Any, ...]
    group: str
    axis: str = ""  # what differs from case to case of a series: "n" or "allowed"; "" for other groups
    peer: str = "torch"  # name of a contender
    beside: str = ""  # name of a contender; a column has Sightline's time divided by this contender's; "" for none
    targets: tuple[Target, ...] = ()

    @property
    def peers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for name in (self.peer, self.beside) if name)

    def small(self) -> CaseGroup:
        """Return the group with small cases. Cases that become equal are left out."""
        small = [case.small() for case in self.cases]
        if self.axis:  # the points of a series need different lengths
            small = [replace(case, name=f"n {64 * k}", n=64 * k, m=64 * k) for k, case in enumerate(small, 1)]
        return replace(self, cases=tuple(dict.fromkeys(small)), targets=())
