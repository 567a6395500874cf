"""Calls of `sightline.torch.distributed` that the ranks of a test run, and the whole results from all shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import sightline
import sightline.torch.distributed as distributed
from distributed_ranks import Ranks
from gradient_checks import check as check_gradients
from sightline.arrays.operations import to_numpy
from sightline.call.kernel import Gradients, Result
from sightline.call.partition import needed_keys
from sightline.call.partition.shards import Shards, divide
from sightline.call.problem import Problem
from sightline.reference.testing import assert_conforms
from sightline.statistics import Reduction, arrays_of
from sightline.torch.distributed import ring
from sightline.torch.distributed.collectives import cut_spans
from statistic_definitions import check as check_statistics
from strategies import Case, to_torch

NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Division:
    """How a call is divided: the number of ranks, layout and method, and the lengths of shards that are not equal.

    query_weights, key_weights : numbers that the lengths of contiguous shards are proportional to
    block_length : the largest number of keys in a block, and of queries in a piece; None for the library's sizes
    """

    size: int = 2
    layout: Any = "contiguous"
    method: Any = "ring"
    query_weights: tuple[int, ...] = ()
    key_weights: tuple[int, ...] = ()
    block_length: int | None = None

    def shards(self, name: str, length: int) -> Shards:
        """Return the division of the positions of query, key or value."""
        weights = self.query_weights if name == "query" else self.key_weights
        if not weights or self.layout != "contiguous":
            return divide(length, self.size, self.layout)
        ends = [length * sum(weights[: k + 1]) // max(sum(weights), 1) for k in range(self.size)]
        return Shards.from_bounds([0, *ends[:-1], length], "contiguous")

    @property
    def options(self) -> dict[str, Any]:
        return {"layout": self.layout, "method": self.method}


@contextmanager
def short_blocks(length: int | None) -> Iterator[None]:
    """Use blocks of at most `length` positions, a multiple of 4, as dropout needs."""
    if length is None:
        yield
        return
    length = max(length // 4 * 4, 4)
    of_queries = mock.patch.multiple(ring, MIN_ROWS=length, QUERY_BYTES=0)
    with of_queries, mock.patch.multiple(needed_keys, MIN_KEYS=length, KEY_BYTES=0):
        yield


def call(group: Any, problem: Problem, division: Division, **options: Any) -> tuple[list[Tensor], Any]:
    """Return this rank's shards of query, key and value, and the answer of the distributed call on them."""
    rank = torch.distributed.get_rank(group)
    whole = {name: to_torch(np.array(getattr(problem, name))) for name in NAMES}
    shards = [cut_spans(x, division.shards(name, x.shape[-2]).ranks[rank], -2) for name, x in whole.items()]
    if options.pop("requires_grad", False):
        shards = [x.requires_grad_() for x in shards]
    sinks = problem.sinks if problem.sinks is None or isinstance(problem.sinks, Tensor) else to_torch(problem.sinks)
    own = {name: getattr(problem, name) for name in ("mask", "score", "scale", "dropout")}
    own |= {"seed": problem.seed if problem.dropout else None, "sinks": sinks, "see": list(problem.see), "group": group}
    with short_blocks(division.block_length):
        return shards, distributed.attention(*shards, **(own | division.options | options))


def solve_shard(group: Any, problem: Problem, division: Division) -> tuple[Any, list[list[Any]]]:
    """Return this rank's output and statistics as NumPy arrays."""
    _, (output, seen) = call(group, problem, division)
    return to_numpy(output), [[to_numpy(array) for array in arrays_of(one)] for one in seen]


def solve_without_heads(group: Any, arrays: list[Any]) -> list[Any]:
    """Return this rank's output and statistics with and without a query axis, for arrays (B, n, d) or (B, H, n, d)."""
    shards = [distributed.shard(to_torch(x), group=group) for x in arrays]
    see = [sightline.entropy(), sightline.received()]
    output, seen = distributed.attention(*shards, mask=sightline.causal(), see=see, group=group)
    return [to_numpy(x) for x in (output, *seen)]


