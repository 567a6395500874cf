"""The kernel of the weights pass that writes the weights themselves."""

from __future__ import annotations

from ..codegen.values import INT64, Value
from .kernel_spec import KEY_BLOCK
from .weights_pass import WeightsPass


class WeightTiles(WeightsPass):
    """Write P in the input's dtype.

    A work item is (b, h, block of queries). The caller fills the output, (B, H, n, m), with 0, because weights of
    hidden tiles are not written.
    """

    def process_item(self, item: Value) -> None:
        """Process one block of queries. The last blocks, the longest under a causal mask, come first."""
        args = self.args
        head_index = item // args.query_blocks
        self.locate(head_index // args.H, head_index % args.H, args.query_blocks - 1 - item % args.query_blocks)
        self.attend(
            (args.first_query, args.last_query), (self.builder.value(0, INT64), (args.m + (KEY_BLOCK - 1)) // KEY_BLOCK)
        )

    def process_tile(self, j0: Value, masked: bool) -> None:
        builder, args, tiles, format = self.builder, self.args, self.tiles, self.format
        with builder.loop(0, self.num_keys) as key:
            for v, p in enumerate(self.compute_weights(key, j0, masked)):
                tiles.store(self.s_t, key, v, p)
        (output,) = args.outputs
        row = (self.b * args.H + self.h) * args.n + self.i0  # the output row of lane 0
        target = output.pointer.at((row * args.m + j0) * format.itemsize)

        def address(lane: Value, key: Value) -> Value:
            return target.at((lane * args.m + key) * format.itemsize)

        first, last = self.clip_lanes(args.first_query, args.last_query)
        vector_stop = self.num_keys // self.lanes * self.lanes
        with builder.loop(0, len(self.vectors)) as at, builder.loop(0, vector_stop, self.lanes) as key:
            transposed = tiles.transpose_lanes([tiles.load(self.s_t, key + k, at) for k in range(self.lanes)])
            for k, p in enumerate(transposed):
                lane = at * self.lanes + k
                with builder.if_then((lane >= first) & (lane < last)):
                    format.store(address(lane, key), p)
        with builder.loop(first, last) as lane, builder.loop(vector_stop, self.num_keys) as key:
            format.store(address(lane, key), self.lane_address(self.s_t, key, lane).load(self.float))
