"""Layouts and addresses of arrays, for the call cache. Layouts are part of the keys of the cache.

    read_arrays(tensors, query, key, value, ...)  →  (layouts, address of query, address of key, address of value, ...)

`layouts` is a bytes object of 64-bit words. Equal layouts mean equal types, dtypes, shapes and strides. The words of an
array are its head, then the length of each axis, then the stride of each axis in bytes:

    head = itemsize · 2⁴⁸ + dtype · 2¹⁶ + number of axes · 2⁸ + gpu · 2² + requires_grad · 2 + is_tensor

`dtype` is type_num · 2⁸ + byteorder for NumPy, and the struct DLDataType of DLPack for torch. `gpu` is 1 + the index of
the GPU whose memory holds the tensor, and 0 for an array in the processor's memory.

In three cases the result is None. The call then needs the full dispatch: the checks and the planning of a first call.

- The type of an array is neither exactly NumPy's ndarray nor torch's Tensor or Parameter.
- A tensor has no strides, is a negative view, has a dtype without a code in DLPack, or is in other memory than that of
  the processor and the first `MAX_GPUS` GPUs.
- torch traces or transforms the call, computes forward derivatives, or has an active mode other than a default device.

`read_arrays` defines the results. Generated code does the same in a third of the time; see `call.call_cache`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from .operations import NUMPY, Framework, numpy_address

MAX_ARRAYS, MAX_AXES = 16, 8  # the most arrays, and the most axes of an array
TENSOR_BIT, GRADIENT_BIT, GPU_SHIFT = 1, 2, 2
MAX_GPUS = 63
ANY_LENGTH = struct.pack("q", -1)


class Layout(NamedTuple):
    """The layout of one array. `kind` is its first word, the head, without the number of axes. Strides are in bytes."""

    kind: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return self.kind >> 48


class Tensors(NamedTuple):
    """How tensors of torch are read.

    types : the two types of tensors
    read : function (tensor) that returns its `Layout` and its address; None if the call needs the full dispatch
    conditions : functions without arguments; if the result of one is true, the call needs the full dispatch
    is_grad_enabled : function without arguments; if its result is false, no tensor requires a gradient
    exchange : the capsule with DLPack's exchange functions of tensors; None if this torch has none
    """

    types: tuple[type, type]
    read: Callable[[Any], tuple[Layout, int] | None]
    conditions: Sequence[Callable[[], Any]]
    is_grad_enabled: Callable[[], bool]
    exchange: Any


def unpack(layouts: bytes) -> list[Layout]:
    """Return the layout of each array from the layouts that `read_arrays` returns."""
    words, found = iter(struct.unpack(f"{len(layouts) // 8}q", layouts)), []
    for head in words:
        axes = head >> 8 & 0xFF
        shape, strides = tuple(islice(words, axes)), tuple(islice(words, axes))
        found.append(Layout(head - (axes << 8), shape, strides))
    return found


def without_key_length(layouts: bytes) -> bytes:
    """Return the layouts with −1 in place of m, the number of keys: axis −2 of key and value (arrays 1 and 2).

    The layouts are returned unchanged if the two lengths differ, so that the full dispatch raises the error.
    """
    key = _bytes_of(layouts, 0)
    value = key + _bytes_of(layouts, key)
    first, second = (start + 8 * (layouts[start + 1] - 1) for start in (key, value))
    if layouts[first : first + 8] != layouts[second : second + 8]:
        return layouts
    return b"".join((layouts[:first], ANY_LENGTH, layouts[first + 8 : second], ANY_LENGTH, layouts[second + 8 :]))


def _bytes_of(layouts: bytes, start: int) -> int:
    """Return the length in bytes of the layout at byte `start`. Its second byte is the number of axes."""
    return 8 * (1 + 2 * layouts[start + 1])


def make_kind(itemsize: int, dtype: int, requires_gradient: bool = False, is_tensor: bool = False, gpu: int = 0) -> int:
    """Return `Layout.kind` of an array with these properties."""
    flags = gpu << GPU_SHIFT | requires_gradient * GRADIENT_BIT | is_tensor * TENSOR_BIT
    return itemsize << 48 | dtype << 16 | flags


def read_arrays(tensors: Tensors, *arrays: Any) -> tuple[Any, ...] | None:
    """Return the layouts and addresses of the arrays; None if the call needs the full dispatch, see the module."""
    types = {type(array) for array in arrays}
    if len(arrays) > MAX_ARRAYS or not types <= {np.ndarray, *tensors.types}:
        return None
    if types != {np.ndarray} and any(condition() for condition in tensors.conditions):
        return None
    words: list[int] = []
    addresses = []
    for array in arrays:
        found = _read_ndarray(array) if type(array) is np.ndarray else tensors.read(array)
        if found is None or len(found[0].shape) > MAX_AXES:
            return None
        (kind, shape, strides), address = found
        words += [kind | len(shape) << 8, *shape, *strides]
        addresses.append(address)
    return struct.pack(f"{len(words)}q", *words), *addresses


def _read_ndarray(array: Any) -> tuple[Layout, int]:
    dtype = array.dtype
    kind = make_kind(dtype.itemsize, dtype.num << 8 | ord(dtype.byteorder))
    return Layout(kind, array.shape, array.strides), numpy_address(array)


class NoTensor:
    """The type of tensors before torch's are served. No array has this type."""


NO_TENSORS = Tensors((NoTensor, NoTensor), lambda _: None, (), lambda: False, None)


# the libraries whose arrays the call cache reads, by the types of their arrays; `sightline.torch` adds those of torch
FRAMEWORKS: dict[type, Framework] = {np.ndarray: NUMPY}
BOOLEANS: set[Any] = {np.dtype(bool)}  # the dtypes of boolean arrays


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Return the addresses of arrays whose types are in `FRAMEWORKS`."""
    return [FRAMEWORKS[type(array)].address(array) for array in arrays]
