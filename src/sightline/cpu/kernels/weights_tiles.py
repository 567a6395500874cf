"""The kernels of the weights pass that write a matrix of entries, or its sums over heads or batches."""

from __future__ import annotations

from typing import ClassVar

from ..codegen.formats import FloatFormat
from ..codegen.values import DOUBLE, INT64, POINTER, Value
from .kernel_spec import ReductionRole
from .weights_pass import WeightsPass


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
        """Write the weights of one query on `lanes` adjacent keys."""
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
