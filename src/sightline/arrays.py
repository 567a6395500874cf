"""Properties of an array of any library: namespace, dtype, device, memory layout, copy on the host.

The type's module tells NumPy arrays from torch tensors, so this module imports no framework to decide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .errors import DtypeError

__all__ = [
    "FLOATS",
    "accumulator",
    "broadcast_to",
    "check_float_dtype",
    "convert",
    "detach",
    "device",
    "dtype_name",
    "empty",
    "framework",
    "is_strided",
    "layout",
    "min_max",
    "namespace",
    "resolve_dtype",
    "to_host",
    "to_numpy",
]

Array = Any  # of NumPy or a framework: `validation` has checked the type

FLOATS = ("float16", "bfloat16", "float32", "float64")


def framework(array: Array) -> str:
    """Return the package that the array's type comes from: "numpy", "torch", ..."""
    for base in type(array).__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("numpy", "torch", "jax", "jaxlib"):
            return "jax" if package == "jaxlib" else package
    return type(array).__module__.partition(".")[0]


def namespace(array: Array) -> Any:
    """Return the array-API namespace of the array."""
    if framework(array) == "torch":  # torch.compile warns about the caches in array_namespace
        from array_api_compat import torch

        return torch
    from array_api_compat import array_namespace

    return array_namespace(array)


def device(array: Array) -> str:
    """Return the device of the array as text: "cpu", "cuda:0"."""
    return str(getattr(array, "device", "cpu"))


def dtype_name(array: Array) -> str:
    """Return the plain name of the dtype; "float32" for float32 of NumPy, torch and ml_dtypes alike."""
    if type(array) is np.ndarray:
        return _numpy_name(array.dtype)
    return str(array.dtype).removeprefix("torch.")


@lru_cache(64)
def _numpy_name(dtype: Any) -> str:
    """Return the dtype's name from a cache: NumPy builds the text anew at each call, which takes microseconds."""
    return str(dtype)


def check_float_dtype(name: str, array: Array) -> None:
    """Raise DtypeError unless the dtype of the array is in `FLOATS`; `name` is the array's name in the message."""
    if dtype_name(array) not in FLOATS:
        raise DtypeError(f"{name} has dtype {dtype_name(array)}", ", ".join(FLOATS), f"cast {name} to one of these")


def accumulator(name: str) -> str:
    """Return the dtype that sums are computed in: "float64" for "float64", "float32" for every narrower float."""
    return "float64" if name == "float64" else "float32"


def resolve_dtype(xp: Any, name: str) -> Any:
    """Return the namespace's dtype object of that name; bfloat16 of NumPy needs ml_dtypes, else DtypeError."""
    if hasattr(xp, name):
        return getattr(xp, name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DtypeError(f"dtype {name} in {xp.__name__}", "dtypes the library has", "pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, name))


def to_numpy(array: Array) -> Any:
    """Return the values as a NumPy array, without a copy if memory can be shared; torch's bfloat16 becomes float32."""
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
    """Return (smallest, largest) entry, NaN if any entry is NaN. torch reads its tensors in place, with all threads."""
    if framework(array) != "torch" or dtype_name(array) in ("uint16", "uint32"):  # torch has no aminmax of these
        array = to_numpy(array)
        smallest, largest = array.min(), array.max()
    else:
        smallest, largest = array.detach().aminmax()
    return float(smallest), float(largest)


def convert(array: Array, like: Array) -> Array:
    """Return the values as an array of `like`'s library and device, without a copy if both arrays are on the CPU.

    The array itself is returned if both arrays come from the same library, even if their devices differ.
    """
    if framework(array) == framework(like):
        return array
    host = to_numpy(array)
    if framework(like) != "torch":
        return host
    if not host.flags.writeable or any(stride < 0 for stride in host.strides):
        host = host.copy()  # torch cannot share read-only memory or negative strides
    return namespace(like).asarray(host, device=like.device)


def broadcast_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Return a view of the array with that shape; lengths may be symbols of torch.compile."""
    return array.expand(shape) if hasattr(array, "expand") else np.broadcast_to(array, shape)


def is_strided(array: Array) -> bool:
    """True if the array is dense with strides: neither sparse nor masked."""
    return not hasattr(array, "mask") and "strided" in str(getattr(array, "layout", "strided"))


def detach(array: Array) -> Array:
    """Return the array without autograd history; torch's conjugate and negative views are written to new memory."""
    return array.detach().resolve_conj().resolve_neg() if framework(array) == "torch" else np.asarray(array)


def layout(array: Array) -> tuple[int, tuple[int, ...]]:
    """Return (address of the first entry, bytes between entries along each axis) of a CPU array from `detach`."""
    if framework(array) == "torch":
        size = array.element_size()
        return array.data_ptr(), tuple(size * stride for stride in array.stride())
    return array.__array_interface__["data"][0], array.strides


def empty(shape: tuple[int, ...], name: str, like: Array) -> Array:
    """Return a new array of that shape and dtype with undefined entries, in `like`'s library and on its device."""
    if framework(like) == "torch":
        return like.new_empty(shape, dtype=resolve_dtype(namespace(like), name))
    return np.empty(shape, resolve_dtype(np, name))
