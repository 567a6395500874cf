"""The base class of the kernels that compute the weight of each pair again from the saved lse: backward and tangent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..codegen.builder import Variable
from ..codegen.render_llvm import NodeValues
from ..codegen.values import DOUBLE, Value
from .block import Block
from .kernel_spec import KEY_BLOCK


class RecomputedWeights(Block):
    """A kernel that reads the lse of its queries.

    Attributes
    ----------
    lse : for each vector of queries, lse in base 2 or e like the scores; ∞ past the last query, so that P is 0
    pair_symbols : the values of the symbols, by name, for the pairs that `compute_weight` evaluated last
    score_values : for these pairs, the values of the score formula's nodes, by node id; not set without a formula
    final_score : for these pairs, the scores after the score formula, in nats
    """

    lse: list[Variable]

    @property
    def log_unit(self) -> float:
        """The factor that converts nats to the base of the scores, 2 or e."""
        return math.log2(math.e) if self.spec.is_base_2 else 1.0

    def load_lse(self, lane: Value) -> Value:
        """Return the lse of one query, in the base of the scores; 0 for a query that sees no key."""
        lse = self.args.lse.at((self.row + lane) * 8).load(DOUBLE)
        return self.builder.where(lse == -math.inf, 0.0, lse) * self.log_unit

    def compute_weights(
        self, j0: Value, key: Value, step: int, masked: bool
    ) -> Iterator[tuple[int, int, Value, list[NodeValues]]]:
        """Yield (k, v, P, values of `evaluate_key`) for the keys `key` + k, k < step, and each vector v of queries."""
        builder = self.builder
        for k in range(step):
            for tables in self.tile_tables[0 if masked else 1 :]:
                tables.prefetch(key + k, j0 + KEY_BLOCK)
            j = builder.minimum(j0 + key + k, self.args.m - 1).to(self.integer)
            rows, inside = self.evaluate_key(j), (key + k < self.num_keys if step > 1 else None)
            for v in self.vectors:
                s = self.tiles.load(self.s_t, key + k, v)
                known = [self.values_before_pair(formula, rows, key + k, v) for formula in range(2)]
                yield k, v, self.compute_weight(s, v, j, known, masked, inside), rows

    def compute_weight(
        self, s: Value, v: int, j: Value, known: list[NodeValues], masked: bool, is_inside: Value | None
    ) -> Value:
        """Return P of one key and a vector of queries; 0 where hidden, and if `is_inside` is given and false.

        `known` has the values of the mask and of the score that `values_before_pair` returns.
        """
        builder = self.builder
        mask, score = self.renderers[:2]
        symbols = self.symbols[v] | {"j": j, "s": s * self.factor}
        self.pair_symbols = symbols
        if score is not None:
            self.score_values = score.evaluate_all(symbols, known[1])
            self.final_score = self.score_values[id(score.formula)].to(self.float).broadcast(self.lanes)
            logit = self.final_score - self.lse[v].get()
        else:
            self.final_score = symbols["s"] * (math.log(2) if self.spec.is_base_2 else 1.0)
            logit = builder.fma(s, self.factor, -self.lse[v].get())
        p, zero = self.exponentiate(logit), builder.value(0.0, self.vector)
        if masked and mask is not None:
            p = builder.where(mask.evaluate_pair(symbols, known[0]), p, zero)
        return p if is_inside is None else builder.where(is_inside.broadcast(self.lanes), p, zero)

    def add_to(self, matrix: Value) -> Callable[[Value, int, Value], None]:
        """Return a function (row, v, numbers) that adds numbers to the matrix."""

        def add(row: Value, v: int, numbers: Value) -> None:
            self.tiles.store(matrix, row, v, self.tiles.load(matrix, row, v) + numbers)

        return add
