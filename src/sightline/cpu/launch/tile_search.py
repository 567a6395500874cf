"""The call of the search for tile ranges, the blocks of keys that each block of queries must process."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.caching import cached_property
from ...formula.expression import as_expression
from ...formula.formula_checks import stay_inside_for_all_entries
from ..codegen.abi import pack_fields, to_word
from ..codegen.render_bounds import EXTREMES_BLOCK, EXTREMES_BYTES
from ..kernels.tile_search import (
    SEARCH_FIELDS,
    SearchSpec,
    TileSearch,
    checked_nodes,
    has_arguments,
    tables_with_extremes,
)
from .arguments import KernelArguments


class BoundSearch:
    """A search for tile ranges with fixed formulas, lengths and table layouts. Each call gives tables and numbers.

    packed : the argument block of the search
    capacity : the number of tile ranges for which a new buffer has memory
    is_needed : True if new records search for tile ranges: the ranges or the checks of the search depend on tables, no
        tile ranges are bound, or a call had other numbers than the first call
    can_repeat : False if an index may leave its table at hidden pairs, and tables decide which pairs are hidden
        If numbers decide it, the search of a call with other numbers fails.
    """

    def __init__(self, arguments: KernelArguments) -> None:
        problem, spec, ranges = arguments.problem, arguments.spec, arguments.tile_ranges
        mask, *others = arguments.formulas
        formulas = (as_expression(True) if mask is None else mask, *[f for f in others if f is not None])
        self.rows = ranges.batches * ranges.heads * ranges.query_blocks
        self.capacity = max(2 * ranges.first.size, self.rows)
        self.num_extremes = sum(map(_count_blocks, (arguments.tables[k] for k in tables_with_extremes(formulas))))
        reads_tables = bool(formulas[0].tables) or any(node.tables for node in checked_nodes(formulas))
        self.is_needed = reads_tables or not arguments.has_tile_ranges
        self.can_repeat = not any(spec.clamped) or stay_inside_for_all_entries(
            arguments.problem_formulas, spec.clamped, problem.extent
        )
        self.first_numbers = np.array([to_word(number) for number in arguments.numbers], np.int64)
        fields = dict.fromkeys(SEARCH_FIELDS, 0) | {
            "B": problem.B,
            "H": problem.H,
            "n": problem.n,
            "m": problem.m,
            "batches": ranges.batches,
            "heads": ranges.heads,
            "query_block": arguments.query_block,
            "first_numbers": self.first_numbers.ctypes.data,
            "max_integer": 2.0**53 if spec.needs_int64 else 2.0**31 - 1,
        }
        self.packed = pack_fields(SEARCH_FIELDS, fields, arguments.tables, arguments.numbers)
        clamped = [own for f, own in zip(arguments.formulas[1:], spec.clamped[1:], strict=True) if f is not None]
        texts = tuple(formula.text for formula in formulas[1:])
        self.spec = SearchSpec(formulas[0].text, texts, spec.tables, (spec.clamped[0], *clamped))
        self.formulas, self.processor = formulas, arguments.processor

    @classmethod
    def of(cls, arguments: KernelArguments) -> BoundSearch | None:
        """Return the search of a call; None if the bound tile ranges serve all calls, and nothing must be checked."""
        formulas = [formula for formula in arguments.formulas if formula is not None]
        mask = arguments.formulas[0]
        if arguments.has_tile_ranges and (mask is None or not has_arguments(mask)) and not checked_nodes(formulas):
            return None
        return cls(arguments)

    @cached_property
    def address(self) -> Any:
        """The address of the search's code, which is compiled for the first repeated call."""
        mask, *others = self.formulas
        name = "sightline_tile_search"
        return self.processor.kernel(repr(self.spec), name, lambda: TileSearch(self.spec, mask, others).write(name))

    def extend(self, count: int) -> None:
        """From now on, let new records search, with memory for twice as many tile ranges as a search has found."""
        self.capacity = max(self.capacity, 2 * count)
        self.is_needed = True

    def workspace(self, capacity: int) -> dict[str, int]:
        """Return the fields that point into a buffer for so many ranges, and the length of each in 8-byte words."""
        return {
            "start": self.rows + 1,
            "first": capacity,
            "last": capacity,
            "full": -(-capacity // 8),
            "extremes": self.num_extremes * EXTREMES_BYTES // 8,
            "count": 1,
        }


def _count_blocks(table: Any) -> int:
    """Return how many blocks of a table get a minimum and a maximum; an axis with stride 0 counts as one entry."""
    lengths = [1 if stride == 0 else length for length, stride in zip(table.shape, table.strides, strict=True)]
    return int(np.prod(lengths[:-1])) * -(-lengths[-1] // EXTREMES_BLOCK)
