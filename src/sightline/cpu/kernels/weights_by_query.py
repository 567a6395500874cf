"""Statistics of queries, second pass: lists of the largest weights, and the weights themselves."""

from __future__ import annotations

import functools
import math
from typing import Any

from llvmlite.ir import IntType

from ..codegen.builder import INT64, POINTER, Value, Variable, bytes_of, vector
from .block import KEYS
from .weights_pass import Observe

__all__ = ["TopK", "WeightTiles"]


class Rowwise(Observe):
    """Statistics of each query: an item is (b, h, block of queries)."""

    def take(self, item: Value) -> None:
        """Later blocks first, since a causal mask makes those the longest."""
        given, tiles = self.given, self.tiles
        blocks = given.query_blocks - given.first_query // tiles.block
        position = item // blocks
        self.place(position // given.H, position % given.H, given.query_blocks - 1 - item % blocks)
        self.begin_rows()
        first, last = self.keys_asked()
        self.attend((given.first_query, given.last_query), (first // KEYS, (last + (KEYS - 1)) // KEYS))
        self.hand_over()

    def keys_asked(self) -> tuple[Value, Value]:
        """The keys that count."""
        return self.code.value(0, INT64), self.given.m

    def begin_rows(self) -> None:
        """Before the block's first tile."""

    def hand_over(self) -> None:
        """After its last."""


class TopK(Rowwise):
    """The `structure.k` largest weights of each query and their keys, the smaller key first where they tie.

    Lists are kept sorted, lane by lane: rank r of S and of its key lies in row r + 1, below a row of ∞ that ends every
    insertion. Keys come in order, and one that only equals what is there stays behind it. What of a tile may enter
    waits, lane by lane, until one of each lane enters at a time: an insertion costs the same for one lane as for all.
    """

    fields = Observe.fields | {"where": POINTER}  # output: (B, H, n, k); where likewise, int64

    def prepare(self) -> None:
        tiles, rows = self.tiles, self.structure.k + 1
        self.whole = vector(self.integer, self.lanes)
        self.top = tiles.matrix(rows)
        row = tiles.block * bytes_of(self.integer)
        self.places = tiles.scratch(rows * row)
        self.least = tiles.variables()  # of each list
        self.waiting, self.waiting_places = tiles.matrix(KEYS), tiles.scratch(KEYS * row)
        self.counts, self.scores = tiles.scratch(row), tiles.matrix(1)  # how many wait in each lane; a key's scores

    def place_of(self, row: Any, v: int, places: Value | None = None) -> Value:
        """Address of a vector of keys, or of as many other whole numbers."""
        size = bytes_of(self.integer)
        row = self.code.value(row, INT64)
        places = self.places if places is None else places
        return places.at(row * (self.tiles.block * size) + v * self.lanes * size)

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
        for v in self.vectors:
            self.place_of(0, v, self.counts).store(code.value(0, self.whole))
        with code.loop(0, self.keys) as key:
            found = []
            for _, s, allowed in self.logits(key, j0, masked):
                found.append(s if allowed is None else code.where(allowed, s, code.value(-math.inf, self.vector)))
            better = [s > least.get() for s, least in zip(found, self.least, strict=True)]
            with code.when(functools.reduce(lambda x, y: x | y, better).any()):
                for v, s in enumerate(found):
                    with code.when(better[v].any()):
                        self.keep_waiting(better[v], s, (j0 + key).to(self.integer), v)
        for v in self.vectors:
            count = self.place_of(0, v, self.counts).load(self.whole)
            with code.loop(0, count.fold(code.maximum).to(INT64)) as turn:
                some = count > turn.to(self.integer)
                s = code.where(some, self.tiles.load(self.waiting, turn, v), -math.inf)
                self.insert(s, self.place_of(turn, v, self.waiting_places).load(self.whole), v)

    def keep_waiting(self, some: Value, s: Value, j: Value, v: int) -> None:
        """A key's scores in these lanes, each behind what waits in its lane."""
        code, tiles, size = self.code, self.tiles, bytes_of(self.integer)
        tiles.store(self.scores, 0, v, s)
        rest = Variable(code, INT64, some.cast(IntType(self.lanes)).widened(INT64))
        with code.forever() as leave:
            lane = rest.get().trailing_zeros()
            count_at = self.place_of(0, v, self.counts).at(lane * size)
            count = count_at.load(self.integer)
            behind = count.to(INT64)
            score = tiles.at(self.scores, 0, v).at(lane * tiles.size).load(self.float)
            tiles.at(self.waiting, behind, v).at(lane * tiles.size).store(score)
            self.place_of(behind, v, self.waiting_places).at(lane * size).store(j)
            count_at.store(count + 1)
            rest.set(rest.get() & (rest.get() - 1))
            leave(rest.get() == 0)

    def insert(self, s: Value, j: Value, v: int) -> None:
        """Scores and their keys into the lists of lanes where they are larger than the least, from the last rank up."""
        code, tiles, k = self.code, self.tiles, self.structure.k
        row = Variable(code, INT64, k)
        old = Variable(code, self.vector, tiles.load(self.top, k, v))
        place = Variable(code, self.whole, self.place_of(k, v).load(self.whole))
        with code.forever() as leave:
            at = row.get()
            above, place_above = tiles.load(self.top, at - 1, v), self.place_of(at - 1, v).load(self.whole)
            enters, passes = s > old.get(), s > above
            tiles.store(self.top, at, v, code.where(passes, above, code.where(enters, s, old.get())))
            self.place_of(at, v).store(code.where(passes, place_above, code.where(enters, j, place.get())))
            leave(~passes.any())
            row.set(at - 1)
            old.set(above)
            place.set(place_above)
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
    """P itself, in the input's dtype, of some queries on some keys; what is not written is 0."""

    fields = Observe.fields | {"first_key": INT64, "last_key": INT64}  # output: (B, H, queries, keys), zeros at first

    def keys_asked(self) -> tuple[Value, Value]:
        return self.given.first_key, self.given.last_key

    def collect(self, j0: Value, masked: bool) -> None:
        code, given, tiles, form = self.code, self.given, self.tiles, self.form
        with code.loop(0, self.keys) as key:
            for v, p in enumerate(self.weights(key, j0, masked)):
                tiles.store(self.s_t, key, v, p)
        rows, columns = given.last_query - given.first_query, given.last_key - given.first_key
        row = (self.b * given.H + self.h) * rows + self.i0 - given.first_query  # of lane 0, which may lie before
        target = given.output.at((row * columns + j0 - given.first_key) * form.bytes)

        def place(lane: Value, key: Value) -> Value:
            return target.at((lane * columns + key) * form.bytes)

        first, last = self.lanes_of(given.first_query, given.last_query)
        start, stop = code.maximum(given.first_key - j0, 0), code.minimum(given.last_key - j0, self.keys)
        whole = start + (stop - start) // self.lanes * self.lanes
        with code.loop(0, len(self.vectors)) as at, code.loop(start, whole, self.lanes) as key:
            turned = tiles.turned([tiles.load(self.s_t, key + k, at) for k in range(self.lanes)])
            for k, p in enumerate(turned):
                lane = at * self.lanes + k
                with code.when((lane >= first) & (lane < last)):
                    form.store(place(lane, key), p)
        with code.loop(first, last) as lane, code.loop(whole, stop) as key:
            form.store(place(lane, key), self.lane_of(self.s_t, key, lane).load(self.float))
