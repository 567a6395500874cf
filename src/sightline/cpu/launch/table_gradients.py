"""Gradients of learned tables and sinks: the sums that the backward kernel fills, and what follows from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays.operations import detach, dtype_name, namespace, resolve_dtype
from ...formula.expression import SYMBOLS
from ...problem.kernel import find_learned_lookups, sum_by_table, sum_sink_gradients
from ...problem.problem import Problem


@dataclass(frozen=True)
class TableGradient:
    """A lookup of the score whose table needs a gradient."""

    node_index: int  # index of the lookup in `walk(score)`
    slot: int  # index of the table in Problem.tables
    # True if each entry of the table belongs to one key, as in t[h, i, j]: only one split of the keys writes the entry
    is_per_key: bool
    is_per_head: bool  # True if every entry of the table belongs to one query head, as in t[h, j]


def find_table_gradients(problem: Problem, wanted_tables: Collection[int]) -> Iterator[TableGradient]:
    """Yield a description of each lookup of the score whose table is among `wanted_tables`."""
    lookups = find_learned_lookups(problem, wanted_tables)

    def is_indexed_by(slot: int, name: str, length: int) -> bool:
        """True if the symbol `name` itself is the index of one axis, the same in all lookups of the table.

        An axis shorter than the symbol's range is not accepted: at hidden pairs, indices past the end of the axis are
        clamped to the last entry, so that several threads may write that entry.
        """
        axes_by_lookup = [
            {axis for axis, x in enumerate(node.arguments) if x is SYMBOLS[name] and node.table.shape[axis] >= length}
            for _, node, other in lookups
            if other == slot
        ]
        return bool(set.intersection(*axes_by_lookup))

    for node_index, _, slot in lookups:
        yield TableGradient(node_index, slot, is_indexed_by(slot, "j", problem.m), is_indexed_by(slot, "h", problem.H))


def sum_table_gradients(
    table_gradients: Sequence[TableGradient], sums: Sequence[Any], tables: Mapping[int, Any]
) -> dict[int, Any]:
    """Return the gradient of each table by its slot, in the table's library and dtype.

    The gradients of all lookups of one table are added. `tables` has the array of each slot.
    """
    pairs = zip(table_gradients, sums, strict=True)
    return sum_by_table([(one.slot, array if one.is_per_key else array.sum(axis=0)) for one, array in pairs], tables)


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
