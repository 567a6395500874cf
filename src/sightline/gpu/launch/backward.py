"""The launches of the backward kernels, and their result."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...arrays.operations import detach
from ...call.gradient_parts import find_learned_lookups, sum_by_table, sum_sink_gradients
from ...call.kernel import GivenGradients, Gradients, Refusal
from ...call.problem import Problem
from ...formula.derivative import derivative
from ...formula.expression import SYMBOLS, Expression, Lookup
from ...statistics import StatisticGradients
from ..configurations import Configuration, architecture_of, select
from ..kernels.backward import backward_preprocess
from ..kernels.backward_keys import backward_keys
from ..kernels.backward_queries import backward_queries
from ..kernels.table_gradient import FIRST_SLOT_EXPONENT, MAX_ADDITIONS, SLOT_BITS, SLOTS
from .arguments import GpuOperands, make_schedule, to_operand
from .bound_launches import RecordedCall
from .forward import nan_safe_launch, small_sizes
from .launches import KernelLaunch, run_launches

SMALL_KEY_WARPS = 8  # warps of the launch for keys of a small problem: with 4, the kernel of d 128 spills registers
MAX_SLOTTED_ENTRIES = 2**22  # most entries of a table whose gradient is summed in slots, of 264 bytes for each entry


@dataclass(frozen=True)
class GpuTableGradient:
    """A read of a table in the score, where the table needs a gradient."""

    node: Lookup
    slot: int  # the index of the table in Problem.tables

    @property
    def entry(self) -> Expression:
        """The index, in C order, of the table entry that a pair reads."""
        entry, *others = self.node.arguments
        for index, length in zip(others, self.node.table.shape[1:], strict=True):
            entry = entry * length + index
        return entry

    @property
    def kind(self) -> str:
        """The kind of the lookup, "pair", "query", "key", "head" or "any": see `kernels.table_gradient`."""
        if self.is_owned_by("i") and self.is_owned_by("j"):
            return "pair"
        reads = "".join(sorted(self.entry.free_symbols & {"i", "j"}))
        return {"": "head", "i": "query", "j": "key"}.get(reads, "any")

    def is_owned_by(self, name: str) -> bool:
        """Return True if an index of the lookup is the symbol `name` itself, which is b, h, i or j.

        Then all pairs that read one table entry have the same value of this symbol.
        """
        return any(argument is SYMBOLS[name] for argument in self.node.arguments)


def backward(problem: Problem, given: GivenGradients, architecture: str | None) -> Gradients:
    """Return the gradients of Σ d_output ∘ output + Σ d_lse ∘ lse, as `Kernel.backward` defines them.

    `refuse_tables` has refused every table that these kernels do not support.
    """
    architecture = architecture or architecture_of(problem.query.device)
    lookups = _table_gradients(problem, given.wanted_tables)
    query, batch_shape = problem.query, problem.batch_shape
    output, lse = map(detach, given.saved)
    d_lse_terms = [term for term in (given.d_lse, given.statistics.lse) if term is not None]
    d_lse: Any = sum(detach(term).to(torch.float64) for term in d_lse_terms) if d_lse_terms else None
    d_query = query.new_empty((*batch_shape, problem.H, problem.n, problem.d_k))
    d_key, d_value = (query.new_empty((*batch_shape, problem.G, problem.m, d)) for d in (problem.d_k, problem.d_v))
    accumulator = getattr(torch, problem.accumulator)
    rows = query.new_empty((*batch_shape, problem.H, problem.n, 4), dtype=accumulator)
    sums = tuple(_allocate_sums(problem, lookup) for lookup in lookups)
    d_lse = None if d_lse is None else d_lse.expand(rows.shape[:-1]).contiguous()
    arrays: dict[str, Any] = {"d_lse": d_lse, "lse": lse.contiguous(), "rows": rows, "sums": sums}
    arrays |= {"output": to_operand(output), "d_output": to_operand(detach(given.d_output).to(query.dtype))}
    arrays |= {"d_query": d_query, "d_key": d_key, "d_value": d_value}
    done = run_launches(backward_launches(problem, arrays, lookups, given.statistics, architecture), query)
    make_entry = None
    if not lookups and problem.sinks is None and d_lse is None and not given.statistics.formulas:
        inputs = {"output": output, "d_output": arrays["d_output"].start, "lse": arrays["lse"]}
        make_entry = RecordedCall(problem, done, problem.tables, [d_query, d_key, d_value], inputs).make_entry
    terms = [
        (lookup.slot, array if lookup.kind == "pair" else _sum_slots(array))
        for lookup, array in zip(lookups, sums, strict=True)
    ]
    arrays_by_slot = {slot: table.array for slot, table in enumerate(problem.tables)}
    totals, d_sinks = sum_by_table(terms, arrays_by_slot), None
    if problem.sinks is not None:
        d_sinks = sum_sink_gradients(detach(problem.sinks), lse, rows[..., 2].to(torch.float64))
    d_tables = tuple(map(totals.get, arrays_by_slot))
    return Gradients(d_query, d_key, d_value, d_tables, d_sinks, make_entry)


def backward_launches(
    problem: Problem,
    arrays: dict[str, Any],
    lookups: Sequence[GpuTableGradient],
    statistic_gradients: StatisticGradients,
    architecture: str,
) -> Iterator[KernelLaunch]:
    """Yield the launches of the backward pass.

    They compute, one after another: δ and the scaled lse; dQ; dQ, NaN-safe; dK and dV; dK and dV, NaN-safe. A NaN-safe
    launch recomputes the blocks whose results in the previous launch are not finite, and a weight of 0 then contributes
    0, also times NaN or ∞. For a small problem the other launches are NaN-safe themselves, except the launch of dQ if a
    table needs a gradient. `arrays` has the fields of `KernelArrays` from `d_output` on, and `output` and `lse`.
    """
    sizes = select("backward_queries", problem, architecture)
    sizes = sizes if lookups or not problem.is_small_on_gpu else small_sizes(sizes)
    formulas = {  # by the names of the fields of `FormulaFunctions`
        "score_derivative_at": None if problem.score is None else derivative(problem.score),
        "d_weights_at": statistic_gradients.weights,
        "d_scores_at": statistic_gradients.scores,
    }
    extra_formulas = [(name, formula, True) for name, formula in formulas.items() if formula is not None]
    for k, lookup in enumerate(lookups):
        assert problem.score is not None
        extra_formulas.append((f"derivative_{k}", derivative(problem.score, lookup.node), True))
        extra_formulas.append((f"entry_{k}", lookup.entry, False))
    operands = GpuOperands(problem, sizes, extra_formulas, (arrays["output"], arrays["d_output"]))
    common = operands.common_arguments(**arrays)
    yield from _query_launches(operands, common, lookups)
    sizes = select("backward_keys", problem, architecture)
    sizes = small_sizes(sizes, SMALL_KEY_WARPS) if problem.is_small_on_gpu else sizes
    yield from _key_launches(operands, sizes, common)


def _query_launches(
    operands: GpuOperands, common: dict[str, Any], lookups: Sequence[GpuTableGradient]
) -> Iterator[KernelLaunch]:
    problem, sizes = operands.problem, operands.sizes
    blocks = -(-problem.n // sizes.rows)
    items = problem.B * problem.H * blocks
    arrays = common["arrays"]._replace(schedule=make_schedule(problem, sizes.rows, sizes.keys))
    common = common | {"arrays": arrays, "blocks": blocks}
    yield KernelLaunch(backward_preprocess, items, common, sizes)

    pair_lookups = [lookup for lookup in lookups if lookup.kind == "pair"]
    shared = [not all(lookup.is_owned_by(axis) for lookup in pair_lookups) for axis in "bh"]
    programs = blocks * (1 if shared[0] else problem.B) * (1 if shared[1] else problem.H)
    has_flags = bool(lookups) or not problem.is_small_on_gpu
    common = operands.block_arguments(common, blocks, items, has_flags)
    formulas = common["formulas"]._replace(table_gradients_at=_combine_table_gradients(operands, len(lookups)))
    kinds, sequential = tuple(lookup.kind for lookup in lookups), bool(pair_lookups)
    meta = operands.meta(kinds=kinds, sequential=sequential, shares_batches=shared[0], shares_heads=shared[1])
    arguments = common | {"formulas": formulas, "meta": meta}
    yield KernelLaunch(backward_queries, programs, arguments, sizes)
    if has_flags:
        yield nan_safe_launch(backward_queries, common, operands, sizes, "rows")


def _key_launches(operands: GpuOperands, sizes: Configuration, common: dict[str, Any]) -> Iterator[KernelLaunch]:
    problem = operands.problem
    blocks = -(-problem.m // sizes.keys)
    items = problem.B * problem.G * blocks
    is_even = problem.n % sizes.rows == 0 and problem.m % sizes.keys == 0
    arrays = common["arrays"]._replace(schedule=make_schedule(problem, sizes.rows, sizes.keys, of_keys=True))
    differ = problem.group > 1 and arrays.schedule is not None and arrays.schedule.head_stride > 0
    is_grouped = problem.group > 1 and not differ
    meta = operands.meta(sizes, is_grouped=is_grouped, heads_differ=differ, all_full=is_even)
    arguments = common | {"arrays": arrays, "meta": meta}
    arguments = operands.block_arguments(arguments, blocks, items, not problem.is_small_on_gpu)
    yield KernelLaunch(backward_keys, items, arguments, sizes)
    if not problem.is_small_on_gpu:
        yield nan_safe_launch(backward_keys, arguments, operands, sizes, "keys")


# -- tables and sinks --------------------------------------------------------------------------------------------------
def _table_gradients(problem: Problem, wanted_tables: Collection[int]) -> list[GpuTableGradient]:
    """Return every float lookup in the score whose table is one of `wanted_tables`."""
    return [GpuTableGradient(node, slot) for _, node, slot in find_learned_lookups(problem, wanted_tables)]


def refuse_tables(
    problem: Problem, architecture: str | None, wanted_tables: Collection[int] | None
) -> Iterator[Refusal]:
    """Yield a refusal for each lookup in the score whose table needs a gradient that the kernels cannot sum.

    The kernels cannot sum the gradient
    - if the table is not indexed by both i and j, and has more than `MAX_SLOTTED_ENTRIES` entries;
    - if the table is not indexed by both i and j, and more than `MAX_ADDITIONS` pairs may read one entry;
    - on AMD, if the table is indexed by both i and j, and several heads or batches read one entry.
    """
    architecture = architecture or architecture_of(problem.query.device)
    wanted_tables = range(len(problem.tables)) if wanted_tables is None else wanted_tables
    for lookup in _table_gradients(problem, wanted_tables):
        if not _is_supported(problem, lookup, architecture):
            cure = "use a smaller table, or one indexed by i and j (on AMD also by b and h)"
            yield Refusal(f"the gradient of {lookup.node.table}", cure)


def _is_supported(problem: Problem, lookup: GpuTableGradient, architecture: str) -> bool:
    """Return True if the kernels can sum a lookup's contribution to a table gradient; `refuse_tables` lists the limits.

    If the table is indexed by both i and j, a program processes the heads that share an entry one after another, and
    reads for each head the sums that it wrote for the previous head. On AMD Triton's barrier does not make a thread's
    writes to memory visible to the other threads of the program.
    """
    if lookup.kind == "pair":
        lengths = {"b": problem.B, "h": problem.H}
        is_shared = any(length > 1 and not lookup.is_owned_by(name) for name, length in lengths.items())
        return not (is_shared and architecture.startswith("gfx"))
    free = [length for name, length in zip("bhij", problem.extent, strict=True) if not lookup.is_owned_by(name)]
    pairs = math.prod(free)  # the most pairs that may read one entry
    return math.prod(lookup.node.table.shape) <= MAX_SLOTTED_ENTRIES and pairs <= MAX_ADDITIONS


def _combine_table_gradients(operands: GpuOperands, count: int) -> Any:
    """Return the function that returns (d score / d entry, entry index) for each of `count` lookups.

    The result is None if `count` is 0.
    """
    at = "b, h, i, j, n, m, tables"
    names = [f"{name}_{k}" for k in range(count) for name in ("derivative", "entry")]
    calls = [f"(derivative_{k}(s, {at}), entry_{k}({at}))" for k in range(count)]
    return operands.combine_functions(names, calls, "table_gradients_at")


def _allocate_sums(problem: Problem, lookup: GpuTableGradient) -> Any:
    """Return zeros to which the kernel adds a lookup's gradient: one sum, or `SLOTS` slots, for every table entry."""
    shape = lookup.node.table.shape
    if lookup.kind == "pair":
        return problem.query.new_zeros(shape, dtype=getattr(torch, problem.accumulator))
    return problem.query.new_zeros((*shape, SLOTS.value), dtype=torch.int64)


def _sum_slots(slots: Any) -> Any:
    """Return the float64 sum that the slots of each table entry represent; NaN if one of its summands was not finite.

    `slots` has the shape (..., SLOTS).
    """
    units = torch.arange(SLOTS.value - 1, dtype=torch.float64, device=slots.device) * SLOT_BITS + FIRST_SLOT_EXPONENT
    total = (slots[..., :-1].to(torch.float64) * torch.exp2(units)).sum(-1)
    return torch.where(slots[..., -1] == 0, total, torch.nan)
