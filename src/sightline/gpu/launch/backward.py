"""The launches of the backward kernels, and their result."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...arrays import convert, detach, namespace
from ...formula.derivative import derivative
from ...formula.expression import SYMBOLS, Expression, Lookup, walk
from ...kernel import Gradients
from ...problem import Problem
from ...statistics import StatisticGradients
from ..kernels.backward import backward_preprocess
from ..kernels.backward_keys import backward_keys
from ..kernels.backward_queries import backward_queries
from ..kernels.table_gradient import FIRST_SLOT_EXPONENT, MAX_ADDITIONS, SLOT_BITS, SLOTS
from ..tuning.configurations import Configuration
from ..tuning.selection import architecture_of, select
from .arguments import Operands, to_operand
from .forward import NAN_SAFE_ROWS, nan_safe_launch
from .launcher import KernelLaunch
from .schedule import make_schedule

__all__ = ["backward", "backward_launches"]

MAX_SLOTTED_ENTRIES = 2**22  # most entries of a table whose gradient is summed in slots, 264 bytes for an entry


@dataclass(frozen=True)
class TableGradient:
    """A lookup in the score whose table needs a gradient."""

    node: Lookup
    slot: int  # the index of the table in Problem.tables
    kind: str  # "pair", "query", "key", "head" or "any": see `kernels.table_gradient`

    @property
    def entry(self) -> Expression:
        """The index, in C order, of the table entry that a pair reads."""
        found, *others = self.node.arguments
        for index, length in zip(others, self.node.table.shape[1:], strict=True):
            found = found * length + index
        return found

    def is_owned_by(self, name: str) -> bool:
        """True if an index of the lookup is the symbol `name` itself, so one value of b, h, i or j reads an entry."""
        return any(argument is SYMBOLS[name] for argument in self.node.arguments)


def backward(
    problem: Problem,
    d_output: Any,
    d_lse: Any,
    saved: tuple[Any, Any],
    wanted_tables: Collection[int],
    statistic_gradients: StatisticGradients,
    architecture: str | None,
) -> Gradients | None:
    """Return the gradients of Σ d_output ∘ output + Σ d_lse ∘ lse, as `Kernel.backward` defines them.

    Return None, so that streaming computes the gradients, if a table that needs a gradient
    - has more than `MAX_SLOTTED_ENTRIES` entries, and is not indexed by both i and j;
    - has entries that more than `MAX_ADDITIONS` pairs may read, and is not indexed by both i and j;
    - is indexed by both i and j, and heads or batches share its entries, on AMD.
    """
    architecture = architecture or architecture_of(problem.query.device)
    table_gradients = list(_table_gradients(problem, wanted_tables))
    if not all(_is_supported(problem, table_gradient, architecture) for table_gradient in table_gradients):
        return None
    query, batch_shape = problem.query, problem.batch_shape
    d_lse_terms = [term for term in (d_lse, statistic_gradients.lse) if term is not None]
    d_lse = sum(detach(term).to(torch.float64) for term in d_lse_terms) if d_lse_terms else None
    gradients = {
        "d_query": query.new_empty((*batch_shape, problem.H, problem.n, problem.d_k)),
        "d_key": query.new_empty((*batch_shape, problem.G, problem.m, problem.d_k)),
        "d_value": query.new_empty((*batch_shape, problem.G, problem.m, problem.d_v)),
    }
    accumulator = getattr(torch, problem.accumulator)
    rows = tuple(query.new_empty((*batch_shape, problem.H, problem.n), dtype=accumulator) for _ in range(3))
    sums = tuple(_allocate_sums(problem, table_gradient) for table_gradient in table_gradients)
    arrays = gradients | {
        "output": to_operand(detach(saved[0])),
        "d_output": to_operand(detach(d_output).to(query.dtype)),
        "d_lse": None if d_lse is None else d_lse.expand(rows[0].shape).contiguous(),
        "lse": detach(saved[1]).contiguous(),
        "rows": rows,
        "sums": sums,
    }
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        for launch in backward_launches(problem, arrays, table_gradients, statistic_gradients, architecture):
            launch.launch()
    return Gradients(
        query=gradients["d_query"],
        key=gradients["d_key"],
        value=gradients["d_value"],
        tables=_finish_table_gradients(problem, table_gradients, sums),
        sinks=None if problem.sinks is None else _sink_gradients(problem, detach(saved[1]), rows[2]),
    )


def backward_launches(
    problem: Problem,
    arrays: dict[str, Any],
    table_gradients: Sequence[TableGradient],
    statistic_gradients: StatisticGradients,
    architecture: str,
) -> Iterator[KernelLaunch]:
    """Yield the launches of the backward pass.

    In order: δ with the scaled lse; dQ; dQ NaN-safe; dK with dV; dK with dV NaN-safe. A NaN-safe launch recomputes the
    blocks of the launch before it that are not finite. `arrays` has the kernels' arguments output, d_output, d_lse,
    lse, rows, sums, d_query, d_key and d_value.
    """
    sizes = select("backward_queries", problem, architecture)
    formulas = {  # by the fields of `FormulaFunctions`
        "score_derivative_at": None if problem.score is None else derivative(problem.score),
        "d_weights_at": statistic_gradients.weights,
        "d_scores_at": statistic_gradients.scores,
    }
    extra_formulas = [(name, formula, True) for name, formula in formulas.items() if formula is not None]
    for k, table_gradient in enumerate(table_gradients):
        assert problem.score is not None
        extra_formulas += [
            (f"derivative_{k}", derivative(problem.score, table_gradient.node), True),
            (f"entry_{k}", table_gradient.entry, False),
        ]
    operands = Operands(problem, sizes, extra_formulas, (arrays["output"], arrays["d_output"]))
    common = operands.common_arguments() | {"d_output": arrays["d_output"], "rows": arrays["rows"]}
    yield from _query_launches(problem, operands, sizes, common, arrays, table_gradients)
    sizes = select("backward_keys", problem, architecture)
    yield from _key_launches(problem, operands, sizes, common | {"meta": operands.meta(sizes)}, arrays)


def _query_launches(
    problem: Problem,
    operands: Operands,
    sizes: Configuration,
    common: dict[str, Any],
    arrays: dict[str, Any],
    table_gradients: Sequence[TableGradient],
) -> Iterator[KernelLaunch]:
    blocks = -(-problem.n // sizes.rows)
    items = problem.B * problem.H * blocks
    common = common | {"blocks": blocks, "schedule": make_schedule(problem, sizes.rows, sizes.keys)}
    preprocess_arguments = common | {name: arrays[name] for name in ("output", "d_lse", "lse")}
    yield KernelLaunch(backward_preprocess, items, preprocess_arguments, sizes, operands.sources)

    pair_lookups = [table_gradient for table_gradient in table_gradients if table_gradient.kind == "pair"]
    batches = problem.B if all(table_gradient.is_owned_by("b") for table_gradient in pair_lookups) else 1
    heads = problem.H if all(table_gradient.is_owned_by("h") for table_gradient in pair_lookups) else 1
    common |= {
        "items": items,
        "nonfinite_flags": operands.allocate_flags(items),
        "dropout_state": operands.dropout_state(),
        "dropout_scale": operands.dropout_scale(),
        "d_query": arrays["d_query"],
        "B": problem.B,
        "batches": batches,
        "heads": heads,
        "sums": None,
        "KINDS": (),
        "SEQUENTIAL": bool(pair_lookups),
        "SUBBLOCKS": 0,
    }
    table_gradients_at = _combine_table_gradients(operands, len(table_gradients))
    arguments = common | {
        "formulas": common["formulas"]._replace(table_gradients_at=table_gradients_at),
        "sums": arrays["sums"],
        "KINDS": tuple(table_gradient.kind for table_gradient in table_gradients),
    }
    yield KernelLaunch(backward_queries, batches * heads * blocks, arguments, sizes, operands.sources)
    small_sizes = replace(sizes, rows=min(sizes.rows, NAN_SAFE_ROWS))
    yield nan_safe_launch(backward_queries, common, operands, sizes, small_sizes)


def _key_launches(
    problem: Problem, operands: Operands, sizes: Configuration, common: dict[str, Any], arrays: dict[str, Any]
) -> Iterator[KernelLaunch]:
    blocks = -(-problem.m // sizes.keys)
    items = problem.B * problem.G * blocks
    arguments = common | {
        "blocks": blocks,
        "items": items,
        "schedule": make_schedule(problem, sizes.rows, sizes.keys, of_keys=True),
        "nonfinite_flags": operands.allocate_flags(items),
        "dropout_state": operands.dropout_state(),
        "dropout_scale": operands.dropout_scale(),
        "d_key": arrays["d_key"],
        "d_value": arrays["d_value"],
        "SUBBLOCKS": 0,
    }
    yield KernelLaunch(backward_keys, items, arguments, sizes, operands.sources)
    small_sizes = replace(sizes, keys=min(sizes.keys, NAN_SAFE_ROWS))
    yield nan_safe_launch(backward_keys, arguments, operands, sizes, small_sizes)


# -- tables and sinks --------------------------------------------------------------------------------------------------
def _table_gradients(problem: Problem, wanted_tables: Collection[int]) -> Iterator[TableGradient]:
    """Yield every float lookup in the score whose table is one of `wanted_tables`, with its kind."""
    slots = {id(table): slot for slot, table in enumerate(problem.tables)}
    for node in [] if problem.score is None else walk(problem.score):
        if isinstance(node, Lookup) and node.kind == "float" and slots[id(node.table)] in wanted_tables:
            table_gradient = TableGradient(node, slots[id(node.table)], "any")
            reads = table_gradient.entry.free_symbols & {"i", "j"}
            if table_gradient.is_owned_by("i") and table_gradient.is_owned_by("j"):
                kind = "pair"
            else:
                kind = {"": "head", "i": "query", "j": "key"}.get("".join(sorted(reads)), "any")
            yield replace(table_gradient, kind=kind)


def _is_supported(problem: Problem, table_gradient: TableGradient, architecture: str) -> bool:
    """True if the kernels can sum a table's gradient; `backward` lists the limits.

    A program processes heads that share an entry one after another, and each head reads the sums of the previous head.
    On AMD Triton's barrier does not make a program's writes to memory visible to its other threads.
    """
    if table_gradient.kind == "pair":
        lengths = {"b": problem.B, "h": problem.H}
        is_shared = any(length > 1 and not table_gradient.is_owned_by(name) for name, length in lengths.items())
        return not (is_shared and architecture.startswith("gfx"))
    pairs = math.prod(problem.extent)  # at most so many read one entry
    for name, length in zip("bhij", problem.extent, strict=True):
        if table_gradient.is_owned_by(name):
            pairs //= max(length, 1)
    return math.prod(table_gradient.node.table.shape) <= MAX_SLOTTED_ENTRIES and pairs <= MAX_ADDITIONS


def _combine_table_gradients(operands: Operands, count: int) -> Any:
    """Return the function that gives (d score / d entry, entry index) of each lookup; None if `count` is 0."""
    at = "b, h, i, j, n, m, tables"
    names = [f"{name}_{k}" for k in range(count) for name in ("derivative", "entry")]
    calls = [f"(derivative_{k}(s, {at}), entry_{k}({at}))" for k in range(count)]
    return operands.combine_functions(names, calls, "table_gradients_at")


def _allocate_sums(problem: Problem, table_gradient: TableGradient) -> Any:
    """Return zeros to which the kernel adds a lookup's gradient: one sum, or `SLOTS` slots, for every table entry."""
    shape = table_gradient.node.table.shape
    if table_gradient.kind == "pair":
        return problem.query.new_zeros(shape, dtype=getattr(torch, problem.accumulator))
    return problem.query.new_zeros((*shape, SLOTS.value), dtype=torch.int64)


