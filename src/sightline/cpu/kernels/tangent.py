"""The tangent kernel: the derivative of output and lse in the direction of given tangents, from the saved lse.

For a block of queries i and a tile of keys j, with the scale c, the tangents Q̇, K̇, V̇ and the saved output O:

    Sᵀ[j][i] = Σ_d K[j][d] · Qᵀ[d][i]            P  = 2^(Sᵀ − lse), 0 where hidden
    ṡᵀ[j][i] = c · Σ_d (K[j][d] · Q̇ᵀ[d][i] + K̇[j][d] · Qᵀ[d][i])
    D  = P ∘ (d score / d s · ṡ + the score's derivative in the direction of its tables' tangents)
    μᵢ = Σ_j D[j][i] + the sinks' part            the tangent of lse
    Tᵀ[d][i] += Σ_j (V[j][d] · D[j][i] + V̇[j][d] · P[j][i])        at the end Ȯ = T − μ ∘ O

With a score formula or sinks, e replaces the base 2. Dropout multiplies D and P in T, but not D in μ. Products with a
tangent that is 0 are left out of the code. A work item is one block of queries of one head. The kernel does not treat
NaN and ∞: a result that is not finite sets `nonfinite_flag`, and the caller discards the results.
"""

from __future__ import annotations

import functools
import math

from ...formula.derivative import derivative
from ..codegen.abi import TANGENT_FIELDS
from ..codegen.builder import Variable
from ..codegen.operand_tiles import OperandTile
from ..codegen.values import DOUBLE, INT64, Value, vector
from .block import ScoredPairs
from .kernel_spec import KEY_BLOCK
from .recomputed_weights import RecomputedWeights

SCORE = "score"  # the role of the formula of b, h, i, j and s, the scaled score, that is added to the score's tangent


