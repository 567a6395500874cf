"""Quantised caches: which dtypes they have, what is checked, how rows are written, and the error of quantisation."""

from __future__ import annotations

import importlib.util
import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operations import FLOATS, device, dtype_name
from ..arrays.row_formats import QUANTIZED, RowFormat
from ..errors import DeviceError, DtypeError, ParameterError

NARROW_FLOATS = ("float32", "bfloat16", "float16")  # the dtypes of queries on a quantised cache


class QuantizationError(NamedTuple):
    """The relative error √(Σ (x − x̂)² / Σ x²) of a quantised cache, which stores x̂ in place of the appended x.

    `key` is the error of all appended keys together, and `value` that of all appended values.
    """

    key: float
    value: float

    @classmethod
    def from_sums(cls, sums: Any) -> QuantizationError:
        """Return the errors. `sums` (2, 2) has Σ (x − x̂)² and Σ x² of keys, then of values."""
        return cls(*[math.sqrt(lost / total) if total else 0.0 for lost, total in sums.tolist()])


def read_cache_dtype(dtype: Any) -> tuple[str, str] | None:
    """Return the dtypes of keys and values of a quantised cache; None for a cache of floats.

    Raise DtypeError if `KVCache(dtype=...)` does not accept the dtype.
    """
    pair = dtype if isinstance(dtype, tuple | list) else (dtype, dtype)
    if len(pair) == 2 and all(one in QUANTIZED for one in pair):
        return pair[0], pair[1]
    if dtype is None or (isinstance(dtype, str) and dtype in FLOATS):
        return None
    raise DtypeError(
        f"KVCache(dtype={dtype!r})",
        f"{', '.join(map(repr, (*FLOATS, *QUANTIZED)))}, or a pair of the last three",
        'for example dtype="bfloat16", or dtype=("int8", "int4") for keys in int8 and values in int4',
    )


def check_can_quantize(dtype: Any, key: Any) -> None:
    """Raise an error if the key is not in the processor's memory, or if llvmlite is missing."""
    if device(key) != "cpu":
        raise DeviceError(
            f"KVCache(dtype={dtype!r}) and a key on {device(key)}",
            "arrays in the processor's memory",
            'KVCache(dtype="bfloat16") on a GPU',
        )
    if importlib.util.find_spec("llvmlite") is None:
        raise ParameterError(f"KVCache(dtype={dtype!r}) without llvmlite", "float dtypes", "pip install llvmlite")


def check_query(query: Any, dtype: Any, is_quantized: bool) -> None:
    """Raise DtypeError if the query is an array of floats that cannot attend to a cache of this dtype."""
    name = dtype_name(query)
    if name not in FLOATS or name == dtype or (is_quantized and name != "float64"):
        return
    cast = "astype(numpy.float32)" if hasattr(query, "astype") else "to(torch.float32)"
    if is_quantized:
        raise DtypeError(
            f"query has dtype {name}, the cache stores {dtype}", "float32, bfloat16 or float16", f"query.{cast}"
        )
    raise DtypeError(
        f"query has dtype {name}, the cache stores {dtype}",
        "one dtype; attention does not convert a cache at every token",
        f"query.{cast.partition('(')[0]}(cache.key.dtype), or make the cache by KVCache(dtype={name!r})",
    )


def write_quantized(storage: Any, array: Any, rows: Any, row_format: RowFormat) -> Any:
    """Set storage[b, :, rows[b, r]] to the codes and scales of array[b, :, r], unless rows[b, r] is −1.

    Return Σ (x − x̂)² and Σ x² of the written numbers as an array.
    """
    from ..cpu.launch.quantize import quantize  # loads llvmlite

    sums = np.zeros(2)
    quantize(array, storage, rows, row_format, sums)
    storage[:0] = 0  # changes no entry, but counts as a write of torch, which does not see that of generated code
    return sums
