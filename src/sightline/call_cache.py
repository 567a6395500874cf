"""Calls asked again: what decides a call's road, as a key, and the prepared call kept under it.

    attention(q, k, v, mask=i >= j)  →  key  →  prepared call  →  kernel

A key holds all that the road depends on but the arrays' contents. Calls whose contents matter (tables, sinks, masks
given as arrays), whose formula is a function, or that draw dropout or ask for more than lse have none and go the whole
road. So do arrays of other types than exactly NumPy's, and torch's where torch itself must see the call.
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
from .formula.expression import Apply, Constant, Expression, Symbol
from .kernel import Result
from .statistics import Lse

if TYPE_CHECKING:
    from .cpu.launch.bound_call import BoundCall

__all__ = ["ADAPTERS", "ArrayAdapter", "formula_tokens", "insert", "lookup"]

MAX_CACHED_CALLS = 256  # prepared calls in memory
MAX_FORMULA_TOKENS = 48  # words of a formula spelled at every call
KEY_SHAPE_INDEX, VALUE_SHAPE_INDEX = 3, 6  # places in what `ArrayAdapter.layouts` gives

_lock = threading.Lock()
Finisher = Callable[[Any, Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class ArrayAdapter:
    """How one type of array is taken in.

    Parameters
    ----------
    layouts : (query, key, value) → shape, strides and dtype of each; None for the whole road
    address : array → address of its first entry
    empty : array like the output → function (query) that allocates another
    rows : array like the output → function () that allocates a float64 number for each of its rows
    """

    layouts: Callable[[Any, Any, Any], tuple[Any, ...] | None]
    address: Callable[[Any], int]
    empty: Callable[[Any, Any], Callable[[Any], Any]]
    empty_lse: Callable[[Any], Callable[[], Any]]


ADAPTERS: dict[type, ArrayAdapter] = {}


@dataclass(frozen=True)
class _Entry:
    adapter: ArrayAdapter
    empty: Callable[[Any], Any]
    bound_call: BoundCall

    def run(self, query: Any, key: Any, value: Any, threads: int | None) -> Any:
        """The output; None where the kernel leaves it to the whole road."""
        address, output = self.adapter.address, self.empty(query)
        addresses = address(query), address(key), address(value), address(output)
        return output if self.bound_call.run(threads, *addresses, (query, key, value, output)) else None


@dataclass(frozen=True)
class _EntryWithLse(_Entry):
    """A call of whose answer more is made, with its lse."""

    empty_lse: Callable[[], Any]
    finish: Finisher

    def run(self, query: Any, key: Any, value: Any, threads: int | None) -> Any:
        address, output, lse = self.adapter.address, self.empty(query), self.empty_lse()
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
    """What decides the road of this call of `attention`; None where it may be asked again and mean something else."""
    adapter = ADAPTERS.get(type(query))
    if adapter is None or sinks is not None or seed is not None:
        return None
    if see is not None and (type(see) is not list or len(see) != 1 or type(see[0]) is not Lse):
        return None
    layouts = adapter.layouts(query, key, value)
    if layouts is None:
        return None
    # numbers that are equal and no more: True is 1 and −0.0 is 0.0 in a key
    if type(dropout) is not float or dropout != 0:
        return None
    if scale is not None and (type(scale) is not float or scale == 0):
        return None
    if (kernel is not None and type(kernel) is not str) or (threads is not None and type(threads) is not int):
        return None
    mask_tokens, score_tokens = formula_tokens(mask), formula_tokens(score)
    if mask_tokens is None or score_tokens is None:
        return None
    return layouts, mask_tokens, score_tokens, scale, kernel, threads, os.environ.get(CPU_VARIABLE), see is None


def formula_tokens(formula: Any) -> tuple[str, ...] | str | None:
    """A formula without tables as words in Polish notation, or its text where that is long but known; () for none.

    Equal words, equal formula: operators are followed by as many arguments as they take. None where it must be read
    anew at every call.
    """
    if formula is None:
        return ()
    if not isinstance(formula, Expression):
        return None
    tokens: list[str] = []
    rest = [formula]
    while rest:
        node = rest.pop()
        kind = type(node)
        if kind is Apply:
            tokens.append(node.operator)  # type: ignore[attr-defined]
            rest += node.arguments
        elif kind is Symbol:
            tokens.append(node.name)  # type: ignore[attr-defined]
        elif kind is Constant:
            tokens.append(repr(node.value))  # type: ignore[attr-defined]
        else:
            return None
        if len(tokens) > MAX_FORMULA_TOKENS:
            return _cached_text(formula)
    return tuple(tokens)


def _cached_text(formula: Expression) -> str | None:
    """The text of a formula without tables, where the whole road has asked for both before."""
    found: str | None = formula.__dict__.get("text") if formula.__dict__.get("tables") == () else None
    return found


def lookup(cache_key: tuple[Any, ...]) -> Callable[[Any, Any, Any, int | None], Any] | None:
    """The prepared call with this key, a function of (query, key, value, threads); None where there is none."""
    return _lookup_exact(cache_key) or _lookup_exact(without_key_length(cache_key))


def _lookup_exact(cache_key: tuple[Any, ...]) -> Callable[[Any, Any, Any, int | None], Any] | None:
    entries = bound_calls()
    try:
        entry: _Entry = entries[cache_key]
        entries.move_to_end(cache_key)
    except KeyError:  # never prepared, or dropped by another thread just now
        return None
    return entry.run


def without_key_length(cache_key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key without the number of keys."""
    layouts, *others = cache_key
    shorter = list(layouts)
    for index in (KEY_SHAPE_INDEX, VALUE_SHAPE_INDEX):
        shorter[index] = (*layouts[index][:-2], layouts[index][-1])
    return (tuple(shorter), *others)


