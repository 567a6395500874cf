"""Statistics of the weights pass per key and per cell: weights are combined over queries."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..codegen.builder import Variable
from ..codegen.math import reduce_across_groups, reduce_within_groups
from ..codegen.values import DOUBLE, INT32, INT64, Value
from .kernel_spec import KEY_BLOCK, SHUFFLE_BYTES
from .weights_pass import StatisticCode

MAX_COLUMNS = 2 * KEY_BLOCK  # the most columns of cells in scratch; a tile has keys of up to KEY_BLOCK columns


class KeySums(StatisticCode):
    """Compute the sum of f over the queries of each key, Σ_i P[i][j] for example, or the maximum of P.

    The output is (2, num_ranges, B, H, m rounded up to whole tiles): the sums of each range of queries, then their
    rounding errors. The lanes of a tile's weights are reduced after the tile, for as many keys at once as a vector has
    lanes.
    """

    def allocate(self) -> None:
        self.tile_sums = self.tiles.scratch(KEY_BLOCK * self.tiles.align)  # a vector for each key of a tile

    def init_item(self) -> None:
        """Set the sums of the item, and their errors, to 0."""
        kernel, builder, args, tiles = self.kernel, self.builder, self.args, self.tiles
        heads, tile_bytes = args.batches * args.H, KEY_BLOCK * tiles.itemsize
        row_bytes = (args.m + (KEY_BLOCK - 1)) // KEY_BLOCK * tile_bytes
        (output,) = self.outputs
        self.sums = output.at((kernel.range_index * heads + kernel.head_index) * row_bytes)
        self.errors = self.sums.at(args.num_ranges * heads * row_bytes)
        with builder.loop(kernel.first_tile * tile_bytes, kernel.last_tile * tile_bytes, tiles.align) as offset:
            for numbers in (self.sums, self.errors):
                numbers.at(offset).store(builder.value(0.0, tiles.vector))

    def add_key(self, key: Value, j: Value) -> None:
        totals = self.load_entries(key)
        while len(totals) > 1:
            totals = [functools.reduce(self.combine, totals[k : k + 2]) for k in range(0, len(totals), 2)]
        self.tile_sums.at(key * self.tiles.align).store(totals[0], self.tiles.align)

    def finish_tile(self, j0: Value) -> None:
        """Add the tile's sums to those of the item. Numbers past the last key are undefined."""
        tiles, lanes = self.tiles, self.kernel.lanes
        group_lanes = SHUFFLE_BYTES // tiles.itemsize
        with self.builder.loop(0, self.kernel.num_keys, lanes) as first:
            source = self.tile_sums.at(first * tiles.align)
            vectors = [source.at(k * tiles.align).load(tiles.vector, tiles.align) for k in range(lanes)]
            groups = reduce_within_groups(vectors, group_lanes, self.combine)
            total = reduce_across_groups(groups, group_lanes, self.combine)
            offset = (j0 + first) * tiles.itemsize
            self.accumulate(self.sums.at(offset), self.errors.at(offset), total, tiles.itemsize)


class KeyExtrema(StatisticCode):
    """Compute the maximum or minimum of f over the queries of each key, and the first query that has it.

    The outputs are (num_ranges, B, H, m rounded up to whole tiles): the numbers of each range of queries, and the
    queries as int64; −1 for no query.
    """

    def init_item(self) -> None:
        kernel, builder, args, tiles = self.kernel, self.builder, self.args, self.tiles
        row = (args.m + (KEY_BLOCK - 1)) // KEY_BLOCK * KEY_BLOCK
        first = (kernel.range_index * (args.batches * args.H) + kernel.head_index) * row
        values, queries = self.outputs
        self.values, self.queries = values.at(first * tiles.itemsize), queries.at(first * 8)
        with builder.loop(kernel.first_tile * KEY_BLOCK, kernel.last_tile * KEY_BLOCK) as key:
            self.values.at(key * tiles.itemsize).store(builder.value(self.role.hidden, tiles.kind))
            self.queries.at(key * 8).store(builder.value(-1, INT64))

    def add_key(self, key: Value, j: Value) -> None:
        kernel, builder = self.kernel, self.builder
        none = kernel.i0.to(kernel.integer) + self.tiles.block  # past the last query of the block
        visible, entries = kernel.find_visible(key), self.load_entries(key)
        queries = [builder.where(seen, kernel.symbols[v]["i"], none) for v, seen in enumerate(visible)]
        best, query = entries[0], queries[0]
        for seen, entry, i in zip(visible[1:], entries[1:], queries[1:], strict=True):
            is_new = seen & ((query == none) | self.exceeds(entry, best))
            best, query = builder.where(is_new, entry, best), builder.where(is_new, i, query)
        largest = best.reduce(self.combine)
        is_nan = (largest != largest).broadcast(kernel.lanes)
        has_largest = builder.where(is_nan, best != best, best == largest.broadcast(kernel.lanes))
        first = builder.where(has_largest, query, none).reduce(builder.minimum)
        value_at, query_at = (self.values.at(j.to(INT64) * self.tiles.itemsize), self.queries.at(j.to(INT64) * 8))
        is_first = query_at.load(INT64) < 0
        with builder.if_then((first < none) & (is_first | self.exceeds(largest, value_at.load(self.tiles.kind)))):
            value_at.store(largest)
            query_at.store(first.to(INT64))


