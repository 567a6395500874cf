"""The backward kernels' calls and their answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...arrays import convert, namespace, plain
from ...formula.derivative import derivative
from ...formula.expression import SYMBOLS, Expression, Lookup, walk
from ...kernel import Gradients
from ...problem import Problem
from ...statistics import Slopes
from ..kernels.backward import prepare
from ..kernels.backward_keys import backward_keys
from ..kernels.backward_queries import backward_queries
from ..kernels.table_gradient import ADDITIONS, FIRST_UNIT, SLOT_BITS, SLOTS
from ..tuning.configurations import Configuration
from ..tuning.selection import architecture_of, chosen
from .arguments import Operands, operand
from .forward import CAREFUL_ROWS, careful_call
from .launcher import Call
from .schedule import schedule

__all__ = ["backward_calls", "gradients"]

MOST_ENTRIES = 2**22  # of a table whose sums are kept in slots, 264 bytes each


@dataclass(frozen=True)
class Gain:
    """A lookup of the score whose table gains a gradient; `kind` as in `gains`."""

    node: Lookup
    slot: int  # of its table in Problem.tables
    kind: str

    @property
    def place(self) -> Expression:
        """Which entry of the table, laid out in C order, a pair reads."""
        found, *others = self.node.arguments
        for index, length in zip(others, self.node.table.shape[1:], strict=True):
            found = found * length + index
        return found

    def owned(self, name: str) -> bool:
        """Whether the entry belongs to one b, h, i or j, being read at that symbol itself."""
        return any(argument is SYMBOLS[name] for argument in self.node.arguments)


def gradients(
    problem: Problem,
    d_output: Any,
    d_lse: Any,
    saved: tuple[Any, Any],
    wanted: Collection[int],
    slopes: Slopes,
    architecture: str | None,
) -> Gradients | None:
    """Gradients of Σ d_output ∘ output + Σ d_lse ∘ lse, as `plan.Kernel.gradients` has them.

    None, so that streaming serves, for tables of more than MOST_ENTRIES entries that are read otherwise than once by
    each pair, where one entry may be read by more pairs than its sum has room for, and on AMD for a dense table that
    heads or batches share.
    """
    architecture = architecture or architecture_of(problem.query.device)
    gains = list(_gains(problem, wanted))
    if not all(_fits(problem, gain, architecture) for gain in gains):
        return None
    query, lead = problem.query, problem.lead
    parts = [part for part in (d_lse, slopes.lse) if part is not None]
    d_lse = sum(plain(part).to(torch.float64) for part in parts) if parts else None
    shapes = {
        "d_query": (*lead, problem.H, problem.n, problem.d_k),
        "d_key": (*lead, problem.G, problem.m, problem.d_k),
        "d_value": (*lead, problem.G, problem.m, problem.d_v),
    }
    found = {name: query.new_empty(shape) for name, shape in shapes.items()}
    wide = getattr(torch, problem.accumulator)
    rows = tuple(query.new_empty((*lead, problem.H, problem.n), dtype=wide) for _ in range(3))
    sums = tuple(_sums(problem, gain) for gain in gains)
    given = {
        "output": operand(plain(saved[0])),
        "d_output": operand(plain(d_output).to(query.dtype)),
        "d_lse": None if d_lse is None else d_lse.expand(rows[0].shape).contiguous(),
        "lse": plain(saved[1]).contiguous(),
        "rows": rows,
        "sums": sums,
    }
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        for call in backward_calls(problem, given | found, gains, slopes, architecture):
            call.launch()
    return Gradients(
        query=found["d_query"],
        key=found["d_key"],
        value=found["d_value"],
        tables=_of_tables(problem, gains, sums),
        sinks=None if problem.sinks is None else _of_sinks(problem, plain(saved[1]), rows[2]),
    )


def backward_calls(
    problem: Problem, arrays: dict[str, Any], gains: Sequence[Gain], slopes: Slopes, architecture: str
) -> Iterator[Call]:
    """δ and lse as the others take them, dQ, dK and dV, and those blocks once more whose sums are not finite.

    `arrays` are the kernels' arguments of these names: output, d_output, d_lse, lse, rows, sums, d_query, ....
    """
    sizes = chosen("backward_queries", problem, architecture)
    formulas = {  # by the names that seams have
        "slope_at": None if problem.score is None else derivative(problem.score),
        "weights_at": slopes.weights,
        "scores_at": slopes.scores,
    }
    others = [(name, formula, True) for name, formula in formulas.items() if formula is not None]
    for k, gain in enumerate(gains):
        assert problem.score is not None
        others += [(f"slope_{k}", derivative(problem.score, gain.node), True), (f"place_{k}", gain.place, False)]
    given = Operands(problem, sizes, others, beside=(arrays["output"], arrays["d_output"]))
    common = given.common() | {"d_output": arrays["d_output"], "rows": arrays["rows"]}
    yield from _calls_of_queries(problem, given, sizes, common, arrays, gains)
    sizes = chosen("backward_keys", problem, architecture)
    yield from _calls_of_keys(problem, given, sizes, common | {"form": given.form(sizes)}, arrays)


def _calls_of_queries(
    problem: Problem,
    given: Operands,
    sizes: Configuration,
    common: dict[str, Any],
    arrays: dict[str, Any],
    gains: Sequence[Gain],
) -> Iterator[Call]:
    blocks = -(-problem.n // sizes.rows)
    items = problem.B * problem.H * blocks
    common = common | {"blocks": blocks, "schedule": schedule(problem, sizes.rows, sizes.keys)}
    before = {name: arrays[name] for name in ("output", "d_lse", "lse")}
    yield Call(prepare, items, common | before, sizes, given.sources)

    turns = [gain for gain in gains if gain.kind == "pair"]
    batches = problem.B if all(gain.owned("b") for gain in turns) else 1
    heads = problem.H if all(gain.owned("h") for gain in turns) else 1
    common |= {"random": given.random(), "kept": given.kept(), "d_query": arrays["d_query"], "PARTS": 0}
    common |= {"items": items, "tainted": given.marks(items), "sums": None, "KINDS": ()}
    common |= {"B": problem.B, "batches": batches, "heads": heads, "TURNS": bool(turns)}
    gaining = {
        "seams": common["seams"]._replace(gains_at=_gaining(given, len(gains))),
        "sums": arrays["sums"],
        "KINDS": tuple(gain.kind for gain in gains),
    }
    yield Call(backward_queries, batches * heads * blocks, common | gaining, sizes, given.sources)
    few = replace(sizes, rows=min(sizes.rows, CAREFUL_ROWS))
    yield careful_call(backward_queries, common, given, sizes, few)


def _calls_of_keys(
    problem: Problem, given: Operands, sizes: Configuration, common: dict[str, Any], arrays: dict[str, Any]
) -> Iterator[Call]:
    blocks = -(-problem.m // sizes.keys)
    items = problem.B * problem.G * blocks
    common = common | {"blocks": blocks, "schedule": schedule(problem, sizes.rows, sizes.keys, of_keys=True)}
    common |= {"random": given.random(), "kept": given.kept(), "PARTS": 0}
    common |= {"items": items, "tainted": given.marks(items), "d_key": arrays["d_key"], "d_value": arrays["d_value"]}
    yield Call(backward_keys, items, common, sizes, given.sources)
    few = replace(sizes, keys=min(sizes.keys, CAREFUL_ROWS))
    yield careful_call(backward_keys, common, given, sizes, few)


# -- tables and sinks --------------------------------------------------------------------------------------------------
def _gains(problem: Problem, wanted: Collection[int]) -> Iterator[Gain]:
    slots = {id(table): slot for slot, table in enumerate(problem.tables)}
    for node in [] if problem.score is None else walk(problem.score):
        if isinstance(node, Lookup) and node.kind == "float" and slots[id(node.table)] in wanted:
            gain = Gain(node, slots[id(node.table)], "any")
            reads = gain.place.reads & {"i", "j"}
            if gain.owned("i") and gain.owned("j"):
                kind = "pair"
            else:
                kind = {"": "head", "i": "query", "j": "key"}.get("".join(sorted(reads)), "any")
            yield replace(gain, kind=kind)


def _fits(problem: Problem, gain: Gain, architecture: str) -> bool:
    """Whether the sums of a table's entries have room, and heads that share them may take turns.

    On AMD a program's barrier does not wait for what its threads wrote to memory, which the next turn reads.
    """
    if gain.kind == "pair":
        alone = (problem.B == 1 or gain.owned("b")) and (problem.H == 1 or gain.owned("h"))
        return alone or not architecture.startswith("gfx")
    own = [length for name, length in zip("bhij", problem.extent, strict=True) if gain.owned(name)]
    pairs = problem.B * problem.H * problem.n * problem.m
    for length in own:
        pairs //= max(length, 1)
    entries = 1
    for length in gain.node.table.shape:
        entries *= length
    return entries <= MOST_ENTRIES and pairs <= ADDITIONS


def _gaining(given: Operands, count: int) -> Any:
    """The function of all gains: for each (d score / d entry, which entry); None where there are none."""
    at = "b, h, i, j, n, m, tables"
    names = [f"{name}_{k}" for k in range(count) for name in ("slope", "place")]
    return given.together(names, [f"(slope_{k}(s, {at}), place_{k}({at}))" for k in range(count)], "gains_at")


def _sums(problem: Problem, gain: Gain) -> Any:
    """Where a lookup's shares are added: the entries themselves, or their slots."""
    shape = gain.node.table.shape
    if gain.kind == "pair":
        return problem.query.new_zeros(shape, dtype=getattr(torch, problem.accumulator))
    return problem.query.new_zeros((*shape, SLOTS.value), dtype=torch.int64)


