"""The kernel of the weights pass that computes sums and maxima of formulas, and top_k, several of them at once."""

from __future__ import annotations

from itertools import islice
from typing import ClassVar

from ..codegen.values import INT64, Value
from . import weights_by_key, weights_by_query
from .kernel_spec import KEY_BLOCK, ReductionRole, count_outputs
from .weights_pass import StatisticCode, WeightsPass


class WeightStatistics(WeightsPass):
    """Compute the statistics in `spec.roles` from one product of query and key.

    A role is "top_k", at most once, or a `ReductionRole` over keys ("j"), queries ("i") or cells ("ij"), of which there
    is at most one grid. A work item is (b, h, range of blocks of queries, split of the keys). There is one split unless
    every statistic is one over queries.
    """

    own_fields: ClassVar = {
        "batches": INT64,
        "num_ranges": INT64,
        "range_size": INT64,  # blocks of queries in a range
        "num_splits": INT64,
        "split_size": INT64,  # tiles of keys in a split
        "first_key": INT64,  # only keys first_key <= j < last_key count; only a pass for pooled alone omits keys
        "last_key": INT64,
        "rows": INT64,  # of the cells of pooled
        "columns": INT64,
    }

    def allocate_statistics(self) -> None:
        outputs, self.statistics = iter(self.outputs), list[StatisticCode]()
        for index, role in enumerate(self.spec.roles):
            own = list(islice(outputs, count_outputs(role)))
            self.statistics.append(_writer_of(role)(self, index, own))

    def process_item(self, item: Value) -> None:
        builder, args, tiles = self.builder, self.args, self.tiles
        items_per_head = args.num_ranges * args.num_splits
        self.head_index, rest = item // items_per_head, item % items_per_head
        # the last queries, which see most keys under a causal mask, come first
        self.range_index = args.num_ranges - 1 - rest // args.num_splits
        self.locate_span(rest % args.num_splits)
        for statistic in self.statistics:
            statistic.init_item()
        first = args.first_query // tiles.block + self.range_index * args.range_size
        last = builder.minimum(first + args.range_size, args.query_blocks)
        with builder.loop(first, last) as query_block:
            self.locate(self.head_index // args.H, self.head_index % args.H, query_block)
            self.process_block()

    def locate_span(self, split: Value) -> None:
        """Set `first_tile` and `last_tile`, the range of tiles of one split of the keys (the last one excluded)."""
        builder, args = self.builder, self.args
        first, last = args.first_key // KEY_BLOCK, (args.last_key + (KEY_BLOCK - 1)) // KEY_BLOCK
        self.first_tile = builder.maximum(split * args.split_size, first)
        self.last_tile = builder.minimum((split + 1) * args.split_size, last)

    def process_block(self) -> None:
        for statistic in self.statistics:
            statistic.init_block()
        with self.builder.if_then(self.overlaps_tiles(self.first_tile, self.last_tile)):
            self.attend(self.first_tile, self.last_tile)
        for statistic in self.statistics:
            statistic.finish_block()

    def key_tile(self, j0: Value, partial: Value) -> None:
        for statistic in self.statistics:
            statistic.init_tile(j0)
        super().key_tile(j0, partial)
        for statistic in self.statistics:
            statistic.finish_tile(j0)

    def process_tile(self, j0: Value) -> None:
        cells = next((one for one in self.statistics if isinstance(one, weights_by_key.CellSums)), None)
        with cells.loop_keys(j0) if cells is not None else self.builder.loop(0, self.num_keys) as key:
            for statistic in self.statistics:
                statistic.add_key(key, (j0 + key).to(self.integer))


def _writer_of(role: str | ReductionRole) -> type[StatisticCode]:
    if not isinstance(role, ReductionRole):
        return weights_by_query.TopKCode
    if role.axes == "ij":
        return weights_by_key.CellSums
    if role.axes == "i":
        return weights_by_key.KeyExtrema if role.finds else weights_by_key.KeySums
    return weights_by_query.RowExtrema if role.finds else weights_by_query.RowSums
