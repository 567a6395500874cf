"""Storage of a KV cache: NumPy or torch arrays (B, G, capacity, width), whose first rows along axis 2 are in use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operations import FLOATS, address_of, dtype_name, framework, namespace, resolve_dtype, strides_of
from ..arrays.row_formats import RowFormat

DOUBLING = 256  # rows up to which the capacity of full storage is doubled
LARGE_SHARE = 4  # large storage grows by a quarter, so a row is copied about 4 times in total


class RelativeErrors(NamedTuple):
    """The relative error √(Σ (x − x̂)² / Σ x²) of a quantised cache, which stores x̂ in place of the appended x.

    `key` is the error of all appended keys together, and `value` that of all appended values.
    """

    key: float
    value: float


class Storage:
    """The keys and values of a cache.

    The values of multi-head latent attention are a view of the first d_v numbers of the keys. If those of the first
    append are such a view, one array stores keys and values until an append has other values.

    key, value : (B, G, t, d) arrays of the first append; they are not written yet
    capacity : the number of rows to allocate
    dtype : the dtype of stored floats
    quantized : the dtypes of stored codes for keys and for values; None for floats

    key, value : (B, G, capacity, d), or the bytes of quantised rows (B, G, capacity, row_bytes)
    widths : d_k and d_v
    row_formats : how the rows of keys and of values are quantised; None for floats
    squares : (2, 2), a row for keys and one for values: Σ (x − x̂)² and Σ x² of all numbers x that were quantised to x̂
    """

    def __init__(self, key: Any, value: Any, capacity: int, dtype: str, quantized: tuple[str, str] | None) -> None:
        self.widths: tuple[int, int] = key.shape[3], value.shape[3]
        self.squares = np.zeros((2, 2))
        self.row_formats: tuple[RowFormat, RowFormat] | None = None
        widths: tuple[int, ...] = self.widths
        if quantized is not None:
            self.row_formats = RowFormat(quantized[0], widths[0]), RowFormat(quantized[1], widths[1])
            dtype, widths = "uint8", (self.row_formats[0].row_bytes, self.row_formats[1].row_bytes)
        elif is_part(value, key):
            widths = widths[:1]
        self._is_shared = False  # True if a copy may read the same arrays, which are then copied before a change
        self._hold([_allocate(key, (*key.shape[:2], capacity, width), dtype) for width in widths])

    def _hold(self, arrays: Iterable[Any]) -> None:
        """Use these arrays: one of keys and one of values, or only one of keys, which contains the values."""
        self._arrays = tuple(arrays)
        self.key = self._arrays[0]
        self.value = self.key[..., : self.widths[1]] if len(self._arrays) == 1 else self._arrays[1]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle. If one array stores keys and values, `value` becomes a view of the keys again."""
        self.__dict__ |= state
        self._hold(self._arrays)

    @property
    def capacity(self) -> int:
        """The number of rows that fit."""
        return int(self.key.shape[2])

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays, unused rows included."""
        return sum(math.prod(array.shape) * int(array.dtype.itemsize) for array in self._arrays)

    def fits(self, key: Any, value: Any) -> bool:
        """True if the arrays (B, G, t, d) can be appended. If False, the slower `check_append` decides."""
        pairs = zip((key, value), (self.key, self.value), self.widths, strict=True)
        if not all(self._fits(array, stored, width) for array, stored, width in pairs):
            return False
        return bool(key.shape[2] == value.shape[2] and key.dtype == value.dtype)

    def _fits(self, array: Any, stored: Any, width: int) -> bool:
        if type(array) is not type(stored) or array.ndim != 4:
            return False
        if not (array.dtype == stored.dtype if self.row_formats is None else dtype_name(array) in FLOATS):
            return False
        if getattr(array, "requires_grad", False) or getattr(array, "is_nested", False):
            return False
        if array.device != stored.device or getattr(array, "layout", None) is not getattr(stored, "layout", None):
            return False
        return bool(array.shape[:2] == stored.shape[:2] and array.shape[3] == width)

    def copy(self) -> Storage:
        """Return storage of the same rows. The arrays are shared until this storage or the copy changes them."""
        self._is_shared = True
        copied = object.__new__(type(self))
        copied.__dict__ |= self.__dict__
        return copied

    def from_row(self, first: int) -> Storage:
        """Return a copy without the rows before `first`."""
        copied = self.copy()
        copied._hold(array[:, :, first:] for array in self._arrays)
        return copied

    def without_rows(self, batch: int) -> Storage:
        """Return storage without rows for `batch` sequences, with the heads, widths and formats of this one."""
        is_shared, new = self._is_shared, self.copy()
        new._hold(
            _allocate(array, (batch, array.shape[1], 0, array.shape[3]), dtype_name(array)) for array in self._arrays
        )
        new.squares, new._is_shared, self._is_shared = np.zeros((2, 2)), False, is_shared
        return new

    def reserve(self, needed: int, used: int) -> None:
        """Extend the storage to `needed` rows or more. It replaces small or shared arrays, and copies `used` rows."""
        capacity = self.capacity
        if needed > capacity:
            self.move(max(needed, capacity + max(min(capacity, DOUBLING), capacity // LARGE_SHARE)), used)
        elif self._is_shared:
            self.move(capacity, used)

    def release(self, used: int, least: int) -> None:
        """Shrink large arrays of which the first `used` rows are a small part, but not below `least` rows."""
        needed = max(used + used // LARGE_SHARE, least)
        if self.capacity > max(LARGE_SHARE * needed, DOUBLING):
            self.move(needed, used)

    def move(self, capacity: int, used: int) -> None:
        """Copy the first `used` rows to new arrays of this capacity."""
        self._hold([_grow(array, capacity, used) for array in self._arrays])
        self._is_shared = False

    def write(self, key: Any, value: Any, rows: Any) -> None:
        """Write key[b, :, r] and value[b, :, r] to row rows[b, r] of sequence b. A row of −1 is not written.

        `rows` may be an int, the first of the consecutive rows that every sequence gets.
        """
        if len(self._arrays) == 1 and not is_part(value, key):
            self._hold((self.key, _grow(self.value, self.capacity, self.capacity)))
        if self.row_formats is None:
            for array, numbers in zip(self._arrays, (key, value), strict=False):  # one array stores both
                if isinstance(rows, int):
                    array[:, :, rows : rows + numbers.shape[2]] = numbers
                else:
                    _write(array, numbers, rows)
            return
        if isinstance(rows, int):
            rows = np.arange(rows, rows + key.shape[2])[None].repeat(key.shape[0], 0)
        from ..cpu.kernels.quantize import quantize  # loads llvmlite

        self.squares = self.squares + quantize((key, value), self._arrays, rows, self.row_formats)  # not in place
        for array in self._arrays:
            framework(array).count_write(array)

    def move_rows(self, sources: Any, targets: Any) -> None:
        """Copy row sources[b, r] to row targets[b, r] of sequence b, unless the target is −1."""
        b, r = np.nonzero(targets >= 0)
        for array in self._arrays:
            array[b, :, targets[b, r]] = array[b, :, sources[b, r]]

    def append_rows(self, other: Storage, first: Any, counts: Any, used: int) -> None:
        """Copy the first counts[b] rows of `other`, as they are stored, to the rows from first[b] on of sequence b.

        `used` is the number of rows of this storage to keep.
        """
        if len(self._arrays) == 1 < len(other._arrays):
            self._hold((self.key, _grow(self.value, self.capacity, self.capacity)))
        self.move(int((first + counts).max(initial=0)), used)
        rows = np.arange(int(counts.max(initial=0)))
        targets = np.where(rows < counts[:, None], first[:, None] + rows, -1)
        for array, source in zip(self._arrays, (other.key, other.value), strict=False):
            _write(array, source[:, :, : rows.size], targets)

    def reorder(self, order: Any, used: int) -> None:
        """Replace sequence b by sequence order[b], of which the first `used` rows are kept."""
        in_place = not self._is_shared and order.size == self.key.shape[0]
        self._hold([_reorder(array, order, used, in_place) for array in self._arrays])
        self._is_shared = False

    def gathered(self, rows: Any) -> Storage:
        """Return new storage of the rows with these numbers (B, G, c) of each head, and a quarter more capacity."""
        (B, G, count), new = rows.shape, self.copy()
        gathered = [array[np.arange(B)[:, None, None], np.arange(G)[:, None], rows] for array in self._arrays]
        new._hold([_grow(array, count + max(count // LARGE_SHARE, 1), count) for array in gathered])
        new._is_shared = False
        return new


def is_part(value: Any, key: Any) -> bool:
    """True if the values are a view of the first numbers of the keys."""
    if framework(value) is not framework(key) or value.dtype != key.dtype or value.shape[:-1] != key.shape[:-1]:
        return False
    if getattr(key, "layout", None) is not getattr(value, "layout", None) or value.shape[-1] > key.shape[-1]:
        return False
    return address_of(value) == address_of(key) and strides_of(value) == strides_of(key)


def _allocate(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return zeros with the library and the device of `like`.

    Uninitialised memory may hold NaN, and a kernel computes a block a second time if its hidden rows have NaN. The mode
    of torch.inference_mode is switched off, because torch cannot write to a tensor of that mode after it has ended.
    """
    xp = namespace(like)
    with xp.inference_mode(False) if hasattr(xp, "inference_mode") else nullcontext():
        return xp.zeros(shape, dtype=resolve_dtype(xp, dtype), device=like.device)


def _grow(array: Any, capacity: int, used: int) -> Any:
    """Return a new array of that capacity with a copy of the first `used` rows. The old array is unchanged."""
    new = _allocate(array, (*array.shape[:2], capacity, array.shape[3]), dtype_name(array))
    new[:, :, :used] = array[:, :, :used]
    return new


def _write(target: Any, array: Any, rows: Any) -> None:
    b, row = np.nonzero(rows >= 0)
    if b.size:
        target[b, :, rows[b, row]] = namespace(array).astype(array[b, :, row], target.dtype)


def _reorder(array: Any, order: Any, used: int, in_place: bool) -> Any:
    if not in_place:
        new = _allocate(array, (order.size, *array.shape[1:]), dtype_name(array))
        new[:, :, :used] = array[order, :, :used]
        return new
    moved = np.flatnonzero(order != np.arange(order.size))
    if moved.size:
        array[moved, :, :used] = array[order[moved], :, :used]
    return array
