"""The backward kernel's call: which parts of the keys are worked on apart, and the sums of what they found."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays import convert, detach, empty, layout, namespace, resolve_dtype, to_numpy
from ...formula.expression import SYMBOLS, Lookup, walk
from ...kernel import Gradients
from ...problem import Problem
from ...statistics import Mass, StatisticGradients
from ..codegen.abi import BACKWARD_FIELDS, pack
from ..kernels.backward import Backward
from ..kernels.block import KEY_BLOCK
from ..runtime.machine import Machine
from ..runtime.processor import Processor
from ..runtime.thread_team import thread_count
from .arguments import (
    MAX_LSE,
    KernelArguments,
    compile_kernel,
    fit_machine,
    make_spec,
    operand_fields,
    query_block_size,
)
from .forward import forward
from .statistics import FusedStatistics

__all__ = ["backward"]

TARGET_ITEMS = 16  # pieces of work wanted, whatever the number of threads: their sums must not depend on it


@dataclass(frozen=True)
class TableGradient:
    """A lookup of the score whose table gains a gradient.

    `is_per_key`: every entry belongs to one key, as in t[h, i, j], so that one part of the keys writes it alone.
    `is_per_head`: it belongs to one query head.
    """

    node_index: int  # in the score's `walk`
    slot: int  # of its table in Problem.tables
    is_per_key: bool
    is_per_head: bool


@dataclass(frozen=True)
class Split:
    """How the work is cut: parts of the keys, their blocks, and key heads and batches apart or one after another."""

    num_splits: int
    split_size: int
    parallel_heads: int
    parallel_batches: int

    @classmethod
    def from_problem(cls, problem: Problem, table_gradients: list[TableGradient]) -> Split:
        heads = problem.G if all(table_gradient.is_per_head for table_gradient in table_gradients) else 1
        batches = 1 if table_gradients else problem.B
        blocks = -(-problem.m // KEY_BLOCK)
        split_size = -(-blocks // min(-(-TARGET_ITEMS // (heads * batches)), blocks))
        return cls(-(-blocks // split_size), split_size, heads, batches)


def backward(
    problem: Problem,
    d_output: Any,
    d_lse: Any,
    saved: tuple[Any, Any],
    wanted_tables: Collection[int],
    threads: int | None,
    statistic_gradients: StatisticGradients,
    processor: Processor,
) -> Gradients | None:
    """Gradients of Σ d_output ∘ output + Σ d_lse ∘ lse; None where `streaming` must sort it out: one that is NaN or ∞,
    or scores whose last place is more than 1.

    Parameters
    ----------
    d_output, d_lse : shapes of output and lse; d_lse None for 0
    saved : (output, lse) of the forward pass
    wanted : slots of the tables in `Problem.tables` whose gradients are asked for
    statistic_gradients : what statistics add to the gradients of weights, scores and lse
    """
    if _exceeds_max_lse(saved[1], problem.accumulator):
        return None
    d_lse = _add_statistics_to_d_lse(problem, d_lse, statistic_gradients, threads, processor)
    roles = {"weights": statistic_gradients.weights, "scores": statistic_gradients.scores}
    statistic_formulas = {role: formula for role, formula in roles.items() if formula is not None}
    table_gradients = list(_find_table_gradients(problem, wanted_tables))
    split = Split.from_problem(problem, table_gradients)
    xp, query = namespace(problem.query), problem.query
    machine = fit_machine(processor.machine, problem)
    block = query_block_size(problem.dtype, machine)
    kernel_arguments = KernelArguments(problem, block, tuple(statistic_formulas.values()))
    d_output = _with_contiguous_rows(detach(xp.astype(d_output, query.dtype)))
    lead, rows = problem.batch_shape, (*problem.batch_shape, problem.H, problem.n)
    accumulator = problem.accumulator
    sums_by_name = {
        name: _zeros(
            (*lead, problem.G, problem.m, _round_up_to_vectors(width, accumulator, processor.machine)),
            accumulator,
            query,
        )
        for name, width in (("d_key", problem.d_k), ("d_value", problem.d_v))
    }
    sums_by_name["d_query"] = _zeros((split.num_splits, *rows, problem.d_k), accumulator, query)
    table_sums = [_allocate_table_sums(problem, table_gradient, split) for table_gradient in table_gradients]
    nonfinite_flag, query_blocks = np.zeros(1, np.int64), -(-problem.n // block)
    spec = make_spec(
        "backward",
        problem,
        kernel_arguments,
        vectors=machine.vectors,
        table_gradients=tuple(
            (table_gradient.node_index, table_gradient.slot, table_gradient.is_per_key)
            for table_gradient in table_gradients
        ),
        roles=tuple(statistic_formulas),
    )
    fields = kernel_arguments.fields(spec) | operand_fields("d_output", d_output, kernel_arguments.keep_alive)
    fields |= operand_fields("output", _with_contiguous_rows(detach(saved[0])), kernel_arguments.keep_alive)
    fields |= {
        "items": split.num_splits * split.parallel_heads * split.parallel_batches,
        "query_blocks": query_blocks,
        "lse": kernel_arguments.address(_broadcast_rows(saved[1], rows)),
        "d_lse": kernel_arguments.address(np.zeros(rows) if d_lse is None else _broadcast_rows(d_lse, rows)),
        "scale": problem.scale,
        "nonfinite_flag": kernel_arguments.address(nonfinite_flag),
        "batches": problem.B,
        "num_splits": split.num_splits,
        "split_size": split.split_size,
        "parallel_heads": split.parallel_heads,
        "parallel_batches": split.parallel_batches,
    }
    fields |= {name: layout(array)[0] for name, array in sums_by_name.items()}
    table_gradient_fields = [
        (t.ctypes.data, (0 if table_gradient.is_per_key else t.strides[0],), (0,))
        for t, table_gradient in zip(table_sums, table_gradients, strict=True)
    ]
    words = pack(BACKWARD_FIELDS, fields, [*kernel_arguments.table_fields(), *table_gradient_fields])
    kernel = compile_kernel(spec, kernel_arguments, Backward, processor)
    keep_alive = (*kernel_arguments.keep_alive, *sums_by_name.values(), *table_sums, problem)
    processor.call(kernel, words, min(thread_count(threads), fields["items"]), keep_alive)
    if nonfinite_flag[0]:
        return None

    def narrow(array: Any, width: int) -> Any:
        return xp.astype(array[..., :width], query.dtype, copy=array.shape[-1] != width)

    return Gradients(
        query=narrow(
            sums_by_name["d_query"][0] if split.num_splits == 1 else _sum_in_order(sums_by_name["d_query"]), problem.d_k
        ),
        key=narrow(sums_by_name["d_key"], problem.d_k),
        value=narrow(sums_by_name["d_value"], problem.d_v),
        tables=_sum_table_gradients(problem, table_gradients, table_sums),
        sinks=None if problem.sinks is None else _differentiate_sinks(problem, xp, d_output, d_lse, saved),
    )


def _add_statistics_to_d_lse(
    problem: Problem, d_lse: Any, statistic_gradients: StatisticGradients, threads: int | None, processor: Processor
) -> Any:
    """d_lse with what statistics add to it, less Σⱼ P ∘ their slopes: the row sum of P ∘ dP takes it so; None for 0."""
    terms = [term for term in (d_lse, statistic_gradients.lse) if term is not None]
    if statistic_gradients.weights is not None:
        mass_problem = replace(problem, value=problem.value[..., :1]).with_statistics(Mass(statistic_gradients.weights))
        fused_statistics, lse = FusedStatistics(mass_problem), np.empty((*problem.batch_shape, problem.H, problem.n))
        forward(
            mass_problem,
            empty((*lse.shape, mass_problem.d_v), mass_problem.dtype, mass_problem.query),
            lse,
            threads,
            processor,
            fused_statistics,
        )
        terms.append(convert(-fused_statistics.arrays[0].astype(np.float64), problem.query))
    return functools.reduce(operator.add, terms) if terms else None


def _exceeds_max_lse(lse: Any, accumulator: str) -> bool:
    """Whether weights from exp(score − lse) would not add up to 1, as scores and lse are rounded apart."""
    magnitudes = np.abs(to_numpy(lse))
    return bool(np.max(magnitudes, where=np.isfinite(magnitudes), initial=0.0) > MAX_LSE[accumulator])


def _find_table_gradients(problem: Problem, wanted_tables: Collection[int]) -> Iterator[TableGradient]:
    if problem.score is None:
        return
    slots = {id(table): slot for slot, table in enumerate(problem.tables)}
    lookups = [
        (node_index, node, slots[id(node.table)])
        for node_index, node in enumerate(walk(problem.score))
        if isinstance(node, Lookup) and node.kind == "float" and slots[id(node.table)] in wanted_tables
    ]

    def is_indexed_by(slot: int, name: str, length: int) -> bool:
        """Whether every lookup of the table has the symbol itself as index of one and the same axis.

        A shorter axis is read past its end at hidden pairs, which are sent to its last entry: that one is everybody's.
        """
        axes_by_lookup = [
            {
                axis
                for axis, argument in enumerate(node.arguments)
                if argument is SYMBOLS[name] and node.table.shape[axis] >= length
            }
            for _, node, other in lookups
            if other == slot
        ]
        return bool(set.intersection(*axes_by_lookup))

    for node_index, _, slot in lookups:
        yield TableGradient(node_index, slot, is_indexed_by(slot, "j", problem.m), is_indexed_by(slot, "h", problem.H))


def _round_up_to_vectors(width: int, dtype: str, machine: Machine) -> int:
    """The width rounded up to whole vectors."""
    lanes = machine.vector_bytes // (8 if dtype == "float64" else 4)
    return -(-width // lanes) * lanes


def _zeros(shape: tuple[int, ...], name: str, like: Any) -> Any:
    zeros = empty(shape, name, like)
    zeros[...] = 0
    return zeros


def _allocate_table_sums(problem: Problem, table_gradient: TableGradient, split: Split) -> Any:
    """Where a table's gradient is summed: in place where one part owns each entry, else a float64 sum for each part."""
    shape = tuple(problem.tables[table_gradient.slot].shape)
    return (
        np.zeros(shape, problem.accumulator)
        if table_gradient.is_per_key
        else np.zeros((split.num_splits, *shape), np.float64)
    )


