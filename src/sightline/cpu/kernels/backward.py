"""The backward kernel: it recomputes the weights P of each tile from the saved lse, and computes five products.

For a tile of keys j and a block of queries i (Dao et al., "FlashAttention", 2022, algorithm 4), with the scale c and
δᵢ = Σ dO ∘ O − d_lse:

    Sᵀ[j][i] = Σ_d K[j][d] · Qᵀ[d][i]         P  = 2^(Sᵀ − lse), 0 where hidden
    dPᵀ[j][i] = Σ_d V[j][d] · dOᵀ[d][i]        dS = P ∘ (dP − δ) · d score / d s · c
    dQᵀ[d][i] += Σ_j K[j][d] · dSᵀ[j][i]
    dV[j][d] += Σ_i Pᵀ[j][i] · dO[i][d]        dK[j][d] += Σ_i dSᵀ[j][i] · Q[i][d]

With a score formula or sinks, e replaces the base 2.

In the first three products vectors run along queries, as in the forward kernel. In the last two products vectors run
along d, on copies of the rows of dO and Q. A work item is one split (a range) of the keys, of one or all key heads. It
loops over all queries of these key heads, so only one thread writes a row of dV or dK. Each split has its own term of
dQ, and the terms are added in the order of the splits. The number of splits follows from the problem alone
(`launch.backward.Split`). So results are the same for any number of threads.

The kernel does not treat NaN and ∞. A gradient that is not finite sets `nonfinite_flag`, and the caller discards the
results. `GradientFunctions` writes the functions that compute P and dS.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from ..codegen.abi import BACKWARD_FIELDS
from ..codegen.builder import Variable
from ..codegen.operand_tiles import interleave_rows, widen_row
from ..codegen.values import DOUBLE, INT64, VOID, Value, vector
from .kernel_spec import KEY_BLOCK, MAX_BYTES_PER_ITEM, round_up
from .recomputed_weights import RecomputedWeights
from .shared_tiles import SharedTiles, min_blocks_for_copy
from .tile_functions import GradientFunctions, store_numbers

MAX_QUERIES = 128  # the most queries whose blocks share tiles; 64 KB of their P and dS are kept


class Backward(SharedTiles, RecomputedWeights):
    """Write the backward kernel into a module; see `GradientFunctions` for the fields of `spec` about formulas."""

    fields = BACKWARD_FIELDS
    functions = GradientFunctions
    own_formulas = ()
    do_t: Value  # dOᵀ[d][lane] of a block
    dq_t: Value  # dQᵀ[d][lane]

    def allocate(self) -> None:
        tiles, spec = self.tiles, self.spec
        self.s_t, self.dp_t = tiles.matrix(KEY_BLOCK), tiles.matrix(KEY_BLOCK)
        query_bytes = (3 * spec.d_k + 2 * spec.d_v) * tiles.itemsize  # that are kept of each query
        self.max_blocks = max(min(MAX_QUERIES, MAX_BYTES_PER_ITEM // query_bytes) // tiles.block, 1)
        copies = self.max_blocks >= min_blocks_for_copy(tiles.block)
        self.key = self.allocate_operand(1, needs_rows=True, needs_columns=True, copies_far_rows=copies)
        self.value = self.allocate_operand(2, needs_rows=True, needs_columns=False, copies_far_rows=copies)
        self.q_rows, self.do_rows = self.allocate_block_rows(spec.d_k), self.allocate_block_rows(spec.d_v)
        # P and dS of all blocks, by key: numbers, or bfloat16 whose neighbours are pairs of queries
        self.number_bytes = tiles.itemsize // tiles.pair_size
        self.number_row_bytes = self.max_blocks * tiles.block * self.number_bytes
        self.p_rows, self.ds_rows = (tiles.scratch(KEY_BLOCK * self.number_row_bytes) for _ in range(2))
        self.ds_pairs = tiles.matrix(tiles.packed_length(KEY_BLOCK)) if self.paired else None  # pairs of keys
        self.lse, self.delta = tiles.variables(), tiles.variables()
        self.lse_and_delta = tiles.matrix(2)  # the two rows that the functions of the formulas read
        rows = {"q_t": tiles.packed_length(spec.d_k), "do_t": tiles.packed_length(spec.d_v), "dq_t": spec.d_k}
        self.allocate_blocks(self.max_blocks, rows, [*self.lse, *self.delta])

    # -- items ----------------------------------------------------------------------------------------------------
    def process_item(self, item: Value) -> None:
        """Compute the gradients of an item: one split of the keys, in one or all batches and key heads."""
        builder, args = self.builder, self.args
        items_per_split = args.parallel_heads * args.parallel_batches
        self.split, index = item // items_per_split, item % items_per_split
        heads = args.H // args.group
        start = self.split * args.split_size
        last = (args.m + (KEY_BLOCK - 1)) // KEY_BLOCK
        self.first_tile, self.last_tile = start, builder.minimum(start + args.split_size, last)

        def loop_range(index: Value, parallel: Value, count: Value) -> tuple[Value, Value]:
            """Return (first, end) of an item's loop: only `index` if each index has its own items, else all `count`."""
            is_parallel = parallel == count
            first = builder.where(is_parallel, index, 0)
            return first, builder.where(is_parallel, first + 1, count)

        b0, b1 = loop_range(index // args.parallel_heads, args.parallel_batches, args.batches)
        g0, g1 = loop_range(index % args.parallel_heads, args.parallel_heads, heads)
        with builder.loop(b0, b1) as b, builder.loop(g0, g1) as g:
            self.b, self.g = b, g
            self.locate_keys(b, g, self.key, self.value)
            self.first_key_row = (b * heads + g) * args.m
            self.clear_key_gradients()
            blocks = args.group * args.query_blocks
            with builder.loop(0, blocks, self.max_blocks) as first:
                self.select_blocks(first, builder.minimum(blocks - first, self.max_blocks))
                self.process_query_blocks()
            for rows, count in self.key_gradient_vectors():
                self.flag_nonfinite(rows, count)

    def process_query_blocks(self) -> None:
        """Process the selected blocks of queries against the keys of the split, and store the split's part of dQ."""
        builder, width = self.builder, self.spec.d_k
        with self.loop_blocks(is_new=True):
            pass
        with builder.if_else(self.find_tile(self.first_tile) < self.last_tile) as (yes, no):
            with yes:
                with self.loop_blocks(stores=True):
                    self.prepare_block()
                with self.loop_shared_tiles(self.first_tile, self.last_tile, (self.key, self.value)) as j0:
                    self.process_tile(j0)
                with self.loop_blocks():
                    self.flag_nonfinite(self.dq_t, width * len(self.vectors))
                    self.store_transposed(
                        self.dq_t, width, self.locate_query_gradients(), self.format.accumulator_format
                    )
            with no, self.loop_blocks(), builder.loop(0, self.num_valid * width) as at:
                target = self.locate_query_gradients()
                target.at(at * self.tiles.itemsize).store(builder.value(0.0, self.float))

    def prepare_block(self) -> None:
        """Copy a block's rows of Q and dO, as rows and transposed, and set the block's dQ to 0.

        The copied rows are 0 if the block has no tile in the split. Otherwise NaN would reach dK and dV as 0 · NaN.
        """
        args = self.args
        self.o, self.do = args.head_address("output", self.b, self.h), args.head_address("d_output", self.b, self.h)
        self.num_copied = self.builder.where(self.next_tile(self.first_tile) < self.last_tile, self.num_valid, 0)
        self.transpose_queries()
        self.transpose_output_gradients()
        self.copy_rows(self.q, "query", self.spec.unit_stride[0], self.spec.d_k, self.q_rows)
        self.copy_rows(self.do, "d_output", True, self.spec.d_v, self.do_rows)
        self.tiles.fill(self.dq_t, 0, self.spec.d_k, 0.0)

    # -- rows of the block ----------------------------------------------------------------------------------------
    def allocate_block_rows(self, width: int) -> Value:
        """Allocate scratch with a row per query (with bfloat16 pairs, per two queries), padded to whole vectors."""
        return self.tiles.scratch(self.max_blocks * self.block_rows_bytes(width))

    def block_rows_bytes(self, width: int) -> int:
        """Return the bytes of one block in the scratch of `allocate_block_rows`."""
        return self.tiles.packed_length(self.tiles.block) * round_up(width, self.lanes) * self.tiles.itemsize

    def transpose_output_gradients(self) -> None:
        """Compute dOᵀ[d][lane], and δ and lse of each lane. Past the last query lse is ∞, so that P is 0."""
        builder, args, width = self.builder, self.args, self.spec.d_v
        self.transpose(self.do, args.d_output_row_stride, args.d_output_column_stride, True, width, self.do_t)

        def compute(lane: Value) -> tuple[Value, Value]:
            d_output_row = self.do.at((self.i0 + lane) * args.d_output_row_stride)
            output_row = self.o.at((self.i0 + lane) * args.output_row_stride)
            delta = Variable(builder, DOUBLE, 0.0)
            with builder.if_then(args.d_lse != builder.null()):
                delta.set(-args.d_lse.at((self.row + lane) * 8).load(DOUBLE))
            sums = Variable(builder, vector(DOUBLE, self.lanes), 0.0)
            whole = width // self.lanes * self.lanes
            for total, first, last, lanes in ((sums, 0, whole, self.lanes), (delta, whole, width, 1)):
                with builder.loop(first, last, lanes) as d:
                    rows = (row.at(d * self.format.itemsize) for row in (d_output_row, output_row))
                    x, y = (self.format.load(row, lanes).to(DOUBLE) for row in rows)
                    total.set(builder.fma(x, y, total.get()))
            return delta.get() + sums.get().sum(), self.load_lse(lane)

        self.set_per_query([(self.delta, 0.0), (self.lse, math.inf)], compute, 0, self.num_valid)

    def copy_rows(self, source: Value, name: str, is_contiguous: bool, width: int, target: Value) -> None:
        """Copy the queries' rows, padded with 0 to whole vectors. With bfloat16 pairs, join two queries' rows."""
        builder, args, tiles = self.builder, self.args, self.tiles
        row_stride = getattr(args, f"{name}_row_stride")
        step = None if is_contiguous else getattr(args, f"{name}_column_stride")
        row_bytes = round_up(width, self.lanes) * tiles.itemsize
        zero = builder.value(0, tiles.operand_vector)
        target = target.at(self.block_number * self.block_rows_bytes(width))
        with builder.loop(0, tiles.packed_length(tiles.block) * (row_bytes // tiles.align)) as at:
            target.at(at * tiles.align).store(zero, tiles.align)
        first = source.at(self.i0 * row_stride)
        with builder.loop(0, self.num_copied, tiles.pair_size) as lane:
            row, row_target = first.at(lane * row_stride), target.at((lane // tiles.pair_size) * row_bytes)
            if self.paired:
                interleave_rows(tiles, row, row_target, width, row_stride, step, lane + 1 < self.num_valid)
            else:
                widen_row(tiles, self.format, row, row_target, width, step)

    def locate_query_gradients(self) -> Value:
        """Return the address of the block's first row in the split's term of dQ."""
        args = self.args
        rows = args.batches * args.H * args.n
        return args.d_query.at((self.split * rows + self.row) * (self.spec.d_k * self.tiles.itemsize))

    def clear_key_gradients(self) -> None:
        builder = self.builder
        for rows, count in self.key_gradient_vectors():
            with builder.loop(0, count) as at:
                rows.at(at * self.tiles.align).store(builder.value(0.0, self.vector))

    def flag_nonfinite(self, vectors: Value, count: Any) -> None:
        """Set `nonfinite_flag` if any of the `count` vectors contains NaN or ∞."""
        builder = self.builder
        nonfinite = Variable(builder, self.vector, 0.0)
        with builder.loop(0, count) as at:
            entry = vectors.at(at * self.tiles.align).load(self.vector)
            nonfinite.set(nonfinite.get() + (entry - entry))  # the difference is 0 if the entry is finite, else NaN
        with builder.if_then((nonfinite.get() != 0.0).any()):
            self.args.nonfinite_flag.store(builder.value(1, INT64))

    def key_gradient_vectors(self) -> Iterator[tuple[Value, Value]]:
        """Yield two pairs, first for dK and then for dV: the address of the split's first row, and a number of vectors.

        A split is a range of keys. The number counts the vectors of all its rows.
        """
        args = self.args
        first = self.first_tile * KEY_BLOCK
        count = self.builder.minimum(self.last_tile * KEY_BLOCK, args.m) - first
        for target, width in ((args.d_key, self.spec.d_k), (args.d_value, self.spec.d_v)):
            vectors = round_up(width, self.lanes) // self.lanes
            yield target.at((self.first_key_row + first) * (vectors * self.tiles.align)), count * vectors

    # -- tiles ----------------------------------------------------------------------------------------------------
    def process_tile(self, j0: Value) -> None:
        """Process one tile: add the terms of all blocks to dQ, then to dK and dV."""
        builder, spec = self.builder, self.spec
        with self.loop_blocks(loads=True), builder.if_else(self.is_at(j0)) as (yes, no):
            with yes:
                for operand in (self.key, self.value):
                    operand.prefetch_next(self.block_number, self.num_blocks)
                self.process_block(j0)
            with no, builder.loop(0, self.num_keys) as key:
                for rows in self.numbers_of_block():
                    for v in self.vectors:
                        row = rows.at(key * self.number_row_bytes)
                        store_numbers(self, row, v, builder.value(0.0, self.vector))
        self.add_to_rows(self.p_rows, self.do_rows, spec.d_v, self.args.d_value, j0)
        self.add_to_rows(self.ds_rows, self.q_rows, spec.d_k, self.args.d_key, j0)

    def process_block(self, j0: Value) -> None:
        """Compute P and dS of a block and a tile, and add the tile's terms to dQ."""
        tiles = self.tiles
        self.key.multiply_rows(self.q_t, functools.partial(tiles.store, self.s_t))
        self.value.multiply_rows(self.do_t, functools.partial(tiles.store, self.dp_t))
        self.write_by_mask(self.is_partial(), functools.partial(self.differentiate, j0))
        if self.ds_pairs is not None:
            matrix, stride = self.ds_pairs, tiles.row_bytes
        else:
            matrix, stride = self.ds_rows.at(self.block_number * tiles.row_bytes), self.number_row_bytes
        self.key.multiply_columns(matrix, self.add_to(self.dq_t), stride)

    def differentiate(self, j0: Value, masked: bool) -> None:
        """Call the function of `GradientFunctions` that computes P and dS from Sᵀ and dPᵀ."""
        builder, tiles = self.builder, self.tiles
        for v in self.vectors:
            tiles.store(self.lse_and_delta, 0, v, self.lse[v].get())
            tiles.store(self.lse_and_delta, 1, v, self.delta[v].get())
        targets = *self.numbers_of_block(), self.ds_pairs or builder.null(), builder.value(self.number_row_bytes, INT64)
        position = self.split, self.b, self.h, self.i0, j0, self.num_keys
        inputs = builder.arguments[0], self.s_t, self.dp_t, self.lse_and_delta, *targets, *position
        builder.call(GradientFunctions.names[masked], VOID, *inputs)

    def numbers_of_block(self) -> list[Value]:
        """Return the addresses of the block's columns in `p_rows` and `ds_rows`."""
        column = self.block_number * (self.tiles.block * self.number_bytes)
        return [rows.at(column) for rows in (self.p_rows, self.ds_rows)]

    def add_to_rows(self, numbers: Value, rows: Value, width: int, target: Value, j0: Value) -> None:
        """Compute target[j][d] += Σ_i numbers[j][i] · rows[i][d], with vectors along d."""
        builder, tiles = self.builder, self.tiles
        vectors = round_up(width, self.lanes) // self.lanes
        row_bytes, groups = vectors * tiles.align, -(-vectors // tiles.vectors)
        one_block = (builder.minimum(self.args.n, tiles.block) + (tiles.pair_size - 1)) // tiles.pair_size
        # the rows past the last query are 0: a block that is alone leaves them out
        length = builder.where(self.num_blocks == 1, one_block, self.num_blocks * tiles.packed_length(tiles.block))

        def write(group: Value, size: int, key: Value, count: int) -> None:
            keys = [builder.minimum(key + r, self.num_keys - 1) for r in range(count)]
            addresses = [target.at((self.first_key_row + j0 + k) * row_bytes).at(group) for k in keys]
            sums = [[Variable(builder, self.vector, 0.0) for _ in range(size)] for _ in range(count)]
            bases = [numbers.at(k * self.number_row_bytes).freeze() for k in keys]
            for address in addresses:
                for v in range(size):
                    builder.prefetch(address.at(v * tiles.align))
            tiles.accumulate(sums, bases, tiles.itemsize, rows.at(group), length, row_bytes)
            for r in range(count):
                with builder.if_then(key + r < self.num_keys):
                    for v, total in enumerate(sums[r]):
                        at = addresses[r].at(v * tiles.align)
                        at.store(at.load(self.vector) + total.get())

        size, num_larger = divmod(vectors, groups)  # so many groups have one vector more
        first_larger = (groups - num_larger) * size
        for first, last, step in ((0, first_larger, size), (first_larger, vectors, size + 1)):
            if first < last:
                with builder.loop(first, last, step) as v:
                    write_group = functools.partial(write, v * tiles.align, step)
                    tiles.for_each_row_group(self.num_keys, KEY_BLOCK, write_group)
