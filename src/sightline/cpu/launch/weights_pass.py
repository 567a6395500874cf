"""The calls of the weights pass, a CPU kernel that computes statistics of weights from the lse of the forward pass.

`bind_passes` prepares the passes of a problem's statistics, and `run_first` runs a pass for this problem. One pass
computes several statistics. A pass takes lse (..., H, n), float64 in nats. If an lse is NaN, +∞ or too large
(`is_lse_too_large`), the kernel `Streaming` must compute the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from typing import Any

import numpy as np

from ...arrays.operations import Framework, convert, dtype_name, empty, framework, namespace, resolve_dtype, to_numpy
from ...call.problem import Problem
from ...formula.expression import Expression
from ...statistics import Mean, Reduction, Statistic
from ...statistics.dispatch import formulas_of, is_in_weights_pass
from ...statistics.reduction import join_extrema
from ..codegen.abi import WEIGHTS_CALL_FIELDS
from ..kernels.kernel_spec import KEY_BLOCK, ReductionRole, round_up
from ..kernels.weights_pass import WeightSums, WeightTiles
from ..kernels.weights_statistics import WeightStatistics
from ..runtime.processor import HOST, Processor
from .arguments import TARGET_ITEMS, KernelArguments, prepare
from .bound_call import BoundCall

MAX_STATISTICS = 8  # the most statistics of one pass
MAX_TOP_K = 2048  # the largest k of `top_k`: longer lists do not fit the L2 cache, and sorted tiles are faster

Output = tuple[tuple[int, ...], str, float | None]  # shape, dtype, and the number that the kernel expects there


class BoundWeightsPass(BoundCall):
    """A call of a weights pass, which is repeated with other addresses and numbers; see `BoundCall`."""

    call_fields = WEIGHTS_CALL_FIELDS
    min_parallel_multiplications = 1 << 20


@dataclass(frozen=True)
class StatisticArrays:
    """The arrays of one statistic in a weights pass. No parameter refers to an array of the problem.

    outputs : the arrays that the kernel fills
    finish : function (arrays) that returns the statistic's arrays
    """

    outputs: tuple[Output, ...]
    finish: Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class StatisticsPass:
    """The weights pass of one or several statistics.

    call : the bound call of the kernel
    statistics : the arrays of each statistic of the pass
    indices : the index of each statistic in `Problem.see`
    reads_formulas : True if the kernel has the tables and numbers of all formulas of the call
    """

    call: BoundWeightsPass
    statistics: tuple[StatisticArrays, ...]
    indices: tuple[int, ...]
    reads_formulas: bool

    def make_makers(self, framework: Framework) -> list[Callable[[], Any]]:
        """Return the functions that allocate the arrays that the kernel fills, in the order of its arguments."""
        makers = []
        for shape, dtype, filler in [output for statistic in self.statistics for output in statistic.outputs]:
            make = framework.make_empty(shape, dtype)
            makers.append(make if filler is None else partial(_make_filled, make, filler))
        return makers

    def finish(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Return the arrays of each statistic of the pass from the arrays that the kernel filled."""
        own = iter(arrays)
        return [statistic.finish(list(islice(own, len(statistic.outputs)))) for statistic in self.statistics]


def _make_filled(make: Callable[[], Any], filler: float) -> Any:
    array = make()
    array[...] = filler
    return array


Bound = tuple[KernelArguments, StatisticsPass]


def bind_passes(problem: Problem, processor: Processor = HOST) -> list[Bound]:
    """Return the bound weights passes of the problem's statistics, and the arguments of each pass.

    A pass computes at most one grid of cells, one `top_k`, and `MAX_STATISTICS` in all. A matrix, a mean of matrices
    and cells within a rectangle each have their own pass. A statistic that no weights pass can compute is left out, and
    so is a statistic with nothing to compute.
    """
    groups: list[list[int]] = []
    for index, statistic in enumerate(problem.see):
        if not can_serve(problem, statistic):
            continue
        group = next((group for group in groups if _can_join(statistic, [problem.see[k] for k in group])), [])
        if not group:
            groups.append(group)
        group.append(index)
    return [_bind(problem, tuple(group), processor) for group in groups]


