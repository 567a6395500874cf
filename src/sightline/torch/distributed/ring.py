"""Attention in which ranks send each other blocks of keys: forward pass, statistics and backward pass of one rank.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...api import kernels as dispatch
from ...call.kernel import GivenGradients, Gradients, sink_weights, sum_sink_gradients
from ...call.problem import Problem
from ...partition.parts import Sums, combine, part_of, read_part, start
from ...partition.schedule import KeyBlock, Schedule
from ...partition.shards import Span
from ...reference import streaming
from ...statistics import (
    Entropy,
    MaxScore,
    Statistic,
    StatisticGradients,
    Tile,
    accumulate_statistics,
    arrays_of,
    statistic_gradients,
)
from .block_exchange import BlockExchange
from .group import Group


@dataclass(frozen=True)
class Saved:
    """The inputs of the forward pass, and those of its results that the backward pass reads."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    output: Tensor  # in the dtype of the query
    lse: Tensor
    statistics: Sequence[Sequence[Tensor]]  # the arrays of each per-query statistic

    def rows(self, span: Span) -> Saved:
        """Return the inputs and results of the queries of a span; key, value and sinks stay whole."""
        rows = span.rows
        statistics = [[array[..., rows] for array in own] for own in self.statistics]
        own = self.query[..., rows, :], self.key, self.value, self.sinks, self.output[..., rows, :], self.lse[..., rows]
        return Saved(*own, statistics)


@dataclass(frozen=True)
class ResultGradients:
    """The gradients of the results of the forward pass."""

    output: Tensor
    lse: Tensor | None
    statistics: list[Tensor | None]  # of the first array of each per-query statistic

    def rows(self, span: Span) -> ResultGradients:
        """Return the gradients of the queries of a span."""
        lse, *statistics = [None if x is None else x[..., span.rows] for x in (self.lse, *self.statistics)]
        return ResultGradients(self.output[..., span.rows, :], lse, statistics)


@dataclass
class RingGradients:
    """The gradients of a rank's shards, and this rank's part of the gradients of the tables and the sinks."""

    query: Tensor
    key: Tensor
    value: Tensor
    tables: dict[int, Tensor]  # by the index in `Problem.tables`
    sinks: Tensor | None = None

    def add(self, span: Span, key_sums: Sequence[Tensor], part: Gradients) -> None:
        """Add `part`, the gradients of a span's queries on one block. Its key and value are added to `key_sums`."""
        self.query[..., span.rows, :] += part.query
        key_sums[0].add_(part.key)
        key_sums[1].add_(part.value)
        for index, table in enumerate(part.tables):
            if table is not None:
                start = torch.zeros_like(table, dtype=torch.float64)
                self.tables[index] = self.tables.get(index, start) + table


