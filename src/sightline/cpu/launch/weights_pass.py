"""The second pass's calls: what is asked of the weights, cut into items of work as the problem alone decides.

All take the forward pass's lse and answer None where `streaming` must sort it out: a score that is NaN or ∞ shows in
lse, and where scores' last place is more than 1 weights would not add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...arrays import convert, empty, layout, namespace, resolve_dtype, to_numpy
from ...problem import Problem
from ...statistics.matrix import cell_lengths
from ..codegen.abi import pack
from ..kernels.block import KEY_BLOCK
from ..kernels.weights_by_key import MAX_COLUMNS_PER_ITEM, MAX_SPLIT_SIZE, Pooled, Received
from ..kernels.weights_by_query import TopK, WeightTiles
from ..kernels.weights_pass import WeightsPass
from ..runtime.processor import HOST, Processor
from ..runtime.thread_team import thread_count
from .arguments import MAX_LSE, KernelArguments, compile_kernel, fit_machine, make_spec, query_block_size

__all__ = ["MAX_TOP_K", "has_nonfinite", "pooled", "received", "top_k", "weights"]

TARGET_ITEMS = 16  # pieces of work wanted, whatever the number of threads: sums must not depend on it
MAX_TOP_K = 256  # of top_k's k: lists of a block of queries lie on a thread's stack

Range = tuple[int, int]


class WeightsPassCall:
    """A second pass made ready: its kernel, and the words that stay the same from call to call."""

    def __init__(
        self, problem: Problem, lse: Any, writer: type[WeightsPass], kernel: str, processor: Processor, k: int = 0
    ) -> None:
        machine = fit_machine(processor.machine, problem)
        self.problem, self.processor, self.writer = problem, processor, writer
        self.block = query_block_size(problem.dtype, machine)
        self.kernel_arguments = kernel_arguments = KernelArguments(problem, self.block)
        spec = make_spec(kernel, problem, kernel_arguments, vectors=machine.vectors, k=k)
        # values are not read, and lse holds what sinks take: kernels that differ in these alone are one
        spec = replace(spec, d_v=1, unit_stride=(*spec.unit_stride[:2], True), has_sinks=False, has_dropout=False)
        self.kernel = compile_kernel(spec, kernel_arguments, writer, processor)
        self.common_fields = kernel_arguments.fields(spec) | {
            "lse": kernel_arguments.address(np.ascontiguousarray(to_numpy(lse), np.float64)),
            "batches": problem.B,
        }

    def call(
        self, queries: Range, items: int, output: Any, threads: int | None, *keep_alive: Any, **fields: int
    ) -> None:
        """Fill the output, which with `kept` stays in memory until all threads are done."""
        counter = np.zeros(1, np.int64)  # its own: a call that was broken off may still be counting
        fields_of_call = self.common_fields | {
            "counter": counter.ctypes.data,
            "output": layout(output)[0],
            "items": items,
            "first_query": queries[0],
            "last_query": queries[1],
            "query_blocks": -(-queries[1] // self.block),
        }
        argument_words = pack(self.writer.fields, fields_of_call | fields, self.kernel_arguments.table_fields())
        keep_alive = (*self.kernel_arguments.keep_alive, counter, output, *keep_alive)
        self.processor.call(self.kernel, argument_words, min(thread_count(threads), items), keep_alive)


def has_nonfinite(problem: Problem, lse: Any) -> bool:
    """Whether a row's lse is NaN or ∞, or so large that weights e^(S − lse) would not add up to 1."""
    sizes = np.abs(np.where(to_numpy(lse) == -np.inf, 0.0, to_numpy(lse)))
    return not bool(np.max(sizes, initial=0.0) <= MAX_LSE[problem.accumulator])


