"""Storage of a cache: arrays (B, G, capacity, d), NumPy's or torch's, of which the first positions are in use."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import dtype_name, namespace, resolve_dtype

__all__ = ["allocate", "grow", "reorder_batch", "write"]

Array = Any


def allocate(like: Array, batch: int, capacity: int, dtype: str) -> Array:
    """Zeros, not memory as it comes: NaN in what a mask hides would cost a second look."""
    xp = namespace(like)
    shape = (batch, like.shape[1], capacity, like.shape[3])
    return xp.zeros(shape, dtype=resolve_dtype(xp, dtype), device=like.device)


def grow(storage: Array, capacity: int, used: int) -> Array:
    """Other storage of that capacity that begins with the positions in use; views of the old one stay as they are."""
    new = allocate(storage, storage.shape[0], capacity, dtype_name(storage))
    new[:, :, :used] = storage[:, :, :used]
    return new


def write(storage: Array, array: Array, places: Any) -> None:
    """storage[b, :, places[b, r]] = array[b, :, r] where the place is not −1."""
    if places.size and places.min() >= 0 and (places == places[0]).all():
        storage[:, :, places[0, 0] : places[0, -1] + 1] = array
        return
    sequence, row = np.nonzero(places >= 0)
    if sequence.size:
        storage[sequence, :, places[sequence, row]] = namespace(array).astype(array[sequence, :, row], storage.dtype)


def reorder_batch(storage: Array, order: Any, used: int) -> Array:
    """Storage whose sequence b is what order[b] was: the same one where as many sequences stay."""
    if order.size != storage.shape[0]:
        new = allocate(storage, order.size, storage.shape[2], dtype_name(storage))
        new[:, :, :used] = storage[order, :, :used]
        return new
    moved = np.flatnonzero(order != np.arange(order.size))
    if moved.size:
        storage[moved, :, :used] = storage[order[moved], :, :used]
    return storage
