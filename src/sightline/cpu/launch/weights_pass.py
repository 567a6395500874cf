"""The calls of the weights pass, a CPU kernel that computes statistics of weights from the lse of the forward pass.

`bind_passes` prepares the passes of a problem's statistics, and `run_first` runs a pass for this problem. One pass
computes several statistics. A pass takes lse (..., H, n), float64 in nats. If an lse is NaN, +∞ or too large
(`is_lse_imprecise`), the kernel `Streaming` must compute the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from ...arrays.operations import Framework, convert, empty, namespace, resolve_dtype, to_numpy
from ...caching import cached_property
from ...call.kernel import MAX_LSE
from ...call.problem import Problem
from ...formula.expression import Expression
from ...statistics import Mean, Reduction, Statistic, TopK, unwrap_mean
from ...statistics.computation import formulas_of, is_in_weights_pass
from ...statistics.reduction import cell_lengths
from ..codegen.abi import WEIGHTS_CALL_FIELDS
from ..kernels.kernel_spec import KEY_BLOCK, KernelSpec, ReductionRole, round_up
from ..kernels.weights_pass import WeightsPass
from ..kernels.weights_statistics import WeightStatistics
from ..kernels.weights_tiles import WeightSums, WeightTiles
from ..runtime.processor import HOST, Processor
from .arguments import TARGET_ITEMS, KernelArguments, prepare
from .bound_call import BoundCall

MAX_STATISTICS = 8  # the most statistics of one pass
MAX_TOP_K = 256  # the largest k of `top_k`: the lists for a block of queries are a thread's scratch
MIN_PARALLEL_MULTIPLICATIONS = 1 << 20  # with fewer multiplications a second thread costs more than it saves

Range = tuple[int, int]
Output = tuple[tuple[int, ...], str, float | None]  # shape, dtype, and the number that the kernel expects there


class BoundWeightsPass(BoundCall):
    """A call of a weights pass, which is repeated with other addresses and numbers; see `BoundCall`."""

    call_fields = WEIGHTS_CALL_FIELDS

    def __init__(
        self, arguments: KernelArguments, spec: KernelSpec, writer: type[WeightsPass], items: int, **more: Any
    ) -> None:
        problem, processor = arguments.problem, more.pop("processor")
        work = problem.B * problem.H * problem.n * problem.m * problem.d_k
        values = {"items": items, "batches": problem.B} | more
        self.reads_formulas = bool(spec.extra_formulas)  # of statistics
        super().__init__(
            arguments,
            spec,
            writer,
            values,
            processor,
            max_threads=1 if work < MIN_PARALLEL_MULTIPLICATIONS else items,
            workspace={"counter": 1},
            zeroed=("counter",),
            outputs=[0] * spec.num_output_arrays,
        )


@dataclass(frozen=True)
class StatisticArrays:
    """The arrays of one statistic in a weights pass.

    Parameters
    ----------
    outputs : the arrays that the kernel fills
    finish : function (arrays) that returns the statistic's arrays
    """

    outputs: tuple[Output, ...]
    finish: Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class StatisticsPass:
    """The weights pass of one or several statistics.

    Parameters
    ----------
    call : the bound call of the kernel
    statistics : the arrays of each statistic of the pass
    indices : the index of each statistic among those that were given to `bind_passes`
    """

    call: BoundWeightsPass
    statistics: tuple[StatisticArrays, ...]
    indices: tuple[int, ...] = (0,)

    def make_makers(self, framework: Framework) -> list[Callable[[], Any]]:
        """Return the functions that allocate the arrays that the kernel fills."""
        makers = [framework.make_empty(shape, dtype) for shape, dtype, _ in self.outputs]
        return [
            make if filler is None else partial(_make_filled, make, filler)
            for make, (_, _, filler) in zip(makers, self.outputs, strict=True)
        ]

    def finish(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Return the arrays of each statistic of the pass from the arrays that the kernel filled."""
        own = iter(arrays)
        return [statistic.finish(list(islice(own, len(statistic.outputs)))) for statistic in self.statistics]

    @cached_property
    def outputs(self) -> list[Output]:
        """The arrays that the kernel fills, in the order of its arguments."""
        return [output for statistic in self.statistics for output in statistic.outputs]


