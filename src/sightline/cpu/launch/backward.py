"""The call of the backward kernel and its repetition: the split of the work, and the sums of the items' gradients.

Each split of the keys has its own sum of the queries' gradients. With few heads and many queries these sums are larger
than all other arrays. The backward pass of such a problem runs in parts, which divide the queries too, so that the
memory besides the gradients does not grow with n.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ...arrays.layouts import FRAMEWORKS
from ...arrays.operations import (
    accumulator,
    address_of,
    convert,
    detach,
    dtype_name,
    empty,
    has_heads_in_rows,
    itemsize,
    namespace,
    to_numpy,
)
from ...call.backward_calls import BACKWARD_OPERANDS, BackwardInputs, BackwardPasses
from ...call.gradient_parts import (
    differentiate_sinks,
    find_learned_lookups,
    is_lse_too_large,
    subtract_rounding,
    sum_by_table,
    widen,
)
from ...call.kernel import GivenGradients, Gradients
from ...call.partition.parts import part_of
from ...call.problem import NUM_OPERANDS, OPERANDS, Problem
from ...formula.expression import SYMBOLS, Expression
from ...formula.parameters import structure_of
from ...formula.tile_ranges import find_runs, find_tile_ranges
from ...statistics import StatisticGradients, library
from ...statistics.reduction import times_factor
from ..codegen.abi import BACKWARD_CALL_FIELDS
from ..kernels.backward import Backward
from ..kernels.kernel_spec import KEY_BLOCK, lanes_per_vector, round_up
from ..runtime.processor import Processor
from .arguments import (
    TARGET_ITEMS,
    CpuFusedStatistics,
    KernelArguments,
    operand_fields,
    prepare,
    with_contiguous_entries,
    with_contiguous_rows,
)
from .bound_call import BoundCall, PreparedCall
from .forward import forward, make_results

BACKWARD_SUMS = ("d_query", "d_key", "d_value")  # the sums that become the gradients of the operands
MAX_SUM_BYTES = 64 << 20  # the largest size of the splits' sums in one part
MIN_DIVIDED_BYTES = 2 * MAX_SUM_BYTES  # a backward pass with smaller sums is not divided into parts
MAX_KEYS = 1 << 16  # the most keys of a part
KEY_TILE = 1024  # the keys of a tile in the search for the keys that a part sees


@dataclass(frozen=True)
class TableGradient:
    """A lookup of the score whose table needs a gradient."""

    node_index: int  # index of the lookup in `walk(score)`
    slot: int  # index of the table in Problem.tables
    # True if each entry of the table belongs to one key, as in t[h, i, j]: only one split of the keys writes the entry
    is_per_key: bool
    is_per_head: bool  # True if every entry of the table belongs to one query head, as in t[h, j]


def find_table_gradients(problem: Problem, wanted_tables: Collection[int]) -> Iterator[TableGradient]:
    """Yield a description of each lookup of the score whose table is among `wanted_tables`."""
    lookups = find_learned_lookups(problem, wanted_tables)

    def is_indexed_by(slot: int, name: str, length: int) -> bool:
        """True if the symbol `name` itself is the index of one axis, the same in all lookups of the table.

        An axis shorter than the symbol's range is not accepted: at hidden pairs, indices past the end of the axis are
        clamped to the last entry, so that several threads may write that entry.
        """
        axes_by_lookup = [
            {axis for axis, x in enumerate(node.arguments) if x is SYMBOLS[name] and node.table.shape[axis] >= length}
            for _, node, other in lookups
            if other == slot
        ]
        return bool(set.intersection(*axes_by_lookup))

    for node_index, _, slot in lookups:
        yield TableGradient(node_index, slot, is_indexed_by(slot, "j", problem.m), is_indexed_by(slot, "h", problem.H))


@dataclass(frozen=True)
class Split:
    """How the backward kernel's work is divided into items. The attributes are argument fields of the kernel.

    The keys are divided into `num_splits` splits of `split_size` tiles. `parallel_heads` is the number of key heads if
    each key head has its own items, or 1 if an item loops over all key heads. `parallel_batches` is the number of
    batches if each batch has its own items, or 1 if an item loops over all batches.
    """

    num_splits: int
    split_size: int
    parallel_heads: int
    parallel_batches: int

    @classmethod
    def of(cls, problem: Problem, table_gradients: list[TableGradient]) -> Split:
        heads = problem.G if all(gradient.is_per_head for gradient in table_gradients) else 1
        batches = 1 if table_gradients else problem.B
        blocks = -(-problem.m // KEY_BLOCK)
        split_size = -(-blocks // min(-(-TARGET_ITEMS // (heads * batches)), blocks))
        return cls(-(-blocks // split_size), split_size, heads, batches)


def backward(problem: Problem, given: GivenGradients, processor: Processor) -> Gradients | None:
    """Return the gradients of Σ d_output ∘ output + Σ d_lse ∘ lse.

    Returns None if a gradient is NaN or ∞, or if an lse exceeds `MAX_LSE`. The kernel `Streaming` must then
    compute the gradients.
    """
    saved, statistic_gradients = given.saved, given.statistics
    if is_lse_too_large(saved[1], problem.accumulator):
        return None
    bound_sum = None
    if statistic_gradients.needs_weights_sum:
        weights_sum, bound_sum = _sum_over_keys(problem, statistic_gradients, processor)
        statistic_gradients = replace(statistic_gradients, weights_sum=weights_sum)
    d_lse, formulas = statistic_gradients.add_to_d_lse(given.d_lse), statistic_gradients.formulas
    table_gradients = list(find_table_gradients(problem, given.wanted_tables))
    bound_output = None
    if table_gradients and problem.dtype != problem.accumulator:
        *exact, bound_output = _recompute_output(problem, processor)
        d_lse = subtract_rounding(d_lse, given.d_output, saved, exact)
    lookups = tuple((x.node_index, x.slot, x.is_per_key) for x in table_gradients)
    options: dict[str, Any] = {"table_gradients": lookups, "roles": tuple(formulas)}
    arguments = prepare("backward", problem, processor, tuple(formulas.values()), **options)
    xp, split = namespace(problem.query), Split.of(problem, table_gradients)
    output, d_output = (
        with_contiguous_rows(detach(xp.astype(x, problem.query.dtype, copy=False))) for x in (saved[0], given.d_output)
    )
    call = BoundBackward(arguments, split, (output, d_output), table_gradients)
    table_sums = call.make_table_sums()
    sums = [empty(shape, problem.accumulator, problem.query) for shape in call.sum_shapes]
    rows = problem.query.shape[:-1]
    lse, d_lse_rows = _broadcast_rows(saved[1], rows), None if d_lse is None else _broadcast_rows(d_lse, rows)
    arrays = {"output": output, "d_output": d_output, "lse": lse, "d_lse": d_lse_rows}
    if call.run_first(arguments, arrays | dict(zip(BACKWARD_SUMS, sums, strict=True)), table_sums) is None:
        return None
    d_query, d_key, d_value = (xp.astype(x, problem.query.dtype, copy=False) for x in call.combine(sums))
    tables_by_slot = {slot: table.array for slot, table in enumerate(problem.tables)}
    table_totals = call.sum_tables(table_sums, tables_by_slot)
    is_repeatable = all(x is None or x.is_cacheable for x in (call, bound_sum, bound_output))
    return Gradients(
        d_query,
        d_key,
        d_value,
        tables=tuple([table_totals.get(slot) for slot in tables_by_slot]),
        sinks=None if problem.sinks is None else differentiate_sinks(problem.sinks, d_output, d_lse, *saved),
        make_entry=partial(call.make_entry, tuple(formulas.values()), bound_sum, bound_output)
        if is_repeatable
        else None,
    )


class BoundBackward(BoundCall):
    """A call of the backward kernel, which is repeated with other addresses and numbers; see `BoundCall`.

    operands : output and d_output, whose strides are bound
    table_gradients : the gradients of tables that the kernel computes

    sum_shapes : the shapes of the sums that become the gradients of query, key and value, in the accumulator's dtype
    table_sums : shape and dtype of the sums that become the gradient of each table; the sums are 0 before the call
    """

    call_fields = BACKWARD_CALL_FIELDS
    min_parallel_multiplications = 1 << 20

    def __init__(
        self,
        arguments: KernelArguments,
        split: Split,
        operands: tuple[Any, Any],
        table_gradients: Sequence[TableGradient],
    ) -> None:
        problem = arguments.problem
        output, d_output = operands
        lanes, lead = lanes_per_vector(problem.accumulator, arguments.processor.machine), problem.batch_shape
        self.widths = problem.d_k, problem.d_v
        key_widths = [round_up(width, lanes) for width in self.widths]
        self.has_splits = split.num_splits > 1
        self.are_gradients = not self.has_splits and tuple(key_widths) == self.widths  # the sums of the kernel
        self.sum_shapes = (
            (*([split.num_splits] if self.has_splits else []), *lead, problem.H, problem.n, problem.d_k),
            *[(*lead, problem.G, problem.m, width) for width in key_widths],
        )
        self.table_gradients = tuple(table_gradients)
        tables = [(x, tuple(problem.tables[x.slot].shape)) for x in table_gradients]
        self.table_sums = [
            # one array if one split writes each entry, else one for each split
            (shape, problem.accumulator) if x.is_per_key else ((split.num_splits, *shape), "float64")
            for x, shape in tables
        ]
        sums = zip(self.table_gradients, self.table_sums, strict=True)
        values: dict[str, Any] = operand_fields("output", output, arguments.keep_alive)
        values |= operand_fields("d_output", d_output, arguments.keep_alive)
        items = split.num_splits * split.parallel_heads * split.parallel_batches
        values |= {"items": items, "scale": problem.scale, "batches": problem.B} | vars(split)
        strides = [0 if x.is_per_key else 8 * math.prod(shape[1:]) for x, (shape, _) in sums]
        super().__init__(arguments, Backward, values, outputs=strides, changing=operands)
        self.first_operands += tuple([address_of(array) for array in operands])

    def make_table_sums(self) -> list[Any]:
        return [np.zeros(shape, dtype) for shape, dtype in self.table_sums]

    def sum_tables(self, sums: Sequence[Any], tables: Mapping[int, Any]) -> dict[int, Any]:
        """Return the gradient of each table by its slot, in the table's library and dtype.

        The gradients of all lookups of one table are added. `tables` has the array of each slot.
        """
        pairs = zip(self.table_gradients, sums, strict=True)
        return sum_by_table([(x.slot, array if x.is_per_key else array.sum(axis=0)) for x, array in pairs], tables)

    def combine(self, sums: Sequence[Any]) -> list[Any]:
        """Return the gradients of query, key and value, in the accumulator's dtype, from the sums of the kernel."""
        if self.are_gradients:
            return list(sums)
        d_query, *others = sums
        narrow = [
            array if array.shape[-1] == width else with_contiguous_entries(array[..., :width])
            for array, width in zip(others, self.widths, strict=True)
        ]
        return [_sum_in_order(d_query) if self.has_splits else d_query, *narrow]

    def make_entry(
        self,
        added: Sequence[Expression],
        bound_sum: BoundCall | None,
        bound_output: BoundCall | None,
        passes: BackwardPasses,
        inputs: BackwardInputs,
        addresses: Sequence[int],
        formulas: Sequence[Expression | None],
    ) -> BackwardEntry | None:
        """Return an entry; see `Gradients.make_entry`. This call keeps no formula, because a formula keeps its tables.

        added : the formulas that the kernel reads besides mask and score: those of `StatisticGradients.formulas`
        bound_sum : repeats the sum over keys of the weights times the first of these; None if there is no such sum
        bound_output : repeats the forward pass on widened operands; None if the gradients follow from the output as it
            was rounded
        """
        if addresses[: len(self.first_operands)] != self.first_operands:
            return None
        operands, output, structure = inputs.operands, inputs.output, structure_of(*formulas, *added)
        make_empty, dtype = FRAMEWORKS[type(output)].make_empty, accumulator(dtype_name(output))
        num_keys, rows, in_rows = operands[1].shape[-2], output.shape[:-1], has_heads_in_rows(operands[0])
        weights_sum = exact = None
        if bound_sum is not None:
            makers = make_empty((*rows, 1), output.dtype, in_rows), make_empty(rows, dtype)
            first = structure.first(len(formulas) + 1)
            weights_sum = bound_sum.prepare(inputs.tables, first, OPERANDS, ("output",), makers, num_keys)
            if weights_sum is None:
                return None
        if bound_output is not None:
            makers = make_empty(output.shape, dtype, in_rows), make_empty(rows, "float64")
            first = structure.first(len(formulas))
            exact = bound_output.prepare(inputs.tables, first, OPERANDS, ("output", "lse"), makers, num_keys)
            if exact is None:
                return None
        sum_makers = [make_empty(shape, dtype) for shape in self.sum_shapes]
        sum_makers += [partial(np.zeros, shape, kind) for shape, kind in self.table_sums]
        # Python computes d_lse and the seed
        can_be_direct = not inputs.structure and not passes.problem.dropout and exact is None
        prepared = self.prepare(
            inputs.tables, structure, BACKWARD_OPERANDS, BACKWARD_SUMS, sum_makers, num_keys, can_be_direct
        )
        return None if prepared is None else BackwardEntry(self, prepared, weights_sum, exact)


