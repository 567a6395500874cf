"""Attention in which ranks send each other blocks of keys.

One `torch.autograd.Function` has output, lse and the statistics of each query. A `Ring` computes the passes of one
rank, and a `BlockExchange` makes the transfers of a pass.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...api import kernels
from ...arrays.operations import itemsize, needs_gradient
from ...call.gradient_parts import sink_weights, sum_sink_gradients
from ...call.kernel import GivenGradients
from ...call.partition.needed_keys import KeyBlock, Schedule, find_schedule, key_block_length
from ...call.partition.parts import Sums, add_parts, part_of, read_part, start
from ...call.partition.shards import Shards, Span
from ...call.problem import Problem
from ...call.spec import split_arrays, unflatten_gradients
from ...errors import ParameterError
from ...reference import streaming
from ...statistics import Statistic, StatisticGradients, Tile, accumulate_statistics, arrays_of, statistic_gradients
from ..autograd import check_versions, table_versions, tables_of, trainable_inputs
from ..operator import autocast_disabled
from .collectives import cut_spans
from .group import Group, Transfers

QUERY_BYTES, MIN_ROWS = 4 << 20, 256  # the approximate size of a piece of the queries, and its fewest queries
ROUNDS_UNTIL_RETURN = 2  # rounds from the arrival of a block to the transfer of its gradients


def attention_by_ring(
    group: Group, problem: Problem, shards: list[Shards], local: list[Tensor]
) -> tuple[Tensor, list[Sequence[Tensor]]]:
    """Return the output of this rank's queries, and the arrays of each statistic."""
    per_query = tuple([statistic for statistic in problem.see if statistic.is_mergeable and statistic.num_arrays])
    over_queries = tuple([statistic for statistic in problem.see if not statistic.is_mergeable])
    queries, keys = shards
    B, H, _, _ = problem.extent
    row_bytes = max(1, B * H * max(problem.d_k, problem.d_v) * itemsize(problem.accumulator))
    pieces = queries.cut(max(MIN_ROWS, QUERY_BYTES // row_bytes // 64 * 64))
    schedule = find_schedule(problem.mask, problem.extent, pieces, keys, key_block_length(problem))
    ring = Ring(group, replace(problem, see=per_query), schedule)
    wanted_tables = trainable_inputs(problem)[1]
    tables = [problem.tables[index].array for index in wanted_tables]
    inputs = [*local, *([] if problem.sinks is None else [problem.sinks]), *tables]
    if over_queries and any(map(needs_gradient, inputs)):
        allowed, cure = 'other statistics, or method="heads"', "request them in a second call under torch.no_grad()"
        raise ParameterError(f"see={list(over_queries)} with inputs that require gradients", allowed, cure)
    output, lse, *arrays = _RingAttention.apply(ring, wanted_tables, *inputs)  # type: ignore[no-untyped-call]
    rounded = [array.to(ring.dtype) if array.is_floating_point() else array for array in arrays]
    arrays_by_statistic: dict[Statistic, Sequence[Tensor]] = dict(
        zip(per_query, split_arrays(per_query, rounded, 0), strict=True)
    )
    arrays_by_statistic |= {statistic: [lse.to(ring.dtype)] for statistic in problem.see if not statistic.num_arrays}
    arrays_by_statistic |= ring.statistics_of_pairs(local[0], local[1], lse.double(), over_queries)
    return output, [arrays_by_statistic[statistic] for statistic in problem.see]


class _RingAttention(torch.autograd.Function):
    """Output, lse in float64, and the arrays of the per-query statistics except lse, in torch's graph."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, wanted_tables: tuple[int, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *rest = inputs
        sinks = None if ring.problem.sinks is None else rest.pop(0)
        results = ring.forward(query, key, value, sinks)
        output = results.output.to(query.dtype)
        arrays = [array for result in results.seen for array in result]
        ctx.ring, ctx.wanted_tables = ring, wanted_tables
        ctx.versions = table_versions(tables_of(ring.problem))
        ctx.save_for_backward(*inputs, output, results.shift, *arrays)
        ctx.num_inputs = len(inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[array for array in arrays if not array.is_floating_point()])
        return output, results.shift, *arrays

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Any, ...]:
        ring, saved = ctx.ring, ctx.saved_tensors
        inputs, results = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        query, key, value, *rest = inputs
        check_versions(ctx.versions, tables_of(ring.problem))
        with torch.no_grad(), autocast_disabled(query):
            given = unflatten_gradients(ring.problem.see, dict(enumerate(d_results)), results, ctx.wanted_tables)
            given = given._replace(d_output=given.d_output.contiguous())
            sums = ring.backward(given, query, key, value, None if ring.problem.sinks is None else rest[0])
            gradients = [gradient.to(x.dtype) for gradient, x in zip(sums, inputs, strict=True)]
        if torch.is_grad_enabled():  # with create_graph=True
            sources = [*inputs, *[x for x in d_results if x is not None]]
            gradients = _NoSecondDerivative.apply(len(gradients), *gradients, *sources)  # type: ignore[no-untyped-call]
        return None, None, *gradients


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients whose own derivatives raise an error. Otherwise torch would ignore a penalty on gradients silently."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([gradient.view_as(gradient) for gradient in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        given = 'a second derivative of distributed.attention with method="ring"'
        raise ParameterError(given, "first derivatives", 'method="heads", or gradients without create_graph=True')


# -- the passes of one rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """One call on one rank.

    problem : the whole problem, without the entries of its arrays. Its statistics are those with an entry for every
        query, without lse.
    """

    group: Group
    problem: Problem
    schedule: Schedule

    @property
    def dtype(self) -> Any:
        """The accumulator's dtype."""
        return getattr(torch, self.problem.accumulator)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Sums:
        """Return output, lse and the per-query statistics of this rank's queries."""
        output, see = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=self.dtype), self.problem.see
        sums = start(self.problem, output, None if sinks is None else sinks[:, None], torch.float64)
        for block, (keys, values), _ in BlockExchange(self.group, self.schedule, (key, value)):
            for span in self.schedule.seeing_spans(self.group.rank, block):
                part = self._part(span, block, query[..., span.rows, :], keys, values)
                result = kernels.solve(part)
                added = read_part(result.output.to(self.dtype), result.lse, result.seen, block.span.start)
                sums.store(span.rows, add_parts([sums.rows(span.rows), added], see))
        for span in self.schedule.queries.ranks[self.group.rank]:
            sums.store(span.rows, add_parts([sums.rows(span.rows)], see, normalize=True))
        return sums

    def statistics_of_pairs(
        self, query: Tensor, key: Tensor, lse: Tensor, see: tuple[Statistic, ...]
    ) -> dict[Statistic, Sequence[Tensor]]:
        """Return the arrays of statistics of the pairs of all ranks, from a second pass with the final lse.

        A sum over the keys, or over the queries, is returned for this rank's queries, or for its keys.
        """

        def tiles() -> Iterator[Tile]:
            for block, (keys,), _ in BlockExchange(self.group, self.schedule, (key,)):
                for span in self.schedule.seeing_spans(self.group.rank, block):
                    part = self._part(span, block, query[..., span.rows, :], keys, keys).with_statistics()
                    for tile in streaming.visible_tiles(streaming.TileOps(part), lse[..., span.rows]):
                        yield replace(tile, rows=_move(tile.rows, span), columns=_move(tile.columns, block.span))

        arrays_by_statistic: dict[Statistic, Sequence[Tensor]] = {}
        results = accumulate_statistics(self.problem.with_statistics(*see), lse, tiles)
        places = {"j": self.schedule.queries.ranks[self.group.rank], "i": self.schedule.keys.ranks[self.group.rank]}
        for statistic, result in zip(see, results, strict=True):
            (array,) = arrays_of(result)
            self.group.reduce(array, getattr(statistic, "how", "sum"), f"the statistic {statistic!r}")
            spans = places.get(statistic.axes)
            arrays_by_statistic[statistic] = [array if spans is None else cut_spans(array, spans, -1)]
        return arrays_by_statistic

    def backward(
        self, given: GivenGradients, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> list[Tensor]:
        """Return the gradients of Σ d_results ∘ results, where the sum runs over the results of all ranks.

        They are those of query, key, value, the sinks if there are any, and the wanted tables. Those of the sinks and
        the tables are this rank's part.
        """
        d_query, d_key, d_value = (x.new_zeros(x.shape, dtype=self.dtype) for x in (query, key, value))
        d_tables = {k: torch.zeros_like(self.problem.tables[k].array, dtype=torch.float64) for k in given.wanted_tables}
        exchange = BlockExchange(self.group, self.schedule, (key, value), (d_key, d_value))
        for block, arrays, add in exchange:
            add(self._differentiate(block, arrays, given, query, sinks, d_query, d_tables))
            del arrays  # before memory for the next block is taken
        d_sinks = [] if sinks is None else [self._differentiate_sinks(given, query, key, value, sinks)]
        return [d_query, d_key, d_value, *d_sinks, *d_tables.values()]

    def _differentiate(
        self,
        block: KeyBlock,
        block_arrays: list[Tensor],
        given: GivenGradients,
        query: Tensor,
        sinks: Tensor | None,
        d_query: Tensor,
        d_tables: dict[int, Tensor],
    ) -> list[Tensor]:
        """Return the gradients of a block's keys and values. Add the gradients of the queries and tables in place."""
        sums = [x.new_zeros(x.shape, dtype=self.dtype) for x in block_arrays]
        for span in self.schedule.seeing_spans(self.group.rank, block):
            part = self._part(span, block, query[..., span.rows, :], *block_arrays)
            rows = _rows_of(given, span)
            rows = rows._replace(statistics=part_gradients(part, block.span.start, rows, sinks))
            gradients = kernels.make_plan(part).kernel.backward(part, rows)
            if gradients is None:
                gradients = streaming.backward(part, rows)
            d_query[..., span.rows, :] += gradients.query
            sums[0] += gradients.key
            sums[1] += gradients.value
            for index, total in d_tables.items():
                total += gradients.tables[index]
        return sums

    def _differentiate_sinks(
        self, given: GivenGradients, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
    ) -> Tensor:
        """Return this rank's part of the gradient of the sinks, −Σ exp(sink − lse) δ over the rank's queries."""
        output, lse = given.saved
        delta = torch.einsum("...d,...d->...", given.d_output.to(self.dtype), output.to(self.dtype)).double()
        key, value = (x if x.shape[-2] else x.new_zeros(*x.shape[:-2], 1, x.shape[-1]) for x in (key, value))
        part = replace(self.problem, query=query, key=key, value=value, sinks=None)  # statistics need a key
        added = part_gradients(part, 0, given, sinks) if query.shape[-2] else StatisticGradients()
        for term, sign in ((given.d_lse, -1.0), (added.lse, -1.0), (added.weights_sum, 1.0)):
            if term is not None:
                delta = delta + sign * term
        d_sinks: Tensor = sum_sink_gradients(sinks, lse, delta)
        return d_sinks

    def _part(self, span: Span, block: KeyBlock, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """Return the problem of the queries of a span on a block of keys."""
        first = {"first_row": span.start, "first_key": block.span.start}
        return part_of(self.problem, query, key, value, **first, see=self.problem.see)


def _move(rows: slice, span: Span) -> slice:
    """Return the positions in the sequence of rows that count from the start of a span."""
    return slice(rows.start + span.start, rows.stop + span.start)


def _rows_of(given: GivenGradients, span: Span) -> GivenGradients:
    """Return the gradients and results of the queries of a span, as views."""
    axis = given.saved[1].ndim - 1
    found: GivenGradients = tree_map_only(Tensor, lambda x: x.narrow(axis, span.row, len(span)), given)
    return found


def part_gradients(part: Problem, first_key: int, given: GivenGradients, sinks: Tensor | None) -> StatisticGradients:
    """Return the terms that the gradients of `part.see` add to the gradients of a part.

    The part has some queries on the keys from `first_key` on, `given` their gradients and results on all keys, and
    `sinks` are those of the whole problem.
    """
    lse = given.saved[1]
    wide = [None if gradient is None else gradient.double() for gradient in given.d_seen]
    local = [[*result[:1], *[where - first_key for where in result[1:]]] for result in given.arrays]
    terms = statistic_gradients(part, lse, wide, local)
    if sinks is not None and any(statistic.fused_role == "max_score" for statistic in part.see):
        # beside a large sink, the weight of the largest score may underflow
        beside = statistic_gradients(replace(part, sinks=sinks), lse, wide, local)
        terms = replace(terms, includes_zero_weights=beside.includes_zero_weights)
    for statistic, gradient in zip(part.see, wide, strict=True):
        if statistic.fused_role == "entropy" and gradient is not None and sinks is not None:
            # the weights of the keys and of the sink sum to 1, and `weights_sum` counts the keys alone
            terms = replace(terms, weights_sum=terms.weights_sum + gradient * sink_weights(sinks, lse))
    return terms


# -- the transfers of one pass -----------------------------------------------------------------------------------------


class BlockExchange:
    """The blocks that one rank needs. Iteration yields (block, the block's keys of each array, add), own blocks first.

    In a round of distance t, rank r receives a block of rank r − t directly from that rank, and only the keys that its
    own queries see. While rank r computes with one block, the next block arrives. The gradients of the block of round x
    are sent in round x + 2.

    arrays : tensors (..., m_r, width) of this rank's shard, such as key and value
    gradients : for each array a tensor like it, to which the gradients from all ranks are added; None in passes
        without gradients. In a pass with gradients, the rank calls `add` for every block with the block's gradients,
        one tensor for each array. The order of the sum is fixed: own blocks, then one round of transfers after another.
    """

    def __init__(
        self, group: Group, schedule: Schedule, arrays: Sequence[Tensor], gradients: Sequence[Tensor] | None = None
    ) -> None:
        self.group, self.schedule, self.arrays, self.gradients = group, schedule, arrays, gradients
        self._rounds = schedule.rounds(group.rank)
        self._sums: dict[int, list[Tensor]] = {}  # gradients to return, by the number of the round

    def __iter__(self) -> Iterator[tuple[KeyBlock, list[Tensor], Callable[[list[Tensor]], None]]]:
        last = len(self._rounds) + (ROUNDS_UNTIL_RETURN if self.gradients is not None else 0)
        pending = self._start(0)
        for block in self.schedule.own_parts(self.group.rank):
            yield block, [array[..., block.span.rows, :] for array in self.arrays], partial(self._add, block)
        for number in range(last):
            buffers = self._finish(number, pending)
            pending = self._start(number + 1)
            if number < len(self._rounds):
                block_of_round = self._rounds[number].received
                if block_of_round is not None:
                    yield block_of_round, buffers, partial(self._sums.__setitem__, number)

    def _add(self, block: KeyBlock, sums: Sequence[Tensor]) -> None:
        for total, term in zip(self.gradients or (), sums, strict=True):
            total[..., block.span.rows, :] += term

    def _start(self, number: int) -> tuple[Transfers, list[Tensor], list[Tensor]]:
        """Start the transfers of a round. Return them with the buffers of the block and of the returned gradients."""
        transfers = Transfers(self.group, f"blocks of keys of round {number + 1} of {len(self._rounds)}")
        buffers: list[Tensor] = []
        returned: list[Tensor] = []
        if number < len(self._rounds):
            current = self._rounds[number]
            if current.sent is not None:
                for array in self.arrays:
                    transfers.send(array[..., current.sent.span.rows, :].contiguous(), current.target)
            buffers = _receive(transfers, self.arrays, current.received, current.source)
        earlier_number = number - ROUNDS_UNTIL_RETURN
        if self.gradients is not None and 0 <= earlier_number < len(self._rounds):
            earlier = self._rounds[earlier_number]
            for sums in self._sums.pop(earlier_number, ()):
                transfers.send(sums, earlier.source)
            returned = _receive(transfers, self.gradients, earlier.sent, earlier.target)
        transfers.start()
        return transfers, buffers, returned

    def _finish(self, number: int, pending: tuple[Transfers, list[Tensor], list[Tensor]]) -> list[Tensor]:
        """Wait for the transfers of a round, add the gradients that arrived, and return the block that arrived."""
        transfers, buffers, returned = pending
        transfers.wait()
        if returned:
            sent: Any = self._rounds[number - ROUNDS_UNTIL_RETURN].sent
            self._add(sent, returned)
        return buffers


def _receive(transfers: Transfers, arrays: Sequence[Tensor], block: KeyBlock | None, rank: int) -> list[Tensor]:
    """Receive a block of each array from a rank. Return the buffers; [] if the block is None."""
    if block is None:
        return []
    buffers = [x.new_empty((*x.shape[:-2], len(block.span), x.shape[-1])) for x in arrays]
    for buffer in buffers:
        transfers.receive(buffer, rank)
    return buffers
