"""The launches of a call, and the bound launches, which repeat them for other arrays and another seed of dropout.

KernelLaunch, ...  →  RecordedCall  →  LaunchBinder  →  BoundLaunch, ...
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime import JITFunction
from triton.runtime.errors import OutOfResources

from ...call.problem import Problem
from ...formula.tables import Table
from ..configurations import Configuration
from ..kernels.tile_loop import GpuSchedule
from ..kernels.tile_ops import KernelArrays, MetaParameters
from .arguments import dropout_state

# Fields of `KernelArrays` whose arrays a call allocates without filling them. If an array of such a field is an input
# of the call, the call does not allocate it.
WRITTEN_ARRAYS = frozenset(
    {"output", "lse", "nonfinite_flags", "split_output", "split_lse", "seen", "rows", "d_query", "d_key", "d_value"}
)
TUPLES_OF_INPUTS = ("tables", "dropout_state")  # each of these fields holds several inputs
# For kernels whose configured number of stages exceeds shared memory: the number of stages that fits, by
# `KernelLaunch._memory_key`.
REDUCED_STAGES: dict[Hashable, int] = {}


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """One launch of a kernel."""

    kernel: Any  # a function of triton.jit
    programs: int
    arguments: dict[str, Any]  # by the kernel's parameter names
    configuration: Configuration

    def options(self, stages: int) -> dict[str, Any]:
        """Return the compiler options.

        Fused multiply-add is off, because every backend must round the products of a formula before it adds them. So
        the masks of all backends agree exactly.
        """
        return {"num_warps": self.configuration.warps, "num_stages": stages, "enable_fp_fusion": False}

    def kernel_arguments(self) -> dict[str, Any]:
        """Return the arguments in the form that the kernel takes.

        For Triton's compiler, the compile-time constants are wrapped in `tl.constexpr`.
        """
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
            return self.arguments
        metas = {name: x for name, x in self.arguments.items() if isinstance(x, MetaParameters)}
        return self.arguments | {name: _wrap(meta) for name, meta in metas.items()}

    def launch(self) -> Any:
        """Run the kernel on the current stream, with fewer stages if the configured number exceeds shared memory.

        Return the compiled kernel; None if Triton's interpreter ran the kernel.

        Raises
        ------
        triton.OutOfResources
            The kernel does not fit even with one stage.
        """
        arguments, stages = self.kernel_arguments(), self.configuration.stages
        if REDUCED_STAGES:
            stages = REDUCED_STAGES.get(self._memory_key(), stages)
        while True:
            try:
                return self.kernel[(self.programs,)](**arguments, **self.options(stages))
            except OutOfResources:
                if stages == 1:
                    raise
                stages -= 1
                REDUCED_STAGES[self._memory_key()] = stages

    def _memory_key(self) -> Hashable:
        """Return the cache key of `REDUCED_STAGES`: launches with equal keys need the same shared memory."""
        query = self.arguments["arrays"].query.start
        meta, formulas = self.arguments.get("meta"), self.arguments.get("formulas")
        return self.kernel, self.configuration, query.dtype, query.device, meta, formulas


@lru_cache(1024)
def _wrap(meta: MetaParameters) -> MetaParameters:
    """Return `meta` with every field as a `tl.constexpr`.

    Before version 3.9, Triton compiles numbers in a tuple as run-time arguments unless they are `tl.constexpr`.
    """
    return replace(meta, **{entry.name: tl.constexpr(getattr(meta, entry.name)) for entry in fields(meta)})


def run_launches(launches: Iterable[KernelLaunch], query: Any) -> list[tuple[KernelLaunch, Any]]:
    """Run the launches on the device of `query`. Return each with what `KernelLaunch.launch` returned for it."""
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        return [(launch, launch.launch()) for launch in launches]


class RecordedCall(NamedTuple):
    """The launches of a call, and the arrays that they read and write.

    launches : every launch, and what `KernelLaunch.launch` returned for it
    tables : the tables that the kernels read
    results : the arrays of the call's results
    others : the inputs besides those of the problem, by the fields of `KernelArrays`
    """

    problem: Problem
    launches: Sequence[tuple[KernelLaunch, Any]]
    tables: Sequence[Table]
    results: Sequence[Any]
    others: Mapping[str, Any] | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of the call by the fields of `KernelArrays`: a tensor, or a tuple of tensors or integers."""
        problem = self.problem
        found = {"query": problem.query, "key": problem.key, "value": problem.value, **(self.others or {})}
        found["tables"] = tuple([table.array for table in self.tables])
        if problem.sinks is not None:
            found["sinks"] = problem.sinks
        if problem.dropout and (state := dropout_state(problem, problem.seed)):
            found["dropout_state"] = state
        return found

    @property
    def is_compiled(self) -> bool:
        """False if Triton's interpreter runs the kernels."""
        return all(isinstance(launch.kernel, JITFunction) for launch, _ in self.launches)

    @property
    def flat_inputs(self) -> list[Any]:
        """The inputs without tuples: tensors and integers."""
        return [x for given in self.inputs.values() for x in (given if isinstance(given, tuple) else (given,))]


