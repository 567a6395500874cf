"""Checks of formulas that need the lengths (B, H, n, m).

The checks find reads outside a table, whole numbers of 2⁵³ or more, and tables whose axes do not fit the lengths.
`find_index_ranges` tells the code generators of kernels which table indices they must clamp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, cast

import numpy as np

from ..arrays.operations import to_numpy
from ..errors import FormulaError, ShapeError, TableError
from .expression import MAX_EXACT_INTEGER, Apply, Expression, Lookup, conjuncts, walk
from .interval_arithmetic import Interval, compute_intervals
from .tables import bounds_key
from .tensor_cache import TensorCache
from .tile_ranges import find_witness, make_box

Extent = tuple[int, int, int, int]
IndexRanges = tuple[float, tuple[tuple[int, int], ...]]

_RANGES = TensorCache(4096)
MAX_ASSUMED_INTEGER = MAX_EXACT_INTEGER // 2


def check_formulas(mask: Expression | None, score: Expression | None, extent: Extent) -> None:
    """Raise an error if a formula fails a check of this module.

    TableError: a formula reads outside a table. Such a read is allowed where the mask hides the pair, and in the branch
    that a `where` does not take. FormulaError: a whole number may reach 2⁵³, above which float64 is not exact.
    ShapeError: an axis of a table does not have the length of the symbol that it stands for.
    """
    if 0 in extent:
        return
    for formula, allowed in ((mask, None), (score, mask)):
        if formula is None:
            continue
        check_spans(formula, extent)
        bounds = compute_intervals(formula, make_box(extent))
        too_large = _find_large_integer(formula, extent, bounds)
        if too_large is not None:
            raise FormulaError(
                f"{too_large} may reach ±2⁵³", "whole numbers between −2⁵³ and 2⁵³", "use floats: 1.0 * i"
            )
        for _, node, axis in _indices_outside(formula, bounds):
            _check_index(formula, node, axis, bounds[id(node.arguments[axis])], allowed, extent)


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
    for formula, own in zip(formulas, indices, strict=True):
        for position, axis in own:
            node = cast(Lookup, walk(cast(Expression, formula))[position])
            guards = [formulas[0], _branch_condition(cast(Expression, formula), node)]
            known = [part for guard in guards if guard is not None for part in conjuncts(guard) if not part.tables]
            if node.arguments[axis].tables or _find_read_outside(node, axis, known, extent) is not None:
                return False
    return True


def find_index_ranges(formula: Expression | None, extent: Extent) -> IndexRanges:
    """Return (the largest absolute value of an integer in the formula, the table indices that may leave their table).

    A table index is given as (position of the lookup in `walk`, axis). Only hidden pairs may leave a table, because
    `check_formulas` has passed. The result is (0.0, ()) if `formula` is None. The result is cached.
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


def _check_index(
    formula: Expression, node: Lookup, axis: int, interval: Interval, allowed: Expression | None, extent: Extent
) -> None:
    """Raise TableError if an index leaves its table at a pair where the table is read."""
    length, index = node.table.shape[axis], node.arguments[axis]
    low, high = (float(end) for end in interval)
    guards = [guard for guard in (allowed, _branch_condition(formula, node)) if guard is not None]
    pair = _find_read_outside(node, axis, guards, extent)
    if pair is None:
        return
    b, h, i, j = pair
    raise TableError(
        f"{node} reads outside its table of shape {node.table.shape}: index {index} runs from {low:.0f} to {high:.0f}, "
        f"and leaves axis {axis} at b={b}, h={h}, i={i}, j={j}",
        f"indices from 0 to {length - 1} wherever the mask allows the pair",
        _suggest_document_lengths(node, extent)
        + "shift the index, enlarge the table, or clip: np.clip(index, 0, length - 1)",
    )


def _find_read_outside(node: Lookup, axis: int, guards: Sequence[Expression], extent: Extent) -> Extent | None:
    """Return one (b, h, i, j) at which all guards hold and the index leaves its table; None if there is none."""
    index = node.arguments[axis]
    outside = (index < 0) | (index >= node.table.shape[axis])
    return find_witness(reduce(lambda x, y: x & y, [*guards, outside]), extent)


def _branch_condition(formula: Expression, target: Lookup) -> Expression | None:
    """Return the condition under which the enclosing `where`s select a branch that reads `target`.

    None means that the lookup may be read at every pair.
    """
    conditions: dict[int, Expression | None] = {id(formula): None}
    for node in reversed(walk(formula)):  # nodes before their arguments
        for position, argument in enumerate(node.arguments):
            condition, first = conditions[id(node)], node.arguments[0]
            if isinstance(node, Apply) and node.operator == "where" and position and "s" not in first.free_symbols:
                branch = first if position == 1 else ~first
                condition = branch if condition is None else condition & branch
            if id(argument) in conditions:
                other = conditions[id(argument)]
                condition = None if condition is None or other is None else condition | other
            conditions[id(argument)] = condition
    return conditions[id(target)]
