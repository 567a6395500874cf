"""The decoding kernel: few queries against many keys, limited by the bandwidth of reading K and V once.

The query heads that share a key head are rows of one small matrix, so that K and V are read once for all of them.
Vectors run along d. A score is a sum over lanes, computed for many keys at once by a tree of shuffles. A weight is
broadcast and multiplies a row of V. `DecodeRows` widens narrow floats and codes in registers. If a tile raises the
running maximum of a row from m to m', earlier sums are multiplied by α = 2^(m − m'). With a score formula or sinks, e
replaces the base 2.

    S[r][j] = Σ_d Q[r][d] · K[j][d]    P = 2^(S − m')    O[r][d] = α O + Σ_j P[r][j] · V[j][d]

The keys are divided into splits, in a way that only the problem determines. A thread computes one split at a time. The
thread that finishes the last split of some rows merges their splits, always in the order of the keys (Dao et al.,
"Flash-Decoding", 2023). An output that is NaN or ∞ sets `nonfinite_flag`. The forward kernel, which ignores V at hidden
keys, then computes the output instead.

The entropy H of a query is merged from the entropies of its splits: with P_p, the weight of split p,

    H = Σ_p P_p (H_p − ln P_p)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce

from ..codegen.abi import DECODE_FIELDS
from ..codegen.builder import CACHE_LINE_BYTES, Variable
from ..codegen.math import exp, reduce_across_groups, reduce_within_groups
from ..codegen.values import DOUBLE, INT16, INT64, Value
from .block import Block
from .decode_rows import UNROLL, DecodeRows, VisibleKeys
from .fused_statistics import MIN_EXPONENT
from .kernel_spec import KEY_BLOCK, SHUFFLE_BYTES

MAX_ROWS_PER_ITEM = 32  # the most query rows of a work item


class Decode(Block):
    """Write the decoding kernel into a module."""

    fields = DECODE_FIELDS
    queries: Value  # the query rows of a key head, with what is kept of each; see `loop_heads`
    output: Value
    running_sums: Value
    running_max: Value
    query_scales: Value  # a row of Q is a scale times whole numbers, if rows are pairs of INT16
    weighted_exponents: Value  # T = Σ p x of weights p = e^x, if the entropy is requested

    def allocate(self) -> None:
        tiles, spec = self.tiles, self.spec
        self.key, self.value = DecodeRows(self, "key", self.key_format), DecodeRows(self, "value", self.value_format)
        self.paired = self.key.tiles.paired
        self.query_row_bytes = self.key.tiles.packed_length(spec.d_k) * tiles.itemsize
        self.score_row_bytes = KEY_BLOCK * tiles.itemsize
        self.output_row_bytes = spec.d_v * tiles.itemsize
        self.has_entropy = "entropy" in spec.roles
        row_bytes = {"queries": self.query_row_bytes, "output": self.output_row_bytes}
        row_bytes |= {"running_sums": tiles.align, "running_max": tiles.itemsize, "query_scales": tiles.itemsize}
        if self.has_entropy:
            row_bytes["weighted_exponents"] = tiles.align
        # what is kept of each row of the item, by attribute; `loop_heads` sets the attribute to a head's first row
        self.kept_rows = {name: (tiles.scratch(MAX_ROWS_PER_ITEM * size), size) for name, size in row_bytes.items()}
        self.query_row = tiles.scratch(spec.d_k * tiles.itemsize)
        self.scores = tiles.scratch(MAX_ROWS_PER_ITEM * self.score_row_bytes)
        self.alpha, self.weight_scales = (tiles.scratch(MAX_ROWS_PER_ITEM * tiles.itemsize) for _ in range(2))
        self.sums = tiles.scratch(UNROLL * KEY_BLOCK * tiles.align)  # scores before the sum over groups of lanes
        self.visible_keys = VisibleKeys(self)

    def process_item(self, item: Value) -> None:
        """Process one split of the keys for some query rows, then merge the splits if this split finished last."""
        builder, args = self.builder, self.args
        self.locate_item(item)
        with self.loop_heads():
            self.init_rows()
        with self.loop_tiles(self.first_tile, self.last_tile) as (tile, partial):
            self.locate_next_tiles(tile)
            with self.loop_heads(tile * KEY_BLOCK):
                self.key_tile(tile * KEY_BLOCK, partial)
        with self.loop_heads():
            self.store()
        finished = builder.atomic_add(args.finished_splits.at(self.row_block * 8), 1, "acq_rel")
        with builder.if_then(finished == args.num_splits - 1), self.loop_heads():
            self.merge_splits()

    def locate_item(self, item: Value) -> None:
        """Set the batch entry b, the key heads, the block of query rows and the split of the keys of an item.

        Items of the same keys are neighbours, because the rows of their heads may be neighbours in memory.
        """
        builder, args = self.builder, self.args
        heads, rows = args.H // args.group, args.group * args.n
        items_per_split = args.items // args.num_splits
        self.split, self.row_block = item // items_per_split, item % items_per_split
        num_blocks = (rows + (MAX_ROWS_PER_ITEM - 1)) // MAX_ROWS_PER_ITEM
        head_groups = (heads + (args.heads_per_item - 1)) // args.heads_per_item
        block, group_index = self.row_block % num_blocks, self.row_block // num_blocks
        self.b, self.first_head = group_index // head_groups, group_index % head_groups * args.heads_per_item
        self.num_heads = builder.minimum(heads - self.first_head, args.heads_per_item)
        self.first_row = block * MAX_ROWS_PER_ITEM
        self.num_rows = builder.minimum(rows - self.first_row, MAX_ROWS_PER_ITEM)
        row = self.b * args.tile_range_batch_stride + self.first_head * args.tile_range_head_stride
        self.tile_range_start = args.tile_range_start.at(row * 8).load(INT64)
        self.tile_range_stop = args.tile_range_start.at(row * 8 + 8).load(INT64)
        self.first_tile = self.split * args.split_size
        num_tiles = (args.m + (KEY_BLOCK - 1)) // KEY_BLOCK
        self.last_tile = builder.minimum(self.first_tile + args.split_size, num_tiles)

    @contextmanager
    def loop_heads(self, j0: Value | None = None) -> Iterator[None]:
        """Write a loop over the item's key heads. Locate what is kept of each head, and its tile of keys at j0."""
        unroll = self.spec.unroll
        rows = (self.num_rows + (unroll - 1)) // unroll * unroll  # kept for each head
        with self.builder.loop(0, self.num_heads) as k:
            self.g = self.first_head + k
            for name, (start, size) in self.kept_rows.items():
                setattr(self, name, start.at(k * rows * size))
            if j0 is not None:
                self.key.start, self.value.start = (self.tile_address(name, j0, k) for name in ("key", "value"))
                self.key.ahead = self.tile_address("key", j0, k + 2)
                self.value.ahead = self.tile_address("value", j0, k + 1)
            yield

    def locate_next_tiles(self, tile: Value) -> None:
        """Find the next two tiles, which are prefetched. After the last tile, a tile of the last range is repeated."""
        self.next_tiles = [tile, tile + 1, tile + 2]
        if self.spec.mask is None:
            return
        builder, args, index = self.builder, self.args, self.tile_range
        for step in (1, 2):
            stop = args.tile_range_last.at(index * 8).load(INT64)
            is_inside = self.next_tiles[step - 1] + 1 < stop
            index = builder.where(is_inside, index, builder.minimum(index + 1, self.tile_range_stop - 1))
            first = args.tile_range_first.at(index * 8).load(INT64)
            self.next_tiles[step] = builder.where(is_inside, self.next_tiles[step - 1] + 1, first)

    def tile_address(self, name: str, j0: Value, k: Value) -> Value:
        """Return the address of the rows of K or V from j0 on, for the item's head number k.

        After the last head, k goes on with the first head and the next tile.
        """
        builder, steps = self.builder, k // self.num_heads
        row_stride, head = getattr(self.args, f"{name}_row_stride"), self.first_head + k % self.num_heads
        _, second, third = self.next_tiles
        later = builder.where(steps == 1, second, third) * KEY_BLOCK
        return self.args.head_address(name, self.b, head).at(builder.where(steps == 0, j0, later) * row_stride)

    def locate_query(self, r: Value) -> tuple[Value, Value]:
        """Return (h, i) of a query row."""
        row = self.first_row + r
        return self.g * self.args.group + row // self.args.n, row % self.args.n

    def locate_row(self, r: Value) -> Value:
        """Return a query row's index in (B, H, n)."""
        h, i = self.locate_query(r)
        return (self.b * self.args.H + h) * self.args.n + i

    def init_rows(self) -> None:
        """Copy the rows of Q with the sign of the scale, and reset the running softmax."""
        builder, args, tiles, width = self.builder, self.args, self.tiles, self.spec.d_k
        step, lanes = (self.format.itemsize, self.lanes) if self.spec.unit_stride[0] else (args.query_column_stride, 1)
        sign = args.scale_sign.to(self.float)
        with builder.loop(0, self.num_rows) as r:
            h, i = self.locate_query(r)
            source = args.head_address("query", self.b, h).at(i * args.query_row_stride)
            with builder.loop(0, width, lanes) as d:
                self.query_row.at(d * tiles.itemsize).store(self.format.load(source.at(d * step), lanes) * sign)
            row = [self.query_row.at(d * tiles.itemsize).load(self.vector) for d in range(0, width, self.lanes)]
            scale = self.query_scales.at(r * tiles.itemsize)
            self.key.store_factors(row, self.queries.at(r * self.query_row_bytes), scale)
            self.running_max.at(r * tiles.itemsize).store(builder.value(-math.inf, self.float))
            self.running_sums.at(r * tiles.align).store(builder.value(0.0, self.vector))
            if self.has_entropy:
                self.weighted_exponents.at(r * tiles.align).store(builder.value(0.0, self.vector))
            with builder.loop(0, self.output_row_bytes // tiles.align) as v:
                self.output.at(r * self.output_row_bytes + v * tiles.align).store(builder.value(0.0, self.vector))

    def key_tile(self, j0: Value, partial: Value) -> None:
        """Process one tile of keys: scores, weights, weighted sum of V."""
        builder, visible = self.builder, self.visible_keys
        visible.select(j0, partial)
        self.num_keys = visible.count
        if visible.has_mask:  # the rows of a partial tile that follow are not known
            for rows in (self.key, self.value):
                rows.ahead = builder.where(partial, rows.start, rows.ahead)
        with builder.if_then(self.num_keys > 0):
            self.key.load_scales()
            self.value.load_scales()
            self.score_tile()
            with builder.if_else(partial | (self.num_keys < KEY_BLOCK)) as (yes, no):
                with yes, builder.loop(0, self.num_rows) as r:
                    self.softmax(r, j0, masked=True)
                with no, builder.loop(0, self.num_rows) as r:
                    self.softmax(r, j0, masked=False)
            self.accumulate_values()

    # -- scores ---------------------------------------------------------------------------------------------------
    def score_tile(self) -> None:
        """Compute S[r][key], a few rows and keys at a time, and prefetch the next tile of V."""
        builder, tiles = self.builder, self.key.tiles
        rows = self.spec.unroll
        group_lanes = SHUFFLE_BYTES // tiles.itemsize
        partial_row_bytes = KEY_BLOCK // group_lanes * tiles.align  # bytes per query row in self.sums
        keys_at_once = max(min(self.machine.vector_registers // 2 // rows, UNROLL), 1)  # so that sums stay in registers
        with builder.loop(0, self.num_rows, rows) as first:
            indices = (builder.minimum(first + r, self.num_rows - 1) for r in range(rows))
            queries = [self.queries.at(index * self.query_row_bytes) for index in indices]
            with builder.loop(0, self.num_keys, UNROLL) as key:
                columns = []  # for each key, the list of its sums with every query row
                for k in range(0, UNROLL, keys_at_once):
                    columns += self.multiply_keys(queries, key, range(k, min(k + keys_at_once, UNROLL)))
                for r in range(rows):
                    for k, partial in enumerate(reduce_within_groups([sums[r].get() for sums in columns], group_lanes)):
                        address = (key // group_lanes + k) * tiles.align + r * partial_row_bytes
                        self.sums.at(address).store(partial, tiles.align)
            with builder.loop(0, rows) as row_index, builder.loop(0, self.num_keys, self.lanes) as key:
                source = self.sums.at(row_index * partial_row_bytes + key * (tiles.align // group_lanes))
                count = self.lanes // group_lanes
                vectors = [source.at(k * tiles.align).load(tiles.sum_vector, tiles.align) for k in range(count)]
                target = self.scores.at((first + row_index) * self.score_row_bytes + key * tiles.itemsize)
                target.store(reduce_across_groups(vectors, group_lanes).to(self.float))

    def multiply_keys(self, queries: list[Value], first: Value, offsets: range) -> list[list[Variable]]:
        """Return a list for each key `first` + offset. It has a vector for each row q of Q; its lanes sum to q · k."""
        builder, tiles = self.builder, self.key.tiles
        keys = [builder.minimum(first + k, self.num_keys - 1) for k in offsets]
        ahead = [self.value.row(self.value.ahead, key) for key in keys]
        sums = [[Variable(builder, tiles.sum_vector, 0) for _ in queries] for _ in keys]
        size = self.key_format.itemsize  # bytes of a number
        width = self.lanes * tiles.pair_size  # numbers of a vector
        query_size = tiles.itemsize // tiles.pair_size
        vectors = max(CACHE_LINE_BYTES // (width * size), 1)  # of K in a cache line
        vectors = vectors if self.spec.d_k % (vectors * width) == 0 else 1
        with builder.loop(0, self.spec.d_k, vectors * width) as d:
            for row in ahead:
                builder.prefetch(row.at(d * size))
            columns = zip(*[self.key.load_vectors(key, d, vectors) for key in keys], strict=True)
            for v, right in enumerate(columns):
                left = [query.at((d + v * width) * query_size).load(tiles.operand_vector) for query in queries]
                for totals, numbers in zip(sums, right, strict=True):
                    for total, query in zip(totals, left, strict=True):
                        total.set(tiles.multiply_add(query, numbers, total.get()))
        return sums

    def softmax(self, r: Value, j0: Value, masked: bool) -> None:
        """Replace a row of scores by P, and update the row's running maximum and sum."""
        builder, tiles, args = self.builder, self.tiles, self.args
        mask, score = self.renderers[:2]
        score_row = self.scores.at(r * self.score_row_bytes)
        query_scale = self.query_scales.at(r * tiles.itemsize)
        factor = self.factor * query_scale.load(self.float) if self.key.tiles.pairs is INT16 else self.factor
        logits: list[Value] = []
        for v in range(KEY_BLOCK // self.lanes):
            s = self.key.multiply_by_scales(score_row.at(v * tiles.align).load(self.vector), v) * factor
            key = builder.arange(self.lanes, INT64) + v * self.lanes
            j = builder.minimum((self.visible_keys.row_vector(v) if masked else key) + j0, args.m - 1)
            if score is not None:
                s = score.evaluate_formula(self.symbols_at(r, j) | {"s": s}, {}).to(self.float).broadcast(self.lanes)
            if masked:
                allowed = key < self.num_keys
                if mask is not None:
                    allowed = allowed & self.evaluate_mask(r, j)
                s = builder.where(allowed, s, builder.value(-math.inf, self.vector))
            logits.append(s)
        running_max = self.running_max.at(r * tiles.itemsize)
        old_max, tile_max = running_max.load(self.float), reduce(builder.maximum, logits)
        new = builder.maximum(tile_max.reduce(builder.maximum), old_max)
        shift = builder.where(new == -math.inf, 0.0, new)
        alpha = self.exponentiate(old_max - shift)
        running_max.store(new)
        self.alpha.at(r * tiles.itemsize).store(alpha)
        total = self.running_sums.at(r * tiles.align)
        exponents = [s - shift for s in logits]
        weights = [self.exponentiate(x) for x in exponents]
        if self.has_entropy:
            self.add_exponents(r, old_max - shift, alpha, weights, exponents)
        total.store(builder.fma(total.load(self.vector), alpha, sum_pairwise(weights)))
        weights = [self.value.multiply_by_scales(weight, v) for v, weight in enumerate(weights)]
        self.value.store_factors(weights, score_row, self.weight_scales.at(r * tiles.itemsize))

    def symbols_at(self, r: Value, j: Value) -> dict[str, Value]:
        """Return the symbols of a query row and a vector of keys, except s."""
        h, i = self.locate_query(r)
        return {"b": self.b, "h": h, "i": i, "j": j.to(self.integer), "n": self.args.n, "m": self.args.m}

    def evaluate_mask(self, r: Value, j: Value) -> Value:
        """Return the condition of the mask for a query row and a vector of keys."""
        mask = self.renderers[0]
        assert mask is not None
        return mask.evaluate_formula(self.symbols_at(r, j), {}).broadcast(self.lanes)

    def add_exponents(
        self, r: Value, difference: Value, alpha: Value, weights: list[Value], exponents: list[Value]
    ) -> None:
        """Rescale T from the maximum m to m' = m − difference, with α = e^difference, and add the terms of a tile."""
        builder, tiles = self.builder, self.tiles
        place, sums = self.weighted_exponents.at(r * tiles.align), self.running_sums.at(r * tiles.align)
        difference = builder.maximum(difference, MIN_EXPONENT).broadcast(self.lanes)
        total = builder.fma(difference, sums.load(self.vector), place.load(self.vector)) * alpha
        terms = []
        for p, x in zip(weights, exponents, strict=True):
            # a weight that rounds to 1 has the exponent 0, so that the entropy of one visible key is exactly 0
            terms.append(p * builder.where(p == 1.0, 0.0, builder.maximum(x, MIN_EXPONENT)))
        place.store(total + sum_pairwise(terms))

    # -- values ---------------------------------------------------------------------------------------------------
    def accumulate_values(self) -> None:
        """Compute O[r] = α O[r] + Σ_j P[r][j] · V[j], and prefetch the rows of K ahead."""
        builder, tiles = self.builder, self.value.tiles
        rows, vectors = self.spec.unroll, self.spec.d_v // self.lanes
        length = (self.num_keys + (tiles.pair_size - 1)) // tiles.pair_size
        widths = self.divide_columns(vectors)
        starts = [sum(widths[:group]) for group in range(len(widths))]

        def make_reader(group: int, width: int) -> Callable[[Value], list[Value]]:
            """Return a function that loads row k of V in one group of columns, and prefetches a share of K's rows."""
            key_row_bytes = self.key_format.row_bytes(self.spec.d_k)
            lines = range(group * CACHE_LINE_BYTES, key_row_bytes, CACHE_LINE_BYTES * len(starts))
            first = starts[group] * self.lanes

            def read(k: Value) -> list[Value]:
                for u in range(tiles.pair_size):
                    row = self.key.ahead.at((k * tiles.pair_size + u) * self.key.row_stride)
                    for at in lines:
                        builder.prefetch(row.at(at))
                if tiles.paired:
                    return self.value.load_row_pairs(k, range(first, first + width * self.lanes, 2 * self.lanes))
                return list(self.value.load_vectors(k, first, width))

            return read

        with builder.loop(0, self.num_rows, rows) as first:
            row_indices = [first + r for r in range(rows)]
            bases = [self.scores.at(row_index * self.score_row_bytes) for row_index in row_indices]
            for group, (start, width) in enumerate(zip(starts, widths, strict=True)):
                sums = [[Variable(builder, tiles.sum_vector, 0) for _ in range(width)] for _ in range(rows)]
                tiles.accumulate(sums, bases, tiles.itemsize, self.value.start, length, read=make_reader(group, width))
                for row_index, row in zip(row_indices, sums, strict=True):
                    alpha = self.alpha.at(row_index * tiles.itemsize).load(self.float)
                    totals = [total.get().to(self.float) for total in row]
                    if tiles.pairs is INT16:
                        scale = self.weight_scales.at(row_index * tiles.itemsize).load(self.float)
                        totals = [total * scale for total in totals]
                    for v, total in enumerate(totals):
                        at = self.output.at(row_index * self.output_row_bytes + (start + v) * tiles.align)
                        at.store(builder.fma(at.load(self.vector), alpha, total))

    def divide_columns(self, vectors: int) -> list[int]:
        """Return how many vectors of V's columns each pass reads: about as many in each, in few passes.

        For each vector of a pass, the registers hold the vector and the sums of the query rows. They also hold a
        weight, and numbers before they are widened, or products that are not added yet.
        """
        others, pair = 1 if self.machine.has_fma and self.value_format.is_native else 3, self.value.tiles.pair_size
        most = (self.machine.vector_registers - others) // (self.spec.unroll + 1) // pair * pair
        if self.value_format.name == "float16" and not self.value_format.has_conversion:
            most = self.tiles.vectors  # the conversion by integer operations takes many registers
        passes = -(-vectors // most)
        return [(vectors // pair + k) // passes * pair for k in range(passes)]

    # -- outputs --------------------------------------------------------------------------------------------------
    def store(self) -> None:
        """Store the split's O / l and lse by row; 0 and −∞ if the query row sees no key of the split."""
        builder, args, tiles = self.builder, self.args, self.value.tiles
        unit = self.spec.nats_per_unit
        with builder.loop(0, self.num_rows) as r:
            total = self.running_sums.at(r * tiles.align).load(self.vector).sum()
            largest = self.running_max.at(r * tiles.itemsize).load(self.float).to(DOUBLE)
            is_empty = total == 0.0
            divisor = builder.where(is_empty, 1.0, total)
            split_row = self.split * (args.batches * args.H * args.n) + self.locate_row(r)
            lse = builder.fma(largest, unit, builder.call_intrinsic("log", divisor.to(DOUBLE)))
            args.split_lse.at(split_row * 8).store(builder.where(is_empty, -math.inf, lse))
            if self.has_entropy:
                exponents = self.weighted_exponents.at(r * tiles.align).load(self.vector).sum()
                wide = divisor.to(DOUBLE)
                entropy = builder.call_intrinsic("log", wide) - exponents.to(DOUBLE) * unit / wide
                args.split_entropy.at(split_row * 8).store(entropy)
            target = args.split_output.at(split_row * self.output_row_bytes)
            nonfinite = Variable(builder, self.vector, 0.0)
            step, size = tiles.pair_size * tiles.align, self.output_row_bytes
            with builder.loop(0, size, step) as at:
                columns = [self.output.at(r * size + at + k).load(self.vector) for k in range(0, step, tiles.align)]
                if tiles.paired:  # restore the order of the columns; see `load_row_pairs`
                    first, second = columns
                    columns = [first.interleave(second, half, SHUFFLE_BYTES // tiles.itemsize) for half in range(2)]
                for k, row in enumerate(columns):
                    nonfinite.set(nonfinite.get() + row * 0.0)
                    target.at(at + k * tiles.align).store(row / divisor.broadcast(self.lanes))
            with builder.if_then((nonfinite.get() != 0.0).any()):
                args.nonfinite_flag.store(builder.value(1, INT64))

    def merge_splits(self) -> None:
        """Store lse = ln Σ_p exp lse_p, over the splits and the sink, and output = Σ_p exp(lse_p − lse) output_p."""
        builder, args, tiles = self.builder, self.args, self.tiles
        rows = args.batches * args.H * args.n  # number of query rows in the output of a split
        with builder.loop(0, self.num_rows) as r:
            h, i = self.locate_query(r)
            row, output = self.locate_row(r), args.output_row(self.b, h, i)
            sink = args.sinks.at(h * 8).load(DOUBLE) if self.spec.has_sinks else builder.value(-math.inf, DOUBLE)
            running_max = Variable(builder, DOUBLE, sink)
            with builder.loop(0, args.num_splits) as split:
                lse = args.split_lse.at((split * rows + row) * 8).load(DOUBLE)
                running_max.set(builder.maximum(lse, running_max.get()))
            shift = builder.where(running_max.get() == -math.inf, 0.0, running_max.get())
            sink_share = exp(builder, sink - shift) if self.spec.has_sinks else builder.value(0.0, DOUBLE)
            total, entropy = Variable(builder, DOUBLE, sink_share), Variable(builder, DOUBLE, 0.0)
            with builder.loop(0, args.num_splits) as split:
                address = args.split_lse.at((split * rows + row) * 8)
                difference = address.load(DOUBLE) - shift
                share = exp(builder, difference)
                address.store(share)
                total.set(total.get() + share)
                if self.has_entropy:
                    own = args.split_entropy.at((split * rows + row) * 8).load(DOUBLE)
                    term = builder.where(share == 0.0, 0.0, share * (own - difference))
                    entropy.set(entropy.get() + term)
            is_empty = total.get() == 0.0
            divisor = builder.where(is_empty, 1.0, total.get())
            log_total = builder.call_intrinsic("log", divisor)
            if self.has_entropy:
                value = (entropy.get() + log_total * (total.get() - sink_share)) / divisor
                args.outputs[0].pointer.at(row * tiles.itemsize).store(value.to(self.float))
            lse = running_max.get() + log_total
            lse = builder.where(is_empty, -math.inf, lse)
            with builder.if_then(self.needs_lse()):
                self.store_lse(row, lse)
            with builder.loop(0, self.spec.d_v, self.lanes) as c:
                weighted = Variable(builder, self.vector, 0.0)
                with builder.loop(0, args.num_splits) as split:
                    share = args.split_lse.at((split * rows + row) * 8).load(DOUBLE) / divisor
                    offset = (split * rows + row) * self.output_row_bytes + c * tiles.itemsize
                    entries = args.split_output.at(offset).load(self.vector)
                    weighted.set(builder.fma(entries, share.to(self.float), weighted.get()))
                self.format.store(output.at(c * self.format.itemsize), weighted.get())


def sum_pairwise(values: list[Value]) -> Value:
    """Return the sum of the vectors in the list. Neighbours are added first."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
