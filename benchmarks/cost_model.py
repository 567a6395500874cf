"""Predicted cost of attention over several ranks: arithmetic, transfers, memory and time of each rank.

With the method "ring", a rank computes one block of keys while the transfer of the next block runs, so a round takes as
long as the slower of the two. With the method "heads", transfers and arithmetic alternate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from sightline.arrays.operations import itemsize
from sightline.errors import ParameterError, check_count
from sightline.partition.schedule import Schedule, find_schedule, key_block_length
from sightline.partition.shards import Method, ShardLayout, check_method, divide, divide_heads
from sightline.problem.problem import Problem

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Hardware:
    """The speed of the ranks and of their links.

    flops : float
        Floating-point operations per second that attention reaches on one rank.
    bandwidth : float
        Bytes per second that a rank sends, and bytes per second that it receives at the same time.
    latency : float
        Seconds of a transfer without data.
    processors : float, optional
        How many ranks can compute at the same time; None if every rank has a processor of its own. Transfers between
        ranks that share processors take processor time. `bandwidth` is then the rate of a rank while all ranks send.
    backward_flops : float, optional
        `flops` for the backward pass; None if it equals `flops`.
    """

    flops: float = 400e12
    bandwidth: float = 50e9
    latency: float = 10e-6
    processors: float | None = None
    backward_flops: float | None = None

    def __post_init__(self) -> None:
        optional = [rate for rate in (self.processors, self.backward_flops) if rate is not None]
        rates = self.flops, self.bandwidth, *optional
        if not (all(0 < rate < math.inf for rate in rates) and 0 <= self.latency < math.inf):
            raise ParameterError(
                f"{self}",
                "finite numbers above 0, and a latency of at least 0",
                "flops=400e12, bandwidth=50e9, latency=1e-5",
            )

    def rate(self, backward: bool) -> float:
        """Return the operations per second of a rank in the forward or in the backward pass."""
        return self.backward_flops if backward and self.backward_flops is not None else self.flops


@dataclass(frozen=True)
class Sizes:
    """The sizes of a problem except n and m. `itemsize` and `accumulator`: bytes of a number in arrays and in sums."""

    batches: int
    query_heads: int
    key_heads: int
    d_k: int
    d_v: int
    itemsize: int
    accumulator: int

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        B, H, _, _ = problem.extent
        sizes = itemsize(problem.dtype), itemsize(problem.accumulator)
        return cls(B, H, problem.G, problem.d_k, problem.d_v, *sizes)

    def flops(self, backward: bool) -> int:
        """Return the operations of one pair: for S and O in the forward pass, else for S, dP, dQ, dK and dV."""
        return 2 * (3 * self.d_k + 2 * self.d_v) if backward else 2 * (self.d_k + self.d_v)

    @property
    def query_numbers(self) -> int:
        """How many numbers query and output have at one position, over all batches and heads."""
        return self.batches * self.query_heads * (self.d_k + self.d_v)

    @property
    def key_numbers(self) -> int:
        """How many numbers key and value have at one position, over all batches and heads."""
        return self.batches * self.key_heads * (self.d_k + self.d_v)


@dataclass(frozen=True, eq=False)
class PassCost:
    """The cost of one pass, forward or backward. Every array has an entry for each rank.

    flops : operations of the matrix products
    sent, received : bytes that the rank sends and receives
    held : bytes of the rank's arrays and of the blocks that it stores at the same time
    seconds : from the start of all ranks to the end of this rank
    ideal : seconds of the work evenly divided over the ranks, without any transfer
    """

    flops: Array
    sent: Array
    received: Array
    held: Array
    seconds: Array
    ideal: float

    @property
    def time(self) -> float:
        """Seconds until the last rank ends."""
        return float(self.seconds.max())

    @property
    def efficiency(self) -> float:
        """The ideal time divided by the predicted time; 1 if there is no work."""
        return self.ideal / self.time if self.time else 1.0


@dataclass(frozen=True, eq=False)
class Prediction:
    """The predicted cost of attention over several ranks.

    imbalance : the operations of the most loaded rank divided by the mean
    """

    method: Method
    hardware: Hardware
    imbalance: float
    forward: PassCost
    backward: PassCost

    @property
    def ranks(self) -> int:
        return len(self.forward.seconds)

    @property
    def efficiency(self) -> float:
        """The ideal time of both passes divided by their predicted time; 1 if there is no work."""
        time = self.forward.time + self.backward.time
        return (self.forward.ideal + self.backward.ideal) / time if time else 1.0


def predict(schedule: Schedule, sizes: Sizes, hardware: Hardware | None = None, method: Method = "ring") -> Prediction:
    """Return the predicted cost of a schedule.

    With the method "heads", every head is assumed to have the same number of pairs.

    Raises
    ------
    ParameterError
        `method` is neither "ring" nor "heads", or it is "heads" with more ranks than key heads.
    """
    hardware = hardware or Hardware()
    check_method(method)
    if method == "heads":
        imbalance, predict_pass = schedule.size * float(_head_shares(sizes, schedule.size).max()), _exchange
    else:
        imbalance, predict_pass = schedule.imbalance, _ring
    return Prediction(method, hardware, imbalance, *[predict_pass(schedule, sizes, hardware, x) for x in (False, True)])


def predict_problem(
    problem: Problem, ranks: int, layout: ShardLayout, method: Method = "ring", hardware: Hardware | None = None
) -> Prediction:
    """Return the predicted cost of a whole problem whose sequences are divided among ranks.

    Raises
    ------
    ParameterError
        `ranks` is not a whole number above 0, `layout` or `method` is unknown, or `method` is "heads" with more ranks
        than key heads.
    """
    ranks = check_count("ranks={!r}", ranks, 1, "ranks=8")
    _, _, n, m = problem.extent
    queries, keys = divide(n, ranks, layout), divide(m, ranks, layout)
    schedule = find_schedule(problem.mask, problem.extent, queries, keys, key_block_length(problem))
    return predict(schedule, Sizes.of(problem), hardware, method)


@dataclass(frozen=True, eq=False)
class _Step:
    """One round of all ranks: the pairs computed, the keys received and the keys sent by each, as (ranks,) arrays."""

    distance: int
    pairs: Array
    received: Array
    sent: Array


def _steps(schedule: Schedule) -> Iterator[_Step]:
    """Yield one step for the ranks' own blocks, and then one step for each round of `Schedule.rounds`."""
    none = np.zeros(schedule.size)
    yield _Step(0, sum([_entries(schedule.pairs_by_rank, own) for own in schedule.columns.T], none), none, none)
    for distance in range(1, schedule.size):
        for own in schedule.columns.T:
            column = np.roll(own, distance)
            received = _entries(schedule.needed_keys, column)
            yield _Step(distance, _entries(schedule.pairs_by_rank, column), received, np.roll(received, -distance))


