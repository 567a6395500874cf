"""Forward derivatives of output and lse by the generated kernel, in torch's graph and under torch's transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import operator

if TYPE_CHECKING:
    from .derivatives import Derivative


def tangents(
    derivative: Derivative, tensors: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the tangents of output and lse.

    Parameters
    ----------
    derivative, tensors : attention, a derivative of order 0, and its tensors
    outputs : output and lse
    given : the tangents of the tensors, None for 0
    """
    places = tuple([place for place in derivative.differentiable_places if given[place] is not None])
    directions = [given[place] for place in places]
    found: tuple[Tensor, Tensor] = _Tangents.apply(derivative, places, *tensors, *outputs, *directions)  # type: ignore[no-untyped-call]
    return found


class _Tangents(torch.autograd.Function):
    """The tangents of output and lse. Array operations compute the derivatives of the tangents.

    `places` are the indices of the tensors that have a tangent. `arrays` are the tensors of attention, output, lse and
    the tangents.
    """

    @staticmethod
    def forward(derivative: Derivative, places: tuple[int, ...], *arrays: Tensor) -> tuple[Tensor, ...]:
        tensors, (output, lse, *directions) = _split(derivative, arrays)
        spec = derivative.spec
        arguments = *spec.unflatten(tensors), *spec
        found: list[Tensor] = operator.attention_tangent(directions, list(places), output, lse, *arguments)
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.derivative, ctx.places, *arrays = inputs
        ctx.save_for_backward(*arrays)
        ctx.save_for_forward(*arrays)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        arrays = ctx.saved_tensors
        chosen = _differentiable(ctx.derivative, arrays)
        function = _by_operations(ctx.derivative, ctx.places, arrays, chosen)
        results, pull_back, *_ = torch.func.vjp(function, *[arrays[k] for k in chosen])
        filled = [torch.zeros_like(y) if x is None else x for x, y in zip(gradients, results, strict=True)]
        found = dict(zip(chosen, pull_back(tuple(filled)), strict=True))
        return None, None, *[found.get(k) for k in range(len(arrays))]

    @staticmethod
    def jvp(ctx: Any, _derivative: None, _places: None, *given: Tensor | None) -> tuple[Any, ...]:
        arrays = ctx.saved_tensors
        chosen = [k for k in _differentiable(ctx.derivative, arrays) if given[k] is not None]
        function = _by_operations(ctx.derivative, ctx.places, arrays, chosen)
        found: tuple[Tensor, ...] = torch.func.jvp(
            function, tuple([arrays[k] for k in chosen]), tuple([given[k] for k in chosen])
        )[1]
        return found

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], derivative: Derivative, places: tuple[int, ...], *arrays: Tensor
    ) -> tuple[Any, Any]:
        chosen = range(len(arrays))

        def function(*elements: Tensor) -> tuple[Tensor, ...]:
            return _by_operations(derivative, places, elements, chosen)(*elements)

        mapped = torch.vmap(function, in_dims[2:], randomness=info.randomness)
        return mapped(*arrays), (0, 0)


def _split(derivative: Derivative, arrays: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the tensors of attention, and the other arrays."""
    count = derivative.spec.num_arrays
    return arrays[:count], arrays[count:]


def _differentiable(derivative: Derivative, arrays: Sequence[Tensor]) -> list[int]:
    """Return the indices of the arrays on which the tangents depend.

    Output and lse are not among them, because the array operations compute both again.
    """
    return [*derivative.differentiable_places, *range(derivative.spec.num_arrays + 2, len(arrays))]


def _by_operations(
    derivative: Derivative, places: Sequence[int], arrays: Sequence[Tensor], chosen: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the tangents of output and lse as a function of the arrays `chosen`, in differentiable operations."""

    def function(*variables: Tensor) -> tuple[Tensor, ...]:
        replaced = dict(zip(chosen, variables, strict=True))
        tensors, (output, lse, *directions) = _split(derivative, [replaced.get(k, x) for k, x in enumerate(arrays)])
        found = dict(zip(places, directions, strict=True))
        given = [found.get(place) for place in range(len(tensors))]
        types = [(output.shape, output.dtype), (lse.shape, lse.dtype)]
        output_tangent, lse_tangent = derivative.push_forward(tensors, (output, lse), given, types)
        assert output_tangent is not None
        assert lse_tangent is not None
        return output_tangent, lse_tangent

    return function
