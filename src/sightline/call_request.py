"""Requests. A request is a call in the form that the call cache looks up.

The key of a request is the structure of the call. The structure has everything that the dispatch depends on: shapes,
strides and dtypes of all arrays, formulas without their numbers and tables, and options. The key never has contents of
arrays, so new tables at each call are as fast as the same ones. A call has no request, and goes through the full
dispatch, if one of the following holds. It needs statistics that no kernel computes, or means of statistics. Its scale
is an array. The type of an array is not exactly NumPy's ndarray or torch's Tensor. torch itself must see the call.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from . import array_layouts
from .array_adapters import ADAPTERS, BOOLEANS
from .cpu.kernels.kernel_spec import min_decode_keys
from .cpu.runtime.machine import CPU_VARIABLE
from .formula import from_function, library
from .formula.expression import Expression, is_compiling
from .formula.parameters import structure_of
from .statistics import Entropy, Lse, MaxScore, Pooled, Received, TopK, Weights

__all__ = ["Request", "family_key", "make_request", "without_key_length"]

# the statistics of cached calls: the forward kernel computes some, and a weights pass each of the others
FORWARD_STATISTICS, WEIGHTS_STATISTICS = (Lse, MaxScore, Entropy), (Received, Pooled, TopK, Weights)
MAX_SMALL_LENGTH = 64  # up to this number of queries, the number may change the kernel's code
MAX_MASK_AXES = 4  # b, h, i and j

# `os.environ.get` takes a microsecond, because it encodes the name. On POSIX the dict that it reads is read directly.
_environment: Any = getattr(os.environ, "_data", os.environ)
_cpu_variable: Any = CPU_VARIABLE.encode() if b"PATH" in _environment else CPU_VARIABLE


class Request(NamedTuple):
    """A call in the form in which the cache looks it up and runs it.

    key : the structure of the call
    mask, score : the formulas; `mask` may be a boolean array, and `score` an array of biases
    tables : the arrays of the tables, those of the mask first, in the order of `Structure.tables`
    addresses : the result of `array_layouts.read_arrays` for query, key, value, the tables and the sinks
    numbers : the numbers of the formulas
    sinks, seed : as in `attention`
    """

    key: tuple[Any, ...]
    mask: Any
    score: Any
    tables: tuple[Any, ...]
    numbers: tuple[float, ...]
    sinks: Any
    seed: int | None
    addresses: tuple[Any, ...]

    def formulas(self) -> tuple[Expression | None, Expression | None]:
        """Return mask and score as formulas. Their tables are those of `tables`, in the same order."""
        mask = library.dense(self.mask) if type(self.mask) in ADAPTERS else self.mask
        score = library.bias(self.score) if type(self.score) in ADAPTERS else self.score
        return mask, score


def make_request(
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
) -> Request | None:
    """Return the request of a call with these arguments; None if the call cannot be cached (see the module)."""
    # This check comes before `ADAPTERS` is read: the first trace adds torch's adapter, and torch.compile fails if a
    # second trace of the call takes another path.
    if is_compiling():
        return None
    adapter = ADAPTERS.get(type(query))
    if adapter is None:
        return None
    # Only exact types and no zeros are accepted, because in a key True equals 1 and −0.0 equals 0.0.
    if (scale is not None and (type(scale) is not float or scale == 0)) or type(dropout) is not float:
        return None
    if (kernel is not None and type(kernel) is not str) or (threads is not None and type(threads) is not int):
        return None
    if not (dropout == 0 if seed is None and adapter.draw_seed is None else 0 <= dropout < 1):
        return None
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**64):
        return None
    statistics = None if see is None else _statistics_key(see)
    if statistics is False:
        return None
    options = scale, dropout, kernel, threads, _environment.get(_cpu_variable), statistics
    if mask is None and score is None and sinks is None:
        found = array_layouts.read_arrays(query, key, value)
        return None if found is None else Request((found[0], options), None, None, (), (), None, seed, found)
    return _request_with_formulas((query, key, value), options, mask, score, sinks, seed)


def _statistics_key(see: Any) -> tuple[Any, ...] | bool:
    """Return the classes and parameters of the statistics; False if a statistic is not one of cached calls."""
    if type(see) is not list:
        return False
    key = []
    for statistic in see:
        kind = type(statistic)
        key.append(kind)
        if kind in WEIGHTS_STATISTICS:
            parameters = [getattr(statistic, name) for name in kind.__match_args__]
            key += [*map(type, parameters), *parameters]
        elif kind not in FORWARD_STATISTICS:
            return False
    try:
        hash(tuple(key))
    except TypeError:  # a list as a parameter; the full dispatch raises an error
        return False
    return tuple(key)


def _request_with_formulas(
    operands: tuple[Any, Any, Any], options: tuple[Any, ...], mask: Any, score: Any, sinks: Any, seed: int | None
) -> Request | None:
    """Return the request of a call with a mask, a score or sinks; `operands` are query, key and value."""
    has_arrays = type(mask) in ADAPTERS, type(score) in ADAPTERS
    given = [None if is_array else x for x, is_array in zip((mask, score), has_arrays, strict=True)]
    arrays: tuple[Any, ...] = (mask,) if has_arrays[0] else ()
    formulas: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()
    if given[0] is not None or given[1] is not None:
        if _is_function(given[0]):
            given[0] = from_function.to_formula(given[0], "mask", "b h i j")
        if _is_function(given[1]):
            given[1] = from_function.to_formula(given[1], "score", "s b h i j")
        if not all(x is None or isinstance(x, Expression) for x in given):
            return None
        mask, score = mask if has_arrays[0] else given[0], score if has_arrays[1] else given[1]
        structure = structure_of(*given)
        if any(table.batch_axes is not None for table in structure.tables):
            return None  # the full dispatch changes the indices of these tables
        formulas, numbers = (*structure.formulas, *[table.axes for table in structure.tables]), structure.numbers
        arrays += tuple([table.array for table in structure.tables])
    if has_arrays[1]:
        arrays += (score,)
    if has_arrays[0] and not (0 < mask.ndim <= MAX_MASK_AXES and mask.dtype in BOOLEANS):
        return None  # the full dispatch merges the leading axes, or raises an error
    if has_arrays[1] and not 0 < score.ndim <= MAX_MASK_AXES:
        return None
    found = array_layouts.read_arrays(*operands, *arrays, *(() if sinks is None else (sinks,)))
    if found is None:
        return None
    key = found[0], options, has_arrays, sinks is None, formulas
    return Request(key, mask, score, arrays, numbers, sinks, seed, found)


def _is_function(x: Any) -> bool:
    return callable(x) and not isinstance(x, Expression)


def family_key(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the key of the call's family: the key without lengths and strides; None if the call has no family.

    A call has a family only if its three arrays have four axes and equal batch axes. The choice of a kernel depends on
    the number of queries if that number is small, and on whether there are many keys. Both facts are part of the key.
    """
    layouts, *others = key
    arrays = array_layouts.parse(layouts)
    query, keys, values = [array.shape for array in arrays[:3]]
    if not (len(query) == len(keys) == len(values) == 4 and query[0] == keys[0] == values[0]):
        return None
    sizes = query[1], keys[1], values[1], query[3], keys[3], values[3], query[0]
    choice = min(query[2], MAX_SMALL_LENGTH), keys[2] >= min_decode_keys(query[2])
    return sizes, choice, *map(_without_lengths, arrays), *others


def _without_lengths(layout: array_layouts.Layout) -> tuple[Any, ...]:
    has_unit_stride = layout.strides[-1:] == (layout.itemsize,)
    return layout.kind, tuple([length == 1 for length in layout.shape]), has_unit_stride


def without_key_length(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key without m, the length of the key sequence, for a call that serves every m."""
    return array_layouts.without_key_length(key[0]), *key[1:]