@dataclass(frozen=True)
class BackwardEntry:
    """A bound call of the backward pass, an entry for `CallLookup.find_or_run`.

    call, prepared : the call of the backward kernel; its results are the sums of gradients, those of tables included
    weights_sum : a forward pass that computes Σⱼ P_ij w_ij, which is subtracted from d_lse, where w is the formula that
        the statistics add to dP; None if nothing is subtracted
    output : a forward pass on widened operands, whose output is not rounded; None if the rounded output suffices
    """

    call: BoundBackward
    prepared: PreparedCall
    weights_sum: PreparedCall | None
    output: PreparedCall | None

    def run(
        self, passes: BackwardPasses, inputs: BackwardInputs, addresses: Sequence[int], results: Any
    ) -> list[Any] | None:
        """Return the gradients; see `BackwardPasses.entries`."""
        d_lse, given = inputs.d_lse, (inputs.tables, inputs.numbers)
        if self.weights_sum is not None:
            used = *addresses[:NUM_OPERANDS], *addresses[len(BACKWARD_OPERANDS) :]
            status, found = self.weights_sum.run(used, *given, inputs.arrays, sinks=inputs.sinks)
            if status != 0:
                return None
            sums = to_numpy(found[1]).astype(np.float64)
            d_lse = -sums if d_lse is None else d_lse - sums
        if self.output is not None:
            wide = widen(*inputs.operands)
            used = *map(FRAMEWORKS[type(inputs.output)].address, wide), *addresses[len(BACKWARD_OPERANDS) :]
            status, exact = self.output.run(used, *given, (wide, inputs), sinks=inputs.sinks, seed=inputs.seed)
            if status is None:
                return None
            corrected = subtract_rounding(d_lse, inputs.d_output, (inputs.output, inputs.lse), exact)
            d_lse = np.ascontiguousarray(to_numpy(corrected), np.float64)
        if results is None:
            status, results = self.prepared.run(addresses, *given, inputs.arrays, d_lse=d_lse, seed=inputs.seed)
            if status is None:
                return None
        dtype = inputs.operands[0].dtype
        gradients: list[Any] = self.call.combine(results[: len(BACKWARD_SUMS)])
        if gradients[0].dtype != dtype:
            xp = namespace(gradients[0])
            gradients = [xp.astype(gradient, dtype) for gradient in gradients]
        if passes.slots:
            tables = {slot: inputs.tables[place] for slot, place in zip(passes.slots, passes.places, strict=True)}
            totals = self.call.sum_tables(results[len(BACKWARD_SUMS) :], tables)
            gradients += [totals.get(slot) for slot in passes.slots]
        if passes.wants_sinks:
            output, lse = inputs.output, convert(inputs.lse, inputs.output)
            d_lse = None if d_lse is None else convert(d_lse, output)
            gradients.append(differentiate_sinks(inputs.sinks, inputs.d_output, d_lse, output, lse))
        return gradients


