"""From a problem to a call: what is compiled (`make_spec`), and the words every kernel takes (`fields_of`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...arrays import detach, layout, to_numpy
from ...dropout import threshold
from ...formula.expression import SYMBOLS, Expression, Lookup, walk
from ...formula.index_ranges import find_index_ranges
from ...formula.tile_ranges import TileRanges, find_tile_ranges
from ...problem import Problem
from ..kernels.block import KEY_BLOCK, Block, KernelSpec
from ..runtime.machine import Machine
from ..runtime.processor import Processor

__all__ = [
    "MAX_LSE",
    "KernelArguments",
    "compile_kernel",
    "fit_machine",
    "make_spec",
    "operand_fields",
    "query_block_size",
]

MAX_LSE = {"float32": 2.0**23, "float64": 2.0**52}  # beyond it the last place of scores is 1 or more


class KernelArguments:
    """A problem's arrays as a kernel reads them, its runs, and the words that every kernel takes.

    `extra_formulas` are formulas of pairs and final scores besides mask and score, whose tables follow the problem's.
    """

    def __init__(self, problem: Problem, query_block: int, extra_formulas: Sequence[Expression] = ()) -> None:
        self.problem = problem
        self.formulas = (problem.mask, problem.score, *extra_formulas)
        self.arrays = {name: detach(getattr(problem, name)) for name in ("query", "key", "value")}
        unique_tables = {id(table): table for f in self.formulas if f is not None for table in f.tables}
        self.slots = {table: slot for slot, table in enumerate(unique_tables)}
        self.tables = [_convert_table(table.array) for table in unique_tables.values()]
        self.runs = find_tile_ranges(problem.mask, problem.extent, query_block, KEY_BLOCK)
        self.counter = np.zeros(1, np.int64)
        self.keep_alive: list[Any] = [self.arrays, self.tables, self.counter]  # memory the words point to

    def table_fields(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return [(t.ctypes.data, t.strides, t.shape) for t in self.tables]

    def constant_arrays(self, *changing: Any) -> tuple[Any, ...]:
        """Of the memory the words point to, what is neither the problem's nor the counter nor one of these arrays."""
        excluded = {id(array) for array in (*self.arrays.values(), self.counter, *changing)}
        return tuple(x for x in self.keep_alive if isinstance(x, np.ndarray) and id(x) not in excluded)

    def address(self, array: Any) -> int:
        """Where a NumPy array lies; it is kept until the call is over."""
        self.keep_alive.append(array)
        return int(array.ctypes.data)

    def fields(self, spec: KernelSpec) -> dict[str, Any]:
        """The fields of `arguments.COMMON_FIELDS` but for items, query_blocks and lse."""
        problem, runs = self.problem, self.runs
        fields = {
            "counter": self.counter.ctypes.data,
            "factor": (abs(problem.scale) or 1.0) * (math.log2(math.e) if spec.is_base_2 else 1.0),
            "scale_sign": float(np.sign(problem.scale)),
            "H": problem.H,
            "group": problem.group,
            "n": problem.n,
            "m": problem.m,
            "tile_range_batch_stride": runs.heads * runs.query_blocks if runs.batches > 1 else 0,
            "tile_range_head_stride": runs.query_blocks if runs.heads > 1 else 0,
            "seed": problem.seed - (2**64 if problem.seed >= 2**63 else 0),
            "dropout_threshold": threshold(problem),
            "dropout_scale": 0.0 if problem.dropout == 1 else 1 / (1 - problem.dropout),
        }
        fields |= self.tile_range_fields(runs)
        for name, array in self.arrays.items():
            fields |= operand_fields(name, array, self.keep_alive)
        return fields

    def tile_range_fields(self, runs: TileRanges) -> dict[str, int]:
        fields = {
            f"tile_range_{name}": self.address(np.ascontiguousarray(getattr(runs, name), np.int64))
            for name in ("start", "first", "last")
        }
        return fields | {"tile_range_full": self.address(np.ascontiguousarray(runs.full, np.uint8))}


def operand_fields(name: str, array: Any, keep_alive: list[Any]) -> dict[str, int]:
    """The words of an array (*lead, heads, rows, columns)."""
    address, strides = layout(array)
    offsets = np.zeros(array.shape[:-3], np.int64)  # bytes to each batch, leading axes counted in C order
    for axis, (length, stride) in enumerate(zip(array.shape[:-3], strides[:-3], strict=True)):
        shape = [1] * offsets.ndim
        shape[axis] = length
        offsets += (np.arange(length) * stride).reshape(shape)
    offsets = np.ascontiguousarray(offsets).reshape(-1)
    keep_alive += [array, offsets]
    axes = zip(("head", "row", "column"), strides[-3:], strict=True)
    return {name: address, f"{name}_batch_offsets": offsets.ctypes.data} | {
        f"{name}_{axis}_stride": stride for axis, stride in axes
    }


