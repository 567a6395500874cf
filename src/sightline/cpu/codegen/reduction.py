"""The reduction of the lanes of several vectors at once: a vector with one lane for each vector."""

from __future__ import annotations

import operator
from collections.abc import Callable

from .values import Value

Combine = Callable[[Value, Value], Value]


def reduce_within_groups(vectors: list[Value], group_lanes: int, combine: Combine = operator.add) -> list[Value]:
    """Add the lanes of each vector within groups of `group_lanes` lanes; `combine` replaces the addition.

    Every `group_lanes` vectors give one vector, in which lane k of a group is the sum of this group in vector k.
    """
    for _ in range(group_lanes.bit_length() - 1):
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        halves = ([a.deinterleave(b, half, 1, group_lanes) for half in range(2)] for a, b in pairs)
        vectors = [combine(even, odd) for even, odd in halves]
    return vectors


def reduce_across_groups(vectors: list[Value], group_lanes: int, combine: Combine = operator.add) -> Value:
    """Add the groups of `group_lanes` lanes of each vector to one group; `combine` replaces the addition.

    Return one vector with the groups of all vectors, in their order.
    """
    lanes = group_lanes * len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        halves = ([a.deinterleave(b, half, group_lanes, lanes) for half in range(2)] for a, b in pairs)
        vectors = [combine(even, odd) for even, odd in halves]
    return vectors[0]