def _sum_over_keys(problem: Problem, gradients: StatisticGradients, processor: Processor) -> tuple[Any, BoundCall]:
    """Return Σⱼ P ∘ gradients.weights of every query, and the bound call: a forward pass with one column of value."""
    _, *unread = gradients.formulas.values()
    value = None if problem.row_formats else problem.value[..., :1]
    assert gradients.weights is not None
    product = library.sum(times_factor(SYMBOLS["p"], gradients.weights), over=SYMBOLS["j"])
    narrow = problem.with_statistics(product, value=value)
    fused = CpuFusedStatistics(narrow, unread)
    call = forward(narrow, *make_results(narrow), processor, fused)
    return convert(fused.arrays[0].astype(np.float64), problem.query), call


def _recompute_output(problem: Problem, processor: Processor) -> tuple[Any, Any, BoundCall]:
    """Return output and lse without the rounding to half precision, and the bound call on widened operands."""
    operands = widen(problem.query, problem.key, problem.value)
    wide = replace(problem, see=(), **dict(zip(OPERANDS, operands, strict=True)))
    output, lse = make_results(wide)
    return output, lse, forward(wide, output, lse, processor, CpuFusedStatistics(wide))


def _broadcast_rows(array: Any, shape: tuple[int, ...]) -> Any:
    """Return the array broadcast to one number per query, float64 and contiguous."""
    return np.ascontiguousarray(np.broadcast_to(to_numpy(array), shape), np.float64)