def insert(
    cache_key: tuple[Any, ...],
    arrays: tuple[Any, Any, Any],
    output: Any,
    result: Result,
    finish: Finisher | None = None,
) -> None:
    """Keep a call that went the whole road, where its kernel prepared it and read the caller's arrays themselves.

    `finish` makes the answer of query, key, value, output and lse, where it is not the output alone.
    """
    bound_call, adapter = result.bound_call, ADAPTERS[type(output)]
    if bound_call is None or not bound_call.matches_addresses(*map(adapter.address, arrays)):
        return
    entries = bound_calls()
    if bound_call.has_dynamic_key_length:
        cache_key = without_key_length(cache_key)
    common = adapter, adapter.empty(arrays[0], output), bound_call
    with _lock:
        entries[cache_key] = (
            _Entry(*common) if finish is None else _EntryWithLse(*common, adapter.empty_lse(output), finish)
        )
        while len(entries) > MAX_CACHED_CALLS:
            entries.popitem(last=False)


# -- NumPy's door --------------------------------------------------------------------------------------------------


def finish_with_lse(query: Any, key: Any, value: Any, output: Any, lse: Any) -> tuple[Any, tuple[Any]]:
    """The answer of a call that asks for lse and no more, of NumPy's arrays."""
    return output, (lse.astype(np.float64 if output.dtype == np.float64 else np.float32),)


def _layouts(query: Any, key: Any, value: Any) -> tuple[Any, ...] | None:
    if type(key) is not np.ndarray or type(value) is not np.ndarray:
        return None
    return (
        *(query.shape, query.strides, query.dtype),
        *(key.shape, key.strides, key.dtype),
        *(value.shape, value.strides, value.dtype),
    )


_pointer_at = ctypes.c_void_p.from_address
_HEAD = object.__basicsize__


def _header_address(array: Any) -> int:
    """`data` of PyArrayObject, right behind the object's head in NumPy's C API: a quarter of what asking takes."""
    return _pointer_at(id(array) + _HEAD).value or 0


def _interface_address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _empty(query: Any, output: Any) -> Callable[[Any], Any]:
    shape, dtype = output.shape, output.dtype
    return lambda _: np.empty(shape, dtype)


def _empty_lse(output: Any) -> Callable[[], Any]:
    shape = output.shape[:-1]
    return lambda: np.empty(shape)


_probe = np.zeros(1)
ADAPTERS[np.ndarray] = ArrayAdapter(
    _layouts,
    _header_address if _header_address(_probe) == _interface_address(_probe) else _interface_address,
    _empty,
    _empty_lse,
)
