"""The weights pass: a second pass over the tiles that recomputes normalised weights from lse for statistics.

    Sᵀ[j][i] = Σ_d K[j][d] · Qᵀ[d][i]        P = e^(S − lse), 0 for hidden pairs and queries that see no key

lse is represented as a sum of two numbers of the accumulator's type, so that rounding lse does not change the weights.
There are three kernels. `WeightStatistics` (weights_statistics.py) computes sums and maxima of formulas over keys,
queries and cells, and top_k, in one pass if they are requested together. A `StatisticCode` writes each of these
(weights_by_key.py, weights_by_query.py). `WeightTiles` writes a matrix of entries, and `WeightSums` the sums of such
matrices over heads or batches. Each number of an output is written by one work item, in an order that the problem
determines. So results are the same for any number of threads.

The kernels do not treat NaN and ∞. If a visible score is NaN or +∞, lse is too, and the caller uses the kernel
`Streaming` instead. Hidden scores have no effect, since full tile ranges contain no hidden pair.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ...formula.derivative import vanishes_with
from ...formula.expression import SYMBOLS
from ..codegen.abi import COMMON_FIELDS, WEIGHTS_CALL_FIELDS, OutputArguments, end_with
from ..codegen.formats import FloatFormat
from ..codegen.values import DOUBLE, INT64, POINTER, Value
from .block import Block
from .kernel_spec import KEY_BLOCK, ReductionRole

if TYPE_CHECKING:
    from .weights_statistics import WeightStatistics


class WeightsPass(Block):
    """Write a kernel of the weights pass into a module. The outputs follow the tables among the arguments."""

    own_fields: ClassVar[Mapping[str, Any]] = {}  # the fields of the subclass
    weights_fields: ClassVar = COMMON_FIELDS | {
        "first_query": INT64,  # weights of queries outside first_query <= i < last_query are 0
        "last_query": INT64,
    }

    def __init_subclass__(cls) -> None:
        cls.fields = end_with(WEIGHTS_CALL_FIELDS, {**cls.weights_fields, **cls.own_fields})

    @property
    def own_formulas(self) -> set[int]:  # type: ignore[override]
        """The indices of mask, score, and the formulas of the pass among those of the call."""
        return {0, 1} | {role.formula for role in self.spec.roles if isinstance(role, ReductionRole)}

    def allocate(self) -> None:
        tiles = self.tiles
        self.q_t, self.s_t = tiles.matrix(tiles.packed_length(self.spec.d_k)), tiles.matrix(KEY_BLOCK)
        self.key = self.allocate_operand(1, needs_rows=True, needs_columns=False)
        self.lse_high, self.lse_low = tiles.variables(), tiles.variables()
        self.allocate_statistics()

    def allocate_statistics(self) -> None:
        """Allocate the scratch of the statistics."""

    def process_tile(self, j0: Value, masked: bool) -> None:
        """Process a tile whose products Q · K are in Sᵀ. If `masked`, some pairs of the tile may be hidden."""
        raise NotImplementedError(type(self).__name__)

    # -- a block of queries ---------------------------------------------------------------------------------------
    def attend(self, *tiles: Value) -> None:
        """Process the block's tiles; if limits are given, only those of `loop_tiles(*tiles)`."""
        args = self.args
        key_head = args.head_address("key", self.b, self.h // args.group)
        self.key.locate(key_head, args.key_row_stride, args.key_column_stride)
        self.transpose_queries()
        targets = [(self.lse_high, math.inf), (self.lse_low, 0.0)]
        self.set_per_query(targets, self.load_lse_high_low, *self.clip_lanes())
        self.evaluate_block()
        with self.loop_tiles(*tiles) as (tile, partial):
            self.key_tile(tile * KEY_BLOCK, partial)

    def clip_lanes(self) -> tuple[Value, Value]:
        """Return (first, past the last) of the lanes whose queries the call selects. Only their weights count."""
        builder, args = self.builder, self.args
        return builder.maximum(args.first_query - self.i0, 0), builder.minimum(
            args.last_query - self.i0, self.num_valid
        )

    def load_lse_high_low(self, lane: Value) -> tuple[Value, Value]:
        """Return lse of a query, in the scores' base, as high + low. If the query sees no key, high is ∞."""
        builder = self.builder
        lse = self.args.lse.at((self.row + lane) * 8).load(DOUBLE)
        scaled, is_empty = lse * self.spec.units_per_nat, lse == -math.inf
        high = scaled.to(self.float)
        low = scaled - high.to(DOUBLE)
        return builder.where(is_empty, math.inf, high), builder.where(is_empty, 0.0, low)

    def key_tile(self, j0: Value, partial: Value) -> None:
        """Process one tile: compute Q · K without the scale, then call `process_tile`."""
        self.num_keys = self.builder.minimum(self.args.m - j0, KEY_BLOCK)
        self.key.stage(j0, self.num_keys)
        self.key.multiply_rows(self.q_t, functools.partial(self.tiles.store, self.s_t))
        self.write_by_mask(partial, functools.partial(self.process_tile, j0))

    # -- weights of one key ---------------------------------------------------------------------------------------
    def compute_log_weight(self, s: Value, v: int) -> Value:
        """Return S − lse of vector v of the queries in the scores' base, for scores from `compute_scores`."""
        return self.compute_exponent(s, self.lse_high[v].get()) - self.lse_low[v].get()

    def compute_pairs(self, key: Value, j0: Value, masked: bool, needs_weights: bool = True) -> KeyPairs:
        """Return the scores of one key and, if needed, its weights."""
        j = (j0 + key).to(self.integer)
        pairs = [(x.score, self.compute_condition(x, masked)) for x in self.compute_scores(key, j)]
        scores, conditions = [s for s, _ in pairs], [allowed for _, allowed in pairs]
        exponents = [self.compute_log_weight(s, v) for v, s in enumerate(scores)] if needs_weights else []
        weights = [self.exponentiate(x) for x in exponents]
        return KeyPairs(key, j, scores, exponents, weights, conditions)

    def compute_entries(self, role: ReductionRole, pairs: KeyPairs) -> list[Value]:
        """Return f of one key for each vector of queries, and `role.hidden` for hidden pairs."""
        if not role.formula:
            return self.hide(pairs.weights, pairs.conditions, 0.0)
        formula = self.formulas[role.formula]
        assert formula is not None
        nats, entries, vanishes = self.spec.nats_per_unit, [], vanishes_with(formula, SYMBOLS["p"])
        scale = 1.0 if self.renderers[1] is not None else self.factor * nats
        for v, (s, x, p) in enumerate(zip(pairs.scores, pairs.exponents, pairs.weights, strict=True)):
            symbols = self.symbols[v] | {"j": pairs.j, "s": s * scale, "p": p, "ln p": x * nats}
            entry = self.evaluate_formula(role.formula, symbols, pairs.key, v).to(self.float).broadcast(self.lanes)
            entries.append(self.builder.where(p == 0.0, 0.0, entry) if vanishes else entry)
        is_simple = vanishes and role.hidden == 0
        return self.hide(entries, pairs.conditions if is_simple else self.find_visible(pairs), role.hidden)

    def find_visible(self, pairs: KeyPairs) -> list[Value]:
        """Return the condition that a pair of one key is visible, for each vector of queries."""
        found = []
        for v, (s, allowed) in enumerate(zip(pairs.scores, pairs.conditions, strict=True)):
            visible = (s != -math.inf) & (self.lse_high[v].get() != math.inf)
            found.append(visible if allowed is None else visible & allowed)
        return found

    def hide(self, vectors: list[Value], conditions: Sequence[Value | None], filler: float) -> list[Value]:
        """Return the vectors with `filler` in the lanes of hidden pairs; see `KeyPairs.conditions`."""
        filled, pairs = self.builder.value(filler, self.vector), zip(vectors, conditions, strict=True)
        return [x if allowed is None else self.builder.where(allowed, x, filled) for x, allowed in pairs]


class KeyPairs(NamedTuple):
    """The pairs of one key with every vector of queries.

    key : index of the key in its tile
    j : index of the key
    scores : the scores that `compute_scores` yields
    exponents : the logarithms of P, in the scores' base
    weights : P, which is not yet 0 at hidden pairs
    conditions : for each vector, the condition of the mask; None if no pair is hidden
    """

    key: Value
    j: Value
    scores: list[Value]
    exponents: list[Value]
    weights: list[Value]
    conditions: list[Value | None]


class WeightTiles(WeightsPass):
    """Write P in the input's dtype, or f in the accumulator's dtype.

    A work item is (b, h, block of queries). The caller fills the output, (B, H, n, m), with `role.hidden`, because
    hidden tiles are not written.
    """

    @property
    def role(self) -> ReductionRole:
        (role,) = self.spec.roles
        assert isinstance(role, ReductionRole)
        return role

    def process_item(self, item: Value) -> None:
        """Process one block of queries. The last blocks, the longest under a causal mask, come first."""
        head_index, query_block = self.locate_block(item)
        self.process_head(head_index, head_index, query_block)

    def locate_block(self, item: Value) -> tuple[Value, Value]:
        """Return (index of the item's matrix in the output, block of queries)."""
        blocks = self.args.query_blocks
        return item // blocks, blocks - 1 - item % blocks

    def process_head(self, head_index: Value, output_index: Value, query_block: Value) -> None:
        """Process a block of queries of head `head_index`. Its weights belong to output matrix `output_index`."""
        args = self.args
        self.locate(head_index // args.H, head_index % args.H, query_block)
        self.output_row = output_index * args.n + self.i0  # of lane 0
        self.attend()

    @property
    def output_format(self) -> FloatFormat:
        return self.format.accumulator_format if self.role.formula else self.format

    def store_weights(self, address: Value, p: Value, lanes: int = 1) -> None:
        """Store the weights of one query for a vector of adjacent keys."""
        self.output_format.store(address, p)

    def process_tile(self, j0: Value, masked: bool) -> None:
        builder, args, tiles, itemsize = self.builder, self.args, self.tiles, self.output_format.itemsize
        self.transpose_tables(j0, 0 if masked else 1)
        with builder.loop(0, self.num_keys) as key:
            for v, entry in enumerate(self.compute_entries(self.role, self.compute_pairs(key, j0, masked))):
                tiles.store(self.s_t, key, v, entry)
        (output,) = args.outputs
        target = output.pointer.at((self.output_row * args.m + j0) * itemsize)

        def address(lane: Value, key: Value) -> Value:
            return target.at((lane * args.m + key) * itemsize)

        first, last = self.clip_lanes()
        vector_stop = self.num_keys // self.lanes * self.lanes
        with builder.loop(0, len(self.vectors)) as at, builder.loop(0, vector_stop, self.lanes) as key:
            transposed = tiles.transpose_lanes([tiles.load(self.s_t, key + k, at) for k in range(self.lanes)])
            for k, p in enumerate(transposed):
                lane = at * self.lanes + k
                with builder.if_then((lane >= first) & (lane < last)):
                    self.store_weights(address(lane, key), p, self.lanes)
        with builder.loop(first, last) as lane, builder.loop(vector_stop, self.num_keys) as key:
            self.store_weights(address(lane, key), self.lane_address(self.s_t, key, lane).load(self.float))


class WeightSums(WeightTiles):
    """Add the products of entries and a factor of each head over heads, batches or both, in the accumulator's dtype.

    The output has one matrix for each sum. A work item computes a block of queries in one of these matrices: it adds
    `count` heads to the block, one after another. The caller fills the output with 0. The r-th head of matrix x has the
    number x · output_step + r · step among all B · H heads.
    """

    own_fields: ClassVar = {
        "factors": POINTER,  # (B · H,) float64
        "count": INT64,
        "step": INT64,
        "output_step": INT64,
    }

    def process_item(self, item: Value) -> None:
        args = self.args
        output_index, query_block = self.locate_block(item)
        with self.builder.loop(0, args.count) as rank:
            head_index = output_index * args.output_step + rank * args.step
            self.head_factor = args.factors.at(head_index * 8).load(DOUBLE).to(self.float)
            self.process_head(head_index, output_index, query_block)

    @property
    def output_format(self) -> FloatFormat:
        return self.format.accumulator_format

    def store_weights(self, address: Value, p: Value, lanes: int = 1) -> None:
        factor = self.head_factor if lanes == 1 else self.head_factor.broadcast(lanes)
        address.store(self.builder.fma(p, factor, self.output_format.load(address, lanes)))


class StatisticCode:
    """The code of one statistic in the kernel `WeightStatistics`, which calls the methods in this order.

        init_item   for each block of queries:
            init_block   for each tile of keys:
                init_tile   for each key: add_key   finish_tile
            finish_block

    Parameters
    ----------
    role : an entry of `spec.roles`
    outputs : the statistic's outputs
    """

    def __init__(self, kernel: WeightStatistics, role: Any, outputs: Sequence[OutputArguments]) -> None:
        self.kernel, self.role, self.outputs = kernel, role, outputs
        self.builder, self.args, self.tiles, self.vectors = kernel.builder, kernel.args, kernel.tiles, kernel.vectors
        self.allocate()

    def allocate(self) -> None:
        """Allocate the statistic's scratch."""

    def init_item(self) -> None:
        """Prepare a work item."""

    def init_block(self) -> None:
        """Prepare a block of queries."""

    def init_tile(self, j0: Value) -> None:
        """Prepare the tile of the keys from j0 on."""

    def add_key(self, pairs: KeyPairs) -> None:
        """Process the weights of one key."""
        raise NotImplementedError(type(self).__name__)

    def finish_tile(self, j0: Value) -> None:
        """Process what the keys of a tile have left in scratch."""

    def finish_block(self) -> None:
        """Process what the tiles of a block have left in scratch."""

    # -- sums and maxima ------------------------------------------------------------------------------------------
    def entries(self, pairs: KeyPairs) -> list[Value]:
        """Return the entries of one key; see `WeightsPass.compute_entries`."""
        return self.kernel.compute_entries(self.role, pairs)

    @property
    def is_extremum(self) -> bool:
        return self.role.how in ("max", "min")

    def exceeds(self, x: Value, y: Value) -> Value:
        """True if x is larger than y, or smaller for a minimum. NaN exceeds every number."""
        larger = x > y if self.role.how == "max" else x < y
        return larger | ((x != x) & (y == y)) if self.role.formula else larger

    def combine(self, x: Value, y: Value) -> Value:
        """Return the sum of x and y, or the maximum or minimum."""
        return self.builder.where(self.exceeds(x, y), x, y) if self.is_extremum else x + y

    def accumulate(self, address: Value, error_address: Value, x: Value, align: int) -> None:
        """Add x to a running sum by compensated summation (Kahan, 1965), or set a running maximum.

        The rounding error of the sum is at `error_address`. `align` is the alignment of both addresses in bytes.
        """
        old = address.load(x.type, align)
        if self.is_extremum:
            address.store(self.combine(x, old), align)
            return
        x = x - error_address.load(x.type, align)
        new = old + x
        address.store(new, align)
        error_address.store((new - old) - x, align)
