"""The group of processes: its ranks, its transfers, and errors that name the rank that failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ParameterError, RankError


class Group:
    """The ranks of a ProcessGroup, of a DeviceMesh of one axis, or of all processes for None.

    size, rank : the number of ranks, and the rank of this process in the group
    global_ranks : for each rank of the group, its number among all processes
    """

    def __init__(self, process_group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            cure = 'torch.distributed.init_process_group("gloo"), and start the program with torchrun'
            raise ParameterError("a call without a process group", "torch.distributed that is initialized", cure)
        if hasattr(process_group, "get_group"):
            if process_group.ndim != 1:
                given = f"a DeviceMesh of {process_group.ndim} axes"
                raise ParameterError(given, "a mesh of one axis", 'group=mesh["name of the axis"]')
            process_group = process_group.get_group()
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            cure = "call the function only in the processes of the group"
            raise ParameterError("a group that this process does not belong to", "a group with this process", cure)
        if not (process_group is None or isinstance(process_group, dist.ProcessGroup)):
            cure = "group=None for all ranks; group=torch.distributed.new_group(ranks) for some of them"
            raise ParameterError(f"group={process_group!r}", "a ProcessGroup, a DeviceMesh or None", cure)
        self.handle: Any = dist.group.WORLD if process_group is None else process_group
        self.size, self.rank = dist.get_world_size(self.handle), dist.get_rank(self.handle)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self.global_ranks = dist.get_process_group_ranks(self.handle)

    def exchange(self, own: Tensor, what: str) -> list[Tensor]:
        """Return the tensors that all ranks passed, in the order of the ranks. All have the same shape and dtype."""
        return self.send_to_all([own] * self.size, [torch.empty_like(own) for _ in range(self.size)], what)

    def send_to_all(self, parts: list[Tensor], buffers: list[Tensor], what: str) -> list[Tensor]:
        """Send `parts[r]` to rank r. Return `buffers`, whose tensor r is filled with what rank r sent.

        This rank's own entry of `buffers` is replaced by its part, which is not copied. `what` names the tensors in
        errors.
        """
        transfers = Transfers(self, what)
        for distance in range(1, self.size):
            target, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            transfers.send(parts[target], target)
            transfers.receive(buffers[source], source)
        transfers.start()
        buffers[self.rank] = parts[self.rank]
        transfers.wait()
        return buffers

    def exchange_objects(self, own: Any, what: str) -> list[Any]:
        """Return the objects that all ranks passed, in the order of the ranks."""
        found: list[Any] = [None] * self.size
        with self.naming_failures(what, self._others):
            dist.all_gather_object(found, own, group=self.handle)
        return found

    def reduce(self, array: Tensor, how: str, what: str) -> None:
        """Replace an array by the sum of the arrays of all ranks, or by the maximum or minimum that `how` names."""
        operation = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(how, dist.ReduceOp.SUM)
        with self.naming_failures(what, self._others):
            dist.all_reduce(array, op=operation, group=self.handle)

    @contextmanager
    def naming_failures(self, what: str, peers: Sequence[int]) -> Iterator[None]:
        """Raise RankError if an exchange of `what` with the ranks `peers` fails or takes too long."""
        try:
            yield
        except RuntimeError as error:
            names, reason = ", ".join(map(str, sorted(set(peers)))), str(error).strip().splitlines()[0]
            given = f"rank {self.rank} exchanged {what} with rank {names} of {self.size}, and it failed: {reason}"
            cure = f"read the log of rank {names}: it died, stalled, or gave up because of a rank that the log names"
            raise RankError(given, "ranks that live and answer within the group's timeout", cure) from error


class Transfers:
    """Transfers between pairs of ranks that start together and run in the background.

    If two ranks make several transfers with each other, both ranks must add the transfers in the same order.
    """

    def __init__(self, group: Group, what: str) -> None:
        self.group, self.what = group, what
        self._operations: list[dist.P2POp] = []
        self._peers: list[int] = []
        self._works: list[Any] = []

    def send(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.isend, tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.irecv, tensor, rank)

    def _add(self, operation: Any, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            raw = tensor if tensor.dtype == torch.int64 else tensor.view(torch.uint8)
            self._operations.append(dist.P2POp(operation, raw, self.group.global_ranks[rank], self.group.handle))
            self._peers.append(rank)

    def start(self) -> None:
        if self._operations:
            with self.group.naming_failures(self.what, self._peers):
                self._works = dist.batch_isend_irecv(self._operations)

    def wait(self) -> None:
        """Return when all transfers have ended. Raise RankError if one of them fails or takes too long."""
        peers: list[Sequence[int]] = [[peer] for peer in self._peers]
        if len(self._works) != len(peers):  # NCCL joins the transfers
            peers = [self._peers] * len(self._works)
        for work, concerned in zip(self._works, peers, strict=True):
            with self.group.naming_failures(self.what, concerned):
                work.wait()
