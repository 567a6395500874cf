"""The calls of the weights pass: statistics of weights, whose items of work follow from the problem alone.

The functions `received`, `pooled`, `top_k` and `weights` take lse (..., H, n), float64 in nats, of the forward pass.
They return None if `has_nonfinite` is true: if an lse, and therefore a score, is NaN or +∞, or if an lse is so large
that the weights would not sum to 1. The kernel `Streaming` must then compute the statistic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...arrays import convert, empty, layout, namespace, resolve_dtype, to_numpy
from ...kernel import MAX_LSE
from ...problem import Problem
from ...statistics.matrix import cell_lengths
from ..kernels.kernel_spec import KEY_BLOCK
from ..kernels.weights_by_key import MAX_COLUMNS_PER_ITEM, MAX_SPLIT_SIZE, Pooled, Received
from ..kernels.weights_by_query import TopK, WeightTiles
from ..kernels.weights_pass import WeightsPass
from ..runtime.processor import HOST, Processor
from ..runtime.thread_count import thread_count
from .arguments import TARGET_ITEMS, compile_kernel, prepare, zeros

__all__ = ["MAX_TOP_K", "has_nonfinite", "pooled", "received", "top_k", "weights"]

MAX_TOP_K = 256  # the largest k of `top_k`: the lists for a block of queries are on a thread's stack

Range = tuple[int, int]


class WeightsPassCall:
    """A weights pass: its compiled kernel, and the fields that are the same in every call."""

    def __init__(
        self, problem: Problem, lse: Any, writer: type[WeightsPass], kernel: str, processor: Processor, k: int = 0
    ) -> None:
        self.processor, self.writer = processor, writer
        self.arguments, spec = prepare(kernel, problem, processor.machine, k=k)
        self.block = self.arguments.query_block
        # The kernel does not read V, the given lse includes the sinks, and the weights are those before dropout.
        # So problems that differ only in V, sinks or dropout share one kernel.
        spec = replace(spec, d_v=1, unit_stride=(*spec.unit_stride[:2], True), has_sinks=False, has_dropout=False)
        self.kernel = compile_kernel(spec, self.arguments, writer, processor)
        lse_address = self.arguments.retain(np.ascontiguousarray(to_numpy(lse), np.float64))
        self.common_fields = self.arguments.fields(spec) | {"lse": lse_address, "batches": problem.B}

    def call(self, queries: Range, items: int, output: Any, threads: int | None, *arrays: Any, **fields: int) -> None:
        """Fill the output. The output and `arrays` stay alive until all threads are done."""
        counter = np.zeros(1, np.int64)  # a counter per call: threads of an interrupted call may still use the old one
        fields |= {
            "counter": counter.ctypes.data,
            "output": layout(output)[0],
            "items": items,
            "first_query": queries[0],
            "last_query": queries[1],
            "query_blocks": -(-queries[1] // self.block),
        }
        packed = self.arguments.pack(self.writer.fields, self.common_fields | fields)
        keep_alive = (*self.arguments.keep_alive, counter, output, *arrays)
        self.processor.call(self.kernel, packed, min(thread_count(threads), items), keep_alive)


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
    if has_nonfinite(problem, lse):
        return None
    n, m, heads, accumulator = problem.n, problem.m, problem.B * problem.H, problem.accumulator
    if 0 in problem.extent:
        return zeros((*problem.batch_shape, problem.H, m), accumulator, problem.query)
    weights_pass = WeightsPassCall(problem, lse, Received, "received_max" if how == "max" else "received", processor)
    key_blocks, query_blocks = -(-m // KEY_BLOCK), -(-n // weights_pass.block)
    split_size = min(-(-key_blocks // min(-(-TARGET_ITEMS // heads), key_blocks)), MAX_SPLIT_SIZE)
    num_splits = -(-key_blocks // split_size)
    range_size = -(-query_blocks // min(-(-TARGET_ITEMS // (num_splits * heads)), query_blocks))
    num_ranges = -(-query_blocks // range_size)
    parts = empty((num_ranges, *problem.batch_shape, problem.H, m), accumulator, problem.query)
    fields = {"split_size": split_size, "num_ranges": num_ranges, "range_size": range_size}
    weights_pass.call((0, n), num_splits * num_ranges * heads, parts, threads, **fields)
    total = parts[0]
    for part in parts[1:]:  # the parts are combined in the order of their queries
        total = namespace(parts).maximum(total, part) if how == "max" else total + part
    return total / n if how == "mean" else total


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
    if has_nonfinite(problem, lse):
        return None
    queries, keys = ((0, problem.n), (0, problem.m)) if within is None else within
    xp = namespace(problem.query)
    if 0 in (*problem.extent, rows, columns):
        return zeros((*problem.batch_shape, problem.H, rows, columns), problem.accumulator, problem.query)
    weights_pass = WeightsPassCall(problem, lse, Pooled, "pooled_max" if how == "max" else "pooled", processor)
    heads, columns_per_item = problem.B * problem.H, min(columns, MAX_COLUMNS_PER_ITEM)
    column_items = -(-columns // columns_per_item)
    # Two items that share a block of queries both compute it, so an item has at least 4 blocks.
    max_rows = max((queries[1] - queries[0]) // (4 * weights_pass.block), 1)
    subdivisions = max(min(-(-TARGET_ITEMS // (heads * column_items * rows)), max_rows // rows), 1)
    fine_rows = rows * subdivisions  # the kernel divides each row of cells into finer rows
    rows_per_item = min(max(-(-fine_rows * heads * column_items // TARGET_ITEMS), -(-fine_rows // max_rows)), fine_rows)
    fields = {"rows": fine_rows, "rows_per_item": rows_per_item, "first_key": keys[0], "last_key": keys[1]}
    fields |= {"columns": columns, "columns_per_item": columns_per_item}
    cells = zeros((*problem.batch_shape, problem.H, fine_rows, columns), "float64", problem.query)
    weights_pass.call(queries, heads * column_items * -(-fine_rows // rows_per_item), cells, threads, **fields)
    cells = xp.reshape(cells, (*problem.batch_shape, problem.H, rows, subdivisions, columns))
    cells = xp.max(cells, axis=-2) if how == "max" else xp.sum(cells, axis=-2)
    if how == "mean":
        cells /= convert(cell_lengths(*queries, rows)[:, None] * cell_lengths(*keys, columns), problem.query)
    return xp.astype(cells, resolve_dtype(xp, problem.accumulator), copy=False)


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
    shape = (*problem.batch_shape, problem.H, problem.n)
    weights, where = (empty((*shape, k), name, problem.query) for name in (problem.accumulator, "int64"))
    weights[..., num_ranks:], where[..., num_ranks:] = 0, -1
    if 0 in (problem.B, problem.H, problem.n, num_ranks):
        return weights, where
    weights_pass = WeightsPassCall(problem, lse, TopK, "top_k", processor, num_ranks)
    ranked = (weights, where)
    if num_ranks < k:
        ranked = tuple(empty((*shape, num_ranks), name, problem.query) for name in (problem.accumulator, "int64"))
    items = problem.B * problem.H * -(-problem.n // weights_pass.block)
    weights_pass.call((0, problem.n), items, ranked[0], threads, ranked[1], where=layout(ranked[1])[0])
    if num_ranks < k:
        weights[..., :num_ranks], where[..., :num_ranks] = ranked
    return weights, where


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
    output = zeros(shape, problem.dtype, problem.query)
    if 0 in shape:
        return output
    weights_pass = WeightsPassCall(problem, lse, WeightTiles, "weights", processor)
    blocks = -(-queries[1] // weights_pass.block) - queries[0] // weights_pass.block
    weights_pass.call(queries, problem.B * problem.H * blocks, output, threads, first_key=keys[0], last_key=keys[1])
    return output


def _resolve_slice(selection: slice, length: int) -> Range:
    """Return the first index and one past the last index of a slice."""
    first, last, _ = selection.indices(length)
    return first, max(first, last)
