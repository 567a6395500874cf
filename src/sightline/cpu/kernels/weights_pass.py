"""The second pass over the tiles: normalised weights from the saved normaliser, each tile handed to a statistic.

    Sᵀ[j][i] = Σ_d K[j][d] · Qᵀ[d][i]        P = e^(S − lse), 0 where hidden and in rows that see nothing

The normaliser is a sum of two numbers of the accumulator's type, so that weights do not take on its rounding. Each
statistic is a kernel of its own, a subclass that says what an item of work is and what becomes of a tile (keywise.py,
rowwise.py). Every number of the result is written by one item alone, in an order that the problem decides, so that
results are the same for any number of threads.

NaN and ∞ are not looked after here: a visible one shows in lse, and the caller takes another road. What the mask hides
never enters, since runs that are full hold nothing hidden.
"""

from __future__ import annotations

import math
from typing import Any

from ..codegen.abi import COMMON_FIELDS
from ..codegen.builder import DOUBLE, INT64, POINTER, Value
from .block import KEY_BLOCK, Block

__all__ = ["WeightsPass"]


class WeightsPass(Block):
    """Writes a kernel into a module; a statistic is a subclass.

    `spec.kernel` ends in "max" where the largest weight is wanted in place of a sum.
    """

    fields = COMMON_FIELDS | {
        "output": POINTER,  # in the accumulator's type unless the statistic says otherwise
        "first_query": INT64,  # the queries that count: weights of others are 0
        "last_query": INT64,
    }

    def allocate(self) -> None:
        tiles = self.tiles
        self.q_t, self.s_t = tiles.matrix(tiles.packed_length(self.spec.d_k)), tiles.matrix(KEY_BLOCK)
        self.key = self.allocate_operand(1, needs_rows=True, needs_columns=False)
        self.high_matrix, self.low_matrix = tiles.matrix(1), tiles.matrix(1)
        self.lse_high, self.lse_low = tiles.variables(), tiles.variables()
        self.allocate_statistic()

    def allocate_statistic(self) -> None:
        """The statistic's own scratch."""

    def process_tile(self, j0: Value, masked: bool) -> None:
        """What becomes of a tile whose products are in Sᵀ; `masked`: some of it is hidden."""
        raise NotImplementedError(type(self).__name__)

    # -- sums and maxima ------------------------------------------------------------------------------------------
    @property
    def is_max(self) -> bool:
        """Whether maxima are wanted in place of sums."""
        return self.spec.kernel.endswith("max")

    def combine(self, x: Value, y: Value) -> Value:
        """The sum of weights, or the larger."""
        return self.builder.maximum(x, y) if self.is_max else x + y

    def allocate_accumulators(self, count: int) -> Value:
        """Scratch for so many running vectors, each beside what its sum has lost."""
        return self.tiles.scratch(2 * count * self.tiles.align)

    def clear_accumulators(self, accumulators: Value, count: Any) -> None:
        """Begin so many of them at 0."""
        with self.builder.loop(0, count * 2) as at:
            accumulators.at(at * self.tiles.align).store(self.builder.value(0.0, self.vector), self.tiles.align)

    def accumulator_address(self, accumulators: Value, index: Any) -> Value:
        """Address of one of them."""
        return accumulators.at(index * (2 * self.tiles.align))

    def accumulate(self, address: Value, x: Value) -> None:
        """Join x to a running vector; a sum's error does not grow with its terms (Kahan, 1965)."""
        align = self.tiles.align
        old = address.load(self.vector, align)
        if self.is_max:
            address.store(self.combine(x, old), align)
            return
        x = x - address.at(align).load(self.vector, align)
        new = old + x
        address.store(new, align)
        address.at(align).store((new - old) - x, align)

    # -- a block of queries ---------------------------------------------------------------------------------------
    def attend(self, queries: tuple[Value, Value], tiles: tuple[Value, Value]) -> None:
        """The block against those of its runs' tiles; weights of queries not among these are 0."""
        args = self.args
        self.key.locate(
            args.head_address("key", self.b, self.h // args.group), args.key_row_stride, args.key_column_stride
        )
        self.transpose_queries()
        self.load_lse_high_low(*queries)
        self.evaluate_block()
        with self.loop_tiles(*tiles) as (tile, partial):
            self.key_tile(tile * KEY_BLOCK, partial)

    def clip_lanes(self, first: Value, last: Value) -> tuple[Value, Value]:
        """The lanes of the queries among these."""
        builder = self.builder
        return builder.maximum(first - self.i0, 0), builder.minimum(last - self.i0, self.num_valid)

    def load_lse_high_low(self, first: Value, last: Value) -> None:
        """lse per lane in the scores' base, as high + low; ∞ where all weights shall be 0."""
        builder, args, tiles = self.builder, self.args, self.tiles
        unit = math.log2(math.e) if self.spec.is_base_2 else 1.0
        for v in self.vectors:
            tiles.store(self.high_matrix, 0, v, builder.value(math.inf, self.vector))
            tiles.store(self.low_matrix, 0, v, builder.value(0.0, self.vector))
        with builder.loop(*self.clip_lanes(first, last)) as lane:
            lse = args.lse.at((self.row + lane) * 8).load(DOUBLE)
            with builder.if_then(lse != -math.inf):
                high = (lse * unit).to(self.float)
                self.lane_address(self.high_matrix, 0, lane).store(high)
                self.lane_address(self.low_matrix, 0, lane).store((lse * unit - high.to(DOUBLE)).to(self.float))
        for v in self.vectors:
            self.lse_high[v].set(tiles.load(self.high_matrix, 0, v))
            self.lse_low[v].set(tiles.load(self.low_matrix, 0, v))

    def key_tile(self, j0: Value, partial: Value) -> None:
        """One tile: Q · K, not yet scaled, and what the statistic makes of it."""
        builder = self.builder
        self.num_keys = builder.minimum(self.args.m - j0, KEY_BLOCK)
        self.key.stage(j0, self.num_keys)

        def store_scores(key: Value, v: int, s: Value) -> None:
            self.tiles.store(self.s_t, key, v, s)

        self.product(
            self.num_keys, KEY_BLOCK, self.key.row, self.q_t, self.tiles.packed_length(self.spec.d_k), store_scores
        )
        with builder.if_else(partial) as (yes, no):  # without a mask every run is full
            with yes:
                if self.renderers[0] is not None:
                    self.transpose_tables(j0, 0)
                    self.process_tile(j0, masked=True)
            with no:
                self.transpose_tables(j0, 1)
                self.process_tile(j0, masked=False)

    # -- one key and all queries of the block ---------------------------------------------------------------------
    def compute_weight(self, s: Value, v: int) -> Value:
        """P of what `logits` gives."""
        high = self.lse_high[v].get()
        shifted = s - high if self.renderers[1] is not None else self.builder.fma(s, self.factor, -high)
        return self.exponentiate(shifted - self.lse_low[v].get())

    def compute_weights(self, key: Value, j0: Value, masked: bool) -> list[Value]:
        """P of one key, by vector; 0 where hidden."""
        builder = self.builder
        pairs = [(self.compute_weight(s, v), allowed) for v, s, allowed in self.logits(key, j0, masked)]
        zero = builder.value(0.0, self.vector)
        return [p if allowed is None else builder.where(allowed, p, zero) for p, allowed in pairs]
