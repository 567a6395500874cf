"""The base class of kernels, and the choice of a kernel for a problem.

The methods `refuses` and `refuses_backward` of a kernel yield every reason why the kernel cannot serve a problem, each
with its cure. `choose` takes the cheapest kernel that yields no reason. Some reasons, such as gradients of statistics
or the size of lse, do not follow from the problem. For these, `backward` and `tangent` return None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import KernelRefusedError, ParameterError
from ..formula.expression import walk
from ..statistics import Statistic, StatisticGradients
from .problem import Problem

if TYPE_CHECKING:
    from .call_cache import FirstCall

MAX_FORMULA_NODES = 400  # most nodes of mask and score together: LLVM compiles a node in about 10 ms


@dataclass(frozen=True)
class Refusal:
    """A reason why a kernel cannot serve a problem, and what the caller can change so that it can (`cure`)."""

    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.cure})"


@dataclass(frozen=True)
class Result:
    """The result of a forward pass.

    output : (*batch_shape, H, n, d_v), the dtype of the query
    lse : (*batch_shape, H, n) float64, as weights computed from it inherit its error; None from torch's own kernels
    seen : the result of each statistic of `problem.see`
    keep : function that stores an entry for the call in the call cache; None if the call cannot be repeated
        It stores none if the kernels did not read the caller's own query, key and value, or read other tables.
    """

    output: Any
    lse: Any
    seen: tuple[Any, ...] = ()
    keep: Callable[[FirstCall], None] | None = None


@dataclass(frozen=True)
class Gradients:
    """The gradients of query, key, value and sinks, and a tuple with the gradient of each table of `Problem.tables`.

    `sinks`, or an element of `tables`, is None if that input has no gradient.

    make_entry : function (`BackwardPasses`, `BackwardInputs`, addresses of `BackwardInputs.arrays`, (mask, score)) that
        returns an entry of `BackwardPasses`; None if the pass cannot be repeated
        Its result is None if the pass did not read the caller's arrays.
    """

    query: Any
    key: Any
    value: Any
    tables: tuple[Any, ...]
    sinks: Any
    make_entry: Callable[..., Any] | None = None

    def flatten(self, tables: Sequence[int], has_sinks: bool) -> list[Any]:
        """Return the gradients of query, key, value, the tables with these indices, and the sinks if there are any."""
        return [self.query, self.key, self.value, *[self.tables[table] for table in tables], *[self.sinks] * has_sinks]


class GivenGradients(NamedTuple):
    """What a backward pass reads besides the problem: the gradients of the results, and what the forward pass saved.

    A gradient of 0 is None. A kernel never gets None for `d_output`.

    d_output, d_lse : the gradients of output and lse, in their shapes
    saved : (output, lse) of `Kernel.run`; None if streaming shall compute them again
    wanted_tables : the indices in `Problem.tables` of the tables whose gradients are requested
    statistics : the terms that `d_seen` adds to the gradients of weights, scores and lse, the form that kernels read
    d_seen, arrays : for each statistic of the problem the gradient of its first array, and its arrays; () if they were
        not saved, None for arrays that no gradient reads
    """

    d_output: Any
    d_lse: Any = None
    saved: Any = None
    wanted_tables: Collection[int] = ()
    statistics: StatisticGradients = StatisticGradients()
    d_seen: Sequence[Any] = ()
    arrays: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True)
class Tangents:
    """The tangents of a problem's inputs. A tangent has the shape of its input; None stands for a tangent that is 0.

    `tables` has a tangent for each table of `Problem.tables`.
    """

    query: Any = None
    key: Any = None
    value: Any = None
    tables: tuple[Any, ...] = ()
    sinks: Any = None


class Kernel(ABC):
    """One way to compute attention. A new kernel is a subclass, listed in `api.kernels.KERNELS`."""

    name: str
    description: str

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Yield every reason why this kernel cannot serve the problem; by default the kernel serves every problem."""
        yield from ()

    @abstractmethod
    def cost(self, problem: Problem) -> float:
        """Return the kernel's relative cost. `choose` takes the cheapest of the kernels that do not refuse."""

    def pairs(self, problem: Problem) -> int | None:
        """Return the number of pairs that the kernel computes; None for the pairs of all tiles but empty ones."""
        return None

    def cost_reason(self, problem: Problem) -> str:
        """Return the reason for the kernel's `cost` as text; "" if the kernel gives no reason."""
        return ""

    @abstractmethod
    def run(self, problem: Problem) -> Result:
        """Compute the output, the lse and the statistics of the problem."""

    def describe_statistic(self, problem: Problem, statistic: Statistic) -> str:
        """Return how the kernel computes a statistic, as text."""
        if not statistic.num_arrays:  # it is lse
            return "computed with the output"
        return "a call of its own" if statistic.has_own_problem else "array operations on tiles of weights: slow"

    def sources(self, problem: Problem) -> dict[str, str]:
        """Return the code that this kernel generates for the problem, by name; {} if the kernel generates no code."""
        return {}

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        """Yield every reason why this kernel has no backward pass for the problem.

        If there is a reason, the streaming kernel computes the gradients. `wanted_tables` are the indices in
        `Problem.tables` of the tables whose gradients are requested. If `wanted_tables` is None, these are all tables
        of floats.
        """
        yield Refusal(f"{self.name} has no backward pass", "leave kernel=None")

    def backward(self, problem: Problem, given: GivenGradients) -> Gradients | None:
        """Return the gradients of Σ d_output ∘ output + Σ d_lse ∘ lse, or None if the kernel cannot compute them.

        The kernel cannot compute them if `refuses_backward` yields a reason, or if a gradient turns out NaN or ∞.
        """
        return None

    def tangent(self, problem: Problem, tangents: Tangents, saved: tuple[Any, Any]) -> tuple[Any, Any] | None:
        """Return the tangents of output and lse for tangents of the inputs; None if the kernel cannot compute them.

        The kernel cannot compute them if it has no code for that, or if a tangent turns out NaN or ∞. `saved` is
        (output, lse) of `run`.
        """
        return None


