"""The arrays, formulas and numbers of a problem as arguments of the Triton kernels, and its schedule.

A schedule has the tiles of keys that each block of queries visits, as int32 arrays on the device; see
`formula.tile_ranges`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl

from ...arrays.operations import detach
from ...call.problem import Problem
from ...formula.expression import SYMBOLS, Expression
from ...formula.tables import bounds_key
from ...formula.tensor_cache import TensorCache, retain, to_device
from ...formula.tile_ranges import TileRanges, find_tile_ranges
from ...reference.dropout import threshold
from ..codegen.formula_functions import (
    INT32_MAX,
    FormulaFunctions,
    NamedFormula,
    collect_tables,
    compile_function,
    render_sources,
)
from ..configurations import Configuration
from ..kernels.tile_loop import GpuSchedule
from ..kernels.tile_ops import KernelArrays, MetaParameters, StridedArray

_SCHEDULES = TensorCache(64)
# The rows of a head in a schedule are padded to a multiple of this number: Triton compiles one kernel for all integers
# and addresses that are multiples of 16.
ROW_ALIGNMENT = 16
MIN_SCALE = 2.0**-64  # kernels apply a smaller scale before the softmax, because lse / scale would overflow float32


class GpuOperands:
    """The arguments that all kernels of a problem share.

    Parameters
    ----------
    sizes : the tile sizes of the kernel
    formulas : (name, formula, True if its function takes scores) for every formula besides mask and score
        The tables of these formulas follow the tables of mask and score.
    arrays : arrays besides query, key and value whose rows a kernel reads in tiles
    """

    def __init__(
        self,
        problem: Problem,
        sizes: Configuration,
        formulas: Sequence[NamedFormula] = (),
        arrays: Sequence[StridedArray] = (),
    ) -> None:
        if problem.score is None and 0 < abs(problem.scale) < MIN_SCALE:
            problem = replace(problem, score=SYMBOLS["s"])
        self.problem, self.sizes, self.extra_arrays = problem, sizes, arrays
        self.arrays = {name: to_operand(detach(getattr(problem, name))) for name in ("query", "key", "value")}
        tables = [prepare_table(table.array, problem.query) for table in collect_tables(problem, formulas)]
        self.tables = tuple((table, *table.stride(), *table.shape) for table in tables)
        self.sources = render_sources(problem, formulas)

    def formula_functions(self) -> FormulaFunctions:
        """Return the generated functions of mask, score and extra formulas; a formula that is absent is None."""
        sources = {name: self.sources[name] for name in FormulaFunctions._fields if name in self.sources}
        return FormulaFunctions(**{name: compile_function(source, name) for name, source in sources.items()})

    def combine_functions(self, names: Sequence[str], expressions: Sequence[str], name: str) -> Any:
        """Return a Triton function that takes scores and returns the tuple of `expressions`; None if `names` is empty.

        The expressions call the generated functions that `names` lists.
        """
        if not names:
            return None
        body = f"@triton.jit\ndef {name}(s, b, h, i, j, n, m, tables):\n    return ({', '.join(expressions)},)\n"
        return compile_function("\n\n".join([*[self.sources[each] for each in names], body]), name)

    def common_arguments(self, **others: Any) -> dict[str, Any]:
        """Return the arguments of all kernels that loop over tiles. `others` are further fields of `KernelArrays`."""
        state = dropout_state(self.problem, self.problem.seed)
        arrays = KernelArrays(**self.arrays, tables=self.tables, dropout_state=state, **others)
        lengths = {name: getattr(self.problem, name) for name in ("n", "m", "H", "group")}
        formulas = {"formulas": self.formula_functions(), "meta": self.meta()}
        return {"arrays": arrays, "scale": abs(self.problem.scale) or 1.0} | lengths | formulas

    def block_arguments(self, arguments: dict[str, Any], blocks: int, items: int, has_flags: bool) -> dict[str, Any]:
        """Return `arguments` and those of a kernel that divides heads into blocks and has a NaN-safe variant.

        `blocks` is the number of blocks of a head, and `items` the number of blocks of all heads. Without `has_flags`
        the kernel gets no array of flags: NaN-safe code then computes every block.
        """
        flags = self.problem.query.new_empty(items, dtype=torch.int32) if has_flags else None
        arrays = arguments["arrays"]._replace(nonfinite_flags=flags)
        return arguments | {"arrays": arrays, "blocks": blocks, "items": items, "dropout_scale": self.dropout_scale()}

    def meta(self, sizes: Configuration | None = None, **others: Any) -> MetaParameters:
        """Return the compile-time constants of a kernel with the tile sizes `sizes`, by default `self.sizes`.

        `others` are the fields of `MetaParameters` that only some kernels read.
        """
        problem, sizes = self.problem, sizes or self.sizes
        arrays = (*self.arrays.values(), *self.extra_arrays)
        max_stride = max(abs(stride) for array in arrays for stride in (array.row, array.column))
        needs_int64 = max_stride * (sizes.rows + sizes.keys + problem.d_k + problem.d_v) > INT32_MAX
        return MetaParameters(
            rows=sizes.rows,
            keys=sizes.keys,
            d_k=problem.d_k,
            d_v=problem.d_v,
            padded_d_k=padded_width(problem.d_k),
            padded_d_v=padded_width(problem.d_v),
            even=problem.m % sizes.keys == 0,
            index_type=tl.int64 if needs_int64 else tl.int32,
            accumulator=tl.float64 if problem.accumulator == "float64" else tl.float32,
            sign=math.copysign(1.0, problem.scale) if problem.scale else 0.0,
            precision=dot_precision(problem.query),
            widens_operands=sizes.widens_operands,
            **others,
        )

    def dropout_scale(self) -> float:
        """Return the factor 1 / (1 − dropout) on weights that are not dropped; 0 if every weight is dropped."""
        dropout = self.problem.dropout
        return 0.0 if dropout == 1 else 1 / (1 - dropout)

    def sinks(self) -> Any:
        """Return the sinks as a contiguous float64 array (H,); None if the problem has no sinks."""
        return None if self.problem.sinks is None else prepare_sinks(self.problem.sinks)


def padded_width(width: int) -> int:
    """Return the width to which rows of `width` are padded for a matrix product: the next power of two, at least 16."""
    return max(16, 1 << max(width - 1, 0).bit_length())


def prepare_sinks(sinks: Any) -> Any:
    """Return the sinks as (H,) float64, contiguous."""
    return detach(sinks).to(torch.float64).contiguous()


def dropout_state(problem: Problem, seed: int) -> tuple[int, ...]:
    """Return what `tile_ops.dropout_mask` reads; () if no weight is dropped.

    The state is seven words: the low and the high 32 bits of the seed, the largest random word that drops its weight,
    and `Problem.dropout_origin` with j in groups of 4 keys. Triton compiles a kernel again for an integer that is 1, a
    multiple of 16, or of another width than before. So each word is packed into an odd number of 42 bits.
    """
    dropped = threshold(problem) - 1
    b, h, i, j = problem.dropout_origin
    words = (seed % 2**32, seed >> 32, dropped, b, h, i, j // 4)
    return tuple([2**41 + 2 * word + 1 for word in words]) if dropped >= 0 else ()


def to_operand(array: Any) -> StridedArray:
    """Return a tensor (..., heads, rows, columns) as a kernel's argument, with its batch lengths and its strides.

    Adjacent batch axes are merged where their strides allow it. Batch axes of length 1 are left out.
    """
    lengths: list[int] = []
    strides: list[int] = []
    for length, stride in zip(array.shape[:-3], array.stride()[:-3], strict=True):
        if length == 1:
            continue
        if lengths and strides[-1] == stride * length:
            lengths[-1] *= length
            strides[-1] = stride
        else:
            lengths.append(length)
            strides.append(stride)
    return StridedArray(array, tuple(lengths), tuple(strides), *array.stride()[-3:])


def dot_precision(query: Any) -> str:
    """Return "tf32" if torch's settings allow it for float32 products and the GPU supports it, else "ieee".

    Among AMD's GPUs only gfx942 has tf32, and Triton raises an error for tf32 on the others.
    """
    if query.dtype is not torch.float32:
        return "ieee"
    settings = torch.backends.cuda.matmul
    # torch 2.9 added fp32_precision. Reading allow_tf32 after fp32_precision was set raises an error.
    precision = getattr(settings, "fp32_precision", None)
    uses_tf32 = settings.allow_tf32 if precision is None else precision == "tf32"
    if uses_tf32 and torch.version.hip is not None and query.is_cuda:
        uses_tf32 = torch.cuda.get_device_properties(query.device).gcnArchName.startswith("gfx942")
    return "tf32" if uses_tf32 else "ieee"


def prepare_table(array: Any, like: Any) -> Any:
    """Return a table on the device of `like`, detached and not empty."""
    array = detach(to_device(array, like))
    if array.numel() == 0:  # kernels read an empty table at hidden pairs only, and ignore what they read
        array = array.new_zeros([max(length, 1) for length in array.shape])
    return array


def encode_ranges(ranges: TileRanges) -> tuple[Any, Any]:
    """Return (rows, pairs), int32 arrays of the shapes (number of schedule rows, 3) and (number of tile ranges, 2).

    A schedule row is one block of queries. rows[r] is (start, first partial range, stop): row r visits the tile ranges
    pairs[start:stop], its full ranges first. pairs[k] is (first tile, last tile + 1) of tile range k. A last tile that
    the keys do not fill counts as partial, so full tiles need no bounds checks.
    """
    owner = np.repeat(np.arange(ranges.start.size - 1), np.diff(ranges.start))  # the schedule row of each tile range
    first, last, full = ranges.first, ranges.last, ranges.full
    if ranges.extent[3] % ranges.key_block:
        ragged = full & (last == ranges.key_blocks)
        tails = np.stack([owner[ragged], last[ragged] - 1, last[ragged], np.zeros_like(last[ragged])])
        heads = np.stack([owner, first, np.where(ragged, last - 1, last), full])
        owner, first, last, full = np.concatenate([heads, tails], axis=1)
        nonempty = first < last
        owner, first, last, full = owner[nonempty], first[nonempty], last[nonempty], full[nonempty]
    partial = np.logical_not(full)
    order = np.lexsort((first, partial, owner))
    owner, partial = owner[order], partial[order]
    start = np.searchsorted(owner, np.arange(ranges.start.size))
    middle = start[:-1] + np.bincount(owner[~partial], minlength=ranges.start.size - 1)
    rows = np.stack([start[:-1], middle, start[1:]], axis=1)
    pairs = np.stack([first[order], last[order]], axis=1)
    return rows.astype(np.int32), pairs.astype(np.int32)


def make_schedule(problem: Problem, query_block: int, key_block: int, of_keys: bool = False) -> GpuSchedule | None:
    """Return the schedule of a problem: the ranges of key tiles that each block of queries visits.

    With `of_keys`, the schedule has the ranges of query tiles that each block of keys visits. The result is None if the
    problem has no mask: then every tile is visited.
    """
    if problem.mask is None:
        return None
    mask = problem.mask
    tables_key, arrays = bounds_key(mask.tables)
    cache_key = (mask.text, tables_key, problem.extent, query_block, key_block, of_keys, problem.device)
    found = _SCHEDULES.get(cache_key, arrays, lambda: _build_schedule(mask, problem, query_block, key_block, of_keys))
    return retain(found, problem.query)


def _build_schedule(mask: Expression, problem: Problem, query_block: int, key_block: int, of_keys: bool) -> GpuSchedule:
    B, H, n, m = problem.extent
    if of_keys:  # the tile ranges of the transposed mask
        swapped = {name: SYMBOLS[other] for name, other in zip("ijnm", "jimn", strict=True)}
        ranges = find_tile_ranges(mask.rewrite(swapped), (B, H, m, n), key_block, query_block)
    else:
        ranges = find_tile_ranges(mask, problem.extent, query_block, key_block)
    rows, pairs = encode_ranges(ranges)
    stride = -(-ranges.query_blocks // ROW_ALIGNMENT) * ROW_ALIGNMENT  # schedule rows of a head, padded
    rows = np.pad(rows.reshape(-1, ranges.query_blocks, 3), ((0, 0), (0, stride - ranges.query_blocks), (0, 0)))
    flat = torch.from_numpy(np.concatenate([rows.reshape(-1), pairs.reshape(-1)])).to(problem.query.device)
    batch_stride, head_stride = ranges.heads * stride * (ranges.batches > 1), stride * (ranges.heads > 1)
    return GpuSchedule(flat[: rows.size], flat[rows.size :], batch_stride, head_stride)
