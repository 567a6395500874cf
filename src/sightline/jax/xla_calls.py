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
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..api.kernels import differentiate, make_plan, push_forward
from ..arrays.caching import cached_property
from ..arrays.operations import accumulator, dtype_name
from ..call import call_cache
from ..call.backward_calls import BackwardInputs, BackwardPasses
from ..call.call_cache import EntryResult
from ..call.gradient_parts import is_lse_too_large
from ..call.kernel import GivenGradients, Gradients, Result
from ..call.problem import NUM_OPERANDS, Problem, validate
from ..call.request import CallStructure, Request, machine_setting
from ..call.spec import Arrays, CallSpec, flatten_result, unflatten_gradients
from ..formula.expression import Expression
from ..formula.parameters import structure_of
from ..statistics import Statistic
from ..statistics.dispatch import cache_key_of, formulas_of
from .options import FIRST_ARRAY, PrimitiveOptions

if TYPE_CHECKING:
    from ..cpu.launch.bound_call import PreparedCall

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
        array = np.ndarray(self.memory_shape, self.dtype, _memory_type(self.shape, self.dtype).from_address(address))
        return array.swapaxes(-3, -2) if self.by_position else array


@lru_cache(4096)
def _memory_type(shape: tuple[int, ...], dtype: str) -> Any:
    return ctypes.c_char * (math.prod(shape) * np.dtype(dtype).itemsize)


@dataclass(frozen=True)
class XlaCall(ABC):
    """A call without its arrays.

    Parameters
    ----------
    options : the parameters of the primitive
    arguments, results : the types of the arrays that XLA passes
    """

    options: PrimitiveOptions
    arguments: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]

    @property
    def spec(self) -> CallSpec:
        return self.options.spec

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

    def split_arguments(self, arrays: list[Any]) -> tuple[Arrays, list[Any]]:
        """Return the arguments of the forward pass, with the seed as a number, and the list of the other arguments."""
        count = self.spec.num_arrays
        inputs = self.spec.unflatten(arrays[:count])
        pairs = zip(inputs.tables, self.options.wide_tables, strict=True)
        tables = [x.view(wide)[..., 0] if wide else x for x, wide in pairs]
        seed = 0 if inputs.seed is None else int(inputs.seed.view(np.uint64)[0])
        return inputs._replace(tables=tables, seed=seed), arrays[count:]

    def make_problem(self, inputs: Arrays, formulas: tuple[Expression | None, Expression | None]) -> Problem:
        return validate(self.spec.problem(inputs, formulas, inputs.seed))

    @cached_property
    def example_tables(self) -> Sequence[Any]:
        """Arrays of zeros in place of the call's tables, with the shapes and dtypes of the tables."""
        return self.options.examples(self.arguments).tables

    @cached_property
    def see(self) -> tuple[Statistic, ...]:
        """The statistics. Their formulas read the zeros of `example_tables`."""
        return self.spec.statistics(self.example_tables)


