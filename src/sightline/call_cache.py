"""A cache of attention calls: a call whose structure was met before goes straight to its kernel.

    attention(q, k, v, mask=j < table(lengths)[b])  →  Request  →  CachedCall  →  kernel

The key of a request is the structure of the call. The structure has everything that the dispatch depends on: shapes,
strides and dtypes of all arrays, formulas without their numbers and tables, and options. The key never has contents of
arrays, so new tables at each call are as fast as the same ones. A call has no request, and goes through the full
dispatch, if one of the following holds. It needs statistics that the forward kernel does not compute. Its scale is an
array. The type of an array is not exactly NumPy's ndarray or torch's Tensor. torch itself must see the call.

Calls that differ only in lengths and strides form a family. A call of a family that was met before is bound for its
lengths without the full dispatch: each step of a decoding loop has another number of keys.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .arrays import dtype_name
from .cpu.runtime.compile import bound_calls, call_families
from .cpu.runtime.machine import CPU_VARIABLE
from .formula import from_function, library
from .formula.expression import Expression
from .formula.parameters import structure_of
from .kernel import Result
from .problem import Problem
from .statistics import Entropy, Lse, MaxScore, Statistic

if TYPE_CHECKING:
    from .cpu.launch.bound_call import BoundCall

__all__ = [
    "ADAPTERS",
    "ArrayAdapter",
    "CachedCall",
    "KernelInputs",
    "Request",
    "addresses_of",
    "bind_family",
    "insert",
    "lookup",
    "make_request",
]

MAX_SMALL_LENGTH = 64  # up to this number of queries, the number may change the kernel's code
MIN_MANY_KEYS = 512  # from this number of keys on, the decoding kernel may serve few queries
MAX_CACHED_CALLS = 256  # the least recently used call is dropped beyond this number
KEY_SHAPE_INDEX, VALUE_SHAPE_INDEX = 3, 6  # indices in the result of `ArrayAdapter.layouts`
FORWARD_STATISTICS = (Lse, MaxScore, Entropy)  # the statistics of cached calls; others need further passes
MAX_MASK_AXES = 4  # b, h, i and j
SINKS_INDEX, SEED_INDEX = 5, 6  # indices in `cpu.codegen.abi.FORWARD_CALL_FIELDS`
DIRECT_TABLE_DTYPES = ("bool", "int32", "int64", "float32", "float64")  # other tables are converted at each call


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
# `os.environ.get` takes a microsecond, because it encodes the name. On POSIX the dict that it reads is read directly.
_environment: Any = getattr(os.environ, "_data", os.environ)
_cpu_variable: Any = CPU_VARIABLE.encode() if b"PATH" in _environment else CPU_VARIABLE


class Request(NamedTuple):
    """A call in the form in which the cache looks it up and runs it.

    key : the structure of the call
    mask, score : the formulas; `mask` may be a boolean array, and `score` an array of biases
    tables : the arrays of the tables, those of the mask first, in the order of `Structure.tables`
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
    adapter = ADAPTERS.get(type(query))
    layouts = None if adapter is None else adapter.layouts(query, key, value)
    if adapter is None or layouts is None:
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
    kinds = None if see is None else _statistic_kinds(see)
    if kinds is False:
        return None
    key = (*layouts, scale, dropout, kernel, threads, _environment.get(_cpu_variable), kinds)
    if mask is None and score is None and sinks is None:
        return Request(key, None, None, (), (), None, seed)
    return _request_with_formulas(key, mask, score, sinks, seed)


def _statistic_kinds(see: Any) -> tuple[type, ...] | bool:
    """Return the classes of the statistics; False if a statistic is not computed in the forward kernel."""
    if type(see) is not list:
        return False
    kinds = tuple([type(statistic) for statistic in see])
    return kinds if all(kind in FORWARD_STATISTICS for kind in kinds) else False


