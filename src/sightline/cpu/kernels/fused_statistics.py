"""Statistics of each query made beside the forward kernel's running softmax, at the cost of a few instructions a score.

With x = s − m the power of a weight p = e^x that is not yet divided by l, and m moving to m':

    max_score   m, and the first key that has it
    entropy     −Σ P ln P = ln l · Σp / l − T / l,    T = Σ p x,    T' = α (T + (m − m') Σp) + ...
    a sum       Σ P f = M / l,    M = Σ p f,    M' = α M + ...    for a formula f of the pair and its final score
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..codegen.builder import DOUBLE, INT64, Value, Variable, bytes_of, element, vector

if TYPE_CHECKING:
    from .forward import Forward

__all__ = ["Riding"]

LEAST = -2048.0  # powers below it are weights of 0 in every type


class Riding:
    """What `structure.roles` asks of the forward kernel: "largest", "entropy", and a "sum" for each further formula.

    Arrays (B, H, n) follow the tables' words in that order: of the largest score in the accumulator's type and its key
    as int64, of the others in the accumulator's type.
    """

    def __init__(self, block: Forward) -> None:
        self.block = block
        code, tiles, structure = block.code, block.tiles, block.structure
        self.largest, self.entropy = ("largest" in structure.roles, "entropy" in structure.roles)
        self.formulas = range(2, len(block.formulas))
        self.unit = math.log(2) if structure.base_2 else 1.0  # of powers, in nats
        self.indices = vector(block.integer, block.lanes)
        self.top, self.powers, self.seen = (tiles.variables() for _ in range(3))
        self.where = [Variable(code, self.indices) for _ in block.vectors]
        self.sums = {f: (tiles.variables(), tiles.variables()) for f in self.formulas}  # of the tile, of all

    def begin(self) -> None:
        """Nothing seen yet."""
        for v in self.block.vectors:
            self.top[v].set(-math.inf)
            self.where[v].set(-1)
            self.powers[v].set(0.0)
            self.seen[v].set(0.0)
            for tile, whole in self.sums.values():
                tile[v].set(0.0)
                whole[v].set(0.0)

    def prepare(self, j0: Value, factor: Value) -> None:
        """Before a tile's softmax: scores in Sᵀ are still to be multiplied by the factor."""
        self.block.turn_tables(j0, self.formulas.start)
        if self.largest:
            self.find_largest(j0, factor)

    def find_largest(self, j0: Value, factor: Value) -> None:
        """The largest score and the first key that has it, the tile's searched where it has a larger one."""
        block = self.block
        code = block.code
        for v in block.vectors:
            tile_max, top = block.tile_max[v].get(), self.top[v].get()
            reached = tile_max * factor
            newer = reached > top
            with code.when(newer.any()):
                found = Variable(code, self.indices, self.where[v].get())
                with code.loop(0, block.keys) as k:
                    key = block.keys - 1 - k  # the first key is met last
                    j = (j0 + key).to(block.integer).spread(block.lanes)
                    found.set(code.where(block.tiles.load(block.s_t, key, v) == tile_max, j, found.get()))
                self.where[v].set(code.where(newer, found.get(), self.where[v].get()))
                self.top[v].set(code.where(newer, reached, top))

    def rescale(self, v: int, difference: Value, alpha: Value) -> None:
        """m becomes m' = m − difference, with α = e^difference."""
        code = self.block.code
        if self.entropy:
            moved = code.maximum(difference, code.value(LEAST, difference.type)) * self.seen[v].get()
            self.powers[v].set((self.powers[v].get() + moved) * alpha)
        self.seen[v].set(self.seen[v].get() * alpha)
        for tile, whole in self.sums.values():
            whole[v].set(whole[v].get() * alpha)
            tile[v].set(0.0)

    def add(self, j0: Value, key: Value, v: int, s: Value, x: Value, p: Value) -> None:
        """One key and a vector of queries: the score, its power and its weight, both 0 and −∞ where hidden."""
        block, code = self.block, self.block.code
        if self.entropy:
            least = code.value(LEAST, x.type)
            self.powers[v].set(code.fma(p, code.maximum(x, least), self.powers[v].get()))
        if not self.sums:
            return
        j = code.minimum(j0 + key, block.given.m - 1).to(block.integer)
        symbols = block.symbols[v] | {"j": j, "s": s * self.unit}
        rows = block.by_row(j)
        for f, (tile, _) in self.sums.items():
            renderer = block.renderers[f]
            assert renderer is not None
            entry = renderer.pair(symbols, block.known_of_pair(f, rows, key, v))
            old = tile[v].get()
            if renderer.formula.kind == "bool":
                tile[v].set(code.where(entry, old + p, old))
            else:
                tile[v].set(old + code.where(p == 0.0, 0.0, p * entry.to(block.float)))

    def join(self, v: int, weights: Value) -> None:
        """The tile's sums to those of all; `weights` is that of its weights."""
        self.seen[v].set(self.seen[v].get() + weights)
        for tile, whole in self.sums.values():
            whole[v].set(whole[v].get() + tile[v].get())

    def hand_over(self) -> None:
        """To the arrays, 0 for queries that saw nothing, but −∞ and −1 for their largest score."""
        block, code = self.block, self.block.code
        outputs = iter(block.given.tables[len(block.structure.tables) :])
        if self.largest:
            self.store(next(outputs).pointer, [self.top[v].get() * self.unit for v in block.vectors])
            self.store(next(outputs).pointer, [self.where[v].get().to(INT64) for v in block.vectors])
        totals = [code.where(block.total[v].get() == 0.0, 1.0, block.total[v].get()) for v in block.vectors]
        if self.entropy:
            self.store(next(outputs).pointer, [self.entropy_of(v, total.to(DOUBLE)) for v, total in enumerate(totals)])
        for _, whole in self.sums.values():
            self.store(next(outputs).pointer, [whole[v].get() / totals[v] for v in block.vectors])

    def entropy_of(self, v: int, total: Value) -> Value:
        """ln l · Σp / l − T / l."""
        logarithm, seen = self.block.code.intrinsic("log", total), self.seen[v].get().to(DOUBLE)
        return ((logarithm * seen - self.powers[v].get().to(DOUBLE) * self.unit) / total).to(self.block.float)

    def store(self, target: Value, values: list[Value]) -> None:
        """One number of each of the block's own lanes."""
        block, size = self.block, bytes_of(values[0].type)
        scratch = block.tiles.scratch(block.tiles.block * size)
        for v, value in enumerate(values):
            scratch.at(v * block.lanes * size).store(value)
        with block.code.loop(0, block.valid) as lane:
            target.at((block.row + lane) * size).store(scratch.at(lane * size).load(element(values[0].type)))
