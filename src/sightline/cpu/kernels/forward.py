"""The forward kernel: FlashAttention's running softmax on register tiles, generated for a problem's formulas.

    Sᵀ[key][lane]  = Σ_d  K[key][d] · Qᵀ[d][lane]          for each tile in the block's tile ranges:
    Sᵀ             = score, mask                               m' = max(m, max Sᵀ),  α = 2^(m − m')
    P              = 2^(Sᵀ − m')                               l  = α l + Σ P
    Oᵀ[d_v][lane]  = α Oᵀ + Σ_key V[key][d_v] · P[key][lane]   at the end O = Oᵀ / l

m is the running maximum of a query, and l its running sum. With a score formula or sinks, e replaces the base 2.
Register tiles (`codegen.register_tile`) compute both products. A work item is a few blocks of queries of heads that
share a key head. The blocks take turns at each tile of keys, so that the tile is read, and copied if need be, once for
all of them. An atomic counter distributes the items among the threads.

`ScoreFunctions` writes the functions that apply score and mask to a tile. They may be in a module of their own, so that
the rest of the kernel is compiled once for all formulas.
"""

from __future__ import annotations

import functools
import math
import operator

from ..codegen.abi import FORWARD_FIELDS
from ..codegen.builder import Variable
from ..codegen.values import BOOL, DOUBLE, FLOAT, INT32, VOID, Value
from .fused_statistics import FusedStatisticsCode
from .kernel_spec import KEY_BLOCK, max_blocks_per_item
from .shared_tiles import NO_TILE, SharedTiles, min_blocks_for_copy
from .tile_functions import ScoreFunctions


