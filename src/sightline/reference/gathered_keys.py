"""The kernel `gather`: attention to short lists of single keys, in O(n · c) time and memory.

A mask such as (j == t[i, 0]) | (j == t[i, 1]) names at most c keys for each query. The kernel copies the keys and the
values of these lists, for some queries at a time. In the copies, each query is a sequence of its own with c keys.
Another kernel computes these sequences, with their statistics and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from ..arrays.operations import (
    FLOATS,
    convert,
    device_option,
    dtype_name,
    empty,
    has_heads_in_rows,
    namespace,
    resolve_dtype,
    to_numpy,
)
from ..call import kernel as kernels
from ..call.gradient_parts import subtract_rounding, widen
from ..call.kernel import GivenGradients, Gradients, Kernel, Refusal, Result
from ..call.problem import OPERANDS, Problem
from ..formula.block_lists import PAIRS_PER_CALL, PAIRS_PER_KEY
from ..formula.evaluate_array import evaluate
from ..formula.expression import SYMBOLS, Apply, Expression, Lookup, Offset, as_expression, conjuncts, intern
from ..formula.tables import Table
from ..formula.tile_ranges import find_tile_ranges
from ..statistics import Statistic, arrays_of
from ..statistics.contexts import ForwardContext
from ..statistics.dispatch import dispatch_statistics
from ..statistics.reduction import Extremum, cell_of
from . import streaming

PART_BYTES = 32 << 20  # the size of the copies of keys and values in one part
TILE_SIDE = 256


@dataclass(frozen=True)
class KeyLists:
    """The lists of keys that a mask names.

    entries : formulas of the listed keys, and their numbers of keys; in a formula, j counts these keys from 0
    conditions : what a listed key must also satisfy, so that a query attends to it
    """

    entries: tuple[tuple[Expression, int], ...]
    conditions: tuple[Expression, ...]

    @property
    def length(self) -> int:
        """The number of keys in the list of a query, c."""
        return sum(count for _, count in self.entries)

    @property
    def differ_by_head(self) -> bool:
        return any("h" in formula.free_symbols for formula, _ in self.entries)

    @classmethod
    def of(cls, mask: Expression | None) -> KeyLists | None:
        """Return the shortest lists that a mask names; None if no condition of the mask names keys by a table."""
        conditions = [] if mask is None else conjuncts(mask)
        lists_of_mask = []
        for condition in conditions:
            entries = [_read_entry(term) for term in conjuncts(condition, "logical_or")]
            known = tuple([entry for entry in entries if entry is not None])
            if condition.tables and len(known) == len(entries):
                is_exact = all(count == 1 for _, count in known)
                lists_of_mask.append(
                    cls(known, tuple([kept for kept in conditions if kept is not condition or not is_exact]))
                )
        return min(lists_of_mask, key=lambda lists: lists.length, default=None)


def _read_entry(condition: Expression) -> tuple[Expression, int] | None:
    """Return (formula, count) if the condition holds only at keys that the formula has for j from 0 to count − 1.

    These are the conditions j == formula without j, and j == table[..., index], where one index reads j.
    """
    j = SYMBOLS["j"]
    sides = condition.arguments if isinstance(condition, Apply) and condition.operator == "equal" else ()
    others = [side for side in sides if side is not j]
    if len(others) != 1 or others[0].kind != "int":
        return None
    (named,) = others
    axes = [axis for axis, index in enumerate(named.arguments) if "j" in index.free_symbols]
    if not axes:
        return named, 1
    if not isinstance(named, Lookup) or len(axes) != 1:
        return None
    indices = [j if axis == axes[0] else index for axis, index in enumerate(named.arguments)]
    return intern(Lookup(named.table, tuple(indices))), named.table.shape[axes[0]]


@dataclass(frozen=True, eq=False)
class GatheredPart:
    """Some queries of a problem, with copies of the keys in their lists.

    rows : the queries
    keys : (B, queries, 1 or H, c) int64, the positions of the copied keys in ascending order
    places : (B · queries · key heads · c) int64, the rows of the copied keys in `Gathering.key` and `Gathering.value`
    problem : the problem of B · queries sequences, each of one query and c keys
    symbols : what b, i, j, n and m of the whole problem are in formulas of `problem`
    """

    rows: slice
    keys: Any
    places: Any
    problem: Problem
    symbols: dict[str, Expression]


class Gathering:
    """A problem with lists of keys, and its parts. `key` and `value` have the rows of all sequences and heads."""

    def __init__(self, problem: Problem) -> None:
        lists = KeyLists.of(problem.mask)
        assert lists is not None
        self.problem, self.lists, self.xp = problem, lists, namespace(problem.query)
        self.key_heads = problem.H if lists.differ_by_head else problem.G
        self.key, self.value = (self.xp.reshape(x, (-1, x.shape[-1])) for x in (problem.key, problem.value))

    def parts(self, see: tuple[Statistic, ...] = ()) -> Iterator[GatheredPart]:
        """Yield parts of so many queries that the copies of their keys and values have about `PART_BYTES`."""
        problem = self.problem
        row_bytes = sum(x.shape[-1] * x.dtype.itemsize for x in (self.key, self.value))
        count = max(PART_BYTES // max(problem.B * self.key_heads * self.lists.length * row_bytes, 1), 1)
        for start in range(0, problem.n, count):
            yield self._part(slice(start, min(start + count, problem.n)), see)

    def _part(self, rows: slice, see: tuple[Statistic, ...]) -> GatheredPart:
        problem, xp, count = self.problem, self.xp, rows.stop - rows.start
        keys, is_visible = self._find_keys(rows)
        b, j = SYMBOLS["b"], SYMBOLS["j"]

        def look_up(array: Any) -> Expression:
            table = Table(xp.reshape(array, (-1, *array.shape[2:])), has_unknown_entries=True)
            return table[b, SYMBOLS["h"] if array.shape[2] > 1 else 0, j]

        sequence, query = (b // count, b % count) if problem.B > 1 else (as_expression(0), b)
        lengths = {"n": as_expression(problem.n), "m": as_expression(problem.m)}
        first = intern(Offset(rows.start, "int", name="i"))
        symbols = {"b": sequence, "i": query + first, "j": look_up(keys), **lengths}
        heads = self.arange(self.key_heads)[:, None] // (self.key_heads // problem.G)
        rows_of_keys = (self.arange(problem.B)[:, None, None, None] * problem.G + heads) * problem.m + keys
        places = xp.reshape(rows_of_keys, (-1,))
        key, value = (xp.reshape(xp.take(x, places, axis=0), (*rows_of_keys.shape, -1)) for x in (self.key, self.value))
        part = replace(problem, query=self.rows_of(problem.query, rows), key=key, value=value, mask=None, see=see)
        part = replace(part.map_formulas(lambda formula: formula.rewrite(symbols)), mask=look_up(is_visible))
        return GatheredPart(rows, keys, places, part, symbols)

    def _find_keys(self, rows: slice) -> tuple[Any, Any]:
        """Return (listed positions, True where the query attends to the position), (B, queries, 1 or H, c).

        The positions ascend. A position that a list repeats counts once. Numbers that are no position become positions.
        """
        xp, (B, H, n, m) = self.xp, self.problem.extent
        b, i = self.arange(B)[:, None, None, None], self.arange(rows.start, rows.stop)[:, None, None]

        def evaluate_at(formula: Expression, heads: int, j: Any) -> Any:
            symbols = {"b": b, "h": self.arange(heads)[:, None], "i": i, "j": j, "n": n, "m": m}
            return evaluate(formula, symbols, xp=xp, float_dtype=xp.float64, like=self.problem.query)

        heads = H if self.lists.differ_by_head else 1
        listed = [
            xp.broadcast_to(evaluate_at(formula, heads, self.arange(count)), (B, i.shape[0], heads, count))
            for formula, count in self.lists.entries
        ]
        keys = xp.sort(xp.concat(listed, axis=-1), axis=-1)
        is_visible = (keys >= 0) & (keys < m)
        is_visible[..., 1:] &= keys[..., 1:] != keys[..., :-1]
        keys = xp.clip(keys, 0, m - 1)
        for condition in self.lists.conditions:
            is_visible = is_visible & evaluate_at(condition, H, keys)
        return keys, is_visible

    def arange(self, *span: int) -> Any:
        return self.xp.arange(*span, dtype=self.xp.int64, **device_option(self.problem.query))

    def rows_of(self, array: Any, rows: slice) -> Any:
        """Return a view (B, queries, H, 1, ...) of rows of an array (*batch_shape, H, n, ...)."""
        array = self.xp.reshape(array, (self.problem.B, *array.shape[len(self.problem.batch_shape) :]))
        return self.xp.moveaxis(array[:, :, rows], 1, 2)[:, :, :, None]

    def add_statistic(
        self, statistic: Statistic, arrays: Sequence[Any], part: GatheredPart, part_arrays: Sequence[Any]
    ) -> None:
        """Add the arrays of a part's statistic to the arrays of the whole problem's statistic."""
        xp = self.xp
        if "i" in statistic.axes:
            self._add_to_cells(statistic, arrays[0], part, part_arrays[0])
            return
        self.rows_of(arrays[0], part.rows)[...] = part_arrays[0]
        if len(part_arrays) > 1:  # positions among the copied keys; −1 for none
            where = xp.reshape(part_arrays[1], (*part_arrays[1].shape[:3], -1))
            keys = Extremum(None, where).at_positions(part.keys).where
            self.rows_of(arrays[1], part.rows)[...] = xp.reshape(keys, part_arrays[1].shape)

    def _add_to_cells(self, statistic: Any, array: Any, part: GatheredPart, entries: Any) -> None:
        """Combine entries (B, queries, H, 1, c) with the cells of a sum or maximum: over queries, a cell is a key."""
        xp, problem, keys = self.xp, self.problem, part.keys
        cells = statistic if statistic.axes == "ij" else replace(statistic, axes="ij", cells=(1, problem.m))
        (i0, i1), (j0, j1) = cells.rectangle(problem.n, problem.m)
        rows, columns = cells.grid(problem.n, problem.m)
        if not rows * columns:
            return
        i = self.arange(part.rows.start, part.rows.stop)[:, None, None]
        is_inside = (i >= i0) & (i < i1) & (keys >= j0) & (keys < j1)
        places = cell_of(i - i0, i1 - i0, rows) * columns + cell_of(keys - j0, j1 - j0, columns)
        heads = self.arange(problem.B)[:, None, None, None] * problem.H + self.arange(problem.H)[:, None]
        entries = entries[..., 0, :]
        index = xp.broadcast_to(heads * rows * columns + places * is_inside, entries.shape)
        entries = xp.astype(xp.where(is_inside, entries, xp.full_like(entries, statistic.hidden)), array.dtype)
        if statistic.is_extremum:
            extremum = np.maximum if statistic.how == "max" else np.minimum
            extremum.at(to_numpy(array).reshape(-1), to_numpy(index), to_numpy(entries))
        else:
            add_rows(xp.reshape(index, (-1,)), (xp.reshape(array, (-1, 1)), xp.reshape(entries, (-1, 1))))


def _entries_of(statistic: Any) -> Any:
    """Return the statistic of the entries that a sum or maximum over queries combines; any other one unchanged."""
    if "i" in statistic.axes:
        return replace(statistic, axes="", cells=None, within=None, limit=None)
    return statistic


def add_rows(index: Any, *pairs: tuple[Any, Any]) -> None:
    """For each (target, values), add `values` to target[index]. An index may occur repeatedly.

    Every run gives the same bits: the rows of an index are added in pairs, these sums again in pairs, and so on. This
    overwrites `values`.
    """
    index = to_numpy(index)
    place = np.argsort(index, kind="stable")
    index, arrays = index[place], [(to_numpy(target), to_numpy(values)) for target, values in pairs]
    while True:
        is_first = np.diff(index, prepend=-1) != 0
        is_odd = (np.arange(len(index)) - np.flatnonzero(is_first)[np.cumsum(is_first) - 1]) % 2 == 1
        odd = np.flatnonzero(is_odd)
        if not odd.size:
            break
        for _, values in arrays:
            values[place[odd - 1]] += values[place[odd]]
        index, place = index[~is_odd], place[~is_odd]
    for target, values in arrays:
        target[index] += values[place]


class Gather(Kernel):
    """The kernel that copies the keys of each query's list, and computes attention to the copies by another kernel."""

    name = "gather"
    description = "copies the listed keys of each query for another kernel, O(n · c) time and memory"

    def __init__(self, by_tiles: Sequence[Kernel]) -> None:
        self.by_tiles = by_tiles

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Yield a refusal if no list names the keys, or if the copies do not suffice for what is asked."""
        if KeyLists.of(problem.mask) is None:
            yield Refusal("no list of keys for each query", "mask=sightline.blocks(indices, size=1)")
        if not problem.framework.has_memory or problem.device != "cpu":
            yield Refusal(f"{problem.framework.name} arrays on {problem.device}", "arrays of NumPy or torch on the CPU")
        if problem.dropout:
            yield Refusal("dropout, which depends on the positions of keys", "leave dropout=0")
        for statistic in (one for one in problem.see if not one.has_own_problem):
            if not statistic.axes:
                yield Refusal(f"{statistic}, which has an entry for each pair", "leave it out, or use pooled")
            elif statistic.axes == "i" and statistic.finds:
                yield Refusal(f"{statistic}, which finds queries", "leave it out")
        yield from kernels.refuse_no_pairs(problem)

    def pairs(self, problem: Problem) -> int:
        lists = KeyLists.of(problem.mask)
        return math.prod(problem.extent[:3]) * (problem.m if lists is None else lists.length)

    def describe_statistic(self, problem: Problem, statistic: Statistic) -> str:
        return "computed by the kernel of the copied keys"

    def cost(self, problem: Problem) -> float:
        """Return a low cost if the tiles of the mask have many more pairs than the lists, else a high cost.

        The low cost is below those of the CPU's kernels and of `streaming`, and the high cost is above them.

        A kernel that works by tiles computes `PAIRS_PER_KEY` pairs in the time in which this kernel copies a key and
        adds its gradient, and `PAIRS_PER_CALL` pairs while this kernel prepares a call. A table may list any keys, so
        only the conditions without tables leave tiles out.
        """
        lists = KeyLists.of(problem.mask)
        plain = [] if lists is None else [condition for condition in lists.conditions if not condition.tables]
        tiles = find_tile_ranges(reduce(and_, plain) if plain else None, problem.extent, TILE_SIDE, TILE_SIDE).tiles
        pairs = math.prod(problem.extent) * (1 - tiles["empty"] / sum(tiles.values()))
        return 0.05 if pairs > PAIRS_PER_KEY * self.pairs(problem) + PAIRS_PER_CALL else 20.0

    def cost_reason(self, problem: Problem) -> str:
        count = self.pairs(problem) // math.prod(problem.extent[:3])
        return f"copies at most {count:,} of {problem.m:,} keys for each query"

    def run(self, problem: Problem) -> Result:
        call, shape = Gathering(problem), tuple(problem.query.shape[:-1])
        output = empty((*shape, problem.d_v), problem.dtype, problem.query, has_heads_in_rows(problem.query))
        lse = empty(shape, "float64", problem.query)
        context = ForwardContext(problem, lse, shape[:-1])
        statistics = [statistic for statistic in problem.see if statistic.num_arrays]
        arrays = [statistic.start(context) for statistic in statistics]
        see = tuple([_entries_of(statistic) for statistic in statistics])
        for part in call.parts(see):
            result = kernels.choose(self.by_tiles, part.problem).kernel.run(part.problem)
            call.rows_of(output, part.rows)[...] = result.output
            call.rows_of(lse, part.rows)[...] = result.lse
            for statistic, totals, statistic_of_part in zip(statistics, arrays, result.seen, strict=True):
                call.add_statistic(statistic, totals, part, arrays_of(statistic_of_part))
        pairs = zip(statistics, arrays, strict=True)
        finished = {id(statistic): statistic.finish(totals, context) for statistic, totals in pairs}
        seen = dispatch_statistics(problem, lse, lambda statistic: finished[id(statistic)], lambda rest: ())
        return Result(output, lse, seen)

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        return self.refuses(problem)

    def backward(self, problem: Problem, given: GivenGradients) -> Gradients:
        call, wanted_tables = Gathering(_widen(problem)), given.wanted_tables
        xp, wide = call.xp, call.problem
        d_query, d_key, d_value = (xp.zeros_like(x) for x in (wide.query, call.key, call.value))
        d_sinks, d_tables = None, [None] * len(wide.tables)
        for part in call.parts():
            part_gradients = self._differentiate(call, part, given)
            call.rows_of(d_query, part.rows)[...] = part_gradients.query
            values = [xp.reshape(x, (-1, x.shape[-1])) for x in (part_gradients.key, part_gradients.value)]
            add_rows(part.places, (d_key, values[0]), (d_value, values[1]))
            tables = {id(table): array for table, array in zip(part.problem.tables, part_gradients.tables, strict=True)}
            d_sinks = _add(d_sinks, part_gradients.sinks)
            for slot in wanted_tables:
                d_tables[slot] = _add(d_tables[slot], tables.get(id(wide.tables[slot])))
        sums = [d_query, d_key, d_value, d_sinks, *d_tables]
        inputs = [problem.query, problem.key, problem.value, problem.sinks, *[table.array for table in problem.tables]]
        d_query, d_key, d_value, d_sinks, *d_tables = [
            None if total is None else namespace(x).reshape(namespace(x).astype(convert(total, x), x.dtype), x.shape)
            for total, x in zip(sums, inputs, strict=True)
        ]
        return Gradients(d_query, d_key, d_value, tuple(d_tables), d_sinks)

    def _differentiate(self, call: Gathering, part: GatheredPart, given: GivenGradients) -> Gradients:
        """Return the gradients of a part. `given` are the inputs of the whole problem."""
        whole, added = (given.d_output, given.d_lse, *given.saved), given.statistics
        saved: list[Any]
        d_output, d_lse, *saved = [None if x is None else call.rows_of(x, part.rows) for x in whole]
        wanted = {id(call.problem.tables[slot]) for slot in given.wanted_tables}
        slots = [slot for slot, table in enumerate(part.problem.tables) if id(table) in wanted]
        kernel = kernels.choose(self.by_tiles, part.problem).kernel
        if saved[0].dtype != part.problem.query.dtype:
            exact = kernel.run(part.problem)
            d_lse = subtract_rounding(d_lse, d_output, saved, (exact.output, exact.lse))
            d_output, saved[0] = widen(d_output, saved[0])
        part_terms: dict[str, Any] = {name: formula.rewrite(part.symbols) for name, formula in added.formulas.items()}
        sums = {name: getattr(added, name) for name in ("lse", "weights_sum")}
        part_terms |= {name: call.rows_of(array, part.rows) for name, array in sums.items() if array is not None}
        given = GivenGradients(d_output, d_lse, saved, slots, replace(added, **part_terms))
        return streaming.backward_by(kernel, part.problem, given)


def _add(total: Any, term: Any) -> Any:
    """Return the sum of two gradients; None stands for 0."""
    return total if term is None else term if total is None else total + term


def _widen(problem: Problem) -> Problem:
    """Return the problem in the accumulator's dtype, so that the sums over queries are rounded once."""
    if problem.dtype == problem.accumulator:
        return problem

    def cast(array: Any) -> Any:
        xp = namespace(array)
        return xp.astype(array, resolve_dtype(xp, problem.accumulator)) if dtype_name(array) in FLOATS else array

    names = [name for name in (*OPERANDS, "sinks") if getattr(problem, name) is not None]
    return replace(problem, **{name: cast(getattr(problem, name)) for name in names}).map_tables(cast)
