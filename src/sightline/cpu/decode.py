"""The decoding kernel: few queries against many keys, bound by reading K and V once.

The query heads that share a key head are rows of one small matrix, so that one read of K and V serves them all. Here
vectors run along d: a score is a sum over lanes, made for many keys at once by a tree of shuffles; weights are spread
over rows of V.

    S[r][j] = Σ_d Q[r][d] · K[j][d]    P = 2^(S − m')    O[r][d] = α O + Σ_j P[r][j] · V[j][d]

Keys are cut into parts, as the problem alone decides, which threads take one by one; each part's output and lse are
joined as `merge` joins them (Dao et al., "Flash-Decoding", 2023). A NaN raises `taint`, and the forward kernel, which
knows what the mask hides, answers in its place.
"""

from __future__ import annotations

import math
from typing import Any

from .arguments import DECODE
from .block import KEYS, Block
from .lanes import BFLOAT, BYTE, DOUBLE, INT64, Value, Variable

__all__ = ["ROWS", "Decode"]

ROWS = 32  # query rows taken through the keys together
TOGETHER = 4  # rows, and keys, whose products are summed in registers together
AHEAD = KEYS // 2  # keys whose rows are asked for before they are read


class Decode(Block):
    """Writes the kernel into a module."""

    fields = DECODE

    def write(self, name: str) -> Any:
        """The module with the kernel in it."""
        self.begin(name)
        code, given, tiles, structure = self.code, self.given, self.tiles, self.structure
        self.key = self.rows(1, along=not self.paired, down=False)
        self.value = self.rows(2, along=False, down=True)
        self.long = tiles.pairs(structure.d_k) * tiles.size  # bytes of a query row
        self.line = KEYS * tiles.size  # of a row of scores
        self.wide = structure.d_v * tiles.size  # of a row of output
        self.queries = tiles.scratch(ROWS * self.long)
        self.scores, self.output = tiles.scratch(ROWS * self.line), tiles.scratch(ROWS * self.wide)
        self.sums = tiles.scratch(TOGETHER * KEYS * tiles.align)
        self.totals = tiles.scratch(ROWS * tiles.align)
        self.largest, self.alpha = tiles.scratch(ROWS * tiles.size), tiles.scratch(ROWS * tiles.size)
        with code.forever() as leave:
            item = code.increment(given.counter)
            leave(item >= given.items)
            self.take(item)
            self.begin_rows()
            self.attend()
            self.hand_over()
        code.finish()
        return self.module

    def take(self, item: Value) -> None:
        """Item → (b, g, batch of rows, part of the keys)."""
        code, given = self.code, self.given
        heads, rows = given.H // given.group, given.group * given.n
        batches = (rows + (ROWS - 1)) // ROWS
        self.part, place = item % given.chunks, item // given.chunks
        batch, place = place % batches, place // batches
        self.b, self.g = place // heads, place % heads
        self.first_row = batch * ROWS
        self.count = code.minimum(rows - self.first_row, ROWS)
        self.place_keys(self.b, self.g, self.key, self.value)
        row = self.b * given.run_batch
        self.run_start = given.run_start.at(row * 8).load(INT64)
        self.run_stop = given.run_start.at(row * 8 + 8).load(INT64)
        self.first_tile = self.part * given.chunk
        self.last_tile = self.first_tile + given.chunk

    def query_of(self, r: Value) -> tuple[Value, Value]:
        """(h, i) of a row."""
        row = self.first_row + r
        return self.g * self.given.group + row // self.given.n, row % self.given.n

    def begin_rows(self) -> None:
        """Q's rows with the scale's sign; nothing seen yet."""
        code, given, tiles = self.code, self.given, self.tiles
        step = self.form.bytes if self.structure.unit[0] else given.query_column
        sign = given.sign.to(self.float)
        with code.loop(0, self.count) as r:
            h, i = self.query_of(r)
            source, target = given.operand("query", self.b, h).at(i * given.query_row), self.queries.at(r * self.long)
            with code.loop(0, self.structure.d_k) as d:
                number = self.form.load(source.at(d * step)) * sign
                if self.paired:
                    self.form.store(target.at(d * 2), number)
                else:
                    target.at(d * tiles.size).store(number)
            self.largest.at(r * tiles.size).store(code.value(-math.inf, self.float))
            self.totals.at(r * tiles.align).store(code.value(0.0, self.vector))
            with code.loop(0, self.wide // tiles.align) as v:
                self.output.at(r * self.wide + v * tiles.align).store(code.value(0.0, self.vector))

    def attend(self) -> None:
        """The running softmax over this part of the keys."""
        code, given = self.code, self.given
        with code.loop(self.run_start, self.run_stop) as run:
            partial = given.run_full.at(run).load(BYTE) == 0
            first, stop = (x.at(run * 8).load(INT64) for x in (given.run_first, given.run_last))
            first, stop = code.maximum(first, self.first_tile), code.minimum(stop, self.last_tile)
            with code.loop(first, stop) as tile:
                self.key_tile(tile * KEYS, partial)

    def key_tile(self, j0: Value, partial: Value) -> None:
        """One tile of keys: scores, weights, weighted values."""
        code = self.code
        self.keys = code.minimum(self.given.m - j0, KEYS)
        self.key.stage(j0, self.keys)
        self.value.stage(j0, self.keys)
        self.score_tile()
        with code.either(partial | (self.keys < KEYS)) as (yes, no):
            with yes, code.loop(0, self.count) as r:
                self.softmax(r, j0, masked=True)
            with no, code.loop(0, self.count) as r:
                self.softmax(r, j0, masked=False)
        self.weigh_values()

    # -- scores ---------------------------------------------------------------------------------------------------
    def score_tile(self) -> None:
        """S[r][key], a few rows and keys at a time."""
        code, tiles = self.code, self.tiles
        rows = self.structure.together
        staged = self.key.by_row
        base, step = (self.key.block, self.key.row_step) if staged is None else (staged, self.key.long)
        with code.loop(0, self.count, rows) as first:
            queries = [self.queries.at(code.minimum(first + r, self.count - 1) * self.long) for r in range(rows)]
            with code.loop(0, self.keys, TOGETHER) as key:
                keys = [base.at(code.minimum(key + k, self.keys - 1) * step) for k in range(TOGETHER)]
                sums = [[Variable(code, self.vector, 0.0) for _ in keys] for _ in queries]
                ahead = [
                    rows_of.block.at((key + (k + AHEAD)) * rows_of.row_step)
                    for rows_of in (self.key, self.value)
                    for k in range(TOGETHER)
                ]
                with code.loop(0, self.long, tiles.align) as at:
                    left = [query.at(at).load(tiles.numbers) for query in queries]
                    right = [row.at(at).load(tiles.numbers) for row in keys]
                    for line in ahead:
                        code.prefetch(line.at(at))
                    for r, query in enumerate(left):
                        for k, row in enumerate(right):
                            sums[r][k].set(tiles.multiply_add(query, row, sums[r][k].get()))
                for r in range(rows):
                    for k in range(TOGETHER):
                        place = (key + k) * tiles.align + r * (KEYS * tiles.align)
                        self.sums.at(place).store(sums[r][k].get(), tiles.align)
            with code.loop(0, rows) as place, code.loop(0, self.keys, self.lanes) as key:
                source = self.sums.at(place * (KEYS * tiles.align) + key * tiles.align)
                vectors = [source.at(k * tiles.align).load(self.vector, tiles.align) for k in range(self.lanes)]
                row = code.minimum(first + place, ROWS - 1)
                self.scores.at(row * self.line + key * tiles.size).store(sums_of(vectors))

    def softmax(self, r: Value, j0: Value, masked: bool) -> None:
        """P in place of a row of scores, and the row's running maximum and sum."""
        code, tiles, given = self.code, self.tiles, self.given
        mask, score = self.renderers[:2]
        h, i = self.query_of(r)
        line = self.scores.at(r * self.line)
        logits: list[Value] = []
        for v in range(KEYS // self.lanes):
            s = line.at(v * tiles.align).load(self.vector) * self.factor
            key = code.count(self.lanes, INT64) + v * self.lanes
            j = code.minimum(key + j0, given.m - 1).to(self.integer)
            symbols = {"b": self.b, "h": h, "i": i, "j": j, "n": given.n, "m": given.m, "s": s}
            if score is not None:
                s = score.pair(symbols, {}).to(self.float).spread(self.lanes)
            if masked:
                allowed = key < self.keys
                if mask is not None:
                    allowed = allowed & mask.pair(symbols, {}).spread(self.lanes)
                s = code.where(allowed, s, code.value(-math.inf, self.vector))
            logits.append(s)
        largest = self.largest.at(r * tiles.size)
        old, top = largest.load(self.float), logits[0]
        for s in logits[1:]:
            top = code.maximum(s, top)
        new = code.maximum(top.fold(code.maximum), old)
        shift = code.where(new == -math.inf, 0.0, new)
        alpha = self.power(old - shift)
        largest.store(new)
        self.alpha.at(r * tiles.size).store(alpha)
        total = self.totals.at(r * tiles.align)
        weights = [self.power(s - shift) for s in logits]
        total.store(code.fma(total.load(self.vector), alpha, added(weights)))
        for v, p in enumerate(weights):
            if self.paired:
                line.at(v * (tiles.align // 2)).store(p.to(BFLOAT))
            else:
                line.at(v * tiles.align).store(p)

    # -- values ---------------------------------------------------------------------------------------------------
    def weigh_values(self) -> None:
        """O[r] = α O[r] + Σ_j P[r][j] · V[j]."""
        code, tiles = self.code, self.tiles
        rows, vectors = self.structure.together, self.structure.d_v // self.lanes
        length = (self.keys + (tiles.pair - 1)) // tiles.pair
        matrix, stride = self.value.lines()
        with code.loop(0, self.count, rows) as first:
            places = [code.minimum(first + r, ROWS - 1) for r in range(rows)]
            bases = [self.scores.at(place * self.line) for place in places]
            for start in range(0, vectors, tiles.vectors):
                width = min(tiles.vectors, vectors - start)
                sums = [[Variable(code, self.vector, 0.0) for _ in range(width)] for _ in range(rows)]
                tiles.accumulate(sums, bases, tiles.size, matrix.at(start * tiles.align), length, stride, align=1)
                for place, row in zip(places, sums, strict=True):
                    alpha = self.alpha.at(place * tiles.size).load(self.float)
                    for v, total in enumerate(row):
                        at = self.output.at(place * self.wide + (start + v) * tiles.align)
                        at.store(code.fma(at.load(self.vector), alpha, total.get()))

    # -- the end of the part --------------------------------------------------------------------------------------
    def hand_over(self) -> None:
        """The part's O / l and lse, row by row; 0 and −∞ for rows that saw nothing of it."""
        code, given, tiles = self.code, self.given, self.tiles
        unit = math.log(2) if self.structure.base_2 else 1.0
        with code.loop(0, self.count) as r:
            h, i = self.query_of(r)
            total = self.totals.at(r * tiles.align).load(self.vector).sum()
            largest = self.largest.at(r * tiles.size).load(self.float).to(DOUBLE)
            nothing = total == 0.0
            safe = code.where(nothing, 1.0, total)
            place = ((self.part * given.batches + self.b) * given.H + h) * given.n + i
            lse = code.fma(largest, unit, code.intrinsic("log", safe.to(DOUBLE)))
            given.lse.at(place * 8).store(code.where(nothing, -math.inf, lse))
            target, mark = given.output.at(place * self.wide), Variable(code, self.vector, 0.0)
            with code.loop(0, self.wide, tiles.align) as at:
                row = self.output.at(r * self.wide + at).load(self.vector)
                mark.set(mark.get() + row * 0.0)
                target.at(at).store(row / safe.spread(self.lanes))
            with code.when((mark.get() != 0.0).any()):
                given.taint.store(code.value(1, INT64))


def added(values: list[Value]) -> Value:
    """Their sum, neighbours first."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def sums_of(vectors: list[Value]) -> Value:
    """One vector whose lane k is the sum of the lanes of vector k.

    Two vectors become one of the sums of their neighbouring lanes, until one is left.
    """
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [a.join(b, 0) + a.join(b, 1) for a, b in pairs]
    return vectors[0]
