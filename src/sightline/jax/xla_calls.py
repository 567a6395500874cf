"""Calls of attention that XLA makes. XLA passes the addresses of all arrays, and a call reads and writes the memory.

A call is described by its text in JSON, which `XlaCall.to_text` writes and `parse_call` reads.
"""

from __future__ import annotations

import ctypes
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.operations import accumulator, dtype_name, resolve_dtype
from ..caching import cached_property
from ..dispatch import call_cache, lookup
from ..dispatch.backward_calls import BackwardInputs, BackwardPasses, ForwardPass
from ..dispatch.call_cache import EntryResult, ForwardEntry
from ..dispatch.call_request import (
    CallStructure,
    Description,
    has_cached_kinds,
    machine_setting,
    make_tuple,
)
from ..dispatch.call_text import CallText, count_arrays, flatten_result, locate_arrays
from ..dispatch.kernel_list import differentiate, make_plan, push_forward
from ..formula.expression import Expression
from ..formula.parameters import structure_of
from ..problem.kernel import Gradients, Result, Tangents, is_lse_too_large
from ..problem.problem import NUM_OPERANDS, Problem, validate
from ..statistics import Statistic
from ..statistics.computation import conditions_of
from .result_indices import FIRST_ARRAY, LSE, OUTPUT

if TYPE_CHECKING:
    from ..cpu.launch.prepared_call import PreparedCall

MAX_CALLS = 1024  # the most calls that `parse_call` keeps; it drops the least recently used one


class ArrayType(NamedTuple):
    """The shape and dtype of an array in C order. If `by_position` is true, axes −3 and −2 are swapped in memory."""

    shape: tuple[int, ...]
    dtype: str
    by_position: bool = False

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The lengths of the axes in the order of memory."""
        if not self.by_position:
            return self.shape
        *lead, heads, positions, width = self.shape
        return *lead, positions, heads, width

    def at(self, address: int) -> Any:
        """Return the NumPy array at an address. XLA owns the memory, so the array must not be kept after the call."""
        memory = _memory_type(self.shape, self.numpy_dtype).from_address(address)
        array = np.ndarray(self.memory_shape, self.numpy_dtype, memory)
        return array.swapaxes(-3, -2) if self.by_position else array

    @property
    def numpy_dtype(self) -> Any:
        return _numpy_dtype(self.dtype)


@cache
def _numpy_dtype(name: str) -> Any:
    return np.dtype(resolve_dtype(np, name))


@lru_cache(4096)
def _memory_type(shape: tuple[int, ...], dtype: Any) -> Any:
    return ctypes.c_char * (math.prod(shape) * dtype.itemsize)


class XlaInputs(NamedTuple):
    """The arrays of a call: query, key, value, the tables, the sinks and the seed."""

    query: Any
    key: Any
    value: Any
    tables: list[Any]
    sinks: Any
    seed: int


@dataclass(frozen=True)
class XlaCall(ABC):
    """A call without its arrays.

    Parameters
    ----------
    text : the formulas, the statistics, scale and dropout
    arguments, results : the types of the arrays that XLA passes
    wide_tables, has_sinks, has_seed, by_position : as in `CallOptions`
    kernel, threads : as in `attention`
    """

    text: CallText
    arguments: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    wide_tables: tuple[str, ...]
    has_sinks: bool
    has_seed: bool
    kernel: str | None
    threads: int | None
    by_position: bool

    def to_text(self) -> str:
        return json.dumps([type(self).__name__, asdict(self)], separators=(",", ":"))

    def run(self, arguments: Sequence[int], results: Sequence[int]) -> None:
        """Run the call on the arrays at these addresses."""
        arrays = [kind.at(address) for kind, address in zip(self.arguments, arguments, strict=True)]
        targets = [kind.at(address) for kind, address in zip(self.results, results, strict=True)]
        for target, array in zip(targets, self.compute(arrays), strict=True):
            np.copyto(target, array, casting="unsafe")  # int64 becomes int32 if JAX has no int64

    @abstractmethod
    def compute(self, arrays: list[Any]) -> Sequence[Any]:
        """Return arrays of the results, in the order of `results`."""

    def split_arguments(self, arrays: list[Any]) -> tuple[XlaInputs, list[Any]]:
        """Return the arguments of the forward pass, and the list of the other arguments."""
        (query, key, value), rest = arrays[:NUM_OPERANDS], arrays[NUM_OPERANDS:]
        given = zip(rest, self.wide_tables, strict=False)
        tables, rest = [x.view(wide)[..., 0] if wide else x for x, wide in given], rest[len(self.wide_tables) :]
        sinks = rest.pop(0) if self.has_sinks else None
        seed = int(rest.pop(0).view(np.uint64)[0]) if self.has_seed else 0
        return XlaInputs(query, key, value, tables, sinks, seed), rest

    def make_problem(self, inputs: XlaInputs, formulas: tuple[Expression | None, Expression | None]) -> Problem:
        operands = inputs.query, inputs.key, inputs.value
        return validate(self.text.problem(operands, inputs.tables, formulas, inputs.sinks, inputs.seed))

    @cached_property
    def example_tables(self) -> list[Any]:
        """Arrays of zeros in place of the call's tables, with the shapes and dtypes of the tables."""
        given = zip(self.arguments[NUM_OPERANDS:], self.wide_tables, strict=False)
        kinds = [ArrayType(kind.shape[:-1], wide) if wide else kind for kind, wide in given]
        return [np.broadcast_to(np.zeros((), resolve_dtype(np, kind.dtype)), kind.shape) for kind in kinds]

    def table_slots(self, problem: Problem) -> dict[int, int]:
        """Return a dict from the index of each argument that is a table of the score to its index in `tables`."""
        places = [NUM_OPERANDS + k for k in self.text.score_tables]
        return dict(zip(places, problem.score_table_indices, strict=True))


