"""Statistics of each query that the forward kernel computes in its running softmax, at a few instructions per score.

p = e^x with x = s − m is a weight before the division by l. When the running maximum m changes to m', with
α = e^(m − m'), the sums are rescaled:

    max_score   m, and the first key that has it
    entropy     −Σ P ln P = ln l · Σp / l − T / l,    T = Σ p x,    T' = α (T + (m − m') Σp) + ...
    a sum       Σ P f = M / l,    M = Σ p f,    M' = α M + ...    for a formula f of the pair and its final score
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..codegen.builder import Variable
from ..codegen.values import DOUBLE, INT64, Value, vector
from .kernel_spec import KEY_BLOCK

if TYPE_CHECKING:
    from .forward import Forward

MIN_EXPONENT = -2048.0  # for a smaller x, e^x and 2^x are 0 in every dtype


class FusedStatisticsCode:
    """The code that computes the roles in `spec.roles`: "max_score", "entropy", and "sum" for each extra formula.

    The output arrays (B, H, n) follow the tables among the arguments, in this order: the maximum score in the
    accumulator's type, its key as int64, then entropy and sums in the accumulator's type.
    """

    def __init__(self, block: Forward) -> None:
        self.block = block
        builder, tiles, spec = block.builder, block.tiles, block.spec
        self.has_max_score, self.has_entropy = "max_score" in spec.roles, "entropy" in spec.roles
        self.nats_per_unit = spec.nats_per_unit
        self.indices = vector(block.integer, block.lanes)
        self.max_score, self.weighted_exponents, self.weight_sum = (tiles.variables() for _ in range(3))
        self.max_score_key = [Variable(builder, self.indices) for _ in block.vectors]
        self.sums = [(tiles.variables(), tiles.variables()) for _ in range(spec.roles.count("sum"))]  # of tiles, in all
        self.values = tiles.matrix(KEY_BLOCK * len(self.sums))  # the formulas of the sums over a tile

    def kept_variables(self) -> list[Variable]:
        """Return the variables of a block that its next tile reads."""
        kept = [*self.max_score, *self.max_score_key] if self.has_max_score else []
        if self.has_entropy:
            kept += [*self.weighted_exponents, *self.weight_sum]
        return kept + [variable for _, whole in self.sums for variable in whole]

    def init(self) -> None:
        for v in self.block.vectors:
            self.max_score[v].set(-math.inf)
            self.max_score_key[v].set(-1)
            self.weighted_exponents[v].set(0.0)
            self.weight_sum[v].set(0.0)
            for _, whole in self.sums:
                whole[v].set(0.0)

    def update_max_score(self, j0: Value, factor: Value) -> None:
        """Update the maximum score and its first key. A tile is searched only if it has a larger maximum."""
        block = self.block
        builder = block.builder
        for v in block.vectors:
            tile_max, old = block.tile_max[v].get(), self.max_score[v].get()
            scaled_max = tile_max * factor
            is_larger = scaled_max > old
            with builder.if_then(is_larger.any()):
                tile_key = Variable(builder, self.indices, self.max_score_key[v].get())
                with builder.loop(0, block.num_keys) as k:
                    key = block.num_keys - 1 - k  # the loop ends with the first key
                    j = (j0 + key).to(block.integer).broadcast(block.lanes)
                    tile_key.set(builder.where(block.tiles.load(block.s_t, key, v) == tile_max, j, tile_key.get()))
                self.max_score_key[v].set(builder.where(is_larger, tile_key.get(), self.max_score_key[v].get()))
                self.max_score[v].set(builder.where(is_larger, scaled_max, old))

    def rescale(self, v: int, difference: Value, alpha: Value) -> None:
        """Rescale the sums from the maximum m to m' = m − difference, with α = e^difference."""
        builder = self.block.builder
        if self.has_entropy:
            difference = builder.maximum(difference, builder.value(MIN_EXPONENT, difference.type))
            shifted = difference * self.weight_sum[v].get()
            self.weighted_exponents[v].set((self.weighted_exponents[v].get() + shifted) * alpha)
        self.weight_sum[v].set(self.weight_sum[v].get() * alpha)
        for tile, whole in self.sums:
            whole[v].set(whole[v].get() * alpha)
            tile[v].set(0.0)

    def add(self, key: Value, v: int, x: Value, p: Value) -> None:
        """Add one key and a vector of queries: exponent x, weight p = e^x; for hidden pairs x = −∞, p = 0."""
        builder = self.block.builder
        if self.has_entropy:
            # a weight that rounds to 1 has the exponent 0, so that the entropy of one visible key is exactly 0
            x = builder.where(p == 1.0, 0.0, builder.maximum(x, builder.value(MIN_EXPONENT, x.type)))
            self.weighted_exponents[v].set(builder.fma(p, x, self.weighted_exponents[v].get()))
        for index, (tile, _) in enumerate(self.sums):
            value = self.block.tiles.load(self.values, key + index * KEY_BLOCK, v)
            tile[v].set(tile[v].get() + builder.where(p == 0.0, 0.0, p * value))

    def add_tile(self, v: int, weights: Value) -> None:
        """Add the tile's sums to the sums of all tiles. `weights` is the sum of the tile's weights."""
        self.weight_sum[v].set(self.weight_sum[v].get() + weights)
        for tile, whole in self.sums:
            whole[v].set(whole[v].get() + tile[v].get())

    def store(self) -> None:
        """Store the statistics. A query that sees no key gets entropy 0, sums 0, maximum −∞ and key −1."""
        block, builder = self.block, self.block.builder
        if not block.spec.roles:
            return
        outputs = iter(block.find_outputs())
        if self.has_max_score:
            self.block.store_per_query(next(outputs), [score.get() * self.nats_per_unit for score in self.max_score])
            self.block.store_per_query(next(outputs), [key.get().to(INT64) for key in self.max_score_key])
        totals = [builder.where(total.get() == 0.0, 1.0, total.get()) for total in block.running_sum]
        if self.has_entropy:
            entropies = [self.compute_entropy(v, total.to(DOUBLE)) for v, total in enumerate(totals)]
            self.block.store_per_query(next(outputs), entropies)
        for _, whole in self.sums:
            self.block.store_per_query(next(outputs), [x.get() / total for x, total in zip(whole, totals, strict=True)])

    def compute_entropy(self, v: int, total: Value) -> Value:
        """Return ln l · Σp / l − T / l, where l is `total` in float64."""
        log_total = self.block.builder.call_intrinsic("log", total)
        product = log_total * self.weight_sum[v].get().to(DOUBLE)
        weighted_exponents = self.weighted_exponents[v].get().to(DOUBLE) * self.nats_per_unit
        return ((product - weighted_exponents) / total).to(self.block.float)