class BoundLaunch(NamedTuple):
    """One launch of a kernel, without the values that change from call to call.

    run : the function that launches the kernel
    pack : a function of (values, constants) that returns the arguments of `run`; `LaunchBinder` explains the values
    constants : the list for `pack` of what is the same in every call
    """

    run: Callable[..., Any]
    pack: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]
    constants: Sequence[Any]


class UnboundArgumentError(Exception):
    """`LaunchBinder` met an array that is no input, that the call did not allocate, and that no schedule holds."""


class LaunchBinder:
    """Makes a `BoundLaunch` of each launch of a recorded call.

    The values of a call are numbered: first `RecordedCall.flat_inputs`, then the arrays that the call allocates. An
    array's value is its address, or in Triton's interpreter the tensor itself.

    Parameters
    ----------
    recorded : the call

    Attributes
    ----------
    makers : functions that allocate the arrays of a call
    schedules : the schedules that the launches read

    Raises
    ------
    UnboundArgumentError
        A launch reads an array that a repeated call does not have.
    """

    def __init__(self, recorded: RecordedCall) -> None:
        self.is_compiled = recorded.is_compiled
        self.numbers: dict[str, int] = {}  # the number of the first value of each input
        self.num_inputs = 0
        for name, given in recorded.inputs.items():
            self.numbers[name] = self.num_inputs
            self.num_inputs += len(given) if isinstance(given, tuple) else 1
        self.written: dict[int, int] = {}  # the index in `makers` of each allocated array, by the array's id
        self.makers: list[Callable[[], Any]] = []
        self.schedules: list[GpuSchedule] = []
        self.constants: list[Any] = []  # of the launch that is being bound

    def bind(self, launch: KernelLaunch, compiled: Any) -> BoundLaunch:
        """Return the bound launch; `compiled` is what `KernelLaunch.launch` returned."""
        self.constants = []
        arguments = launch.kernel_arguments()
        text = ", ".join([self._expression(name, arguments[name]) for name in launch.kernel.arg_names])
        run = compiled[(launch.programs, 1, 1)] if self.is_compiled else launch.kernel[(launch.programs,)]
        return BoundLaunch(run, _compile(f"lambda values, constants: ({text},)"), self.constants)

    def _expression(self, name: str, value: Any) -> str:
        """Return the Python expression of an argument or of a field, which reads the lists `values` and `constants`."""
        if value is None:
            return "None"
        if name in self.numbers:
            number = self.numbers[name]
            if name in TUPLES_OF_INPUTS:
                return self._tuple(value, [self._input(number + k, member) for k, member in enumerate(value)])
            return self._input(number, value)
        if isinstance(value, GpuSchedule):
            self.schedules.append(value)
            if self.is_compiled:
                value = value._replace(rows=value.rows.data_ptr(), ranges=value.ranges.data_ptr())
        elif isinstance(value, torch.Tensor):
            return f"values[{self.num_inputs + self._index_of_written(name, value)}]"
        elif isinstance(value, tuple) and any(isinstance(x, torch.Tensor | tuple) for x in value):
            names = value._fields if isinstance(value, KernelArrays) else [name] * len(value)
            return self._tuple(value, [self._expression(*field) for field in zip(names, value, strict=True)])
        return self._constant(value)

    def _input(self, number: int, value: Any) -> str:
        """Return the expression of an input: an array, an integer, or a tuple that begins with the array."""
        if not isinstance(value, tuple):
            return f"values[{number}]"
        return self._tuple(value, [f"values[{number}]", *map(self._constant, value[1:])])

    def _constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"constants[{len(self.constants) - 1}]"

    def _tuple(self, value: tuple[Any, ...], parts: Sequence[str]) -> str:
        """Return the expression of a tuple with these parts.

        In Triton's interpreter a named tuple keeps its class, because kernels read its fields by name.
        """
        text = f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        return text if self.is_compiled or type(value) is tuple else self._constant(type(value)) + text

    def _index_of_written(self, name: str, array: Any) -> int:
        if name not in WRITTEN_ARRAYS:
            raise UnboundArgumentError(name)
        if id(array) not in self.written:
            self.written[id(array)] = len(self.makers)
            # `empty_like` takes half the time of `torch.empty` with a dtype; the example has the memory of one number
            example = array.new_empty(()).expand(array.shape)
            self.makers.append(lambda: torch.empty_like(example))
        return self.written[id(array)]


@lru_cache(1024)
def _compile(source: str) -> Any:
    return eval(source)
