"""The backward kernels' calls and their answer."""

from __future__ import annotations

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

MAX_SLOTTED_ENTRIES = 2**22  # of a table whose sums are kept in slots, 264 bytes each


@dataclass(frozen=True)
class TableGradient:
    """A lookup of the score whose table gains a gradient; `kind` as in `table_gradients`."""

    node: Lookup
    slot: int  # of its table in Problem.tables
    kind: str

    @property
    def entry(self) -> Expression:
        """Which entry of the table, laid out in C order, a pair reads."""
        found, *others = self.node.arguments
        for index, length in zip(others, self.node.table.shape[1:], strict=True):
            found = found * length + index
        return found

    def is_owned_by(self, name: str) -> bool:
        """Whether the entry belongs to one b, h, i or j, being read at that symbol itself."""
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
    """Gradients of Σ d_output ∘ output + Σ d_lse ∘ lse, as `plan.Kernel.backward` has them.

    None, so that streaming serves, for tables of more than MOST_ENTRIES entries that are read otherwise than once by
    each pair, where one entry may be read by more pairs than its sum has room for, and on AMD for a dense table that
    heads or batches share.
    """
    architecture = architecture or architecture_of(problem.query.device)
    table_gradients = list(_table_gradients(problem, wanted_tables))
    if not all(_is_supported(problem, table_gradient, architecture) for table_gradient in table_gradients):
        return None
    query, lead = problem.query, problem.batch_shape
    parts = [part for part in (d_lse, statistic_gradients.lse) if part is not None]
    d_lse = sum(detach(part).to(torch.float64) for part in parts) if parts else None
    shapes = {
        "d_query": (*lead, problem.H, problem.n, problem.d_k),
        "d_key": (*lead, problem.G, problem.m, problem.d_k),
        "d_value": (*lead, problem.G, problem.m, problem.d_v),
    }
    found = {name: query.new_empty(shape) for name, shape in shapes.items()}
    wide = getattr(torch, problem.accumulator)
    rows = tuple(query.new_empty((*lead, problem.H, problem.n), dtype=wide) for _ in range(3))
    sums = tuple(_allocate_sums(problem, table_gradient) for table_gradient in table_gradients)
    operands = {
        "output": to_operand(detach(saved[0])),
        "d_output": to_operand(detach(d_output).to(query.dtype)),
        "d_lse": None if d_lse is None else d_lse.expand(rows[0].shape).contiguous(),
        "lse": detach(saved[1]).contiguous(),
        "rows": rows,
        "sums": sums,
    }
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        for call in backward_launches(problem, operands | found, table_gradients, statistic_gradients, architecture):
            call.launch()
    return Gradients(
        query=found["d_query"],
        key=found["d_key"],
        value=found["d_value"],
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
    """δ and lse as the others take them, dQ, dK and dV, and those blocks once more whose sums are not finite.

    `arrays` are the kernels' arguments of these names: output, d_output, d_lse, lse, rows, sums, d_query, ....
    """
    sizes = select("backward_queries", problem, architecture)
    formulas = {  # by the names that seams have
        "score_derivative_at": None if problem.score is None else derivative(problem.score),
        "d_weights_at": statistic_gradients.weights,
        "d_scores_at": statistic_gradients.scores,
    }
    others = [(name, formula, True) for name, formula in formulas.items() if formula is not None]
    for k, table_gradient in enumerate(table_gradients):
        assert problem.score is not None
        others += [
            (f"slope_{k}", derivative(problem.score, table_gradient.node), True),
            (f"place_{k}", table_gradient.entry, False),
        ]
    operands = Operands(problem, sizes, others, extra_arrays=(arrays["output"], arrays["d_output"]))
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
    before = {name: arrays[name] for name in ("output", "d_lse", "lse")}
    yield KernelLaunch(backward_preprocess, items, common | before, sizes, operands.sources)

    pair_lookups = [table_gradient for table_gradient in table_gradients if table_gradient.kind == "pair"]
    batches = problem.B if all(table_gradient.is_owned_by("b") for table_gradient in pair_lookups) else 1
    heads = problem.H if all(table_gradient.is_owned_by("h") for table_gradient in pair_lookups) else 1
    common |= {
        "dropout_state": operands.dropout_state(),
        "dropout_scale": operands.dropout_scale(),
        "d_query": arrays["d_query"],
        "SUBBLOCKS": 0,
    }
    common |= {"items": items, "nonfinite_flags": operands.allocate_flags(items), "sums": None, "KINDS": ()}
    common |= {"B": problem.B, "batches": batches, "heads": heads, "SEQUENTIAL": bool(pair_lookups)}
    with_table_gradients = {
        "formulas": common["formulas"]._replace(
            table_gradients_at=_combine_table_gradients(operands, len(table_gradients))
        ),
        "sums": arrays["sums"],
        "KINDS": tuple(table_gradient.kind for table_gradient in table_gradients),
    }
    yield KernelLaunch(
        backward_queries, batches * heads * blocks, common | with_table_gradients, sizes, operands.sources
    )
    small_sizes = replace(sizes, rows=min(sizes.rows, NAN_SAFE_ROWS))
    yield nan_safe_launch(backward_queries, common, operands, sizes, small_sizes)


def _key_launches(
    problem: Problem, operands: Operands, sizes: Configuration, common: dict[str, Any], arrays: dict[str, Any]
) -> Iterator[KernelLaunch]:
    blocks = -(-problem.m // sizes.keys)
    items = problem.B * problem.G * blocks
    common = common | {"blocks": blocks, "schedule": make_schedule(problem, sizes.rows, sizes.keys, of_keys=True)}
    common |= {"dropout_state": operands.dropout_state(), "dropout_scale": operands.dropout_scale(), "SUBBLOCKS": 0}
    common |= {
        "items": items,
        "nonfinite_flags": operands.allocate_flags(items),
        "d_key": arrays["d_key"],
        "d_value": arrays["d_value"],
    }
    yield KernelLaunch(backward_keys, items, common, sizes, operands.sources)
    small_sizes = replace(sizes, keys=min(sizes.keys, NAN_SAFE_ROWS))
    yield nan_safe_launch(backward_keys, common, operands, sizes, small_sizes)


# -- tables and sinks --------------------------------------------------------------------------------------------------
def _table_gradients(problem: Problem, wanted_tables: Collection[int]) -> Iterator[TableGradient]:
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
    """Whether the sums of a table's entries have room, and heads that share them may take turns.

    On AMD a program's barrier does not wait for what its threads wrote to memory, which the next turn reads.
    """
    if table_gradient.kind == "pair":
        alone = (problem.B == 1 or table_gradient.is_owned_by("b")) and (
            problem.H == 1 or table_gradient.is_owned_by("h")
        )
        return alone or not architecture.startswith("gfx")
    own = [length for name, length in zip("bhij", problem.extent, strict=True) if table_gradient.is_owned_by(name)]
    pairs = problem.B * problem.H * problem.n * problem.m
    for length in own:
        pairs //= max(length, 1)
    entries = 1
    for length in table_gradient.node.table.shape:
        entries *= length
    return entries <= MAX_SLOTTED_ENTRIES and pairs <= MAX_ADDITIONS


def _combine_table_gradients(operands: Operands, count: int) -> Any:
    """The function of all gains: for each (d score / d entry, which entry); None where there are none."""
    at = "b, h, i, j, n, m, tables"
    names = [f"{name}_{k}" for k in range(count) for name in ("slope", "place")]
    return operands.combine_functions(
        names, [f"(slope_{k}(s, {at}), place_{k}({at}))" for k in range(count)], "table_gradients_at"
    )


def _allocate_sums(problem: Problem, table_gradient: TableGradient) -> Any:
    """Where a lookup's shares are added: the entries themselves, or their slots."""
    shape = table_gradient.node.table.shape
    if table_gradient.kind == "pair":
        return problem.query.new_zeros(shape, dtype=getattr(torch, problem.accumulator))
    return problem.query.new_zeros((*shape, SLOTS.value), dtype=torch.int64)


def _finish_table_gradients(
    problem: Problem, table_gradients: Sequence[TableGradient], sums: Sequence[Any]
) -> tuple[Any, ...]:
    """For each table of the problem its gradient, or None."""
    found: list[Any] = [None] * len(problem.tables)
    for table_gradient, array in zip(table_gradients, sums, strict=True):
        whole = array if table_gradient.kind == "pair" else _sum_slots(array)
        found[table_gradient.slot] = whole if found[table_gradient.slot] is None else found[table_gradient.slot] + whole
    return tuple(
        None
        if array is None
        else namespace(table.array).astype(convert(array, table.array), table.array.dtype, copy=False)
        for array, table in zip(found, problem.tables, strict=True)
    )


def _sum_slots(slots: Any) -> Any:
    """The sums that slots hold, float64; NaN where something was not finite."""
    units = torch.arange(SLOTS.value - 1, dtype=torch.float64, device=slots.device) * SLOT_BITS + FIRST_SLOT_EXPONENT
    total = (slots[..., :-1].to(torch.float64) * torch.exp2(units)).sum(-1)
    return torch.where(slots[..., -1] == 0, total, torch.nan)


def _sink_gradients(problem: Problem, lse: Any, delta: Any) -> Any:
    """dsink_h = −Σ exp(sink_h − lse) δ."""
    sinks = detach(problem.sinks)
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    shares = -torch.exp(sinks.to(torch.float64)[:, None] - safe) * delta.to(torch.float64)
    return shares.sum(-1).reshape(-1, problem.H).sum(0).to(sinks.dtype)
