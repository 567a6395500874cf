"""Repeated backward passes: entries of backward passes, kept beside the cached forward call.

An entry is a backward pass that lacks only its inputs. Torch's graph, `attention_vjp` and compiled programs of JAX hold
a `BackwardPasses`. `differentiate` takes these steps. Torch's graph, which may use its operator, takes them itself:

    repeat    which runs the entry of an earlier pass, found by `CallLookup.find_or_run`, or if there is none:
    dispatch  the full dispatch of the caller: all checks, the choice of a kernel, and its planning
    keep      which stores the entry that the kernel of the full dispatch makes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from ..arrays.caching import store_entry
from ..arrays.operations import convert, to_numpy
from ..formula.expression import Expression
from ..formula.parameters import structure_of
from ..statistics import StatisticGradients, statistic_gradients
from ..statistics.dispatch import formulas_of
from .call_cache import LOOKUP
from .kernel import GivenGradients, Gradients
from .problem import OPERANDS, Problem
from .request import Request

BACKWARD_OPERANDS = (*OPERANDS, "output", "d_output", "lse")  # what a backward pass reads before the tables
MAX_BACKWARD_ENTRIES = 8  # the most entries of one `BackwardPasses`; beyond it, the oldest entry is dropped


class BackwardInputs(NamedTuple):
    """The inputs of a repeated backward pass.

    operands : query, key and value
    output, lse : the results of the forward pass; lse is float64
    d_output : the gradient of the output, with adjacent columns
    d_lse : the gradient of lse, and what the statistics add to it: NumPy, (..., H, n) float64; None for 0
    tables, numbers : the tables and numbers of mask and score, and of the formulas that the statistics add
    structure : the formulas that the statistics add, and what else the kernel depends on; () if only the output has a
        gradient
    sinks, seed : as in `attention`; without a seed, `seed` is 0
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

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays of `BACKWARD_OPERANDS`, and the tables."""
        return (*self.operands, self.output, self.d_output, self.lse, *self.tables)


def read_inputs(
    request: Request, problem: Problem, given: GivenGradients, operands: Sequence[Any], sinks: Any, seed: int
) -> BackwardInputs | None:
    """Return the inputs of a repeated pass; None if the gradients need the full dispatch.

    request : the request of the forward pass
    problem : `BackwardPasses.problem`
    given : the gradients of the results; for a mean, those of the arrays before they are averaged
    operands, sinks, seed : see `BackwardInputs`
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
    return BackwardInputs(operands, output, lse, d_output, d_lse, tables, numbers, structure, sinks, seed)


def _add_statistics(
    request: Request, problem: Problem, given: GivenGradients, operands: Sequence[Any]
) -> StatisticGradients | None:
    """Return the terms that the gradients of the statistics add; None if a repeated pass cannot compute them."""
    see, (output, lse) = request.see, given.saved
    if any(d is not None and one.backward_computes for one, d in zip(see, given.d_seen, strict=True)):
        return None
    query, key, value = operands
    problem = replace(problem, query=query, key=key, value=value, see=see)
    added = statistic_gradients(problem, convert(lse, output), given.d_seen, given.arrays)
    return None if added.includes_zero_weights else added


@dataclass
class BackwardPasses:
    """The backward passes of calls that differ only in arrays and numbers. A known pass runs its entry again.

    Gradients are lists: of query, key, value, then of the tables `slots`, then of the sinks if `wants_sinks` is true.

    problem : a problem with the options of the calls; its arrays are not read
    slots : the indices in `Problem.tables` of the tables whose gradients are requested
    places : the indices of these tables in `BackwardInputs.tables`
    wants_sinks : True if the gradient of the sinks is requested

    entries : the entries by layouts and structure; a copy of the object has none
        `entry.run(passes, inputs, addresses, results)` returns the gradients; None if the pass needs the full dispatch.
        `addresses` are those of `inputs.arrays`, and `results` those of the call that generated code has run, or None.
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
        origins = [table.origin for table in structure_of(*formulas).tables]
        places = [origins.index(problem.tables[slot].origin) for slot in slots] if formulas else []
        sinks = None if problem.sinks is None else ()
        options = replace(problem, query=None, key=None, value=None, mask=None, score=None, sinks=sinks, see=())
        return cls(options, tuple(slots), tuple(places), wants_sinks)

    def differentiate(
        self, inputs: BackwardInputs | None, dispatch: Callable[[], tuple[Gradients, Sequence[Expression | None]]]
    ) -> list[Any]:
        """Return the gradients by an entry, or else by `dispatch`.

        inputs : what an entry reads; None if no entry can compute this pass
        dispatch : function that computes the gradients by the full dispatch, and returns (gradients, (mask, score))
        """
        gradients = self.repeat(inputs)
        if gradients is None:
            computed, formulas = dispatch()
            self.keep(computed, inputs, formulas)
            gradients = computed.flatten(self.slots, self.wants_sinks)
        return gradients

    def repeat(self, inputs: BackwardInputs | None) -> list[Any] | None:
        """Return the gradients by a stored entry; None if no entry fits these arrays, or if the entry fails."""
        if inputs is None:
            return None
        found = LOOKUP.find_or_run(self.entries, inputs.structure, inputs.numbers, *inputs.arrays)
        if found is None or found[0] is None:
            return None
        entry, results, _, *addresses = found
        gradients: list[Any] | None = entry.run(self, inputs, addresses, results)
        return gradients

    def keep(self, gradients: Gradients, inputs: BackwardInputs | None, formulas: Sequence[Expression | None]) -> None:
        """Store an entry of a backward pass that went through the full dispatch, if the pass can be repeated.

        inputs : what an entry reads when the pass is repeated; None if the pass cannot be repeated
        formulas : mask and score
        """
        if gradients.make_entry is None or inputs is None:
            return
        read = LOOKUP.read_arrays(*inputs.arrays)
        entry = None if read is None else gradients.make_entry(self, inputs, read[1:], formulas)
        if read is not None and entry is not None:
            store_entry(self.entries, (read[0], inputs.structure), entry, MAX_BACKWARD_ENTRIES)
