"""A cache of attention calls: a repeated call finds the bound call of its kernel by a cache key.

    attention(q, k, v, mask=i >= j)  →  cache key  →  bound call  →  kernel

A cache key holds everything that the dispatch of a call depends on, except the arrays' contents. A call has no cache
key, and goes through the full dispatch, if one of the following holds. The call depends on contents of arrays (tables,
sinks, masks given as arrays). The mask or score is a function. The call has dropout, or requests a statistic other than
lse. The type of an array is not exactly NumPy's ndarray or torch's Tensor. torch itself must see the call.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .cpu.runtime.compile import bound_calls
from .cpu.runtime.machine import CPU_VARIABLE
from .formula.expression import Expression
from .kernel import Result
from .statistics import Lse

if TYPE_CHECKING:
    from .cpu.launch.bound_call import BoundCall

__all__ = ["ADAPTERS", "ArrayAdapter", "insert", "lookup", "make_key"]

MAX_CACHED_CALLS = 256  # the least recently used bound call is dropped beyond this number
KEY_SHAPE_INDEX, VALUE_SHAPE_INDEX = 3, 6  # indices in the result of `ArrayAdapter.layouts`

_lock = threading.Lock()
Finisher = Callable[[Any, Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class ArrayAdapter:
    """The functions by which the cache reads and allocates arrays of one type.

    Parameters
    ----------
    layouts : (query, key, value) → shape, strides and dtype of each array; None if the call needs the full dispatch
    address : array → address of the array's first entry
    empty : (query, output) → function (query) that allocates an array like the output
    empty_float64 : shape → float64 array of that shape
    """

    layouts: Callable[[Any, Any, Any], tuple[Any, ...] | None]
    address: Callable[[Any], int]
    empty: Callable[[Any, Any], Callable[[Any], Any]]
    empty_float64: Callable[[Any], Any]


ADAPTERS: dict[type, ArrayAdapter] = {}


@dataclass(frozen=True)
class _Entry:
    adapter: ArrayAdapter
    empty: Callable[[Any], Any]
    bound_call: BoundCall

    def run(self, query: Any, key: Any, value: Any, threads: int | None) -> Any:
        """Return the output of the bound call; None if the bound call declines and the full dispatch must run."""
        address, output = self.adapter.address, self.empty(query)
        addresses = address(query), address(key), address(value), address(output)
        return output if self.bound_call.run(threads, *addresses, (query, key, value, output)) else None


@dataclass(frozen=True)
class _EntryWithLse(_Entry):
    """A cached call that also computes lse. `finish` makes the call's result from query, key, value, output and lse."""

    lse_shape: tuple[int, ...]
    finish: Finisher

    def run(self, query: Any, key: Any, value: Any, threads: int | None) -> Any:
        address, output, lse = self.adapter.address, self.empty(query), self.adapter.empty_float64(self.lse_shape)
        addresses = address(query), address(key), address(value), address(output)
        arguments = query, key, value, output, lse
        return self.finish(*arguments) if self.bound_call.run(threads, *addresses, arguments, address(lse)) else None


def make_key(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    score: Any,
    scale: Any,
    sinks: Any,
    dropout: Any,
    seed: Any,
    see: Any,
    kernel: Any,
    threads: Any,
) -> tuple[Any, ...] | None:
    """Return the cache key of a call with these arguments; None if the call cannot be cached (see the module)."""
    adapter = ADAPTERS.get(type(query))
    if adapter is None or sinks is not None or seed is not None:
        return None
    if see is not None and (type(see) is not list or len(see) != 1 or type(see[0]) is not Lse):
        return None
    layouts = adapter.layouts(query, key, value)
    if layouts is None:
        return None
    # Only exact types and no zeros are accepted, because in a key True equals 1 and −0.0 equals 0.0.
    if type(dropout) is not float or dropout != 0:
        return None
    if scale is not None and (type(scale) is not float or scale == 0):
        return None
    if (kernel is not None and type(kernel) is not str) or (threads is not None and type(threads) is not int):
        return None
    for formula in (mask, score):  # equal formulas are one object, so a formula is a key
        if formula is not None and not (isinstance(formula, Expression) and not formula.tables):
            return None
    return layouts, mask, score, scale, kernel, threads, os.environ.get(CPU_VARIABLE), see is None


def lookup(cache_key: tuple[Any, ...]) -> Callable[[Any, Any, Any, int | None], Any] | None:
    """Return the cached call with this key, as a function of (query, key, value, threads); None if none is cached.

    A call cached without its number of keys is found too; see `without_key_length`.
    """
    return _lookup_exact(cache_key) or _lookup_exact(without_key_length(cache_key))


def _lookup_exact(cache_key: tuple[Any, ...]) -> Callable[[Any, Any, Any, int | None], Any] | None:
    entries = bound_calls()
    try:
        entry: _Entry = entries[cache_key]
        entries.move_to_end(cache_key)
    except KeyError:  # the call was never inserted, or another thread has just dropped it
        return None
    return entry.run


def without_key_length(cache_key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the cache key without m, the length of the key sequence, for a bound call that serves every m."""
    layouts, *others = cache_key
    shortened = list(layouts)
    for index in (KEY_SHAPE_INDEX, VALUE_SHAPE_INDEX):
        shortened[index] = (*layouts[index][:-2], layouts[index][-1])
    return (tuple(shortened), *others)


def insert(
    cache_key: tuple[Any, ...],
    arrays: tuple[Any, Any, Any],
    output: Any,
    result: Result,
    finish: Finisher | None = None,
) -> None:
    """Store a call that went through the full dispatch.

    The call is stored only if its kernel returned a bound call, and if that bound call read the caller's own arrays,
    not copies. `finish` makes the call's result from query, key, value, output and lse. Without `finish`, the result is
    the output alone.
    """
    bound_call, adapter = result.bound_call, ADAPTERS[type(output)]
    if bound_call is None or not bound_call.matches_addresses(*map(adapter.address, arrays)):
        return
    entries = bound_calls()
    if bound_call.has_dynamic_key_length:
        cache_key = without_key_length(cache_key)
    common = adapter, adapter.empty(arrays[0], output), bound_call
    with _lock:
        entries[cache_key] = _Entry(*common) if finish is None else _EntryWithLse(*common, output.shape[:-1], finish)
        while len(entries) > MAX_CACHED_CALLS:
            entries.popitem(last=False)


# -- the adapter of NumPy arrays -----------------------------------------------------------------------------------


def finish_with_lse(query: Any, key: Any, value: Any, output: Any, lse: Any) -> tuple[Any, tuple[Any]]:
    """Return the result of a call with see=[lse()]: (output, (lse,)), with lse in the accumulator's dtype."""
    return output, (lse.astype(np.float64 if output.dtype == np.float64 else np.float32),)


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


def _empty(query: Any, output: Any) -> Callable[[Any], Any]:
    shape, dtype = output.shape, output.dtype
    return lambda _: np.empty(shape, dtype)


_probe = np.zeros(1)
ADAPTERS[np.ndarray] = ArrayAdapter(
    _layouts,
    _header_address if _header_address(_probe) == _interface_address(_probe) else _interface_address,
    _empty,
    np.empty,
)
