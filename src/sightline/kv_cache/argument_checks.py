"""Checks and conversions of the arguments of `KVCache` and of calls on it, such as the arrays of `append`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.operations import FLOATS, JAX, check_float_dtype, device, dtype_name, framework, place, to_numpy
from ..arrays.row_formats import QUANTIZED
from ..arrays.unreadable import check_kind, check_memory, is_array
from ..errors import DeviceError, DtypeError, ParameterError, ShapeError

if TYPE_CHECKING:
    from .storage import Storage

NARROW_FLOATS = ("float32", "bfloat16", "float16")  # the dtypes of queries on a quantised cache
ACCEPTED_SHAPES = "key (B, G, t, d_k) and value (B, G, t, d_v), or (B, t, d) or (t, d) without heads"


def check_append(key: Any, value: Any, storage: Storage | None, ndim: int, casts_inputs: bool) -> None:
    """Raise an error if key and value do not fit each other, or do not fit the earlier appends.

    key, value : the arrays to append
    storage : the storage of the cache; None before the first append
    ndim : the number of axes of the arrays of earlier appends
    casts_inputs : True if the cache casts every append to its own dtype
    """
    for name, array in (("key", key), ("value", value)):
        _check_array(name, array)
    if key.ndim not in (2, 3, 4) or tuple(key.shape[:-1]) != tuple(value.shape[:-1]):
        given = f"key {tuple(key.shape)} and value {tuple(value.shape)}"
        raise ShapeError(given, ACCEPTED_SHAPES, "give one value for each key")
    if dtype_name(key) != dtype_name(value):
        given = f"key of {dtype_name(key)}, value of {dtype_name(value)}"
        raise DtypeError(given, "one dtype", "cast the key or the value")
    like = key if storage is None else storage.key
    for name, array in (("key", key), ("value", value)):
        if place(array) != place(like):
            cure = f"convert or move the {name} first, or make another KVCache"
            raise DeviceError(f"{name} is {place(array)}", f"{place(like)}, as in the first append", cure)
    if not casts_inputs and dtype_name(key) != dtype_name(like):
        given = f"key and value of {dtype_name(key)}, the cache stores {dtype_name(like)}"
        cure = f"cast key and value, or make the cache by KVCache(dtype={dtype_name(like)!r}), which casts every append"
        raise DtypeError(given, "the dtype of the first append", cure)
    for name, array, width in zip(("key", "value"), (key, value), storage.widths if storage else (), strict=False):
        found, wanted = unsqueeze_to_4d(array).shape, (*like.shape[:3], width)
        if array.ndim != ndim or (*found[:2], found[3]) != (*wanted[:2], wanted[3]):
            shape = [str(length) for length in wanted]
            shape[2] = "t"
            del shape[1 : 1 + (ndim < 4)], shape[: ndim == 2]
            cure = "append arrays of this shape, make two sequences of one by cache.fork(2), or make another cache"
            raise ShapeError(f"{name} {tuple(array.shape)}", f"({', '.join(shape)}), as in the first append", cure)


def _check_array(name: str, array: Any) -> None:
    """Raise an error unless the array is a plain float array of NumPy or torch that requires no gradient."""
    if is_array(array):
        check_kind(name, array)
    if not is_array(array) or not framework(array).has_memory:
        cure = f"{name}=numpy.asarray({name})"
        if framework(array) is JAX:
            cure += "; programs of JAX keep key and value in arrays of fixed length, and pass mask=j < length"
        raise DtypeError(f"{name} is a {type(array).__name__}", "plain arrays of NumPy or torch", cure)
    check_float_dtype(name, array)
    if getattr(array, "requires_grad", False):
        given = f"{name} requires a gradient, which a cache does not store"
        cure = f"append under torch.no_grad(), or {name}.detach(); to train, pass key and value themselves to attention"
        raise ParameterError(given, "tensors that require no gradient", cure)


def unsqueeze_to_4d(array: Any) -> Any:
    """Return the array as (B, G, t, d), with axes of length 1 for missing heads and batch."""
    return array if array.ndim == 4 else array[..., None, :, :][(None,) * (array.ndim == 2)]


def to_integers(values: Any) -> Any:
    """Return whole numbers as a new int64 array; None if the values are something else.

    An empty list counts as whole numbers, although NumPy reads it as floats. A number beyond int64 becomes the largest
    int64. Callers need int64: NumPy adds uint64 and int64 as floats, and torch reads indices of uint8 as a mask.
    """
    try:
        array = to_numpy(values)
    except ValueError:  # nested lists of different lengths
        return None
    if array.size and array.dtype.kind not in "iu":
        return None
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def check_lengths(lengths: Any, B: int, t: int) -> Any:
    """Return the lengths as an array (B,). Raise ShapeError unless they are B whole numbers from 0 to t."""
    counts = to_integers(lengths)
    if counts is None or counts.shape != (B,) or (counts < 0).any() or (counts > t).any():
        allowed = f"({B},) whole numbers from 0 to {t}"
        raise ShapeError(f"lengths {lengths!r}", allowed, "give the number of real positions of each sequence")
    return counts


def read_counts(method: str, counts: Any, B: int, cure: str) -> Any:
    """Return the argument of a method as int64. Raise ShapeError unless it is one whole number ≥ 0, or B of them."""
    numbers = to_integers(counts)
    if numbers is None or numbers.shape not in ((), (B,)) or (numbers < 0).any():
        raise ShapeError(f"{method}({counts!r})", f"a whole number ≥ 0, or one for each of {B} sequences", cure)
    return numbers


def read_owners(counts: Any, B: int) -> Any:
    """Return, for each sequence after `fork(counts)`, the index of the one of the B sequences that it continues."""
    return np.repeat(np.arange(B), read_counts("fork", counts, B, "fork(4)"))


def read_cache_dtype(dtype: Any) -> tuple[str, str] | None:
    """Return the dtypes of keys and values of a quantised cache; None for a cache of floats.

    Raise DtypeError if `KVCache(dtype=...)` does not accept the dtype.
    """
    pair = dtype if isinstance(dtype, tuple | list) else (dtype, dtype)
    if len(pair) == 2 and all(one in QUANTIZED for one in pair):
        return pair[0], pair[1]
    if dtype is None or (isinstance(dtype, str) and dtype in FLOATS):
        return None
    given = f"KVCache(dtype={dtype!r})"
    cure = 'for example dtype="bfloat16", or dtype=("int8", "int4") for keys in int8 and values in int4'
    raise DtypeError(given, f"{', '.join(map(repr, (*FLOATS, *QUANTIZED)))}, or a pair of the last three", cure)


def check_can_quantize(dtype: Any, key: Any, value: Any) -> None:
    """Raise an error if key and value are not in the processor's memory, or if llvmlite is missing."""
    if device(key) != "cpu":
        given = f"KVCache(dtype={dtype!r}) and a key on {device(key)}"
        raise DeviceError(given, "arrays in the processor's memory", 'KVCache(dtype="bfloat16") on a GPU')
    if importlib.util.find_spec("llvmlite") is None:
        raise ParameterError(f"KVCache(dtype={dtype!r}) without llvmlite", "float dtypes", "pip install llvmlite")
    check_memory("key", key)
    check_memory("value", value)


def check_query(query: Any, dtype: Any, is_quantized: bool) -> None:
    """Raise DtypeError if the query is an array of floats that cannot attend to a cache of this dtype."""
    name = dtype_name(query)
    if name not in FLOATS or name == dtype or (is_quantized and name != "float64"):
        return
    cast = "astype(numpy.float32)" if hasattr(query, "astype") else "to(torch.float32)"
    if is_quantized:
        given = f"query has dtype {name}, the cache stores {dtype}"
        raise DtypeError(given, "float32, bfloat16 or float16", f"query.{cast}")
    given = f"query has dtype {name}, the cache stores {dtype}"
    cure = f"query.{cast.partition('(')[0]}(cache.key.dtype), or make the cache by KVCache(dtype={name!r})"
    raise DtypeError(given, "one dtype; attention does not convert a cache at every token", cure)