@dataclass(frozen=True)
class Plan:
    """The kernel that `choose` took for a call, and the refusals of every kernel that it compared."""

    kernel: Kernel
    refusals: dict[str, tuple[Refusal, ...]]  # the refusals of every compared kernel, by the kernel's name
    forced: bool  # True if the caller named the kernel
    kernels: Sequence[Kernel] = ()  # the kernels that were compared
    # Reasons why streaming computes the gradients instead of `kernel`; () if no input requires a gradient.
    backward_refusals: tuple[Refusal, ...] = ()


def choose(kernels: Sequence[Kernel], problem: Problem, forced: str | None = None) -> Plan:
    """Return the plan with the cheapest kernel that does not refuse; with the kernel named `forced` if it is given.

    Raise ParameterError if no kernel has this name, and KernelRefusedError if the kernel refuses. The message of the
    second error holds every reason with its cure.
    """
    refusals = {kernel.name: tuple(kernel.refuses(problem)) for kernel in kernels}
    if forced is None:
        candidates = [kernel for kernel in kernels if not refusals[kernel.name]]
        kernel = min(candidates, key=lambda kernel: kernel.cost(problem))
    elif forced not in refusals:
        names = ", ".join(map(repr, refusals))
        raise ParameterError(f"kernel={forced!r}", f"one of {names}, or None", "leave kernel=None to have one chosen")
    elif refusals[forced]:
        raise KernelRefusedError(
            f"kernel={forced!r} cannot serve this problem: " + "; ".join(r.reason for r in refusals[forced]),
            "problems that this kernel serves; sightline.explain(...) shows which kernels serve yours",
            "; ".join(r.cure for r in refusals[forced]) + "; or leave kernel=None",
        )
    else:
        kernel = next(kernel for kernel in kernels if kernel.name == forced)
    inputs = [problem.query, problem.key, problem.value, problem.sinks, *(table.array for table in problem.tables)]
    needs_gradients = any(getattr(x, "requires_grad", False) for x in inputs)
    return Plan(
        kernel,
        refusals,
        forced is not None,
        kernels,
        tuple(kernel.refuses_backward(problem)) if needs_gradients else (),
    )


# -- what the generated kernels of the CPU and of GPUs share ----------------------------------------------------------


def refuse_sizes(problem: Problem, max_width: int, cure: str) -> Iterator[Refusal]:
    """Yield a refusal if d_k or d_v exceeds `max_width`, and one if the formulas exceed `MAX_FORMULA_NODES`."""
    if max(problem.d_k, problem.d_v) > max_width:
        yield Refusal(f"d_k {problem.d_k}, d_v {problem.d_v}, above the limit of {max_width}", cure)
    nodes = sum(len(walk(formula)) for formula in (problem.mask, problem.score) if formula is not None)
    if nodes > MAX_FORMULA_NODES:
        yield Refusal(f"formulas of {nodes} nodes would take long to compile", "put computed values into a table")


def refuse_no_pairs(problem: Problem) -> Iterator[Refusal]:
    """Yield a refusal if the problem has no pairs or d_v = 0: then there is nothing to differentiate."""
    if 0 in problem.extent or problem.d_v == 0:
        shape = f"(B, H, n, m) = {problem.extent}, d_v {problem.d_v}"
        yield Refusal(f"no pairs or no columns: {shape}", "give at least one of each")
