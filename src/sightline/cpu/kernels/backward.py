"""The backward kernel: the weights again from the saved normaliser, tile by tile, and five products on register tiles.

For a tile of keys j and a block of queries i (Dao et al., "FlashAttention", 2022, algorithm 4), with c the scale and
δᵢ = Σ dO ∘ O − d_lse:

    Sᵀ[j][i] = Σ_d K[j][d] · Qᵀ[d][i]         P  = 2^(Sᵀ − lse), 0 where hidden
    dPᵀ[j][i] = Σ_d V[j][d] · dOᵀ[d][i]        dS = P ∘ (dP − δ) · d score / d s · c
    dQᵀ[d][i] += Σ_j K[j][d] · dSᵀ[j][i]
    dV[j][d] += Σ_i Pᵀ[j][i] · dO[i][d]        dK[j][d] += Σ_i dSᵀ[j][i] · Q[i][d]

The first three have their vectors along queries, as the forward kernel has; the last two along d, on rows of dO and Q
laid out beside their transposes, and are added to rows that only one thread ever writes: an item of work is a part of
the keys of one key head, which takes all its queries in turn. How many parts there are follows from the problem alone,
and the parts' shares of dQ are added in order, so that results are the same for any number of threads.

NaN and ∞ are not looked after here: a gradient that is not finite raises `nonfinite_flag`, and the caller takes another road.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from ...formula.derivative import derivative
from ...formula.expression import Lookup, walk
from ..codegen.abi import BACKWARD_FIELDS
from ..codegen.builder import DOUBLE, INT64, Value, Variable, vector
from ..codegen.operand_tiles import interleave_rows, widen_row
from .block import KEY_BLOCK, Block
from .tables import TableGradientCode

__all__ = ["Backward"]


class Backward(Block):
    """Writes the kernel into a module.

    `spec.roles` says of each further formula whether statistics add it to dP ("weights") or to the gradient of the
    final score ("scores"). `spec.table_gradients` names the lookups of the score whose tables gain gradients: (place of
    the lookup in `walk`, slot of its table among those of the problem, whether one part of the keys alone writes each
    of its entries). The gains' own words follow the tables': address, and bytes from one part's sums to the next.
    """

    fields = BACKWARD_FIELDS

    def allocate(self) -> None:
        tiles, spec = self.tiles, self.spec
        self.q_t, self.s_t = tiles.matrix(tiles.packed_length(spec.d_k)), tiles.matrix(KEY_BLOCK)
        self.key, self.value = (
            self.allocate_operand(1, needs_rows=True, needs_columns=True),
            self.allocate_operand(2, needs_rows=True, needs_columns=False),
        )
        self.do_t = tiles.matrix(tiles.packed_length(spec.d_v))
        self.dp_t, self.dq_t = tiles.matrix(KEY_BLOCK), tiles.matrix(spec.d_k)
        self.q_rows, self.do_rows = self.allocate_block_rows(spec.d_k), self.allocate_block_rows(spec.d_v)
        if self.paired:  # dS once more with pairs along keys, and both with pairs along queries
            self.ds_pairs = tiles.matrix(tiles.packed_length(KEY_BLOCK))
            self.p_rows, self.ds_rows = (tiles.scratch(KEY_BLOCK * tiles.block * 2) for _ in range(2))
        self.lse_matrix, self.delta_matrix = tiles.matrix(1), tiles.matrix(1)
        self.lse, self.delta = tiles.variables(), tiles.variables()
        self.prepare_derivatives()

    # -- items ----------------------------------------------------------------------------------------------------
    def process_item(self, item: Value) -> None:
        """Item → (part of the keys, batches, key heads), and for each the queries of the group's heads in turn."""
        builder, args = self.builder, self.args
        groups_per_split = args.parallel_heads * args.parallel_batches
        self.split, group = item // groups_per_split, item % groups_per_split
        heads = args.H // args.group
        start = self.split * args.split_size
        last = (args.m + (KEY_BLOCK - 1)) // KEY_BLOCK
        self.first_tile, self.last_tile = start, builder.minimum(start + args.split_size, last)

        def loop_range(index: Value, groups_per_split: Value, whole: Value) -> tuple[Value, Value]:
            """One of them where they are taken apart, else all."""
            is_separate = groups_per_split == whole
            first = builder.where(is_separate, index, 0)
            return first, builder.where(is_separate, first + 1, whole)

        b0, b1 = loop_range(group // args.parallel_heads, args.parallel_batches, args.batches)
        g0, g1 = loop_range(group % args.parallel_heads, args.parallel_heads, heads)
        with builder.loop(b0, b1) as b, builder.loop(g0, g1) as g:
            self.locate_keys(b, g, self.key, self.value)
            self.key_row_stride = (b * heads + g) * args.m
            first = g * args.group
            with builder.loop(first, first + args.group) as h, builder.loop(0, args.query_blocks) as query_block:
                self.locate(b, h, query_block)
                with builder.if_then(self.overlaps_tiles(self.first_tile, self.last_tile)):
                    self.process_query_block()
            self.flag_nonfinite_key_gradients()

    def process_query_block(self) -> None:
        """One block of queries against the part's keys."""
        builder, args, tiles = self.builder, self.args, self.tiles
        self.o, self.do = args.head_address("output", self.b, self.h), args.head_address("d_output", self.b, self.h)
        self.transpose_queries()
        self.transpose_output_gradients()
        self.copy_rows(self.q, "query", self.spec.unit_stride[0], self.spec.d_k, self.q_rows)
        self.copy_rows(self.do, "d_output", True, self.spec.d_v, self.do_rows)
        self.evaluate_block()
        with builder.loop(0, self.spec.d_k) as d:
            for v in self.vectors:
                tiles.store(self.dq_t, d, v, builder.value(0.0, self.vector))
        with self.loop_tiles(self.first_tile, self.last_tile) as (tile, partial):
            self.key_tile(tile * KEY_BLOCK, partial)
        self.store_query_gradients()

    # -- the block's own rows -------------------------------------------------------------------------------------
    def pad_width(self, width: int) -> int:
        """The width rounded up to whole vectors."""
        return -(-width // self.lanes) * self.lanes

    def allocate_block_rows(self, width: int) -> Value:
        """Scratch for the block's rows; of pairs, two rows to one."""
        return self.tiles.scratch(
            self.tiles.packed_length(self.tiles.block) * self.pad_width(width) * self.tiles.itemsize
        )

    def transpose_output_gradients(self) -> None:
        """dOᵀ[d][lane], and per lane δ and the normaliser in the scores' base; ∞ for lanes past the end, so P = 0."""
        builder, args, tiles = self.builder, self.args, self.tiles
        width, log_unit = self.spec.d_v, math.log2(math.e) if self.spec.is_base_2 else 1.0
        for v in self.vectors:
            tiles.store(self.delta_matrix, 0, v, builder.value(0.0, self.vector))
            tiles.store(self.lse_matrix, 0, v, builder.value(math.inf, self.vector))  # weights of 0
        self.transpose(self.do, args.d_output_row_stride, args.d_output_column_stride, True, width, self.do_t)
        with builder.loop(0, self.num_valid) as lane:
            d_output_row = self.do.at((self.i0 + lane) * args.d_output_row_stride)
            output_row = self.o.at((self.i0 + lane) * args.output_row_stride)
            delta = Variable(builder, DOUBLE, -args.d_lse.at((self.row + lane) * 8).load(DOUBLE))
            sums = Variable(builder, vector(DOUBLE, self.lanes), 0.0)
            whole = width // self.lanes * self.lanes
            for total, first, last, lanes in ((sums, 0, whole, self.lanes), (delta, whole, width, 1)):
                with builder.loop(first, last, lanes) as d:
                    x, y = (
                        self.format.load(at.at(d * self.format.itemsize), lanes).to(DOUBLE)
                        for at in (d_output_row, output_row)
                    )
                    total.set(builder.fma(x, y, total.get()))
            delta.set(delta.get() + sums.get().sum())
            lse = args.lse.at((self.row + lane) * 8).load(DOUBLE)
            lse = builder.where(lse == -math.inf, 0.0, lse) * log_unit
            self.lane_address(self.delta_matrix, 0, lane).store(delta.get().to(self.float))
            self.lane_address(self.lse_matrix, 0, lane).store(lse.to(self.float))
        for v in self.vectors:
            self.lse[v].set(tiles.load(self.lse_matrix, 0, v))
            self.delta[v].set(tiles.load(self.delta_matrix, 0, v))

    def copy_rows(self, source: Value, name: str, is_contiguous: bool, width: int, target: Value) -> None:
        """The block's rows as vectors along d, zeros past the ends; of pairs, two neighbouring rows joined."""
        builder, args, tiles = self.builder, self.args, self.tiles
        row_stride, step = getattr(args, f"{name}_row_stride"), getattr(args, f"{name}_column_stride")
        row_bytes = self.pad_width(width) * tiles.itemsize
        zero = builder.value(0, tiles.operand_vector)
        with builder.loop(0, tiles.packed_length(tiles.block) * (row_bytes // tiles.align)) as at:
            target.at(at * tiles.align).store(zero, tiles.align)
        first = source.at(self.i0 * row_stride)
        with builder.loop(0, self.num_valid, tiles.pair_size) as lane:
            row, row_target = first.at(lane * row_stride), target.at((lane // tiles.pair_size) * row_bytes)
            if self.paired:
                interleave_rows(
                    tiles,
                    row,
                    row_target,
                    width,
                    row_stride,
                    step if not is_contiguous else None,
                    lane + 1 < self.num_valid,
                )
            else:
                widen_row(tiles, self.format, row, row_target, width, step if not is_contiguous else None)

    def store_query_gradients(self) -> None:
        """The part's share of dQ, row by row."""
        args, tiles = self.args, self.tiles
        width, size = self.spec.d_k, tiles.itemsize
        self.flag_nonfinite(self.dq_t, width * len(self.vectors))
        rows = args.batches * args.H * args.n
        target = args.d_query.at((self.split * rows + self.row) * (width * size))
        self.store_transposed(self.dq_t, width, target, self.format.accumulator_format)

    def flag_nonfinite(self, vectors: Value, count: Any) -> None:
        """Raise the flag where any of so many vectors holds NaN or ∞."""
        builder = self.builder
        nonfinite = Variable(builder, self.vector, 0.0)
        with builder.loop(0, count) as at:
            entry = vectors.at(at * self.tiles.align).load(self.vector)
            nonfinite.set(nonfinite.get() + (entry - entry))  # 0 of what is finite
        with builder.if_then((nonfinite.get() != 0.0).any()):
            self.args.nonfinite_flag.store(builder.value(1, INT64))

    def flag_nonfinite_key_gradients(self) -> None:
        """Look over the part's rows of dK and dV."""
        builder, args = self.builder, self.args
        first = self.first_tile * KEY_BLOCK
        count = builder.minimum(self.last_tile * KEY_BLOCK, args.m) - first
        with builder.if_then(count > 0):
            for target, width in ((args.d_key, self.spec.d_k), (args.d_value, self.spec.d_v)):
                vectors = self.pad_width(width) // self.lanes
                rows = target.at((self.key_row_stride + first) * (vectors * self.tiles.align))
                self.flag_nonfinite(rows, count * vectors)

    # -- a tile ---------------------------------------------------------------------------------------------------
    def key_tile(self, j0: Value, partial: Value) -> None:
        """One tile: its weights and their gradients, and its share of dQ, dK and dV."""
        builder, tiles, spec = self.builder, self.tiles, self.spec
        self.num_keys = builder.minimum(self.args.m - j0, KEY_BLOCK)
        self.key.stage(j0, self.num_keys)
        self.value.stage(j0, self.num_keys)

        def store_scores(key: Value, v: int, s: Value) -> None:
            tiles.store(self.s_t, key, v, s)

        self.product(self.num_keys, KEY_BLOCK, self.key.row, self.q_t, tiles.packed_length(spec.d_k), store_scores)
        self.product(
            self.num_keys, KEY_BLOCK, self.value.row, self.do_t, tiles.packed_length(spec.d_v),
            lambda key, v, dp: tiles.store(self.dp_t, key, v, dp),
        )  # fmt: skip
        with builder.if_else(partial) as (yes, no):
            with yes:
                if self.renderers[0] is not None:
                    self.differentiate(j0, masked=True)
            with no:
                self.differentiate(j0, masked=False)

        def add_query_gradients(d: Value, v: int, dq: Value) -> None:
            tiles.store(self.dq_t, d, v, tiles.load(self.dq_t, d, v) + dq)

        width, length = spec.d_k, (self.num_keys + (tiles.pair_size - 1)) // tiles.pair_size
        matrix = self.ds_pairs if self.paired else self.dp_t
        self.product(width, width, self.key.column, matrix, length, add_query_gradients)
        p, ds = (self.p_rows, self.ds_rows) if self.paired else (self.s_t, self.dp_t)
        self.add_to_rows(p, self.do_rows, spec.d_v, self.args.d_value, j0)
        self.add_to_rows(ds, self.q_rows, spec.d_k, self.args.d_key, j0)

    def differentiate(self, j0: Value, masked: bool) -> None:
        """P in place of Sᵀ and dS in place of dPᵀ, with the scale in it, and what tables gain."""
        builder, tiles, spec = self.builder, self.tiles, self.spec
        step = 4 if spec.has_dropout else tiles.pair_size
        self.transpose_tables(j0, 0 if masked else 1)
        with builder.loop(self.num_keys, (self.num_keys + (step - 1)) // step * step) as past:  # up to whole steps
            for v in self.vectors:
                tiles.store(self.s_t, past, v, builder.value(0.0, self.vector))
                tiles.store(self.dp_t, past, v, builder.value(0.0, self.vector))
        with builder.loop(0, self.num_keys, step) as key:
            keep_mask = self.dropout_keep_mask(j0 + key) if spec.has_dropout else []
            pairs_by_vector: list[list[tuple[Value, Value]]] = [[] for _ in self.vectors]
            for k in range(step):
                for tables in self.tile_tables[0 if masked else 1 :]:
                    tables.prefetch(key + k, j0 + KEY_BLOCK)
                j = builder.minimum(j0 + key + k, self.args.m - 1).to(self.integer)
                rows, inside = self.evaluate_key(j), (key + k < self.num_keys if step > 1 else None)
                for v in self.vectors:
                    s, dp = tiles.load(self.s_t, key + k, v), tiles.load(self.dp_t, key + k, v)
                    block_values = [self.values_before_pair(formula, rows, key + k, v) for formula in range(2)]
                    p = self.compute_weight(s, v, j, block_values, masked, inside)
                    dropped = p
                    if keep_mask:
                        factor = self.args.dropout_scale.to(self.float)
                        dropped, dp = (builder.where(keep_mask[k][v], x * factor, 0.0) for x in (p, dp))
                    statistic_gradients = self.evaluate_statistic_gradients(p, key + k, v, rows)
                    dp = dp + statistic_gradients["weights"] if "weights" in statistic_gradients else dp
                    pairs_by_vector[v].append(
                        (dropped, self.compute_score_gradient(p, dp, statistic_gradients.get("scores"), key + k, v))
                    )
            for v in self.vectors:
                self.store_weights_and_gradients(key, v, pairs_by_vector[v])
        for table_gradient in self.table_gradients:
            table_gradient.store(j0)

    def compute_weight(
        self, s: Value, v: int, j: Value, formula_values: list[dict[int, Value]], masked: bool, is_inside: Value | None
    ) -> Value:
        """P of one key and a vector of queries."""
        builder = self.builder
        mask, score = self.renderers[:2]
        symbols = self.symbols[v] | {"j": j, "s": s * self.factor}
        self.pair_symbols = symbols
        if score is not None:
            self.score_values = score.evaluate_all(symbols, formula_values[1])
            self.final_score = self.score_values[id(score.formula)].to(self.float).broadcast(self.lanes)
            logit = self.final_score - self.lse[v].get()
        else:
            self.final_score = symbols["s"] * (math.log(2) if self.spec.is_base_2 else 1.0)
            logit = builder.fma(s, self.factor, -self.lse[v].get())
        p = self.exponentiate(logit)
        if masked and mask is not None:
            p = builder.where(mask.evaluate_pair(symbols, formula_values[0]), p, builder.value(0.0, self.vector))
        return (
            p
            if is_inside is None
            else builder.where(is_inside.broadcast(self.lanes), p, builder.value(0.0, self.vector))
        )

    def evaluate_statistic_gradients(
        self, p: Value, key: Value, v: int, rows: list[dict[int, Value]]
    ) -> dict[str, Value]:
        """What statistics add to dP ("weights") and to the gradient of the final score ("scores")."""
        gradients: dict[str, Value] = {}
        for f, role in enumerate(self.spec.roles, start=2):
            renderer = self.renderers[f]
            assert renderer is not None
            gradient = renderer.evaluate_pair(
                self.pair_symbols | {"s": self.final_score}, self.values_before_pair(f, rows, key, v)
            ).to(self.float)
            gradients[role] = self.builder.where(p == 0.0, 0.0, gradient.broadcast(self.lanes))
        return gradients

    def compute_score_gradient(
        self, p: Value, dp: Value, statistic_gradient: Value | None, key: Value, v: int
    ) -> Value:
        """dS with the scale in it, of the pair whose weight was just made; its final score's gradient has `more`."""
        builder = self.builder
        scale, delta = self.args.scale.to(self.float), self.delta[v].get()
        if self.renderers[1] is None:
            ds = p * builder.fma(dp, scale, -(delta * scale))
            return ds if statistic_gradient is None else builder.fma(statistic_gradient, scale, ds)
        d_score = p * (dp - delta) if statistic_gradient is None else p * (dp - delta) + statistic_gradient
        d_score = builder.where(p == 0.0, 0.0, d_score)  # a slope may be ∞ where the mask hides
        for table_gradient in self.table_gradients:
            table_gradient.add(d_score, self.pair_symbols, self.score_values, key, v)
        derivative_of_score = (
            self.score_derivative.evaluate_pair(self.pair_symbols, self.score_values)
            .to(self.float)
            .broadcast(self.lanes)
        )
        return builder.where(p == 0.0, 0.0, d_score * derivative_of_score * scale)

    def store_weights_and_gradients(self, key: Value, v: int, pairs: list[tuple[Value, Value]]) -> None:
        """P and dS to where the products read them."""
        tiles = self.tiles
        if not self.paired:
            for k, (p, ds) in enumerate(pairs):
                tiles.store(self.s_t, key + k, v, p)
                tiles.store(self.dp_t, key + k, v, ds)
            return
        row_bytes = tiles.block * 2
        for k in range(0, len(pairs), 2):
            joined = self.pack_pairs(pairs[k][1], pairs[k + 1][1])
            tiles.at(self.ds_pairs, (key + k) // 2, v).store(joined, tiles.align)
            for u in (k, k + 1):
                for target, value in zip((self.p_rows, self.ds_rows), pairs[u], strict=True):
                    self.format.store(target.at((key + u) * row_bytes + v * self.lanes * 2), value)

    def add_to_rows(self, numbers: Value, rows: Value, width: int, target: Value, j0: Value) -> None:
        """target[j][d] += Σ_i numbers[j][i] · rows[i][d], with vectors along d."""
        builder, tiles = self.builder, self.tiles
        vectors = self.pad_width(width) // self.lanes
        row_bytes = vectors * tiles.align
        number_row_bytes = tiles.row_bytes // tiles.pair_size  # bytes of one key's numbers
        groups = -(-vectors // tiles.vectors)
        edges = [vectors * k // groups for k in range(groups + 1)]
        for first, last in itertools.pairwise(edges):

            def write(key: Value, count: int, first: int = first, last: int = last) -> None:
                keys = [builder.minimum(key + r, self.num_keys - 1) for r in range(count)]
                addresses = [target.at((self.key_row_stride + j0 + k) * row_bytes + first * tiles.align) for k in keys]
                sums = [[Variable(builder, self.vector, 0.0) for _ in range(first, last)] for _ in range(count)]
                bases = [numbers.at(k * number_row_bytes) for k in keys]
                for address in addresses:
                    for v in range(last - first):
                        builder.prefetch(address.at(v * tiles.align))
                tiles.accumulate(
                    sums,
                    bases,
                    tiles.itemsize,
                    rows.at(first * tiles.align),
                    tiles.packed_length(tiles.block),
                    row_bytes,
                )
                for r in range(count):
                    with builder.if_then(key + r < self.num_keys):
                        for v, total in enumerate(sums[r]):
                            at = addresses[r].at(v * tiles.align)
                            at.store(at.load(self.vector) + total.get())

            tiles.for_each_row_group(self.num_keys, KEY_BLOCK, write)

    # -- tables ---------------------------------------------------------------------------------------------------
    def prepare_derivatives(self) -> None:
        """d score / d s, and d score / d entry of the lookups whose tables gain gradients.

        A derivative reads the tables where the score does, so its lookups are known by the time it is evaluated.
        """
        score = self.formulas[1]
        self.table_gradients: list[TableGradientCode] = []
        if score is None:
            return
        nodes, tables = walk(score), self.args.tables
        self.score_derivative = self.make_renderer(derivative(score), self.float, ())
        for gradient_sums, (node_index, slot, is_per_key) in zip(
            tables[len(self.spec.tables) :], self.spec.table_gradients, strict=True
        ):
            node = nodes[node_index]
            assert isinstance(node, Lookup)
            entry_derivative = self.make_renderer(derivative(score, node), self.float, ())
            is_tile_lookup = is_per_key and node_index in self.spec.tile_lookups[1]
            self.table_gradients.append(
                TableGradientCode(
                    self, node, tables[slot].lengths, entry_derivative, gradient_sums, is_per_key, is_tile_lookup
                )
            )
