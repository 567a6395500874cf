"""Tables, arrays that formulas read, and the least and greatest entry of a table over many ranges of its indices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from ..arrays.caching import cached_property
from ..arrays.operations import Array, drop_repeats, dtype_name, framework, map_entries, to_host, to_numpy
from ..arrays.unreadable import check_kind, is_array
from ..errors import DtypeError, FormulaError, ShapeError
from .expression import Constant, Expression, Lookup, as_expression, example_indices, intern
from .expression_methods import PASSES
from .operators import Kind
from .tensor_cache import TensorCache

if TYPE_CHECKING:
    from .batch_axes import BatchAxes

Level = tuple[int, ...]  # per axis, log2 of the block's width

BASE_LEVEL = 4  # blocks up to 2⁴ wide are reduced from the table, wider blocks from blocks that are 2⁴ wide


class TableBounds:
    """The pyramid of bounds of one array. A level is computed when it is first needed.

    A level has aligned blocks, twice as wide as those of the level below. One or two blocks per axis cover a range, of
    the narrowest level whose blocks are at least as wide. They may cover more than the range.
    """

    def __init__(self, array: Any) -> None:
        self.array = drop_repeats(array)  # `over` clips the indices of an axis that is cut to length 1
        self.values = to_numpy(self.array)
        self.levels: dict[Level, tuple[Array, Array]] = {}

    def over(self, ranges: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return (least, greatest) as float64 for index ranges (low, high), one pair per axis, both ends included.

        Ranges that leave the table are clipped to the table.
        """
        if 0 in self.values.shape:
            return np.float64(0), np.float64(0)  # an empty table is read only at hidden pairs
        ends = np.broadcast_arrays(*(end for pair in ranges for end in pair))
        shape = ends[0].shape
        last_indices = [length - 1 for length in self.values.shape]
        flat = [np.clip(e.ravel(), 0, last_indices[k // 2]).astype(np.int64) for k, e in enumerate(ends)]
        first, last = flat[0::2], flat[1::2]
        if all((a == 0).all() and (z == limit).all() for a, z, limit in zip(first, last, last_indices, strict=True)):
            return np.full(shape, self.over_all[0]), np.full(shape, self.over_all[1])
        width = [np.ceil(np.log2(np.maximum(z - a, 0) + 1)).astype(np.int64) for a, z in zip(first, last, strict=True)]
        code = sum(w << (6 * k) for k, w in enumerate(width))
        least, greatest = np.empty(code.shape), np.empty(code.shape)
        for level_code in np.unique(code):
            selected = np.flatnonzero(code == level_code)
            level = tuple(int(level_code) >> (6 * k) & 63 for k in range(len(first)))
            low, high = self._level(level)
            sides = [
                (a[selected] >> w, z[selected] >> w) if w else (a[selected],)
                for a, z, w in zip(first, last, level, strict=True)
            ]
            corners = list(itertools.product(*sides))
            least[selected] = np.minimum.reduce([low[corner] for corner in corners])
            greatest[selected] = np.maximum.reduce([high[corner] for corner in corners])
        return least.reshape(shape), greatest.reshape(shape)

    @cached_property
    def over_all(self) -> tuple[float, float]:
        """The least and the greatest entry of the whole table."""
        return framework(self.array).min_max(self.array)

    def _level(self, level: Level) -> tuple[Array, Array]:
        if not any(level):
            return self.values, self.values
        if level not in self.levels:
            base = tuple(min(w, BASE_LEVEL) for w in level)
            below = (0,) * len(level) if level == base else base
            low, high = self._level(below)
            steps = [w - v for w, v in zip(level, below, strict=True)]
            self.levels[level] = _reduce_blocks(low, steps, np.minimum), _reduce_blocks(high, steps, np.maximum)
        return self.levels[level]


class UnknownBounds:
    """The bounds of a table whose entries are not read: the same limits for every range of indices."""

    def __init__(self, least: float, greatest: float) -> None:
        self.over_all = least, greatest

    def over(self, ranges: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return (least, greatest) as `TableBounds.over` does."""
        shape = np.broadcast_shapes(*[np.shape(end) for pair in ranges for end in pair])
        return np.full(shape, self.over_all[0]), np.full(shape, self.over_all[1])


def _reduce_blocks(values: Array, steps: Sequence[int], reduce: Any) -> Array:
    """Return `reduce`, the minimum or maximum, of blocks of 2^step entries per axis. The last block may be shorter."""
    for axis, step in enumerate(steps):
        if step:
            values = reduce.reduceat(values, np.arange(0, values.shape[axis], 1 << step), axis=axis)
    return values


_TABLE_BOUNDS = TensorCache(256)
ENTRY_LIMITS = {"bool": (0.0, 1.0), "float": (-math.inf, math.inf)}


class Table:
    """An array that formulas read: document numbers, lengths, slopes, biases or a dense mask.

    Parameters
    ----------
    array : array
        Booleans, integers or real floats with at least one axis, from NumPy, torch or anything that NumPy can read;
        or a table of such an array, which is then the attribute `source`.
    axes : tuple of str or None, optional
        For each axis of the array, the symbol whose whole range the axis must span; the axis may also have length 1.
        None in place of a symbol means that the axis may have any length. The axis "i/64" must have ⌈n / 64⌉ entries,
        and the axis "j/64" at most ⌈m / 64⌉ + 1 entries. The axis "j/1<9" has numbers below 9 of keys, and 9 must be
        at most m. `block_lists.blocks` makes these three.
    origin : int, optional
        The id of the table that this one was converted from; by default the table's own id.
    batch_axes : BatchAxes, optional
        The leading axes of a dense array, which the first axis of the table merges.
    has_unknown_entries : bool, default False
        True if results about the table must hold for any entries of its dtype. `bounds` then does not read the array.

    Raises
    ------
    ShapeError
        The array has no axes, or is a list of lists of unequal lengths.
    DtypeError
        The array is of a kind that cannot be read, such as a masked or a sparse array, or its dtype is not bool, a
        signed integer of up to 64 bits, an unsigned integer of up to 32 bits, float16, bfloat16, float32 or float64.
    """

    def __init__(
        self,
        array: Any,
        axes: tuple[str | None, ...] | None = None,
        batch_axes: BatchAxes | None = None,
        origin: int | None = None,
        has_unknown_entries: bool = False,
    ) -> None:
        self.source: Table | None = None
        if isinstance(array, Table):
            self.source, array = array, array.array
        if not is_array(array):
            try:
                array = np.asarray(array)
            except ValueError as error:
                raise ShapeError(
                    "a table of lists of unequal lengths", "a rectangular array", "pad the lists to one length"
                ) from error
        check_kind("a table", array)
        if isinstance(array, np.ndarray):
            array = np.asarray(array)
        self.array: Any = array
        self.axes, self.batch_axes = axes, batch_axes
        self.has_unknown_entries = has_unknown_entries
        self.origin = id(self) if origin is None else origin
        self.shape: tuple[int, ...] = tuple(array.shape)  # lengths may be symbols of torch.compile
        self.ndim = len(self.shape)
        self.dtype = array.dtype
        self.kind: Kind = _table_kind(array)
        if self.ndim == 0:
            raise ShapeError(
                "a table without axes, of one number",
                "one axis or more",
                "use the number in the formula, or table(array[None])[0] for a number that JAX traces",
            )

    def __getitem__(self, indices: Any) -> Expression:
        """Return a formula that reads the entry at the indices, or a `Row` for fewer indices than axes."""
        indices = indices if isinstance(indices, tuple) else (indices,)
        if indices and (indices[-1] is Ellipsis or (isinstance(indices[-1], slice) and indices[-1] == slice(None))):
            indices = indices[:-1]
        if len(indices) > self.ndim or any(map(_is_axis_index, indices)):
            raise index_error(self, indices, "slice an array before the call")
        arguments = tuple([as_expression(index) for index in indices])
        for argument in arguments:
            if argument.kind != "int":
                raise FormulaError(
                    f"a table indexed by {argument}, which is a {argument.kind}",
                    "whole numbers",
                    "use // for division, and sightline.where(condition, 1, 0) for a condition",
                )
        if len(arguments) < self.ndim:
            return cast(Expression, PASSES.make_row(self, arguments, self.shape[len(arguments) :]))
        return intern(Lookup(self, tuple(map(_count_from_end, arguments, self.shape))))

    def __eq__(self, other: object) -> NoReturn:
        raise self._unread("{} compared as a whole", " == 3")

    __hash__ = object.__hash__

    def __iter__(self) -> NoReturn:
        raise self._unread("a loop over {}")

    def to_expression(self) -> NoReturn:
        """Raise FormulaError, because a formula can read a table only at indices."""
        raise self._unread("{} used without indices")

    def _unread(self, use: str, rest: str = "") -> FormulaError:
        """Return the error for a table that is not indexed; `rest` follows the read in the cure."""
        indices = example_indices(self.ndim)
        return FormulaError(use.format(self), "table(array)[...]", f"index it, as in table(array)[{indices}]{rest}")

    @property
    def span_lengths(self) -> tuple[tuple[str, int], ...]:
        """(symbol, length) of each axis that must span the symbol's range. Batch axes count as one: their product."""
        lengths = self.shape if self.batch_axes is None else (math.prod(self.batch_axes.shape), *self.shape[1:])
        spans = [((axis or "").partition("<"), length) for axis, length in zip(self.axes or (), lengths, strict=False)]
        return tuple((name, int(keys) + 1 if keys else length) for (name, _, keys), length in spans if name)

    @staticmethod
    def fits_axis(axis: str, length: int, span: int) -> bool:
        """True if an axis of this length fits a symbol of `span` values. `axis` is an entry of the parameter `axes`."""
        name, _, size = axis.partition("/")
        if not size:
            return length in (1, span)
        blocks = -(-span // int(size))
        return length == blocks if name == "i" else length <= blocks + 1

    @cached_property
    def bounds(self) -> TableBounds | UnknownBounds:
        """The object that finds the least and the greatest entry of the table over ranges of its indices.

        The object keeps what it has computed, so the array must not change after the first access.
        """
        if self.has_unknown_entries and self.kind == "int":
            limits = np.iinfo(dtype_name(self.array))
            return UnknownBounds(float(limits.min), float(limits.max))
        if self.has_unknown_entries:
            return UnknownBounds(*ENTRY_LIMITS[self.kind])
        return _TABLE_BOUNDS.get("bounds", [self.array], lambda: TableBounds(map_entries(to_host, self.array)))

    def with_array(self, array: Any) -> Table:
        """Return a table of another array of the same shape, whose entries are unknown if those of this table are."""
        return Table(array, self.axes, self.batch_axes, self.origin, self.has_unknown_entries)

    def without_axes(self, *symbols: str) -> Table:
        """Return a table of the same array whose axes for these symbols may have any length."""
        axes = tuple([None if axis is not None and axis[0] in symbols else axis for axis in self.axes or ()])
        if axes == (self.axes or ()):
            return self
        return Table(self.array, axes, origin=self.origin, has_unknown_entries=self.has_unknown_entries)

    def with_unknown_entries(self) -> Table:
        """Return a table of the same array with `has_unknown_entries`."""
        return Table(self.array, self.axes, self.batch_axes, self.origin, has_unknown_entries=True)

    def __repr__(self) -> str:
        return f"table({'×'.join(map(str, self.shape))} {self.dtype})"


def _is_axis_index(index: Any) -> bool:
    """True for None, `...` or a slice, which do not select one entry of an axis."""
    return index is None or index is Ellipsis or isinstance(index, slice)


def index_error(table: Table, indices: tuple[Any, ...], cure: str) -> FormulaError:
    """Return the error for indices that do not select one entry of a table. `cure` is added to the error's cure."""
    slices = "slices or None among " if any(map(_is_axis_index, indices)) else ""
    return FormulaError(
        f"a table of shape {table.shape} read with {slices}{len(indices)} indices",
        f"one index for each of its {table.ndim} axes",
        f"write table[{example_indices(table.ndim)}] or the expressions you mean; {cure}",
    )


def _count_from_end(index: Expression, length: int) -> Expression:
    """Return the index of an entry; a negative number counts from the end of the axis, as in NumPy and torch."""
    if isinstance(index, Constant) and -length <= index.value < 0:
        return as_expression(index.value + length)
    return index


def table(array: Any) -> Table:
    """Wrap an array so that formulas can read it: `table(slopes)[h]`.

    Parameters
    ----------
    array : array
        (length, ...) of bool, integer or real float. A float table may be a torch tensor that requires gradients.

    Returns
    -------
    Table
        Index it with one whole-number expression per axis; a negative number counts from the end. A read outside the
        table raises an error, unless the mask hides the pair or an enclosing `where` selects the other branch.

    Raises
    ------
    ShapeError
        The array has no axes, or is a list of lists of unequal lengths.
    DtypeError
        The array is of a kind that cannot be read, such as a masked or a sparse array, or has a dtype that formulas
        cannot read.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> from sightline import h, i, j, s, table
    >>> s - table(np.array([0.5, 0.25]))[h] * (i - j)
    s − t[h]·(i − j)
    """
    return Table(array)


def bounds_key(tables: Sequence[Table]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return a key and the arrays on which the bounds of these tables depend, for a `TensorCache`.

    The bounds of a table with unknown entries depend on its shape and dtype, those of other tables on the array.
    """
    key = tuple([(table.shape, str(table.dtype)) if table.has_unknown_entries else None for table in tables])
    return key, [table.array for table in tables if not table.has_unknown_entries]


def learned_number(number: Any) -> Expression:
    """Return a tensor of one number as a read of a one-entry table, so that the number receives its gradient."""
    return Table(number.reshape(1))[0]


def _table_kind(array: Any) -> Kind:
    name = dtype_name(array)
    if name == "bool":
        return "bool"
    if name.startswith(("int", "uint")) and name != "uint64":
        return "int"
    if name in ("float16", "bfloat16", "float32", "float64"):
        return "float"
    raise DtypeError(
        f"a table of dtype {name}",
        "bool, signed integers up to 64 bits, unsigned up to 32, float16, bfloat16, float32, float64, "
        "in the byte order of this machine",
        "np.unique(array, return_inverse=True)[1] has a number for each word"
        if name.startswith("<U")
        else "array.astype(array.dtype.newbyteorder('='))"
        if name.startswith((">i", ">u", ">f"))
        else "cast it",
    )
