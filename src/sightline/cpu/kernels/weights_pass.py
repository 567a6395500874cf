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

from ..codegen.abi import COMMON
from ..codegen.builder import DOUBLE, INT64, POINTER, Value
from .block import KEYS, Block

__all__ = ["Observe"]


class Observe(Block):
    """Writes a kernel into a module; a statistic is a subclass.

    `structure.kernel` ends in "max" where the largest weight is wanted in place of a sum.
    """

    fields = COMMON | {
        "output": POINTER,  # in the accumulator's type unless the statistic says otherwise
        "first_query": INT64,  # the queries that count: weights of others are 0
        "last_query": INT64,
    }

    def allocate(self) -> None:
        tiles = self.tiles
        self.q_t, self.s_t = tiles.matrix(tiles.pairs(self.structure.d_k)), tiles.matrix(KEYS)
        self.key = self.rows(1, along=True, down=False)
        self.normaliser, self.rest = tiles.matrix(1), tiles.matrix(1)
        self.high, self.low = tiles.variables(), tiles.variables()
        self.prepare()

    def prepare(self) -> None:
        """The statistic's own scratch."""

    def collect(self, j0: Value, masked: bool) -> None:
        """What becomes of a tile whose products are in Sᵀ; `masked`: some of it is hidden."""
        raise NotImplementedError(type(self).__name__)

    # -- sums and maxima ------------------------------------------------------------------------------------------
    @property
    def largest(self) -> bool:
        """Whether maxima are wanted in place of sums."""
        return self.structure.kernel.endswith("max")

    def join(self, x: Value, y: Value) -> Value:
        """The sum of weights, or the larger."""
        return self.code.maximum(x, y) if self.largest else x + y

    def running(self, count: int) -> Value:
        """Scratch for so many running vectors, each beside what its sum has lost."""
        return self.tiles.scratch(2 * count * self.tiles.align)

    def clear(self, running: Value, count: Any) -> None:
        """Begin so many of them at 0."""
        with self.code.loop(0, count * 2) as at:
            running.at(at * self.tiles.align).store(self.code.value(0.0, self.vector), self.tiles.align)

    def at(self, running: Value, place: Any) -> Value:
        """Address of one of them."""
        return running.at(place * (2 * self.tiles.align))

    def add(self, place: Value, x: Value) -> None:
        """Join x to a running vector; a sum's error does not grow with its terms (Kahan, 1965)."""
        align = self.tiles.align
        old = place.load(self.vector, align)
        if self.largest:
            place.store(self.join(x, old), align)
            return
        x = x - place.at(align).load(self.vector, align)
        new = old + x
        place.store(new, align)
        place.at(align).store((new - old) - x, align)

    # -- a block of queries ---------------------------------------------------------------------------------------
    def attend(self, queries: tuple[Value, Value], tiles: tuple[Value, Value]) -> None:
        """The block against those of its runs' tiles; weights of queries not among these are 0."""
        given = self.given
        self.key.place(given.operand("key", self.b, self.h // given.group), given.key_row, given.key_column)
        self.turn_queries()
        self.halve_normalisers(*queries)
        self.evaluate_block()
        with self.each_tile(*tiles) as (tile, partial):
            self.key_tile(tile * KEYS, partial)

    def lanes_of(self, first: Value, last: Value) -> tuple[Value, Value]:
        """The lanes of the queries among these."""
        code = self.code
        return code.maximum(first - self.i0, 0), code.minimum(last - self.i0, self.valid)

    def halve_normalisers(self, first: Value, last: Value) -> None:
        """lse per lane in the scores' base, as high + low; ∞ where all weights shall be 0."""
        code, given, tiles = self.code, self.given, self.tiles
        unit = math.log2(math.e) if self.structure.base_2 else 1.0
        for v in self.vectors:
            tiles.store(self.normaliser, 0, v, code.value(math.inf, self.vector))
            tiles.store(self.rest, 0, v, code.value(0.0, self.vector))
        with code.loop(*self.lanes_of(first, last)) as lane:
            lse = given.lse.at((self.row + lane) * 8).load(DOUBLE)
            with code.when(lse != -math.inf):
                high = (lse * unit).to(self.float)
                self.lane_of(self.normaliser, 0, lane).store(high)
                self.lane_of(self.rest, 0, lane).store((lse * unit - high.to(DOUBLE)).to(self.float))
        for v in self.vectors:
            self.high[v].set(tiles.load(self.normaliser, 0, v))
            self.low[v].set(tiles.load(self.rest, 0, v))

    def key_tile(self, j0: Value, partial: Value) -> None:
        """One tile: Q · K, not yet scaled, and what the statistic makes of it."""
        code = self.code
        self.keys = code.minimum(self.given.m - j0, KEYS)
        self.key.stage(j0, self.keys)

        def keep(key: Value, v: int, s: Value) -> None:
            self.tiles.store(self.s_t, key, v, s)

        self.product(self.keys, KEYS, self.key.row, self.q_t, self.tiles.pairs(self.structure.d_k), keep)
        with code.either(partial) as (yes, no):  # without a mask every run is full
            with yes:
                if self.renderers[0] is not None:
                    self.turn_tables(j0, 0)
                    self.collect(j0, masked=True)
            with no:
                self.turn_tables(j0, 1)
                self.collect(j0, masked=False)

    # -- one key and all queries of the block ---------------------------------------------------------------------
    def weight(self, s: Value, v: int) -> Value:
        """P of what `logits` gives."""
        high = self.high[v].get()
        near = s - high if self.renderers[1] is not None else self.code.fma(s, self.factor, -high)
        return self.power(near - self.low[v].get())

    def weights(self, key: Value, j0: Value, masked: bool) -> list[Value]:
        """P of one key, by vector; 0 where hidden."""
        code = self.code
        found = [(self.weight(s, v), allowed) for v, s, allowed in self.logits(key, j0, masked)]
        nothing = code.value(0.0, self.vector)
        return [p if allowed is None else code.where(allowed, p, nothing) for p, allowed in found]