def _sum_table_gradients(problem: Problem, table_gradients: list[TableGradient], sums: list[Any]) -> tuple[Any, ...]:
    """For each table of the problem its gradient, or None."""
    totals: list[Any] = [None] * len(problem.tables)
    for table_gradient, array in zip(table_gradients, sums, strict=True):
        total = array if table_gradient.is_per_key else array.sum(axis=0)
        totals[table_gradient.slot] = (
            total if totals[table_gradient.slot] is None else totals[table_gradient.slot] + total
        )
    return tuple(
        None if array is None else _convert_like(array, table.array)
        for array, table in zip(totals, problem.tables, strict=True)
    )


def _convert_like(array: Any, other: Any) -> Any:
    """A NumPy array in the other's library and dtype."""
    return namespace(other).astype(convert(array, other), other.dtype, copy=False)


def _with_contiguous_rows(array: Any) -> Any:
    """The array with its columns next to each other: a copy where a gradient was expanded, as that of a sum is."""
    if layout(array)[1][-1] == array.itemsize:
        return array
    return array.contiguous() if hasattr(array, "contiguous") else np.ascontiguousarray(array)


def _broadcast_rows(array: Any, shape: tuple[int, ...]) -> Any:
    """One number for each query, float64 and contiguous."""
    return np.ascontiguousarray(np.broadcast_to(to_numpy(array), shape), np.float64)


def _sum_in_order(terms: Any) -> Any:
    """The sum over the first axis, one after another."""
    total = terms[0] + terms[1]  # in memory of its own: a gradient may outlive the parts
    for term in terms[2:]:
        total += term
    return total


def _differentiate_sinks(problem: Problem, xp: Any, d_output: Any, d_lse: Any, saved: tuple[Any, Any]) -> Any:
    """dsink_h = −Σ exp(sink_h − lse) δ with δ = Σ dO ∘ O − d_lse."""
    wide = resolve_dtype(xp, problem.accumulator)
    output, lse = (detach(x) for x in saved)
    delta = xp.sum(xp.astype(d_output, wide) * xp.astype(output, wide), axis=-1)
    if d_lse is not None:
        delta = delta - xp.astype(d_lse, wide)
    finite_lse = xp.where(lse == -math.inf, xp.zeros_like(lse), lse)
    sinks = detach(problem.sinks)
    p = xp.exp(xp.astype(sinks, lse.dtype)[:, None] - finite_lse)
    sums = xp.sum(-xp.astype(p, wide) * delta, axis=-1)
    return xp.astype(xp.sum(xp.reshape(sums, (-1, problem.H)), axis=0), sinks.dtype)
