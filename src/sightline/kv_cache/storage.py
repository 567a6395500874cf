"""Storage of a KV cache: arrays (B, G, capacity, d) of NumPy or torch, of which the first positions are in use."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.operations import dtype_name, namespace, resolve_dtype
from ..arrays.row_formats import RowFormat

Array = Any


def allocate(like: Array, batch: int, capacity: int, dtype: str, width: int | None = None) -> Array:
    """Return zeros of shape (batch, G, capacity, width), with the library, the device and G of `like`.

    Without `width`, it is that of `like`.

    Uninitialised memory may hold NaN, and a kernel computes a block a second time if its hidden positions have NaN.
    """
    xp = namespace(like)
    shape = (batch, like.shape[1], capacity, like.shape[3] if width is None else width)
    return xp.zeros(shape, dtype=resolve_dtype(xp, dtype), device=like.device)


def grow(storage: Array, capacity: int, used: int) -> Array:
    """Return new storage of that capacity with a copy of the first `used` positions. The old storage is unchanged."""
    new = allocate(storage, storage.shape[0], capacity, dtype_name(storage))
    new[:, :, :used] = storage[:, :, :used]
    return new


def write(storage: Array, array: Array, positions: Any) -> None:
    """Set storage[b, :, positions[b, r]] = array[b, :, r] for every position that is not −1."""
    if positions.size and positions.min() >= 0 and (positions == positions[0]).all():
        storage[:, :, positions[0, 0] : positions[0, -1] + 1] = array
        return
    b, row = np.nonzero(positions >= 0)
    if b.size:
        storage[b, :, positions[b, row]] = namespace(array).astype(array[b, :, row], storage.dtype)


def write_quantized(storage: Array, array: Array, positions: Any, row_format: RowFormat, sums: Any) -> None:
    """Do what `write` does, quantised, and add Σ (x − x̂)² and Σ x² to `sums`, two float64."""
    from ..cpu.launch.quantize import quantize  # loads llvmlite

    quantize(array, storage, positions, row_format, sums)
    storage[:, :, :0] = 0  # no entry: generated code has written, and torch counts the writes for its backward passes


def reorder_batch(storage: Array, order: Any, used: int) -> Array:
    """Return storage whose sequence b has the first `used` positions of the old sequence order[b].

    If the number of sequences stays the same, the storage is changed in place and returned.
    """
    if order.size != storage.shape[0]:
        new = allocate(storage, order.size, storage.shape[2], dtype_name(storage))
        new[:, :, :used] = storage[order, :, :used]
        return new
    moved = np.flatnonzero(order != np.arange(order.size))
    if moved.size:
        storage[moved, :, :used] = storage[order[moved], :, :used]
    return storage
