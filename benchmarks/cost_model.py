"""Predicted cost of attention by the ring over several ranks: arithmetic, transfers and time of each rank.

A rank computes one block of keys while the transfer of the next block runs, so a round takes as long as the slower of
the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from sightline.arrays.operations import itemsize
from sightline.call.problem import Extent, Problem
from sightline.errors import check_count
from sightline.formula.tile_ranges import find_tile_ranges
from sightline.partition.needed_keys import Schedule, find_schedule, key_block_length
from sightline.partition.shards import ShardLayout, Span, divide

Array = np.ndarray[Any, np.dtype[np.float64]]
MIN_TILE, MAX_TILES = 64, 2048  # the fewest positions of a tile in which pairs are counted, and the most tiles


@dataclass(frozen=True)
class Hardware:
    """The speed of the ranks and of their links.

    flops : operations per second that attention reaches on one rank
    bandwidth : bytes per second that a rank sends, and receives at the same time
    latency : seconds of a transfer without data
    """

    flops: float = 400e12
    bandwidth: float = 50e9
    latency: float = 10e-6


@dataclass(frozen=True, eq=False)
class PassCost:
    """The cost of one pass, forward or backward. Every array has an entry for each rank.

    flops : operations of the matrix products
    sent, received : bytes that the rank sends and receives
    seconds : from the start of all ranks to the end of this rank
    ideal : seconds of the work evenly divided over the ranks, without any transfer
    """

    flops: Array
    sent: Array
    received: Array
    seconds: Array
    ideal: float

    @property
    def time(self) -> float:
        """Seconds until the last rank ends."""
        return float(self.seconds.max())


@dataclass(frozen=True, eq=False)
class Prediction:
    """The predicted cost of attention. `imbalance`: the operations of the most loaded rank divided by the mean."""

    imbalance: float
    forward: PassCost
    backward: PassCost

    @property
    def efficiency(self) -> float:
        """The ideal time of both passes divided by their predicted time; 1 if there is no work."""
        time = self.forward.time + self.backward.time
        return (self.forward.ideal + self.backward.ideal) / time if time else 1.0


def count_pairs(schedule: Schedule, mask: Any, extent: Extent) -> Array:
    """Return (ranks, blocks): how many pairs each rank computes with each block, over all batches and heads."""
    sizes = [max(MIN_TILE, -(-length // MAX_TILES)) for length in extent[2:]]
    ranges = find_tile_ranges(mask, extent, *sizes)
    # a kernel has smaller tiles, and skips about half of a partial one
    partial = ranges.count_tiles(~ranges.full) * ((1 + MIN_TILE / max(sizes)) / 2)
    rows = _overlaps(schedule.queries.ranks, extent[2], sizes[0])
    columns = _overlaps([[block.span] for block in schedule.blocks], extent[3], sizes[1])
    pairs: Array = rows @ (ranges.count_tiles(ranges.full) + partial) @ columns.T
    return pairs


def _overlaps(groups: Sequence[Sequence[Span]], length: int, size: int) -> Array:
    """Return (groups, tiles): how many positions the spans of each group have in each tile of `size` positions."""
    found = np.zeros((len(groups), -(-length // size)))
    for row, spans in zip(found, groups, strict=True):
        for span in spans:
            row += np.bincount(np.arange(span.start, span.stop) // size, minlength=len(row))
    return found


def predict(schedule: Schedule, pairs: Array, problem: Problem, hardware: Hardware | None = None) -> Prediction:
    """Return the predicted cost of a schedule. `pairs` is the result of `count_pairs`.

    The problem has the numbers of batches and of heads, the widths and the dtype of the arrays.
    """
    passes = [_predict_pass(schedule, pairs, problem, hardware or Hardware(), backward) for backward in (False, True)]
    work = pairs.sum(axis=1)
    return Prediction(float(work.max() / work.mean()) if work.any() else 1.0, *passes)


def predict_problem(problem: Problem, ranks: int, layout: ShardLayout, hardware: Hardware | None = None) -> Prediction:
    """Return the predicted cost of a whole problem whose sequences are divided among ranks."""
    ranks = check_count("ranks={!r}", ranks, 1, "ranks=8")
    queries, keys = (divide(length, ranks, layout) for length in problem.extent[2:])
    schedule = find_schedule(problem.mask, problem.extent, queries, keys, key_block_length(problem))
    return predict(schedule, count_pairs(schedule, problem.mask, problem.extent), problem, hardware)


class _Step(NamedTuple):
    """One round of all ranks: the pairs computed, the keys received and the keys sent by each, as (ranks,) arrays."""

    distance: int
    pairs: Array
    received: Array
    sent: Array


def _steps(schedule: Schedule, pairs: Array) -> Iterator[_Step]:
    """Yield one step for the ranks' own blocks, and then one step for each round of `Schedule.rounds`."""
    none, needed = np.zeros(schedule.size), np.diff(schedule.seen, axis=0)[0]  # (ranks, blocks) keys
    yield _Step(0, sum([_entries(pairs, own) for own in schedule.columns.T], none), none, none)
    for distance in range(1, schedule.size):
        for own in schedule.columns.T:
            column = np.roll(own, distance)
            received = _entries(needed, column)
            yield _Step(distance, _entries(pairs, column), received, np.roll(received, -distance))


def _entries(numbers: np.ndarray[Any, Any], column: np.ndarray[Any, Any]) -> Array:
    """Return numbers[r, column[r]] for each rank r; 0 if column[r] is −1, which stands for no block."""
    entries: Array = np.where(column >= 0, numbers[np.arange(len(column)), column], 0.0)
    return entries


def _predict_pass(schedule: Schedule, pairs: Array, problem: Problem, hardware: Hardware, backward: bool) -> PassCost:
    """Return the cost of a pass.

    While a rank computes a block, it receives the next block. In the backward pass it also returns the gradients of the
    previous block to their owner. A transfer begins when both ranks have begun the step. A step ends when its
    arithmetic and its transfers have ended.
    """
    d_k, d_v = problem.d_k, problem.d_v
    numbers = problem.B * problem.G * (d_k + d_v)  # of key and value at one position
    block, gradient = numbers * itemsize(problem.dtype), numbers * itemsize(problem.accumulator) * backward
    flops = 2 * (3 * d_k + 2 * d_v) if backward else 2 * (d_k + d_v)  # of a pair: for S, dP, dQ, dK, dV, or for S and O
    rate = hardware.flops / flops  # pairs per second
    work, size = pairs.sum(axis=1), schedule.size
    begin, received, sent = np.zeros((3, size))
    previous = idle = _Step(0, *np.zeros((3, size)))
    last = [idle] * (1 + backward)  # backward, the gradients of the last block are returned at the end
    for step, following in pairwise(chain(_steps(schedule, pairs), last)):
        end = begin + step.pairs / rate
        arriving = block * following.received + gradient * previous.sent
        leaving = block * following.sent + gradient * previous.received
        for amount, distance in ((arriving, following.distance), (leaving, -following.distance)):
            start = np.maximum(begin, np.roll(begin, distance))
            end = np.where(amount > 0, np.maximum(end, start + hardware.latency + amount / hardware.bandwidth), end)
        begin, previous = end, step
        received, sent = received + step.received, sent + step.sent
    return PassCost(
        flops=work * flops,
        sent=sent * block + received * gradient,
        received=received * block + sent * gradient,
        seconds=begin,
        ideal=float(work.sum()) / size / rate,
    )
