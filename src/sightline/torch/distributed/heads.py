"""Attention in which heads are exchanged for positions: every rank computes some heads of the whole sequence.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ...errors import ParameterError
from ...problem import Problem
from ...sharding import Shards, part_of
from ...statistics import Mean, arrays_of, unwrap_mean
from ..autograd import attach_to_graph
from .group import Group
from .shard import gather, scatter, send_to_all

__all__ = ["attention_by_heads"]


def attention_by_heads(
    group: Group, problem: Problem, shards: Sequence[Shards], local: Sequence[Tensor], threads: int | None
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the output of this rank's queries, and the arrays of each statistic.

    Rank r computes the key heads from ⌊r G / R⌋ to before ⌊(r + 1) G / R⌋, with their query heads.
    """
    if group.size > problem.G:
        raise ParameterError(
            f'method="heads" with {problem.G} key heads on {group.size} ranks',
            "at least as many key heads as ranks",
            'method="ring"',
        )
    queries, keys = shards
    axis = len(problem.batch_shape)
    key_heads = [problem.G * rank // group.size for rank in range(group.size + 1)]
    query_heads = [problem.group * first for first in key_heads]
    layouts = [(query_heads, queries), (key_heads, keys), (key_heads, keys)]
    exchanges = [_Exchange(group, axis, *own) for own in layouts]
    whole: list[Tensor] = [
        _ToHeads.apply(x, one)  # type: ignore[no-untyped-call]
        for x, one in zip(local, exchanges, strict=True)
    ]
    first, last = query_heads[group.rank], query_heads[group.rank + 1]
    computed = tuple([unwrap_mean(statistic) for statistic in problem.see])
    part = part_of(problem, *whole, first_head=first, see=computed)
    part = replace(part, sinks=None if problem.sinks is None else problem.sinks[first:last])
    plan = dispatch.make_plan(part)
    result = attach_to_graph(part, plan, None, threads, dispatch.solve(part, None, threads))
    answers = [arrays_of(answer) for answer in result.seen]
    moves: list[_Exchange | _Gather] = [exchanges[0]]
    for statistic, own in zip(computed, answers, strict=True):
        moves += [_result_move(statistic.name, group, axis, query_heads, shards)] * len(own)
    arrays = [result.output, *chain.from_iterable(answers)]
    output, *rest = _ToPositions.apply(group, tuple(moves), *arrays)  # type: ignore[no-untyped-call]
    remaining, seen = iter(rest), []
    for statistic, own in zip(problem.see, answers, strict=True):
        found = list(islice(remaining, len(own)))
        seen.append([statistic.average(array, problem) for array in found] if isinstance(statistic, Mean) else found)
    return output, seen


def _result_move(
    name: str, group: Group, axis: int, heads: Sequence[int], shards: Sequence[Shards]
) -> _Exchange | _Gather:
    """Return what gives a rank all heads of a statistic: of its queries or keys, or the whole array of pooled."""
    if name == "pooled":
        return _Gather(group, axis, Shards.from_lengths([last - first for first, last in pairwise(heads)]))
    return _Exchange(group, axis, heads, shards[name == "received"])


@dataclass(frozen=True)
class _Exchange:
    """The exchange of (..., all H heads, own positions, ...) for (..., own heads, all n positions, ...), and back.

    The heads are on `axis` and the positions on the next one. Rank r owns the heads from `heads[r]` to before
    `heads[r + 1]`. Both directions only move entries, so each is the gradient of the other one.
    """

    group: Group
    axis: int
    heads: Sequence[int]
    shards: Shards

    def to_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of all positions."""
        axis, bounds = self.axis, list(pairwise(self.heads))
        first, last = bounds[self.group.rank]
        before, after = x.shape[:axis], x.shape[axis + 2 :]
        parts = [x.narrow(axis, begin, end - begin).contiguous() for begin, end in bounds]
        buffers = [x.new_empty((*before, last - first, length, *after)) for length in self.shards.lengths]
        found = send_to_all(self.group, parts, buffers, "heads")
        whole = x.new_empty((*before, last - first, self.shards.length, *after))
        for spans, part in zip(self.shards.ranks, found, strict=True):
            for span in spans:
                whole.narrow(axis + 1, span.start, len(span)).copy_(part.narrow(axis + 1, span.row, len(span)))
        return whole

    def to_positions(self, x: Tensor) -> Tensor:
        """Return all heads of this rank's positions."""
        axis, own_length = self.axis, self.shards.lengths[self.group.rank]
        before, after = x.shape[:axis], x.shape[axis + 2 :]
        parts = [
            torch.cat([x.narrow(axis + 1, span.start, len(span)) for span in spans], dim=axis + 1).contiguous()
            for spans in self.shards.ranks
        ]
        buffers = [x.new_empty((*before, end - begin, own_length, *after)) for begin, end in pairwise(self.heads)]
        return torch.cat(send_to_all(self.group, parts, buffers, "heads"), dim=axis)

    differentiate = to_heads


@dataclass(frozen=True)
class _Gather:
    """The gathering of (..., own heads, ...) as (..., all H heads, ...) on every rank."""

    group: Group
    axis: int
    heads: Shards

    def to_positions(self, x: Tensor) -> Tensor:
        return gather(x, self.group, self.heads, self.axis)

    def differentiate(self, gradient: Tensor) -> Tensor:
        return scatter(gradient, self.group, self.heads, self.axis)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_heads(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.exchange.to_positions(gradient), None


class _ToPositions(torch.autograd.Function):
    """All results of a call. One node has all of them, so that ranks whose losses read different results agree.

    The ranks first tell each other which results have gradients. The others have none on any rank.
    """

    @staticmethod
    def forward(ctx: Any, group: Group, moves: tuple[_Exchange | _Gather, ...], *arrays: Tensor) -> tuple[Tensor, ...]:
        found = tuple([move.to_positions(x) for move, x in zip(moves, arrays, strict=True)])
        ctx.group, ctx.moves = group, moves
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in found]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x in found if not x.is_floating_point()])
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        device = ctx.kinds[0][2]
        own = torch.tensor([one is not None for one in gradients], dtype=torch.int64, device=device)
        is_wanted = torch.stack(ctx.group.exchange(own, "which results have gradients")).any(dim=0).tolist()
        found: list[Tensor | None] = []
        for wanted, move, one, (shape, dtype, place) in zip(is_wanted, ctx.moves, gradients, ctx.kinds, strict=True):
            given = torch.zeros(shape, dtype=dtype, device=place) if one is None else one
            found.append(move.differentiate(given) if wanted else None)
        return None, None, *found
