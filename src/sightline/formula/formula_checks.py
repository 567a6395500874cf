"""Checks of formulas that need the lengths (B, H, n, m).

The checks find reads outside a table, whole numbers of 2⁵³ or more, and tables whose axes do not fit the lengths.
`find_index_ranges` tells the code generators of kernels which table indices they must clamp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple, cast

import numpy as np

from ..arrays.operations import to_numpy
from ..errors import FormulaError, ShapeError, TableError
from .composed_functions import FALSE, TRUE
from .evaluate_array import evaluate_at
from .expression import MAX_EXACT_INTEGER, OF_SCORES, Apply, Expression, Lookup, conjuncts, walk
from .interval_arithmetic import Interval, compute_intervals
from .tables import bounds_key
from .tensor_cache import TensorCache
from .tile_ranges import find_witness, make_box

Extent = tuple[int, int, int, int]
IndexRanges = tuple[float, tuple[tuple[int, int], ...]]

_RANGES = TensorCache(4096)
MAX_ASSUMED_INTEGER = MAX_EXACT_INTEGER // 2


def check_formula(formula: Expression | None, extent: Extent, allowed: Expression | None = None) -> None:
    """Raise an error if a formula fails a check of this module.

    TableError: the value of the formula depends on a read outside a table, at a pair at which the mask `allowed` is
    true. FormulaError: a whole number may reach 2⁵³, above which float64 is not exact. ShapeError: an axis of a table
    does not have the length of the symbol that it stands for.
    """
    if formula is None or 0 in extent:
        return
    check_spans(formula, extent)
    bounds = compute_intervals(formula, make_box(extent))
    too_large = _find_large_integer(formula, extent, bounds)
    if too_large is not None:
        raise FormulaError(f"{too_large} may reach ±2⁵³", "whole numbers between −2⁵³ and 2⁵³", "use floats: 1.0 * i")
    _check_reads(formula, bounds, allowed, extent)


def is_valid_for_all_entries(formula: Expression, extent: Extent) -> bool:
    """True if the formula is valid whatever the entries of its tables with unknown entries are.

    A formula is valid if every read stays inside its table, also at hidden pairs, and if no whole number reaches 2⁵³.
    Unknown integers count as at most 2⁵² in absolute value: most tables of positions and lengths have 64-bit integers,
    whose limits would fail the second condition.
    """
    bounds = compute_intervals(formula, make_box(extent))
    is_exact = _find_large_integer(formula, extent, bounds) is None
    return is_exact and next(_indices_outside(formula, bounds), None) is None


def stay_inside_for_all_entries(
    formulas: Sequence[Expression | None], indices: Sequence[Sequence[tuple[int, int]]], extent: Extent
) -> bool:
    """True if the indices stay inside their tables at all pairs that the mask allows, whatever the tables contain.

    The first formula is the mask. `indices` has those of each formula, as `find_index_ranges` returns them.
    """
    allowed = [] if formulas[0] is None else [part for part in conjuncts(formulas[0]) if not part.tables]
    for formula, own in zip(formulas, indices, strict=True):
        nodes = [] if formula is None else walk(formula)
        reads = [(cast(Lookup, nodes[position]), axis) for position, axis in own]
        if reads and Reads(cast(Expression, formula), reads, for_all_entries=True).find_unknown(allowed, extent):
            return False
    return True


def find_index_ranges(formula: Expression | None, extent: Extent) -> IndexRanges:
    """Return (the largest absolute value of an integer in the formula, the table indices that may leave their table).

    A table index is given as (position of the lookup in `walk`, axis). Only hidden pairs may leave a table, because
    `check_formula` has passed. The result is (0.0, ()) if `formula` is None. The result is cached.
    """
    if formula is None:
        return 0.0, ()
    if not formula.tables:
        return _find_cached(formula, extent)
    tables_key, arrays = bounds_key(formula.tables)
    return _RANGES.get((formula.text, tables_key, extent), arrays, lambda: _find_index_ranges(formula, extent))


def _find_index_ranges(formula: Expression, extent: Extent) -> IndexRanges:
    bounds = compute_intervals(formula, make_box(extent))
    sizes = [_largest(bounds[id(node)]) for node in walk(formula) if node.kind == "int"]
    return max(sizes, default=0.0), tuple([(position, axis) for position, _, axis in _indices_outside(formula, bounds)])


_find_cached = lru_cache(4096)(_find_index_ranges)


def _indices_outside(formula: Expression, bounds: Mapping[int, Interval]) -> Iterator[tuple[int, Lookup, int]]:
    """Yield (position in `walk`, lookup, axis) of each index that the bounds do not prove to stay inside its table."""
    for position, node in enumerate(walk(formula)):
        lengths = node.table.shape if isinstance(node, Lookup) else ()
        for axis, length in enumerate(lengths):
            low, high = bounds[id(node.arguments[axis])]
            if np.min(low) < 0 or np.max(high) >= length:
                yield position, cast(Lookup, node), axis


def _largest(interval: Interval) -> float:
    """Return the largest absolute value in an interval."""
    return max(float(np.max(np.abs(end))) for end in interval)


def _find_large_integer(formula: Expression, extent: Extent, bounds: Mapping[int, Interval]) -> Expression | None:
    """Return a node whose whole number may reach 2⁵³; None if there is none. `bounds` has the interval of each node."""
    if any(table.has_unknown_entries for table in formula.tables):
        bounds = compute_intervals(formula, make_box(extent), read_table=_read_assumed_entries)
    for node in walk(formula):
        if node.kind == "int" and _largest(bounds[id(node)]) >= MAX_EXACT_INTEGER:
            return node
    return None


def _read_assumed_entries(node: Lookup, indices: list[Interval]) -> Interval:
    """Return the interval of a table's entries; unknown integers are at most `MAX_ASSUMED_INTEGER`."""
    interval = node.table.bounds.over(indices)
    if node.kind == "int" and node.table.has_unknown_entries:
        return tuple(np.clip(interval, -MAX_ASSUMED_INTEGER, MAX_ASSUMED_INTEGER))
    return interval


