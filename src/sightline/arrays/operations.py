"""Functions for arrays of any library: namespace, dtype, device, memory layout, conversion, copy to the host.

`framework` recognises an array's library by the module that defines the array's type, without importing the library.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import DtypeError

Array = Any  # an array of NumPy or of a framework; `validation` has checked its type

FLOATS = ("float16", "bfloat16", "float32", "float64")
MAX_COMPARED_BYTES = 1 << 10  # the entries of a larger array are compared by a checksum of 32 bits


def framework(array: Array) -> str:
    """Return the name of the package that defines the array's type: "numpy", "torch", ..."""
    torch = sys.modules.get("torch")  # torch.compile cannot trace the bases of torch.nn.Parameter
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    for base in type(array).__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("numpy", "jax", "jaxlib"):
            return "jax" if package == "jaxlib" else package
    return type(array).__module__.partition(".")[0]


def namespace(array: Array) -> Any:
    """Return the array-API namespace of the array."""
    if framework(array) == "torch":  # torch.compile warns about the caches in array_namespace
        from array_api_compat import torch

        return torch
    from array_api_compat import array_namespace

    return array_namespace(array)


def is_known(array: Array) -> bool:
    """True if the array comes from NumPy, torch, JAX or another library whose array API array-api-compat knows."""
    if framework(array) in ("numpy", "torch", "jax"):
        return True
    from array_api_compat import is_array_api_obj

    return bool(is_array_api_obj(array))


def device(array: Array) -> str:
    """Return the device of the array as text: "cpu", "cuda:0"; "cpu" for JAX, which places its arrays itself."""
    if framework(array) == "jax":
        return "cpu"
    return str(getattr(array, "device", "cpu"))


def dtype_name(array: Array) -> str:
    """Return the name of the array's dtype without a package: "float32" for NumPy and for torch, for example."""
    if type(array) is np.ndarray:
        return _numpy_name(array.dtype)
    return str(array.dtype).rpartition(".")[2]


@lru_cache(64)
def _numpy_name(dtype: Any) -> str:
    """Return the name of a NumPy dtype. The name is cached, because NumPy takes microseconds to build it."""
    return str(dtype)


def check_float_dtype(name: str, array: Array) -> None:
    """Raise DtypeError unless the dtype of the array is in `FLOATS`; `name` is the array's name in the message."""
    if dtype_name(array) not in FLOATS:
        raise DtypeError(f"{name} has dtype {dtype_name(array)}", ", ".join(FLOATS), f"cast {name} to one of these")


def accumulator(name: str) -> str:
    """Return the dtype that sums are computed in: "float64" for "float64", "float32" for every narrower float."""
    return "float64" if name == "float64" else "float32"


