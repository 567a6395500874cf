"""Statistics of keys and of cells, second pass: weights joined over queries, as vectors over lanes until the end."""

from __future__ import annotations

import functools
from typing import Any

from ..codegen.builder import DOUBLE, INT32, INT64, Value, Variable
from .block import KEYS
from .weights_pass import Observe

__all__ = ["CELLS", "PART", "Pooled", "Received"]

PART = 8  # blocks of keys in a part at most: a vector for each key stays in the first two caches
CELLS = 128  # cells side by side in a part at most: a row of a block for each


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
        self.sums = self.running(PART * KEYS)

    def take(self, item: Value) -> None:
        code, given, tiles = self.code, self.given, self.tiles
        heads = given.batches * given.H
        place, rest = item % heads, item // heads
        part, across = rest // given.ranges, rest % given.ranges
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
            total = self.at(self.sums, key).load(self.vector, tiles.align).fold(self.join)
            target.at(key * tiles.size).store(total)

    def collect(self, j0: Value, masked: bool) -> None:
        with self.code.loop(0, self.keys) as key:
            total = functools.reduce(self.join, self.weights(key, j0, masked))
            self.add(self.at(self.sums, j0 - self.start + key), total)


class Pooled(Observe):
    """Sums or maxima of P over the cells of a grid laid on a rectangle.

    Cell r of R takes [r N / R, (r + 1) N / R) of N queries, rounded down; likewise of the keys. An item is (some rows
    of cells, some columns of cells, b, h); a block of queries that lies in two items is done in both.
    """

    fields = Observe.fields | {  # output: (B, H, rows, columns) float64, zeros at first
        "batches": INT64,
        "rows": INT64,  # cells below each other, and of these in one item
        "rows_together": INT64,
        "columns": INT64,
        "columns_together": INT64,
        "first_key": INT64,
        "last_key": INT64,
    }

    def prepare(self) -> None:
        self.cells = self.running(CELLS * len(self.vectors))

    def cell(self, c: Value, v: int) -> Value:
        """Address of one vector of a cell of the item's columns."""
        return self.at(self.cells, (c - self.column) * len(self.vectors) + v)

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
            totals = tiles.variables(0.0)
            with code.loop(at.get() - j0, end - j0) as key:
                for total, p in zip(totals, self.weights(key, j0, masked), strict=True):
                    total.set(self.join(p, total.get()))
            for v, total in enumerate(totals):
                self.add(self.cell(cell.get(), v), total.get())
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
                own = [self.cell(c, v).load(self.vector, tiles.align) for v in self.vectors]
                own = [code.where(inside[v], x, code.value(0.0, self.vector)) for v, x in enumerate(own)]
                place = given.output.at((line + c) * 8)
                total = functools.reduce(self.join, own).fold(self.join)
                place.store(self.join(place.load(DOUBLE), total.to(DOUBLE)))
            lane.set(end)
            row.set(row.get() + 1)

    @property
    def integer_of_lanes(self) -> Any:
        """Whole numbers as wide as the floats, so that comparisons fit their lanes."""
        return INT64 if self.float is DOUBLE else INT32