def _sum_in_order(terms: Any) -> Any:
    """Return the sum over the first axis, added in the order of that axis."""
    total = terms[0] + terms[1]  # a new array: the gradient may outlive the terms
    for term in terms[2:]:
        total += term
    return total


# -- long problems in parts --------------------------------------------------------------------------------------------


def needs_parts(problem: Problem, given: GivenGradients) -> bool:
    """True if the backward pass must run in parts, because each split of the keys has a sum of dQ, and these are large.

    False if gradients of tables or of statistics other than lse are requested. `backward_in_parts` does not compute
    them. False in float16 and bfloat16 too, because each part would round the gradients.
    """
    if given.wanted_tables or given.statistics.formulas or problem.dtype != problem.accumulator:
        return False
    return problem.n * _bytes_per_query(problem) > MIN_DIVIDED_BYTES


def backward_in_parts(problem: Problem, given: GivenGradients, processor: Processor) -> Gradients | None:
    """Return the gradients as `Kernel.backward` returns them, without gradients of tables.

    Return None if a |lse| is so large that the backward pass would be inaccurate, or if the kernel fails for a part.
    The parts and their order depend on the problem alone, so the result has equal bits for any number of threads.
    """
    output, lse = given.saved
    if is_lse_too_large(lse, problem.accumulator):
        return None
    d_output, d_lse = given.d_output, given.statistics.add_to_d_lse(given.d_lse)
    arrays = [detach(array) for array in (problem.query, problem.key, problem.value)]
    d_arrays = [empty(tuple(array.shape), problem.accumulator, array) for array in arrays]
    for array in d_arrays:
        array[...] = 0
    for rows, keys in _parts(problem):
        spans = (rows, keys, keys)
        operands = [array[..., span, :] for array, span in zip(arrays, spans, strict=True)]
        part = part_of(problem, *operands, first_row=rows.start, first_key=keys.start)
        d_rows = None if d_lse is None else d_lse[..., rows]
        own_saved = output[..., rows, :], lse[..., rows]
        gradients = backward(part, GivenGradients(d_output[..., rows, :], d_rows, own_saved, ()), processor)
        if gradients is None:
            return None
        for array, span, term in zip(d_arrays, spans, (gradients.query, gradients.key, gradients.value), strict=True):
            array[..., span, :] += term
    sinks = None if problem.sinks is None else differentiate_sinks(problem.sinks, d_output, d_lse, output, lse)
    d_query, d_key, d_value = d_arrays
    return Gradients(d_query, d_key, d_value, tables=tuple([None for _ in problem.tables]), sinks=sinks)