def check_spans(formula: Expression, extent: Extent) -> None:
    """Raise ShapeError if an axis of a table does not have the length of the symbol that it stands for."""
    for table, (name, length) in [(each, span) for each in formula.tables for span in each.span_lengths]:
        span = extent["bhij".index(name[0])]
        if table.fits_axis(name, length, span):
            continue
        if any("/" in (axis or "") for axis in table.axes or ()):
            raise _block_lists_error(table, name, length, extent)
        raise ShapeError(
            _describe_axis(table, name, length),
            f"length {span}{' or 1' * (span != 1)}, where (B, H, n, m) = {extent}",
            _suggest_batch_axis(table, extent)
            + _suggest_lengths(table, name, span)
            + "give the array these lengths, or index a table of it yourself: table(array)[...]",
        )


def _block_lists_error(table: Any, name: str, length: int, extent: Extent) -> ShapeError:
    """Return the error for lists of `block_lists.blocks` that do not fit the lengths."""
    _, H, n, m = extent
    symbol, _, size = name.partition("/")  # see `Table`
    if symbol == "j":
        last = -(-m // int(size)) - 1
        return ShapeError(
            f"the block index {length - 2}",
            f"−1 for no block, and 0 to ⌈m / size⌉ − 1 = {last}, where m = {m} and size = {size} keys",
            f"positions // {size} if the indices are positions of keys",
        )
    if symbol == "i":
        return ShapeError(
            f"{length} lists of blocks for {n} queries",
            f"⌈n / size⌉ = {-(-n // int(size))} lists, where size = {size} queries",
            "one list for each block of the queries of the call, and a shorter block at the end has a list too",
        )
    return ShapeError(
        f"block indices with an axis {'bh'.index(name)} of length {length}, which stands for {name}",
        f"length {extent['bh'.index(name)]} or 1, where (B, H, n, m) = {extent}",
        f"np.repeat(indices, {H} // G, axis=1) for lists of G key heads"
        if name == "h"
        else "length 1 for shared lists",
    )


def _suggest_batch_axis(table: Any, extent: Extent) -> str:
    """Return the cure for a dense array whose first axis seems to be the batch, or "" if it does not."""
    index, axes = {("i", "j"): (":, None, None", "(B, m)"), ("h", "i", "j"): (":, None", "(B, n, m)")}.get(
        table.axes, ("", "")
    )
    return f"array[{index}] if its axes are {axes}; " if index and table.shape[0] == extent[0] else ""


def _suggest_lengths(table: Any, name: str, span: int) -> str:
    """Return the cure if the table seems to be the array of numbers that `documents(lengths=...)` makes, else ""."""
    if table.axes not in (("i",), ("j",)) or table.kind != "int":
        return ""
    argument = {"i": "lengths", "j": "key_lengths"}[name]
    return f"if these are document numbers, {argument} must sum to {span}; "


def _suggest_document_lengths(node: Lookup, extent: Extent) -> str:
    """Return the cure if the table seems to have lengths of documents in place of document numbers, else ""."""
    table = node.table
    if table.ndim != 1 or table.kind != "int":
        return ""
    if table.axes == ("i",):
        return f"documents(lengths=..., key_lengths=...), where the key lengths sum to {extent[3]}; "
    total = int(to_numpy(table.array).sum())
    return f"documents(lengths=...) if the entries, which sum to {total}, are lengths; " if total == extent[2] else ""


def _describe_axis(table: Any, name: str, length: int) -> str:
    """Return a text about the array of the table and its axis that stands for a symbol."""
    shape, axis = table.shape, table.axes.index(name)
    if table.batch_axes is not None:
        leading = table.batch_axes.shape
        shape, axis = (*leading, *shape[1:]), len(leading) + axis - 1
        if name == "b":
            return f"an array of shape {shape}, whose leading axes, {length} in all, stand for b"
    return f"an array of shape {shape}, whose axis {axis} of length {length} stands for {name}"


class Certainty(NamedTuple):
    """Conditions on a pair: a node's value depends on no read outside a table; it is surely True; surely False."""

    known: Expression
    true: Expression = FALSE
    false: Expression = FALSE


class Reads:
    """The reads of a formula that may leave their tables, as (lookup, axis), and the certainty of each node.

    A condition that reads s is never sure. If `for_all_entries`, one that reads a table is not sure either.
    """

    def __init__(self, formula: Expression, reads: Iterable[tuple[Lookup, int]], for_all_entries: bool = False) -> None:
        self.formula, self.for_all_entries = formula, for_all_entries
        self.outside: dict[int, Expression] = {}  # by the id of a lookup
        for node, axis in reads:
            self.outside[id(node)] = self.outside.get(id(node), FALSE) | self.is_outside(node, axis)
        self.certainty: dict[int, Certainty] = {}
        for part in walk(formula) if self.outside else ():
            self.certainty[id(part)] = self.find_certainty(part, [self.certainty[id(a)] for a in part.arguments])

    def is_fixed(self, node: Expression) -> bool:
        return node.free_symbols.isdisjoint(OF_SCORES) and not (self.for_all_entries and node.tables)

    def is_outside(self, node: Lookup, axis: int) -> Expression:
        index = node.arguments[axis]
        return (index < 0) | (index >= node.table.shape[axis]) if self.is_fixed(index) else TRUE

    def find_certainty(self, node: Expression, inputs: list[Certainty]) -> Certainty:
        """Return the certainty of a node from that of its arguments, one of which may decide."""
        known = reduce(lambda x, y: x & y, [each.known for each in inputs], TRUE)
        operator = node.operator if isinstance(node, Apply) else ""
        if operator == "logical_not":
            return Certainty(known, inputs[0].false, inputs[0].true)
        if operator in ("logical_and", "logical_or"):
            (_, *first), (_, *second) = inputs
            true, false = first[0] & second[0], first[1] | second[1]
            if operator == "logical_or":
                true, false = first[0] | second[0], first[1] & second[1]
            return Certainty(known if known is TRUE else known | true | false, true, false)
        if id(node) in self.outside:
            known &= ~self.outside[id(node)]
        elif known is not TRUE and operator == "where":
            condition, yes, no = inputs
            known = condition.known & (condition.false | yes.known) & (condition.true | no.known)
        is_sure = node.kind == "bool" and self.is_fixed(node)
        return Certainty(known, known & node, known & ~node) if is_sure else Certainty(known)

    def find_unknown(self, allowed: Iterable[Expression], extent: Extent) -> Extent | None:
        """Return one (b, h, i, j) at which all of `allowed` hold and the formula is not known; else None."""
        if not self.outside:
            return None
        return find_witness(reduce(lambda x, y: x & y, allowed, ~self.certainty[id(self.formula)].known), extent)

    def find_read(self, holds: Callable[[Expression], bool]) -> tuple[Lookup, int]:
        """Return a read outside a table, (lookup, axis), on which the value depends, at the pair of `holds`."""
        node, unknown = self.formula, [self.formula]
        while unknown:
            node, arguments = unknown[0], unknown[0].arguments
            if isinstance(node, Apply) and node.operator == "where" and holds(self.certainty[id(arguments[0])].false):
                arguments = arguments[2:]
            unknown = [argument for argument in arguments if not holds(self.certainty[id(argument)].known)]
        lookup = cast(Lookup, node)
        return lookup, next(axis for axis in range(lookup.table.ndim) if holds(self.is_outside(lookup, axis)))


def _check_reads(
    formula: Expression, bounds: Mapping[int, Interval], allowed: Expression | None, extent: Extent
) -> None:
    """Raise TableError if the formula's value depends on a read outside a table, at a pair that is allowed."""
    reads = Reads(formula, [(node, axis) for _, node, axis in _indices_outside(formula, bounds)])
    pair = reads.find_unknown([] if allowed is None else [allowed], extent)
    if pair is None:
        return
    b, h, i, j = pair
    place = {name: np.asarray(x) for name, x in zip("bhij", pair, strict=True)}
    node, axis = reads.find_read(lambda condition: bool(evaluate_at(condition, **place, n=extent[2], m=extent[3])))
    low, high = (float(end) for end in bounds[id(node.arguments[axis])])
    raise TableError(
        f"{node} reads outside its table of shape {node.table.shape}: index {node.arguments[axis]} runs from {low:.0f} "
        f"to {high:.0f}, and leaves axis {axis} at b={b}, h={h}, i={i}, j={j}",
        f"indices from 0 to {node.table.shape[axis] - 1} wherever the mask allows the pair",
        _suggest_document_lengths(node, extent)
        + "shift the index, enlarge the table, or clip it: np.clip(i - j, -16, 16) + 16 reads 33 entries",
    )
