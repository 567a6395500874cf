"""Repeated backward passes of the CPU: the bound calls of a pass, and the entry that is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...arrays.layouts import FRAMEWORKS
from ...arrays.operations import accumulator, convert, dtype_name, has_heads_in_rows, namespace, to_numpy
from ...call.backward_calls import BACKWARD_OPERANDS, BackwardInputs, BackwardPasses
from ...call.gradient_parts import differentiate_sinks, subtract_rounding, widen
from ...call.problem import NUM_OPERANDS, OPERANDS
from ...formula.expression import Expression
from ...formula.parameters import structure_of
from .bound_call import BoundCall, PreparedCall

if TYPE_CHECKING:
    from .backward import BoundBackward

BACKWARD_SUMS = ("d_query", "d_key", "d_value")  # the sums that become the gradients of the operands


class BackwardCalls(NamedTuple):
    """The bound calls of a backward pass.

    call : that of the backward kernel
    formulas : the formulas that it reads besides mask and score: those of `StatisticGradients.formulas`
    weights_sum : repeats the sum over keys of the weights times the first of `formulas`; None if there is no such sum
    output : repeats the forward pass on widened operands; None if the gradients follow from the output as it was
        rounded
    """

    call: BoundBackward
    formulas: tuple[Expression, ...]
    weights_sum: BoundCall | None
    output: BoundCall | None

    def make_entry(
        self,
        passes: BackwardPasses,
        inputs: BackwardInputs,
        addresses: Sequence[int],
        formulas: Sequence[Expression | None],
    ) -> BackwardEntry | None:
        """Return an entry; see `RepeatableBackward.make_entry`."""
        call, operands, output = self.call, inputs.operands, inputs.output
        if addresses[: len(call.first_operands)] != call.first_operands:
            return None
        structure = structure_of(*formulas, *self.formulas)
        make_empty, dtype = FRAMEWORKS[type(output)].make_empty, accumulator(dtype_name(output))
        num_keys, rows, in_rows = operands[1].shape[-2], output.shape[:-1], has_heads_in_rows(operands[0])
        weights_sum = exact = None
        if self.weights_sum is not None:
            makers = make_empty((*rows, 1), output.dtype, in_rows), make_empty(rows, dtype)
            first = structure.first(len(formulas) + 1)
            weights_sum = self.weights_sum.prepare(inputs.tables, first, OPERANDS, ("output",), makers, num_keys)
            if weights_sum is None:
                return None
        if self.output is not None:
            makers = make_empty(output.shape, dtype, in_rows), make_empty(rows, "float64")
            first = structure.first(len(formulas))
            exact = self.output.prepare(inputs.tables, first, OPERANDS, ("output", "lse"), makers, num_keys)
            if exact is None:
                return None
        sum_makers = [make_empty(shape, dtype) for shape in call.sum_shapes]
        sum_makers += [partial(np.zeros, shape, kind) for shape, kind in call.table_sums]
        # Python computes d_lse and the seed
        can_be_direct = not inputs.structure and not passes.problem.dropout and exact is None
        prepared = call.prepare(
            inputs.tables, structure, BACKWARD_OPERANDS, BACKWARD_SUMS, sum_makers, num_keys, can_be_direct
        )
        return None if prepared is None else BackwardEntry(prepared, weights_sum, exact)


@dataclass(frozen=True)
class BackwardEntry:
    """A bound call of the backward pass, an entry for `CallLookup.find_or_run`.

    prepared : the call of the backward kernel; its results are the sums of gradients, those of tables included
    weights_sum : a forward pass that computes Σⱼ P_ij w_ij, which is subtracted from d_lse, where w is the formula that
        the statistics add to dP; None if nothing is subtracted
    output : a forward pass on widened operands, whose output is not rounded; None if the rounded output suffices
    """

    prepared: PreparedCall
    weights_sum: PreparedCall | None
    output: PreparedCall | None

    def run(
        self, passes: BackwardPasses, inputs: BackwardInputs, addresses: Sequence[int], results: Any
    ) -> list[Any] | None:
        """Return the gradients; see `RepeatedBackward.run`."""
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
        call: Any = self.prepared.call
        dtype = inputs.operands[0].dtype
        gradients: list[Any] = call.combine(results[: len(BACKWARD_SUMS)])
        if gradients[0].dtype != dtype:
            xp = namespace(gradients[0])
            gradients = [xp.astype(gradient, dtype) for gradient in gradients]
        if passes.slots:
            tables = {slot: inputs.tables[place] for slot, place in zip(passes.slots, passes.places, strict=True)}
            totals = call.sum_tables(results[len(BACKWARD_SUMS) :], tables)
            gradients += [totals.get(slot) for slot in passes.slots]
        if passes.wants_sinks:
            output, lse = inputs.output, convert(inputs.lse, inputs.output)
            d_lse = None if d_lse is None else convert(d_lse, output)
            gradients.append(differentiate_sinks(inputs.sinks, inputs.d_output, d_lse, output, lse))
        return gradients
