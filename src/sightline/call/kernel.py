"""The base class of kernels, and the choice of a kernel for a problem.

The methods `refuses` and `refuses_backward` of a kernel yield every reason why the kernel cannot serve a problem, each
with its cure. `choose` takes the cheapest kernel that yields no reason. Some reasons, such as gradients of statistics
or the size of lse, do not follow from the problem. For these, `backward` and `tangent` return None.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operations import convert, detach, dtype_name, namespace, resolve_dtype, to_numpy
from ..errors import KernelRefusedError, ParameterError
from ..formula.expression import Expression, Lookup, walk
from ..statistics import Statistic, StatisticGradients
from .problem import OPERANDS, Problem

CPU_VARIABLE = (
    "SIGHTLINE_CPU"  # this environment variable names a machine, to use fewer features than the processor has
)
MAX_FEW_QUERIES = 4  # up to this number of queries, the CPU's decoding kernel is faster than its forward kernel ...
MIN_DECODE_KEYS = (1, 8, 16, 32)  # ... if there are at least so many keys, for 1 to 4 queries
MIN_KEYS_PER_SPLIT = 512  # with fewer keys a split of the CPU's decoding kernel costs more than it saves
MAX_FORMULA_NODES = 400  # most nodes of mask and score together: LLVM compiles a node in about 10 ms
MAX_LSE_DIFFERENCE = 2.0**-12  # of two computations of one lse; the weights then differ by less than half precision
MAX_LSE = {"float32": 2.0**23, "float64": 2.0**52}  # above this lse, adjacent floats of the dtype differ by 1 or more


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
    lse : (*batch_shape, H, n) float64, because weights that are computed from the lse inherit its error
    seen : the result of each statistic of `problem.see`
    bound_call : a `cpu.launch.bound_call.BoundCall` that repeats the call for other arrays of the same layout; None if
        the kernel provides none
    bound_passes : with `bound_call`, the `cpu.launch.weights_pass.StatisticsPass` objects that computed statistics of
        `problem.see`; the forward kernel computed the other statistics
    recorded_call : a `gpu.launch.launches.RecordedCall`, from which a bound call on a GPU can be made; or None
    """

    output: Any
    lse: Any
    seen: tuple[Any, ...] = ()
    bound_call: Any = None
    bound_passes: tuple[Any, ...] = ()
    recorded_call: Any = None


@dataclass(frozen=True)
class Gradients:
    """The gradients of query, key, value and sinks, and a tuple with the gradient of each table of `Problem.tables`.

    `sinks`, or an element of `tables`, is None if that input has no gradient.

    bound_call : a `cpu.launch.backward.BoundBackward` that repeats the call; None if the kernel provides none
    bound_formulas : the formulas that `bound_call` reads besides mask and score: those of `StatisticGradients.formulas`
    bound_sum : a `cpu.launch.bound_call.BoundCall` that repeats the sum over keys of the weights times the first of
        `bound_formulas`; None if the call needed no such sum
    bound_output : a `cpu.launch.bound_call.BoundCall` that repeats the forward pass on widened operands; None if the
        gradients follow from the output as it was rounded
    recorded_call : as in `Result`
    """

    query: Any
    key: Any
    value: Any
    tables: tuple[Any, ...]
    sinks: Any
    bound_call: Any = None
    bound_formulas: tuple[Expression, ...] = ()
    bound_sum: Any = None
    bound_output: Any = None
    recorded_call: Any = None


class GivenGradients(NamedTuple):
    """The gradients of the results of a call, and what else `Kernel.backward` needs besides the problem.

    d_output, d_lse : the gradients of output and lse, in their shapes; d_lse is None if the gradient of lse is 0
    saved : (output, lse) of `Kernel.run`
    wanted_tables : the indices in `Problem.tables` of the tables whose gradients are requested
    statistics : the terms that the statistics' gradients add to the gradients of weights, scores and lse
    """

    d_output: Any
    d_lse: Any
    saved: tuple[Any, Any]
    wanted_tables: Collection[int]
    statistics: StatisticGradients = StatisticGradients()


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


# The arrays that a backward kernel reads besides tables, and the sums that the CPU's kernel returns as gradients.
BACKWARD_OPERANDS = (*OPERANDS, "output", "d_output", "lse")
BACKWARD_SUMS = ("d_query", "d_key", "d_value")


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
    def run(self, problem: Problem, threads: int | None = None) -> Result:
        """Compute the output, the lse and the statistics of the problem."""

    def describe_statistic(self, problem: Problem, statistic: Statistic) -> str:
        """Return how the kernel computes a statistic, as text."""
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

    def backward(self, problem: Problem, given: GivenGradients, threads: int | None = None) -> Gradients | None:
        """Return the gradients of Σ d_output ∘ output + Σ d_lse ∘ lse, or None if the kernel cannot compute them.

        The kernel cannot compute them if `refuses_backward` yields a reason, or if a gradient turns out NaN or ∞.
        """
        return None

    def tangent(
        self, problem: Problem, tangents: Tangents, saved: tuple[Any, Any], threads: int | None = None
    ) -> tuple[Any, Any] | None:
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

    Raises
    ------
    ParameterError
        `forced` is not the name of a kernel.
    KernelRefusedError
        The kernel named `forced` refuses. The message holds every reason with its cure.
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