def _request_with_formulas(key: tuple[Any, ...], mask: Any, score: Any, sinks: Any, seed: int | None) -> Request | None:
    """Return the request of a call with a mask, a score or sinks; `key` is the key of the call without them."""
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
    found = []
    for array in arrays if sinks is None else (*arrays, sinks):
        own = ADAPTERS.get(type(array))
        layout = None if own is None else own.layout(array)
        if layout is None:
            return None
        found.append(layout)
    if has_arrays[0] and not (0 < len(found[0][0]) <= MAX_MASK_AXES and found[0][2] in BOOLEANS):
        return None  # the full dispatch merges the leading axes, or raises an error
    if has_arrays[1] and not 0 < score.ndim <= MAX_MASK_AXES:
        return None
    return Request((*key, has_arrays, sinks is None, *found, formulas), mask, score, arrays, numbers, sinks, seed)


def _is_function(x: Any) -> bool:
    return callable(x) and not isinstance(x, Expression)


def lookup(request: Request) -> CachedCall | None:
    """Return the cached call of a request; None if none is cached.

    A call cached without its number of keys is found too; see `_without_key_length`.
    """
    entries = bound_calls()
    return _lookup(entries, request.key) or _lookup(entries, _without_key_length(request.key))


def _lookup(entries: OrderedDict[Any, Any], key: tuple[Any, ...]) -> CachedCall | None:
    try:
        call: CachedCall = entries[key]
        entries.move_to_end(key)
    except KeyError:  # the call was never inserted, or another thread has just dropped it
        return None
    return call


def bind_family(request: Request, query: Any, key: Any, value: Any) -> CachedCall | None:
    """Return a cached call for a request whose family was met before, with other lengths; None if there is none."""
    family_key = _family_key(request.key)
    member = None if family_key is None else _lookup(call_families(), family_key)
    family = None if member is None else member.bound_call.family
    if member is None or family is None:
        return None
    inputs = member.inputs
    tables = [] if inputs is None else [request.tables[table] for table in inputs.tables]
    bound_call = family.bind(query, key, value, tables)
    if bound_call is None:
        return None
    shape = (*query.shape[:-1], value.shape[-1])
    attach = None if member.attach is None else copy(member.attach)
    empty = member.adapter.empty(query, shape)
    call = replace(member, bound_call=bound_call, shape=shape[:-1], empty=empty, attach=attach)
    _store(bound_calls(), _cache_key(request, bound_call), call)
    return call


def _cache_key(request: Request, bound_call: BoundCall) -> tuple[Any, ...]:
    """Return the key under which a call is stored: without its number of keys if the call serves every number."""
    return _without_key_length(request.key) if bound_call.has_dynamic_key_length else request.key


