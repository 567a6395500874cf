"""The kernel of the weights pass that computes statistics: received, pooled, top_k, or several of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import ClassVar

from ..codegen.values import INT64, Value
from . import weights_by_key, weights_by_query
from .kernel_spec import KEY_BLOCK, OUTPUTS_PER_ROLE
from .weights_pass import KeyPairs, StatisticCode, WeightsPass


class WeightStatistics(WeightsPass):
    """Compute the statistics in `spec.roles` from one product of query and key.

    A role is "top_k", "received", "received_max", "pooled" or "pooled_max", and each of the three statistics occurs at
    most once. A work item is (b, h, range of blocks of queries, split of the keys). There is one split if the pass
    computes more than received.
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
        writers: dict[str, type[StatisticCode]] = {
            "received": weights_by_key.ReceivedCode,
            "pooled": weights_by_key.PooledCode,
            "top_k": weights_by_query.TopKCode,
        }
        outputs = iter([output.pointer for output in self.args.outputs])
        self.statistics = {}
        for role in self.spec.roles:
            name = role.removesuffix("_max")
            self.statistics[name] = writers[name](self, role, list(islice(outputs, OUTPUTS_PER_ROLE[role])))

    def process_item(self, item: Value) -> None:
        builder, args, tiles = self.builder, self.args, self.tiles
        items_per_head = args.num_ranges * args.num_splits
        self.head_index, rest = item // items_per_head, item % items_per_head
        # the last queries, which see most keys under a causal mask, come first
        self.range_index = args.num_ranges - 1 - rest // args.num_splits
        self.locate_span(rest % args.num_splits)
        for statistic in self.statistics.values():
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
        args, span = self.args, (self.first_tile, self.last_tile)
        for statistic in self.statistics.values():
            statistic.init_block()
        with self.builder.if_then(self.overlaps_tiles(*span)):
            self.attend((args.first_query, args.last_query), span)
        for statistic in self.statistics.values():
            statistic.finish_block()

    def key_tile(self, j0: Value, partial: Value) -> None:
        for statistic in self.statistics.values():
            statistic.init_tile(j0)
        super().key_tile(j0, partial)
        for statistic in self.statistics.values():
            statistic.finish_tile(j0)

    def process_tile(self, j0: Value, masked: bool) -> None:
        with self.loop_keys(j0) as key:
            j = (j0 + key).to(self.integer)
            logits = list(self.logits(key, j0, masked))
            scores, conditions = [s for _, s, _ in logits], [allowed for _, _, allowed in logits]
            top_k = self.statistics.get("top_k")
            if isinstance(top_k, weights_by_query.TopKCode) and len(self.statistics) == 1:
                top_k.add_scores(KeyPairs(key, j, scores, [], conditions))
                return
            weights = [self.compute_weight(s, v) for v, s in enumerate(scores)]
            for statistic in self.statistics.values():
                statistic.add_key(KeyPairs(key, j, scores, weights, conditions))

    @contextmanager
    def loop_keys(self, j0: Value) -> Iterator[Value]:
        """Write a loop over the keys of a tile, cell by cell if the pass computes pooled, and yield the key."""
        pooled = self.statistics.get("pooled")
        if isinstance(pooled, weights_by_key.PooledCode):
            with pooled.loop_keys(j0) as key:
                yield key
        else:
            with self.builder.loop(0, self.num_keys) as key:
                yield key