def differentiate_shard(
    group: Any, problem: Problem, division: Division, d_output: Any, d_lse: Any
) -> tuple[list[Any], list[Any], Any]:
    """Return this rank's gradients of query, key and value, and its part of those of the tables and of the sinks."""
    rank = torch.distributed.get_rank(group)
    tables = [_learned(table.array, problem) for table in problem.tables]
    sinks = None if problem.sinks is None else _learned(problem.sinks, problem)
    posed = replace(problem.with_tables(tables), sinks=sinks, see=(sightline.lse(),))
    shards, (output, (lse,)) = call(group, posed, division, requires_grad=True)
    spans = division.shards("query", problem.n).ranks[rank]
    d_output = cut_spans(to_torch(np.array(d_output)), spans, -2)
    d_lse = cut_spans(to_torch(np.array(d_lse)), spans, -1)
    total = (output * d_output).sum() + torch.where(lse.isfinite(), lse * d_lse, 0.0).sum()
    inputs = [*shards, *[x for x in tables if x.requires_grad], *([] if sinks is None else [sinks])]
    found = iter(torch.autograd.grad(total, inputs, allow_unused=True))
    arrays = [to_numpy(next(found)) for _ in NAMES]
    own_tables = [_to_numpy(next(found)) if x.requires_grad else None for x in tables]
    return arrays, own_tables, None if sinks is None else _to_numpy(next(found))


def _learned(array: Any, problem: Problem) -> Tensor:
    """Return a tensor whose gradient, if it has one, is not rounded to fewer bits than the accumulator has."""
    tensor = to_torch(np.array(array))
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, getattr(torch, problem.accumulator))).requires_grad_()


def _to_numpy(array: Any) -> Any:
    return None if array is None else to_numpy(array).astype(np.float64)


# -- whole results, in the process of the test -------------------------------------------------------------------------


def join(parts: list[Any], shards: Shards, axis: int) -> Any:
    """Return the whole array from the parts of all ranks."""
    shape = list(parts[0].shape)
    shape[axis] = shards.length
    whole = np.zeros(shape, parts[0].dtype)
    place = [slice(None)] * whole.ndim
    for spans, part in zip(shards.ranks, parts, strict=True):
        assert part.shape[axis] == sum(map(len, spans))
        for span in spans:
            place[axis] = slice(span.start, span.stop)
            rows = list(place)
            rows[axis] = span.rows
            whole[tuple(place)] = part[tuple(rows)]
    return whole


def is_available(statistic: Any) -> bool:
    """True if ranks can compute a statistic together: not an entry for each pair, nor a maximum with its position."""
    of = statistic.unaveraged
    return not isinstance(of, Reduction) or bool(of.axes and not of.finds)


@dataclass
class Distributed:
    """Solves and differentiates whole problems on ranks: a kernel as the tests of kernels expect it."""

    ranks: Ranks
    division: Division = field(default_factory=Division)

    def run(self, problem: Problem) -> Result:
        """Return the whole result of a problem with NumPy arrays."""
        posed = replace(problem, see=(*problem.see, sightline.lse()))
        answers = self.ranks.run(solve_shard, posed, self.division, size=self.division.size)
        queries, keys = (self.division.shards(name, x) for name, x in (("query", problem.n), ("key", problem.m)))
        output = join([output for output, _ in answers], queries, -2)
        seen = []
        for k, statistic in enumerate(posed.see):
            arrays = [own[k] for _, own in answers]
            axes = getattr(statistic.unaveraged, "axes", "j")
            if axes == "ij":
                assert all(np.array_equal(one[0], arrays[0][0], equal_nan=True) for one in arrays)
                found = arrays[0]
            else:
                axis, shards = (-2 if statistic.name == "top_k" else -1), (keys if axes == "i" else queries)
                found = [join([one[at] for one in arrays], shards, axis) for at in range(len(arrays[0]))]
            seen.append(statistic.build_result(found))
        output = output.astype(problem.query.dtype)
        return Result(output, seen[-1].astype(np.float64), tuple(seen[:-1]))

    def differentiate(self, problem: Problem, d_output: Any, d_lse: Any, _: Any = None) -> Gradients:
        """Return the whole gradients; those of tables and sinks are summed over the ranks."""
        answers = self.ranks.run(differentiate_shard, problem, self.division, d_output, d_lse, size=self.division.size)
        arrays = [
            join([own[0][k] for own in answers], self.division.shards(name, getattr(problem, name).shape[-2]), -2)
            for k, name in enumerate(NAMES)
        ]
        arrays = [array.astype(problem.query.dtype) for array in arrays]
        parts = list(zip(*[own[1] for own in answers], strict=True))
        tables = [None if own[0] is None else np.sum(own, axis=0) for own in parts]
        sinks = None if problem.sinks is None else np.sum([own[2] for own in answers], axis=0)
        return Gradients(*arrays, tables=tuple(tables), sinks=sinks)

    def check(self, case: Case, see: list[Any]) -> None:
        """Compare output and gradients of a case, and these statistics of it, with their definitions."""
        assert_conforms(self.run, case.make_problem())
        check_statistics(self.run, case.make_problem(see=see))
        check_gradients(case, differentiate=self.differentiate)