class CellSums(StatisticCode):
    """Compute the sums, maxima or minima of f over the cells of a grid on a rectangle of queries and keys.

    Of R rows and N queries, row r contains the queries [r N / R, (r + 1) N / R), rounded down. Columns divide the keys
    in the same way. The caller fills the output, (B, H, R + num_ranges − 1, columns) float64, with `role.hidden`. Range
    g of the queries writes its part of row r to row r + g of the output, so that no two ranges write the same row.
    """

    def allocate(self) -> None:
        # of each column: a vector of running sums or maxima for each vector of the block, and their rounding errors
        self.cells = self.tiles.scratch(2 * MAX_COLUMNS * self.tiles.row_bytes)
        self.first_column = Variable(self.builder, INT64)  # of the columns in scratch

    def cell_address(self, c: Value, v: int) -> Value:
        """Return the address of vector v of column c. The address of its error is `row_bytes` higher."""
        return self.tiles.at(self.cells, (c - self.first_column.get()) * 2, v)

    def column_of(self, j: Value) -> Value:
        args = self.args
        return ((j - args.first_key + 1) * args.columns - 1) // (args.last_key - args.first_key)

    def init_block(self) -> None:
        self.clear_from(0)

    def clear_from(self, column: Any) -> None:
        """Let the scratch hold the columns from `column` on, and set their cells to 0."""
        self.first_column.set(column)
        self.tiles.fill(self.cells, 0, self.num_columns * 2, self.role.hidden)

    @property
    def num_columns(self) -> Value:
        """The number of columns in scratch."""
        return self.builder.minimum(self.args.columns - self.first_column.get(), MAX_COLUMNS)

    def init_tile(self, j0: Value) -> None:
        """If the tile's columns do not fit into scratch, write the columns in scratch to the output, and start anew."""
        builder, args = self.builder, self.args
        last = builder.minimum(j0 + KEY_BLOCK, args.last_key) - 1
        with builder.if_then(self.column_of(last) - self.first_column.get() >= MAX_COLUMNS):
            self.reduce_lanes()
            self.clear_from(self.column_of(builder.maximum(j0, args.first_key)))

    @contextmanager
    def loop_keys(self, j0: Value) -> Iterator[Value]:
        """Write a loop over the keys of a tile, cell by cell, and yield the key."""
        builder, args, tiles = self.builder, self.args, self.tiles
        at = Variable(builder, INT64, builder.maximum(j0, args.first_key))
        stop = builder.minimum(j0 + self.kernel.num_keys, args.last_key)
        column = Variable(builder, INT64, self.column_of(at.get()))
        with builder.infinite_loop() as break_if:
            break_if(at.get() >= stop)
            next_column = (column.get() + 1) * (args.last_key - args.first_key) // args.columns
            end = builder.minimum(args.first_key + next_column, stop)
            self.totals = tiles.variables(self.role.hidden)
            with builder.loop(at.get() - j0, end - j0) as key:
                yield key
            for v, total in enumerate(self.totals):
                address = self.cell_address(column.get(), v)
                self.accumulate(address, address.at(tiles.row_bytes), total.get(), tiles.align)
            at.set(end)
            column.set(column.get() + 1)

    def add_key(self, key: Value, j: Value) -> None:
        for total, p in zip(self.totals, self.load_entries(key), strict=True):
            total.set(self.combine(p, total.get()))

    def finish_block(self) -> None:
        self.reduce_lanes()

    def reduce_lanes(self) -> None:
        """For each cell in scratch, combine the lanes of its queries in the block into the output."""
        kernel, builder, args, tiles = self.kernel, self.builder, self.args, self.tiles
        first, last = kernel.clip_lanes()
        length = args.last_query - args.first_query
        integer = INT64 if kernel.float is DOUBLE else INT32  # as wide as the floats that `where` selects
        start = kernel.i0 + first - args.first_query
        row = Variable(builder, INT64, ((start + 1) * args.rows - 1) // length)
        lane = Variable(builder, INT64, first)
        head_rows = args.rows + args.num_ranges - 1
        (output,) = self.outputs
        with builder.infinite_loop() as break_if:
            break_if(lane.get() >= last)
            next_row = (row.get() + 1) * (args.last_query - args.first_query) // args.rows
            end = builder.minimum(args.first_query + next_row - kernel.i0, last)
            inside = []
            for v in self.vectors:
                lanes = builder.arange(kernel.lanes, integer) + v * kernel.lanes
                inside.append((lanes >= lane.get().to(integer)) & (lanes < end.to(integer)))
            output_row = kernel.head_index * head_rows + row.get() + kernel.range_index
            first_column = self.first_column.get()
            with builder.loop(first_column, first_column + self.num_columns) as c:
                vectors = [self.cell_address(c, v).load(tiles.vector, tiles.align) for v in self.vectors]
                hidden = builder.value(self.role.hidden, tiles.vector)
                vectors = [builder.where(inside[v], x, hidden) for v, x in enumerate(vectors)]
                address = output.at((output_row * args.columns + c) * 8)
                total = functools.reduce(self.combine, vectors).reduce(self.combine)
                address.store(self.combine(address.load(DOUBLE), total.to(DOUBLE)))
            lane.set(end)
            row.set(row.get() + 1)
