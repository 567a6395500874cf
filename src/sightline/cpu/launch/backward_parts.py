"""The backward pass of a long problem in parts, so that the memory besides the gradients does not grow with n.

The CPU's backward kernel divides the keys into splits, and each split has its own sum of the queries' gradients. With
few heads and many queries these sums are larger than all other arrays, so the queries are divided too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ...arrays.operations import detach, itemsize
from ...call.gradient_parts import differentiate_sinks, is_lse_too_large
from ...call.kernel import GivenGradients, Gradients
from ...call.problem import Problem
from ...formula.tile_ranges import find_runs, find_tile_ranges
from ...partition.parts import part_of
from ..runtime.processor import Processor
from .arguments import TARGET_ITEMS, zeros
from .backward import backward

MAX_SUM_BYTES = 64 << 20  # the largest size of the splits' sums in one part
MIN_SPLIT_BYTES = 2 * MAX_SUM_BYTES  # smaller sums are not divided
MAX_KEYS = 1 << 16  # the most keys of a part
KEY_TILE = 1024  # the keys of a tile in the search for the keys that a part sees


def needs_parts(problem: Problem, given: GivenGradients) -> bool:
    """True if the backward pass must run in parts, because each split of the keys has a sum of dQ, and these are large.

    False if gradients of tables, or of statistics other than lse, are requested: these need the whole problem at once.
    False in float16 and bfloat16 too, because each part would round the gradients.
    """
    if given.wanted_tables or given.statistics.formulas or problem.dtype != problem.accumulator:
        return False
    return problem.n * _bytes_per_query(problem) > MIN_SPLIT_BYTES


def backward_in_parts(
    problem: Problem, given: GivenGradients, threads: int | None, processor: Processor
) -> Gradients | None:
    """Return the gradients as `Kernel.backward` returns them, without gradients of tables.

    Return None if a |lse| is so large that the backward pass would be inaccurate, or if the kernel fails for a part.
    The parts and their order depend on the problem alone, so the result has equal bits for any number of threads.
    """
    output, lse = given.saved
    if is_lse_too_large(lse, problem.accumulator):
        return None
    d_output, d_lse = given.d_output, given.statistics.add_to_d_lse(given.d_lse)
    arrays = [detach(array) for array in (problem.query, problem.key, problem.value)]
    d_arrays = [zeros(tuple(array.shape), problem.accumulator, array) for array in arrays]
    for rows, keys in _parts(problem):
        spans = (rows, keys, keys)
        operands = [array[..., span, :] for array, span in zip(arrays, spans, strict=True)]
        part = part_of(problem, *operands, first_row=rows.start, first_key=keys.start)
        d_rows = None if d_lse is None else d_lse[..., rows]
        own_saved = output[..., rows, :], lse[..., rows]
        gradients = backward(part, GivenGradients(d_output[..., rows, :], d_rows, own_saved, ()), threads, processor)
        if gradients is None:
            return None
        for array, span, term in zip(d_arrays, spans, (gradients.query, gradients.key, gradients.value), strict=True):
            array[..., span, :] += term
    sinks = None if problem.sinks is None else differentiate_sinks(problem.sinks, d_output, d_lse, output, lse)
    d_query, d_key, d_value = d_arrays
    return Gradients(d_query, d_key, d_value, tables=tuple([None for _ in problem.tables]), sinks=sinks)


def _bytes_per_query(problem: Problem) -> int:
    """Return how many bytes the sums of all splits need for a query position, in all sequences and heads.

    With one split there are no such sums, and the result is 0.
    """
    splits = -(-TARGET_ITEMS // max(problem.G * problem.B, 1))
    return splits * problem.B * problem.H * problem.d_k * itemsize(problem.accumulator) if splits > 1 else 0


def _parts(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Yield the slices (queries, keys) of each part. The mask hides every pair that is in no part."""
    count = max(MAX_SUM_BYTES // _bytes_per_query(problem) // KEY_TILE, 1) * KEY_TILE
    ranges = find_tile_ranges(problem.mask, problem.extent, count, KEY_TILE)
    for block in range(ranges.query_blocks):
        rows = slice(block * count, min((block + 1) * count, problem.n))
        is_seen = np.zeros(ranges.key_blocks, bool)
        for b, h in np.ndindex(ranges.batches, ranges.heads):
            for entry in ranges.row(b, h, block):
                is_seen[ranges.first[entry] : ranges.last[entry]] = True
        for first, last in find_runs(is_seen):
            start, stop = first * KEY_TILE, min(last * KEY_TILE, problem.m)
            for keys in pairwise([*range(start, stop, MAX_KEYS), stop]):
                yield rows, slice(*keys)
