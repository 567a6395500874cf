"""Kernels of the weights pass for statistics per query: the k largest weights, and the weights themselves."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

from llvmlite.ir import IntType

from ..codegen.builder import Variable
from ..codegen.values import INT64, Value, bytes_of, vector
from .kernel_spec import KEY_BLOCK
from .weights_pass import WeightsPass

__all__ = ["TopK", "WeightTiles"]


class WeightsByQuery(WeightsPass):
    """The base class of kernels for a statistic per query. A work item is (b, h, block of queries)."""

    def process_item(self, item: Value) -> None:
        """Process one block of queries. The last blocks, the longest under a causal mask, come first."""
        args, tiles = self.args, self.tiles
        blocks = args.query_blocks - args.first_query // tiles.block
        head_index = item // blocks
        self.locate(head_index // args.H, head_index % args.H, args.query_blocks - 1 - item % blocks)
        self.init_rows()
        first, last = self.key_range()
        self.attend((args.first_query, args.last_query), (first // KEY_BLOCK, (last + (KEY_BLOCK - 1)) // KEY_BLOCK))
        self.store()

    def key_range(self) -> tuple[Value, Value]:
        """Return the range of keys whose weights the statistic needs."""
        return self.builder.value(0, INT64), self.args.m

    def init_rows(self) -> None:
        """Prepare the block's rows before its first tile."""

    def store(self) -> None:
        """Store the block's results after its last tile."""


class TopK(WeightsByQuery):
    """Find the `spec.k` largest weights of each query and their keys; of equal weights the smaller key comes first.

    Each lane has a sorted list: the weight of rank r and its key are in row r + 1, and row 0 is ∞, which ends every
    insertion. Keys come in ascending order, and a weight is inserted after equal weights. Weights of a tile that may
    enter a list are first collected for each lane. Then one weight of each lane is inserted at a time, because an
    insertion costs the same for one lane as for all lanes.

    Different scores may have equal weights, for example 0, so the lists compare weights. A weight is computed only if
    its score exceeds `bound`. Weights of at most ½ do not fall as the score rises, and only one weight of a query is
    larger.
    """

    # `output` and `where` are (B, H, n, k); `where` is int64

    def allocate_statistic(self) -> None:
        tiles, rows = self.tiles, self.spec.k + 1
        self.index_vector = vector(self.integer, self.lanes)
        self.top_weights = tiles.matrix(rows)
        row = tiles.block * bytes_of(self.integer)
        self.top_keys = tiles.scratch(rows * row)
        self.smallest = tiles.variables()  # the smallest weight of each list; −∞ until the list is full
        self.bound = tiles.variables()  # the largest score whose weight was at most `smallest`
        self.pending_weights, self.pending_keys = tiles.matrix(KEY_BLOCK), tiles.scratch(KEY_BLOCK * row)
        self.pending_counts, self.candidate_weights = tiles.scratch(row), tiles.matrix(1)

    def key_address(self, row: Any, v: int, keys: Value | None = None) -> Value:
        """Return the address of vector v of a row in the integer matrix `keys`, by default `top_keys`."""
        size = bytes_of(self.integer)
        row = self.builder.value(row, INT64)
        keys = self.top_keys if keys is None else keys
        return keys.at(row * (self.tiles.block * size) + v * self.lanes * size)

    def init_rows(self) -> None:
        builder, tiles = self.builder, self.tiles
        with builder.loop(0, self.spec.k + 1) as row:
            for v in self.vectors:
                tiles.store(self.top_weights, row, v, builder.value(-math.inf, self.vector))
                self.key_address(row, v).store(builder.value(-1, self.index_vector))
        for v in self.vectors:
            tiles.store(self.top_weights, 0, v, builder.value(math.inf, self.vector))
            self.smallest[v].set(-math.inf)
            self.bound[v].set(-math.inf)

    def process_tile(self, j0: Value, masked: bool) -> None:
        builder = self.builder
        for v in self.vectors:
            self.key_address(0, v, self.pending_counts).store(builder.value(0, self.index_vector))
        with builder.loop(0, self.num_keys) as key:
            hidden = builder.value(-math.inf, self.vector)
            logits = self.logits(key, j0, masked)
            scores = [s if allowed is None else builder.where(allowed, s, hidden) for _, s, allowed in logits]
            exceeds = [s > bound.get() for s, bound in zip(scores, self.bound, strict=True)]
            with builder.if_then(functools.reduce(lambda x, y: x | y, exceeds).any()):
                for v, s in enumerate(scores):
                    with builder.if_then(exceeds[v].any()):
                        self.select_candidates(exceeds[v], s, (j0 + key).to(self.integer), v)
        for v in self.vectors:
            pending_count = self.key_address(0, v, self.pending_counts).load(self.index_vector)
            with builder.loop(0, pending_count.reduce(builder.maximum).to(INT64)) as rank:
                is_pending = pending_count > rank.to(self.integer)
                p = builder.where(is_pending, self.tiles.load(self.pending_weights, rank, v), -math.inf)
                self.insert(p, self.key_address(rank, v, self.pending_keys).load(self.index_vector), v)

    def select_candidates(self, exceeds: Value, s: Value, j: Value, v: int) -> None:
        """Append the weights of one key that exceed `smallest` to the pending weights; raise `bound` to other scores.

        Only lanes in which the score exceeds `bound` take part.
        """
        builder, bound, smallest = self.builder, self.bound[v], self.smallest[v].get()
        p = self.compute_weight(s, v)
        is_candidate = exceeds & (p > smallest)
        bound.set(builder.where(exceeds & (p <= smallest), s, bound.get()))
        with builder.if_then(is_candidate.any()):
            self.append_pending(is_candidate, p, j, v)

    def append_pending(self, candidates: Value, p: Value, j: Value, v: int) -> None:
        """Append the weights of one key, in the lanes of the candidates, to the pending weights of each lane."""
        builder, tiles, size = self.builder, self.tiles, bytes_of(self.integer)
        tiles.store(self.candidate_weights, 0, v, p)
        remaining = Variable(builder, INT64, candidates.bitcast(IntType(self.lanes)).zero_extend(INT64))
        with builder.infinite_loop() as break_if:
            lane = remaining.get().trailing_zeros()
            count_address = self.key_address(0, v, self.pending_counts).at(lane * size)
            count = count_address.load(self.integer)
            position = count.to(INT64)
            weight = tiles.at(self.candidate_weights, 0, v).at(lane * tiles.itemsize).load(self.float)
            tiles.at(self.pending_weights, position, v).at(lane * tiles.itemsize).store(weight)
            self.key_address(position, v, self.pending_keys).at(lane * size).store(j)
            count_address.store(count + 1)
            remaining.set(remaining.get() & (remaining.get() - 1))
            break_if(remaining.get() == 0)

    def insert(self, p: Value, j: Value, v: int) -> None:
        """Insert each lane's weight and key into the lane's list if the weight exceeds the list's smallest weight.

        The loop starts at the last rank and moves smaller weights down by one rank.
        """
        builder, tiles, k = self.builder, self.tiles, self.spec.k
        row = Variable(builder, INT64, k)
        old = Variable(builder, self.vector, tiles.load(self.top_weights, k, v))
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

    def store(self) -> None:
        builder, args, tiles, k = self.builder, self.args, self.tiles, self.spec.k
        with builder.loop(1, k + 1) as row:
            for v in self.vectors:
                tiles.store(self.top_weights, row, v, builder.maximum(tiles.load(self.top_weights, row, v), 0.0))
        target = args.output.at(self.row * (k * tiles.itemsize))
        self.store_transposed(tiles.at(self.top_weights, 1), k, target, self.format.accumulator_format)
        size = bytes_of(self.integer)
        with builder.loop(0, self.num_valid) as lane, builder.loop(0, k) as rank:
            key = self.key_address(rank + 1, 0).at(lane * size).load(self.integer)
            args.where.at(((self.row + lane) * k + rank) * 8).store(key.to(INT64))


