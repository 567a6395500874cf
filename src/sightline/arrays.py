"""What the library needs to know of an array, whatever library made it: namespace, dtype, device, host copy.

NumPy and torch arrays are told apart by the module of their type, so no framework is imported to ask.
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

Array = Any  # NumPy's or a framework's; checked at the door, so annotations below say only that it is one

FLOATS = ("float16", "bfloat16", "float32", "float64")


def framework(array: Array) -> str:
    """The package the array's type comes from: "numpy", "torch", ..."""
    for base in type(array).__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("numpy", "torch", "jax", "jaxlib"):
            return "jax" if package == "jaxlib" else package
    return type(array).__module__.partition(".")[0]


def namespace(array: Array) -> Any:
    """The array-API namespace of the array."""
    if framework(array) == "torch":  # by name: torch.compile warns of the caches in array_namespace
        from array_api_compat import torch

        return torch
    from array_api_compat import array_namespace

    return array_namespace(array)


def device(array: Array) -> str:
    """Where the array lives, as text: "cpu", "cuda:0"."""
    return str(getattr(array, "device", "cpu"))


def dtype_name(array: Array) -> str:
    """The dtype's plain name, "float32" for NumPy's, torch's and ml_dtypes' alike."""
    if type(array) is np.ndarray:
        return _numpy_name(array.dtype)
    return str(array.dtype).removeprefix("torch.")


@lru_cache(64)
def _numpy_name(dtype: Any) -> str:
    """NumPy puts it together anew each time, in microseconds."""
    return str(dtype)


def accumulator(name: str) -> str:
    """The dtype sums are kept in: float64 for float64, float32 for all narrower floats."""
    return "float64" if name == "float64" else "float32"


def resolve_dtype(xp: Any, name: str) -> Any:
    """The namespace's dtype object of that name; "bfloat16" in NumPy comes from ml_dtypes."""
    if hasattr(xp, name):
        return getattr(xp, name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DtypeError(f"dtype {name} in {xp.__name__}", "dtypes the library has", "pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, name))


def to_numpy(array: Array) -> Any:
    """The values as a NumPy array: no copy where NumPy can share the memory; bfloat16 widens to float32."""
    if framework(array) != "torch":
        return np.asarray(array)
    array = array.detach()
    if dtype_name(array) == "bfloat16":
        array = array.float()
    return array.cpu().resolve_conj().resolve_neg().numpy()


def to_host(array: Array) -> Array:
    """The array itself where it lies in the host's memory, else a copy there."""
    return array if device(array) == "cpu" else to_numpy(array)


def min_max(array: Array) -> tuple[float, float]:
    """(least, greatest) entry, NaN where there is one; torch's arrays are read once, by all its threads, in place."""
    if framework(array) != "torch" or dtype_name(array) in ("uint16", "uint32"):  # torch has no extrema of these
        array = to_numpy(array)
        least, greatest = array.min(), array.max()
    else:
        least, greatest = array.detach().aminmax()
    return float(least), float(greatest)


def convert(array: Array, like: Array) -> Array:
    """The values as an array of `like`'s library and device, shared where both are on the CPU."""
    if framework(array) == framework(like):
        return array
    host = to_numpy(array)
    if framework(like) != "torch":
        return host
    if not host.flags.writeable or any(stride < 0 for stride in host.strides):
        host = host.copy()  # torch cannot share these
    return namespace(like).asarray(host, device=like.device)


def broadcast_to(array: Array, shape: tuple[int, ...]) -> Array:
    """The array seen with that shape, without a copy; lengths may be symbols of torch.compile."""
    return array.expand(shape) if hasattr(array, "expand") else np.broadcast_to(array, shape)


def is_strided(array: Array) -> bool:
    """Whether its entries lie in memory by strides and all count: neither sparse nor masked."""
    return not hasattr(array, "mask") and "strided" in str(getattr(array, "layout", "strided"))


def detach(array: Array) -> Array:
    """The array as its memory holds it, without history: torch's conjugate and negative views are written out."""
    return array.detach().resolve_conj().resolve_neg() if framework(array) == "torch" else np.asarray(array)


def layout(array: Array) -> tuple[int, tuple[int, ...]]:
    """(address of the first entry, bytes from entry to entry along each axis) of a `detach` array on the CPU."""
    if framework(array) == "torch":
        size = array.element_size()
        return array.data_ptr(), tuple(size * stride for stride in array.stride())
    return array.__array_interface__["data"][0], array.strides


def empty(shape: tuple[int, ...], name: str, like: Array) -> Array:
    """A new array of that dtype, in `like`'s library and place."""
    if framework(like) == "torch":
        return like.new_empty(shape, dtype=resolve_dtype(namespace(like), name))
    return np.empty(shape, resolve_dtype(np, name))