def _finish_table_gradients(
    problem: Problem, table_gradients: Sequence[TableGradient], sums: Sequence[Any]
) -> tuple[Any, ...]:
    """Return the gradient of every table of the problem in the table's dtype; None for a table without lookups here."""
    found: dict[int, Any] = {}
    for table_gradient, array in zip(table_gradients, sums, strict=True):
        slot, gradient = table_gradient.slot, array if table_gradient.kind == "pair" else _sum_slots(array)
        found[slot] = found[slot] + gradient if slot in found else gradient
    arrays = [table.array for table in problem.tables]
    return tuple(
        namespace(array).astype(convert(found[slot], array), array.dtype, copy=False) if slot in found else None
        for slot, array in enumerate(arrays)
    )


def _sum_slots(slots: Any) -> Any:
    """Return the sums that the slots (..., SLOTS) represent, float64; NaN if a summand was not finite."""
    units = torch.arange(SLOTS.value - 1, dtype=torch.float64, device=slots.device) * SLOT_BITS + FIRST_SLOT_EXPONENT
    total = (slots[..., :-1].to(torch.float64) * torch.exp2(units)).sum(-1)
    return torch.where(slots[..., -1] == 0, total, torch.nan)


def _sink_gradients(problem: Problem, lse: Any, delta: Any) -> Any:
    """Return dsink_h = −Σ exp(sink_h − lse) δ, summed over batches and queries, (H,) in the dtype of the sinks."""
    sinks = detach(problem.sinks)
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    terms = -torch.exp(sinks.to(torch.float64)[:, None] - safe) * delta.to(torch.float64)
    return terms.sum(-1).reshape(-1, problem.H).sum(0).to(sinks.dtype)