def _family_key(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the key of the call's family: the key without lengths and strides; None if the call has no family.

    Arrays with other numbers of axes than four, and arrays that broadcast, have no family. What the choice of a kernel
    depends on is part of the key: the number of queries if it is small, and whether there are many keys.
    """
    arrays = [key[at : at + 3] for at in range(0, 9, 3)]
    (query, *_), (keys, *_), (values, *_) = arrays
    if not (len(query) == len(keys) == len(values) == 4 and query[0] == keys[0] == values[0]):
        return None
    sizes = query[1], keys[1], values[1], query[3], keys[3], values[3], query[0]
    choice = min(query[2], MAX_SMALL_LENGTH), keys[2] >= MIN_MANY_KEYS
    parts = [_without_lengths(part) if _is_layout(part) else part for part in (*arrays, *key[9:])]
    return sizes, choice, *parts


def _is_layout(part: Any) -> bool:
    """True if a part of a key is the layout of an array: shape, strides and dtype."""
    return isinstance(part, tuple) and len(part) == 3 and isinstance(part[0], tuple) and isinstance(part[1], tuple)


def _without_lengths(layout: tuple[Any, ...]) -> tuple[Any, ...]:
    shape, strides, dtype = layout
    unit = dtype.itemsize if isinstance(dtype, np.dtype) else 1  # torch counts strides in entries
    return tuple([length == 1 for length in shape]), strides[-1:] == (unit,), dtype


def _without_key_length(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key without m, the length of the key sequence, for a call that serves every m."""
    shortened = list(key)
    for index in (KEY_SHAPE_INDEX, VALUE_SHAPE_INDEX):
        shortened[index] = (*key[index][:-2], key[index][-1])
    return tuple(shortened)


class CallResult(NamedTuple):
    """The arrays that a cached call computed.

    arrays : the outputs of the forward kernel's statistics, in its order
    is_lse_imprecise : False if `kernel.is_lse_precise` is true of lse
    seed : the seed of dropout
    """

    output: Any
    lse: Any
    arrays: Sequence[Any]
    is_lse_imprecise: bool
    seed: int


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Return the addresses of arrays whose types are in `ADAPTERS`."""
    return [ADAPTERS[type(array)].address(array) for array in arrays]


@dataclass(frozen=True)
class KernelInputs:
    """Which tables and numbers of a request are those of a bound call.

    tables : for each table of the kernel, its index in `Request.tables`
    converters : for each table of the kernel, a function that returns the copy that the kernel reads; None if the
        kernel reads the array itself
    numbers : for each number of the kernel, its index in `Request.numbers`
    is_identity : True if the tables and numbers are all those of the request, in the same order
    """

    tables: tuple[int, ...]
    converters: tuple[Callable[[Any], Any] | None, ...]
    numbers: tuple[int, ...]
    is_identity: bool

    @classmethod
    def bind(
        cls, bound_call: BoundCall, request: Request, formulas: tuple[Expression | None, Expression | None]
    ) -> KernelInputs | None:
        """Return the inputs of a call that was made for a request; None if it has other tables or numbers.

        `formulas` are those of the call, from `Request.formulas`.
        """
        origins = [id(table) for table in structure_of(*formulas).tables]
        numbers = [(type(number), number) for number in request.numbers]  # equal numbers are one number of a structure
        needed = [(type(number), number) for number in bound_call.numbers]
        if not set(bound_call.table_origins) <= set(origins) or set(needed) != set(numbers):
            return None
        tables = tuple([origins.index(origin) for origin in bound_call.table_origins])
        number_indices = tuple([numbers.index(number) for number in needed])
        is_direct = [dtype_name(request.tables[table]) in DIRECT_TABLE_DTYPES for table in tables]
        same_order = tables == tuple(range(len(request.tables))) and number_indices == tuple(range(len(numbers)))
        converters = tuple([None if direct else bound_call.convert_table for direct in is_direct])
        return cls(tables, converters, number_indices, same_order and all(is_direct))

    def of(self, request: Request) -> tuple[Sequence[Any], tuple[float, ...]]:
        """Return the arrays that the kernel reads as its tables, and the numbers of the kernel."""
        tables, numbers = request.tables, request.numbers
        if self.is_identity:
            return tables, numbers
        arrays = [
            tables[table] if convert is None else convert(tables[table])
            for table, convert in zip(self.tables, self.converters, strict=True)
        ]
        return arrays, tuple([numbers[number] for number in self.numbers])


@dataclass(frozen=True)
class CachedCall:
    """A call that only lacks its inputs.

    Parameters
    ----------
    adapter : the adapter of query, key, value and output
    empty : function (query) that allocates the output
    inputs : the tables and numbers of the kernel; None if it has none
    see : the statistics
    shape : the shape of lse, and of every statistic of a query, in the layout of the caller's arrays
    has_dropout : True if the call needs a seed
    attach : function that joins the results to a graph of gradients; None for arrays without gradients
        It takes the request, query, key, value and a `CallResult`, and returns the result with joined arrays.
    """

    adapter: ArrayAdapter
    empty: Callable[[Any], Any]
    bound_call: BoundCall
    inputs: KernelInputs | None
    see: tuple[Statistic, ...]
    shape: tuple[int, ...]
    has_dropout: bool
    attach: Attacher | None

    def run(self, request: Request, query: Any, key: Any, value: Any, threads: int | None) -> Any:
        """Return (output, seen) of the call; None if the call needs the full dispatch."""
        adapter, bound, see, attach = self.adapter, self.bound_call, self.see, self.attach
        address, output, seed, sinks = adapter.address, self.empty(query), request.seed, None
        if see or attach is not None:
            lse = adapter.empty_array(self.shape, "float64")
            lse_address = address(lse)
        else:
            lse = np.empty(self.shape)
            lse_address = _address(lse)
        words = [address(query), address(key), address(value), address(output), lse_address, 0, 0]
        numbers: tuple[float, ...] = ()
        arrays: Sequence[Any] = ()
        keep_alive = query, key, value, output, lse
        if self.has_dropout:
            seed = adapter.draw_seed() if seed is None and adapter.draw_seed is not None else seed or 0
            words[SEED_INDEX] = seed - (2**64 if seed >= 2**63 else 0)
        if request.sinks is not None:
            sinks = bound.convert_sinks(request.sinks)
            words[SINKS_INDEX] = _address(sinks)
        if self.inputs is not None:
            tables, numbers = self.inputs.of(request)
            words += addresses_of(tables)
            if numbers:
                words += bound.number_words(numbers)
            keep_alive += (tables, sinks)  # type: ignore[assignment]
        if see:
            arrays = self._empty_statistics()
            words += addresses_of(arrays)
        status = bound.run(threads, words, numbers, key.shape[-2], keep_alive)
        if status is None or (status and see):
            return None
        if not see and attach is None:
            return output, ()
        result = CallResult(output, lse, arrays, bool(status), seed or 0)
        if attach is not None:
            result = attach(request, query, key, value, result)
        return result.output, self._build_seen(result)

    def _empty_statistics(self) -> list[Any]:
        """Return new arrays for the statistics that the forward kernel computes, in the order of its outputs."""
        kinds = {type(statistic) for statistic in self.see}
        accumulator = self.bound_call.accumulator
        dtypes = [accumulator, "int64"] * (MaxScore in kinds) + [accumulator] * (Entropy in kinds)
        return [self.adapter.empty_array(self.shape, dtype) for dtype in dtypes]

    def _build_seen(self, result: CallResult) -> tuple[Any, ...]:
        """Return the result of each statistic."""
        arrays, by_kind = result.arrays, dict[type, Sequence[Any]]()
        for statistic in self.see:
            kind = type(statistic)
            if kind is Lse:
                by_kind[kind] = [self.adapter.finish_lse(result.lse, result.output)]
            elif kind not in by_kind:
                by_kind[kind] = arrays[:2] if kind is MaxScore else arrays[-1:]
        return tuple([statistic.build_result(by_kind[type(statistic)]) for statistic in self.see])


Attacher = Callable[[Request, Any, Any, Any, CallResult], CallResult]


def insert(
    request: Request,
    formulas: tuple[Expression | None, Expression | None],
    arrays: tuple[Any, Any, Any],
    problem: Problem,
    result: Result,
    attach: Attacher | None = None,
) -> None:
    """Store a call that went through the full dispatch.

    The call is stored only if its kernel returned a bound call, and if that bound call read the caller's own arrays:
    query, key and value at the same addresses, and no tables but those of the request.

    Parameters
    ----------
    formulas : the formulas of the call, from `Request.formulas`
    arrays : the caller's query, key and value
    problem, result : the problem that was made from the formulas, and its result
    attach : see `CachedCall`
    """
    bound_call, adapter = result.bound_call, ADAPTERS[type(arrays[0])]
    if bound_call is None or bound_call.first_operands != tuple(map(adapter.address, arrays)):
        return
    inputs = KernelInputs.bind(bound_call, request, formulas)
    if inputs is None:
        return
    output = problem.squeeze_heads(result.output, 2)
    entry = CachedCall(
        adapter,
        adapter.empty(arrays[0], tuple(output.shape)),
        bound_call,
        inputs if inputs.tables or inputs.numbers else None,
        problem.see,
        tuple(output.shape[:-1]),
        problem.dropout > 0,
        attach,
    )
    _store(bound_calls(), _cache_key(request, bound_call), entry)
    family_key = None if bound_call.family is None else _family_key(request.key)
    if family_key is not None:
        _store(call_families(), family_key, entry)


def _store(entries: OrderedDict[Any, Any], key: tuple[Any, ...], call: CachedCall) -> None:
    """Store a call, and drop the least recently used calls beyond `MAX_CACHED_CALLS`."""
    entries[key] = call  # each operation on the dict is atomic, so that no thread waits for a lock
    while len(entries) > MAX_CACHED_CALLS:
        try:
            entries.popitem(last=False)
        except KeyError:  # other threads have removed the last entries
            break


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
_address = _header_address if _header_address(_probe) == _interface_address(_probe) else _interface_address
ADAPTERS[np.ndarray] = ArrayAdapter(
    _layouts,
    _layout,
    _address,
    _empty,
    np.empty,
    _finish_lse,
    None,
)
