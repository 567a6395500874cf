"""The arguments of a kernel, and what is compiled into the kernel, for a problem."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ...arrays.operations import address_of, detach, has_heads_in_rows, itemsize, map_entries, strides_of, to_numpy
from ...call.problem import Problem
from ...formula.expression import SYMBOLS, Expression, Lookup, walk
from ...formula.formula_checks import find_index_ranges
from ...formula.parameters import TableParameter, structure_of
from ...formula.tile_ranges import TileRanges, find_tile_ranges
from ...reference.dropout import threshold
from ...statistics.dispatch import FusedStatistics, formulas_of
from ..codegen.abi import signed_word
from ..kernels.block import Block
from ..kernels.kernel_spec import KEY_BLOCK, KernelSpec, lanes_per_vector
from ..kernels.tile_functions import without_formulas
from ..runtime.compile import Part
from ..runtime.processor import Processor
from .product_rates import machine_for

TARGET_ITEMS = 16  # about how many work items a call has; fixed, since sums must not depend on the number of threads


class KernelArguments:
    """What determines a kernel and its argument block: the processor, the kernel spec, arrays and tile ranges.

    A tile range is a run of key blocks that a block of `query_block` queries must process. `group` adjacent heads share
    tile ranges. `extra_formulas` are formulas besides mask and score. They may read b, h, i, j, and s: the score after
    the score formula. Their tables come after the tables of mask and score. `unread` are the other formulas of the
    call, which this kernel does not read. All kernels of a call have one structure, so that they share its numbers.
    """

    def __init__(
        self,
        problem: Problem,
        processor: Processor,
        query_block: int,
        extra_formulas: Sequence[Expression] = (),
        group: int = 1,
        unread: Sequence[Expression] = (),
    ) -> None:
        self.problem, self.processor, self.query_block, self.group = problem, processor, query_block, group
        # the formulas of the problem, and their structures, which are compiled into the kernel
        self.problem_formulas = (problem.mask, problem.score, *extra_formulas)
        structure = structure_of(*self.problem_formulas, *unread).first(len(self.problem_formulas))
        self.formulas, self.numbers = structure.formulas, structure.numbers
        self.arrays = {name: detach(getattr(problem, name)) for name in ("query", "key", "value")}
        self.tables = [convert_table(table.array) for table in structure.tables]
        self.problem_tables = structure.tables
        self.table_origins = tuple([table.origin for table in structure.tables])
        self.tile_ranges = find_tile_ranges(problem.mask, problem.extent, query_block, KEY_BLOCK, group)
        self.has_tile_ranges = True
        self.keep_alive: list[Any] = [self.arrays, self.tables]  # the memory that the arguments point to
        self.spec: KernelSpec  # `specify` sets it

    def specify(self, kernel: str, **more: Any) -> None:
        """Set the spec of the kernel; `more` has the fields of the spec that do not follow from the arguments."""
        problem = self.problem
        ranges = [find_index_ranges(f, problem.extent) for f in self.problem_formulas]
        clamped = tuple(outside for _, outside in ranges)
        mask, score, *extra_formulas = (None if f is None else f.text for f in self.formulas)
        extents = [largest for largest, _ in ranges] + [extent_in_bytes(table) for table in self.tables]
        self.spec = KernelSpec(
            kernel=kernel,
            dtype=problem.dtype,
            d_k=problem.d_k,
            d_v=problem.d_v,
            unit_stride=tuple(map(has_unit_stride, self.arrays.values())),
            mask=mask,
            score=score,
            extra_formulas=tuple(text for text in extra_formulas if text is not None),
            tables=tuple((str(t.dtype), t.ndim) for t in self.tables),
            needs_int64=max(extents) >= 2**31 - 1,
            clamped=clamped,
            has_sinks=problem.sinks is not None,
            has_dropout=problem.dropout > 0,
            stored=tuple(row_format.dtype for row_format in problem.row_formats or ()),
            tile_lookups=tuple(_find_tile_lookups(self, clamped)),
            **more,
        )

    def without_arrays(self) -> KernelArguments:
        """Return a copy that keeps no array alive; `with_arrays` gives it arrays again."""
        light = copy.copy(self)
        light.problem = replace(
            self.problem, query=None, key=None, value=None, mask=None, score=None, sinks=None, see=()
        )
        light.problem_formulas, light.problem_tables = (), ()
        light.arrays, light.tables, light.keep_alive = {}, [], []
        return light

    def with_arrays(self, query: Any, key: Any, value: Any, tables: Sequence[Any]) -> KernelArguments:
        """Return the arguments for other arrays of the same dtypes and numbers of axes.

        The new arguments have tile ranges only if there is no mask. `tables` are results of `convert_table`.
        """
        new = copy.copy(self)
        new.arrays = {"query": detach(query), "key": detach(key), "value": detach(value)}
        new.problem, new.tables = replace(self.problem, **new.arrays), list(tables)
        new.keep_alive = [new.arrays, new.tables]
        mask = self.formulas[0]
        new.tile_ranges = _make_tile_ranges(mask, new.problem.extent, self.query_block, self.group)
        new.has_tile_ranges = mask is None
        return new

    def retain(self, array: Any) -> int:
        """Add a NumPy array to `keep_alive`, the memory that the arguments point to, and return its address."""
        self.keep_alive.append(array)
        return int(array.ctypes.data)

    def fields(self) -> dict[str, Any]:
        """Return the values of all fields in `abi.COMMON_FIELDS` except counter, items and lse."""
        problem, tile_ranges = self.problem, self.tile_ranges
        fields = {
            "factor": (abs(problem.scale) or 1.0) * (math.log2(math.e) if self.spec.is_base_2 else 1.0),
            "scale_sign": float(np.sign(problem.scale)),
            "H": problem.H,
            "group": problem.group,
            "n": problem.n,
            "m": problem.m,
            "query_blocks": -(-problem.n // self.query_block),
            "tile_range_batch_stride": tile_ranges.heads * tile_ranges.query_blocks if tile_ranges.batches > 1 else 0,
            "tile_range_head_stride": tile_ranges.query_blocks if tile_ranges.heads > 1 else 0,
            "seed": signed_word(problem.seed),
            **dict(zip(("dropout_b", "dropout_h", "dropout_i", "dropout_j"), problem.dropout_origin, strict=True)),
            "dropout_threshold": threshold(problem),
            "dropout_scale": 0.0 if problem.dropout == 1 else 1 / (1 - problem.dropout),
        }
        for name, dtype in {"start": np.int64, "first": np.int64, "last": np.int64, "full": np.uint8}.items():
            fields[f"tile_range_{name}"] = self.retain(np.ascontiguousarray(getattr(tile_ranges, name), dtype))
        for name, array in self.arrays.items():
            fields |= operand_fields(name, array, self.keep_alive)
        return fields


def output_strides(problem: Problem) -> dict[str, int]:
    """Return the strides of the output in bytes, by field. They follow the query; see `has_heads_in_rows`."""
    row = problem.d_v * itemsize(problem.dtype)
    batch = problem.H * problem.n * row
    head, position = (row, problem.H * row) if has_heads_in_rows(problem.query) else (problem.n * row, row)
    return {"output_batch_stride": batch, "output_head_stride": head, "output_row_stride": position}


def operand_fields(name: str, array: Any, keep_alive: list[Any]) -> dict[str, int]:
    """Return the argument fields of an array (*batch_shape, heads, rows, columns): its address and its strides.

    The array, and the offsets of its batches, are added to `keep_alive`.
    """
    address, strides = address_of(array), strides_of(array)
    offsets = np.zeros(array.shape[:-3], np.int64)  # bytes from the first batch to each batch, in C order
    for axis, (length, stride) in enumerate(zip(array.shape[:-3], strides[:-3], strict=True)):
        shape = [1] * offsets.ndim
        shape[axis] = length
        offsets += (np.arange(length) * stride).reshape(shape)
    offsets = np.ascontiguousarray(offsets).reshape(-1)
    keep_alive += [array, offsets]
    fields = {name: address, f"{name}_batch_offsets": offsets.ctypes.data}
    axes = zip(("head", "row", "column"), strides[-3:], strict=True)
    return fields | {f"{name}_{axis}_stride": stride for axis, stride in axes}


def prepare(
    kernel: str,
    problem: Problem,
    processor: Processor,
    extra_formulas: Sequence[Expression] = (),
    unread: Sequence[Expression] = (),
    **more: Any,
) -> KernelArguments:
    """Return the arguments of a kernel, with blocks of queries that are no larger than the problem needs."""
    machine = machine_for(processor, problem.dtype)
    lanes = lanes_per_vector(problem.dtype, machine)
    machine = machine.narrow_tile(-(-problem.n // lanes))
    arguments = KernelArguments(problem, processor, lanes * machine.register_tile[1], extra_formulas, unread=unread)
    arguments.specify(kernel, vectors=machine.vectors, **more)
    return arguments


def write_kernel(arguments: KernelArguments, writer: type[Block]) -> Any:
    spec, machine = arguments.spec, machine_for(arguments.processor, arguments.spec.dtype)
    kernel = writer(spec, arguments.formulas, machine)
    if writer.functions is not None:
        writer.functions(writer.fields, spec, arguments.formulas, machine, kernel.module).write()
    return kernel.write(f"sightline_{spec.kernel}")


def compile_kernel(arguments: KernelArguments, writer: type[Block]) -> Any:
    """Return the compiled kernel in the form that `Processor.call` takes.

    Some kernels have two parts. Only one part depends on formulas, so only this part is compiled for new ones.
    """
    spec, processor = arguments.spec, arguments.processor
    name, machine = f"sightline_{spec.kernel}", machine_for(processor, spec.dtype)
    if writer.functions is not None and processor.links_parts:
        rest = without_formulas(spec)
        common = Part(repr(rest), lambda: writer(rest, (None, None), machine).write(name))
        functions = writer.functions(writer.fields, spec, arguments.formulas, machine)
        return processor.kernel(repr(spec), name, functions.write, common, machine)
    return processor.kernel(repr(spec), name, lambda: write_kernel(arguments, writer), None, machine)


def convert_sinks(sinks: Any) -> Any:
    """Return sinks as a contiguous NumPy array of float64."""
    return np.ascontiguousarray(to_numpy(sinks), np.float64)


def has_unit_stride(array: Any) -> bool:
    """True if the columns of an array are adjacent in memory."""
    return bool(strides_of(array)[-1] == array.itemsize)


def with_contiguous_rows(array: Any) -> Any:
    """Return the array if its columns are adjacent, else a copy. For example, the gradient of a sum has strides 0."""
    return array if has_unit_stride(array) else with_contiguous_entries(array)


def with_contiguous_entries(array: Any) -> Any:
    """Return the array in C order, without a copy if it is in C order already."""
    return array.contiguous() if hasattr(array, "contiguous") else np.ascontiguousarray(array)


def _find_tile_lookups(arguments: KernelArguments, clamped: tuple[Any, ...]) -> Iterator[tuple[int, ...]]:
    """Yield, for each formula, the indices in `walk(formula)` of lookups t[..., i, j] with entries adjacent along j."""

    def is_tile_lookup(node: Lookup) -> bool:
        array, indices = arguments.tables[cast(TableParameter, node.table).slot], node.arguments
        return (
            len(indices) > 1
            and indices[-2] is SYMBOLS["i"]
            and indices[-1] is SYMBOLS["j"]
            and all(other.free_symbols.isdisjoint({"i", "j", "s"}) for other in indices[:-2])
            and array.dtype.kind in "bf"
            and array.strides[-1] == array.itemsize
        )

    for formula, clamped_indices in zip(arguments.formulas, clamped, strict=True):
        nodes = enumerate([] if formula is None else walk(formula))
        clamped_nodes = {index for index, _ in clamped_indices}
        lookups = ((index, node) for index, node in nodes if isinstance(node, Lookup) and index not in clamped_nodes)
        yield tuple(index for index, node in lookups if is_tile_lookup(node))


def _make_tile_ranges(
    mask: Expression | None, extent: tuple[int, int, int, int], query_block: int, group: int
) -> TileRanges:
    """Return tile ranges that contain every tile if `mask` is None. With a mask, the result has no ranges yet.

    `batches` and `heads` of the result count the batches and the groups of heads that have separate ranges.
    """
    B, H, n, m = extent
    symbols = frozenset[str]() if mask is None else mask.free_symbols
    rows = -(-n // query_block) if mask is None else 0
    start, first, last = np.arange(rows + 1), np.zeros(rows, np.int64), np.full(rows, -(-m // KEY_BLOCK))
    counts = (B if "b" in symbols else 1), (H // group if "h" in symbols else 1)
    return TileRanges(extent, query_block, KEY_BLOCK, *counts, start, first, last, np.ones(rows, np.bool_))


def convert_table(array: Any) -> Any:
    """Return a table as bool, int32, int64, float32 or float64; the array itself if it has one of these dtypes."""
    if 0 in array.shape:  # only hidden pairs read the table, and any number serves a hidden pair
        array = to_numpy(array)
        array = np.zeros([max(length, 1) for length in array.shape], array.dtype)
    return map_entries(_convert_entries, array)


def _convert_entries(array: Any) -> Any:
    array = to_numpy(array)
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "b":
        return array
    if kind in "iu":
        return array if kind == "i" and size in (4, 8) else array.astype(np.int32 if size < 4 else np.int64)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def extent_in_bytes(array: Any) -> int:
    """Return the larger of two numbers of bytes: the span of the array, and the size of its gradient.

    The array may be a view with gaps. The gradient has no gaps, and at most 8 bytes per entry.
    """
    extent = sum(max(length - 1, 0) * abs(stride) for length, stride in zip(array.shape, array.strides, strict=True))
    return max(int(extent), 8 * int(array.size))


class CpuFusedStatistics(FusedStatistics):
    """The statistics that the forward kernel computes, and their output arrays; see `FusedStatisticsCode`.

    `unread` are formulas of the call that the kernel does not read, by default those of the weights passes; see
    `KernelArguments`.
    """

    def __init__(self, problem: Problem, unread: Sequence[Expression] | None = None) -> None:
        super().__init__(problem, np.empty)
        self.unread = formulas_of(problem.see)[len(self.factors) :] if unread is None else unread
        self.roles = tuple(["sum" if type(name) is int else name for name, dtype in self.outputs if dtype != "int64"])
