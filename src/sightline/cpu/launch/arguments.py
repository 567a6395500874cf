"""From a problem to a call: what is compiled (`structure_of`), and the words every kernel takes (`fields_of`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...arrays import layout, plain, to_numpy
from ...dropout import threshold
from ...formula.expression import SYMBOLS, Expression, Lookup, walk
from ...formula.index_ranges import range_of
from ...formula.tile_ranges import Runs, find_runs
from ...problem import Problem
from ..kernels.block import KEYS, Block, Structure
from ..runtime.machine import Machine
from ..runtime.processor import Processor

__all__ = ["LARGEST_LSE", "Inputs", "block_of", "fitted", "kernel_of", "operand", "structure_of"]

LARGEST_LSE = {"float32": 2.0**23, "float64": 2.0**52}  # beyond it the last place of scores is 1 or more


class Inputs:
    """A problem's arrays as a kernel reads them, its runs, and the words that every kernel takes.

    `others` are formulas of pairs and final scores besides mask and score, whose tables follow the problem's.
    """

    def __init__(self, problem: Problem, query_block: int, others: Sequence[Expression] = ()) -> None:
        self.problem = problem
        self.formulas = (problem.mask, problem.score, *others)
        self.arrays = {name: plain(getattr(problem, name)) for name in ("query", "key", "value")}
        found = {id(table): table for f in self.formulas if f is not None for table in f.tables}
        self.slots = {table: slot for slot, table in enumerate(found)}
        self.tables = [_table_array(table.array) for table in found.values()]
        self.runs = find_runs(problem.mask, problem.extent, query_block, KEYS)
        self.counter = np.zeros(1, np.int64)
        self.kept: list[Any] = [self.arrays, self.tables, self.counter]  # memory the words point to

    def table_words(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return [(t.ctypes.data, t.strides, t.shape) for t in self.tables]

    def steady(self, *changing: Any) -> tuple[Any, ...]:
        """Of the memory the words point to, what is neither the problem's nor the counter nor one of these arrays."""
        others = {id(array) for array in (*self.arrays.values(), self.counter, *changing)}
        return tuple(x for x in self.kept if isinstance(x, np.ndarray) and id(x) not in others)

    def address(self, array: Any) -> int:
        """Where a NumPy array lies; it is kept until the call is over."""
        self.kept.append(array)
        return int(array.ctypes.data)

    def fields(self, structure: Structure) -> dict[str, Any]:
        """The fields of `arguments.COMMON` but for items, query_blocks and lse."""
        problem, runs = self.problem, self.runs
        found = {
            "counter": self.counter.ctypes.data,
            "factor": (abs(problem.scale) or 1.0) * (math.log2(math.e) if structure.base_2 else 1.0),
            "sign": float(np.sign(problem.scale)),
            "H": problem.H,
            "group": problem.group,
            "n": problem.n,
            "m": problem.m,
            "run_batch": runs.heads * runs.query_blocks if runs.batches > 1 else 0,
            "run_head": runs.query_blocks if runs.heads > 1 else 0,
            "seed": problem.seed - (2**64 if problem.seed >= 2**63 else 0),
            "threshold": threshold(problem),
            "keep": 0.0 if problem.dropout == 1 else 1 / (1 - problem.dropout),
        }
        found |= self.run_words(runs)
        for name, array in self.arrays.items():
            found |= operand(name, array, self.kept)
        return found

    def run_words(self, runs: Runs) -> dict[str, int]:
        words = {
            f"run_{name}": self.address(np.ascontiguousarray(getattr(runs, name), np.int64))
            for name in ("start", "first", "last")
        }
        return words | {"run_full": self.address(np.ascontiguousarray(runs.full, np.uint8))}


def operand(name: str, array: Any, kept: list[Any]) -> dict[str, int]:
    """The words of an array (*lead, heads, rows, columns)."""
    address, strides = layout(array)
    offsets = np.zeros(array.shape[:-3], np.int64)  # bytes to each batch, leading axes counted in C order
    for axis, (length, stride) in enumerate(zip(array.shape[:-3], strides[:-3], strict=True)):
        shape = [1] * offsets.ndim
        shape[axis] = length
        offsets += (np.arange(length) * stride).reshape(shape)
    offsets = np.ascontiguousarray(offsets).reshape(-1)
    kept += [array, offsets]
    axes = zip(("head", "row", "column"), strides[-3:], strict=True)
    return {name: address, f"{name}_batch": offsets.ctypes.data} | {f"{name}_{axis}": stride for axis, stride in axes}