def make_spec(kernel: str, problem: Problem, kernel_arguments: KernelArguments, **more: Any) -> KernelSpec:
    """What of a problem is compiled into a kernel."""
    ranges = [find_index_ranges(f, problem.extent) for f in kernel_arguments.formulas]
    clamped = tuple(outside for _, outside in ranges)
    mask, score, *extra_formulas = (None if f is None else f.text for f in kernel_arguments.formulas)
    return KernelSpec(
        kernel=kernel,
        dtype=problem.dtype,
        d_k=problem.d_k,
        d_v=problem.d_v,
        unit_stride=tuple(_has_unit_stride(array) for array in kernel_arguments.arrays.values()),
        mask=mask,
        score=score,
        extra_formulas=tuple(text for text in extra_formulas if text is not None),
        tables=tuple((str(t.dtype), t.ndim) for t in kernel_arguments.tables),
        slots=tuple(
            kernel_arguments.slots[id(table)] for f in kernel_arguments.formulas if f is not None for table in f.tables
        ),
        needs_int64=max(
            [largest for largest, _ in ranges] + [_extent_in_bytes(table) for table in kernel_arguments.tables]
        )
        >= 2**31 - 1,
        clamped=clamped,
        has_sinks=problem.sinks is not None,
        has_dropout=problem.dropout > 0,
        tile_lookups=tuple(_find_tile_lookups(kernel_arguments, clamped)),
        **more,
    )


def compile_kernel(
    spec: KernelSpec, kernel_arguments: KernelArguments, writer: type[Block], processor: Processor
) -> Any:
    """The kernel as the processor calls it."""
    name = f"sightline_{spec.kernel}"

    def write() -> Any:
        return writer(spec, kernel_arguments.formulas, processor.machine).write(name)

    return processor.kernel(repr(spec), name, write)


def query_block_size(dtype: str, machine: Machine) -> int:
    """Queries a kernel takes at a time."""
    return _lanes_per_vector(dtype, machine) * machine.register_tile[1]


def fit_machine(machine: Machine, problem: Problem) -> Machine:
    """The machine with a register tile no wider than the problem's queries need."""
    return machine.narrow_tile(-(-problem.n // _lanes_per_vector(problem.dtype, machine)))


def _lanes_per_vector(dtype: str, machine: Machine) -> int:
    """Queries in a vector of the accumulator's type."""
    return machine.vector_bytes // (8 if dtype == "float64" else 4)


def _has_unit_stride(array: Any) -> bool:
    """Whether the columns of an array lie next to each other."""
    return bool(layout(array)[1][-1] == array.itemsize)


def _find_tile_lookups(kernel_arguments: KernelArguments, clamped: tuple[Any, ...]) -> Iterator[tuple[int, ...]]:
    """Of each formula, the lookups t[..., i, j] whose entries lie side by side along j: see `TileTables`."""

    def is_tile_lookup(node: Lookup) -> bool:
        array, indices = kernel_arguments.tables[kernel_arguments.slots[id(node.table)]], node.arguments
        return (
            len(indices) > 1
            and indices[-2] is SYMBOLS["i"]
            and indices[-1] is SYMBOLS["j"]
            and all(other.free_symbols.isdisjoint({"i", "j", "s"}) for other in indices[:-2])
            and array.dtype.kind in "bf"
            and array.strides[-1] == array.itemsize
        )

    for formula, clamped_indices in zip(kernel_arguments.formulas, clamped, strict=True):
        nodes = [] if formula is None else walk(formula)
        lookups = [(node_index, node) for node_index, node in enumerate(nodes) if isinstance(node, Lookup)]
        clamped_nodes = {node_index for node_index, _ in clamped_indices}
        yield tuple(
            node_index for node_index, node in lookups if node_index not in clamped_nodes and is_tile_lookup(node)
        )


def _convert_table(array: Any) -> Any:
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


def _extent_in_bytes(array: Any) -> int:
    """Bytes between the farthest entries of an array, which a view with gaps may spread far, or of its gradient."""
    extent = sum(max(length - 1, 0) * abs(stride) for length, stride in zip(array.shape, array.strides, strict=True))
    return max(int(extent), 8 * int(array.size))
