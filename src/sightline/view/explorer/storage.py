"""How the explorer page stores arrays: weights as levels of their square root, and every array compressed, in base64.

A level is an integer from 0 to `count`. A weight w has the level

    k = round(count · √(w / s)),    at least 1 if w > 0,

where s is the weight that `count` stands for: 1 for weights of pairs, which are at most 1. The level k stands for the
weight s · (k / count)². Level 0 is exactly 0. Small weights have finer steps than large ones: the stored value differs
from w by at most s · (k + ¼) / count², which is about √(s · w) / count. So small weights remain apart from each other
and from 0, and cost few bits.
"""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

BASE64_RATIO = 4 / 3  # number of base64 characters that encode one byte
# numbers of levels from the finest to the coarsest: 16 bits, 12 bits, 8 bits, then fewer levels
LEVELS: tuple[int, ...] = (65535, 4095, 255, *range(240, 63, -16))
SAMPLED_WEIGHTS = 1 << 19  # about this number of weights is compressed to estimate the size of all weights


def to_levels(weights: Array, count: int, scales: Array) -> Array:
    """Return the levels of weights, or of other numbers, of H heads.

    Parameters
    ----------
    weights : (H, ...) floats, at least 0
    count : int
        The highest level.
    scales : (H,) float32
        For each head the weight s that `count` stands for, at least the largest weight of the head.

    Returns
    -------
    uint8 array of the shape of `weights`, or uint16 if `count` is above 255
    """
    levels = np.empty(weights.shape, np.uint8 if count <= 255 else np.uint16)
    for head, (p, scale) in enumerate(zip(weights, scales, strict=True)):
        levels[head] = np.maximum(np.rint(count * np.sqrt(np.maximum(p, 0).astype(np.float32) / scale)), p > 0)
    return levels


def compute_scales(weights: Array, *, relative: bool) -> Array:
    """Return the weight (H,) float32 that the highest level of each head stands for.

    This weight is 1, or the head's largest weight if that is above 1, or if `relative` is true and that is above 0.
    """
    largest = weights.reshape(len(weights), -1).max(1).astype(np.float32)
    return np.where(largest > 0, largest, 1) if relative else np.maximum(largest, 1)


def choose_levels(weights: Sequence[Array], limit: float) -> int | None:
    """Return the largest number of levels in `LEVELS` with which all weights fit into `limit` bytes of base64.

    Return None if the weights do not fit with any number. The size of the weights is estimated from the compressed
    weights of evenly spaced keys.
    """
    total = sum(array.size for array in weights)
    step = max(total // SAMPLED_WEIGHTS, 1)
    sampled = [array[:, :, step // 2 % array.shape[2] :: step] for array in weights]
    scales = [compute_scales(array, relative=False) for array in weights]
    share = total / sum(array.size for array in sampled)

    def fits(count: int) -> bool:
        pairs = zip(sampled, scales, strict=True)
        parts = (to_levels(array, count, scale).swapaxes(1, 2) for array, scale in pairs)
        return share * BASE64_RATIO * sum(len(_compress(part)) for part in parts) <= limit

    first = bisect_left(LEVELS, True, key=fits)  # fewer levels take fewer bytes
    return LEVELS[first] if first < len(LEVELS) else None


def pack(array: Array) -> str:
    """Return the compressed bytes of an array in base64.

    The first bytes of all little-endian numbers come first, then all second bytes and so on, because bytes of one place
    compress better together. The compression is DEFLATE (RFC 1951), without a header.
    """
    return base64.b64encode(_compress(array)).decode("ascii")


def _compress(array: Array) -> bytes:
    size = array.dtype.itemsize
    numbers = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    planes = np.ascontiguousarray(numbers.reshape(-1).view(np.uint8).reshape(-1, size).T)
    # Z_FILTERED avoids short repeats, which cost more than single bytes in noisy data
    stream = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_FILTERED)
    return stream.compress(planes.tobytes()) + stream.flush()
