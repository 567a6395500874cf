"""The run of one call of `attention_from_disk`: its work items one by one, the merged results, saved states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np

from ...arrays import operations as arrays
from ...dispatch.kernel_list import solve
from ...partition.lse_merge import Sums, combine, read_part, start
from ...partition.part import part_of
from ...problem.problem import Problem
from ...problem.validation import broadcast_inputs
from .block_plan import WorkItem
from .checkpoint import NOTHING_READ, Checkpoint, State, hash_block

SECONDS_BETWEEN_SAVES = 60.0


class Run:
    """The computation of one call: its work items, the results so far, and its checkpoint if it has one."""

    def __init__(self, problem: Problem, sources: dict[str, Any], items: list[WorkItem], threads: int | None) -> None:
        self.problem, self.sources, self.items, self.threads = problem, sources, items, threads
        self.blocks = [list(block) for _, block in groupby(enumerate(items), lambda item: item[1].keys.start)]
        self.sinks = None if problem.sinks is None else np.asarray(arrays.to_numpy(problem.sinks), np.float64)[:, None]
        output = np.zeros((*problem.batch_shape, problem.H, problem.n, problem.d_v), problem.accumulator)
        first = start(problem, output, self.sinks, np.float64)
        self.state = State(output, first.shift, first.seen)
        self.checkpoint: Checkpoint | None = None
        self.read = {-1: NOTHING_READ}  # number of a block → the hashes of the keys and of the values up to this block
        self.merged: tuple[int, Sums] | None = None  # the item that is being stored, and the results of its queries

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from the state of a checkpoint, and save later states in it.

        The blocks that the finished items have read are read and hashed again, because their entries may have changed.
        """
        self.checkpoint = checkpoint
        checkpoint.load(self.state)
        for number in range(self._blocks_read()):
            self._read(number)
        hashes = zip(("key", "value"), self.read[self._blocks_read() - 1], self.state.read, strict=True)
        changed = [name for name, now, before in hashes if now != before]
        if changed:
            checkpoint.refuse(changed)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Compute the work items that remain. Yield (finished, total) at the start and after each item."""
        yield self.state.finished, len(self.items)
        saved_at = time.monotonic()
        for item, key, value in self._remaining():
            self._compute(item, key, value)
            yield self.state.finished, len(self.items)
            if time.monotonic() - saved_at > SECONDS_BETWEEN_SAVES:
                self.save()
                saved_at = time.monotonic()

    def save(self) -> None:
        """Save the state if the call has a checkpoint."""
        self._store()
        if self.checkpoint is not None:
            self.state.read = self.read[self._blocks_read() - 1]
            self.checkpoint.save(self.state)

    def _blocks_read(self) -> int:
        """Return the number of blocks that the finished items have read."""
        return sum(block[0][0] < self.state.finished for block in self.blocks)

    def _remaining(self) -> Iterator[tuple[WorkItem, Any, Any]]:
        """Yield the remaining items with their keys and values. A thread reads the next block meanwhile."""
        numbers = [k for k, block in enumerate(self.blocks) if block[-1][0] >= self.state.finished]
        with ThreadPoolExecutor(1, thread_name_prefix="sightline-read") as reader:
            reads = (reader.submit(self._read, number) for number in numbers)
            following = next(reads, None)  # starts to read
            for number in numbers:
                assert following is not None
                key, value = following.result()
                following = next(reads, None)
                for index, item in self.blocks[number]:
                    if index >= self.state.finished:
                        yield item, key, value

    def _read(self, number: int) -> tuple[Any, Any]:
        """Return a block of keys and values. For a checkpoint, also keep the hash of all blocks up to this one."""
        keys = self.blocks[number][0][1].keys
        key, value = (np.array(self.sources[name][..., keys, :]) for name in ("key", "value"))
        if self.checkpoint is not None:
            before = self.read[number - 1]
            self.read[number] = hash_block(before[0], key), hash_block(before[1], value)
        return key, value

    def _compute(self, item: WorkItem, key: Any, value: Any) -> None:
        """Compute one work item and merge its results into the state."""
        state, rows = self.state, item.queries
        query = np.asarray(self.sources["query"][..., rows, :])
        operands = _broadcast({"query": query, "key": key, "value": value}, self.problem)
        first = {"first_row": rows.start, "first_key": item.keys.start}
        result = solve(part_of(self.problem, *operands, **first, see=self.problem.see), None, self.threads)
        output = result.output.astype(state.output.dtype, copy=False)
        with np.errstate(all="ignore"):  # ∞ and NaN propagate without warnings
            parts = self._finished_sums(rows), read_part(output, result.lse, result.seen, item.keys.start)
            self.merged = state.finished, combine(parts, self.problem.see, normalize=True)
        self._store()

    def _finished_sums(self, rows: slice) -> Sums:
        """Return the finished items' results for these queries, normalised: a query's weights and its sink sum to 1."""
        output, lse, *rest = [array[self._index(rows)] for array in self.state.arrays]
        keys = 1.0 if self.sinks is None else -np.expm1(self.sinks - lse)
        return Sums(lse, 1.0, keys, output, [[rest.pop(0) for _ in own] for own in self.state.seen])

    def _store(self) -> None:
        """Copy `merged` into the state. If an interrupt stops this method at any point, `save` calls it again."""
        if self.merged is None:
            return
        number, found = self.merged
        merged = State(found.output, found.shift, found.seen).arrays
        for array, new in zip(self.state.arrays, merged, strict=True):
            array[self._index(self.items[number].queries)] = new
        self.state.finished = number + 1
        self.merged = None

    def _index(self, rows: slice) -> tuple[slice, ...]:
        """Return the index of these queries in every array of the state."""
        return *[slice(None)] * (self.state.lse.ndim - 1), rows


def _broadcast(parts: dict[str, Any], problem: Problem) -> list[Any]:
    """Return parts of query, key and value with a head axis and the batch axes of the problem."""
    return [arrays.broadcast_to(x, (*problem.batch_shape, *x.shape[-3:])) for x in broadcast_inputs(parts)]
