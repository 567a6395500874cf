"""The backward kernel's call: which parts of the keys are worked on apart, and the sums of what they found."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays import convert, empty, layout, namespace, plain, resolve, to_numpy
from ...formula.expression import SYMBOLS, Lookup, walk
from ...kernel import Gradients
from ...problem import Problem
from ...statistics import Mass, Slopes
from ..codegen.abi import BACKWARD, pack
from ..kernels.backward import Backward
from ..kernels.block import KEYS
from ..runtime.machine import Machine
from ..runtime.processor import Processor
from ..runtime.thread_team import count
from .arguments import LARGEST_LSE, Inputs, block_of, fitted, kernel_of, operand, structure_of
from .forward import forward
from .statistics import Riders

__all__ = ["gradients"]

ITEMS = 16  # pieces of work wanted, whatever the number of threads: their sums must not depend on it


@dataclass(frozen=True)
class Gain:
    """A lookup of the score whose table gains a gradient.

    `owned`: every entry belongs to one key, as in t[h, i, j], so that one part of the keys writes it alone. `headed`:
    it belongs to one query head.
    """

    place: int  # in the score's `walk`
    slot: int  # of its table in Problem.tables
    owned: bool
    headed: bool


@dataclass(frozen=True)
class Split:
    """How the work is cut: parts of the keys, their blocks, and key heads and batches apart or one after another."""

    parts: int
    chunk: int
    heads_apart: int
    batches_apart: int

    @classmethod
    def of(cls, problem: Problem, gains: list[Gain]) -> Split:
        heads = problem.G if all(gain.headed for gain in gains) else 1
        batches = 1 if gains else problem.B
        blocks = -(-problem.m // KEYS)
        chunk = -(-blocks // min(-(-ITEMS // (heads * batches)), blocks))
        return cls(-(-blocks // chunk), chunk, heads, batches)


def gradients(
    problem: Problem,
    d_output: Any,
    d_lse: Any,
    saved: tuple[Any, Any],
    wanted: Collection[int],
    threads: int | None,
    slopes: Slopes,
    processor: Processor,
) -> Gradients | None:
    """Gradients of Σ d_output ∘ output + Σ d_lse ∘ lse; None where `streaming` must sort it out: one that is NaN or ∞,
    or scores whose last place is more than 1.

    Parameters
    ----------
    d_output, d_lse : shapes of output and lse; d_lse None for 0
    saved : (output, lse) of the forward pass
    wanted : slots of the tables in `Problem.tables` whose gradients are asked for
    slopes : what statistics add to the gradients of weights, scores and lse
    """
    if _huge(saved[1], problem.accumulator):
        return None
    d_lse = _of_rows(problem, d_lse, slopes, threads, processor)
    roles = {"weights": slopes.weights, "scores": slopes.scores}
    more = {role: formula for role, formula in roles.items() if formula is not None}
    gains = list(_gains(problem, wanted))
    split = Split.of(problem, gains)
    xp, query = namespace(problem.query), problem.query
    machine = fitted(processor.machine, problem)
    block = block_of(problem.dtype, machine)
    inputs = Inputs(problem, block, tuple(more.values()))
    d_output = _with_rows(plain(xp.astype(d_output, query.dtype)))
    lead, rows = problem.lead, (*problem.lead, problem.H, problem.n)
    sums = problem.accumulator
    found = {
        name: _zeros((*lead, problem.G, problem.m, _whole(width, sums, processor.machine)), sums, query)
        for name, width in (("d_key", problem.d_k), ("d_value", problem.d_v))
    }
    found["d_query"] = _zeros((split.parts, *rows, problem.d_k), sums, query)
    tables = [_table_sums(problem, gain, split) for gain in gains]
    taint, query_blocks = np.zeros(1, np.int64), -(-problem.n // block)
    structure = structure_of(
        "backward",
        problem,
        inputs,
        vectors=machine.vectors,
        gaining=tuple((gain.place, gain.slot, gain.owned) for gain in gains),
        roles=tuple(more),
    )
    fields = inputs.fields(structure) | operand("d_output", d_output, inputs.kept)
    fields |= operand("output", _with_rows(plain(saved[0])), inputs.kept)
    fields |= {
        "items": split.parts * split.heads_apart * split.batches_apart,
        "query_blocks": query_blocks,
        "lse": inputs.address(_rows(saved[1], rows)),
        "d_lse": inputs.address(np.zeros(rows) if d_lse is None else _rows(d_lse, rows)),
        "scale": problem.scale,
        "taint": inputs.address(taint),
        "batches": problem.B,
        "chunks": split.parts,
        "chunk": split.chunk,
        "heads_apart": split.heads_apart,
        "batches_apart": split.batches_apart,
    }
    fields |= {name: layout(array)[0] for name, array in found.items()}
    shares = [
        (t.ctypes.data, (0 if gain.owned else t.strides[0],), (0,)) for t, gain in zip(tables, gains, strict=True)
    ]
    words = pack(BACKWARD, fields, [*inputs.table_words(), *shares])
    kernel = kernel_of(structure, inputs, Backward, processor)
    kept = (*inputs.kept, *found.values(), *tables, problem)
    processor.call(kernel, words, min(count(threads), fields["items"]), kept)
    if taint[0]:
        return None

    def narrow(array: Any, width: int) -> Any:
        return xp.astype(array[..., :width], query.dtype, copy=array.shape[-1] != width)

    return Gradients(
        query=narrow(found["d_query"][0] if split.parts == 1 else _in_order(found["d_query"]), problem.d_k),
        key=narrow(found["d_key"], problem.d_k),
        value=narrow(found["d_value"], problem.d_v),
        tables=_of_tables(problem, gains, tables),
        sinks=None if problem.sinks is None else _of_sinks(problem, xp, d_output, d_lse, saved),
    )


def _of_rows(problem: Problem, d_lse: Any, slopes: Slopes, threads: int | None, processor: Processor) -> Any:
    """d_lse with what statistics add to it, less Σⱼ P ∘ their slopes: the row sum of P ∘ dP takes it so; None for 0."""
    parts = [part for part in (d_lse, slopes.lse) if part is not None]
    if slopes.weights is not None:
        one = replace(problem, value=problem.value[..., :1]).asking(Mass(slopes.weights))
        riders, lse = Riders(one), np.empty((*problem.lead, problem.H, problem.n))
        forward(one, empty((*lse.shape, one.d_v), one.dtype, one.query), lse, threads, processor, riders)
        parts.append(convert(-riders.arrays[0].astype(np.float64), problem.query))
    return functools.reduce(operator.add, parts) if parts else None


def _huge(lse: Any, accumulator: str) -> bool:
    """Whether weights from exp(score − lse) would not add up to 1, as scores and lse are rounded apart."""
    sizes = np.abs(to_numpy(lse))
    return bool(np.max(sizes, where=np.isfinite(sizes), initial=0.0) > LARGEST_LSE[accumulator])


def _gains(problem: Problem, wanted: Collection[int]) -> Iterator[Gain]:
    if problem.score is None:
        return
    slots = {id(table): slot for slot, table in enumerate(problem.tables)}
    lookups = [
        (place, node, slots[id(node.table)])
        for place, node in enumerate(walk(problem.score))
        if isinstance(node, Lookup) and node.kind == "float" and slots[id(node.table)] in wanted
    ]

    def belongs(slot: int, name: str, length: int) -> bool:
        """Whether every lookup of the table has the symbol itself as index of one and the same axis.

        A shorter axis is read past its end at hidden pairs, which are sent to its last entry: that one is everybody's.
        """
        found = [
            {
                axis
                for axis, argument in enumerate(node.arguments)
                if argument is SYMBOLS[name] and node.table.shape[axis] >= length
            }
            for _, node, other in lookups
            if other == slot
        ]
        return bool(set.intersection(*found))

    for place, _, slot in lookups:
        yield Gain(place, slot, belongs(slot, "j", problem.m), belongs(slot, "h", problem.H))


def _whole(width: int, dtype: str, machine: Machine) -> int:
    """The width rounded up to whole vectors."""
    lanes = machine.width // (8 if dtype == "float64" else 4)
    return -(-width // lanes) * lanes


def _zeros(shape: tuple[int, ...], name: str, like: Any) -> Any:
    found = empty(shape, name, like)
    found[...] = 0
    return found


def _table_sums(problem: Problem, gain: Gain, split: Split) -> Any:
    """Where a table's gradient is summed: in place where one part owns each entry, else a float64 sum for each part."""
    shape = tuple(problem.tables[gain.slot].shape)
    return np.zeros(shape, problem.accumulator) if gain.owned else np.zeros((split.parts, *shape), np.float64)