class XlaForward(XlaCall):
    """A forward pass with the results output, lse in the accumulator's dtype, lse in float64, and statistics arrays."""

    def compute(self, arrays: list[Any]) -> Sequence[Any]:
        inputs, _ = self.split_arguments(arrays)
        query, key, value, tables, sinks, seed = inputs
        given = (*tables, sinks) if self.has_sinks else tuple(tables)
        setting = machine_setting()
        structure = self.make_structure(setting)
        description = Description(structure, None, None, self.see, tuple(tables), self.numbers, given)
        result, request = call_cache.answer(description, query, key, value, sinks, seed, self.threads)
        if result is None:
            formulas = self.text.formulas(tables)
            problem = self.make_problem(inputs, formulas)
            result = make_plan(problem, self.kernel).kernel.run(problem, self.threads)
            if request is not None and self.can_be_cached:
                read = *formulas, *conditions_of(problem.see)
                call_cache.insert(request, read, (query, key, value), problem, result, kind=_XlaEntry)
        if setting not in self.keys:
            layouts = lookup.read_arrays(query, key, value, *given)
            self.keys[setting] = None if layouts is None else (layouts[0], structure)
        output, lse, *others = flatten_result(self.see, result)
        return [output, lse, lse[..., None].view(np.uint32), *others]

    def make_structure(self, setting: Any) -> CallStructure:
        """Return what the call cache compares besides the layouts of arrays; `setting` is `machine_setting()`.

        Mask and score are formulas in `text`, so both booleans of `CallStructure.has_arrays` are False.
        """
        options = self.kernel, self.threads, setting
        return make_tuple(CallStructure, options, (False, False), self.has_sinks, self.text, None)

    @cached_property
    def keys(self) -> dict[Any, tuple[Any, ...] | None]:
        """For each value of SIGHTLINE_CPU, the key of this call in the call cache; None if a layout is not readable."""
        return {}

    def find_prepared(self) -> PreparedCall | None:
        """Return this call from the call cache; None if it is not stored, or if it has statistics besides lse."""
        found = call_cache.calls.get(self.keys.get(machine_setting()))
        return None if found is None or any(map(count_arrays, self.see)) else found.prepared

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers in mask, score and conditions of statistics, in the order of `structure_of`."""
        return structure_of(*self.text.formulas(self.example_tables), *conditions_of(self.see)).numbers

    @cached_property
    def can_be_cached(self) -> bool:
        """True if the call cache can store calls with all statistics of this call."""
        return has_cached_kinds(self.see)

    @cached_property
    def see(self) -> tuple[Statistic, ...]:
        """The statistics. Their conditions read the zeros of `example_tables`."""
        return self.text.statistics(self.example_tables)


class _XlaEntry(ForwardEntry):
    """A cached call whose result always has lse in float64, also if no statistic asks for lse."""

    keeps_lse = True

    def join(self, request: Any, query: Any, key: Any, value: Any, result: EntryResult) -> Result:
        return Result(result.output, result.lse, self.build_seen(result))


@dataclass(frozen=True)
class XlaBackward(XlaCall):
    """A backward pass, whose arguments are those of the forward pass, output, lse in float64, and gradients of results.

    The last arguments are the gradients of the forward pass's results with the indices `given`. The results are the
    gradients of the forward pass's arguments with the indices `wanted`.
    """

    wanted: tuple[int, ...] = ()
    given: tuple[int, ...] = ()

    def compute(self, arrays: list[Any]) -> Sequence[Any]:
        inputs, (output, lse_words, *gradients) = self.split_arguments(arrays)
        found = dict(zip(self.given, gradients, strict=True))
        if OUTPUT not in found:
            found[OUTPUT] = np.zeros(output.shape, output.dtype)
        lse = lse_words.view(np.float64)[..., 0]
        forward = ForwardPass(inputs[:NUM_OPERANDS], output, lse, inputs.sinks, inputs.seed, self.threads)
        passes = self.passes.get(machine_setting())
        if passes is None:
            passes = self.passes[machine_setting()] = self.make_passes(inputs)
        given = self.read_inputs(inputs, forward, found)
        own = passes.differentiate(given, forward, lambda: self.dispatch(passes.slots, inputs, forward, found))
        return [own[k] for k in self.wanted_places]

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers in mask and score, the only formulas that a repeated backward pass reads."""
        return structure_of(*self.text.formulas(self.example_tables)).numbers

    @cached_property
    def passes(self) -> dict[Any, BackwardPasses]:
        """For each value of SIGHTLINE_CPU, the backward passes of this call that this process repeats."""
        return {}

    @cached_property
    def wanted_places(self) -> list[int]:
        """The index of each wanted gradient among the gradients that `BackwardPasses` returns."""
        learned = [k for k in self.wanted if k >= NUM_OPERANDS]
        return [k if k < NUM_OPERANDS else NUM_OPERANDS + learned.index(k) for k in self.wanted]

    def make_passes(self, inputs: XlaInputs) -> BackwardPasses:
        formulas = self.text.formulas(inputs.tables)
        problem = self.make_problem(inputs, formulas)
        slots, sinks = self.table_slots(problem), NUM_OPERANDS + len(self.wide_tables)
        wanted_tables = [slots[k] for k in self.wanted if NUM_OPERANDS <= k < sinks]
        return BackwardPasses.of(problem, formulas, wanted_tables, sinks in self.wanted)

    def read_inputs(self, inputs: XlaInputs, forward: ForwardPass, found: dict[int, Any]) -> BackwardInputs | None:
        """Return the inputs of a backward pass that can be repeated.

        None is returned if lse is too large, or if a result besides output and lse has a gradient.
        """
        dtype = accumulator(dtype_name(forward.output))
        if is_lse_too_large(forward.lse, dtype) or not found.keys() <= {OUTPUT, LSE}:
            return None
        d_lse = found.get(LSE)
        d_lse = None if d_lse is None else np.ascontiguousarray(d_lse, np.float64)
        structure = () if d_lse is None else ("lse",)
        return BackwardInputs(found[OUTPUT], d_lse, tuple(inputs.tables), self.numbers, structure)

    def dispatch(
        self, slots: Sequence[int], inputs: XlaInputs, forward: ForwardPass, found: dict[int, Any]
    ) -> tuple[Gradients, Sequence[Expression | None]]:
        """Return the gradients, computed with all checks and the choice of a kernel, and (mask, score) of the call."""
        formulas = self.text.formulas(inputs.tables)
        problem = self.make_problem(inputs, formulas)
        d_seen = tuple([found.get(own[0]) if own else None for own in locate_arrays(problem.see, FIRST_ARRAY)])
        plan, saved = make_plan(problem, self.kernel), (forward.output, forward.lse)
        sums = differentiate(problem, plan, found[OUTPUT], found.get(LSE), d_seen, saved, slots, self.threads)
        return sums, formulas


