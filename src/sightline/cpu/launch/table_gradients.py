"""The lookups of learned tables, whose gradients the backward kernel sums."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ...formula.expression import SYMBOLS
from ...problem.kernel import find_learned_lookups
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