def can_serve(problem: Problem, statistic: Statistic) -> bool:
    """True if there is a weights pass for the statistic, and something to compute."""
    of: Any = statistic.unaveraged
    if 0 in problem.extent or not is_in_weights_pass(of) or (statistic.is_mean and of.fill_values != (0.0,)):
        return False
    return min(of.k, problem.m) <= MAX_TOP_K if of.k else 0 not in of.grid(problem.n, problem.m)


def run_first(problem: Problem, lse: Any, bound: Bound) -> list[list[Any]] | None:
    """Return the arrays of each statistic of a pass, for the problem of `bind_passes`; None if the kernel failed."""
    arguments, bound_pass = bound
    lse = np.ascontiguousarray(to_numpy(lse), np.float64)
    arrays = [make() for make in bound_pass.make_makers(framework(problem.query))]
    if bound_pass.call.run_first(arguments, {"lse": lse}, arrays) is None:
        return None
    return bound_pass.finish(arrays)


def _can_join(statistic: Statistic, others: Sequence[Statistic]) -> bool:
    """True if a pass that computes the statistics `others` can compute this one as well."""
    joined = [x.unaveraged for x in (statistic, *others)]
    axes = [x.axes for x in joined]
    is_alone = "" in axes or any(isinstance(x, Reduction) and x.axes == "ij" and x.within for x in joined)
    has_both = axes.count("ij") > 1 or sum([x.k > 0 for x in joined]) > 1
    return not (is_alone or has_both) and len(joined) <= MAX_STATISTICS


def _bind(problem: Problem, indices: tuple[int, ...], processor: Processor) -> Bound:
    """Return the weights pass that computes the statistics with these indices in `Problem.see`, and its arguments.

    The kernel does not read V, the given lse includes the sinks, and the weights are those before dropout. So problems
    that differ only in V, sinks or dropout share one kernel. If a statistic has a formula, the kernel gets the tables
    and numbers of all formulas of the call.
    """
    statistics, of_call = [problem.see[k] for k in indices], formulas_of(problem.see)
    first = statistics[0]
    writer = WeightSums if first.is_mean else WeightStatistics if first.axes else WeightTiles
    kernel = {WeightSums: "weight_sums", WeightTiles: "weights", WeightStatistics: "statistics"}[writer]
    roles = tuple([_role(x.unaveraged, of_call) for x in statistics])
    reads_formulas = any(isinstance(role, ReductionRole) and role.formula for role in roles)
    formulas = (of_call, []) if reads_formulas else ([], of_call)
    k = max(min(x.k, problem.m) for x in statistics)
    arguments = prepare(kernel, problem, processor, *formulas, roles=roles, k=k)
    unit_stride = *arguments.spec.unit_stride[:2], True
    spec = replace(arguments.spec, d_v=1, unit_stride=unit_stride, has_sinks=False, has_dropout=False)
    arguments.spec = spec
    grid = Grid.of(arguments, statistics)
    fields = {"batches": problem.B, **vars(grid)}
    if first.is_mean:
        fields |= _summed_heads(arguments, first)
    call = BoundWeightsPass(arguments, writer, fields)
    arrays = tuple([_describe_arrays(problem, statistic, grid) for statistic in statistics])
    return arguments, StatisticsPass(call, arrays, indices, reads_formulas)


def _role(statistic: Statistic, formulas: Sequence[Expression]) -> str | ReductionRole:
    """Return the role of a statistic in a kernel's spec. `formulas` are those of all statistics of the call."""
    if not isinstance(statistic, Reduction):
        return statistic.name
    how, formula = "sum" if statistic.how == "mean" else statistic.how, 0
    if not statistic.is_plain:
        formula = 2 + next(k for k, each in enumerate(formulas) if each is statistic.pair_formula)
    return ReductionRole(statistic.axes, how, statistic.hidden, formula)