@dataclass(frozen=True)
class XlaTangent(XlaCall):
    """The tangents of output and lse, for calls in which no other result has a derivative.

    The arguments are those of the forward pass, output, lse in float64, and the tangents of the arguments `wanted`.
    """

    wanted: tuple[int, ...] = ()

    def compute(self, arrays: list[Any]) -> Sequence[Any]:
        inputs, (output, lse_words, *directions) = self.split_arguments(arrays)
        problem = self.make_problem(inputs, self.text.formulas(inputs.tables))
        found = dict(zip(self.wanted, directions, strict=True))
        place = {slot: k for k, slot in self.table_slots(problem).items()}
        query, key, value = (found.get(k) for k in range(NUM_OPERANDS))
        tangents = Tangents(
            query,
            key,
            value,
            tables=tuple([found.get(place.get(slot, -1)) for slot in range(len(problem.tables))]),
            sinks=found.get(NUM_OPERANDS + len(self.wide_tables)) if self.has_sinks else None,
        )
        saved = output, lse_words.view(np.float64)[..., 0]
        return push_forward(problem, make_plan(problem, self.kernel), tangents, saved, self.threads)


@lru_cache(MAX_CALLS)
def parse_call(text: bytes) -> XlaCall:
    """Return the call that has this text."""
    kind, values = json.loads(text)
    values["text"] = CallText(*values["text"])
    for name in ("arguments", "results"):
        values[name] = tuple([ArrayType(tuple(shape), *rest) for shape, *rest in values[name]])
    for name in {"wide_tables", "wanted", "given"} & set(values):
        values[name] = tuple(values[name])
    classes: dict[str, type[XlaCall]] = {one.__name__: one for one in (XlaForward, XlaBackward, XlaTangent)}
    return classes[kind](**values)