def _make_filled(make: Callable[[], Any], filler: float) -> Any:
    array = make()
    array[...] = filler
    return array


Bound = tuple[KernelArguments, StatisticsPass]


def bind_passes(problem: Problem, statistics: Sequence[Statistic], processor: Processor = HOST) -> list[Bound]:
    """Return the bound weights passes of the statistics, and the arguments of each pass.

    A pass computes at most one grid of cells, one `top_k`, and `MAX_STATISTICS` in all. A matrix, a mean of matrices
    and cells within a rectangle each have their own pass. A statistic that no weights pass can compute is left out, and
    so is a statistic with nothing to compute.
    """
    groups: list[list[int]] = []
    for index, statistic in enumerate(statistics):
        if not can_serve(problem, statistic):
            continue
        group = next((group for group in groups if _can_join(statistic, [statistics[k] for k in group])), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return [_bind(problem, [statistics[k] for k in group], tuple(group), processor) for group in groups]


def can_serve(problem: Problem, statistic: Statistic) -> bool:
    """True if there is a weights pass for the statistic, and something to compute."""
    of = unwrap_mean(statistic)
    if 0 in problem.extent or not is_in_weights_pass(of) or (isinstance(statistic, Mean) and of.fill_values != (0.0,)):
        return False
    if isinstance(statistic, TopK):
        return min(statistic.k, problem.m) in range(1, MAX_TOP_K + 1)
    return not isinstance(statistic, Reduction) or 0 not in statistic.grid(problem.n, problem.m)


def _role(statistic: Statistic, formulas: Sequence[Expression]) -> str | ReductionRole:
    """Return the role of a statistic in a kernel's spec. `formulas` are those of all statistics of the call."""
    if not isinstance(statistic, Reduction):
        return statistic.name
    how, formula = "sum" if statistic.how == "mean" else statistic.how, 0
    if not statistic.is_plain:
        formula = 2 + next(k for k, each in enumerate(formulas) if each is statistic.pair_formula)
    return ReductionRole(statistic.axes, how, statistic.hidden, formula)


def _can_join(statistic: Statistic, others: Sequence[Statistic]) -> bool:
    """True if a pass that computes the statistics `others` can compute this one as well."""
    axes = [getattr(unwrap_mean(x), "axes", None) for x in (statistic, *others)]
    is_alone = "" in axes or any(getattr(x, "within", None) for x in (statistic, *others))
    return not is_alone and len(axes) <= MAX_STATISTICS and axes.count("ij") < 2 and axes.count(None) < 2


def _bind(problem: Problem, statistics: Sequence[Statistic], indices: tuple[int, ...], processor: Processor) -> Bound:
    """Return the weights pass that computes all these statistics, and its arguments."""
    first = statistics[0]
    if isinstance(first, Mean):
        return _bind_weight_sums(problem, first, indices, processor)
    if isinstance(first, Reduction) and not first.axes:
        return _bind_weights(problem, first, indices, processor)
    k = max(min(x.k, problem.m) if isinstance(x, TopK) else 0 for x in statistics)
    arguments, spec = _prepare("statistics", problem, processor, statistics, k=k)
    grid = Grid.of(arguments, statistics)
    arrays = tuple([_arrays_of(x, arguments, grid) for x in statistics])
    call = BoundWeightsPass(arguments, spec, WeightStatistics, grid.items, processor=processor, **grid.fields())
    return arguments, StatisticsPass(call, arrays, indices)


def _prepare(
    kernel: str, problem: Problem, processor: Processor, statistics: Sequence[Statistic], **more: Any
) -> tuple[KernelArguments, KernelSpec]:
    """Return the arguments and the spec of a weights pass.

    The kernel does not read V, the given lse includes the sinks, and the weights are those before dropout. So problems
    that differ only in V, sinks or dropout share one kernel. If a statistic has a formula, the kernel gets the tables
    and numbers of all formulas of the call.
    """
    of_call = formulas_of(problem.see)
    roles = tuple([_role(x, of_call) for x in statistics])
    is_plain = not any(isinstance(role, ReductionRole) and role.formula for role in roles)
    formulas = ([], of_call) if is_plain else (of_call, [])
    arguments, spec = prepare(kernel, problem, processor, *formulas, roles=roles, **more)
    unit_stride = *spec.unit_stride[:2], True
    return arguments, replace(spec, d_v=1, unit_stride=unit_stride, has_sinks=False, has_dropout=False)


@dataclass(frozen=True)
class Grid:
    """The work items of a pass, and the cells of pooled: see `WeightStatistics`.

    Parameters
    ----------
    query_block : queries in a block
    queries, keys : the rectangle whose weights are computed
    range_size, num_ranges : blocks in a range of the queries, and the number of ranges
    split_size, num_splits : tiles in a split of the keys, and the number of splits
    rows, columns : the numbers of cells of pooled along queries and keys; 0 without pooled
    """

    problem: Problem
    query_block: int
    queries: Range
    keys: Range
    range_size: int
    num_ranges: int
    split_size: int
    num_splits: int
    rows: int
    columns: int

    @classmethod
    def of(cls, arguments: KernelArguments, statistics: Sequence[Statistic]) -> Grid:
        """Return the grid of a pass with these statistics. The keys have several splits only if each is received."""
        problem, block = arguments.problem, arguments.query_block
        cells = next((x for x in statistics if isinstance(x, Reduction) and x.axes == "ij"), None)
        queries, keys = (cells and cells.within) or ((0, problem.n), (0, problem.m))
        heads, key_blocks = problem.B * problem.H, -(-problem.m // KEY_BLOCK)
        query_blocks = -(-queries[1] // block) - queries[0] // block
        divides_keys = all(isinstance(x, Reduction) and x.axes == "i" for x in statistics)
        split_size = -(-key_blocks // min(-(-TARGET_ITEMS // heads), key_blocks)) if divides_keys else key_blocks
        num_splits = -(-key_blocks // split_size)
        range_size = -(-query_blocks // min(-(-TARGET_ITEMS // (num_splits * heads)), query_blocks))
        if all(isinstance(x, TopK) or getattr(x, "axes", "") == "j" for x in statistics):
            range_size = 1
        num_ranges = -(-query_blocks // range_size)
        shape = cells.grid(problem.n, problem.m) if cells else (0, 0)
        return cls(problem, block, queries, keys, range_size, num_ranges, split_size, num_splits, *shape)

    @property
    def items(self) -> int:
        return self.problem.B * self.problem.H * self.num_ranges * self.num_splits

    def fields(self) -> dict[str, int]:
        names = "range_size", "num_ranges", "split_size", "num_splits", "rows", "columns"
        return {name: getattr(self, name) for name in names} | {
            "first_query": self.queries[0],
            "last_query": self.queries[1],
            "query_blocks": -(-self.queries[1] // self.query_block),
            "first_key": self.keys[0],
            "last_key": self.keys[1],
        }

    def rows_of_range(self, index: int) -> slice:
        """Return the rows of cells that contain queries of a range."""
        (first, last), block = self.queries, self.query_block
        start = (first // block + index * self.range_size) * block
        edges = max(start, first), min(start + self.range_size * block, last) - 1
        low, high = (((i - first + 1) * self.rows - 1) // (last - first) for i in edges)
        return slice(low, high + 1)


def _arrays_of(statistic: Statistic, arguments: KernelArguments, grid: Grid) -> StatisticArrays:
    if isinstance(statistic, TopK):
        return _top_k_arrays(arguments.problem, statistic.k)
    assert isinstance(statistic, Reduction)
    if statistic.axes == "j":
        shape = *arguments.problem.batch_shape, arguments.problem.H, arguments.problem.n
        return StatisticArrays(tuple([(shape, dtype, None) for dtype in statistic.dtypes(arguments.problem)]), list)
    if statistic.finds:
        return _extrema_over_queries(arguments.problem, statistic, grid)
    make = _sums_over_queries if statistic.axes == "i" else _sums_over_cells
    return make(arguments.problem, statistic, grid)


def run_first(problem: Problem, lse: Any, bound: Bound, threads: int | None) -> list[list[Any]] | None:
    """Return the arrays of each statistic of a pass, for the problem of `bind_passes`; None if the kernel failed."""
    arguments, bound_pass = bound
    call, query = bound_pass.call, problem.query
    lse = np.ascontiguousarray(to_numpy(lse), np.float64)
    outputs = bound_pass.outputs
    arrays = [
        empty(shape, dtype, query) if filler is None else _make_filled(partial(empty, shape, dtype, query), filler)
        for shape, dtype, filler in outputs
    ]
    if call.run_first(threads, arguments, {"lse": lse}, arrays) is None:
        return None
    return bound_pass.finish(arrays)


def is_lse_imprecise(problem: Problem, lse: Any) -> bool:
    """True if an lse is NaN or +∞, or exceeds `MAX_LSE` in size, so that the weights e^(S − lse) would not sum to 1.

    The forward kernel sets `imprecise_lse_flag` in the same cases.
    """
    magnitudes = np.abs(np.where(to_numpy(lse) == -np.inf, 0.0, to_numpy(lse)))
    return not bool(np.max(magnitudes, initial=0.0) <= MAX_LSE[problem.accumulator])


def _sums_over_queries(problem: Problem, statistic: Reduction, grid: Grid) -> StatisticArrays:
    m, divisor = problem.m, problem.n if statistic.how == "mean" else 1

    def finish(arrays: list[Any]) -> list[Any]:
        """Return the sums or maxima. Each range of queries has its own part, and the parts are combined in order."""
        parts = arrays[0][0, ..., :m]
        total = parts[0]
        for part in parts[1:] if grid.num_ranges > 1 else ():
            total = statistic.combine(total, part)
        return [total / divisor]  # a new array without gaps, also if the divisor is 1

    shape = 2, grid.num_ranges, *problem.batch_shape, problem.H, round_up(m, KEY_BLOCK)
    return StatisticArrays(((shape, problem.accumulator, None),), finish)


def _extrema_over_queries(problem: Problem, statistic: Reduction, grid: Grid) -> StatisticArrays:
    shape = grid.num_ranges, *problem.batch_shape, problem.H, round_up(problem.m, KEY_BLOCK)

    def finish(arrays: list[Any]) -> list[Any]:
        """Return the maxima or minima of all ranges of queries, and their first positions."""
        values, positions = (array[0, ..., : problem.m] for array in arrays)
        xp = namespace(values)
        for more, places in zip(*(array[1:, ..., : problem.m] for array in arrays), strict=True):
            is_larger = more > values if statistic.how == "max" else more < values
            is_larger = is_larger | (xp.isnan(more) & ~xp.isnan(values)) | (positions < 0)
            values, positions = (
                xp.where(is_larger & (places >= 0), new, old) for new, old in ((more, values), (places, positions))
            )
        return [xp.asarray(array, copy=True) for array in (values, positions)]

    dtypes = problem.accumulator, "int64"
    return StatisticArrays(tuple([(shape, dtype, None) for dtype in dtypes]), finish)


def _sums_over_cells(problem: Problem, statistic: Reduction, grid: Grid) -> StatisticArrays:
    lead, rows, columns = (*problem.batch_shape, problem.H), grid.rows, grid.columns
    cell_sizes = cell_lengths(*grid.queries, rows)[:, None] * cell_lengths(*grid.keys, columns)

    def finish(arrays: list[Any]) -> list[Any]:
        """Return the means or maxima. Each range of queries has its own part, and the parts are combined in order."""
        (parts,), xp = arrays, namespace(arrays[0])
        cells = parts
        if grid.num_ranges > 1:
            cells = xp.full_like(parts[..., :rows, :], statistic.hidden)
            for index in range(grid.num_ranges):
                own = grid.rows_of_range(index)
                part, total = parts[..., own.start + index : own.stop + index, :], cells[..., own, :]
                cells[..., own, :] = statistic.combine(total, part)
        if statistic.how == "mean":
            cells /= convert(cell_sizes, cells)
        cells = cells[..., 0, 0] if statistic.cells is None else cells
        return [xp.astype(cells, resolve_dtype(xp, problem.accumulator), copy=False)]

    shape = *lead, rows + grid.num_ranges - 1, columns
    return StatisticArrays(((shape, "float64", statistic.hidden),), finish)


def _top_k_arrays(problem: Problem, k: int) -> StatisticArrays:
    num_ranks, shape = min(k, problem.m), (*problem.batch_shape, problem.H, problem.n)

    def finish(arrays: list[Any]) -> list[Any]:
        """Return the arrays with k ranks. Ranks beyond the number of keys have weight 0 and key −1."""
        if num_ranks == k:
            return arrays
        padded: list[Any] = []
        for array, filler in zip(arrays, (0, -1), strict=True):
            wide = empty((*shape, k), dtypes[len(padded)], array)
            wide[..., :num_ranks], wide[..., num_ranks:] = array, filler
            padded.append(wide)
        return padded

    dtypes = problem.accumulator, "int64"
    return StatisticArrays(tuple([((*shape, num_ranks), dtype, None) for dtype in dtypes]), finish)


def _bind_weights(problem: Problem, matrix: Reduction, indices: tuple[int, ...], processor: Processor) -> Bound:
    arguments, spec = _prepare("weights", problem, processor, [matrix])
    heads = problem.B * problem.H
    call = BoundWeightsPass(arguments, spec, WeightTiles, processor=processor, **_block_fields(arguments, heads))
    shape = (*problem.batch_shape, problem.H, problem.n, problem.m)
    outputs = ((shape, matrix.dtypes(problem)[0], matrix.hidden),)
    return arguments, StatisticsPass(call, (StatisticArrays(outputs, list),), indices)


def _bind_weight_sums(problem: Problem, mean: Mean, indices: tuple[int, ...], processor: Processor) -> Bound:
    """Return the pass of a sum or mean of a matrix over heads, batches or both: `WeightSums`."""
    arguments, spec = _prepare("weight_sums", problem, processor, [unwrap_mean(mean)])
    B, H = problem.B, problem.H
    counts = B if mean.over_batch else 1, H if mean.over_heads else 1
    divisor = (1 if mean.sums_batch else counts[0]) * (counts[1] if mean.factors is None else 1)
    factors = np.tile(mean.factors if isinstance(mean.factors, tuple) else np.ones(H), B)  # of every head
    steps = {(False, True): (1, H), (True, False): (H, 1), (True, True): (1, 0), (False, False): (1, 1)}
    step, output_step = steps[mean.over_batch, mean.over_heads]
    fields = _block_fields(arguments, B * H // math.prod(counts))
    fields |= {"factors": factors.ctypes.data, "count": math.prod(counts), "step": step, "output_step": output_step}
    call = BoundWeightsPass(arguments, spec, WeightSums, processor=processor, **fields)
    call.keep_alive = (*call.keep_alive, factors)
    (shape,) = mean.shapes(problem, (*problem.batch_shape, H), problem.n)

    def finish(arrays: list[Any]) -> list[Any]:
        xp = namespace(arrays[0])
        sums = arrays[0] if divisor == 1 else arrays[0].__itruediv__(divisor)
        return [xp.astype(sums, resolve_dtype(xp, mean.dtypes(problem)[0]), copy=False)]

    return arguments, StatisticsPass(call, (StatisticArrays(((shape, problem.accumulator, 0.0),), finish),), indices)


def _block_fields(arguments: KernelArguments, matrices: int) -> dict[str, int]:
    """Return the fields of a pass that has an item for each block of queries of each of `matrices` matrices."""
    n = arguments.problem.n
    blocks = -(-n // arguments.query_block)
    return {"items": matrices * blocks, "first_query": 0, "last_query": n, "query_blocks": blocks}
