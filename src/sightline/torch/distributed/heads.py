"""Attention in which heads are exchanged for positions: every rank computes some heads of the whole sequence.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from ...api import kernels as dispatch
from ...call.problem import Problem
from ...partition.parts import part_of
from ...partition.shards import Shards, divide_heads
from ...statistics import arrays_of
from ..autograd import attach_to_graph
from .collectives import cut_spans, gather, join_shards, scatter
from .group import Group


def attention_by_heads(
    group: Group, problem: Problem, shards: Sequence[Shards], local: Sequence[Tensor], threads: int | None
) -> tuple[Tensor, list[Sequence[Tensor]]]:
    """Return the output of this rank's queries, and the arrays of each statistic.

    Rank r computes the key heads from ⌊r G / R⌋ to before ⌊(r + 1) G / R⌋, with their query heads.
    """
    queries, keys = shards
    axis = len(problem.batch_shape)
    key_heads = divide_heads(problem.G, group.size)
    query_heads = [problem.group * first for first in key_heads]
    of_queries, of_keys = _Exchange(group, axis, query_heads, queries), _Exchange(group, axis, key_heads, keys)
    whole = _move([of_queries, of_keys, of_keys], local, to_heads=True)
    first, last = query_heads[group.rank], query_heads[group.rank + 1]
    part = part_of(problem, *whole, first_head=first, see=problem.see)
    part = replace(part, sinks=None if problem.sinks is None else problem.sinks[first:last])
    plan = dispatch.make_plan(part)
    with torch.no_grad():
        result = plan.kernel.run(part, threads)
    result = attach_to_graph(part, plan, None, threads, result)
    answers = [arrays_of(answer) for answer in result.seen]
    places: dict[str, _Exchange | _Gather] = {
        "i": _Exchange(group, axis, query_heads, keys),
        "ij": _Gather(group, axis, Shards.from_bounds(query_heads, "contiguous")),
    }
    moves: list[_Exchange | _Gather] = [of_queries]
    for statistic, own in zip(problem.see, answers, strict=True):
        moves += [places.get(getattr(statistic, "axes", "j"), of_queries)] * len(own)
    moved = iter(_move(moves, [result.output, *chain.from_iterable(answers)], to_heads=False))
    return next(moved), [list(islice(moved, len(own))) for own in answers]


@dataclass(frozen=True)
class _Exchange:
    """The exchange of (..., all H heads, own positions, ...) for (..., own heads, all n positions, ...), and back.

    The heads are on `axis` and the positions on the next one. Rank r owns the heads from `heads[r]` to before
    `heads[r + 1]`.
    """

    group: Group
    axis: int
    heads: Sequence[int]
    shards: Shards

    def to_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of all positions."""
        first, last = self.heads[self.group.rank], self.heads[self.group.rank + 1]
        parts = [x.narrow(self.axis, begin, end - begin).contiguous() for begin, end in pairwise(self.heads)]
        shapes = [(last - first, length) for length in self.shards.lengths]
        return join_shards(self._send(x, parts, shapes), self.shards, self.axis + 1)

    def to_positions(self, x: Tensor) -> Tensor:
        """Return all heads of this rank's positions."""
        parts = [cut_spans(x, spans, self.axis + 1) for spans in self.shards.ranks]
        shapes = [(end - begin, self.shards.lengths[self.group.rank]) for begin, end in pairwise(self.heads)]
        return torch.cat(self._send(x, parts, shapes), dim=self.axis)

    def _send(self, x: Tensor, parts: list[Tensor], shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Send `parts[r]` to rank r, and return the tensor that each rank sent.

        `shapes` has the numbers of heads and of positions of each tensor that arrives.
        """
        before, after = x.shape[: self.axis], x.shape[self.axis + 2 :]
        return self.group.send_to_all(parts, [x.new_empty((*before, *shape, *after)) for shape in shapes], "heads")


@dataclass(frozen=True)
class _Gather:
    """Gathers (..., own heads, ...) as (..., all H heads, ...) on every rank; in reverse, sums over the ranks."""

    group: Group
    axis: int
    heads: Shards

    def to_heads(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of their tensors, only for this rank's heads."""
        return scatter(x, self.group, self.heads, self.axis)

    def to_positions(self, x: Tensor) -> Tensor:
        """Return (..., all H heads, ...) from the own heads of each rank."""
        return gather(x, self.group, self.heads, self.axis)


def _move(moves: Sequence[_Exchange | _Gather], arrays: Sequence[Tensor], *, to_heads: bool) -> tuple[Tensor, ...]:
    """Return each tensor moved to the heads of this rank, or to its positions."""
    found: tuple[Tensor, ...] = _Move.apply(tuple(moves), to_heads, *arrays)  # type: ignore[no-untyped-call]
    return found


class _Move(torch.autograd.Function):
    """Exchanges heads for positions, for all tensors of a call. The gradient is the exchange in the other direction.

    All ranks must make the same transfers, but their losses may read different results. So one node of the graph has
    all tensors. Before the backward pass the ranks tell each other which results have gradients. Only these are sent.
    """

    @staticmethod
    def forward(
        ctx: Any, moves: tuple[_Exchange | _Gather, ...], to_heads: bool, *arrays: Tensor
    ) -> tuple[Tensor, ...]:
        found = [move.to_heads(x) if to_heads else move.to_positions(x) for move, x in zip(moves, arrays, strict=True)]
        ctx.moves, ctx.to_heads = moves, to_heads
        ctx.results = [x.new_empty(()).expand(x.shape) for x in found]  # shapes, dtypes and devices, without memory
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x in found if not x.is_floating_point()])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        flags = torch.tensor([one is not None for one in gradients], dtype=torch.int64, device=ctx.results[0].device)
        of_all = ctx.moves[0].group.exchange(flags, "which results have gradients")
        is_wanted = torch.stack(of_all).any(dim=0).tolist()
        given = [torch.zeros_like(x) if one is None else one for one, x in zip(gradients, ctx.results, strict=True)]
        wanted = list(compress(given, is_wanted))
        moved = iter(_move(list(compress(ctx.moves, is_wanted)), wanted, to_heads=not ctx.to_heads))
        return None, None, *[next(moved) if one else None for one in is_wanted]
