"""From a problem to a call of its kernel: what is compiled (`Structure`), what is passed (`pack`), and the answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays import convert, to_numpy
from ..formula.bounds import intervals
from ..formula.expression import Lookup, walk
from ..formula.runs import box_of, find_runs
from ..observe import Lse
from ..plan import Result
from ..problem import Problem
from ..streaming import Streaming
from .arguments import pack
from .forward import KEYS, Forward, Structure
from .machine import Machine
from .processor import Processor
from .threads import count

__all__ = ["run"]

SMALL = 1 << 21  # multiplications below which a second thread costs more than it gives
_compiling = threading.Lock()


def run(problem: Problem, threads: int | None, processor: Processor) -> Result:
    """Forward through the generated kernel; statistics beyond lse through `streaming`, scores and normaliser alike."""
    arrays = [to_numpy(x) for x in (problem.query, problem.key, problem.value)]
    output = np.empty((*problem.lead, problem.H, problem.n, problem.d_v), problem.dtype)
    lse = np.empty((*problem.lead, problem.H, problem.n), np.float64)
    if output.size or lse.size:
        _call(problem, arrays, output, lse, count(threads), processor)
    output, lse = convert(output, problem.query), convert(lse.astype(problem.dtype), problem.query)
    rides = all(isinstance(statistic, Lse) for statistic in problem.see)
    return Result(output, lse, (lse,) * len(problem.see) if rides else Streaming().run(problem).seen)


def _call(problem: Problem, arrays: list[Any], output: Any, lse: Any, threads: int, processor: Processor) -> None:
    tables = [_table_array(t.array) for t in problem.tables]
    structure, kernel = kernel_for(problem, arrays, tables, processor)
    block = block_of(structure.dtype, processor.machine)
    runs = find_runs(problem.mask, problem.extent, block, KEYS)
    query_blocks = -(-problem.n // block)
    counter = np.zeros(1, np.int64)
    batch = [_batch_offsets(x) for x in arrays]
    sinks = np.zeros(1) if problem.sinks is None else to_numpy(problem.sinks).astype(np.float64)
    full = np.ascontiguousarray(runs.full, np.uint8)
    kept = [np.ascontiguousarray(x, np.int64) for x in (runs.start, runs.first, runs.last)]
    fields = {
        "counter": counter.ctypes.data,
        "items": problem.B * problem.H * query_blocks,
        "output": output.ctypes.data,
        "lse": lse.ctypes.data,
        "sinks": sinks.ctypes.data,
        "factor": problem.scale * (math.log2(math.e) if structure.base_2 else 1.0),
        "H": problem.H,
        "group": problem.group,
        "n": problem.n,
        "m": problem.m,
        "query_blocks": query_blocks,
        "run_start": kept[0].ctypes.data,
        "run_first": kept[1].ctypes.data,
        "run_last": kept[2].ctypes.data,
        "run_full": full.ctypes.data,
        "run_batch": runs.heads * runs.query_blocks if runs.batches > 1 else 0,
        "run_head": runs.query_blocks if runs.heads > 1 else 0,
    }
    for name, x, offsets in zip(("query", "key", "value"), arrays, batch, strict=True):
        fields |= {name: x.ctypes.data, f"{name}_batch": offsets.ctypes.data}
        fields |= {
            f"{name}_{axis}": stride for axis, stride in zip(("head", "row", "column"), x.strides[-3:], strict=True)
        }
    words = pack(fields, [(t.ctypes.data, t.strides, t.shape) for t in tables])
    work = problem.B * problem.H * problem.n * problem.m * (problem.d_k + problem.d_v)
    memory = (arrays, tables, output, lse, counter, batch, sinks, full, kept)
    processor.call(kernel, words, 1 if work < SMALL else min(threads, int(fields["items"])), memory)


def kernel_for(problem: Problem, arrays: list[Any], tables: list[Any], processor: Processor) -> tuple[Structure, Any]:
    """The structure of the problem's kernel and what the processor calls, compiled when first met."""
    machine = processor.machine
    size = arrays[0].itemsize
    largest, clamped = _ranges(problem)
    structure = Structure(
        dtype=problem.dtype,
        d_k=problem.d_k,
        d_v=problem.d_v,
        unit=tuple(x.strides[-1] == size for x in arrays),
        mask=None if problem.mask is None else problem.mask.text,
        score=None if problem.score is None else problem.score.text,
        tables=tuple((str(t.dtype), t.ndim) for t in tables),
        slots=tuple(_slots(problem)),
        wide=max([largest, *map(_reach, tables)]) >= 2**31 - 1,
        clamped=clamped,
        sinks=problem.sinks is not None,
    )
    made = machine, structure
    with _compiling:
        if made not in processor.kernels:
            name = "sightline_forward"
            module = Forward(structure, problem.mask, problem.score, machine).write(name)
            processor.kernels[made] = processor.compile(module, name)
    return structure, processor.kernels[made]


def block_of(dtype: str, machine: Machine) -> int:
    """Queries the kernel takes at a time."""
    return machine.width // np.dtype(dtype).itemsize * machine.tile[1]


def _ranges(problem: Problem) -> tuple[float, tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]]:
    """The largest whole number the formulas meet, and the table indices that may leave their table at hidden pairs."""
    largest, clamped = 0.0, []
    for formula in (problem.mask, problem.score):
        loose = set()
        if formula is not None:
            bounds = intervals(formula, box_of(problem.extent))
            for place, node in enumerate(walk(formula)):
                if node.kind == "int":
                    largest = max(largest, *(float(np.max(np.abs(end))) for end in bounds[id(node)]))
                if isinstance(node, Lookup):
                    for axis, index in enumerate(node.arguments):
                        low, high = bounds[id(index)]
                        if np.min(low) < 0 or np.max(high) >= node.table.shape[axis]:
                            loose.add((place, axis))
        clamped.append(frozenset(loose))
    return largest, (clamped[0], clamped[1])


def _slots(problem: Problem) -> Iterator[int]:
    """Which of the problem's tables each table of the mask, then of the score, is: they may share some."""
    place = {id(table): k for k, table in enumerate(problem.tables)}
    for formula in (problem.mask, problem.score):
        yield from () if formula is None else (place[id(table)] for table in formula.tables)


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
    """Bytes between the farthest entries of an array, which a view with gaps may spread far beyond its size."""
    return sum(max(length - 1, 0) * abs(stride) for length, stride in zip(array.shape, array.strides, strict=True))


def _batch_offsets(array: Any) -> Any:
    """Bytes from the first to each batch, leading axes counted in C order, whatever their strides."""
    offsets = np.zeros(array.shape[:-3], np.int64)
    for axis, (length, stride) in enumerate(zip(array.shape[:-3], array.strides[:-3], strict=True)):
        shape = [1] * offsets.ndim
        shape[axis] = length
        offsets += (np.arange(length) * stride).reshape(shape)
    return np.ascontiguousarray(offsets).reshape(-1)