def _of_tables(problem: Problem, gains: Sequence[Gain], sums: Sequence[Any]) -> tuple[Any, ...]:
    """For each table of the problem its gradient, or None."""
    found: list[Any] = [None] * len(problem.tables)
    for gain, array in zip(gains, sums, strict=True):
        whole = array if gain.kind == "pair" else _of_slots(array)
        found[gain.slot] = whole if found[gain.slot] is None else found[gain.slot] + whole
    return tuple(
        None
        if array is None
        else namespace(table.array).astype(convert(array, table.array), table.array.dtype, copy=False)
        for array, table in zip(found, problem.tables, strict=True)
    )


def _of_slots(slots: Any) -> Any:
    """The sums that slots hold, float64; NaN where something was not finite."""
    units = torch.arange(SLOTS.value - 1, dtype=torch.float64, device=slots.device) * SLOT_BITS + FIRST_UNIT
    total = (slots[..., :-1].to(torch.float64) * torch.exp2(units)).sum(-1)
    return torch.where(slots[..., -1] == 0, total, torch.nan)


def _of_sinks(problem: Problem, lse: Any, delta: Any) -> Any:
    """dsink_h = −Σ exp(sink_h − lse) δ."""
    sinks = plain(problem.sinks)
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    shares = -torch.exp(sinks.to(torch.float64)[:, None] - safe) * delta.to(torch.float64)
    return shares.sum(-1).reshape(-1, problem.H).sum(0).to(sinks.dtype)
