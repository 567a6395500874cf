"""Leading axes of dense arrays (..., H, n, m), those before the last three, which stand for the batch axes.

A formula is written before the batch axes are known. If an array has more than four axes, its table has one axis for
all leading axes, and `Table.batch_axes` has the lengths of the leading axes. When the batch axes are known,
`align_batch_axes` broadcasts the leading axes to the batch axes: it replaces the index of the table's first axis.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..arrays.operations import broadcast_to, drop_repeats, is_one, namespace
from ..arrays.unreadable import check_class, is_array
from ..errors import ShapeError
from .expression import SYMBOLS, Expression, Indices, Lookup, as_expression, intern, walk
from .tables import Table


@dataclass(frozen=True)
class BatchAxes:
    """The leading axes of an array: all axes except the last three. The first axis of the array's table merges them.

    `shape` has the lengths of these axes in the array. `lengths` has their lengths in the table, where an axis along
    which the entries repeat has length 1.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]

    def fits(self, batch_shape: tuple[int, ...]) -> bool:
        """True if the leading axes broadcast to the batch axes."""
        padded = (1,) * len(self.shape) + batch_shape
        pairs = zip(self.shape, padded[len(batch_shape) :], strict=True)
        # `length in (1, batch_length)` would be False for a symbol of torch.compile
        return not any(length != 1 and length != batch_length for length, batch_length in pairs)

    def index(self, batch_shape: tuple[int, ...]) -> Expression:
        """Return the index of the table's first axis as a formula of b, for batch axes that `fits` accepts.

        The index is b if the table has all batch axes. Else it is a mixed-radix number, with one digit for each batch
        axis that the table has. `operator.index` makes a symbol of torch.compile a number.
        """
        b: Any = SYMBOLS["b"]
        lengths = ((1,) * len(batch_shape) + self.lengths)[len(self.lengths) :]
        if lengths == batch_shape != (1,) * len(lengths):
            return cast(Expression, b)
        index: Any = None
        for axis, length in enumerate(lengths):
            if length != 1:
                outer, inner = (operator.index(math.prod(x)) for x in (batch_shape[:axis], batch_shape[axis + 1 :]))
                digit = b if inner == 1 else b // inner
                digit = digit if outer == 1 else digit % operator.index(length)
                index = digit if index is None else index * operator.index(length) + digit
        return as_expression(0 if index is None else index)


def dense_table(array: Any) -> Table:
    """Return the table of a dense array. Its axes stand for the last of b, h, i and j; more leading axes are merged."""
    if not is_array(array):
        array = np.asarray(array)
    check_class("a table", array)  # before the first read of an attribute
    return _merge_leading_axes(array) if array.ndim > 4 else Table(array, axes=tuple("bhij"[4 - array.ndim :]))


def read_densely(table: Table) -> Expression:
    """Return the lookup of a `dense_table` at the symbols of its axes; the index of an axis of length 1 is 0.

    Merged leading axes are read as if they were the batch axes of the call. `align_batch_axes` changes this index.
    """
    axes = zip("bhij"[4 - table.ndim :], table.shape, strict=True)
    indices = [as_expression(0) if is_one(length) else SYMBOLS[name] for name, length in axes]
    if table.batch_axes is not None:
        indices[0] = table.batch_axes.index(table.batch_axes.shape)
    return intern(Lookup(table, tuple(indices)))


def _merge_leading_axes(array: Any) -> Table:
    """Return the table of an array with more than four axes; see `BatchAxes`.

    The entries are copied only if no single stride can replace the strides of the leading axes.
    """
    entries = drop_repeats(array)
    axes = BatchAxes(tuple(array.shape[:-3]), tuple(entries.shape[:-3]))
    count = math.prod(axes.lengths)
    merged = namespace(entries).reshape(entries, (count, *entries.shape[-3:]))
    if entries.shape[-3:] != array.shape[-3:]:
        merged = broadcast_to(merged, (count, *array.shape[-3:]))
    return Table(merged, axes=("b", "h", "i", "j"), batch_axes=axes)


def align_batch_axes(formula: Expression, batch_shape: tuple[int, ...], tables: dict[int, Any]) -> Expression:
    """Return the formula with the leading axes of its dense arrays broadcast to the batch axes of a call.

    `tables` maps the id of each table with leading axes to a pair: this table, and the table that replaces it. Formulas
    that share a table so still share it. The pair keeps the table alive. Otherwise a new table could get its id.

    Raises
    ------
    ShapeError
        The leading axes of an array do not broadcast to the batch axes.
    """
    # not `formula.tables`: torch.compile would compile again when that property of an argument has been computed
    if all(node.table.batch_axes is None for node in walk(formula) if isinstance(node, Lookup)):
        return formula

    def lookup(table: Table, indices: Indices) -> Expression:
        if table.batch_axes is None:
            return intern(Lookup(table, indices))
        index = _aligned_index(table, batch_shape)
        if id(table) not in tables:
            name = "b" if index is SYMBOLS["b"] else None
            tables[id(table)] = table, Table(table.array, (name, "h", "i", "j"), table.batch_axes)
        return intern(Lookup(tables[id(table)][1], (index, *indices[1:])))

    return formula.rewrite(lookup=lookup)


def _aligned_index(table: Table, batch_shape: tuple[int, ...]) -> Expression:
    """Return the index of the table's first axis for these batch axes; raise ShapeError if they do not fit."""
    axes = table.batch_axes
    assert axes is not None
    if not axes.fits(batch_shape):
        raise ShapeError(
            f"an array of shape {(*axes.shape, *table.shape[1:])}, whose leading axes {axes.shape} stand for the batch "
            f"axes {batch_shape}",
            f"leading axes that broadcast to {batch_shape}, the leading axes of query, key and value",
            f"give the array these leading axes, or four axes (B, H, n, m) with B = {math.prod(batch_shape)}",
        )
    return axes.index(batch_shape)
