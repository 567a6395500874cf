"""Attention computed from parts of its problem, as ranks compute them, and the check of a schedule of transfers."""

import numpy as np

from sightline import merge
from sightline.call.kernel import Result
from sightline.call.partition.parts import part_of
from strategies import dense_mask


def cuts(length, pieces, alignment=1):
    """Return (first, last) of consecutive parts that begin at multiples of the alignment; none of them is empty."""
    step = max(alignment * -(-length // (pieces * alignment)), 1)
    return [(first, min(first + step, length)) for first in range(0, length, step)]


def run_parts(run, problem, key_parts=3, query_parts=2, head_parts=1):
    """Return the result of a problem whose queries, keys and heads are computed in parts by the kernel's `run`."""
    batch, group = problem.batch_shape, problem.H // problem.G
    output = np.zeros((*batch, problem.H, problem.n, problem.d_v), problem.query.dtype)
    sums = np.full((*batch, problem.H, problem.n), -np.inf)
    for first, last in cuts(problem.G, head_parts):
        heads = slice(first * group, last * group)
        for top, bottom in cuts(problem.n, query_parts):
            pieces = []
            for left, right in cuts(problem.m, key_parts, 4):
                origin = {"first_head": heads.start, "first_row": top, "first_key": left}
                arrays = (
                    problem.query[..., heads, top:bottom, :],
                    *(x[..., first:last, left:right, :] for x in (problem.key, problem.value)),
                )
                result = run(part_of(problem, *arrays, **origin))
                pieces.append((np.asarray(result.output, np.float64), result.lse.astype(np.float64)))
            merged = merge(pieces)
            output[..., heads, top:bottom, :], sums[..., heads, top:bottom] = merged
    return Result(output, sums)


def needed_pairs(problem):
    """Return (n, m): in how many batches and heads each pair is visible."""
    shown = np.ones(problem.extent, bool) if problem.mask is None else dense_mask(problem)
    return np.broadcast_to(shown, problem.extent).sum((0, 1))


def assert_covers(schedule, visible):
    """Raise AssertionError if the schedule calls a visible pair needless."""
    spans = [(rank, span) for rank, own in enumerate(schedule.queries.ranks) for span in own]
    for row, (rank, queries) in enumerate(spans):
        for column, block in enumerate(schedule.blocks):
            pairs = visible[queries.start : queries.stop, block.span.start : block.span.stop].sum()
            place = f"queries {queries.start} to {queries.stop}, keys {block.span.start} to {block.span.stop}"
            seen, seeing = schedule.seen[:, rank, column], schedule.seeing[:, row, column]
            needed = visible[slice(*seeing), slice(*seen)].sum()
            assert needed == pairs, f"{place}: {pairs - needed} pairs called needless"
            part = schedule.needed_part(rank, block)
            assert (part is None) == (seen[0] == seen[1])
            assert part is None or block.span.start <= part.span.start < part.span.stop <= block.span.stop
