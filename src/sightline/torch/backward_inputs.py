"""The gradients of a cached call's results, as a bound call of the backward kernel reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..arrays.layouts import numpy_address
from ..dispatch.call_cache import OPERANDS, KernelInputs
from ..dispatch.call_request import Request, conditions_of
from ..dispatch.call_text import count_arrays, split_arrays
from ..formula.parameters import structure_of
from ..problem.problem import Problem
from ..statistics import Statistic, StatisticGradients, statistic_gradients, unwrap_mean

if TYPE_CHECKING:
    from ..cpu.launch.bound_call import BoundCall


class BackwardInputs(NamedTuple):
    """What a bound call of the backward pass reads besides the tensors of the forward pass.

    d_output : the gradient of the output, with adjacent columns
    d_lse : the gradient of lse, and what the statistics add to it, (..., H, n) float64; None for 0
    tables, numbers : those of mask and score, and of the formulas that the statistics add
    structure : the formulas that the statistics add, and what else the kernel depends on; () if only the output has a
        gradient
    needs_weights_sum : True if a `WeightsSum` must be subtracted from d_lse; see `StatisticGradients`
    """

    d_output: Tensor
    d_lse: Tensor | None
    tables: tuple[Any, ...]
    numbers: tuple[float, ...]
    structure: tuple[Any, ...]
    needs_weights_sum: bool = False


def read_inputs(
    request: Request,
    shapes: Problem,
    gradients: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    lse: Any,
    results: Sequence[Tensor],
) -> BackwardInputs | None:
    """Return the inputs of a bound call; None if the gradients need the full dispatch.

    Parameters
    ----------
    request : the request of the forward pass
    shapes : a problem with the shapes of the call; its arrays are not read
    gradients : the gradients of the results, None for 0
    operands : query, key and value
    results : the saved results: output, lse, and the `arrays_to_save`
    """
    d_output = gradients[0]
    has_others = any(gradient is not None for gradient in gradients[1:])
    if d_output is None:
        if not has_others:
            return None
        d_output = torch.zeros_like(results[0])
    if not has_others and not conditions_of(request.see):
        return BackwardInputs(d_output, None, request.tables, request.numbers, ())
    added: StatisticGradients | None = StatisticGradients()
    if has_others:
        added = _add_statistics(request, shapes, gradients, operands, torch.as_tensor(lse), results)
    if added is None:
        return None
    d_lse = added.add_to_d_lse(gradients[1]) if has_others else None
    if d_lse is not None:
        d_lse = d_lse.expand(results[0].shape[:-1]).to(torch.float64).contiguous()
    structure = structure_of(*request.formulas()[:2], *added.formulas.values())
    tables = tuple([table.array for table in structure.tables])
    key = d_lse is None, added.needs_weights_sum, *added.formulas, *structure.formulas
    return BackwardInputs(d_output, d_lse, tables, structure.numbers, key, added.needs_weights_sum)


def _add_statistics(
    request: Request,
    shapes: Problem,
    gradients: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    lse: Tensor,
    results: Sequence[Tensor],
) -> StatisticGradients | None:
    """Return the terms that the gradients of the statistics add; None if a bound call cannot compute them."""
    see = tuple([unwrap_mean(statistic) for statistic in request.see])
    d_seen = [arrays[0] if arrays else None for arrays in split_arrays(see, gradients)]
    if any(d is not None and statistic.backward_reads_tiles for statistic, d in zip(see, d_seen, strict=True)):
        return None
    query, key, value = operands
    problem = replace(shapes, query=query, key=key, value=value, see=see)
    added = statistic_gradients(problem, lse, _no_tiles, d_seen, saved=split_saved(see, results))
    return None if added.includes_zero_weights else added


def _no_tiles() -> Iterator[Any]:
    raise NotImplementedError("a statistic without `backward_reads_tiles` needs no tiles")


@dataclass(frozen=True)
class WeightsSum:
    """A bound forward pass that computes Σⱼ P ∘ weights, where `weights` is a formula that statistics add.

    inputs : its tables and numbers
    """

    call: BoundCall
    inputs: KernelInputs

    @classmethod
    def bind(cls, call: BoundCall, request: Request, formulas: Sequence[Any]) -> WeightsSum | None:
        """Return the sum by a call that computed it for a request with these formulas; None if it read other tables."""
        inputs = KernelInputs.bind(call, request, formulas)
        return None if inputs is None else cls(call, inputs)

    def subtract(
        self, d_lse: Tensor | None, request: Request, key: Tensor, output: Tensor, sinks: Any, threads: int | None
    ) -> Tensor | None:
        """Return d_lse minus the sum, with the shape (..., H, n) and the dtype float64.

        The result is None if the bound call cannot compute the sum. Then the gradients need the full dispatch.

        `request` has the addresses of query, key, value and the tables. `output` is the result of the forward pass.
        """
        tables, addresses, numbers = self.inputs.of(request)
        column = torch.empty((*output.shape[:-1], 1), dtype=output.dtype)
        sums = torch.empty(output.shape[:-1], dtype=torch.promote_types(output.dtype, torch.float32))
        own_sinks = None if sinks is None else self.call.convert_sinks(sinks)
        fields = dict(zip(OPERANDS, request.addresses, strict=False)) | {"output": column.data_ptr()}
        if own_sinks is not None:
            fields["sinks"] = numpy_address(own_sinks)
        words = self.call.make_words(fields, addresses, numbers, [sums.data_ptr()])
        status = self.call.run(threads, words, numbers, key, (request, column, sums, tables, own_sinks))
        if status != 0:
            return None
        return -sums.to(torch.float64) if d_lse is None else d_lse - sums


def arrays_to_save(see: Sequence[Statistic], results: Sequence[Tensor]) -> list[Tensor]:
    """Return the arrays of the statistics that their gradients read; `results` are output, lse and all arrays."""
    arrays = zip(see, split_arrays(see, results), strict=True)
    return [array for statistic, own in arrays if statistic.backward_reads_arrays for array in own]


def split_saved(see: Sequence[Statistic], saved: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Return each statistic's arrays, () if they are not saved; `saved` are output, lse and the `arrays_to_save`."""
    arrays, start = [], 2
    for statistic in see:
        count = count_arrays(statistic) if statistic.backward_reads_arrays else 0
        arrays.append(saved[start : start + count])
        start += count
    return arrays