def _of_tables(problem: Problem, gains: list[Gain], sums: list[Any]) -> tuple[Any, ...]:
    """For each table of the problem its gradient, or None."""
    found: list[Any] = [None] * len(problem.tables)
    for gain, array in zip(gains, sums, strict=True):
        whole = array if gain.owned else array.sum(axis=0)
        found[gain.slot] = whole if found[gain.slot] is None else found[gain.slot] + whole
    return tuple(
        None if array is None else _like(array, table.array) for array, table in zip(found, problem.tables, strict=True)
    )


def _like(array: Any, other: Any) -> Any:
    """A NumPy array in the other's library and dtype."""
    return namespace(other).astype(convert(array, other), other.dtype, copy=False)


def _with_rows(array: Any) -> Any:
    """The array with its columns next to each other: a copy where a gradient was expanded, as that of a sum is."""
    if layout(array)[1][-1] == array.itemsize:
        return array
    return array.contiguous() if hasattr(array, "contiguous") else np.ascontiguousarray(array)


def _rows(array: Any, shape: tuple[int, ...]) -> Any:
    """One number for each query, float64 and contiguous."""
    return np.ascontiguousarray(np.broadcast_to(to_numpy(array), shape), np.float64)


def _in_order(parts: Any) -> Any:
    """The sum over the first axis, one after another."""
    total = parts[0] + parts[1]  # in memory of its own: a gradient may outlive the parts
    for part in parts[2:]:
        total += part
    return total


def _of_sinks(problem: Problem, xp: Any, d_output: Any, d_lse: Any, saved: tuple[Any, Any]) -> Any:
    """dsink_h = −Σ exp(sink_h − lse) δ with δ = Σ dO ∘ O − d_lse."""
    wide = resolve(xp, problem.accumulator)
    output, lse = (plain(x) for x in saved)
    delta = xp.sum(xp.astype(d_output, wide) * xp.astype(output, wide), axis=-1)
    if d_lse is not None:
        delta = delta - xp.astype(d_lse, wide)
    safe = xp.where(lse == -math.inf, xp.zeros_like(lse), lse)
    sinks = plain(problem.sinks)
    p = xp.exp(xp.astype(sinks, lse.dtype)[:, None] - safe)
    sums = xp.sum(-xp.astype(p, wide) * delta, axis=-1)
    return xp.astype(xp.sum(xp.reshape(sums, (-1, problem.H)), axis=0), sinks.dtype)
