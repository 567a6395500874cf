"""The decoding kernel: few queries against many keys, bound by reading K and V once.

The query heads that share a key head are rows of one small matrix, so that one read of K and V serves them all. Here
vectors run along d: a score is a sum over lanes, made for many keys at once by a tree of shuffles; weights are spread
over rows of V.

    S[r][j] = Σ_d Q[r][d] · K[j][d]    P = 2^(S − m')    O[r][d] = α O + Σ_j P[r][j] · V[j][d]

Keys are cut into parts, as the problem alone decides, which threads take one by one; who is done last with a row's
parts joins them, always in their own order, as `merge` does (Dao et al., "Flash-Decoding", 2023). A NaN raises `taint`,
and the forward kernel, which knows what the mask hides, answers in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..codegen.abi import DECODE
from ..codegen.builder import BFLOAT, DOUBLE, INT16, INT64, Value, Variable, vector
from ..codegen.math import exp
from .block import KEYS, LINE, Block

__all__ = ["ROWS", "Decode"]

ROWS = 32  # query rows taken through the keys together
QUARTER = 16  # bytes of a vector within which lanes are shuffled fast, on any machine
TOGETHER = 4  # rows, and keys, whose products are summed in registers together
KEYS_AHEAD, VALUES_AHEAD = 2 * KEYS, KEYS  # rows asked for before they are read: keys beside values, values beside keys


class Decode(Block):
    """Writes the kernel into a module."""

    fields = DECODE

    def allocate(self) -> None:
        tiles, structure = self.tiles, self.structure
        self.key = self.rows(1, along=not self.paired, down=False)
        self.value = self.rows(2, along=False, down=not self.paired)
        self.long = tiles.pairs(structure.d_k) * tiles.size  # bytes of a query row
        self.line = KEYS * tiles.size  # of a row of scores
        self.wide = structure.d_v * tiles.size  # of a row of output
        self.queries = tiles.scratch(ROWS * self.long)
        self.scores, self.output = tiles.scratch(ROWS * self.line), tiles.scratch(ROWS * self.wide)
        self.sums = tiles.scratch(TOGETHER * KEYS * tiles.align)  # unfinished
        self.totals = tiles.scratch(ROWS * tiles.align)
        self.largest, self.alpha = tiles.scratch(ROWS * tiles.size), tiles.scratch(ROWS * tiles.size)

    def take(self, item: Value) -> None:
        """A part of the keys for some query rows; whoever ends the last part joins them all."""
        code, given = self.code, self.given
        self.locate(item)
        self.begin_rows()
        self.attend()
        self.hand_over()
        with code.when(code.increment(given.done.at(self.rows_taken * 8), "acq_rel") == given.chunks - 1):
            self.join()

    def locate(self, item: Value) -> None:
        """Item → (b, g, batch of rows, part of the keys)."""
        code, given = self.code, self.given
        heads, rows = given.H // given.group, given.group * given.n
        batches = (rows + (ROWS - 1)) // ROWS
        self.part, self.rows_taken = item % given.chunks, item // given.chunks
        batch, place = self.rows_taken % batches, self.rows_taken // batches
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

    def row_of(self, r: Value) -> Value:
        """A row's place in (B, H, n)."""
        h, i = self.query_of(r)
        return (self.b * self.given.H + h) * self.given.n + i

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
        with self.each_tile(self.first_tile, self.last_tile) as (tile, partial):
            self.key_tile(tile * KEYS, partial)

    def key_tile(self, j0: Value, partial: Value) -> None:
        """One tile of keys: scores, weights, weighted values."""
        code = self.code
        self.keys = code.minimum(self.given.m - j0, KEYS)
        self.key.stage(j0, self.keys)
        self.values = self.given.operand("value", self.b, self.g).at(j0 * self.given.value_row)
        self.score_tile()
        with code.either(partial | (self.keys < KEYS)) as (yes, no):
            with yes, code.loop(0, self.count) as r:
                self.softmax(r, j0, masked=True)
            with no, code.loop(0, self.count) as r:
                self.softmax(r, j0, masked=False)
        self.value.stage(j0, self.keys)
        self.weigh_values()

    # -- scores ---------------------------------------------------------------------------------------------------
    def score_tile(self) -> None:
        """S[r][key], a few rows and keys at a time; values of the next tile are asked for meanwhile."""
        code, tiles = self.code, self.tiles
        rows = self.structure.together
        staged = self.key.by_row
        part = QUARTER // tiles.size
        long = KEYS // part * tiles.align  # bytes of a row's unfinished sums
        base, step = (self.key.block, self.key.row_step) if staged is None else (staged, self.key.long)
        with code.loop(0, self.count, rows) as first:
            queries = [self.queries.at(code.minimum(first + r, self.count - 1) * self.long) for r in range(rows)]
            with code.loop(0, self.keys, TOGETHER) as key:
                keys = [base.at(code.minimum(key + k, self.keys - 1) * step) for k in range(TOGETHER)]
                sums = [[Variable(code, self.vector, 0.0) for _ in keys] for _ in queries]
                ahead = [self.values.at((key + (k + VALUES_AHEAD)) * self.value.row_step) for k in range(TOGETHER)]
                with code.loop(0, self.long, tiles.align) as at:
                    left = [query.at(at).load(tiles.numbers) for query in queries]
                    right = [row.at(at).load(tiles.numbers) for row in keys]
                    for line in ahead:
                        code.prefetch(line.at(at))
                    for r, query in enumerate(left):
                        for k, row in enumerate(right):
                            sums[r][k].set(tiles.multiply_add(query, row, sums[r][k].get()))
                for r in range(rows):
                    for k, partial in enumerate(sums_within([sum.get() for sum in sums[r]], part)):
                        place = (key // part + k) * tiles.align + r * long
                        self.sums.at(place).store(partial, tiles.align)
            with code.loop(0, rows) as place, code.loop(0, self.keys, self.lanes) as key:
                source = self.sums.at(place * long + key * (tiles.align // part))
                count = self.lanes // part
                vectors = [source.at(k * tiles.align).load(self.vector, tiles.align) for k in range(count)]
                row = code.minimum(first + place, ROWS - 1)
                self.scores.at(row * self.line + key * tiles.size).store(sums_across(vectors, part))

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
        """O[r] = α O[r] + Σ_j P[r][j] · V[j]; keys of the tile after the next are asked for meanwhile."""
        code, tiles = self.code, self.tiles
        rows, vectors = self.structure.together, self.structure.d_v // self.lanes
        length = (self.keys + (tiles.pair - 1)) // tiles.pair
        matrix, stride = self.value.lines()  # not of pairs
        starts = range(0, vectors, tiles.vectors)

        def reading(turn: int, width: int) -> Callable[[Value], list[Value]]:
            """A step's values; the lines of keys ahead that are this turn's are asked for."""
            lines = range(turn * LINE, self.structure.d_k * self.form.bytes, LINE * len(starts))
            places = [(starts[turn] + v) * tiles.align for v in range(width)]

            def read(k: Value) -> list[Value]:
                for row in ((k * tiles.pair + (u + KEYS_AHEAD)) * self.key.row_step for u in range(tiles.pair)):
                    for at in lines:
                        code.prefetch(self.key.block.at(row).at(at))
                if self.paired:
                    return self.pairs_of_values(k, places)
                return [matrix.at(k * stride + place).load(tiles.numbers) for place in places]

            return read

        with code.loop(0, self.count, rows) as first:
            places = [code.minimum(first + r, ROWS - 1) for r in range(rows)]
            bases = [self.scores.at(place * self.line) for place in places]
            for turn, start in enumerate(starts):
                width = min(tiles.vectors, vectors - start)
                sums = [[Variable(code, self.vector, 0.0) for _ in range(width)] for _ in range(rows)]
                tiles.accumulate(sums, bases, tiles.size, matrix, length, read=reading(turn, width))
                for place, row in zip(places, sums, strict=True):
                    alpha = self.alpha.at(place * tiles.size).load(self.float)
                    for v, total in enumerate(row):
                        at = self.output.at(place * self.wide + (start + v) * tiles.align)
                        at.store(code.fma(at.load(self.vector), alpha, total.get()))

    def pairs_of_values(self, k: Value, places: list[int]) -> list[Value]:
        """V's rows 2k and 2k + 1 as pairs, in registers: columns change places within every two vectors."""
        rows = [
            self.value.block.at(self.code.minimum(k * 2 + u, self.keys - 1) * self.value.row_step) for u in range(2)
        ]
        found: list[Value] = []
        for place in places[::2]:
            low, high = (row.at(place // 2).load(vector(INT16, 2 * self.lanes)) for row in rows)
            part = QUARTER // 2  # lanes
            found += [low.braid(high, half, 1, part).cast(self.tiles.numbers) for half in range(2)]
        return found

    # -- the end of the part --------------------------------------------------------------------------------------
    def hand_over(self) -> None:
        """The part's O / l and lse, row by row; 0 and −∞ for rows that saw nothing of it."""
        code, given, tiles = self.code, self.given, self.tiles
        unit = math.log(2) if self.structure.base_2 else 1.0
        with code.loop(0, self.count) as r:
            total = self.totals.at(r * tiles.align).load(self.vector).sum()
            largest = self.largest.at(r * tiles.size).load(self.float).to(DOUBLE)
            nothing = total == 0.0
            safe = code.where(nothing, 1.0, total)
            place = self.part * (given.batches * given.H * given.n) + self.row_of(r)
            lse = code.fma(largest, unit, code.intrinsic("log", safe.to(DOUBLE)))
            given.part_lse.at(place * 8).store(code.where(nothing, -math.inf, lse))
            target, mark = given.part_output.at(place * self.wide), Variable(code, self.vector, 0.0)
            step = tiles.pair * tiles.align
            with code.loop(0, self.wide, step) as at:
                found = [self.output.at(r * self.wide + at + k).load(self.vector) for k in range(0, step, tiles.align)]
                if self.paired:  # columns as they were
                    found = [found[0].braid(found[1], half, QUARTER // tiles.size) for half in range(2)]
                for k, row in enumerate(found):
                    mark.set(mark.get() + row * 0.0)
                    target.at(at + k * tiles.align).store(row / safe.spread(self.lanes))
            with code.when((mark.get() != 0.0).any()):
                given.taint.store(code.value(1, INT64))

    def join(self) -> None:
        """output = Σ exp(lse_p − lse) output_p with lse = ln Σ exp lse_p, the sink counted; row by row."""
        code, given, tiles = self.code, self.given, self.tiles
        rows = given.batches * given.H * given.n  # of a part
        with code.loop(0, self.count) as r:
            h, _ = self.query_of(r)
            row = self.row_of(r)
            sink = given.sinks.at(h * 8).load(DOUBLE) if self.structure.sinks else code.value(-math.inf, DOUBLE)
            largest = Variable(code, DOUBLE, sink)
            with code.loop(0, given.chunks) as part:
                lse = given.part_lse.at((part * rows + row) * 8).load(DOUBLE)
                largest.set(code.maximum(lse, largest.get()))
            shift = code.where(largest.get() == -math.inf, 0.0, largest.get())
            total = Variable(code, DOUBLE, exp(code, sink - shift) if self.structure.sinks else 0.0)
            with code.loop(0, given.chunks) as part:
                place = given.part_lse.at((part * rows + row) * 8)
                share = exp(code, place.load(DOUBLE) - shift)
                place.store(share)
                total.set(total.get() + share)
            nothing = total.get() == 0.0
            safe = code.where(nothing, 1.0, total.get())
            lse = largest.get() + code.intrinsic("log", safe)
            given.lse.at(row * 8).store(code.where(nothing, -math.inf, lse))
            with code.loop(0, self.structure.d_v, self.lanes) as c:
                whole = Variable(code, self.vector, 0.0)
                with code.loop(0, given.chunks) as part:
                    share = given.part_lse.at((part * rows + row) * 8).load(DOUBLE) / safe
                    entries = given.part_output.at((part * rows + row) * self.wide + c * tiles.size).load(self.vector)
                    whole.set(code.fma(entries, share.to(self.float), whole.get()))
                target = given.output.at((row * self.structure.d_v + c) * self.form.bytes)
                self.form.store(target, whole.get())


def added(values: list[Value]) -> Value:
    """Their sum, neighbours first."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def sums_within(vectors: list[Value], part: int) -> list[Value]:
    """For each `part` vectors one, whose lane k of every `part` lanes is the sum of these lanes of vector k."""
    for _ in range(part.bit_length() - 1):
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [a.join(b, 0, 1, part) + a.join(b, 1, 1, part) for a, b in pairs]
    return vectors


def sums_across(vectors: list[Value], part: int) -> Value:
    """One vector of the sums `sums_within` began: `part` lanes of it for each of the vectors."""
    lanes = part * len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [a.join(b, 0, part, lanes) + a.join(b, 1, part, lanes) for a, b in pairs]
    return vectors[0]