class Tangent(RecomputedWeights):
    """Write the tangent kernel into a module.

    `spec.roles` names the tangents that are not 0: "query", "key", "value", and `SCORE` for the extra formula.
    """

    fields = TANGENT_FIELDS

    def allocate(self) -> None:
        tiles, spec = self.tiles, self.spec
        self.q_t, self.s_t = tiles.matrix(tiles.packed_length(spec.d_k)), tiles.matrix(KEY_BLOCK)
        self.d_t = tiles.matrix(KEY_BLOCK)  # ṡᵀ, and then D
        self.dq_t = tiles.matrix(tiles.packed_length(spec.d_k)) if "query" in spec.roles else None
        self.key = self.allocate_operand(1, needs_rows=True, needs_columns=False)
        self.value = self.allocate_operand(2, needs_rows=False, needs_columns=True)
        self.key_tangent = self.allocate_tangent("key", spec.d_k, needs_rows=True)
        self.value_tangent = self.allocate_tangent("value", spec.d_v, needs_rows=False)
        self.t_t = tiles.matrix(spec.d_v)
        if self.paired:  # pairs of keys
            self.p_pairs, self.d_pairs = (tiles.matrix(tiles.packed_length(KEY_BLOCK)) for _ in range(2))
        self.sum_matrix = tiles.matrix(1)
        self.lse, self.tile_sum = tiles.variables(), tiles.variables()
        self.sums = [Variable(self.builder, vector(DOUBLE, self.lanes), 0.0) for _ in self.vectors]
        score = self.formulas[1]
        self.slope = None if score is None else self.make_renderer(derivative(score), self.float, ())

    def allocate_tangent(self, name: str, width: int, needs_rows: bool) -> OperandTile | None:
        """Return the tile of rows of the tangent of K or V; None if the tangent is 0."""
        if name not in self.spec.roles:
            return None
        return OperandTile(self.tiles, self.format, width, True, KEY_BLOCK, needs_rows, not needs_rows)

    # -- a block of queries ---------------------------------------------------------------------------------------
    def process_item(self, item: Value) -> None:
        builder, args, tiles = self.builder, self.args, self.tiles
        head_index = item // args.query_blocks
        b, h = head_index // args.H, head_index % args.H
        self.locate(b, h, args.query_blocks - 1 - item % args.query_blocks)  # causal: those with most keys come first
        self.locate_operands(b, h, h // args.group)
        self.transpose_operands()
        self.set_per_query([(self.lse, math.inf)], lambda lane: [self.load_lse(lane)], 0, self.num_valid)
        self.evaluate_block()
        for v in self.vectors:
            self.sums[v].set(builder.value(0.0, vector(DOUBLE, self.lanes)))
        tiles.fill(self.t_t, 0, self.spec.d_v, 0.0)
        with self.loop_tiles() as (tile, partial):
            self.process_tile(tile * KEY_BLOCK, partial)
        self.store()

    def locate_operands(self, b: Value, h: Value, g: Value) -> None:
        """Set the addresses of the head's rows of K, V and their tangents."""
        args = self.args
        self.locate_keys(b, g, self.key, self.value)
        for name, tile in (("key_tangent", self.key_tangent), ("value_tangent", self.value_tangent)):
            if tile is not None:
                strides = getattr(args, f"{name}_row_stride"), getattr(args, f"{name}_column_stride")
                tile.locate(args.head_address(name, b, g), *strides)

    def transpose_operands(self) -> None:
        """Compute Qᵀ and Q̇ᵀ, both times the sign of the scale."""
        args = self.args
        self.transpose_queries()
        if self.dq_t is not None:
            source = args.head_address("query_tangent", self.b, self.h)
            strides = args.query_tangent_row_stride, args.query_tangent_column_stride
            self.transpose(source, *strides, True, self.spec.d_k, self.dq_t, self.multiply_by_sign())

    def store(self) -> None:
        """Store μ, and Ȯ = T − μ ∘ O."""
        builder, args, tiles, width = self.builder, self.args, self.tiles, self.spec.d_v
        for v in self.vectors:
            tiles.store(self.sum_matrix, 0, v, self.sums[v].get().to(self.float))
        with builder.loop(0, self.num_valid) as lane:
            total = self.lane_address(self.sum_matrix, 0, lane).load(self.float).to(DOUBLE)
            given = Variable(builder, DOUBLE, 0.0)
            with builder.if_then(args.sink_tangent != builder.null()):
                given.set(args.sink_tangent.at((self.row + lane) * 8).load(DOUBLE))
            total = total + given.get()
            self.lane_address(self.sum_matrix, 0, lane).store(total.to(self.float))
            args.lse_tangent.at((self.row + lane) * 8).store(total)
        output, size = args.head_address("output", self.b, self.h), self.format.itemsize
        target = args.output_tangent.at(self.row * (width * size))
        nonfinite = Variable(builder, self.float, 0.0)

        def write(lane: Value, d: Value, numbers: Value) -> None:
            lanes = self.lanes if numbers.type == self.vector else 1
            row = output.at((self.i0 + lane) * args.output_row_stride)
            total = self.lane_address(self.sum_matrix, 0, lane).load(self.float)
            scaled = self.format.load(row.at(d * size), lanes) * (total.broadcast(lanes) if lanes > 1 else total)
            result = numbers - scaled
            difference = result - result  # 0 if the result is finite, else NaN
            nonfinite.set(nonfinite.get() + (difference.sum() if lanes > 1 else difference))
            self.format.store(target.at(lane * (width * size) + d * size), result)

        self.write_transposed_rows(self.t_t, width, write)
        with builder.if_then(nonfinite.get() != 0.0):
            args.nonfinite_flag.store(builder.value(1, INT64))

    # -- tiles ----------------------------------------------------------------------------------------------------
    def process_tile(self, j0: Value, partial: Value) -> None:
        """Compute P and D of a tile, and add the tile's terms to μ and T."""
        tiles = self.tiles
        self.num_keys = self.builder.minimum(self.args.m - j0, KEY_BLOCK)
        operands = [x for x in (self.key, self.value, self.key_tangent, self.value_tangent) if x is not None]
        for operand in operands:
            operand.stage(j0, self.num_keys)
        self.key.multiply_rows(self.q_t, functools.partial(tiles.store, self.s_t))
        store = functools.partial(tiles.store, self.d_t)
        if self.dq_t is not None:
            self.key.multiply_rows(self.dq_t, store)
        if self.key_tangent is not None:
            self.key_tangent.multiply_rows(self.q_t, store if self.dq_t is None else self.add_to(self.d_t))
        self.write_by_mask(partial, functools.partial(self.differentiate, j0))
        p, d = (self.p_pairs, self.d_pairs) if self.paired else (self.s_t, self.d_t)
        if any(role in self.spec.roles for role in ("query", "key", SCORE)):  # otherwise D is 0
            self.value.multiply_columns(d, self.add_to(self.t_t))
        if self.value_tangent is not None:
            self.value_tangent.multiply_columns(p, self.add_to(self.t_t))

    def differentiate(self, j0: Value, masked: bool) -> None:
        """Replace Sᵀ by P and ṡᵀ by D, both after dropout, and add D before dropout to μ."""
        builder, tiles, spec = self.builder, self.tiles, self.spec
        step = 4 if spec.has_dropout else tiles.pair_size
        self.transpose_tables(j0, 0 if masked else 1)
        for v in self.vectors:
            self.tile_sum[v].set(builder.value(0.0, self.vector))
        self.pad_keys(step, 0.0, self.s_t, self.d_t)
        with builder.loop(0, self.num_keys, step) as key:
            keep_mask = self.dropout_keep_mask(j0 + key) if spec.has_dropout else []
            for k, pairs, p, _ in self.compute_weights(j0, key, step, masked):
                v, d = pairs.v, self.differentiate_weight(p, pairs)
                self.tile_sum[v].set(self.tile_sum[v].get() + d)
                if keep_mask:
                    factor = self.args.dropout_scale.to(self.float)
                    p, d = (builder.where(keep_mask[k][v], x * factor, 0.0) for x in (p, d))
                tiles.store(self.s_t, key + k, v, p)
                tiles.store(self.d_t, key + k, v, d)
            if self.paired:
                self.store_pairs(key, step)
        for v in self.vectors:
            self.sums[v].set(self.sums[v].get() + self.tile_sum[v].get().to(DOUBLE))

    def differentiate_weight(self, p: Value, pairs: ScoredPairs) -> Value:
        """Return D of the pairs, whose weights are P."""
        builder = self.builder
        tangent = builder.value(0.0, self.vector)
        if self.dq_t is not None or self.key_tangent is not None:
            tangent = self.tiles.load(self.d_t, pairs.key, pairs.v) * (self.factor * (1 / self.spec.units_per_nat))
            if self.slope is not None:
                slope = self.slope.evaluate_formula(pairs.symbols, pairs.nodes).to(self.float)
                tangent = tangent * slope.broadcast(self.lanes)
        if SCORE in self.spec.roles:
            tangent = tangent + self.evaluate_formula(2, pairs.symbols, pairs.key, pairs.v)
        return builder.where(p == 0.0, 0.0, p * tangent)

    def store_pairs(self, key: Value, step: int) -> None:
        """Store P and D of these keys as pairs of keys in bfloat16."""
        tiles = self.tiles
        for source, target in ((self.s_t, self.p_pairs), (self.d_t, self.d_pairs)):
            for k in range(0, step, 2):
                for v in self.vectors:
                    first, second = (tiles.load(source, key + k + u, v) for u in range(2))
                    tiles.store(target, (key + k) // 2, v, self.pack_pairs(first, second))
