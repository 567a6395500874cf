"""Groups of cases: benchmarks whose contenders are not implementations of a `Workload`.

A `Case` is one row of a group's table, such as a short call or a whole model. It prepares its contenders and knows how
to check their results. `measure` calls the contenders in turn and computes the ratios.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .implementations import PreparedCall
    from .workloads import Target


@dataclass
class CaseContender:
    """A contender of one case.

    Parameters
    ----------
    name, label : names for the JSON file and for tables
    prepared : the call that is timed
    share_of_budget : the function that calls the contender and returns the share of the rounding-error budget that its
        results use; None if the results depend on random numbers of a peer, or if there are no results to check
    is_peer : True for other libraries and for computations that are only compared with
    """

    name: str
    label: str
    prepared: PreparedCall
    share_of_budget: Callable[[], float] | None
    is_peer: bool = False


class Case(ABC):
    """One row of a group's table."""

    name: str

    @abstractmethod
    def contenders(self, threads: int) -> Iterator[CaseContender]:
        """Yield the contenders, Sightline first. Each contender is prepared when the iterator reaches it."""

    @abstractmethod
    def small(self) -> Case:
        """Return the case with small sizes, for tests."""


@dataclass(frozen=True, kw_only=True)
class CaseGroup:
    """A benchmark of several cases.

    Parameters
    ----------
    name : name of the benchmark
    group : name of the benchmarks that are summarised together
    description : one line about the cases
    cases : the rows of the table
    packages : names of the modules that must be installed
    pip : arguments of `pip install` that install the modules in `packages`
    peer : name of the contender whose time over another contender's time is the other contender's ratio
    subtracted : name of a contender whose time is subtracted from Sightline's in a column of its own; "" for none
    """

    name: str
    group: str
    description: str
    cases: tuple[Case, ...]
    packages: tuple[str, ...]
    pip: str
    peer: str
    subtracted: str = ""
    targets: tuple[Target, ...] = ()

    def skip_reason(self) -> str | None:
        """Return why the group cannot run at all: a missing package. None if every package is installed."""
        missing = [package for package in self.packages if find_spec(package) is None]
        return f"{' and '.join(missing)} not installed: pip install {self.pip}" if missing else None

    def small(self) -> CaseGroup:
        """Return the group with small cases. Cases that become equal are left out."""
        return replace(self, cases=tuple(dict.fromkeys(case.small() for case in self.cases)))
