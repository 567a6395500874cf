"""How the call cache reads and allocates arrays: one adapter for each type of array.

`torch/dispatch.py` adds the adapter of tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ADAPTERS", "BOOLEANS", "ArrayAdapter", "addresses_of", "numpy_address"]


@dataclass(frozen=True)
class ArrayAdapter:
    """The functions by which the cache reads and allocates arrays of one type.

    Parameters
    ----------
    layouts : (query, key, value) → shape, strides and dtype of each array; None if the call needs the full dispatch
    layout : array → shape, strides and dtype of a table or of sinks; None if the call needs the full dispatch
    address : array → address of the array's first entry
    empty : (query, shape of the output) → function (query) that allocates the output
    empty_array : (shape, name of the dtype) → new array
    finish_lse : (lse float64, output) → lse as users receive it
    draw_seed : () → a seed of dropout; None if the caller must give one
    """

    layouts: Callable[[Any, Any, Any], tuple[Any, ...] | None]
    layout: Callable[[Any], tuple[Any, ...] | None]
    address: Callable[[Any], int]
    empty: Callable[[Any, tuple[int, ...]], Callable[[Any], Any]]
    empty_array: Callable[[tuple[int, ...], str], Any]
    finish_lse: Callable[[Any, Any], Any]
    draw_seed: Callable[[], int] | None


ADAPTERS: dict[type, ArrayAdapter] = {}
BOOLEANS: set[Any] = {np.dtype(bool)}  # the dtypes of boolean arrays


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Return the addresses of arrays whose types are in `ADAPTERS`."""
    return [ADAPTERS[type(array)].address(array) for array in arrays]


# -- the adapter of NumPy arrays -----------------------------------------------------------------------------------


def _layout(array: Any) -> tuple[Any, ...] | None:
    return array.shape, array.strides, array.dtype


def _layouts(q: Any, k: Any, v: Any) -> tuple[Any, ...] | None:
    if type(k) is not np.ndarray or type(v) is not np.ndarray:
        return None
    return q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype


_pointer_at = ctypes.c_void_p.from_address
_HEAD = object.__basicsize__


def _header_address(array: Any) -> int:
    """Return the address of a NumPy array's first entry: the field `data` of PyArrayObject in NumPy's C API.

    The field follows the head of the Python object. This read takes a quarter of the time that `__array_interface__`
    takes.
    """
    return _pointer_at(id(array) + _HEAD).value or 0


def _interface_address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _empty(query: Any, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    dtype = query.dtype
    return lambda _: np.empty(shape, dtype)


def _finish_lse(lse: Any, output: Any) -> Any:
    return lse.astype(np.float64 if output.dtype == np.float64 else np.float32)


_probe = np.zeros(1)
numpy_address = _header_address if _header_address(_probe) == _interface_address(_probe) else _interface_address
ADAPTERS[np.ndarray] = ArrayAdapter(
    _layouts,
    _layout,
    numpy_address,
    _empty,
    np.empty,
    _finish_lse,
    None,
)
