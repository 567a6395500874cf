"""Ring attention in torch's autograd graph: one `Function` for output, lse and the statistics of each query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...arrays.operations import itemsize
from ...call.problem import Problem
from ...call.spec import split_arrays
from ...errors import ParameterError
from ...partition.schedule import find_schedule, key_block_length
from ...partition.shards import Shards
from ...statistics import Lse, Reduction, Statistic
from ..autograd import check_versions, table_versions, tables_of, trainable_inputs
from ..operator import autocast_disabled
from .collectives import cut_spans
from .group import Group
from .ring import ResultGradients, Ring, Saved

QUERY_BYTES, MIN_ROWS = 4 << 20, 256  # the approximate size of a piece of the queries, and its fewest queries


def attention_by_ring(
    group: Group, problem: Problem, shards: list[Shards], local: list[Tensor], threads: int | None
) -> tuple[Tensor, list[Sequence[Tensor]]]:
    """Return the output of this rank's queries, and the arrays of each statistic."""
    per_query = tuple([one for one in problem.see if one.is_mergeable and not isinstance(one, Lse)])
    over_queries = tuple([one for one in problem.see if not one.is_mergeable])
    ring = _make_ring(group, replace(problem, see=per_query), shards, threads)
    wanted_tables = trainable_inputs(problem)[1]
    tables = [problem.tables[index].array for index in wanted_tables]
    inputs = [*local, *([] if problem.sinks is None else [problem.sinks]), *tables]
    _check_gradients(over_queries, inputs)
    output, lse, *arrays = _RingAttention.apply(ring, wanted_tables, *inputs)  # type: ignore[no-untyped-call]
    rounded = [array.to(ring.dtype) if array.is_floating_point() else array for array in arrays]
    found: dict[Statistic, Sequence[Tensor]] = dict(zip(per_query, split_arrays(per_query, rounded, 0), strict=True))
    found |= {one: [lse.to(ring.dtype)] for one in problem.see if isinstance(one, Lse)}
    found |= zip(over_queries, [[x] for x in _statistics_of_pairs(ring, local, lse, over_queries)], strict=True)
    return output, [found[statistic] for statistic in problem.see]


def _make_ring(group: Group, problem: Problem, shards: list[Shards], threads: int | None) -> Ring:
    queries, keys = shards
    B, H, _, _ = problem.extent
    row_bytes = max(1, B * H * max(problem.d_k, problem.d_v) * itemsize(problem.accumulator))
    pieces = queries.cut(max(MIN_ROWS, QUERY_BYTES // row_bytes // 64 * 64))
    schedule = find_schedule(problem.mask, problem.extent, pieces, keys, key_block_length(problem))
    return Ring(group, problem, schedule, threads)


def _check_gradients(over_queries: tuple[Statistic, ...], inputs: list[Tensor]) -> None:
    """Raise ParameterError if statistics without gradients are asked for with inputs that require gradients."""
    if over_queries and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ParameterError(
            f"see={list(over_queries)} with inputs that require gradients",
            'other statistics, or method="heads"',
            "request them in a second call under torch.no_grad()",
        )


def _statistics_of_pairs(ring: Ring, local: list[Tensor], lse: Tensor, see: tuple[Statistic, ...]) -> list[Tensor]:
    """Return the array of each statistic, which all ranks compute together: this rank's queries or keys of a sum."""
    if not see:
        return []
    schedule, rank = ring.schedule, ring.group.rank
    places = {"j": schedule.queries.ranks[rank], "i": schedule.keys.ranks[rank]}
    return [
        cut_spans(x, places[statistic.axes], -1) if isinstance(statistic, Reduction) and statistic.axes in places else x
        for statistic, x in zip(see, ring.statistics_of_pairs(local[0], local[1], lse.double(), see), strict=True)
    ]


class _RingAttention(torch.autograd.Function):
    """Output, lse in float64, and the arrays of the per-query statistics except lse, in torch's graph."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, wanted_tables: tuple[int, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *rest = inputs
        sinks = None if ring.problem.sinks is None else rest.pop(0)
        results = ring.forward(query, key, value, sinks)
        output = results.output.to(query.dtype)
        arrays = [array for own in results.seen for array in own]
        ctx.ring, ctx.wanted_tables = ring, wanted_tables
        ctx.versions = table_versions(tables_of(ring.problem))
        ctx.save_for_backward(*inputs, output, results.shift, *arrays)
        ctx.num_inputs = len(inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[array for array in arrays if not array.is_floating_point()])
        return output, results.shift, *arrays

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Any, ...]:
        check_versions(ctx.versions, tables_of(ctx.ring.problem))
        with torch.no_grad(), autocast_disabled(ctx.saved_tensors[0]):
            gradients = _RingAttention.differentiate(ctx, *d_results)
        if torch.is_grad_enabled():  # with create_graph=True
            sources = [*ctx.saved_tensors[: ctx.num_inputs], *[x for x in d_results if x is not None]]
            gradients = _NoSecondDerivative.apply(len(gradients), *gradients, *sources)  # type: ignore[no-untyped-call]
        return None, None, *gradients

    @staticmethod
    def differentiate(
        ctx: Any, d_output: Tensor | None, d_lse: Tensor | None, *d_arrays: Tensor | None
    ) -> list[Tensor]:
        """Return the gradients of the inputs."""
        ring, tensors = ctx.ring, ctx.saved_tensors
        inputs, (output, lse, *arrays) = tensors[: ctx.num_inputs], tensors[ctx.num_inputs :]
        query, key, value, *rest = inputs
        sinks = None if ring.problem.sinks is None else rest.pop(0)
        saved = Saved(query, key, value, sinks, output, lse, split_arrays(ring.problem.see, arrays, 0))
        d_seen = [own[0] for own in split_arrays(ring.problem.see, d_arrays, 0)]
        d_output = torch.zeros_like(output) if d_output is None else d_output.contiguous()
        found = ring.backward(saved, ResultGradients(d_output, d_lse, d_seen), ctx.wanted_tables)
        gradients = [found.query, found.key, found.value, *([] if sinks is None else [found.sinks])]
        tables = [found.tables.get(index) for index in ctx.wanted_tables]
        gradients += [torch.zeros_like(x) if one is None else one for x, one in zip(rest, tables, strict=True)]
        return [one.to(x.dtype) for one, x in zip(gradients, inputs, strict=True)]


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients whose own derivatives raise an error. Otherwise torch would ignore a penalty on gradients silently."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([gradient.view_as(gradient) for gradient in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ParameterError(
            'a second derivative of distributed.attention with method="ring"',
            "first derivatives",
            'method="heads", or gradients without create_graph=True',
        )
