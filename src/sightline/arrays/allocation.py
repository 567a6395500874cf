"""How the call cache allocates arrays: one adapter for each type of array.

`torch/dispatch.py` adds the adapter of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .layouts import numpy_address


@dataclass(frozen=True)
class ArrayAdapter:
    """The functions by which the cache allocates arrays of one type.

    Parameters
    ----------
    address : array → address of the array's first entry
    make_empty : (shape, dtype or its name) → function () that allocates an array
    finish_lse : (lse float64, output) → lse as users receive it
    draw_seed : () → a seed of dropout; None if the caller must give one
    """

    address: Callable[[Any], int]
    make_empty: Callable[[tuple[int, ...], Any], Callable[[], Any]]
    finish_lse: Callable[[Any, Any], Any]
    draw_seed: Callable[[], int] | None


ADAPTERS: dict[type, ArrayAdapter] = {}
BOOLEANS: set[Any] = {np.dtype(bool)}  # the dtypes of boolean arrays


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Return the addresses of arrays whose types are in `ADAPTERS`."""
    return [ADAPTERS[type(array)].address(array) for array in arrays]


# -- the adapter of NumPy arrays -----------------------------------------------------------------------------------


def _finish_lse(lse: Any, output: Any) -> Any:
    return lse.astype(np.float64 if output.dtype == np.float64 else np.float32)


def _make_empty(shape: tuple[int, ...], dtype: Any) -> Callable[[], Any]:
    return partial(np.empty, shape, dtype)


ADAPTERS[np.ndarray] = ArrayAdapter(numpy_address, _make_empty, _finish_lse, None)
