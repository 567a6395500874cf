"""The second pass's calls: what is asked of the weights, cut into items of work as the problem alone decides.

All take the forward pass's lse and answer None where `streaming` must sort it out: a score that is NaN or ∞ shows in
lse, and where scores' last place is more than 1 weights would not add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...arrays import convert, empty, layout, namespace, resolve, to_numpy
from ...problem import Problem
from ...statistics.matrix import lengths
from ..codegen.abi import pack
from ..kernels.block import KEYS
from ..kernels.weights_by_key import CELLS, PART, Pooled, Received
from ..kernels.weights_by_query import TopK, WeightTiles
from ..kernels.weights_pass import Observe
from ..runtime.processor import HOST, Processor
from ..runtime.thread_team import count
from .arguments import LARGEST_LSE, Inputs, block_of, fitted, kernel_of, structure_of

__all__ = ["MOST", "pooled", "received", "tainted", "top_k", "weights"]

ITEMS = 16  # pieces of work wanted, whatever the number of threads: sums must not depend on it
MOST = 256  # of top_k's k: lists of a block of queries lie on a thread's stack

Range = tuple[int, int]


class SecondPass:
    """A second pass made ready: its kernel, and the words that stay the same from call to call."""

    def __init__(
        self, problem: Problem, lse: Any, writer: type[Observe], kernel: str, processor: Processor, k: int = 0
    ) -> None:
        machine = fitted(processor.machine, problem)
        self.problem, self.processor, self.writer = problem, processor, writer
        self.block = block_of(problem.dtype, machine)
        self.inputs = inputs = Inputs(problem, self.block)
        structure = structure_of(kernel, problem, inputs, vectors=machine.vectors, k=k)
        # values are not read, and lse holds what sinks take: kernels that differ in these alone are one
        structure = replace(structure, d_v=1, unit=(*structure.unit[:2], True), sinks=False, dropout=False)
        self.kernel = kernel_of(structure, inputs, writer, processor)
        self.words = inputs.fields(structure) | {
            "lse": inputs.address(np.ascontiguousarray(to_numpy(lse), np.float64)),
            "batches": problem.B,
        }

    def call(self, queries: Range, items: int, output: Any, threads: int | None, *kept: Any, **fields: int) -> None:
        """Fill the output, which with `kept` stays in memory until all threads are done."""
        counter = np.zeros(1, np.int64)  # its own: a call that was broken off may still be counting
        given = self.words | {
            "counter": counter.ctypes.data,
            "output": layout(output)[0],
            "items": items,
            "first_query": queries[0],
            "last_query": queries[1],
            "query_blocks": -(-queries[1] // self.block),
        }
        words = pack(self.writer.fields, given | fields, self.inputs.table_words())
        kept = (*self.inputs.kept, counter, output, *kept)
        self.processor.call(self.kernel, words, min(count(threads), items), kept)


def tainted(problem: Problem, lse: Any) -> bool:
    """Whether a row's lse is NaN or ∞, or so large that weights e^(S − lse) would not add up to 1."""
    sizes = np.abs(np.where(to_numpy(lse) == -np.inf, 0.0, to_numpy(lse)))
    return not bool(np.max(sizes, initial=0.0) <= LARGEST_LSE[problem.accumulator])


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
    if tainted(problem, lse):
        return None
    n, m, heads = problem.n, problem.m, problem.B * problem.H
    queries = (n - min(n if last is None else last, n), n)
    if 0 in problem.extent or queries[0] == n:
        return _zeros((*problem.lead, problem.H, m), problem)
    ready = SecondPass(problem, lse, Received, "received_max" if how == "max" else "received", processor)
    blocks, across = -(-m // KEYS), -(-n // ready.block) - queries[0] // ready.block
    chunk = min(-(-blocks // min(-(-ITEMS // heads), blocks)), PART)
    parts = -(-blocks // chunk)
    step = -(-across // min(-(-ITEMS // (parts * heads)), across))
    ranges = -(-across // step)
    found = empty((ranges, *problem.lead, problem.H, m), problem.accumulator, problem.query)
    fields = {"chunk": chunk, "ranges": ranges, "range": step}
    ready.call(queries, parts * ranges * heads, found, threads, **fields)
    total = found[0]
    for part in found[1:]:  # one after another
        total = namespace(found).maximum(total, part) if how == "max" else total + part
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
    if tainted(problem, lse):
        return None
    queries, keys = ((0, problem.n), (0, problem.m)) if within is None else within
    xp = namespace(problem.query)
    if 0 in (*problem.extent, rows, columns):
        return _zeros((*problem.lead, problem.H, rows, columns), problem)
    found = _cells(problem, lse, (rows, columns), how, queries, keys, threads, processor)
    if how == "mean":
        found /= convert(lengths(*queries, rows)[:, None] * lengths(*keys, columns), problem.query)
    return xp.astype(found, resolve(xp, problem.accumulator), copy=False)


def _cells(
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
    ready = SecondPass(problem, lse, Pooled, "pooled_max" if how == "max" else "pooled", processor)
    (rows, columns), heads = grid, problem.B * problem.H
    columns_together = min(columns, CELLS)
    across = -(-columns // columns_together)
    # a block of queries that lies in two items costs twice, so items take a few blocks at least
    most = max((queries[1] - queries[0]) // (4 * ready.block), 1)
    finer = max(min(-(-ITEMS // (heads * across * rows)), most // rows), 1)  # rows of cells made of so many each
    fine = rows * finer
    together = min(max(-(-fine * heads * across // ITEMS), -(-fine // most)), fine)
    fields = {
        "rows": fine,
        "rows_together": together,
        "columns": columns,
        "columns_together": columns_together,
        "first_key": keys[0],
        "last_key": keys[1],
    }
    found = _zeros((*problem.lead, problem.H, fine, columns), problem, "float64")
    ready.call(queries, heads * across * -(-fine // together), found, threads, **fields)
    xp = namespace(found)
    parts = xp.reshape(found, (*problem.lead, problem.H, rows, finer, columns))
    return xp.max(parts, axis=-2) if how == "max" else xp.sum(parts, axis=-2)


def top_k(problem: Problem, lse: Any, k: int, threads: int | None = None, processor: Processor = HOST) -> Any:
    """Each query's k largest weights, descending, and their keys; of equal scores the smaller key first.

    Returns
    -------
    weights : (..., H, n, k) in the accumulator's dtype, 0 past the keys seen
    where : (..., H, n, k) int64, −1 past the keys seen
        None in place of both also where k is over `MOST`.
    """
    kept = min(k, problem.m)
    if tainted(problem, lse) or kept > MOST:
        return None
    shape = (*problem.lead, problem.H, problem.n)
    found, where = (empty((*shape, k), name, problem.query) for name in (problem.accumulator, "int64"))
    found[..., kept:], where[..., kept:] = 0, -1
    if 0 in (problem.B, problem.H, problem.n, kept):
        return found, where
    ready = SecondPass(problem, lse, TopK, "top_k", processor, kept)
    whole = (found, where)
    if kept < k:
        whole = tuple(empty((*shape, kept), name, problem.query) for name in (problem.accumulator, "int64"))
    items = problem.B * problem.H * -(-problem.n // ready.block)
    ready.call((0, problem.n), items, whole[0], threads, whole[1], where=layout(whole[1])[0])
    if kept < k:
        found[..., :kept], where[..., :kept] = whole
    return found, where


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
    if tainted(problem, lse):
        return None
    queries, keys = _span(rows, problem.n), _span(columns, problem.m)
    shape = (*problem.lead, problem.H, queries[1] - queries[0], keys[1] - keys[0])
    found = _zeros(shape, problem, problem.dtype)
    if 0 in shape:
        return found
    ready = SecondPass(problem, lse, WeightTiles, "weights", processor)
    blocks = -(-queries[1] // ready.block) - queries[0] // ready.block
    ready.call(queries, problem.B * problem.H * blocks, found, threads, first_key=keys[0], last_key=keys[1])
    return found


def _span(part: slice, length: int) -> Range:
    """First and past the last of what a slice takes."""
    first, last, _ = part.indices(length)
    return first, max(first, last)


def _zeros(shape: tuple[int, ...], problem: Problem, name: str | None = None) -> Any:
    """Zeros in the query's library, of the accumulator's dtype unless another is named."""
    xp = namespace(problem.query)
    return xp.zeros(shape, dtype=resolve(xp, name or problem.accumulator), device=problem.query.device)
