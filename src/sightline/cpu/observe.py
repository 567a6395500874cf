"""The second pass over the tiles: normalised weights from the saved normaliser, each tile handed to a statistic.

    Sᵀ[j][i] = Σ_d K[j][d] · Qᵀ[d][i]        P = e^(S − lse), 0 where hidden and in rows that see nothing

The normaliser is a sum of two numbers of the accumulator's type, so that weights do not take on its rounding. Each
statistic is a kernel of its own, a subclass that says what an item of work is and what becomes of a tile: `received`
keeps a vector for each key, `Pooled` one for each cell, `TopK` sorted lists, `WeightTiles` writes the weights out. Every
number of the result is written by one item alone, in an order that the problem decides, so that results are the same
for any number of threads.

NaN and ∞ are not looked after here: a visible one shows in lse, and the caller takes another road. What the mask hides
never enters, since runs that are full hold nothing hidden.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from .arguments import COMMON
from .block import KEYS, Block
from .lanes import BYTE, DOUBLE, INT32, INT64, POINTER, Value, Variable, bytes_of, vector

__all__ = ["CELLS", "PART", "Observe", "Pooled", "Received", "TopK", "WeightTiles", "WideWeightTiles"]

PART = 8  # blocks of keys in a part at most: a vector for each key stays in the first two caches
CELLS = 128  # cells side by side in a part at most: a row of a block for each


class Observe(Block):
    """Writes a kernel into a module; a statistic is a subclass.

    `structure.kernel` ends in "max" where the largest weight is wanted in place of a sum.
    """

    fields = COMMON | {
        "output": POINTER,  # in the accumulator's type unless the statistic says otherwise
        "first_query": INT64,  # the queries that count: weights of others are 0
        "last_query": INT64,
    }

    def write(self, name: str) -> Any:
        """The module with the kernel in it."""
        self.begin(name)
        code, given, tiles = self.code, self.given, self.tiles
        self.q_t, self.s_t = tiles.matrix(tiles.pairs(self.structure.d_k)), tiles.matrix(KEYS)
        self.key = self.rows(1, along=True, down=False)
        self.normaliser, self.rest = tiles.matrix(1), tiles.matrix(1)
        self.high, self.low = tiles.variables(), tiles.variables()
        self.prepare()
        with code.forever() as leave:
            item = code.increment(given.counter)
            leave(item >= given.items)
            self.take(item)
        code.finish()
        return self.module

    def prepare(self) -> None:
        """The statistic's own scratch."""

    def take(self, item: Value) -> None:
        """One item of work."""
        raise NotImplementedError(type(self).__name__)

    def collect(self, j0: Value, masked: bool) -> None:
        """What becomes of a tile whose products are in Sᵀ; `masked`: some of it is hidden."""
        raise NotImplementedError(type(self).__name__)

    def join(self, x: Value, y: Value) -> Value:
        """The sum of weights, or the larger."""
        return self.code.maximum(x, y) if self.structure.kernel.endswith("max") else x + y

    # -- a block of queries ---------------------------------------------------------------------------------------
    def sees(self, first: Value, last: Value) -> Value:
        """Whether the block's runs reach into these tiles."""
        code, given = self.code, self.given
        found = Variable(code, INT64, 0)
        with code.loop(self.run_start, self.run_stop) as run:
            start, stop = (x.at(run * 8).load(INT64) for x in (given.run_first, given.run_last))
            found.set(found.get() | ((start < last) & (stop > first)).to(INT64))
        return found.get() != 0

    def attend(self, queries: tuple[Value, Value], tiles: tuple[Value, Value]) -> None:
        """The block against those of its runs' tiles; weights of queries not among these are 0."""
        code, given = self.code, self.given
        self.key.place(given.operand("key", self.b, self.h // given.group), given.key_row, given.key_column)
        self.turn_queries()
        self.halve_normalisers(*queries)
        self.evaluate_block()
        with code.loop(self.run_start, self.run_stop) as run:
            partial = given.run_full.at(run).load(BYTE) == 0
            first, stop = (x.at(run * 8).load(INT64) for x in (given.run_first, given.run_last))
            with code.loop(code.maximum(first, tiles[0]), code.minimum(stop, tiles[1])) as tile:
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
                    self.collect(j0, masked=True)
            with no:
                self.collect(j0, masked=False)

    # -- one key and all queries of the block ---------------------------------------------------------------------
    def scores(self, key: Value, j0: Value, masked: bool) -> Iterator[tuple[Value, Value | None]]:
        """By vector: S, or Q · K not yet scaled where there is no score formula; and which of them are allowed."""
        mask, score = self.renderers
        j = (j0 + key).to(self.integer)
        rows = self.by_row(j)
        for v in self.vectors:
            s, allowed = self.tiles.load(self.s_t, key, v), None
            symbols = self.symbols[v] | {"j": j, "s": s * self.factor}
            if score is not None:
                s = score.pair(symbols, self.known[v][1] | rows[1]).to(self.float).spread(self.lanes)
            if masked and mask is not None:
                allowed = mask.pair(symbols, self.known[v][0] | rows[0])
            yield s, allowed

    def weight(self, s: Value, v: int) -> Value:
        """P of what `scores` gives."""
        high = self.high[v].get()
        near = s - high if self.renderers[1] is not None else self.code.fma(s, self.factor, -high)
        return self.power(near - self.low[v].get())

    def weights(self, key: Value, j0: Value, masked: bool) -> list[Value]:
        """P of one key, by vector; 0 where hidden."""
        code = self.code
        found = [(self.weight(s, v), allowed) for v, (s, allowed) in enumerate(self.scores(key, j0, masked))]
        nothing = code.value(0.0, self.vector)
        return [p if allowed is None else code.where(allowed, p, nothing) for p, allowed in found]

    def clear(self, scratch: Value, vectors: Any, number: float = 0.0) -> None:
        """Fill so many vectors of scratch."""
        with self.code.loop(0, vectors) as at:
            scratch.at(at * self.tiles.align).store(self.code.value(number, self.vector), self.tiles.align)


class Received(Observe):
    """What each key receives: Σ_i P[i][j], or the largest.

    An item is (part of the keys, range of the queries, b, h). Its keys have a vector of sums each, over the lanes,
    which is folded once in the end.
    """

    fields = Observe.fields | {  # output: (ranges, B, H, m)
        "batches": INT64,
        "chunk": INT64,  # blocks of keys in a part
        "ranges": INT64,
        "range": INT64,  # blocks of queries in each
    }

    def prepare(self) -> None:
        self.sums = self.tiles.scratch(PART * KEYS * self.tiles.align)

    def take(self, item: Value) -> None:
        code, given, tiles = self.code, self.given, self.tiles
        heads = given.batches * given.H
        place, rest = item % heads, item // heads
        part, across = rest // given.ranges, rest % given.ranges  # first parts first: causal masks make those the longest
        self.start = part * given.chunk * KEYS
        keys = code.minimum(given.chunk * KEYS, given.m - self.start)
        self.clear(self.sums, keys)
        first = given.first_query // tiles.block + across * given.range
        last = code.minimum(first + given.range, given.query_blocks)
        span = part * given.chunk, (part + 1) * given.chunk
        with code.loop(first, last) as query_block:
            self.place(place // given.H, place % given.H, query_block)
            with code.when(self.sees(*span)):
                self.attend((given.first_query, given.last_query), span)
        target = given.output.at(((across * heads + place) * given.m + self.start) * tiles.size)
        with code.loop(0, keys) as key:
            total = self.sums.at(key * tiles.align).load(self.vector, tiles.align).fold(self.join)
            target.at(key * tiles.size).store(total)

    def collect(self, j0: Value, masked: bool) -> None:
        with self.code.loop(0, self.keys) as key:
            total = functools.reduce(self.join, self.weights(key, j0, masked))
            place = self.sums.at((j0 - self.start + key) * self.tiles.align)
            place.store(self.join(place.load(self.vector, self.tiles.align), total), self.tiles.align)


class Pooled(Observe):
    """Sums or maxima of P over the cells of a grid laid on a rectangle.

    Cell r of R takes [r N / R, (r + 1) N / R) of N queries, rounded down; likewise of the keys. An item is (some rows of
    cells, some columns of cells, b, h); a block of queries that lies in two items is done in both.
    """

    fields = Observe.fields | {  # output: (B, H, rows, columns), zeros at first
        "batches": INT64,
        "rows": INT64,  # cells below each other, and of these in one item
        "rows_together": INT64,
        "columns": INT64,
        "columns_together": INT64,
        "first_key": INT64,
        "last_key": INT64,
    }

    def prepare(self) -> None:
        self.cells = self.tiles.matrix(CELLS)

    def row_edge(self, r: Value) -> Value:
        """The first query of a cell."""
        given = self.given
        return given.first_query + r * (given.last_query - given.first_query) // given.rows

    def column_edge(self, c: Value) -> Value:
        """The first key of a cell."""
        given = self.given
        return given.first_key + c * (given.last_key - given.first_key) // given.columns

    def take(self, item: Value) -> None:
        code, given, tiles = self.code, self.given, self.tiles
        heads = given.batches * given.H
        self.head, rest = item % heads, item // heads
        across = (given.columns + given.columns_together - 1) // given.columns_together
        down = (given.rows + given.rows_together - 1) // given.rows_together
        r = (down - 1 - rest // across) * given.rows_together  # last rows first: causal masks make those the longest
        self.column = rest % across * given.columns_together
        self.past = code.minimum(self.column + given.columns_together, given.columns)
        self.span = self.column_edge(self.column), self.column_edge(self.past)
        self.queries = self.row_edge(r), self.row_edge(code.minimum(r + given.rows_together, given.rows))
        span = self.span[0] // KEYS, (self.span[1] + (KEYS - 1)) // KEYS
        last = (self.queries[1] + (tiles.block - 1)) // tiles.block
        with code.loop(self.queries[0] // tiles.block, last) as query_block:
            self.place(self.head // given.H, self.head % given.H, query_block)
            with code.when(self.sees(*span)):
                self.clear(self.cells, (self.past - self.column) * len(self.vectors))
                self.attend(self.queries, span)
                self.fold()

    def collect(self, j0: Value, masked: bool) -> None:
        code, given, tiles = self.code, self.given, self.tiles
        at = Variable(code, INT64, code.maximum(j0, self.span[0]))
        stop = code.minimum(j0 + self.keys, self.span[1])
        length = given.last_key - given.first_key
        cell = Variable(code, INT64, ((at.get() - given.first_key + 1) * given.columns - 1) // length)
        with code.forever() as leave:
            leave(at.get() >= stop)
            end = code.minimum(self.column_edge(cell.get() + 1), stop)
            row = cell.get() - self.column
            totals = [Variable(code, self.vector, tiles.load(self.cells, row, v)) for v in self.vectors]
            with code.loop(at.get() - j0, end - j0) as key:
                for total, p in zip(totals, self.weights(key, j0, masked), strict=True):
                    total.set(self.join(p, total.get()))
            for v, total in enumerate(totals):
                tiles.store(self.cells, row, v, total.get())
            at.set(end)
            cell.set(cell.get() + 1)

    def fold(self) -> None:
        """The block's lanes joined, cell by cell, to the output."""
        code, given, tiles = self.code, self.given, self.tiles
        first, last = self.lanes_of(*self.queries)
        length, whole = given.last_query - given.first_query, self.integer_of_lanes
        start = self.i0 + first - given.first_query
        row = Variable(code, INT64, ((start + 1) * given.rows - 1) // length)
        lane = Variable(code, INT64, first)
        with code.forever() as leave:
            leave(lane.get() >= last)
            end = code.minimum(self.row_edge(row.get() + 1) - self.i0, last)
            inside = []
            for v in self.vectors:
                lanes = code.count(self.lanes, whole) + v * self.lanes
                inside.append((lanes >= lane.get().to(whole)) & (lanes < end.to(whole)))
            line = (self.head * given.rows + row.get()) * given.columns
            with code.loop(self.column, self.past) as c:
                own = [tiles.load(self.cells, c - self.column, v) for v in self.vectors]
                own = [code.where(inside[v], x, code.value(0.0, self.vector)) for v, x in enumerate(own)]
                place = given.output.at((line + c) * tiles.size)
                total = functools.reduce(self.join, own).fold(self.join)
                place.store(self.join(place.load(self.float), total))
            lane.set(end)
            row.set(row.get() + 1)

    @property
    def integer_of_lanes(self) -> Any:
        """Whole numbers as wide as the floats, so that comparisons fit their lanes."""
        return INT64 if self.float is DOUBLE else INT32


class Rowwise(Observe):
    """Statistics of each query: an item is (b, h, block of queries) against all keys."""

    def take(self, item: Value) -> None:
        """Later blocks first, since a causal mask makes those the longest."""
        given, tiles = self.given, self.tiles
        blocks = given.query_blocks - given.first_query // tiles.block
        position = item // blocks
        self.place(position // given.H, position % given.H, given.query_blocks - 1 - item % blocks)
        self.begin_rows()
        everything = self.code.value(0, INT64), (given.m + (KEYS - 1)) // KEYS
        self.attend((given.first_query, given.last_query), everything)
        self.hand_over()

    def begin_rows(self) -> None:
        """Before the block's first tile."""

    def hand_over(self) -> None:
        """After its last."""


class TopK(Rowwise):
    """The `structure.k` largest weights of each query and their keys, the smaller key first where they tie.

    Lists are kept sorted, lane by lane: rank r of S and of its key lies in row r + 1, below a row of ∞ that ends every
    insertion. Keys come in order, and one that only equals what is there stays behind it.
    """

    fields = Observe.fields | {"where": POINTER}  # output: (B, H, n, k); where likewise, int64

    def prepare(self) -> None:
        tiles, rows = self.tiles, self.structure.k + 1
        self.whole = vector(self.integer, self.lanes)
        self.top = tiles.matrix(rows)
        self.places = tiles.scratch(rows * tiles.block * bytes_of(self.integer))
        self.least = tiles.variables()  # of each list

    def place_of(self, row: Any, v: int) -> Value:
        """Address of a vector of keys."""
        size = bytes_of(self.integer)
        row = self.code.value(row, INT64)
        return self.places.at(row * (self.tiles.block * size) + v * self.lanes * size)

    def begin_rows(self) -> None:
        code, tiles = self.code, self.tiles
        with code.loop(0, self.structure.k + 1) as row:
            for v in self.vectors:
                tiles.store(self.top, row, v, code.value(-math.inf, self.vector))
                self.place_of(row, v).store(code.value(-1, self.whole))
        for v in self.vectors:
            tiles.store(self.top, 0, v, code.value(math.inf, self.vector))
            self.least[v].set(-math.inf)

    def collect(self, j0: Value, masked: bool) -> None:
        code = self.code
        with code.loop(0, self.keys) as key:
            found = []
            for s, allowed in self.scores(key, j0, masked):
                found.append(s if allowed is None else code.where(allowed, s, code.value(-math.inf, self.vector)))
            better = [s > least.get() for s, least in zip(found, self.least, strict=True)]
            with code.when(functools.reduce(lambda x, y: x | y, better).any()):
                for v, s in enumerate(found):
                    self.insert(s, (j0 + key).to(self.integer), v)

    def insert(self, s: Value, j: Value, v: int) -> None:
        """A score into the lists of the lanes where it is larger than their least, from the last rank up."""
        code, tiles, k = self.code, self.tiles, self.structure.k
        row = Variable(code, INT64, k)
        with code.forever() as leave:
            at = row.get()
            old = tiles.load(self.top, at, v)
            enters = s > old
            leave(~enters.any())
            above = tiles.load(self.top, at - 1, v)
            passes = s > above
            tiles.store(self.top, at, v, code.where(passes, above, code.where(enters, s, old)))
            keys = [self.place_of(row, v).load(self.whole) for row in (at, at - 1)]
            place = code.where(passes, keys[1], code.where(enters, j, keys[0]))
            self.place_of(at, v).store(place)
            row.set(at - 1)
        self.least[v].set(tiles.load(self.top, k, v))

    def hand_over(self) -> None:
        code, given, tiles, k = self.code, self.given, self.tiles, self.structure.k
        with code.loop(1, k + 1) as row:
            for v in self.vectors:
                tiles.store(self.top, row, v, self.weight(tiles.load(self.top, row, v), v))
        target = given.output.at(self.row * (k * tiles.size))
        self.turn_back(tiles.at(self.top, 1), k, target, self.form.widened)
        size = bytes_of(self.integer)
        with code.loop(0, self.valid) as lane, code.loop(0, k) as rank:
            key = self.place_of(rank + 1, 0).at(lane * size).load(self.integer)
            given.where.at(((self.row + lane) * k + rank) * 8).store(key.to(INT64))


class WeightTiles(Rowwise):
    """P itself, in the input's dtype, row by row of some queries; what is not written is 0."""

    # output: (B, H, last_query − first_query, m)
    @property
    def written(self) -> Any:
        """The format of the output."""
        return self.form

    def collect(self, j0: Value, masked: bool) -> None:
        code, given, tiles, form = self.code, self.given, self.tiles, self.written
        with code.loop(0, self.keys) as key:
            for v, p in enumerate(self.weights(key, j0, masked)):
                tiles.store(self.s_t, key, v, p)
        rows = given.last_query - given.first_query
        row = (self.b * given.H + self.h) * rows + self.i0 - given.first_query  # of lane 0, which may lie before
        target, long = given.output.at((row * given.m + j0) * form.bytes), given.m * form.bytes
        first, last = self.lanes_of(given.first_query, given.last_query)
        whole = self.keys // self.lanes * self.lanes
        with code.loop(0, len(self.vectors)) as v, code.loop(0, whole, self.lanes) as key:
            turned = tiles.turned([tiles.load(self.s_t, key + k, v) for k in range(self.lanes)])
            for k, p in enumerate(turned):
                lane = v * self.lanes + k
                with code.when((lane >= first) & (lane < last)):
                    form.store(target.at(lane * long + key * form.bytes), p)
        with code.loop(first, last) as lane, code.loop(whole, self.keys) as key:
            p = self.lane_of(self.s_t, key, lane).load(self.float)
            form.store(target.at(lane * long + key * form.bytes), p)


class WideWeightTiles(WeightTiles):
    """The same in the accumulator's type."""

    @property
    def written(self) -> Any:
        return self.form.widened
