"""Forward derivatives of output and lse by the generated kernel. Array operations differentiate them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from . import operator

if TYPE_CHECKING:
    from .derivatives import Derivative


@dataclass(frozen=True)
class ForwardDerivative:
    """The tangents of output and lse, which `derivatives.apply` computes as it computes a `Derivative`.

    Its tensors are those of attention, output, lse, and the tangents of the tensors `places` of attention.
    """

    derivative: Derivative
    places: tuple[int, ...]
    num_saved_outputs: ClassVar[int] = 0

    def compute(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tangents of output and lse."""
        spec = self.derivative.spec
        given, (output, lse, *directions) = self._split(tensors)
        arguments = *spec.unflatten(given), *spec
        found: list[Tensor] = operator.attention_tangent(directions, list(self.places), output, lse, *arguments)
        return found

    def differentiate(
        self, tensors: Sequence[Tensor], _: Sequence[Tensor], gradients: Sequence[Tensor | None], __: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the tensors, as `Derivative.differentiate` does."""
        chosen = self._differentiable(tensors)
        results, pull_back, *_ = torch.func.vjp(self._by_operations(tensors, chosen), *[tensors[k] for k in chosen])
        filled = [torch.zeros_like(y) if x is None else x for x, y in zip(gradients, results, strict=True)]
        found = dict(zip(chosen, pull_back(tuple(filled)), strict=True))
        return [found.get(k) for k in range(len(tensors))]

    def push_forward(
        self, tensors: Sequence[Tensor], _: Sequence[Tensor], tangents: Sequence[Tensor | None], __: Sequence[Any]
    ) -> Sequence[Tensor]:
        """Return the tangents of the tangents, as `Derivative.push_forward` does."""
        chosen = [k for k in self._differentiable(tensors) if tangents[k] is not None]
        pairs = tuple([tensors[k] for k in chosen]), tuple([tangents[k] for k in chosen])
        found: tuple[Tensor, ...] = torch.func.jvp(self._by_operations(tensors, chosen), *pairs)[1]
        return found

    def batch(self, tensors: Sequence[Tensor], dims: Sequence[int | None], _: int) -> Sequence[Tensor]:
        """Return the tangents of all elements, as `Derivative.batch` does."""

        def function(*elements: Tensor) -> tuple[Tensor, ...]:
            return self._by_operations(elements, range(len(elements)))(*elements)

        found: tuple[Tensor, ...] = torch.vmap(function, tuple(dims))(*tensors)
        return found

    def _split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the tensors of attention, and the others."""
        count = self.derivative.spec.num_arrays
        return tensors[:count], tensors[count:]

    def _differentiable(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of the tensors on which the tangents depend.

        Output and lse are not among them, because the array operations compute both again.
        """
        return [*self.derivative.differentiable_places, *range(self.derivative.spec.num_arrays + 2, len(tensors))]

    def _by_operations(self, tensors: Sequence[Tensor], chosen: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]:
        """Return the tangents of output and lse as a function of the tensors `chosen`, in differentiable operations."""

        def function(*variables: Tensor) -> tuple[Tensor, ...]:
            replaced = dict(zip(chosen, variables, strict=True))
            given, (output, lse, *directions) = self._split([replaced.get(k, x) for k, x in enumerate(tensors)])
            found = dict(zip(self.places, directions, strict=True))
            types = [(x.shape, x.dtype) for x in (output, lse)]
            own = [found.get(place) for place in range(len(given))]
            return tuple(self.derivative.push_by_operations(given, (output, lse), own, types))

        return function