def resolve_dtype(xp: Any, name: str) -> Any:
    """Return the dtype object that has this name in the namespace.

    NumPy's bfloat16 comes from the package ml_dtypes. Raise DtypeError if that package is needed but not installed.
    """
    if hasattr(xp, name):
        return getattr(xp, name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DtypeError(f"dtype {name} in {xp.__name__}", "dtypes the library has", "pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, name))


def to_numpy(array: Array) -> Any:
    """Return the array as a NumPy array, without a copy if memory can be shared; torch's bfloat16 becomes float32."""
    if framework(array) != "torch":
        return np.asarray(array)
    array = array.detach()
    if dtype_name(array) == "bfloat16":
        array = array.float()
    return array.cpu().resolve_conj().resolve_neg().numpy()


def to_host(array: Array) -> Array:
    """Return the array itself if it lies in host memory, else a NumPy copy of the array."""
    return array if device(array) == "cpu" else to_numpy(array)


def min_max(array: Array) -> tuple[float, float]:
    """Return (smallest, largest) of the array's entries, (NaN, NaN) if any entry is NaN.

    torch computes both numbers of a tensor, without a copy to the host and with all threads.
    """
    if framework(array) != "torch" or dtype_name(array) in ("uint16", "uint32"):  # torch's aminmax lacks these dtypes
        array = to_numpy(array)
        smallest, largest = array.min(), array.max()
    else:
        smallest, largest = array.detach().aminmax()
    return float(smallest), float(largest)


def convert(array: Array, like: Array) -> Array:
    """Return the array converted to the library and the device of `like`, without a copy if both are on the CPU.

    If `array` and `like` come from the same library, `array` itself is returned, even if their devices differ.
    """
    if framework(array) == framework(like):
        return array
    return map_entries(lambda entries: _convert(entries, like), array)


def _convert(array: Array, like: Array) -> Array:
    host = to_numpy(array)
    if framework(like) in ("numpy", "jax"):
        return host
    # torch cannot share memory that is read-only, or whose strides are negative or not whole numbers of entries
    if not host.flags.writeable or any(stride < 0 or stride % host.itemsize for stride in host.strides):
        host = host.copy()
    xp = namespace(like)
    if dtype_name(host) == "bfloat16":
        return xp.asarray(host.view(np.int16), device=like.device).view(xp.bfloat16)
    return xp.asarray(host, device=like.device)


def to_example(array: Array) -> Array:
    """Return NumPy zeros in the shape and dtype of an array whose entries may be unknown, such as a tracer of JAX."""
    return np.zeros(array.shape, resolve_dtype(np, dtype_name(array)))


def broadcast_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Return the array broadcast to that shape, as a view. Lengths in `shape` may be symbols of torch.compile."""
    if hasattr(array, "expand"):
        return array.expand(shape)
    return (np if isinstance(array, np.ndarray) else namespace(array)).broadcast_to(array, shape)


def swap_heads(array: Array) -> Array:
    """Return a view (..., n, H, d) of an array (..., H, n, d), or the reverse."""
    if hasattr(array, "swapaxes"):
        return array.swapaxes(-3, -2)
    return namespace(array).moveaxis(array, -3, -2)


def drop_repeats(array: Array) -> Array:
    """Return a view of the array in which every axis of stride 0 has length 1; the array itself if it has no such axis.

    Entries repeat along an axis of stride 0. `broadcast_to` makes such axes.
    """
    if isinstance(array, np.ndarray):
        strides: tuple[int, ...] = array.strides
    elif framework(array) == "torch" and not hasattr(array, "mask") and "strided" in str(array.layout):
        strides = array.stride()
    else:
        return array
    repeats = [stride == 0 and length > 1 for stride, length in zip(strides, array.shape, strict=True)]
    return array[tuple([slice(0, 1) if one else slice(None) for one in repeats])] if any(repeats) else array


def map_entries(function: Callable[[Array], Array], array: Array) -> Array:
    """Return function(array), for a function that computes each entry of the result from one entry of the array.

    The function is applied to `drop_repeats(array)`. So a copy does not store entries that repeat, and the result is a
    view with the same axes of stride 0.
    """
    entries = drop_repeats(array)
    return function(array) if entries is array else broadcast_to(function(entries), tuple(array.shape))


def take(array: Array, indices: Any, axis: int) -> Array:
    """Return the entries at these indices (a list or an array) along an axis, which is given as a negative number."""
    if framework(array) in ("numpy", "torch", "jax"):
        return array[(..., indices, *[slice(None)] * (-1 - axis))]
    xp = namespace(array)
    return xp.take(array, xp.asarray(indices, device=array.device), axis=axis)


def detach(array: Array) -> Array:
    """Return the array without its autograd history. A conjugate or negative view of torch is copied to new memory."""
    return array.detach().resolve_conj().resolve_neg() if framework(array) == "torch" else np.asarray(array)


def layout(array: Array) -> tuple[int, tuple[int, ...]]:
    """Return (address of the first entry, strides in bytes) of an array in CPU memory that `detach` returned."""
    if framework(array) == "torch":
        size = array.element_size()
        return array.data_ptr(), tuple(size * stride for stride in array.stride())
    return array.__array_interface__["data"][0], array.strides


def memory_layout(array: Array) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return (name of the dtype, shape, strides in bytes) of an array in CPU memory.

    Code that was made for the memory layout of one array can read another array only if both layouts are equal.
    """
    return dtype_name(array), tuple(array.shape), layout(array)[1]


def checksum(array: Array) -> bytes | int:
    """Return a value that changes with the entries of a NumPy array: the bytes of a small array, else their CRC-32."""
    if array.nbytes <= MAX_COMPARED_BYTES:
        return bytes(array.tobytes())
    array = drop_repeats(array)
    return zlib.crc32(array.ravel(order="K").view(np.uint8))


def empty(shape: tuple[int, ...], name: str, like: Array, heads_in_rows: bool = False) -> Array:
    """Return a new array of that shape and dtype with undefined entries, in `like`'s library and on its device.

    With `heads_in_rows` the axes −3 and −2 are swapped in memory; see `has_heads_in_rows`.
    """
    if heads_in_rows:
        *lead, heads, positions, width = shape
        return empty((*lead, positions, heads, width), name, like).swapaxes(-3, -2)
    if framework(like) == "torch":
        return like.new_empty(shape, dtype=resolve_dtype(namespace(like), name))
    return np.empty(shape, resolve_dtype(np, name))


def is_one(length: Any) -> bool:
    """True if the length is 1. While torch.export traces, a length that depends on data counts as longer."""
    return is_true(length == 1)


def is_true(condition: Any) -> bool:
    """Return a condition on lengths; False if a length depends on data and torch.export traces."""
    shapes = sys.modules.get("torch.fx.experimental.symbolic_shapes")
    guard = getattr(shapes, "guard_or_false", getattr(shapes, "guard_size_oblivious", bool))  # the second before 2.7
    return bool(guard(condition))


def has_heads_in_rows(query: Array) -> bool:
    """True if a row of memory holds the heads of a position side by side, as in a view of (B, n, H · d).

    The output of such a query has the same order in memory, so that joining its heads to (B, n, H · d) needs no copy.
    For a query on a GPU the result is False, because the kernels of GPUs write contiguous outputs.
    """
    if query.ndim < 4 or is_one(query.shape[-3]) or is_one(query.shape[-2]) or device(query) != "cpu":
        return False
    head_stride, row_stride = (query.stride() if framework(query) == "torch" else query.strides)[-3:-1]
    return bool(abs(head_stride) < abs(row_stride))


def itemsize(dtype: str) -> int:
    """Return the bytes of one number of the dtype."""
    return {"float16": 2, "bfloat16": 2, "float32": 4}.get(dtype, 8)
