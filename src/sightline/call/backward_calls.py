"""Repeated backward passes: bound calls of the backward kernel, kept beside the cached forward call.

A bound call is a kernel call that lacks only the addresses of its arrays, the numbers of its formulas and the seed.
Torch's graph, `attention_vjp` and compiled programs of JAX hold a `BackwardPasses`. Its method `differentiate` gets the
`BackwardInputs` of one backward pass, and calls

    repeat    which runs the bound call of an earlier pass, found by `CallLookup.find_or_run`, or if there is none:
    dispatch  the full dispatch of the caller: all checks, the choice of a kernel, and its planning
    keep      which stores the bound call that the full dispatch made
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ..arrays.layouts import FRAMEWORKS
from ..arrays.operations import accumulator, convert, dtype_name, has_heads_in_rows, namespace, to_numpy
from ..caching import store
from ..formula.expression import Expression
from ..formula.parameters import structure_of
from ..statistics import StatisticGradients, statistic_gradients, unwrap_mean
from ..statistics.dispatch import formulas_of
from .gradient_parts import differentiate_sinks, subtract_rounding, widen
from .kernel import BACKWARD_OPERANDS, BACKWARD_SUMS, GivenGradients, Gradients
from .lookup import LOOKUP
from .problem import NUM_OPERANDS, OPERANDS, Problem
from .request import Request

if TYPE_CHECKING:
    from ..cpu.launch.backward import BoundBackward
    from ..cpu.launch.prepared_call import PreparedCall

MAX_BACKWARD_ENTRIES = 8  # the most entries of one `BackwardPasses`; beyond it, the oldest entry is dropped


class BackwardInputs(NamedTuple):
    """The inputs of a bound backward pass.

    operands : query, key and value
    output, lse : the results of the forward pass; lse is float64
    d_output : the gradient of the output, with adjacent columns
    d_lse : the gradient of lse, and what the statistics add to it: NumPy, (..., H, n) float64; None for 0
    tables, numbers : the tables and numbers of mask and score, and of the formulas that the statistics add
    structure : the formulas that the statistics add, and what else the kernel depends on; () if only the output has a
        gradient
    sinks, seed, threads : as in `attention`; without a seed, `seed` is 0
    """

    operands: Sequence[Any]
    output: Any
    lse: Any
    d_output: Any
    d_lse: Any
    tables: tuple[Any, ...]
    numbers: tuple[float, ...]
    structure: tuple[Any, ...]
    sinks: Any = None
    seed: int = 0
    threads: int | None = None


def read_inputs(
    request: Request,
    problem: Problem,
    given: GivenGradients,
    operands: Sequence[Any],
    sinks: Any,
    seed: int,
    threads: int | None,
) -> BackwardInputs | None:
    """Return the inputs of a bound call; None if the gradients need the full dispatch.

    Parameters
    ----------
    request : the request of the forward pass
    problem : `BackwardPasses.problem`
    given : the gradients of the results; for a mean, those of the arrays before they are averaged
    operands, sinks, seed, threads : see `BackwardInputs`
    """
    d_output, (output, lse) = given.d_output, given.saved
    if d_output is None:
        return None
    d_lse, tables, numbers = None, request.tables, request.numbers
    structure: tuple[Any, ...] = ()
    has_others = given.d_lse is not None or (given.d_seen and any(d is not None for d in given.d_seen))
    if has_others or (request.see and formulas_of(request.see)):
        added = _add_statistics(request, problem, given, operands) if has_others else StatisticGradients()
        if added is None:
            return None
        d_lse = added.add_to_d_lse(given.d_lse)
        if d_lse is not None:
            d_lse = np.ascontiguousarray(np.broadcast_to(to_numpy(d_lse), output.shape[:-1]), np.float64)
        read = structure_of(*request.formulas()[:2], *added.formulas.values())
        tables, numbers = tuple([table.array for table in read.tables]), read.numbers
        structure = d_lse is None, added.needs_weights_sum, *added.formulas, *read.formulas
    return BackwardInputs(operands, output, lse, d_output, d_lse, tables, numbers, structure, sinks, seed, threads)


def _add_statistics(
    request: Request, problem: Problem, given: GivenGradients, operands: Sequence[Any]
) -> StatisticGradients | None:
    """Return the terms that the gradients of the statistics add; None if a bound call cannot compute them."""
    see, (output, lse) = tuple([unwrap_mean(statistic) for statistic in request.see]), given.saved
    if any(d is not None and one.backward_computes for one, d in zip(see, given.d_seen, strict=True)):
        return None
    query, key, value = operands
    problem = replace(problem, query=query, key=key, value=value, see=see)
    added = statistic_gradients(problem, convert(lse, output), given.d_seen, given.arrays)
    return None if added.includes_zero_weights else added


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


@dataclass
class BackwardPasses:
    """The backward passes of calls that differ only in arrays and numbers. A known pass runs its bound call again.

    Gradients are lists: of query, key, value, then of the tables `slots`, then of the sinks if `wants_sinks` is true.

    Parameters
    ----------
    problem : a problem with the options of the calls; its arrays are not read
    slots : the indices in `Problem.tables` of the tables whose gradients are requested
    places : the indices of these tables in `BackwardInputs.tables`
    wants_sinks : True if the gradient of the sinks is requested

    Attributes
    ----------
    entries : the bound calls by layouts and structure; a copy of the object has none
    """

    problem: Problem
    slots: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    wants_sinks: bool = False
    entries: dict[Any, Any] = field(init=False, default_factory=dict)

    def __copy__(self) -> Self:
        return replace(self)

    @classmethod
    def of(
        cls, problem: Problem, formulas: Sequence[Expression | None], slots: Sequence[int], wants_sinks: bool
    ) -> Self:
        """Return the backward passes of a problem that was made from the mask and the score in `formulas`.

        If the call cannot be repeated, `formulas` is empty.
        """
        origins = [id(table) for table in structure_of(*formulas).tables]
        places = [origins.index(problem.tables[slot].origin) for slot in slots] if formulas else []
        sinks = None if problem.sinks is None else ()
        options = replace(problem, query=None, key=None, value=None, mask=None, score=None, sinks=sinks, see=())
        return cls(options, tuple(slots), tuple(places), wants_sinks)

    def differentiate(
        self, inputs: BackwardInputs | None, dispatch: Callable[[], tuple[Gradients, Sequence[Expression | None]]]
    ) -> list[Any]:
        """Return the gradients by a bound call, or else by `dispatch`.

        Parameters
        ----------
        inputs : what a bound call reads; None if no bound call can compute this pass
        dispatch : function that computes the gradients by the full dispatch, and returns (gradients, (mask, score))
        """
        gradients = self.repeat(inputs)
        if gradients is None:
            found, formulas = dispatch()
            self.keep(found, inputs, formulas)
            gradients = found.flatten(self.slots, self.wants_sinks)
        return gradients

    def repeat(self, inputs: BackwardInputs | None) -> list[Any] | None:
        """Return the gradients by a stored bound call; None if no call fits these arrays, or if the call fails."""
        if inputs is None:
            return None
        arrays = (*inputs.operands, inputs.output, inputs.d_output, inputs.lse, *inputs.tables)
        found = LOOKUP.find_or_run(self.entries, inputs.structure, inputs.numbers, *arrays)
        if found is None or found[0] is None:
            return None
        entry, results, _, *addresses = found
        d_lse = inputs.d_lse
        if entry.weights_sum is not None:
            d_lse = _subtract_sum(entry.weights_sum, d_lse, inputs, arrays, addresses)
            if d_lse is None:
                return None
        if entry.output is not None:
            d_lse = _correct_d_lse(entry.output, d_lse, inputs, addresses)
            if d_lse is None:
                return None
        if results is None:
            status, results = entry.prepared.run(
                addresses, inputs.tables, inputs.numbers, inputs.threads, arrays, d_lse=d_lse, seed=inputs.seed
            )
            if status is None:
                return None
        call, dtype = entry.prepared.call, inputs.operands[0].dtype
        gradients: list[Any] = call.combine(results[: len(BACKWARD_SUMS)])
        if gradients[0].dtype != dtype:
            xp = namespace(gradients[0])
            gradients = [xp.astype(gradient, dtype) for gradient in gradients]
        if self.slots or self.wants_sinks:
            gradients += self._differentiate_learned(call, inputs, d_lse, results[len(BACKWARD_SUMS) :])
        return gradients

    def _differentiate_learned(
        self, call: BoundBackward, inputs: BackwardInputs, d_lse: Any, table_sums: Sequence[Any]
    ) -> list[Any]:
        """Return the gradients of the tables and the sinks from the sums of a bound call."""
        tables = {slot: inputs.tables[place] for slot, place in zip(self.slots, self.places, strict=True)}
        totals = call.sum_tables(table_sums, tables)
        gradients = [totals.get(slot) for slot in self.slots]
        if self.wants_sinks:
            output, lse = inputs.output, convert(inputs.lse, inputs.output)
            d_lse = None if d_lse is None else convert(d_lse, output)
            gradients.append(differentiate_sinks(inputs.sinks, inputs.d_output, d_lse, output, lse))
        return gradients

    def keep(self, found: Gradients, inputs: BackwardInputs | None, formulas: Sequence[Expression | None]) -> None:
        """Store the bound call of a backward pass that went through the full dispatch, if it read the caller's arrays.

        Parameters
        ----------
        found : the gradients, with their bound call
        inputs : what a bound call reads when the pass is repeated; None if the pass cannot be repeated
        formulas : mask and score
        """
        call = found.bound_call
        if call is None or inputs is None:
            return
        operands, output = inputs.operands, inputs.output
        structure = structure_of(*formulas, *found.bound_formulas)
        read = LOOKUP.read_arrays(*operands, output, inputs.d_output, inputs.lse, *inputs.tables)
        if read is None or read[1:][: len(call.first_operands)] != call.first_operands:
            return
        make_empty, dtype = FRAMEWORKS[type(output)].make_empty, accumulator(dtype_name(output))
        num_keys, rows, in_rows = operands[1].shape[-2], output.shape[:-1], has_heads_in_rows(operands[0])
        weights_sum = exact = None
        if found.bound_sum is not None:
            makers = make_empty((*rows, 1), output.dtype, in_rows), make_empty(rows, dtype)
            first = structure.first(len(formulas) + 1)
            weights_sum = found.bound_sum.prepare(inputs.tables, first, OPERANDS, ("output",), makers, num_keys)
            if weights_sum is None:
                return
        if found.bound_output is not None:
            makers = make_empty(output.shape, dtype, in_rows), make_empty(rows, "float64")
            first = structure.first(len(formulas))
            exact = found.bound_output.prepare(inputs.tables, first, OPERANDS, ("output", "lse"), makers, num_keys)
            if exact is None:
                return
        sum_makers = [make_empty(shape, dtype) for shape in call.sum_shapes]
        sum_makers += [partial(np.zeros, shape, kind) for shape, kind in call.table_sums]
        # Python computes d_lse and the seed
        can_be_direct = not inputs.structure and not self.problem.dropout and exact is None
        prepared = call.prepare(
            inputs.tables, structure, BACKWARD_OPERANDS, BACKWARD_SUMS, sum_makers, num_keys, can_be_direct
        )
        if prepared is not None:
            entry = BackwardEntry(prepared, weights_sum, exact)
            store(self.entries, (read[0], inputs.structure), entry, MAX_BACKWARD_ENTRIES)


def _subtract_sum(
    prepared: PreparedCall, d_lse: Any, inputs: BackwardInputs, arrays: tuple[Any, ...], addresses: Sequence[int]
) -> Any:
    """Return d_lse minus the sum `BackwardEntry.weights_sum`; None if the sum needs the full dispatch."""
    used = *addresses[:NUM_OPERANDS], *addresses[len(BACKWARD_OPERANDS) :]
    status, results = prepared.run(used, inputs.tables, inputs.numbers, inputs.threads, arrays, sinks=inputs.sinks)
    if status != 0:
        return None
    sums = to_numpy(results[1]).astype(np.float64)
    return -sums if d_lse is None else d_lse - sums


def _correct_d_lse(prepared: PreparedCall, d_lse: Any, inputs: BackwardInputs, addresses: Sequence[int]) -> Any:
    """Return d_lse as `subtract_rounding` corrects it for a rounded output; None if that needs the full dispatch."""
    wide = widen(*inputs.operands)
    used = *map(FRAMEWORKS[type(inputs.output)].address, wide), *addresses[len(BACKWARD_OPERANDS) :]
    status, exact = prepared.run(
        used, inputs.tables, inputs.numbers, inputs.threads, (wide, inputs), sinks=inputs.sinks, seed=inputs.seed
    )
    if status is None:
        return None
    corrected = to_numpy(subtract_rounding(d_lse, inputs.d_output, (inputs.output, inputs.lse), exact))
    return np.ascontiguousarray(corrected, np.float64)
