"""Statistics of each query made beside the forward kernel's running softmax, at the cost of a few instructions a score.

With x = s − m the power of a weight p = e^x that is not yet divided by l, and m moving to m':

    max_score   m, and the first key that has it
    entropy     −Σ P ln P = ln l · Σp / l − T / l,    T = Σ p x,    T' = α (T + (m − m') Σp) + ...
    a sum       Σ P f = M / l,    M = Σ p f,    M' = α M + ...    for a formula f of the pair and its final score
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..codegen.builder import DOUBLE, INT64, Value, Variable, bytes_of, element_type, vector

if TYPE_CHECKING:
    from .forward import Forward

__all__ = ["FusedStatisticsCode"]

MIN_EXPONENT = -2048.0  # powers below it are weights of 0 in every type


class FusedStatisticsCode:
    """What `spec.roles` asks of the forward kernel: "largest", "entropy", and a "sum" for each further formula.

    Arrays (B, H, n) follow the tables' words in that order: of the largest score in the accumulator's type and its key
    as int64, of the others in the accumulator's type.
    """

    def __init__(self, block: Forward) -> None:
        self.block = block
        builder, tiles, spec = block.builder, block.tiles, block.spec
        self.has_max_score, self.has_entropy = ("largest" in spec.roles, "entropy" in spec.roles)
        self.formulas = range(2, len(block.formulas))
        self.nats_per_unit = math.log(2) if spec.is_base_2 else 1.0  # of powers, in nats
        self.indices = vector(block.integer, block.lanes)
        self.max_score, self.weighted_exponents, self.weight_sum = (tiles.variables() for _ in range(3))
        self.max_score_key = [Variable(builder, self.indices) for _ in block.vectors]
        self.sums = {f: (tiles.variables(), tiles.variables()) for f in self.formulas}  # of the tile, of all

    def init(self) -> None:
        """Nothing seen yet."""
        for v in self.block.vectors:
            self.max_score[v].set(-math.inf)
            self.max_score_key[v].set(-1)
            self.weighted_exponents[v].set(0.0)
            self.weight_sum[v].set(0.0)
            for tile, whole in self.sums.values():
                tile[v].set(0.0)
                whole[v].set(0.0)

    def prepare_tile(self, j0: Value, factor: Value) -> None:
        """Before a tile's softmax: scores in Sᵀ are still to be multiplied by the factor."""
        self.block.transpose_tables(j0, self.formulas.start)
        if self.has_max_score:
            self.update_max_score(j0, factor)

    def update_max_score(self, j0: Value, factor: Value) -> None:
        """The largest score and the first key that has it, the tile's searched where it has a larger one."""
        block = self.block
        builder = block.builder
        for v in block.vectors:
            tile_max, top = block.tile_max[v].get(), self.max_score[v].get()
            scaled_max = tile_max * factor
            is_larger = scaled_max > top
            with builder.if_then(is_larger.any()):
                tile_key = Variable(builder, self.indices, self.max_score_key[v].get())
                with builder.loop(0, block.num_keys) as k:
                    key = block.num_keys - 1 - k  # the first key is met last
                    j = (j0 + key).to(block.integer).broadcast(block.lanes)
                    tile_key.set(builder.where(block.tiles.load(block.s_t, key, v) == tile_max, j, tile_key.get()))
                self.max_score_key[v].set(builder.where(is_larger, tile_key.get(), self.max_score_key[v].get()))
                self.max_score[v].set(builder.where(is_larger, scaled_max, top))

    def rescale(self, v: int, difference: Value, alpha: Value) -> None:
        """m becomes m' = m − difference, with α = e^difference."""
        builder = self.block.builder
        if self.has_entropy:
            shifted = (
                builder.maximum(difference, builder.value(MIN_EXPONENT, difference.type)) * self.weight_sum[v].get()
            )
            self.weighted_exponents[v].set((self.weighted_exponents[v].get() + shifted) * alpha)
        self.weight_sum[v].set(self.weight_sum[v].get() * alpha)
        for tile, whole in self.sums.values():
            whole[v].set(whole[v].get() * alpha)
            tile[v].set(0.0)

    def add(self, j0: Value, key: Value, v: int, s: Value, x: Value, p: Value) -> None:
        """One key and a vector of queries: the score, its power and its weight, both 0 and −∞ where hidden."""
        block, builder = self.block, self.block.builder
        if self.has_entropy:
            min_exponent = builder.value(MIN_EXPONENT, x.type)
            self.weighted_exponents[v].set(
                builder.fma(p, builder.maximum(x, min_exponent), self.weighted_exponents[v].get())
            )
        if not self.sums:
            return
        j = builder.minimum(j0 + key, block.args.m - 1).to(block.integer)
        symbols = block.symbols[v] | {"j": j, "s": s * self.nats_per_unit}
        rows = block.evaluate_key(j)
        for f, (tile, _) in self.sums.items():
            renderer = block.renderers[f]
            assert renderer is not None
            entry = renderer.evaluate_pair(symbols, block.values_before_pair(f, rows, key, v))
            old = tile[v].get()
            if renderer.formula.kind == "bool":
                tile[v].set(builder.where(entry, old + p, old))
            else:
                tile[v].set(old + builder.where(p == 0.0, 0.0, p * entry.to(block.float)))

    def add_tile(self, v: int, weights: Value) -> None:
        """The tile's sums to those of all; `weights` is that of its weights."""
        self.weight_sum[v].set(self.weight_sum[v].get() + weights)
        for tile, whole in self.sums.values():
            whole[v].set(whole[v].get() + tile[v].get())

    def store(self) -> None:
        """To the arrays, 0 for queries that saw nothing, but −∞ and −1 for their largest score."""
        block, builder = self.block, self.block.builder
        outputs = iter(block.args.tables[len(block.spec.tables) :])
        if self.has_max_score:
            self.store_per_query(
                next(outputs).pointer, [self.max_score[v].get() * self.nats_per_unit for v in block.vectors]
            )
            self.store_per_query(next(outputs).pointer, [self.max_score_key[v].get().to(INT64) for v in block.vectors])
        totals = [
            builder.where(block.running_sum[v].get() == 0.0, 1.0, block.running_sum[v].get()) for v in block.vectors
        ]
        if self.has_entropy:
            self.store_per_query(
                next(outputs).pointer, [self.compute_entropy(v, total.to(DOUBLE)) for v, total in enumerate(totals)]
            )
        for _, whole in self.sums.values():
            self.store_per_query(next(outputs).pointer, [whole[v].get() / totals[v] for v in block.vectors])

    def compute_entropy(self, v: int, total: Value) -> Value:
        """ln l · Σp / l − T / l."""
        logarithm, weight_sum = self.block.builder.call_intrinsic("log", total), self.weight_sum[v].get().to(DOUBLE)
        return ((logarithm * weight_sum - self.weighted_exponents[v].get().to(DOUBLE) * self.nats_per_unit) / total).to(
            self.block.float
        )

    def store_per_query(self, target: Value, values: list[Value]) -> None:
        """One number of each of the block's own lanes."""
        block, size = self.block, bytes_of(values[0].type)
        scratch = block.tiles.scratch(block.tiles.block * size)
        for v, value in enumerate(values):
            scratch.at(v * block.lanes * size).store(value)
        with block.builder.loop(0, block.num_valid) as lane:
            target.at((block.row + lane) * size).store(scratch.at(lane * size).load(element_type(values[0].type)))
