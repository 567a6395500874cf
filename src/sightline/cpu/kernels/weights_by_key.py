"""Kernels of the weights pass for statistics per key and per cell: weights are combined over queries."""

from __future__ import annotations

import functools
from typing import ClassVar

from ..codegen.builder import Variable
from ..codegen.values import DOUBLE, INT32, INT64, Value
from .kernel_spec import KEY_BLOCK
from .weights_pass import WeightsPass

__all__ = ["MAX_COLUMNS_PER_ITEM", "MAX_SPLIT_SIZE", "Pooled", "Received"]

MAX_SPLIT_SIZE = 8  # the most tiles of keys in a split: a vector for each key stays in the first two caches
MAX_COLUMNS_PER_ITEM = 128  # the most columns of cells in an item: each takes scratch for every query of the block


class Received(WeightsPass):
    """Compute the weight each key receives: Σ_i P[i][j], or the maximum over i.

    A work item is (split of the keys, range of the queries, b, h). Each of its keys has a vector of sums, one per lane,
    which is reduced once at the end.
    """

    own_fields: ClassVar = {  # `output` has shape (num_ranges, B, H, m)
        "batches": INT64,
        "split_size": INT64,  # tiles of keys in a split
        "num_ranges": INT64,
        "range_size": INT64,  # blocks of queries in a range
    }

    def allocate_statistic(self) -> None:
        self.sums = self.allocate_accumulators(MAX_SPLIT_SIZE * KEY_BLOCK)

    def process_item(self, item: Value) -> None:
        builder, args, tiles = self.builder, self.args, self.tiles
        heads = args.batches * args.H
        head_index, rest = item % heads, item // heads
        split, range_index = rest // args.num_ranges, rest % args.num_ranges
        self.first_key = split * args.split_size * KEY_BLOCK
        keys = builder.minimum(args.split_size * KEY_BLOCK, args.m - self.first_key)
        self.clear_accumulators(self.sums, keys)
        first = args.first_query // tiles.block + range_index * args.range_size
        last = builder.minimum(first + args.range_size, args.query_blocks)
        span = split * args.split_size, (split + 1) * args.split_size
        with builder.loop(first, last) as query_block:
            self.locate(head_index // args.H, head_index % args.H, query_block)
            with builder.if_then(self.overlaps_tiles(*span)):
                self.attend((args.first_query, args.last_query), span)
        target = args.output.at(((range_index * heads + head_index) * args.m + self.first_key) * tiles.itemsize)
        with builder.loop(0, keys) as key:
            total = self.accumulator_address(self.sums, key).load(self.vector, tiles.align).reduce(self.combine)
            target.at(key * tiles.itemsize).store(total)

    def process_tile(self, j0: Value, masked: bool) -> None:
        with self.builder.loop(0, self.num_keys) as key:
            total = functools.reduce(self.combine, self.compute_weights(key, j0, masked))
            self.accumulate(self.accumulator_address(self.sums, j0 - self.first_key + key), total)


class Pooled(WeightsPass):
    """Compute the sums or maxima of P over the cells of a grid on a rectangle of queries and keys.

    Of R rows and N queries, row r contains the queries [r N / R, (r + 1) N / R), rounded down. Columns divide the keys
    likewise. A work item is (some rows of cells, some columns of cells, b, h). If two items share a block of queries,
    both compute its weights.
    """

    own_fields: ClassVar = {  # the caller fills `output`, (B, H, rows, columns) float64, with 0
        "batches": INT64,
        "rows": INT64,
        "rows_per_item": INT64,
        "columns": INT64,
        "columns_per_item": INT64,
        "first_key": INT64,
        "last_key": INT64,
    }

    def allocate_statistic(self) -> None:
        self.cells = self.allocate_accumulators(MAX_COLUMNS_PER_ITEM * len(self.vectors))

    def cell_address(self, c: Value, v: int) -> Value:
        """Return the address of vector v of the accumulators of column c."""
        return self.accumulator_address(self.cells, (c - self.first_column) * len(self.vectors) + v)

    def row_edge(self, r: Value) -> Value:
        """Return the first query of row r of the cells."""
        args = self.args
        return args.first_query + r * (args.last_query - args.first_query) // args.rows

    def column_edge(self, c: Value) -> Value:
        """Return the first key of column c of the cells."""
        args = self.args
        return args.first_key + c * (args.last_key - args.first_key) // args.columns

    def process_item(self, item: Value) -> None:
        builder, args, tiles = self.builder, self.args, self.tiles
        heads = args.batches * args.H
        self.head, rest = item % heads, item // heads
        item_columns = (args.columns + args.columns_per_item - 1) // args.columns_per_item
        item_rows = (args.rows + args.rows_per_item - 1) // args.rows_per_item
        # the last rows of cells, which see most keys under a causal mask, come first
        r = (item_rows - 1 - rest // item_columns) * args.rows_per_item
        self.first_column = rest % item_columns * args.columns_per_item
        self.column_stop = builder.minimum(self.first_column + args.columns_per_item, args.columns)
        self.key_span = self.column_edge(self.first_column), self.column_edge(self.column_stop)
        self.queries = self.row_edge(r), self.row_edge(builder.minimum(r + args.rows_per_item, args.rows))
        span = self.key_span[0] // KEY_BLOCK, (self.key_span[1] + (KEY_BLOCK - 1)) // KEY_BLOCK
        last = (self.queries[1] + (tiles.block - 1)) // tiles.block
        with builder.loop(self.queries[0] // tiles.block, last) as query_block:
            self.locate(self.head // args.H, self.head % args.H, query_block)
            with builder.if_then(self.overlaps_tiles(*span)):
                self.clear_accumulators(self.cells, (self.column_stop - self.first_column) * len(self.vectors))
                self.attend(self.queries, span)
                self.reduce_lanes()

    def process_tile(self, j0: Value, masked: bool) -> None:
        builder, args, tiles = self.builder, self.args, self.tiles
        at = Variable(builder, INT64, builder.maximum(j0, self.key_span[0]))
        stop = builder.minimum(j0 + self.num_keys, self.key_span[1])
        length = args.last_key - args.first_key
        cell = Variable(builder, INT64, ((at.get() - args.first_key + 1) * args.columns - 1) // length)
        with builder.infinite_loop() as break_if:
            break_if(at.get() >= stop)
            end = builder.minimum(self.column_edge(cell.get() + 1), stop)
            totals = tiles.variables(0.0)
            with builder.loop(at.get() - j0, end - j0) as key:
                for total, p in zip(totals, self.compute_weights(key, j0, masked), strict=True):
                    total.set(self.combine(p, total.get()))
            for v, total in enumerate(totals):
                self.accumulate(self.cell_address(cell.get(), v), total.get())
            at.set(end)
            cell.set(cell.get() + 1)

    def reduce_lanes(self) -> None:
        """For each cell, combine the lanes of its queries in the block into the output."""
        builder, args, tiles = self.builder, self.args, self.tiles
        first, last = self.clip_lanes(*self.queries)
        length = args.last_query - args.first_query
        integer = INT64 if self.float is DOUBLE else INT32  # as wide as the floats that `where` selects
        start = self.i0 + first - args.first_query
        row = Variable(builder, INT64, ((start + 1) * args.rows - 1) // length)
        lane = Variable(builder, INT64, first)
        with builder.infinite_loop() as break_if:
            break_if(lane.get() >= last)
            end = builder.minimum(self.row_edge(row.get() + 1) - self.i0, last)
            inside = []
            for v in self.vectors:
                lanes = builder.arange(self.lanes, integer) + v * self.lanes
                inside.append((lanes >= lane.get().to(integer)) & (lanes < end.to(integer)))
            row_start = (self.head * args.rows + row.get()) * args.columns
            with builder.loop(self.first_column, self.column_stop) as c:
                vectors = [self.cell_address(c, v).load(self.vector, tiles.align) for v in self.vectors]
                vectors = [builder.where(inside[v], x, builder.value(0.0, self.vector)) for v, x in enumerate(vectors)]
                address = args.output.at((row_start + c) * 8)
                total = functools.reduce(self.combine, vectors).reduce(self.combine)
                address.store(self.combine(address.load(DOUBLE), total.to(DOUBLE)))
            lane.set(end)
            row.set(row.get() + 1)
