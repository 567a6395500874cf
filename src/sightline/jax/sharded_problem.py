"""A problem whose queries and keys are divided among the devices of a mesh axis, and the formulas of its parts.

A rank is a device of the axis. A span is consecutive positions of a rank, and a key block is a span of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import numpy as np

from ..caching import cached_property
from ..call.options import Options
from ..call.problem import Problem, parse, validate
from ..errors import ShapeError, TableError
from ..formula.expression import Expression, conjuncts, table_lookup
from ..formula.tables import Table
from ..partition.needed_keys import Schedule, find_schedule
from ..partition.parts import part_of
from ..partition.shards import ShardLayout, Shards, divide
from .options import check_tables, example, fold_traced_scale


def divide_equally(length: int, ranks: int, layout: ShardLayout) -> Shards:
    """Return the division of a sequence among `ranks` ranks that have `length` positions each.

    Raises
    ------
    ShapeError
        The layout is "zigzag", and `length` is odd.
    """
    if layout == "zigzag" and length % 2:
        raise ShapeError(
            f'{length} positions on each device, layout="zigzag"',
            "an even number, because a device has two parts of equal length",
            f"pad the sequence to {(length + 1) * ranks} positions, and hide the added ones with mask=",
        )
    return divide(length * ranks, ranks, layout, alignment=1)


@dataclass(frozen=True, eq=False)
class ShardedProblem:
    """The problem of the whole sequence, and the division of its positions.

    whole : the problem of the whole sequence; its query, key and value have only shapes and dtypes
    queries, keys : the division of the queries and of the keys
    """

    whole: Problem
    queries: Shards
    keys: Shards

    @classmethod
    def of(cls, shards: Sequence[Any], sinks: Any, ranks: int, layout: ShardLayout, options: Options) -> ShardedProblem:
        """Return the problem whose query, key and value on one rank are `shards`; `options` are those of `parse`."""
        query, key, value = shards
        local = parse(query, key, value, Options(sinks=sinks))
        query, key, value = (example((*x.shape[:-2], ranks * x.shape[-2], x.shape[-1]), x.dtype) for x in shards)
        problem = replace(parse(query, key, value, fold_traced_scale(options)), sinks=local.sinks)
        check_tables(problem)
        return cls(problem, *[divide_equally(length, ranks, layout) for length in (local.n, local.m)])

    @cached_property
    def schedule(self) -> Schedule:
        """Which spans of queries see which key blocks, by the mask's conditions that are known while JAX traces."""
        length = max(self.keys.lengths, default=0)
        return find_schedule(self._known_mask, self.whole.extent, self.queries, self.keys, max(length, 1))

    @property
    def _known_mask(self) -> Expression | None:
        """A mask that reads no traced table and hides only pairs that the problem hides; None if nothing is known."""
        whole = replace(self.whole, see=())
        formulas = [formula for formula in (whole.mask, whole.score) if formula is not None]
        if not all(map(_is_known, formulas)):
            known = [] if whole.mask is None else [each for each in conjuncts(whole.mask) if _is_known(each)]
            if not known:
                return None
            whole = replace(whole, mask=reduce(lambda x, y: x & y, known), score=None)
        try:
            return validate(whole.map_tables(np.asarray)).mask
        except TableError:
            if all(map(_is_known, formulas)):
                raise
            return None  # a condition on a traced table may hide the pairs whose lookup is outside a known table

    def find_readers(self, distance: int, index: int) -> Any:
        """Return (ranks, spans) booleans: True where a span of rank r sees key block `index` of rank r − `distance`."""
        ranks, spans = len(self.queries.ranks), len(self.queries.ranks[0])
        if 0 in self.whole.extent:
            return np.zeros((ranks, spans), bool)
        columns = np.roll(self.schedule.columns[:, index], distance)
        sees = self.schedule.seeing[1].reshape(ranks, spans, -1) > 0
        return sees[np.arange(ranks), :, columns]

    def part(self, arrays: Sequence[Any], first_row: Any, first_key: Any) -> Problem:
        """Return the problem of query, key and value in `arrays`, from query `first_row` and key `first_key` on."""
        row, key = Table(first_row[None])[0], Table(first_key[None])[0]
        whole = self._without_spans
        return part_of(whole, *arrays, first_row=row, first_key=key, see=whole.see)

    @cached_property
    def _without_spans(self) -> Problem:
        """The whole problem with tables whose axes of queries and keys are longer than those of a part."""
        lookup = table_lookup(lambda table: table.without_axes("i", "j"))
        return self.whole.map_formulas(lambda formula: formula.rewrite(lookup=lookup))


def _is_known(formula: Expression) -> bool:
    """True if the entries of every table are known before the program runs."""
    arrays = [table.array for table in formula.tables]
    return not any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in arrays)