class Forward(SharedTiles):
    """Write the forward kernel into a module."""

    fields = FORWARD_FIELDS
    functions = ScoreFunctions
    own_formulas = ()
    o_t: Value  # Oᵀ[d][lane] of a block

    def allocate(self) -> None:
        tiles, spec = self.tiles, self.spec
        self.s_t = tiles.matrix(KEY_BLOCK)
        count = max_blocks_per_item(spec, tiles.block, tiles.itemsize)
        copies = count >= min_blocks_for_copy(tiles.block)
        self.key = self.allocate_operand(1, needs_rows=True, needs_columns=False, copies_far_rows=copies)
        self.value = self.allocate_operand(2, needs_rows=False, needs_columns=True, copies_far_rows=copies)
        self.running_max, self.running_sum, self.tile_max = (tiles.variables() for _ in range(3))
        self.max_row = tiles.matrix(1)  # in which the functions of the formulas return `tile_max`
        # `compensation` collects the rounding errors of `running_sum`
        self.shift, self.alpha, self.compensation = (tiles.variables() for _ in range(3))
        self.fused_statistics = FusedStatisticsCode(self)
        variables = [*self.running_max, *self.running_sum, *self.compensation]
        rows = {"q_t": tiles.packed_length(spec.d_k), "o_t": spec.d_v}
        self.allocate_blocks(count, rows, [*variables, *self.fused_statistics.kept_variables()])

    def process_item(self, item: Value) -> None:
        builder = self.builder
        self.locate_item(item)
        with self.loop_blocks(is_new=True):
            self.transpose_queries()
        needs_attempt = Variable(builder, BOOL, True)
        with builder.loop(0, 2) as attempt, builder.if_then(needs_attempt.get()):
            self.attend(nan_safe=attempt == 1)
            needs_attempt.set(False)
            with self.loop_blocks():
                needs_attempt.set(needs_attempt.get() | self.has_nan())
        with self.loop_blocks(loads=True):
            self.store()

    def locate_item(self, item: Value) -> None:
        """Locate the item's key head and blocks. The last blocks, which take longest if causal, come first."""
        builder, args = self.builder, self.args
        blocks = args.group * args.query_blocks  # the blocks of all heads of a key head
        items = (blocks + (args.blocks_per_item - 1)) // args.blocks_per_item
        key_heads = args.H // args.group
        key_head_index = item // items
        self.b, self.g = key_head_index // key_heads, key_head_index % key_heads
        first = (items - 1 - item % items) * args.blocks_per_item
        self.select_blocks(first, builder.minimum(blocks - first, args.blocks_per_item))
        self.locate_keys(self.b, self.g, self.key, self.value)

    # -- attention of the blocks ----------------------------------------------------------------------------------
    def attend(self, nan_safe: Value) -> None:
        """Run the softmax over the blocks' tiles. If `nan_safe`, V is ignored where weights are 0, even NaN and ∞.

        The NaN-safe attempt runs only if an output of the first attempt has a NaN. It costs nothing for finite inputs.
        """
        builder = self.builder
        with self.loop_blocks(loads=True, stores=True):
            is_wrong = Variable(builder, BOOL, True)
            with builder.if_then(nan_safe):  # blocks without NaN keep their output, whose bits the other sum may change
                is_wrong.set(self.has_nan())
            with builder.if_then(is_wrong.get()):
                self.init_block()
        operands = self.key, self.value
        with (
            self.loop_shared_tiles(0, NO_TILE, operands) as j0,
            self.loop_blocks(loads=True, stores=True),
            builder.if_then(self.is_at(j0)),
        ):
            for operand in operands:
                operand.prefetch_next(self.block_number, self.num_blocks)
            self.key_tile(j0, self.is_partial(), nan_safe)

    def init_block(self) -> None:
        """Prepare the output and the variables of a block."""
        self.tiles.fill(self.o_t, 0, self.spec.d_v, 0.0)
        for v in self.vectors:
            sink = self.args.sinks.at(self.h * 8).load(DOUBLE).to(self.float) if self.spec.has_sinks else -math.inf
            self.running_max[v].set(sink)
            self.running_sum[v].set(1.0 if self.spec.has_sinks else 0.0)
            self.compensation[v].set(0.0)
        self.fused_statistics.init()
        self.restart_tiles()

    def key_tile(self, j0: Value, partial: Value, nan_safe: Value) -> None:
        """Process one tile of a block: scores, score formula and mask, softmax, weighted sum of V."""
        builder = self.builder
        self.evaluate_block()
        for v in self.vectors:
            self.tile_max[v].set(-math.inf)
        self.score_tile()
        self.write_by_mask(partial, functools.partial(self.modify_scores, j0))
        self.softmax(j0)
        with builder.if_else(nan_safe) as (yes, no):
            with yes:
                self.accumulate_values_nan_safe()
            with no:
                self.accumulate_values()

    def score_tile(self) -> None:
        """Compute Q · K without the scale, and each query's maximum in the tile while Q · K is in registers."""
        builder = self.builder

        def finish(key: Value, v: int, s: Value) -> None:
            self.tiles.store(self.s_t, key, v, s)
            self.tile_max[v].set(builder.maximum(s, self.tile_max[v].get()))

        self.key.multiply_rows(self.q_t, finish)

    def modify_scores(self, j0: Value, masked: bool) -> None:
        """Call the function of `ScoreFunctions`, if any, that replaces Sᵀ and each query's maximum."""
        changes_scores = masked or self.spec.score is not None
        if not changes_scores and not self.fused_statistics.sums:
            return
        builder, position = self.builder, (self.b, self.h, self.i0, j0, self.num_keys)
        matrices = self.s_t, self.max_row, self.fused_statistics.values
        builder.call(ScoreFunctions.names[masked], VOID, builder.arguments[0], *matrices, *position)
        for v in self.vectors if changes_scores else ():
            self.tile_max[v].set(self.tiles.load(self.max_row, 0, v))

    def prescale_large_scores(self) -> Value:
        """Return the factor that Sᵀ and its maximum are multiplied by in the softmax: 1 if Sᵀ is scaled here.

        The softmax rounds s · factor − m' once, but m' was rounded before. If the unit in the last place of m' is more
        than 1, the difference at the maximum may be far from 0. Tiles with such scores are scaled here, so that
        s · factor and m' are rounded alike.
        """
        builder, tiles = self.builder, self.tiles
        limit = 2.0 ** (53 if self.float is DOUBLE else 24)
        sizes = [builder.call_intrinsic("fabs", self.tile_max[v].get() * self.factor) for v in self.vectors]
        huge = [((size > limit) & (size < math.inf)).any() for size in sizes]
        factor = Variable(builder, self.float, self.factor)
        with builder.if_then(functools.reduce(operator.or_, huge)):
            for v in self.vectors:
                self.tile_max[v].set(self.tile_max[v].get() * self.factor)
            with builder.loop(0, self.num_keys) as key:
                for v in self.vectors:
                    tiles.store(self.s_t, key, v, tiles.load(self.s_t, key, v) * self.factor)
            factor.set(1.0)
        return factor.get()

    def softmax(self, j0: Value) -> None:
        """Replace Sᵀ by P = 2^(Sᵀ − m') and update the running maximum m and sum l.

        If operands are pairs of bfloat16, P is stored as pairs of neighbouring keys.
        """
        builder, tiles = self.builder, self.tiles
        factor = self.prescale_large_scores() if self.spec.score is None else builder.value(1.0, self.float)
        if self.fused_statistics.has_max_score:
            self.fused_statistics.update_max_score(j0, factor)
        for v in self.vectors:
            new = builder.maximum(self.tile_max[v].get() * factor, self.running_max[v].get())
            shift = builder.where(new == -math.inf, 0.0, new)
            difference = self.running_max[v].get() - shift
            alpha = self.exponentiate(difference)
            self.fused_statistics.rescale(v, difference, alpha)
            self.running_max[v].set(new)
            self.shift[v].set(shift)
            self.alpha[v].set(alpha)
        sums = [Variable(builder, self.vector, 0.0) for _ in self.vectors]
        step = 2 if not self.spec.has_dropout else 4
        self.pad_keys(step, -math.inf, self.s_t)
        with builder.loop(0, self.num_keys, step) as key:
            keep_mask = self.dropout_keep_mask(j0 + key) if self.spec.has_dropout else []
            for v in self.vectors:
                scores = [tiles.load(self.s_t, key + k, v) for k in range(step)]
                exponents = [builder.fma(s, factor, -self.shift[v].get()) for s in scores]
                weights = [self.exponentiate(x) for x in exponents]
                for k, p in enumerate(weights):
                    sums[v].set(sums[v].get() + p)
                    self.fused_statistics.add(key + k, v, exponents[k], p)
                if keep_mask:
                    weights = [builder.where(keep_mask[k][v], p, 0.0) for k, p in enumerate(weights)]
                for k in range(0, step, tiles.pair_size):
                    if self.paired:
                        joined = self.pack_pairs(weights[k], weights[k + 1])
                        tiles.at(self.s_t, (key + k) // 2, v).store(joined, tiles.align)
                    else:
                        tiles.store(self.s_t, key + k, v, weights[k])
        for v in self.vectors:
            self.add_to_total(v, sums[v].get())
            self.fused_statistics.add_tile(v, sums[v].get())

    def add_to_total(self, v: int, weights: Value) -> None:
        """Compute l = α l + Σ P, and add up its rounding errors (Knuth's two-sum): later passes need a precise lse."""
        alpha, old = self.alpha[v].get(), self.running_sum[v].get()
        new = self.builder.fma(old, alpha, weights)
        old = old * alpha
        added = new - old
        compensation = (old - (new - added)) + (weights - added)
        self.compensation[v].set(self.builder.fma(self.compensation[v].get(), alpha, compensation))
        self.running_sum[v].set(new)

    def accumulate_values(self) -> None:
        """Compute Oᵀ = α Oᵀ + Σ V[key][d_v] · P[key][lane].

        The tile's sum starts at 0 and is added to α Oᵀ at the end. So it is not rounded at the magnitude of Oᵀ.
        """
        builder, tiles = self.builder, self.tiles

        def finish(d: Value, v: int, total: Value) -> None:
            old = tiles.load(self.o_t, d, v)
            tiles.store(self.o_t, d, v, builder.fma(old, self.alpha[v].get(), total))

        self.value.multiply_columns(self.s_t, finish)

    def accumulate_values_nan_safe(self) -> None:
        """Do what `accumulate_values` does, one number of V at a time, and ignore that number where the weight is 0."""
        builder, tiles = self.builder, self.tiles
        with builder.loop(0, self.spec.d_v) as d:
            sums = [
                Variable(builder, self.vector, tiles.load(self.o_t, d, v) * self.alpha[v].get()) for v in self.vectors
            ]
            with builder.loop(0, self.num_keys) as key:
                number = self.value.load_entry(key, d).broadcast(self.lanes)
                for v in self.vectors:
                    p, old = self.load_weight(key, v), sums[v].get()
                    sums[v].set(builder.where(p == 0.0, old, builder.fma(number, p, old)))
            for v in self.vectors:
                tiles.store(self.o_t, d, v, sums[v].get())

    def load_weight(self, key: Value, v: int) -> Value:
        """Return P of one key and a vector of queries, extracted from its pair if P is stored as pairs of keys."""
        builder, tiles = self.builder, self.tiles
        if not self.paired:
            return tiles.load(self.s_t, key, v)
        pair = tiles.at(self.s_t, key // 2, v).load(tiles.operand_vector, tiles.align)
        first = (pair << 16).bits(FLOAT)
        second = (pair & builder.value(-(2**16), INT32)).bits(FLOAT)
        return builder.where((key % 2) == 0, first, second)

    # -- outputs --------------------------------------------------------------------------------------------------
    def has_nan(self) -> Value:
        """True if an output of the block is NaN.

        The cause is NaN or ∞ in V, even at a hidden key, or among scores and sinks; or finite sums that overflow.
        """
        builder = self.builder
        marks = [Variable(builder, self.vector, 0.0) for _ in self.vectors]  # 1 in lanes with a NaN
        with builder.loop(0, self.spec.d_v) as d:
            for v in self.vectors:
                entry = self.tiles.load(self.o_t, d, v)
                marks[v].set(builder.where(entry != entry, 1.0, marks[v].get()))
        return functools.reduce(operator.or_, [(mark.get() != 0.0).any() for mark in marks])

    def store(self) -> None:
        """Store O = Oᵀ / l by row and, if the call needs it, lse = m + ln l in nats.

        A query that sees no key gets output 0 and lse −∞.
        """
        builder, args, tiles = self.builder, self.args, self.tiles
        sum_row, compensation_row, max_row = tiles.matrix(1), tiles.matrix(1), tiles.matrix(1)
        for v in self.vectors:
            is_empty = self.running_sum[v].get() == 0.0
            sums = builder.where(is_empty, 1.0, self.running_sum[v].get())
            share = args.dropout_scale.to(self.float) / sums
            tiles.store(sum_row, 0, v, sums)
            tiles.store(compensation_row, 0, v, self.compensation[v].get())
            tiles.store(max_row, 0, v, builder.where(is_empty, -math.inf, self.running_max[v].get()))
            with builder.loop(0, self.spec.d_v) as d:
                tiles.store(self.o_t, d, v, tiles.load(self.o_t, d, v) * share)
        output = args.output_row(self.b, self.h, self.i0)
        self.store_transposed(self.o_t, self.spec.d_v, output, self.format, args.output_row_stride)
        with builder.if_then(self.needs_lse()), builder.loop(0, self.num_valid) as lane:
            rows = (sum_row, compensation_row, max_row)
            total, error, largest = (self.lane_address(x, 0, lane).load(self.float).to(DOUBLE) for x in rows)
            log_total = builder.call_intrinsic("log", total + error)
            self.store_lse(self.row + lane, builder.fma(largest, self.spec.nats_per_unit, log_total))
        self.fused_statistics.store()
