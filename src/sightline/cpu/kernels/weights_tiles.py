"""The kernel of the weights pass that writes the weights themselves."""

from __future__ import annotations

from typing import ClassVar

from ..codegen.values import INT64, Value
from .kernel_spec import KEY_BLOCK
from .weights_pass import WeightsPass


class WeightTiles(WeightsPass):
    """Write P in the input's dtype, for a range of queries and of keys.

    A work item is (b, h, block of queries). The caller fills the output, (B, H, queries, keys), with 0, because weights
    of hidden tiles are not written.
    """

    own_fields: ClassVar = {"first_key": INT64, "last_key": INT64}

    def process_item(self, item: Value) -> None:
        """Process one block of queries. The last blocks, the longest under a causal mask, come first."""
        args = self.args
        blocks = args.query_blocks - args.first_query // self.tiles.block
        head_index = item // blocks
        self.locate(head_index // args.H, head_index % args.H, args.query_blocks - 1 - item % blocks)
        span = args.first_key // KEY_BLOCK, (args.last_key + (KEY_BLOCK - 1)) // KEY_BLOCK
        self.attend((args.first_query, args.last_query), span)

    def process_tile(self, j0: Value, masked: bool) -> None:
        builder, args, tiles, format = self.builder, self.args, self.tiles, self.format
        with builder.loop(0, self.num_keys) as key:
            for v, p in enumerate(self.compute_weights(key, j0, masked)):
                tiles.store(self.s_t, key, v, p)
        rows, columns = args.last_query - args.first_query, args.last_key - args.first_key
        # index of the output row of lane 0; negative if lane 0 precedes first_query
        row = (self.b * args.H + self.h) * rows + self.i0 - args.first_query
        (output,) = args.outputs
        target = output.pointer.at((row * columns + j0 - args.first_key) * format.itemsize)

        def address(lane: Value, key: Value) -> Value:
            return target.at((lane * columns + key) * format.itemsize)

        first, last = self.clip_lanes(args.first_query, args.last_query)
        start, stop = builder.maximum(args.first_key - j0, 0), builder.minimum(args.last_key - j0, self.num_keys)
        vector_stop = start + (stop - start) // self.lanes * self.lanes
        with builder.loop(0, len(self.vectors)) as at, builder.loop(start, vector_stop, self.lanes) as key:
            transposed = tiles.transpose_lanes([tiles.load(self.s_t, key + k, at) for k in range(self.lanes)])
            for k, p in enumerate(transposed):
                lane = at * self.lanes + k
                with builder.if_then((lane >= first) & (lane < last)):
                    format.store(address(lane, key), p)
        with builder.loop(first, last) as lane, builder.loop(vector_stop, stop) as key:
            format.store(address(lane, key), self.lane_address(self.s_t, key, lane).load(self.float))
