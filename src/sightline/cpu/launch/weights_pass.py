"""The calls of the weights pass: statistics of weights, whose items of work follow from the problem alone.

The functions `received`, `pooled`, `top_k` and `weights` take lse (..., H, n), float64 in nats, of the forward pass.
They return None if `has_nonfinite` is true: if an lse, and therefore a score, is NaN or +∞, or if an lse is so large
that the weights would not sum to 1. The kernel `Streaming` must then compute the statistic. `bind` returns the same
computation as a `BoundStatistic`, which repeats it for other arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays import convert, empty, layout, namespace, resolve_dtype, to_numpy
from ...kernel import MAX_LSE
from ...problem import Problem
from ...statistics import Pooled, Received, Statistic, TopK, Weights
from ...statistics.matrix import cell_lengths
from ..codegen.abi import WEIGHTS_CALL_FIELDS, call_words
from ..kernels import weights_by_key, weights_by_query
from ..kernels.kernel_spec import KEY_BLOCK
from ..kernels.weights_by_key import MAX_COLUMNS_PER_ITEM, MAX_SPLIT_SIZE
from ..kernels.weights_pass import WeightsPass
from ..runtime.processor import HOST, Processor
from ..runtime.thread_count import thread_count
from .arguments import TARGET_ITEMS, KernelArguments, prepare, zeros
from .bound_call import BoundCall

__all__ = [
    "MAX_TOP_K",
    "BoundStatistic",
    "bind",
    "has_nonfinite",
    "pooled",
    "received",
    "run_first",
    "top_k",
    "weights",
]

MAX_TOP_K = 256  # the largest k of `top_k`: the lists for a block of queries are on a thread's stack
MIN_PARALLEL_MULTIPLICATIONS = 1 << 20  # with fewer multiplications a second thread costs more than it saves

Range = tuple[int, int]
Output = tuple[tuple[int, ...], str, bool]  # shape, dtype, and True if the kernel expects zeros


class WeightsPassCall(BoundCall):
    """A call of a weights pass. `arguments` are those of the problem that it was made for.

    The field `output` may be followed by a second array, `where`.
    """

    call_fields = WEIGHTS_CALL_FIELDS

    def __init__(
        self, arguments: KernelArguments, spec: Any, writer: type[WeightsPass], items: int, **more: Any
    ) -> None:
        problem, processor = arguments.problem, more.pop("processor")
        work = problem.B * problem.H * problem.n * problem.m * problem.d_k
        values = {"items": items, "batches": problem.B} | more
        super().__init__(
            arguments,
            spec,
            writer,
            values,
            processor,
            max_threads=1 if work < MIN_PARALLEL_MULTIPLICATIONS else items,
            workspace={"counter": 1},
            zeroed=("counter",),
        )


@dataclass(frozen=True)
class BoundStatistic:
    """The weights pass of one statistic for one structure.

    Parameters
    ----------
    outputs : the arrays that the kernel fills
    finish : function (arrays) that returns the statistic's arrays
    """

    call: WeightsPassCall
    outputs: tuple[Output, ...]
    finish: Callable[[list[Any]], list[Any]]

    def run(
        self,
        threads: int | None,
        operands: Sequence[int],
        inputs: Sequence[int],
        numbers: tuple[float, ...],
        query: Any,
        keep_alive: tuple[Any, ...],
        is_first: bool = False,
    ) -> list[Any] | None:
        """Return the statistic's arrays; None if the call needs the full dispatch.

        Parameters
        ----------
        operands : the addresses of query, key and lse
        inputs : the addresses of the tables, and the words of the numbers of the formulas
        query : an array in whose library, and on whose device, the outputs are allocated
        numbers, keep_alive, is_first : as in `BoundCall.run`
        """
        arrays = [(zeros if is_zeroed else empty)(shape, dtype, query) for shape, dtype, is_zeroed in self.outputs]
        addresses = [*[layout(array)[0] for array in arrays], 0][:2]
        words = [*operands, *addresses, *inputs]
        if self.call.run(threads, words, numbers, None, (keep_alive, arrays), is_first) is None:
            return None
        return self.finish(arrays)


Bound = tuple[KernelArguments, BoundStatistic]


def _bind(
    problem: Problem, writer: type[WeightsPass], kernel: str, processor: Processor, k: int = 0
) -> tuple[KernelArguments, Callable[..., WeightsPassCall]]:
    """Return the arguments of a weights pass, and a function (items, **fields) that binds its call."""
    arguments, spec = prepare(kernel, problem, processor, k=k)
    # The kernel does not read V, the given lse includes the sinks, and the weights are those before dropout. So
    # problems that differ only in V, sinks or dropout share one kernel.
    spec = replace(spec, d_v=1, unit_stride=(*spec.unit_stride[:2], True), has_sinks=False, has_dropout=False)

    def bind_call(queries: Range, items: int, **fields: int) -> WeightsPassCall:
        blocks = -(-queries[1] // arguments.query_block)
        fields |= {"first_query": queries[0], "last_query": queries[1], "query_blocks": blocks}
        return WeightsPassCall(arguments, spec, writer, items, processor=processor, **fields)

    return arguments, bind_call


def bind(problem: Problem, statistic: Statistic, processor: Processor = HOST) -> Bound | None:
    """Return a statistic's bound weights pass and its arguments.

    The result is None if there is no weights pass for the statistic, or nothing to compute.
    """
    if 0 in problem.extent:
        return None
    if isinstance(statistic, TopK):
        return (
            _bind_top_k(problem, statistic.k, processor)
            if min(statistic.k, problem.m) in range(1, MAX_TOP_K + 1)
            else None
        )
    if isinstance(statistic, Received):
        return _bind_received(problem, statistic.how, processor)
    if isinstance(statistic, Pooled):
        grid = statistic.down, statistic.across
        return _bind_pooled(problem, *grid, statistic.how, statistic.within, processor) if all(grid) else None
    if isinstance(statistic, Weights):
        return _bind_weights(problem, (0, problem.n), (0, problem.m), processor)
    return None


def run_first(problem: Problem, lse: Any, bound: Bound | None, threads: int | None) -> list[Any] | None:
    """Return the arrays of a statistic for the problem that it was bound for; None if `has_nonfinite` is true."""
    if bound is None or has_nonfinite(problem, lse):
        return None
    arguments, statistic = bound
    thread_count(threads)  # raises an error if a setting is wrong, even if one thread suffices
    lse = np.ascontiguousarray(to_numpy(lse), np.float64)
    operands = [layout(arguments.arrays[name])[0] for name in ("query", "key")]
    inputs = call_words([table.ctypes.data for table in arguments.tables], arguments.numbers, ())
    keep_alive = (*arguments.keep_alive, lse)
    return statistic.run(
        threads, [*operands, lse.ctypes.data], inputs, arguments.numbers, problem.query, keep_alive, is_first=True
    )


def has_nonfinite(problem: Problem, lse: Any) -> bool:
    """True if an lse is NaN or +∞, or so large that the weights e^(S − lse) would not sum to 1."""
    magnitudes = np.abs(np.where(to_numpy(lse) == -np.inf, 0.0, to_numpy(lse)))
    return not bool(np.max(magnitudes, initial=0.0) <= MAX_LSE[problem.accumulator])


def received(
    problem: Problem, lse: Any, how: str = "sum", threads: int | None = None, processor: Processor = HOST
) -> Any:
    """Return the weight each key receives from the queries: the sum, mean or maximum over i of P_ij.

    Parameters
    ----------
    how : "sum", "mean" or "max"

    Returns
    -------
    (..., H, m) in the accumulator's dtype; None if `has_nonfinite` is true: streaming must compute the result
    """
    if 0 in problem.extent and not has_nonfinite(problem, lse):
        return zeros((*problem.batch_shape, problem.H, problem.m), problem.accumulator, problem.query)
    found = run_first(problem, lse, _bind_received(problem, how, processor), threads)
    return None if found is None else found[0]


def _bind_received(problem: Problem, how: str, processor: Processor) -> Bound:
    arguments, bind_call = _bind(
        problem, weights_by_key.Received, "received_max" if how == "max" else "received", processor
    )
    n, m, heads = problem.n, problem.m, problem.B * problem.H
    key_blocks, query_blocks = -(-m // KEY_BLOCK), -(-n // arguments.query_block)
    split_size = min(-(-key_blocks // min(-(-TARGET_ITEMS // heads), key_blocks)), MAX_SPLIT_SIZE)
    num_splits = -(-key_blocks // split_size)
    range_size = -(-query_blocks // min(-(-TARGET_ITEMS // (num_splits * heads)), query_blocks))
    num_ranges = -(-query_blocks // range_size)
    fields = {"split_size": split_size, "num_ranges": num_ranges, "range_size": range_size}
    call = bind_call((0, n), num_splits * num_ranges * heads, **fields)

    def finish(arrays: list[Any]) -> list[Any]:
        (parts,) = arrays
        total = parts[0]
        for part in parts[1:]:  # the parts are combined in the order of their queries
            total = namespace(parts).maximum(total, part) if how == "max" else total + part
        return [total / n if how == "mean" else total]

    shape = num_ranges, *problem.batch_shape, problem.H, m
    return arguments, BoundStatistic(call, ((shape, problem.accumulator, False),), finish)


def pooled(
    problem: Problem,
    lse: Any,
    rows: int,
    columns: int,
    how: str = "mean",
    within: tuple[Range, Range] | None = None,
    threads: int | None = None,
    processor: Processor = HOST,
) -> Any:
    """Return the exact mean or maximum of P over the cells of a grid on a rectangle of queries and keys.

    Cell (r, c) contains the queries [⌊r N / rows⌋, ⌊(r + 1) N / rows⌋) of the rectangle's N, and keys likewise.

    Parameters
    ----------
    rows, columns : at most the rectangle's lengths
    how : "mean" or "max"
    within : the rectangle ((i0, i1), (j0, j1)), default all queries and keys

    Returns
    -------
    (..., H, rows, columns) in the accumulator's dtype; None if `has_nonfinite` is true
    """
    if 0 in (*problem.extent, rows, columns) and not has_nonfinite(problem, lse):
        return zeros((*problem.batch_shape, problem.H, rows, columns), problem.accumulator, problem.query)
    found = run_first(problem, lse, _bind_pooled(problem, rows, columns, how, within, processor), threads)
    return None if found is None else found[0]


def _bind_pooled(
    problem: Problem, rows: int, columns: int, how: str, within: tuple[Range, Range] | None, processor: Processor
) -> Bound:
    queries, keys = ((0, problem.n), (0, problem.m)) if within is None else within
    arguments, bind_call = _bind(problem, weights_by_key.Pooled, "pooled_max" if how == "max" else "pooled", processor)
    heads, columns_per_item = problem.B * problem.H, min(columns, MAX_COLUMNS_PER_ITEM)
    column_items = -(-columns // columns_per_item)
    # Two items that share a block of queries both compute it, so an item has at least 4 blocks.
    max_rows = max((queries[1] - queries[0]) // (4 * arguments.query_block), 1)
    subdivisions = max(min(-(-TARGET_ITEMS // (heads * column_items * rows)), max_rows // rows), 1)
    fine_rows = rows * subdivisions  # the kernel divides each row of cells into finer rows
    rows_per_item = min(max(-(-fine_rows * heads * column_items // TARGET_ITEMS), -(-fine_rows // max_rows)), fine_rows)
    fields = {"rows": fine_rows, "rows_per_item": rows_per_item, "first_key": keys[0], "last_key": keys[1]}
    fields |= {"columns": columns, "columns_per_item": columns_per_item}
    call = bind_call(queries, heads * column_items * -(-fine_rows // rows_per_item), **fields)
    lead, accumulator = (*problem.batch_shape, problem.H), problem.accumulator
    cell_sizes = cell_lengths(*queries, rows)[:, None] * cell_lengths(*keys, columns)

    def finish(arrays: list[Any]) -> list[Any]:
        (cells,), xp = arrays, namespace(arrays[0])
        cells = xp.reshape(cells, (*lead, rows, subdivisions, columns))
        cells = xp.max(cells, axis=-2) if how == "max" else xp.sum(cells, axis=-2)
        if how == "mean":
            cells /= convert(cell_sizes, cells)
        return [xp.astype(cells, resolve_dtype(xp, accumulator), copy=False)]

    return arguments, BoundStatistic(call, (((*lead, fine_rows, columns), "float64", True),), finish)


def top_k(problem: Problem, lse: Any, k: int, threads: int | None = None, processor: Processor = HOST) -> Any:
    """Return each query's k largest weights, descending, and their keys; of equal weights the smaller key comes first.

    Returns
    -------
    weights : (..., H, n, k) in the accumulator's dtype; 0 at ranks without a visible key
    where : (..., H, n, k) int64; −1 at ranks without a visible key
        Instead of the pair, None is returned if `has_nonfinite` is true or min(k, m) exceeds `MAX_TOP_K`.
    """
    num_ranks = min(k, problem.m)
    if has_nonfinite(problem, lse) or num_ranks > MAX_TOP_K:
        return None
    if 0 in (problem.B, problem.H, problem.n, num_ranks):
        shape = (*problem.batch_shape, problem.H, problem.n, k)
        weights, where = (zeros(shape, name, problem.query) for name in (problem.accumulator, "int64"))
        return weights, where - 1
    found = run_first(problem, lse, _bind_top_k(problem, k, processor), threads)
    return None if found is None else tuple(found)


def _bind_top_k(problem: Problem, k: int, processor: Processor) -> Bound:
    num_ranks = min(k, problem.m)
    arguments, bind_call = _bind(problem, weights_by_query.TopK, "top_k", processor, num_ranks)
    blocks = -(-problem.n // arguments.query_block)
    call = bind_call((0, problem.n), problem.B * problem.H * blocks)
    shape = (*problem.batch_shape, problem.H, problem.n)

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
    outputs = tuple([((*shape, num_ranks), dtype, False) for dtype in dtypes])
    return arguments, BoundStatistic(call, outputs, finish)


def weights(
    problem: Problem,
    lse: Any,
    rows: slice = slice(None),
    columns: slice = slice(None),
    threads: int | None = None,
    processor: Processor = HOST,
) -> Any:
    """Return P of a range of queries on a range of keys, before dropout.

    Parameters
    ----------
    rows, columns : slices of queries and keys with step 1

    Returns
    -------
    (..., H, rows, columns) in the input's dtype; None if `has_nonfinite` is true
    """
    if has_nonfinite(problem, lse):
        return None
    queries, keys = _resolve_slice(rows, problem.n), _resolve_slice(columns, problem.m)
    shape = (*problem.batch_shape, problem.H, queries[1] - queries[0], keys[1] - keys[0])
    if 0 in shape:
        return zeros(shape, problem.dtype, problem.query)
    found = run_first(problem, lse, _bind_weights(problem, queries, keys, processor), threads)
    return None if found is None else found[0]


def _bind_weights(problem: Problem, queries: Range, keys: Range, processor: Processor) -> Bound:
    arguments, bind_call = _bind(problem, weights_by_query.WeightTiles, "weights", processor)
    blocks = -(-queries[1] // arguments.query_block) - queries[0] // arguments.query_block
    call = bind_call(queries, problem.B * problem.H * blocks, first_key=keys[0], last_key=keys[1])
    shape = (*problem.batch_shape, problem.H, queries[1] - queries[0], keys[1] - keys[0])
    return arguments, BoundStatistic(call, ((shape, problem.dtype, True),), list)


def _resolve_slice(selection: slice, length: int) -> Range:
    """Return the first index and one past the last index of a slice."""
    first, last, _ = selection.indices(length)
    return first, max(first, last)
