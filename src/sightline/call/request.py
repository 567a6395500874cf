"""Requests. A request is a call in the form that the call cache looks up.

    describe(...)  →  Request  →  LOOKUP.find_or_run(...)  →  Request with layouts and addresses

The key of a request has everything that the dispatch depends on: the layouts of all arrays, and the structure. Layouts
are shapes, strides and dtypes. The structure is the formulas without their numbers and tables, and the options. The key
never has contents of arrays, so new tables at each call are as fast as the same ones. In these cases a call has no
request, and goes through the full dispatch: all checks, the choice of a kernel, and its planning.

- The call needs statistics that no kernel computes, means of matrices, or statistics with their own problem, such as
  selections. Each of these problems is then a call with a request.
- The scale is an array.
- The type of an array is not exactly NumPy's ndarray, or torch's Tensor or Parameter.
- torch traces or transforms the call, or a mode of torch is active; `arrays.layouts` has the full list.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypeVar

from ..arrays.caching import store_entry
from ..arrays.layouts import BOOLEANS, FRAMEWORKS, without_key_length
from ..formula import from_function, library
from ..formula.expression import Expression
from ..formula.parameters import structure_of
from ..statistics import Statistic
from ..statistics.dispatch import cache_key_of, formulas_of
from .problem import Options

CPU_VARIABLE = "SIGHTLINE_CPU"  # an environment variable: a machine with fewer features than the processor has
MAX_MASK_AXES = 4  # b, h, i and j
Named = TypeVar("Named", bound=tuple[Any, ...])

# `os.environ.get` takes a microsecond, because it encodes the name. On POSIX, this code reads the dict behind it.
_environment: Any = getattr(os.environ, "_data", os.environ)
_cpu_variable: Any = CPU_VARIABLE.encode() if os.supports_bytes_environ else CPU_VARIABLE


class CallStructure(NamedTuple):
    """What the dispatch depends on besides the layouts of arrays. It is hashed and compared as a tuple.

    options : scale, dropout, kernel, threads, `machine_setting`, the classes and parameters of the statistics, and the
        formats of quantised rows
    has_arrays : two booleans: whether the mask is a boolean array, and whether the score is an array of biases
    has_sinks : True if the call has sinks
    formulas : `Structure.key` of mask, score and statistics, () if there are none; the `CallSpec` in programs of JAX
    wanted_tables : for `attention_vjp`, the indices of the score's tables with gradients; None for all other callers
    """

    options: tuple[Any, ...]
    has_arrays: tuple[bool, bool]
    has_sinks: bool
    formulas: Any
    wanted_tables: tuple[int, ...] | None


class Request(NamedTuple):
    """A call in the form in which the cache looks it up and runs it.

    structure : the formulas without their numbers and tables, and the options
    mask, score : the formulas; `mask` may be a boolean array, and `score` an array of biases
    see : the statistics
    tables : the arrays of the tables in the order of `Structure.tables`: those of the mask first, then those of the
        score, then those of the formulas of `see`
    numbers : the numbers of the formulas
    sinks, seed : as in `attention`
    layouts, addresses : those of query, key, value, the tables, and the sinks if there are any; `call_cache.answer`
        reads them
    """

    structure: CallStructure
    mask: Any = None
    score: Any = None
    see: tuple[Statistic, ...] = ()
    tables: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()
    sinks: Any = None
    seed: int | None = None
    layouts: bytes = b""
    addresses: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the call in the cache."""
        return self.layouts, self.structure

    @property
    def key_of_any_length(self) -> tuple[Any, ...]:
        """The key without m, the number of keys, for a cached call that serves every m."""
        return without_key_length(self.layouts), self.structure

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays of the call besides query, key and value: the tables and the sinks."""
        return self.tables if self.sinks is None else (*self.tables, self.sinks)

    def formulas(self) -> tuple[Expression | None, ...]:
        """Return mask, score and the formulas of `see`. Their tables are `tables`, in the same order."""
        mask = library.dense(self.mask) if type(self.mask) in FRAMEWORKS else self.mask
        score = library.bias(self.score) if type(self.score) in FRAMEWORKS else self.score
        return mask, score, *formulas_of(self.see)


# The requests of calls without statistics, sinks, options and tables. A key is (mask, score, `machine_setting`).
_plain_requests: dict[Any, Request] = {}
MAX_PLAIN_REQUESTS = 256
FORMULA = (type(None), Expression)  # the types of a mask or a score that is a formula or not given


def make_tuple(kind: type[Named], *members: Any) -> Named:
    """Return the named tuple `kind(*members)`, in half the time that `kind(*members)` takes."""
    return tuple.__new__(kind, members)


def describe(query: Any, options: Options) -> Request | None:
    """Return the request of a call without its layouts and addresses; None if the call cannot be cached."""
    framework = FRAMEWORKS.get(type(query))
    if framework is None:
        return None
    mask, score, see, scale, sinks, dropout, seed, kernel, threads, _, row_formats, _ = options
    setting = machine_setting()
    statistics: tuple[Statistic, ...] = ()
    has_options = not (
        scale is seed is kernel is threads is row_formats is None and type(dropout) is float and dropout == 0
    )
    key: tuple[Any, ...] = None, 0.0, None, None, setting, None, None  # `CallStructure.options`
    if see is None and not has_options:
        if sinks is None and isinstance(mask, FORMULA) and isinstance(score, FORMULA):
            request = _plain_requests.get((mask, score, setting))
            if request is None:
                request = _describe_formulas(key, mask, score, (), None, None)
                if request is not None and not request.tables:
                    store_entry(_plain_requests, (mask, score, setting), request, MAX_PLAIN_REQUESTS)
            return request
    else:
        described = (None, ()) if see is None else cache_key_of(see)
        draws_seed = framework.draw_seed is not None
        if described is None or (has_options and not _are_valid(scale, dropout, seed, kernel, threads, draws_seed)):
            return None
        statistics_key, statistics = described
        key = scale, dropout, kernel, threads, setting, statistics_key, row_formats
        if mask is None and score is None and sinks is None and not formulas_of(statistics):
            structure = make_tuple(CallStructure, key, (False, False), False, (), None)
            return make_tuple(Request, structure, None, None, statistics, (), (), None, seed, b"", ())
    return _describe_formulas(key, mask, score, statistics, sinks, seed)


def machine_setting() -> Any:
    """Return the value of the environment variable SIGHTLINE_CPU."""
    return _environment.get(_cpu_variable)


def _are_valid(scale: Any, dropout: Any, seed: Any, kernel: Any, threads: Any, draws_seed: bool) -> bool:
    """True if the key of a request may have these options.

    Each option must have exactly its type, because in a key True equals 1. A scale of 0 is not accepted, because in a
    key −0.0 equals 0.0.
    """
    return (
        (scale is None or (type(scale) is float and scale != 0))
        and type(dropout) is float
        and (0 <= dropout < 1 if seed is not None or draws_seed else dropout == 0)
        and (seed is None or (type(seed) is int and 0 <= seed < 2**64))
        and (kernel is None or type(kernel) is str)
        and (threads is None or type(threads) is int)
    )


def _describe_formulas(
    options: tuple[Any, ...], mask: Any, score: Any, see: tuple[Statistic, ...], sinks: Any, seed: int | None
) -> Request | None:
    """Return the request of a call with formulas or sinks; None if the call cannot be cached."""
    has_arrays = type(mask) in FRAMEWORKS, type(score) in FRAMEWORKS
    tables: tuple[Any, ...] = ()
    key: tuple[Any, ...] | None = ()
    numbers: tuple[float, ...] = ()
    if has_arrays[0]:
        if not (0 < mask.ndim <= MAX_MASK_AXES and mask.dtype in BOOLEANS):
            return None  # the full dispatch merges the leading axes, or raises an error
        tables = (mask,)
    elif not (mask is None or isinstance(mask, Expression)):
        if not callable(mask):
            return None
        mask = from_function.to_formula(mask, "mask", "b h i j")
    if has_arrays[1]:
        if not 0 < score.ndim <= MAX_MASK_AXES:
            return None
    elif not (score is None or isinstance(score, Expression)):
        if not callable(score):
            return None
        score = from_function.to_formula(score, "score", "s b h i j")
    statistic_formulas = formulas_of(see) if see else []
    formulas = None if has_arrays[0] else mask, None if has_arrays[1] else score, *statistic_formulas
    if statistic_formulas or formulas[0] is not None or formulas[1] is not None:
        formula_structure = structure_of(*formulas)
        key, numbers = formula_structure.key, formula_structure.numbers
        if key is None:
            return None  # the full dispatch changes the indices of the tables
        if formula_structure.tables:
            tables += tuple([table.array for table in formula_structure.tables])
    if has_arrays[1]:
        place = len(tables)
        if statistic_formulas:
            place = has_arrays[0] + (0 if formulas[0] is None else len(structure_of(formulas[0]).tables))
        tables = (*tables[:place], score, *tables[place:])
    structure = make_tuple(CallStructure, options, has_arrays, sinks is not None, key, None)
    return make_tuple(Request, structure, mask, score, see, tables, numbers, sinks, seed, b"", ())