def _entries(numbers: Array, column: np.ndarray[Any, Any]) -> Array:
    """Return numbers[r, column[r]] for each rank r; 0 if column[r] is −1, which stands for no block."""
    entries: Array = np.where(column >= 0, numbers[np.arange(len(column)), column], 0.0)
    return entries


def _ring(schedule: Schedule, sizes: Sizes, hardware: Hardware, backward: bool) -> PassCost:
    """Return the cost of a pass with the method "ring".

    While a rank computes a block, it receives the next block. In the backward pass it also returns the gradients of the
    previous block to their owner. A transfer begins when both ranks have begun the step. A step ends when its
    arithmetic and its transfers have ended.
    """
    block, gradient = sizes.key_numbers * sizes.itemsize, sizes.key_numbers * sizes.accumulator * backward
    per_pair = sizes.flops(backward)
    begin, received, sent, largest = np.zeros((4, schedule.size))
    idle = _Step(0, *np.zeros((3, schedule.size)))
    previous = idle
    last = [idle] * (1 + backward)  # backward, the gradients of the last block are returned at the end
    for step, following in pairwise(chain(_steps(schedule), last)):
        end = begin + step.pairs * per_pair / hardware.rate(backward)
        arriving = block * following.received + gradient * previous.sent
        leaving = block * following.sent + gradient * previous.received
        for amount, distance in ((arriving, following.distance), (leaving, -following.distance)):
            start = np.maximum(begin, np.roll(begin, distance))
            end = np.where(amount > 0, np.maximum(end, start + hardware.latency + amount / hardware.bandwidth), end)
        begin, previous = end, step
        received, sent = received + step.received, sent + step.sent
        largest = np.maximum(largest, step.received)
    flops, bytes_sent = schedule.work * per_pair, sent * block + received * gradient
    return PassCost(
        flops=flops,
        sent=bytes_sent,
        received=received * block + sent * gradient,
        held=_own_bytes(schedule, sizes, backward) + np.minimum(2 * largest, received) * (block + gradient),
        seconds=np.maximum(begin, _processor_seconds(flops, bytes_sent, hardware, backward)),
        ideal=_ideal(flops, hardware, backward),
    )


