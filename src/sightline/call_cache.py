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

from .cpu.runtime.compile import calls
from .cpu.runtime.machine import VARIABLE
from .formula.expression import Apply, Constant, Expression, Symbol
from .kernel import Result
from .statistics import Lse

if TYPE_CHECKING:
    from .cpu.launch.bound_call import Prepared

__all__ = ["DOORS", "Door", "known", "remember", "spelled"]

MOST = 256  # prepared calls in memory
LONGEST = 48  # words of a formula spelled at every call
KEY_SHAPE, VALUE_SHAPE = 3, 6  # places in what `Door.layouts` gives

_guard = threading.Lock()
Finish = Callable[[Any, Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Door:
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
    rows: Callable[[Any], Callable[[], Any]]


DOORS: dict[type, Door] = {}


@dataclass(frozen=True)
class _Entry:
    door: Door
    empty: Callable[[Any], Any]
    prepared: Prepared

    def answer(self, query: Any, key: Any, value: Any, threads: int | None) -> Any:
        """The output; None where the kernel leaves it to the whole road."""
        address, output = self.door.address, self.empty(query)
        places = address(query), address(key), address(value), address(output)
        return output if self.prepared.run(threads, *places, (query, key, value, output)) else None


@dataclass(frozen=True)
class _Finished(_Entry):
    """A call of whose answer more is made, with its lse."""

    rows: Callable[[], Any]
    finish: Finish

    def answer(self, query: Any, key: Any, value: Any, threads: int | None) -> Any:
        address, output, lse = self.door.address, self.empty(query), self.rows()
        places = address(query), address(key), address(value), address(output)
        held = query, key, value, output, lse
        return self.finish(*held) if self.prepared.run(threads, *places, held, address(lse)) else None


def key_of(
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
    door = DOORS.get(type(query))
    if door is None or sinks is not None or seed is not None:
        return None
    if see is not None and (type(see) is not list or len(see) != 1 or type(see[0]) is not Lse):
        return None
    layouts = door.layouts(query, key, value)
    if layouts is None:
        return None
    # numbers that are equal and no more: True is 1 and −0.0 is 0.0 in a key
    if type(dropout) is not float or dropout != 0:
        return None
    if scale is not None and (type(scale) is not float or scale == 0):
        return None
    if (kernel is not None and type(kernel) is not str) or (threads is not None and type(threads) is not int):
        return None
    mask_words, score_words = spelled(mask), spelled(score)
    if mask_words is None or score_words is None:
        return None
    return layouts, mask_words, score_words, scale, kernel, threads, os.environ.get(VARIABLE), see is None


def spelled(formula: Any) -> tuple[str, ...] | str | None:
    """A formula without tables as words in Polish notation, or its text where that is long but known; () for none.

    Equal words, equal formula: operators are followed by as many arguments as they take. None where it must be read
    anew at every call.
    """
    if formula is None:
        return ()
    if not isinstance(formula, Expression):
        return None
    words: list[str] = []
    rest = [formula]
    while rest:
        node = rest.pop()
        kind = type(node)
        if kind is Apply:
            words.append(node.operator)  # type: ignore[attr-defined]
            rest += node.arguments
        elif kind is Symbol:
            words.append(node.name)  # type: ignore[attr-defined]
        elif kind is Constant:
            words.append(repr(node.value))  # type: ignore[attr-defined]
        else:
            return None
        if len(words) > LONGEST:
            return _text(formula)
    return tuple(words)


def _text(formula: Expression) -> str | None:
    """The text of a formula without tables, where the whole road has asked for both before."""
    found: str | None = formula.__dict__.get("text") if formula.__dict__.get("tables") == () else None
    return found


def known(asked: tuple[Any, ...]) -> Callable[[Any, Any, Any, int | None], Any] | None:
    """The prepared call with this key, a function of (query, key, value, threads); None where there is none."""
    return _found(asked) or _found(of_any_length(asked))


def _found(asked: tuple[Any, ...]) -> Callable[[Any, Any, Any, int | None], Any] | None:
    entries = calls()
    try:
        entry: _Entry = entries[asked]
        entries.move_to_end(asked)
    except KeyError:  # never prepared, or dropped by another thread just now
        return None
    return entry.answer


def of_any_length(asked: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key without the number of keys."""
    layouts, *others = asked
    shorter = list(layouts)
    for place in (KEY_SHAPE, VALUE_SHAPE):
        shorter[place] = (*layouts[place][:-2], layouts[place][-1])
    return (tuple(shorter), *others)


def remember(
    asked: tuple[Any, ...], arrays: tuple[Any, Any, Any], output: Any, result: Result, finish: Finish | None = None
) -> None:
    """Keep a call that went the whole road, where its kernel prepared it and read the caller's arrays themselves.

    `finish` makes the answer of query, key, value, output and lse, where it is not the output alone.
    """
    prepared, door = result.prepared, DOORS[type(output)]
    if prepared is None or not prepared.fits(*map(door.address, arrays)):
        return
    entries = calls()
    if prepared.any_length:
        asked = of_any_length(asked)
    common = door, door.empty(arrays[0], output), prepared
    with _guard:
        entries[asked] = _Entry(*common) if finish is None else _Finished(*common, door.rows(output), finish)
        while len(entries) > MOST:
            entries.popitem(last=False)


# -- NumPy's door --------------------------------------------------------------------------------------------------


def with_lse(query: Any, key: Any, value: Any, output: Any, lse: Any) -> tuple[Any, tuple[Any]]:
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


def _address(array: Any) -> int:
    """`data` of PyArrayObject, right behind the object's head in NumPy's C API: a quarter of what asking takes."""
    return _pointer_at(id(array) + _HEAD).value or 0


def _asked_address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _empty(query: Any, output: Any) -> Callable[[Any], Any]:
    shape, dtype = output.shape, output.dtype
    return lambda _: np.empty(shape, dtype)


def _rows(output: Any) -> Callable[[], Any]:
    shape = output.shape[:-1]
    return lambda: np.empty(shape)


_probe = np.zeros(1)
DOORS[np.ndarray] = Door(
    _layouts, _address if _address(_probe) == _asked_address(_probe) else _asked_address, _empty, _rows
)