@dataclass(frozen=True)
class Ring:
    """One call on one rank.

    problem : the whole problem, without the entries of its arrays. Its statistics are those with an entry for every
        query, without lse.
    """

    group: Group
    problem: Problem
    schedule: Schedule
    threads: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The accumulator's dtype."""
        dtype: torch.dtype = getattr(torch, self.problem.accumulator)
        return dtype

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Sums:
        """Return output, lse and the per-query statistics of this rank's queries."""
        output, see = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=self.dtype), self.problem.see
        sums = start(self.problem, output, None if sinks is None else sinks[:, None], torch.float64)
        for block, (keys, values) in BlockExchange(self.group, self.schedule, (key, value)):
            for span in self.schedule.seeing_spans(self.group.rank, block):
                part = self._part(span, block, query[..., span.rows, :], keys, values)
                found = dispatch.solve(part, None, self.threads)
                added = read_part(found.output.to(self.dtype), found.lse, found.seen, block.span.start)
                sums.store(span.rows, combine([sums.rows(span.rows), added], see))
        for span in self.schedule.queries.ranks[self.group.rank]:
            sums.store(span.rows, combine([sums.rows(span.rows)], see, normalize=True))
        return sums

    def statistics_of_pairs(self, query: Tensor, key: Tensor, lse: Tensor, see: tuple[Statistic, ...]) -> list[Any]:
        """Return statistics of the pairs of all ranks, from a second pass with the final lse."""

        def tiles() -> Iterator[Tile]:
            for block, (keys,) in BlockExchange(self.group, self.schedule, (key,)):
                for span in self.schedule.seeing_spans(self.group.rank, block):
                    part = self._part(span, block, query[..., span.rows, :], keys, keys).with_statistics()
                    for tile in streaming.tiles(streaming.TileOps(part), lse[..., span.rows]):
                        yield replace(tile, rows=_move(tile.rows, span), columns=_move(tile.columns, block.span))

        found = []
        results = accumulate_statistics(self.problem.with_statistics(*see), lse, tiles)
        for statistic, result in zip(see, results, strict=True):
            (array,) = arrays_of(result)
            self.group.reduce(array, getattr(statistic, "how", "sum"), f"the statistic {statistic!r}")
            found.append(array)
        return found

    def backward(self, saved: Saved, d_results: ResultGradients, wanted_tables: tuple[int, ...]) -> RingGradients:
        """Return the gradients of Σ d_results ∘ results, where the sum runs over the results of all ranks."""
        query, key, value = saved.query, saved.key, saved.value
        d_query, d_key, d_value = (torch.zeros(x.shape, dtype=self.dtype, device=x.device) for x in (query, key, value))
        found = RingGradients(d_query, d_key, d_value, {})
        exchange = BlockExchange(self.group, self.schedule, (key, value), (d_key, d_value))
        for block, arrays in exchange:
            sums = [torch.zeros(x.shape, dtype=self.dtype, device=x.device) for x in arrays]
            for span in self.schedule.seeing_spans(self.group.rank, block):
                rows = saved.rows(span), d_results.rows(span)
                found.add(span, sums, self._differentiate(span, block, arrays, *rows, wanted_tables))
            exchange.add_gradients(sums)
            del arrays, sums  # before memory for the next block is taken
        if saved.sinks is not None:
            found.sinks = self._differentiate_sinks(saved.sinks, saved, d_results)
        return found

    def _differentiate(
        self,
        span: Span,
        block: KeyBlock,
        block_arrays: list[Tensor],
        saved: Saved,
        d_results: ResultGradients,
        wanted_tables: tuple[int, ...],
    ) -> Gradients:
        """Return the gradients of a span's queries on a block; `saved` and `d_results` are those of the span."""
        part = self._part(span, block, saved.query, *block_arrays)
        added = part_gradients(part, block.span.start, saved.lse, saved.sinks, d_results.statistics, saved.statistics)
        results, d_output, d_lse = (saved.output, saved.lse), d_results.output, d_results.lse
        kernel = dispatch.make_plan(part).kernel
        given = GivenGradients(d_output, d_lse, results, wanted_tables, added)
        found = kernel.backward(part, given, self.threads)
        return streaming.backward(part, d_output, d_lse, (), results, added) if found is None else found

    def _differentiate_sinks(self, sinks: Tensor, saved: Saved, d_results: ResultGradients) -> Tensor:
        """Return this rank's part of the gradient of the sinks, −Σ exp(sink − lse) δ over the rank's queries."""
        delta = torch.einsum("...d,...d->...", d_results.output.to(self.dtype), saved.output.to(self.dtype)).double()
        delta = delta if d_results.lse is None else delta - d_results.lse
        part = replace(self.problem, query=saved.query, key=saved.key, value=saved.value, sinks=None)
        added = part_gradients(part, 0, saved.lse, sinks, d_results.statistics, saved.statistics)
        for term, sign in ((added.lse, -1.0), (added.weights_sum, 1.0)):
            if term is not None:
                delta = delta + sign * term
        found: Tensor = sum_sink_gradients(sinks, saved.lse, delta)
        return found

    def _part(self, span: Span, block: KeyBlock, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """Return the problem of the queries of a span on a block of keys."""
        first = {"first_row": span.start, "first_key": block.span.start}
        return part_of(self.problem, query, key, value, **first, see=self.problem.see)


def _move(rows: slice, span: Span) -> slice:
    """Return the positions in the sequence of rows that count from the start of a span."""
    return slice(rows.start + span.start, rows.stop + span.start)


def part_gradients(
    part: Problem,
    first_key: int,
    lse: Tensor,
    sinks: Tensor | None,
    d_seen: Sequence[Tensor | None],
    arrays: Sequence[Sequence[Tensor]],
) -> StatisticGradients:
    """Return the terms that the gradients of `part.see` add to the gradients of a part.

    Parameters
    ----------
    part : some queries on the keys from `first_key` on
    lse, arrays : lse and the arrays of each statistic, of these queries on all keys
    sinks : the sinks of the whole problem
    d_seen : the gradient of each statistic's first array; None for 0
    """
    wide = [None if gradient is None else gradient.double() for gradient in d_seen]
    local = [[*own[:1], *[where - first_key for where in own[1:]]] for own in arrays]
    found = statistic_gradients(part, lse, lambda: iter(()), wide, saved=local)
    if sinks is not None and any(isinstance(one, MaxScore) for one in part.see):
        # beside a large sink, the weight of the largest score may underflow
        beside = statistic_gradients(replace(part, sinks=sinks), lse, lambda: iter(()), wide, saved=local)
        found = replace(found, includes_zero_weights=beside.includes_zero_weights)
    for statistic, gradient in zip(part.see, wide, strict=True):
        if isinstance(statistic, Entropy) and gradient is not None and sinks is not None:
            # the weights of the keys and of the sink sum to 1, and `weights_sum` counts the keys alone
            found = replace(found, weights_sum=found.weights_sum + gradient * sink_weights(sinks, lse))
    return found