def _exchange(schedule: Schedule, sizes: Sizes, hardware: Hardware, backward: bool) -> PassCost:
    """Return the cost of a pass with "heads": the ranks exchange inputs, compute their heads and exchange results.

    In the forward pass, the inputs are query, key and value, and the result is the output. In the backward pass, the
    input is dO, and the results are dQ, dK and dV.
    """
    ranks, share = schedule.size, _head_shares(sizes, schedule.size)
    queries, keys = (np.array(shards.lengths, dtype=np.float64) for shards in (schedule.queries, schedule.keys))
    inputs = [(queries, sizes.query_heads * sizes.d_k), (keys, sizes.key_heads * (sizes.d_k + sizes.d_v))]
    results = [(queries, sizes.query_heads * sizes.d_v)]
    width = sizes.batches * sizes.itemsize

    def outgoing(arrays: list[tuple[Array, int]]) -> Array:
        """Return the bytes of other ranks' heads that each rank holds before the exchange."""
        return width * sum((own * numbers * (1 - share) for own, numbers in arrays), np.zeros(ranks))

    def incoming(arrays: list[tuple[Array, int]]) -> Array:
        """Return the bytes of each rank's heads that other ranks hold before the exchange."""
        return width * sum(((own.sum() - own) * numbers * share for own, numbers in arrays), np.zeros(ranks))

    there, back = (results, inputs) if backward else (inputs, results)
    transfers = [(outgoing(there), incoming(there)), (incoming(back), outgoing(back))]
    flops = schedule.work.sum() * sizes.flops(backward) * share
    seconds = flops / hardware.rate(backward)
    for sent, received in transfers:
        amount = np.maximum(sent, received).max() if ranks > 1 else 0.0
        seconds = seconds + (hardware.latency + amount / hardware.bandwidth if amount else 0.0)
    whole, bytes_sent = incoming([*inputs, *results]) * (2 if backward else 1), transfers[0][0] + transfers[1][0]
    return PassCost(
        flops=flops,
        sent=bytes_sent,
        received=transfers[0][1] + transfers[1][1],
        held=_own_bytes(schedule, sizes, backward) + whole,
        seconds=np.maximum(seconds, _processor_seconds(flops, bytes_sent, hardware, backward)),
        ideal=_ideal(flops, hardware, backward),
    )


def _head_shares(sizes: Sizes, ranks: int) -> Array:
    """Return (ranks,): the share of all heads that each rank computes."""
    shares: Array = np.diff(divide_heads(sizes.key_heads, ranks)) / max(sizes.key_heads, 1)
    return shares


def _own_bytes(schedule: Schedule, sizes: Sizes, backward: bool) -> Array:
    """Return the bytes of each rank's query, key, value, output and lse; `backward` adds those of the gradients."""
    queries, keys = (np.array(shards.lengths, dtype=np.float64) for shards in (schedule.queries, schedule.keys))
    numbers = queries * sizes.query_numbers + keys * sizes.key_numbers
    lse = queries * sizes.batches * sizes.query_heads * sizes.accumulator
    gradients = numbers * sizes.accumulator if backward else 0.0
    own: Array = numbers * sizes.itemsize + lse + gradients
    return own


def _processor_seconds(flops: Array, sent: Array, hardware: Hardware, backward: bool) -> Array:
    """Return the second at which each rank ends if the ranks share the processors; 0 if they do not share them.

    The ranks that still have work share the processors equally. A rank does not use more than one processor.
    """
    if hardware.processors is None:
        return np.zeros(len(flops))
    work = np.sort(flops) / hardware.rate(backward)
    working = np.arange(len(flops), 0, -1)
    ends = np.cumsum(np.diff(work, prepend=0.0) * np.maximum(working / hardware.processors, 1.0))
    by_rank: Array = ends[np.argsort(np.argsort(flops))] + sent.mean() / hardware.bandwidth
    return by_rank


def _ideal(flops: Array, hardware: Hardware, backward: bool) -> float:
    """Return the seconds of the work evenly divided over the ranks that compute at the same time."""
    return float(flops.sum()) / min(len(flops), hardware.processors or math.inf) / hardware.rate(backward)