def _bytes_per_query(problem: Problem) -> int:
    """Return how many bytes the sums of all splits need for a query position, in all sequences and heads.

    With one split there are no such sums, and the result is 0.
    """
    splits = -(-TARGET_ITEMS // max(problem.G * problem.B, 1))
    return splits * problem.B * problem.H * problem.d_k * itemsize(problem.accumulator) if splits > 1 else 0


def _parts(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Yield the slices (queries, keys) of each part. The mask hides every pair that is in no part."""
    count = max(MAX_SUM_BYTES // _bytes_per_query(problem) // KEY_TILE, 1) * KEY_TILE
    ranges = find_tile_ranges(problem.mask, problem.extent, count, KEY_TILE)
    for block in range(ranges.query_blocks):
        rows = slice(block * count, min((block + 1) * count, problem.n))
        is_seen = np.zeros(ranges.key_blocks, bool)
        for b, h in np.ndindex(ranges.batches, ranges.heads):
            for entry in ranges.row(b, h, block):
                is_seen[ranges.first[entry] : ranges.last[entry]] = True
        for first, last in find_runs(is_seen):
            start, stop = first * KEY_TILE, min(last * KEY_TILE, problem.m)
            for keys in pairwise([*range(start, stop, MAX_KEYS), stop]):
                yield rows, slice(*keys)