class XlaForward(XlaCall):
    """A forward pass with the results output, lse in the accumulator's dtype, lse in float64, and statistics arrays."""

    def compute(self, arrays: list[Any]) -> Sequence[Any]:
        inputs, _ = self.split_arguments(arrays)
        query, key, value, tables, sinks, seed = inputs
        operands, spec, setting = (query, key, value), self.spec, machine_setting()
        structure = CallStructure((setting,), (False, False), spec.has_sinks, spec, None)
        given = Request(structure, None, None, self.see, tuple(tables), self.numbers, sinks, seed)
        answer, request = call_cache.answer(given, operands)
        if answer is not None:
            self.prepared[setting], result = answer
        else:
            formulas = spec.formulas(tables)
            problem = self.make_problem(inputs, formulas)
            result = make_plan(problem).kernel.run(problem)
            if request is not None and cache_key_of(list(self.see)) is not None:
                read = *formulas, *formulas_of(problem.see)
                call_cache.FirstCall(request, read, operands, problem, result, _build_result).store()
        output, lse, *others = flatten_result(self.see, result)
        return [output, lse, lse[..., None].view(np.uint32), *others]

    @cached_property
    def prepared(self) -> dict[Any, PreparedCall]:
        """For each value of SIGHTLINE_CPU, the call of the kernel that was repeated last."""
        return {}

    def find_prepared(self) -> PreparedCall | None:
        """Return the bound call of the kernel. None before its first repetition, and for statistics other than lse."""
        has_arrays = any(statistic.num_arrays for statistic in self.see)
        return None if has_arrays else self.prepared.get(machine_setting())

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers in mask, score and formulas of statistics, in the order of `structure_of`."""
        return structure_of(*self.spec.formulas(self.example_tables), *formulas_of(self.see)).numbers


def _build_result(entry: Any, request: Any, operands: Any, result: EntryResult) -> tuple[PreparedCall, Result]:
    """Return the call of the kernel, and the result with lse in float64: the hook of a cached call."""
    return entry.prepared, Result(result.output, result.lse, entry.build_seen((*result[:2], *result.arrays)))


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
        passes = self.passes.get(machine_setting())
        if passes is None:
            passes = self.passes[machine_setting()] = self.make_passes(inputs)
        saved, gradient_of = (output, lse_words.view(np.float64)[..., 0]), dict(zip(self.given, gradients, strict=True))
        given = unflatten_gradients(self.see, gradient_of, saved, passes.slots, first=FIRST_ARRAY)
        d_inputs = passes.differentiate(self.read_inputs(inputs, given), lambda: self.dispatch(inputs, given))
        return [d_inputs[k] for k in self.wanted_places]

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers in mask and score, the only formulas that a repeated backward pass reads."""
        return structure_of(*self.spec.formulas(self.example_tables)).numbers

    @cached_property
    def passes(self) -> dict[Any, BackwardPasses]:
        """For each value of SIGHTLINE_CPU, the backward passes of this call that this process repeats."""
        return {}

    @cached_property
    def wanted_places(self) -> list[int]:
        """The index of each wanted gradient among the gradients that `BackwardPasses` returns."""
        learned = [k for k in self.wanted if k >= NUM_OPERANDS]
        return [k if k < NUM_OPERANDS else NUM_OPERANDS + learned.index(k) for k in self.wanted]

    def make_passes(self, inputs: Arrays) -> BackwardPasses:
        formulas = self.spec.formulas(inputs.tables)
        problem = self.make_problem(inputs, formulas)
        slots, places = self.spec.table_slots(problem), self.spec.table_places
        wanted_tables = [slots[k - NUM_OPERANDS] for k in self.wanted if k in places]
        return BackwardPasses.of(problem, formulas, wanted_tables, places.stop in self.wanted)

    def read_inputs(self, inputs: Arrays, given: GivenGradients) -> BackwardInputs | None:
        """Return the inputs of a backward pass that can be repeated.

        None is returned if lse is too large, or if a result besides output and lse has a gradient.
        """
        output, lse = given.saved
        has_statistics = any(gradient is not None for gradient in given.d_seen)
        if has_statistics or is_lse_too_large(lse, accumulator(dtype_name(output))):
            return None
        d_lse = None if given.d_lse is None else np.ascontiguousarray(given.d_lse, np.float64)
        structure = () if d_lse is None else ("lse",)
        arrays = inputs[:NUM_OPERANDS], output, lse, given.d_output, d_lse, tuple(inputs.tables)
        return BackwardInputs(*arrays, self.numbers, structure, inputs.sinks, inputs.seed)

    def dispatch(self, inputs: Arrays, given: GivenGradients) -> tuple[Gradients, Sequence[Expression | None]]:
        """Return the gradients, computed with all checks and the choice of a kernel, and (mask, score) of the call."""
        formulas = self.spec.formulas(inputs.tables)
        problem = self.make_problem(inputs, formulas)
        return differentiate(problem, make_plan(problem), given), formulas


@dataclass(frozen=True)
class XlaTangent(XlaCall):
    """The tangents of output and lse, for calls in which no other result has a derivative.

    The arguments are those of the forward pass, output, lse in float64, and the tangents of the arguments `wanted`.
    """

    wanted: tuple[int, ...] = ()

    def compute(self, arrays: list[Any]) -> Sequence[Any]:
        inputs, (output, lse_words, *directions) = self.split_arguments(arrays)
        problem = self.make_problem(inputs, self.spec.formulas(inputs.tables))
        tangents = self.spec.tangents(problem, self.wanted, directions)
        saved = output, lse_words.view(np.float64)[..., 0]
        return push_forward(problem, make_plan(problem), tangents, saved)


@lru_cache(MAX_CALLS)
def parse_call(text: bytes) -> XlaCall:
    """Return the call that has this text."""
    name, values = json.loads(text)
    spec, wide_tables, by_position = values.pop("options").values()
    options = PrimitiveOptions(CallSpec(*spec), tuple(wide_tables), by_position)
    types = [
        tuple([ArrayType(tuple(shape), *rest) for shape, *rest in values.pop(role)])
        for role in ("arguments", "results")
    ]
    kinds: tuple[type[XlaCall], ...] = XlaForward, XlaBackward, XlaTangent
    (kind,) = [kind for kind in kinds if kind.__name__ == name]
    return kind(options, *types, **{field: tuple(indices) for field, indices in values.items()})