def received(
    problem: Problem,
    lse: Any,
    how: str = "sum",
    last: int | None = None,
    threads: int | None = None,
    processor: Processor = HOST,
) -> Any:
    """What each key receives from the queries, or from the last so many: Σ_i P_ij, their mean or the largest P_ij.

    Parameters
    ----------
    lse : (..., H, n) float64 in nats, as the forward pass has it
    how : "sum", "mean" (over the queries counted) or "max"
    last : default all

    Returns
    -------
    (..., H, m) in the accumulator's dtype, or None
    """
    if has_nonfinite(problem, lse):
        return None
    n, m, heads = problem.n, problem.m, problem.B * problem.H
    queries = (n - min(n if last is None else last, n), n)
    if 0 in problem.extent or queries[0] == n:
        return _zeros((*problem.batch_shape, problem.H, m), problem)
    weights_pass = WeightsPassCall(problem, lse, Received, "received_max" if how == "max" else "received", processor)
    key_blocks, query_blocks = -(-m // KEY_BLOCK), -(-n // weights_pass.block) - queries[0] // weights_pass.block
    split_size = min(-(-key_blocks // min(-(-TARGET_ITEMS // heads), key_blocks)), MAX_SPLIT_SIZE)
    num_splits = -(-key_blocks // split_size)
    range_size = -(-query_blocks // min(-(-TARGET_ITEMS // (num_splits * heads)), query_blocks))
    num_ranges = -(-query_blocks // range_size)
    partial_results = empty((num_ranges, *problem.batch_shape, problem.H, m), problem.accumulator, problem.query)
    fields = {"split_size": split_size, "num_ranges": num_ranges, "range_size": range_size}
    weights_pass.call(queries, num_splits * num_ranges * heads, partial_results, threads, **fields)
    total = partial_results[0]
    for partial_result in partial_results[1:]:  # one after another
        total = namespace(partial_results).maximum(total, partial_result) if how == "max" else total + partial_result
    return total / (n - queries[0]) if how == "mean" else total


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
    """The exact mean or maximum of P over the cells of a grid.

    Cell (r, c) is queries [⌊r N / rows⌋, ⌊(r + 1) N / rows⌋) by keys likewise, counted from the rectangle's corner.

    Parameters
    ----------
    rows, columns : at most the rectangle's lengths
    how : "mean" or "max"
    within : ((i0, i1), (j0, j1)), default all

    Returns
    -------
    (..., H, rows, columns) in the accumulator's dtype, or None
    """
    if has_nonfinite(problem, lse):
        return None
    queries, keys = ((0, problem.n), (0, problem.m)) if within is None else within
    xp = namespace(problem.query)
    if 0 in (*problem.extent, rows, columns):
        return _zeros((*problem.batch_shape, problem.H, rows, columns), problem)
    cells = _reduce_cells(problem, lse, (rows, columns), how, queries, keys, threads, processor)
    if how == "mean":
        cells /= convert(cell_lengths(*queries, rows)[:, None] * cell_lengths(*keys, columns), problem.query)
    return xp.astype(cells, resolve_dtype(xp, problem.accumulator), copy=False)


def _reduce_cells(
    problem: Problem,
    lse: Any,
    grid: Range,
    how: str,
    queries: Range,
    keys: Range,
    threads: int | None,
    processor: Processor,
) -> Any:
    """Sums or maxima over the cells of a rectangle, (..., H, rows, columns) float64."""
    weights_pass = WeightsPassCall(problem, lse, Pooled, "pooled_max" if how == "max" else "pooled", processor)
    (rows, columns), heads = grid, problem.B * problem.H
    columns_per_item = min(columns, MAX_COLUMNS_PER_ITEM)
    column_items = -(-columns // columns_per_item)
    # a block of queries that lies in two items costs twice, so items take a few blocks at least
    max_rows = max((queries[1] - queries[0]) // (4 * weights_pass.block), 1)
    row_subdivisions = max(
        min(-(-TARGET_ITEMS // (heads * column_items * rows)), max_rows // rows), 1
    )  # rows of cells made of so many each
    fine_rows = rows * row_subdivisions
    rows_per_item = min(max(-(-fine_rows * heads * column_items // TARGET_ITEMS), -(-fine_rows // max_rows)), fine_rows)
    fields = {
        "rows": fine_rows,
        "rows_per_item": rows_per_item,
        "columns": columns,
        "columns_per_item": columns_per_item,
        "first_key": keys[0],
        "last_key": keys[1],
    }
    fine_cells = _zeros((*problem.batch_shape, problem.H, fine_rows, columns), problem, "float64")
    weights_pass.call(queries, heads * column_items * -(-fine_rows // rows_per_item), fine_cells, threads, **fields)
    xp = namespace(fine_cells)
    cell_parts = xp.reshape(fine_cells, (*problem.batch_shape, problem.H, rows, row_subdivisions, columns))
    return xp.max(cell_parts, axis=-2) if how == "max" else xp.sum(cell_parts, axis=-2)


def top_k(problem: Problem, lse: Any, k: int, threads: int | None = None, processor: Processor = HOST) -> Any:
    """Each query's k largest weights, descending, and their keys; of equal scores the smaller key first.

    Returns
    -------
    weights : (..., H, n, k) in the accumulator's dtype, 0 past the keys seen
    where : (..., H, n, k) int64, −1 past the keys seen
        None in place of both also where k is over `MAX_TOP_K`.
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
    """P of some queries on some keys, before dropout.

    Parameters
    ----------
    rows, columns : of steps of 1

    Returns
    -------
    (..., H, rows, columns), or None
    """
    if has_nonfinite(problem, lse):
        return None
    queries, keys = _resolve_slice(rows, problem.n), _resolve_slice(columns, problem.m)
    shape = (*problem.batch_shape, problem.H, queries[1] - queries[0], keys[1] - keys[0])
    output = _zeros(shape, problem, problem.dtype)
    if 0 in shape:
        return output
    weights_pass = WeightsPassCall(problem, lse, WeightTiles, "weights", processor)
    blocks = -(-queries[1] // weights_pass.block) - queries[0] // weights_pass.block
    weights_pass.call(queries, problem.B * problem.H * blocks, output, threads, first_key=keys[0], last_key=keys[1])
    return output


def _resolve_slice(selection: slice, length: int) -> Range:
    """First and past the last of what a slice takes."""
    first, last, _ = selection.indices(length)
    return first, max(first, last)


def _zeros(shape: tuple[int, ...], problem: Problem, name: str | None = None) -> Any:
    """Zeros in the query's library, of the accumulator's dtype unless another is named."""
    xp = namespace(problem.query)
    return xp.zeros(shape, dtype=resolve_dtype(xp, name or problem.accumulator), device=problem.query.device)
