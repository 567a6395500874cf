"""The transfers of one pass: blocks of keys to the ranks that need them, and gradients of blocks to their owners.

In a round of distance t, rank r receives a block of rank r − t directly from that rank, and only the keys that its own
queries see. While rank r computes with one block, the next block arrives. The gradients of the block of round x are
sent in round x + 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ...partition.schedule import KeyBlock, Round, Schedule
from .group import Group, Transfers

ROUNDS_UNTIL_RETURN = 2  # rounds from the arrival of a block to the transfer of its gradients


class BlockExchange:
    """The blocks that one rank needs. Iteration yields (block, the block's keys of each array), own blocks first.

    Parameters
    ----------
    arrays : tensors (..., m_r, width) of this rank's shard, such as key and value
    gradients : for each array a tensor like it, to which the gradients from all ranks are added; None in passes
        without gradients. The rank calls `add_gradients` for every block that it gets. The order of the sum is fixed:
        own blocks, then one round of transfers after another (see `Round`).
    """

    def __init__(
        self, group: Group, schedule: Schedule, arrays: Sequence[Tensor], gradients: Sequence[Tensor] | None = None
    ) -> None:
        self.group, self.schedule, self.arrays, self.gradients = group, schedule, arrays, gradients
        self._rounds = schedule.rounds(group.rank)
        self._current: int | KeyBlock = 0  # the block, or the number of the round, whose block was yielded last
        self._sums: dict[int, list[Tensor]] = {}  # gradients to return, by the number of the round

    def __iter__(self) -> Iterator[tuple[KeyBlock, list[Tensor]]]:
        last = len(self._rounds) + (ROUNDS_UNTIL_RETURN if self.gradients is not None else 0)
        pending = self._start(0)
        for block in self.schedule.own_parts(self.group.rank):
            self._current = block
            yield block, [array[..., block.span.rows, :] for array in self.arrays]
        for number in range(last):
            buffers = self._finish(number, pending)
            pending = self._start(number + 1)
            if number < len(self._rounds):
                block_of_round = self._rounds[number].received
                if block_of_round is not None:
                    self._current = number
                    yield block_of_round, buffers

    def add_gradients(self, sums: list[Tensor]) -> None:
        """Add the gradients of the block that was yielded last, one tensor for each array."""
        if isinstance(self._current, KeyBlock):
            self._add(self._current, sums)
        else:
            self._sums[self._current] = sums

    def _add(self, block: KeyBlock, sums: Sequence[Tensor]) -> None:
        for total, one in zip(self.gradients or (), sums, strict=True):
            total[..., block.span.rows, :] += one

    def _start(self, number: int) -> tuple[Transfers, list[Tensor], list[Tensor]]:
        """Start the transfers of a round. Return them with the buffers of the block and of the returned gradients."""
        transfers = Transfers(self.group, f"blocks of keys of round {number + 1} of {len(self._rounds)}")
        buffers: list[Tensor] = []
        returned: list[Tensor] = []
        if number < len(self._rounds):
            one = self._rounds[number]
            source, target = self._peers(one)
            if one.sent is not None:
                for array in self.arrays:
                    transfers.send(array[..., one.sent.span.rows, :].contiguous(), target)
            buffers = _receive(transfers, self.arrays, one.received, source)
        earlier = number - ROUNDS_UNTIL_RETURN
        if self.gradients is not None and 0 <= earlier < len(self._rounds):
            one = self._rounds[earlier]
            source, target = self._peers(one)
            for sums in self._sums.pop(earlier, ()):
                transfers.send(sums, source)
            returned = _receive(transfers, self.gradients, one.sent, target)
        transfers.start()
        return transfers, buffers, returned

    def _finish(self, number: int, pending: tuple[Transfers, list[Tensor], list[Tensor]]) -> list[Tensor]:
        """Wait for the transfers of a round, add the gradients that arrived, and return the block that arrived."""
        transfers, buffers, returned = pending
        transfers.wait()
        if returned:
            sent: Any = self._rounds[number - ROUNDS_UNTIL_RETURN].sent
            self._add(sent, returned)
        return buffers

    def _peers(self, one: Round) -> tuple[int, int]:
        """Return (the rank that sends a block to this rank in a round, the rank to which this rank sends one)."""
        rank, size = self.group.rank, self.group.size
        return (rank - one.distance) % size, (rank + one.distance) % size


def _receive(transfers: Transfers, arrays: Sequence[Tensor], block: KeyBlock | None, rank: int) -> list[Tensor]:
    """Receive a block of each array from a rank. Return the buffers; [] if the block is None."""
    if block is None:
        return []
    buffers = [x.new_empty((*x.shape[:-2], len(block.span), x.shape[-1])) for x in arrays]
    for buffer in buffers:
        transfers.receive(buffer, rank)
    return buffers
