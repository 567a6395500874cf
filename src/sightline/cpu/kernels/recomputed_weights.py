"""The base classes of the kernels that compute the weight of each pair again, from the lse of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..codegen.builder import Variable
from ..codegen.values import DOUBLE, Value
from .block import Block, ScoredPairs
from .kernel_spec import KEY_BLOCK


class RecomputedWeights(Block):
    """A kernel that reads the saved lse of its queries: the backward and the tangent kernel.

    Attributes
    ----------
    lse : for each vector of queries, lse in base 2 or e like the scores; ∞ past the last query, so that P is 0
    """

    lse: list[Variable]

    def load_lse(self, lane: Value) -> Value:
        """Return the lse of one query, in the base of the scores; 0 for a query that sees no key."""
        lse = self.args.lse.at((self.row + lane) * 8).load(DOUBLE)
        return self.builder.where(lse == -math.inf, 0.0, lse) * self.spec.units_per_nat

    def compute_weights(
        self, j0: Value, key: Value, step: int, masked: bool
    ) -> Iterator[tuple[int, ScoredPairs, Value, Value]]:
        """Yield (k, pairs, P, S) for the pairs of the keys `key` + k, k < step, with each vector of queries.

        P is 0 at hidden pairs and at keys past the last one. S is the result of the score formula, or the scaled score
        if there is no formula, in nats.
        """
        builder, zero = self.builder, self.builder.value(0.0, self.vector)
        for k in range(step):
            for tables in self.tile_tables[0 if masked else 1 :]:
                tables.prefetch(key + k, j0 + KEY_BLOCK)
            j = builder.minimum(j0 + key + k, self.args.m - 1).to(self.integer)
            for pairs in self.compute_scores(key + k, j):
                has_score = self.spec.score is not None
                nats = pairs.score if has_score else pairs.symbols["s"] * self.spec.nats_per_unit
                p = self.exponentiate(self.compute_exponent(pairs.score, self.lse[pairs.v].get()))
                allowed = self.compute_condition(pairs, masked)
                p = p if allowed is None else builder.where(allowed, p, zero)
                is_inside = (key + k < self.num_keys).broadcast(self.lanes)
                yield k, pairs, p if step == 1 else builder.where(is_inside, p, zero), nats

    def add_to(self, matrix: Value) -> Callable[[Value, int, Value], None]:
        """Return a function (row, v, numbers) that adds numbers to the matrix."""

        def add(row: Value, v: int, numbers: Value) -> None:
            self.tiles.store(matrix, row, v, self.tiles.load(matrix, row, v) + numbers)

        return add


class NormalizedWeights(Block):
    """A block whose lse has two numbers for each query, so that rounding lse does not change the weights.

    Attributes
    ----------
    lse_high, lse_low : for each vector of queries, lse in the scores' base; ∞ for queries whose weights are 0
    """

    lse_high: list[Variable]
    lse_low: list[Variable]

    def compute_log_weight(self, s: Value, v: int) -> Value:
        """Return S − lse of vector v of the queries in the scores' base, for scores of the score formula."""
        return self.compute_exponent(s, self.lse_high[v].get()) - self.lse_low[v].get()

    def is_visible(self, s: Value, v: int) -> Value:
        """Return the condition that a pair is visible, for a vector of scores that are −∞ at hidden pairs."""
        return (s != -math.inf) & (self.lse_high[v].get() != math.inf)
