"""Statistics of the weights pass per query: sums and maxima over keys, and the k largest weights and their keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from ..codegen.builder import Variable
from ..codegen.values import BOOL, INT64, Value, integer, vector
from .kernel_spec import KEY_BLOCK
from .tile_functions import needs_entries
from .weights_pass import StatisticCode


class RowSums(StatisticCode):
    """Compute Σ_j f of each query: the sum of each tile, and the sum of these."""

    def allocate(self) -> None:
        self.of_tile, self.of_block = self.tiles.variables(), self.tiles.variables()

    def init_block(self) -> None:
        for v in self.vectors:
            self.of_block[v].set(0.0)

    def init_tile(self, j0: Value) -> None:
        for v in self.vectors:
            self.of_tile[v].set(0.0)

    def add_key(self, key: Value, j: Value) -> None:
        for total, entry in zip(self.of_tile, self.load_entries(key), strict=True):
            total.set(total.get() + entry)

    def finish_tile(self, j0: Value) -> None:
        for total, part in zip(self.of_block, self.of_tile, strict=True):
            total.set(total.get() + part.get())

    def finish_block(self) -> None:
        self.kernel.store_per_query(self.outputs[0], [total.get() for total in self.of_block])


class RowExtrema(StatisticCode):
    """Compute the maximum or minimum of f over the keys of each query, and the first key that has it; −1 for no key."""

    def allocate(self) -> None:
        self.best = self.tiles.variables()
        indices = vector(self.kernel.integer, self.kernel.lanes)
        self.keys = [Variable(self.builder, indices) for _ in self.vectors]

    def init_block(self) -> None:
        for best, key in zip(self.best, self.keys, strict=True):
            best.set(self.role.hidden)
            key.set(-1)

    def add_key(self, key: Value, j: Value) -> None:
        builder = self.builder
        found = zip(self.best, self.keys, self.load_entries(key), self.kernel.find_visible(key), strict=True)
        for best, best_key, entry, is_visible in found:
            is_new = is_visible & ((best_key.get() < 0) | self.exceeds(entry, best.get()))
            best.set(builder.where(is_new, entry, best.get()))
            best_key.set(builder.where(is_new, j.broadcast(self.kernel.lanes), best_key.get()))

    def finish_block(self) -> None:
        values, keys = self.outputs
        self.kernel.store_per_query(values, [best.get() for best in self.best])
        self.kernel.store_per_query(keys, [key.get().to(INT64) for key in self.keys])


class TopKCode(StatisticCode):
    """Find the `spec.k` largest weights of each query and their keys; of equal weights the smaller key comes first.

    Each lane has a sorted list: the weight of rank r and its key are in row r + 1, and row 0 is ∞, which ends every
    insertion. Keys come in ascending order, and a weight is inserted after equal weights. Weights of a tile that may
    enter a list are first collected for each lane. Then one weight of each lane is inserted at a time, because an
    insertion costs the same for one lane as for all lanes.

    Different scores may have equal weights, for example 0, so the lists compare weights. If no other statistic needs
    the weights, a weight is computed only if its score exceeds `bound`. Computed weights up to ½ never fall when the
    score rises, and only one weight of a query can exceed ½.

    The outputs are (B, H, n, k): the weights, and their keys as int64.
    """

    def allocate(self) -> None:
        tiles, kernel = self.tiles, self.kernel
        self.k, self.integer = kernel.spec.k, kernel.integer
        rows = self.k + 1
        self.index_vector = vector(self.integer, tiles.lanes)
        self.top_weights = tiles.matrix(rows)
        row = tiles.block * self.integer.itemsize
        self.top_keys = tiles.scratch(rows * row)
        self.smallest = tiles.variables()  # the smallest weight of each list; −∞ until the list is full
        self.bound = tiles.variables()  # the largest score whose weight was at most `smallest`
        self.pending_weights, self.pending_keys = tiles.matrix(KEY_BLOCK), tiles.scratch(KEY_BLOCK * row)
        self.pending_counts, self.candidate_weights = tiles.scratch(row), tiles.matrix(1)

    def key_address(self, row: Any, v: int, keys: Value | None = None) -> Value:
        """Return the address of vector v of a row in the integer matrix `keys`, by default `top_keys`."""
        size = self.integer.itemsize
        row = self.builder.value(row, INT64)
        keys = self.top_keys if keys is None else keys
        return keys.at(row * (self.tiles.block * size) + v * self.tiles.lanes * size)

    def init_block(self) -> None:
        builder, tiles = self.builder, self.tiles
        with builder.loop(0, self.k + 1) as row:
            for v in self.vectors:
                tiles.store(self.top_weights, row, v, builder.value(-math.inf, tiles.vector))
                self.key_address(row, v).store(builder.value(-1, self.index_vector))
        for v in self.vectors:
            tiles.store(self.top_weights, 0, v, builder.value(math.inf, tiles.vector))
            self.smallest[v].set(-math.inf)
            self.bound[v].set(-math.inf)

    def init_tile(self, j0: Value) -> None:
        for v in self.vectors:
            self.key_address(0, v, self.pending_counts).store(self.builder.value(0, self.index_vector))

    def add_key(self, key: Value, j: Value) -> None:
        scores = self.kernel.load_scores(key)
        if not needs_entries(self.kernel.spec):  # compute weights only where scores exceed `bound`
            exceeds = [s > bound.get() for s, bound in zip(scores, self.bound, strict=True)]
            for v in self.branch_per_vector(exceeds):
                self.select_candidates(exceeds[v], scores[v], j, v)
            return
        weights = self.load_entries(key)
        exceeds = [
            (p > smallest.get()) & (s > -math.inf)  # a score of −∞ counts as hidden
            for p, smallest, s in zip(weights, self.smallest, scores, strict=True)
        ]
        for v in self.branch_per_vector(exceeds):
            self.append_pending(exceeds[v], weights[v], j, v)

    def branch_per_vector(self, conditions: list[Value]) -> Iterator[int]:
        """Yield each vector's index inside a branch that is taken if the vector's condition is true in any lane."""
        builder = self.builder
        with builder.if_then(functools.reduce(lambda x, y: x | y, conditions).any()):
            for v, condition in enumerate(conditions):
                with builder.if_then(condition.any()):
                    yield v

    def finish_tile(self, j0: Value) -> None:
        """Insert the pending weights into the lists."""
        builder = self.builder
        for v in self.vectors:
            pending_count = self.key_address(0, v, self.pending_counts).load(self.index_vector)
            with builder.loop(0, pending_count.reduce(builder.maximum).to(INT64)) as rank:
                is_pending = pending_count > rank.to(self.integer)
                p = builder.where(is_pending, self.tiles.load(self.pending_weights, rank, v), -math.inf)
                self.insert(p, self.key_address(rank, v, self.pending_keys).load(self.index_vector), v)

    def select_candidates(self, exceeds: Value, s: Value, j: Value, v: int) -> None:
        """Append the weights of one key that exceed `smallest` to the pending weights.

        Only lanes in which the score exceeds `bound` take part. Where the weight is not appended, `bound` is raised to
        the score.
        """
        builder, bound, smallest = self.builder, self.bound[v], self.smallest[v].get()
        p = self.kernel.exponentiate(self.kernel.compute_log_weight(s, v))
        is_candidate = exceeds & (p > smallest)
        bound.set(builder.where(exceeds & (p <= smallest), s, bound.get()))
        self.append_pending(is_candidate, p, j, v)

    def append_pending(self, candidates: Value, p: Value, j: Value, v: int) -> None:
        """Append the weights of one key, in the lanes of the candidates, to the pending weights of each lane."""
        builder, tiles, size = self.builder, self.tiles, self.integer.itemsize
        tiles.store(self.candidate_weights, 0, v, p)
        remaining = Variable(builder, INT64, candidates.bitcast(integer(tiles.lanes)).zero_extend(INT64))
        with builder.infinite_loop() as break_if:
            break_if(remaining.get() == 0)
            is_nonzero = builder.value(1, BOOL)
            lane = builder.call("llvm.cttz.i64", INT64, remaining.get(), is_nonzero)  # the index of the lowest set bit
            count_address = self.key_address(0, v, self.pending_counts).at(lane * size)
            count = count_address.load(self.integer)
            position = count.to(INT64)
            weight = tiles.at(self.candidate_weights, 0, v).at(lane * tiles.itemsize).load(tiles.kind)
            tiles.at(self.pending_weights, position, v).at(lane * tiles.itemsize).store(weight)
            self.key_address(position, v, self.pending_keys).at(lane * size).store(j)
            count_address.store(count + 1)
            remaining.set(remaining.get() & (remaining.get() - 1))

    def insert(self, p: Value, j: Value, v: int) -> None:
        """Insert each lane's weight and key into the lane's list if the weight exceeds the list's smallest weight.

        The loop starts at the last rank and moves smaller weights down by one rank.
        """
        builder, tiles, k = self.builder, self.tiles, self.k
        row = Variable(builder, INT64, k)
        old = Variable(builder, tiles.vector, tiles.load(self.top_weights, k, v))
        key = Variable(builder, self.index_vector, self.key_address(k, v).load(self.index_vector))
        with builder.infinite_loop() as break_if:
            at = row.get()
            above = tiles.load(self.top_weights, at - 1, v)
            key_above = self.key_address(at - 1, v).load(self.index_vector)
            enters, passes = p > old.get(), p > above
            tiles.store(self.top_weights, at, v, builder.where(passes, above, builder.where(enters, p, old.get())))
            self.key_address(at, v).store(builder.where(passes, key_above, builder.where(enters, j, key.get())))
            break_if(~passes.any())
            row.set(at - 1)
            old.set(above)
            key.set(key_above)
        self.smallest[v].set(tiles.load(self.top_weights, k, v))

    def finish_block(self) -> None:
        kernel, builder, tiles, k = self.kernel, self.builder, self.tiles, self.k
        weights, keys = self.outputs
        with builder.loop(1, k + 1) as row:
            for v in self.vectors:
                tiles.store(self.top_weights, row, v, builder.maximum(tiles.load(self.top_weights, row, v), 0.0))
        target = weights.at(kernel.row * (k * tiles.itemsize))
        kernel.store_transposed(tiles.at(self.top_weights, 1), k, target, kernel.format.accumulator_format)
        size = self.integer.itemsize
        with builder.loop(0, kernel.num_valid) as lane, builder.loop(0, k) as rank:
            key = self.key_address(rank + 1, 0).at(lane * size).load(self.integer)
            keys.at(((kernel.row + lane) * k + rank) * 8).store(key.to(INT64))
