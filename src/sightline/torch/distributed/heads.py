"""Attention in which heads are exchanged for positions: every rank computes some heads of the whole sequence.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise

import torch
from torch import Tensor

from ...api import kernels
from ...call.partition.parts import part_of
from ...call.partition.shards import Shards, divide_heads
from ...call.problem import Problem
from ...statistics import arrays_of
from ..autograd import attach_to_graph
from .collectives import LinearMap, apply_maps, cut_spans, gathering, join_shards
from .group import Group


def attention_by_heads(
    group: Group, problem: Problem, shards: Sequence[Shards], local: Sequence[Tensor]
) -> tuple[Tensor, list[Sequence[Tensor]]]:
    """Return the output of this rank's queries, and the arrays of each statistic.

    Rank r computes the key heads from ⌊r G / R⌋ to before ⌊(r + 1) G / R⌋, with their query heads.
    """
    queries, keys = shards
    axis = len(problem.batch_shape)
    key_heads = divide_heads(problem.G, group.size)
    query_heads = [problem.group * first for first in key_heads]
    of_queries, of_keys = _to_heads(group, axis, query_heads, queries), _to_heads(group, axis, key_heads, keys)
    whole = apply_maps(group, [of_queries, of_keys, of_keys], local)
    first, last = query_heads[group.rank], query_heads[group.rank + 1]
    part = part_of(problem, *whole, first_head=first, see=problem.see)
    part = replace(part, sinks=None if problem.sinks is None else problem.sinks[first:last])
    plan = kernels.make_plan(part)
    with torch.no_grad():
        result = plan.kernel.run(part)
    result = attach_to_graph(part, plan, result)
    answers = [arrays_of(answer) for answer in result.seen]
    maps = {
        "i": _to_heads(group, axis, query_heads, keys).transposed,
        "ij": gathering(group, Shards.from_bounds(query_heads, "contiguous"), axis),
    }
    chosen = [of_queries.transposed]
    for statistic, result_arrays in zip(problem.see, answers, strict=True):
        chosen += [maps.get(statistic.axes, of_queries.transposed)] * len(result_arrays)
    results = iter(apply_maps(group, chosen, [result.output, *chain.from_iterable(answers)]))
    return next(results), [list(islice(results, len(result_arrays))) for result_arrays in answers]


def _to_heads(group: Group, axis: int, heads: Sequence[int], shards: Shards) -> LinearMap:
    """Return the map from (..., all H heads, own positions, ...) to (..., own heads, all n positions, ...).

    The heads are on `axis` and the positions on the next one. Rank r owns the heads from `heads[r]` to before
    `heads[r + 1]`.
    """
    counts, lengths = [end - begin for begin, end in pairwise(heads)], shards.lengths

    def send(x: Tensor, parts: list[Tensor], shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Send `parts[r]` to rank r. Return what each rank sent: as many heads and positions as `shapes` has."""
        before, after = x.shape[:axis], x.shape[axis + 2 :]
        return group.send_to_all(parts, [x.new_empty((*before, *shape, *after)) for shape in shapes], "heads")

    def to_heads(x: Tensor) -> Tensor:
        parts = [part.contiguous() for part in torch.split(x, counts, axis)]
        return join_shards(send(x, parts, [(counts[group.rank], length) for length in lengths]), shards, axis + 1)

    def to_positions(x: Tensor) -> Tensor:
        parts = [cut_spans(x, spans, axis + 1) for spans in shards.ranks]
        return torch.cat(send(x, parts, [(count, lengths[group.rank]) for count in counts]), dim=axis)

    return LinearMap(to_heads, to_positions)
