"""The forward kernel: FlashAttention's running softmax on register tiles, written for one formula and one machine.

    Sᵀ[key][lane]  = Σ_d  K[key][d] · Qᵀ[d][lane]          for each block of keys a run names:
    Sᵀ             = score, mask                               m' = max(m, max Sᵀ),  α = 2^(m − m')
    P              = 2^(Sᵀ − m')                               l  = α l + Σ P
    Oᵀ[d_v][lane]  = α Oᵀ + Σ_key V[key][d_v] · P[key][lane]   at the end O = Oᵀ / l

Both products are the one register tile. Work is blocks of queries × heads, handed out by an atomic counter.
"""

from __future__ import annotations

import functools
import math
import operator

from ..codegen.abi import FORWARD
from ..codegen.builder import BOOL, DOUBLE, FLOAT, INT32, Value, Variable
from .block import KEYS, Block
from .fused_statistics import Riding

__all__ = ["Forward"]


class Forward(Block):
    """Writes the kernel into a module."""

    fields = FORWARD

    def allocate(self) -> None:
        tiles = self.tiles
        self.q_t, self.s_t = tiles.matrix(tiles.pairs(self.structure.d_k)), tiles.matrix(KEYS)
        self.key, self.value = self.rows(1, along=True, down=False), self.rows(2, along=False, down=True)
        self.o_t = tiles.matrix(self.structure.d_v)
        self.largest, self.total, self.tile_max, self.shift, self.alpha = (tiles.variables() for _ in range(5))
        self.lost = tiles.variables()  # by rounding, of the total
        self.riding = Riding(self)

    def take(self, item: Value) -> None:
        """A block of queries of a head."""
        code = self.code
        self.locate(item)
        self.turn_queries()
        self.evaluate_block()
        again = Variable(code, BOOL, True)
        with code.loop(0, 2) as attempt, code.when(again.get()):
            self.attend(careful=attempt == 1)
            again.set(self.tainted())
        self.hand_over()

    def locate(self, item: Value) -> None:
        """Item → (b, h, block of queries); later blocks first, since a causal mask makes those the longest."""
        given = self.given
        blocks = given.query_blocks
        position = item // blocks
        b, h = position // given.H, position % given.H
        g = h // given.group
        self.place(b, h, blocks - 1 - item % blocks)
        self.place_keys(b, g, self.key, self.value)

    # -- attention of the block -----------------------------------------------------------------------------------
    def attend(self, careful: Value) -> None:
        """The running softmax over the block's runs. `careful`: weights of 0 take nothing, even of NaN and ∞ in V.

        A NaN in the output of the first attempt is the sign that care is needed, which costs whole inputs nothing.
        """
        code = self.code
        with code.loop(0, self.structure.d_v) as d:
            for v in self.vectors:
                self.tiles.store(self.o_t, d, v, code.value(0.0, self.vector))
        for v in self.vectors:
            self.largest[v].set(self.sink() if self.structure.sinks else -math.inf)
            self.total[v].set(1.0 if self.structure.sinks else 0.0)
            self.lost[v].set(0.0)
        self.riding.begin()
        with self.each_tile() as (tile, partial):
            self.key_tile(tile * KEYS, partial, careful)

    def sink(self) -> Value:
        return self.given.sinks.at(self.h * 8).load(DOUBLE).to(self.float)

    def key_tile(self, j0: Value, partial: Value, careful: Value) -> None:
        """One tile: scores, score formula and mask, softmax, weighted values."""
        code = self.code
        self.keys = code.minimum(self.given.m - j0, KEYS)
        self.key.stage(j0, self.keys)
        self.value.stage(j0, self.keys)
        for v in self.vectors:
            self.tile_max[v].set(-math.inf)
        self.score_tile()
        mask, score = self.renderers[:2]
        with code.either(partial) as (yes, no):  # without a mask every run is full
            with yes:
                if mask is not None:
                    self.reshape_scores(j0, masked=True)
            with no:
                if score is not None:
                    self.reshape_scores(j0, masked=False)
        self.softmax(j0)
        with code.either(careful) as (yes, no):
            with yes:
                self.weigh_values_carefully()
            with no:
                self.weigh_values()

    def score_tile(self) -> None:
        """Q · K, not yet scaled, and from the registers its maximum."""
        code = self.code

        def finish(key: Value, v: int, s: Value) -> None:
            self.tiles.store(self.s_t, key, v, s)
            self.tile_max[v].set(code.maximum(s, self.tile_max[v].get()))

        self.product(self.keys, KEYS, self.key.row, self.q_t, self.tiles.pairs(self.structure.d_k), finish)

    def reshape_scores(self, j0: Value, masked: bool) -> None:
        """Sᵀ scaled and through the score formula, −∞ where hidden; and its maximum anew."""
        code, tiles = self.code, self.tiles
        self.turn_tables(j0, 0 if masked else 1, 2)
        for v in self.vectors:
            self.tile_max[v].set(-math.inf)
        with code.loop(0, self.keys) as key:
            for tables in self.tile_tables[0 if masked else 1 : 2]:
                tables.fetch(key, j0 + KEYS)
            for v, s, allowed in self.logits(key, j0, masked):
                if allowed is not None:
                    s = code.where(allowed, s, code.value(-math.inf, self.vector))
                tiles.store(self.s_t, key, v, s)
                self.tile_max[v].set(code.maximum(s, self.tile_max[v].get()))

    def scaled_if_huge(self) -> Value:
        """What Sᵀ and its maximum are still to be multiplied by.

        s · factor − m' is exact but for one rounding, and m' is rounded. Where its last place is more than 1 the
        difference may not even be near 0 at the maximum; such tiles are scaled in a step of their own and rounded
        alike, as in plain code.
        """
        code, tiles = self.code, self.tiles
        limit = 2.0 ** (53 if self.float is DOUBLE else 24)
        sizes = [code.intrinsic("fabs", self.tile_max[v].get() * self.factor) for v in self.vectors]
        huge = [((size > limit) & (size < math.inf)).any() for size in sizes]
        factor = Variable(code, self.float, self.factor)
        with code.when(functools.reduce(operator.or_, huge)):
            for v in self.vectors:
                self.tile_max[v].set(self.tile_max[v].get() * self.factor)
            with code.loop(0, self.keys) as key:
                for v in self.vectors:
                    tiles.store(self.s_t, key, v, tiles.load(self.s_t, key, v) * self.factor)
            factor.set(1.0)
        return factor.get()

    def softmax(self, j0: Value) -> None:
        """P = 2^(Sᵀ − m') in place of Sᵀ, and the running maximum m and sum l; pairs of keys joined for V's."""
        code, tiles = self.code, self.tiles
        factor = self.scaled_if_huge() if self.renderers[1] is None else code.value(1.0, self.float)
        self.riding.prepare(j0, factor)
        for v in self.vectors:
            new = code.maximum(self.tile_max[v].get() * factor, self.largest[v].get())
            shift = code.where(new == -math.inf, 0.0, new)
            difference = self.largest[v].get() - shift
            alpha = self.power(difference)
            self.riding.rescale(v, difference, alpha)
            self.largest[v].set(new)
            self.shift[v].set(shift)
            self.alpha[v].set(alpha)
        sums = [Variable(code, self.vector, 0.0) for _ in self.vectors]
        step = 4 if self.structure.dropout else tiles.pair
        with code.loop(self.keys, (self.keys + (step - 1)) // step * step) as past:  # up to whole steps
            for v in self.vectors:
                tiles.store(self.s_t, past, v, code.value(-math.inf, self.vector))
        with code.loop(0, self.keys, step) as key:
            keep = self.kept(j0 + key) if self.structure.dropout else []
            for v in self.vectors:
                scores = [tiles.load(self.s_t, key + k, v) for k in range(step)]
                powers = [code.fma(s, factor, -self.shift[v].get()) for s in scores]
                weights = [self.power(x) for x in powers]
                for k, p in enumerate(weights):
                    sums[v].set(sums[v].get() + p)
                    self.riding.add(j0, key + k, v, scores[k] * factor, powers[k], p)
                if keep:
                    weights = [code.where(keep[k][v], p, 0.0) for k, p in enumerate(weights)]
                for k in range(0, step, tiles.pair):
                    if self.paired:
                        joined = self.packed(weights[k], weights[k + 1])
                        tiles.at(self.s_t, (key + k) // 2, v).store(joined, tiles.align)
                    else:
                        tiles.store(self.s_t, key + k, v, weights[k])
        for v in self.vectors:
            self.add_to_total(v, sums[v].get())
            self.riding.join(v, sums[v].get())

    def add_to_total(self, v: int, weights: Value) -> None:
        """l = α l + Σ P, and what rounding loses of it (Knuth): later passes take on the error of lse."""
        alpha, old = self.alpha[v].get(), self.total[v].get()
        new = self.code.fma(old, alpha, weights)
        old = old * alpha
        share = new - old
        lost = (old - (new - share)) + (weights - share)
        self.lost[v].set(self.code.fma(self.lost[v].get(), alpha, lost))
        self.total[v].set(new)

    def weigh_values(self) -> None:
        """Oᵀ = α Oᵀ + Σ V[key][d_v] · P[key][lane], added at the end: a tile's sum is rounded at its own size."""
        code, tiles = self.code, self.tiles

        def finish(d: Value, v: int, total: Value) -> None:
            old = tiles.load(self.o_t, d, v)
            tiles.store(self.o_t, d, v, code.fma(old, self.alpha[v].get(), total))

        width, length = self.structure.d_v, (self.keys + (tiles.pair - 1)) // tiles.pair
        self.product(width, width, self.value.column, self.s_t, length, finish)

    def weigh_values_carefully(self) -> None:
        """The same, one number of V at a time, where a weight of 0 takes nothing."""
        code, tiles = self.code, self.tiles
        with code.loop(0, self.structure.d_v) as d:
            sums = [Variable(code, self.vector, tiles.load(self.o_t, d, v) * self.alpha[v].get()) for v in self.vectors]
            with code.loop(0, self.keys) as key:
                number = self.value.entry(key, d).spread(self.lanes)
                for v in self.vectors:
                    p, old = self.weight(key, v), sums[v].get()
                    sums[v].set(code.where(p == 0.0, old, code.fma(number, p, old)))
            for v in self.vectors:
                tiles.store(self.o_t, d, v, sums[v].get())

    def weight(self, key: Value, v: int) -> Value:
        """P of one key, out of its pair where they are joined."""
        code, tiles = self.code, self.tiles
        if not self.paired:
            return tiles.load(self.s_t, key, v)
        pair = tiles.at(self.s_t, key // 2, v).load(tiles.numbers, tiles.align)
        first = (pair << 16).bits(FLOAT)
        second = (pair & code.value(-(2**16), INT32)).bits(FLOAT)
        return code.where((key % 2) == 0, first, second)

    # -- the end of the block -------------------------------------------------------------------------------------
    def tainted(self) -> Value:
        """Whether any output is NaN: then V held NaN or ∞, hidden or not, or a score was NaN."""
        code = self.code
        marks = [Variable(code, self.vector, 0.0) for _ in self.vectors]
        with code.loop(0, self.structure.d_v) as d:
            for v in self.vectors:
                entry = self.tiles.load(self.o_t, d, v)
                marks[v].set(code.where(entry != entry, 1.0, marks[v].get()))
        found = [(mark.get() != 0.0).any() for mark in marks]
        return functools.reduce(operator.or_, found)

    def hand_over(self) -> None:
        """O = Oᵀ / l and lse = m ln 2 + ln l, row by row; 0 and −∞ for queries that saw nothing."""
        code, given, tiles = self.code, self.given, self.tiles
        total, lost, base = tiles.matrix(1), tiles.matrix(1), tiles.matrix(1)
        keep = given.keep.to(self.float)
        for v in self.vectors:
            nothing = self.total[v].get() == 0.0
            sums = code.where(nothing, 1.0, self.total[v].get())
            tiles.store(total, 0, v, sums)
            tiles.store(lost, 0, v, self.lost[v].get())
            tiles.store(base, 0, v, code.where(nothing, -math.inf, self.largest[v].get()))
            with code.loop(0, self.structure.d_v) as d:
                tiles.store(self.o_t, d, v, tiles.load(self.o_t, d, v) * keep / sums)
        rows = given.output.at(self.row * (self.structure.d_v * self.form.bytes))
        self.turn_back(self.o_t, self.structure.d_v, rows, self.form)
        with code.loop(0, self.valid) as lane:
            whole, rest, largest = (
                self.lane_of(row, 0, lane).load(self.float).to(DOUBLE) for row in (total, lost, base)
            )
            unit = math.log(2) if self.structure.base_2 else 1.0
            given.lse.at((self.row + lane) * 8).store(code.fma(largest, unit, code.intrinsic("log", whole + rest)))
        self.riding.hand_over()