def is_lse_too_large(lse: Any, accumulator: str) -> bool:
    """True if a finite |lse| exceeds `MAX_LSE`, so that the weights exp(score − lse) of a query may not sum to 1.

    The scores of the backward pass are then rounded differently from the scores that made the lse.
    """
    magnitudes = np.abs(to_numpy(lse))
    return bool(np.max(magnitudes, where=np.isfinite(magnitudes), initial=0.0) > MAX_LSE[accumulator])


def min_decode_keys(n: int) -> int:
    """Return the smallest number of keys for which the CPU's decoding kernel may serve n queries."""
    return MIN_DECODE_KEYS[n - 1] if 0 < n <= MAX_FEW_QUERIES else MIN_KEYS_PER_SPLIT


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


def find_learned_lookups(problem: Problem, wanted_tables: Collection[int]) -> list[tuple[int, Lookup, int]]:
    """Return (index, node, slot) of each node of the score formula that reads a float table among `wanted_tables`.

    The index is that of the node in `walk(problem.score)`. The slot is that of the table in `Problem.tables`.
    """
    slots = {id(table): slot for slot, table in enumerate(problem.tables)}
    return [
        (index, node, slots[id(node.table)])
        for index, node in enumerate(() if problem.score is None else walk(problem.score))
        if isinstance(node, Lookup) and node.kind == "float" and slots[id(node.table)] in wanted_tables
    ]


def sum_by_table(terms: Iterable[tuple[int, Any]], tables: Mapping[int, Any]) -> dict[int, Any]:
    """Return, for each table, the sum of the gradients of its lookups, in the library and dtype of the table's array.

    A slot is an index in `Problem.tables`. `terms` are (slot, gradient) of each lookup. `tables` maps slots to arrays,
    and the result maps slots to sums.
    """
    totals: dict[int, Any] = {}
    for slot, term in terms:
        totals[slot] = totals[slot] + term if slot in totals else term
    return {
        slot: namespace(tables[slot]).astype(convert(total, tables[slot]), tables[slot].dtype, copy=False)
        for slot, total in totals.items()
    }


def sink_weights(sinks: Any, lse: Any) -> Any:
    """Return the weight of each sink for each query, exp(sink_h − lse), (..., H, n) in the dtype of lse."""
    xp = namespace(lse)
    finite_lse = xp.where(lse == -math.inf, xp.zeros_like(lse), lse)  # the sink is −∞ too, and its weight 0
    return xp.exp(xp.astype(sinks, lse.dtype)[:, None] - finite_lse)


def sum_sink_gradients(sinks: Any, lse: Any, delta: Any) -> Any:
    """Return dsink_h = −Σ exp(sink_h − lse) δ, summed over batches and queries in the dtype of δ, (H,) as the sinks."""
    xp = namespace(lse)
    sums = xp.sum(-xp.astype(sink_weights(sinks, lse), delta.dtype) * delta, axis=-1)
    return xp.astype(xp.sum(xp.reshape(sums, (-1, sinks.shape[0])), axis=0), sinks.dtype)


def differentiate_sinks(sinks: Any, d_output: Any, d_lse: Any, output: Any, lse: Any) -> Any:
    """Return dsink_h = −Σ exp(sink_h − lse) δ, summed over batches and queries, with δ = Σ dO ∘ O − d_lse.

    d_output and output are (..., H, n, d_v); lse and d_lse are (..., H, n).
    """
    sinks, output, lse, xp = detach(sinks), detach(output), detach(lse), namespace(output)
    wide = resolve_dtype(xp, "float64" if dtype_name(output) == "float64" else "float32")
    delta = xp.sum(xp.astype(d_output, wide) * xp.astype(output, wide), axis=-1)
    if d_lse is not None:
        delta = delta - xp.astype(d_lse, wide)
    return sum_sink_gradients(sinks, lse, delta)


def widen(*arrays: Any) -> list[Any]:
    """Return copies of arrays of half precision in float32."""
    return [namespace(x).astype(detach(x), resolve_dtype(namespace(x), "float32")) for x in arrays]


def subtract_rounding(d_lse: Any, d_output: Any, saved: tuple[Any, Any], exact: Sequence[Any]) -> Any:
    """Return d_lse − Σ dO ∘ (O − output), so that δ = Σ dO ∘ output − d_lse is that of the output O in float32.

    A rounded output changes the gradients of all pairs of a query alike. The gradient of a table is a sum over many
    pairs, whose terms may cancel. `saved` and `exact` are (output, lse). If they have different lse, the saved output
    belongs to the keys of other parts of a sequence too, and the result is d_lse.
    """
    d_output, output = widen(d_output, saved[0])
    rounding = np.asarray(to_numpy(namespace(output).sum(d_output * (exact[0] - output), axis=-1)), np.float64)
    with np.errstate(invalid="ignore"):  # −∞ − (−∞) for queries without keys
        is_own = np.abs(to_numpy(exact[1]) - to_numpy(saved[1])) < MAX_LSE_DIFFERENCE
    rounding = np.where(is_own, rounding, 0.0)
    return convert(-rounding if d_lse is None else to_numpy(d_lse) - rounding, output)
