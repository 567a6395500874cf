"""The weights pass: a second pass over the tiles that recomputes normalised weights from lse for statistics.

    Sᵀ[j][i] = Σ_d K[j][d] · Qᵀ[d][i]        P = e^(S − lse), 0 for hidden pairs and queries that see no key

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
from typing import TYPE_CHECKING, Any, ClassVar

from ..codegen.abi import COMMON_FIELDS, WEIGHTS_CALL_FIELDS, end_with
from ..codegen.formats import FloatFormat
from ..codegen.values import DOUBLE, INT64, POINTER, VOID, Value
from .kernel_spec import KEY_BLOCK, ReductionRole
from .recomputed_weights import NormalizedWeights
from .tile_functions import WeightFunctions, needs_entries

if TYPE_CHECKING:
    from .weights_statistics import WeightStatistics


class WeightsPass(NormalizedWeights):
    """Write a kernel of the weights pass into a module. The outputs follow the tables among the arguments."""

    functions = WeightFunctions
    own_formulas = ()
    own_fields: ClassVar[Mapping[str, Any]] = {}  # the fields of the subclass
    weights_fields: ClassVar = COMMON_FIELDS | {
        "first_query": INT64,  # weights of queries outside first_query <= i < last_query are 0
        "last_query": INT64,
    }

    def __init_subclass__(cls) -> None:
        cls.fields = end_with(WEIGHTS_CALL_FIELDS, {**cls.weights_fields, **cls.own_fields})

    def allocate(self) -> None:
        tiles = self.tiles
        self.q_t, self.s_t = tiles.matrix(tiles.packed_length(self.spec.d_k)), tiles.matrix(KEY_BLOCK)
        self.key = self.allocate_operand(1, needs_rows=True, needs_columns=False)
        self.lse_high, self.lse_low, self.lse_rows = tiles.variables(), tiles.variables(), tiles.matrix(2)
        self.entries = tiles.matrix(KEY_BLOCK * len(self.spec.roles))  # the rows that `WeightFunctions` writes
        self.outputs = self.find_outputs()
        self.allocate_statistics()

    def allocate_statistics(self) -> None:
        """Allocate the scratch of the statistics."""

    def process_tile(self, j0: Value) -> None:
        """Process a tile whose scores are in Sᵀ, and whose entries are in `entries`."""
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
        for row, variables in enumerate((self.lse_high, self.lse_low)):
            for v in self.vectors:
                self.tiles.store(self.lse_rows, row, v, variables[v].get())
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
        """Process one tile: compute Q · K without the scale and the entries, then call `process_tile`."""
        self.num_keys = self.builder.minimum(self.args.m - j0, KEY_BLOCK)
        self.key.stage(j0, self.num_keys)
        self.key.multiply_rows(self.q_t, functools.partial(self.tiles.store, self.s_t))
        self.write_by_mask(partial, functools.partial(self.evaluate_formulas, j0))
        self.process_tile(j0)

    def evaluate_formulas(self, j0: Value, masked: bool) -> None:
        """Call the function of `WeightFunctions`, if it has anything to do."""
        if masked or self.spec.score is not None or needs_entries(self.spec):
            inputs = self.builder.arguments[0], self.s_t, self.lse_rows, self.entries
            position = self.b, self.h, self.i0, j0, self.num_keys
            self.builder.call(WeightFunctions.names[masked], VOID, *inputs, *position)

    # -- the pairs of one key -------------------------------------------------------------------------------------
    def load_scores(self, key: Value) -> list[Value]:
        """Return S of one key for each vector of queries; −∞ for hidden pairs. Only a score formula scales S."""
        return [self.tiles.load(self.s_t, key, v) for v in self.vectors]

    def find_visible(self, key: Value) -> list[Value]:
        """Return the condition that a pair of one key is visible, for each vector of queries."""
        return [self.is_visible(s, v) for v, s in enumerate(self.load_scores(key))]


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

    def process_tile(self, j0: Value) -> None:
        builder, args, tiles, itemsize = self.builder, self.args, self.tiles, self.output_format.itemsize
        (output,) = self.outputs
        target = output.at((self.output_row * args.m + j0) * itemsize)

        def address(lane: Value, key: Value) -> Value:
            return target.at((lane * args.m + key) * itemsize)

        first, last = self.clip_lanes()
        vector_stop = self.num_keys // self.lanes * self.lanes
        with builder.loop(0, len(self.vectors)) as at, builder.loop(0, vector_stop, self.lanes) as key:
            transposed = tiles.transpose_lanes([tiles.load(self.entries, key + k, at) for k in range(self.lanes)])
            for k, p in enumerate(transposed):
                lane = at * self.lanes + k
                with builder.if_then((lane >= first) & (lane < last)):
                    self.store_weights(address(lane, key), p, self.lanes)
        with builder.loop(first, last) as lane, builder.loop(vector_stop, self.num_keys) as key:
            self.store_weights(address(lane, key), self.lane_address(self.entries, key, lane).load(self.float))


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
    index : the index of the statistic's role in `spec.roles`
    outputs : the addresses of the statistic's outputs
    """

    def __init__(self, kernel: WeightStatistics, index: int, outputs: Sequence[Value]) -> None:
        self.kernel, self.index, self.outputs = kernel, index, outputs
        self.role: Any = kernel.spec.roles[index]
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

    def add_key(self, key: Value, j: Value) -> None:
        """Process the entries of key j, number `key` in its tile."""
        raise NotImplementedError(type(self).__name__)

    def finish_tile(self, j0: Value) -> None:
        """Process what the keys of a tile have left in scratch."""

    def finish_block(self) -> None:
        """Process what the tiles of a block have left in scratch."""

    # -- sums and maxima ------------------------------------------------------------------------------------------
    def load_entries(self, key: Value) -> list[Value]:
        """Return the entries of one key for each vector of queries."""
        return [self.tiles.load(self.kernel.entries, key + self.index * KEY_BLOCK, v) for v in self.vectors]

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
