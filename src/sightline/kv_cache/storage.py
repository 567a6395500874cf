"""Storage of a KV cache: arrays (B, G, capacity, d) of NumPy or torch, of which the first positions are in use."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from ..arrays.operations import dtype_name, framework, namespace, resolve_dtype

Array = Any


def allocate(like: Array, batch: int, capacity: int, dtype: str) -> Array:
    """Return zeros of shape (batch, G, capacity, d), with the library, the device, G and d of `like`.

    Uninitialised memory may hold NaN, and a kernel computes a block a second time if its hidden positions have NaN.
    torch could not write to a tensor of torch.inference_mode after that mode has ended.
    """
    xp = namespace(like)
    shape = (batch, like.shape[1], capacity, like.shape[3])
    with xp.inference_mode(False) if framework(like) == "torch" else nullcontext():
        return xp.zeros(shape, dtype=resolve_dtype(xp, dtype), device=like.device)


def grow(storage: Array, capacity: int, used: int) -> Array:
    """Return new storage of that capacity with a copy of the first `used` positions. The old storage is unchanged."""
    new = allocate(storage, storage.shape[0], capacity, dtype_name(storage))
    new[:, :, :used] = storage[:, :, :used]
    return new


def write_all(storage: Array, array: Array, start: int) -> None:
    """Set storage[:, :, start + r] = array[:, :, r] for every row r."""
    storage[:, :, start : start + array.shape[2]] = array


def write(storage: Array, array: Array, positions: Any) -> None:
    """Set storage[b, :, positions[b, r]] = array[b, :, r] for every position that is not −1."""
    b, row = np.nonzero(positions >= 0)
    if b.size:
        storage[b, :, positions[b, row]] = namespace(array).astype(array[b, :, row], storage.dtype)


def reorder_batch(storage: Array, order: Any, used: int, *, in_place: bool) -> Array:
    """Return storage whose sequence b has the first `used` positions of the old sequence order[b].

    With `in_place`, and if the number of sequences stays the same, the storage is changed and returned.
    """
    if not in_place or order.size != storage.shape[0]:
        new = allocate(storage, order.size, storage.shape[2], dtype_name(storage))
        new[:, :, :used] = storage[order, :, :used]
        return new
    moved = np.flatnonzero(order != np.arange(order.size))
    if moved.size:
        storage[moved, :, :used] = storage[order[moved], :, :used]
    return storage