@dataclass(frozen=True)
class Grid:
    """The work items of a pass, and the cells of pooled. The attributes are argument fields of the kernels.

    An item is a range of blocks of queries and a split of the tiles of keys, for each matrix of weights or of their
    sums. Only the weights of the queries and keys within a rectangle are computed.
    """

    items: int
    query_block: int  # queries in a block
    first_query: int
    last_query: int
    first_key: int
    last_key: int
    query_blocks: int  # blocks before the last query
    range_size: int  # blocks in a range
    num_ranges: int
    split_size: int  # tiles in a split
    num_splits: int
    rows: int  # of the cells of pooled; 0 without pooled
    columns: int

    @classmethod
    def of(cls, arguments: KernelArguments, statistics: Sequence[Statistic]) -> Grid:
        """Return the grid of a pass with these statistics.

        The keys have several splits only if all statistics are sums or maxima over queries. A range has several blocks
        only if a statistic is a sum or maximum over queries or over cells.
        """
        problem, block = arguments.problem, arguments.query_block
        n, m, key_blocks = problem.n, problem.m, -(-problem.m // KEY_BLOCK)
        axes = {statistic.axes for statistic in statistics}
        cells = next((x for x in statistics if isinstance(x, Reduction) and x.axes == "ij"), None)
        (first, last), (first_key, last_key) = cells.rectangle(n, m) if cells else ((0, n), (0, m))
        rows, columns = cells.grid(n, m) if cells else (0, 0)
        matrices = problem.B * problem.H // math.prod(statistics[0].summed_axes(problem))
        end_block = -(-last // block)
        splits = -(-TARGET_ITEMS // matrices) if axes == {"i"} else 1
        split_size, num_splits = _equal_parts(key_blocks, splits)
        query_blocks = end_block - first // block
        ranges = query_blocks if axes <= {"", "j"} else -(-TARGET_ITEMS // (num_splits * matrices))
        range_size, num_ranges = _equal_parts(query_blocks, ranges)
        return cls(
            items=matrices * num_ranges * num_splits,
            query_block=block,
            first_query=first,
            last_query=last,
            first_key=first_key,
            last_key=last_key,
            query_blocks=end_block,
            range_size=range_size,
            num_ranges=num_ranges,
            split_size=split_size,
            num_splits=num_splits,
            rows=rows,
            columns=columns,
        )

    def rows_of_range(self, index: int) -> slice:
        """Return the rows of cells that contain queries of a range."""
        first, last, block = self.first_query, self.last_query, self.query_block
        start = (first // block + index * self.range_size) * block
        edges = max(start, first), min(start + self.range_size * block, last) - 1
        low, high = (((i - first + 1) * self.rows - 1) // (last - first) for i in edges)
        return slice(low, high + 1)


def _equal_parts(length: int, count: int) -> tuple[int, int]:
    """Divide a length into at most `count` parts; return (length of a part, number). The last may be shorter."""
    part = -(-length // min(count, length))
    return part, -(-length // part)


def _summed_heads(arguments: KernelArguments, mean: Statistic) -> dict[str, int]:
    """Return the fields of `WeightSums` that say which heads are added, and by which factors."""
    B, H = arguments.problem.B, arguments.problem.H
    factors = np.tile(mean.factors if isinstance(mean.factors, tuple) else np.ones(H), B)  # of every head
    steps = {(False, True): (1, H), (True, False): (H, 1), (True, True): (1, 0), (False, False): (1, 1)}
    step, output_step = steps[mean.over_batch, mean.over_heads]
    count = math.prod(mean.summed_axes(arguments.problem))
    return {"factors": arguments.retain(factors), "count": count, "step": step, "output_step": output_step}


# -- arrays ------------------------------------------------------------------------------------------------------------


def _describe_arrays(problem: Problem, statistic: Statistic, grid: Grid) -> StatisticArrays:
    """Return the arrays of a statistic. By default these are the arrays that the kernel fills."""
    outer, n, m = (*problem.batch_shape, problem.H), problem.n, problem.m
    shapes, dtypes = statistic.shapes(problem, outer, n), statistic.dtypes(problem)
    filler: float | None = None
    finish: Callable[[list[Any]], list[Any]] = list
    if isinstance(statistic, Mean):
        finish = partial(_divide, statistic.divisor(problem), dtypes[0])
        dtypes, filler = (problem.accumulator,), 0.0
    elif statistic.k:
        shapes = ((*outer, n, min(statistic.k, m)),) * 2
        finish = partial(_add_ranks, statistic.k)
    elif isinstance(statistic, Reduction) and statistic.axes != "j":
        how = statistic.map_formulas(lambda _: None)  # the tables of a formula would be kept alive
        if not statistic.axes:
            filler = statistic.hidden
        elif statistic.axes == "ij":
            shapes, dtypes = ((*outer, grid.rows + grid.num_ranges - 1, grid.columns),), ("float64",)
            filler, finish = statistic.hidden, partial(_merge_cells, how, grid, n, m, problem.accumulator)
        else:
            shape = grid.num_ranges, *outer, round_up(m, KEY_BLOCK)
            shapes = (shape, shape) if statistic.finds else ((2, *shape),)
            finish = partial(_merge_extrema if statistic.finds else _merge_sums, how, n, m)
    outputs = tuple([(shape, dtype, filler) for shape, dtype in zip(shapes, dtypes, strict=True)])
    return StatisticArrays(outputs, finish)


def _divide(divisor: int, dtype: str, arrays: list[Any]) -> list[Any]:
    """Return the mean of matrices from their sum."""
    sums = arrays[0] if divisor == 1 else arrays[0].__itruediv__(divisor)
    xp = namespace(sums)
    return [xp.astype(sums, resolve_dtype(xp, dtype), copy=False)]


def _add_ranks(k: int, arrays: list[Any]) -> list[Any]:
    """Return the arrays of `top_k` with k ranks. Ranks beyond the number of keys have weight 0 and key −1."""
    num_ranks = arrays[0].shape[-1]
    if num_ranks == k:
        return arrays
    padded = [empty((*array.shape[:-1], k), dtype_name(array), array) for array in arrays]
    for wide, array, filler in zip(padded, arrays, (0, -1), strict=True):
        wide[..., :num_ranks], wide[..., num_ranks:] = array, filler
    return padded


def _merge_sums(statistic: Reduction, n: int, m: int, arrays: list[Any]) -> list[Any]:
    """Return sums, means or maxima over queries. Each range of queries has its part; they are combined in order."""
    total = reduce(statistic.combine, arrays[0][0, ..., :m])
    return [total / (n if statistic.how == "mean" else 1)]  # a new array without gaps, also if the divisor is 1


def _merge_extrema(statistic: Reduction, n: int, m: int, arrays: list[Any]) -> list[Any]:
    """Return the maxima or minima of all ranges of queries, and their first positions."""
    ranges = zip(*[array[..., :m] for array in arrays], strict=True)
    joined = reduce(partial(join_extrema, statistic.how), ranges)
    return [namespace(array).asarray(array, copy=True) for array in joined]


def _merge_cells(statistic: Reduction, grid: Grid, n: int, m: int, dtype: str, arrays: list[Any]) -> list[Any]:
    """Return the means, sums or maxima of cells. Each range of queries has its part; they are combined in order."""
    (parts,), xp = arrays, namespace(arrays[0])
    cells = parts
    if grid.num_ranges > 1:
        cells = xp.full_like(parts[..., : grid.rows, :], statistic.hidden)
        for index in range(grid.num_ranges):
            own = grid.rows_of_range(index)
            part, total = parts[..., own.start + index : own.stop + index, :], cells[..., own, :]
            cells[..., own, :] = statistic.combine(total, part)
    if statistic.how == "mean":
        cells /= convert(statistic.cell_sizes(n, m), cells)
    cells = cells[..., 0, 0] if statistic.cells is None else cells
    return [xp.astype(cells, resolve_dtype(xp, dtype), copy=False)]