def structure_of(kernel: str, problem: Problem, inputs: Inputs, **more: Any) -> Structure:
    """What of a problem is compiled into a kernel."""
    ranges = [range_of(f, problem.extent) for f in inputs.formulas]
    clamped = tuple(outside for _, outside in ranges)
    mask, score, *others = (None if f is None else f.text for f in inputs.formulas)
    return Structure(
        kernel=kernel,
        dtype=problem.dtype,
        d_k=problem.d_k,
        d_v=problem.d_v,
        unit=tuple(_unit(array) for array in inputs.arrays.values()),
        mask=mask,
        score=score,
        others=tuple(text for text in others if text is not None),
        tables=tuple((str(t.dtype), t.ndim) for t in inputs.tables),
        slots=tuple(inputs.slots[id(table)] for f in inputs.formulas if f is not None for table in f.tables),
        wide=max([largest for largest, _ in ranges] + [_reach(table) for table in inputs.tables]) >= 2**31 - 1,
        clamped=clamped,
        sinks=problem.sinks is not None,
        dropout=problem.dropout > 0,
        by_tile=tuple(_by_tile(inputs, clamped)),
        **more,
    )


def kernel_of(structure: Structure, inputs: Inputs, writer: type[Block], processor: Processor) -> Any:
    """The kernel as the processor calls it."""
    name = f"sightline_{structure.kernel}"

    def write() -> Any:
        return writer(structure, inputs.formulas, processor.machine).write(name)

    return processor.kernel(repr(structure), name, write)


def block_of(dtype: str, machine: Machine) -> int:
    """Queries a kernel takes at a time."""
    return _lanes(dtype, machine) * machine.tile[1]


def fitted(machine: Machine, problem: Problem) -> Machine:
    """The machine with a register tile no wider than the problem's queries need."""
    return machine.fitted(-(-problem.n // _lanes(problem.dtype, machine)))


def _lanes(dtype: str, machine: Machine) -> int:
    """Queries in a vector of the accumulator's type."""
    return machine.width // (8 if dtype == "float64" else 4)


def _unit(array: Any) -> bool:
    """Whether the columns of an array lie next to each other."""
    return bool(layout(array)[1][-1] == array.itemsize)


def _by_tile(inputs: Inputs, clamped: tuple[Any, ...]) -> Iterator[tuple[int, ...]]:
    """Of each formula, the lookups t[..., i, j] whose entries lie side by side along j: see `TileTables`."""

    def fits(node: Lookup) -> bool:
        array, indices = inputs.tables[inputs.slots[id(node.table)]], node.arguments
        return (
            len(indices) > 1
            and indices[-2] is SYMBOLS["i"]
            and indices[-1] is SYMBOLS["j"]
            and all(other.reads.isdisjoint({"i", "j", "s"}) for other in indices[:-2])
            and array.dtype.kind in "bf"
            and array.strides[-1] == array.itemsize
        )

    for formula, loose in zip(inputs.formulas, clamped, strict=True):
        nodes = [] if formula is None else walk(formula)
        lookups = [(place, node) for place, node in enumerate(nodes) if isinstance(node, Lookup)]
        outside = {place for place, _ in loose}
        yield tuple(place for place, node in lookups if place not in outside and fits(node))


def _table_array(array: Any) -> Any:
    """A table as the kernel reads it: bool, int32, int64, float32 or float64, shared where it is one of these."""
    array = to_numpy(array)
    if array.size == 0:  # read at hidden pairs alone, where any number will do
        array = np.zeros([max(length, 1) for length in array.shape], array.dtype)
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "b":
        return array
    if kind in "iu":
        return array if kind == "i" and size in (4, 8) else array.astype(np.int32 if size < 4 else np.int64)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _reach(array: Any) -> int:
    """Bytes between the farthest entries of an array, which a view with gaps may spread far, or of its gradient."""
    spread = sum(max(length - 1, 0) * abs(stride) for length, stride in zip(array.shape, array.strides, strict=True))
    return max(int(spread), 8 * int(array.size))