class WeightTiles(WeightsByQuery):
    """Write P in the input's dtype, for a range of queries and of keys. Weights of hidden tiles are not written."""

    # the caller fills `output`, (B, H, queries, keys), with 0
    own_fields: ClassVar = {"first_key": INT64, "last_key": INT64}

    def key_range(self) -> tuple[Value, Value]:
        return self.args.first_key, self.args.last_key

    def process_tile(self, j0: Value, masked: bool) -> None:
        builder, args, tiles, format = self.builder, self.args, self.tiles, self.format
        with builder.loop(0, self.num_keys) as key:
            for v, p in enumerate(self.compute_weights(key, j0, masked)):
                tiles.store(self.s_t, key, v, p)
        rows, columns = args.last_query - args.first_query, args.last_key - args.first_key
        # index of the output row of lane 0; negative if lane 0 precedes first_query
        row = (self.b * args.H + self.h) * rows + self.i0 - args.first_query
        target = args.output.at((row * columns + j0 - args.first_key) * format.itemsize)

        def address(lane: Value, key: Value) -> Value:
            return target.at((lane * columns + key) * format.itemsize)

        first, last = self.clip_lanes(args.first_query, args.last_query)
        start, stop = builder.maximum(args.first_key - j0, 0), builder.minimum(args.last_key - j0, self.num_keys)
        vector_stop = start + (stop - start) // self.lanes * self.lanes
        with builder.loop(0, len(self.vectors)) as at, builder.loop(start, vector_stop, self.lanes) as key:
            transposed = tiles.transpose_lanes([tiles.load(self.s_t, key + k, at) for k in range(self.lanes)])
            for k, p in enumerate(transposed):
                lane = at * self.lanes + k
                with builder.if_then((lane >= first) & (lane < last)):
                    format.store(address(lane, key), p)
        with builder.loop(first, last) as lane, builder.loop(vector_stop, stop) as key:
            format.store(address(lane, key), self.lane_address(self.s_t, key, lane).load(self.float))
