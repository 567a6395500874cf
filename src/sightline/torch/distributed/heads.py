"""Attention in which heads are exchanged for positions: every rank computes some heads of the whole sequence.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ...problem import Problem
from ...sharding import Shards, divide_heads, part_of
from ...statistics import arrays_of
from ..autograd import attach_to_graph
from .group import Group
from .shard import cut_spans, join_shards, send_to_all, unshard

__all__ = ["attention_by_heads"]


def attention_by_heads(
    group: Group, problem: Problem, shards: Sequence[Shards], local: Sequence[Tensor], threads: int | None
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the output of this rank's queries, and the arrays of each statistic.

    Rank r computes the key heads from ⌊r G / R⌋ to before ⌊(r + 1) G / R⌋, with their query heads.
    """
    queries, keys = shards
    axis = len(problem.batch_shape)
    key_heads = divide_heads(problem.G, group.size)
    query_heads = [problem.group * first for first in key_heads]
    layouts = [(query_heads, queries), (key_heads, keys), (key_heads, keys)]
    whole = [_exchange(x, group, axis, *own, to_heads=True) for x, own in zip(local, layouts, strict=True)]
    first, last = query_heads[group.rank], query_heads[group.rank + 1]
    part = part_of(problem, *whole, first_head=first, see=problem.see)
    part = replace(part, sinks=None if problem.sinks is None else problem.sinks[first:last])
    plan = dispatch.make_plan(part)
    result = attach_to_graph(part, plan, None, threads, dispatch.solve(part, None, threads))
    seen = [
        [_gather(array, statistic.name, group, axis, query_heads, shards) for array in arrays_of(own)]
        for statistic, own in zip(problem.see, result.seen, strict=True)
    ]
    return _exchange(result.output, group, axis, query_heads, queries, to_heads=False), seen


def _gather(
    array: Tensor, name: str, group: Group, axis: int, heads: Sequence[int], shards: Sequence[Shards]
) -> Tensor:
    """Return all heads of a statistic's array: of this rank's queries or keys, or the whole array of pooled."""
    if name == "pooled":
        return unshard(array.contiguous(), group=group.handle, axis=axis)
    return _exchange(array, group, axis, heads, shards[name == "received"], to_heads=False)


def _exchange(x: Tensor, group: Group, axis: int, heads: Sequence[int], shards: Shards, *, to_heads: bool) -> Tensor:
    exchanged: Tensor = _Exchange.apply(x, group, axis, tuple(heads), shards, to_heads)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """The exchange of (..., all H heads, own positions, ...) for (..., own heads, all n positions, ...), or back.

    The heads are on `axis` and the positions on the next one. Rank r owns the heads from `heads[r]` to before
    `heads[r + 1]`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, axis: int, heads: tuple[int, ...], shards: Shards, to_heads: bool
    ) -> Tensor:
        ctx.arguments = group, axis, heads, shards, to_heads
        bounds = list(pairwise(heads))
        if to_heads:
            parts = [x.narrow(axis, first, last - first).contiguous() for first, last in bounds]
            first, last = bounds[group.rank]
            shapes = [(last - first, length) for length in shards.lengths]
        else:
            parts = [cut_spans(x, spans, axis + 1) for spans in shards.ranks]
            shapes = [(last - first, shards.lengths[group.rank]) for first, last in bounds]
        buffers = [x.new_empty((*x.shape[:axis], *shape, *x.shape[axis + 2 :])) for shape in shapes]
        found = send_to_all(group, parts, buffers, "heads")
        return join_shards(found, shards, axis + 1) if to_heads else torch.cat(found, dim=axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        group, axis, heads, shards, to_heads = ctx.arguments
        back = _exchange(gradient.contiguous(), group, axis, heads, shards, to_heads=not to_heads)
        return back, None, None, None, None, None
