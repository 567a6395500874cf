"""The axes of weights that a model computes by hand: where functions move them, and over which a product sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ..caching import cached_property


def find_functions(names: str) -> set[Any]:
    """Return the functions with these names, those of torch and its modules and the methods of tensors."""
    owners = torch, Tensor, functional, torch.linalg, torch.special
    found = [getattr(owner, name, None) for owner in owners for name in names.split()]
    return {one for one in found if callable(one)}


PRODUCTS = find_functions("matmul __matmul__ __rmatmul__ mm bmm baddbmm addmm einsum tensordot")
WITH_SUMMAND = find_functions("baddbmm addmm")  # the first argument is added to the product
RESHAPES = find_functions("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as")
MOVES = find_functions("transpose permute swapaxes swapdims movedim moveaxis t adjoint")
MOVES |= {x.__get__ for x in (Tensor.mT, Tensor.T, Tensor.mH, Tensor.H)}  # type: ignore[attr-defined]
DIGITS = "0123456789"  # the axes of "..." in an equation


@dataclass(frozen=True, eq=False)
class TorchCall:
    """A call of a function of torch, with its positional and its named arguments."""

    function: Any
    inputs: tuple[Any, ...]
    options: dict[str, Any]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [x for x in tree_leaves((self.inputs, self.options)) if isinstance(x, Tensor)]

    def repeat(self, x: Tensor, other: Tensor) -> Any:
        """Return the result of the call with the tensor `other` in place of x."""
        options = {name: other if option is x else option for name, option in self.options.items()}
        return self.function(*[other if given is x else given for given in self.inputs], **options)

    def find_axis(self, axis: int, x: Tensor) -> int:
        """Return the index of an axis of x in the result, found by a call on a tensor whose lengths all differ."""
        lengths = range(2, x.ndim + 2)
        moved = self.repeat(x, torch.empty(*lengths, device="meta"))
        return list(moved.shape).index(lengths[axis])

    @property
    def operands(self) -> list[Tensor]:
        """The tensors that the function, one of PRODUCTS, multiplies, from left to right."""
        if self.function is torch.einsum:
            return self.tensors
        operands = self.tensors[1:3] if self.function in WITH_SUMMAND else self.tensors[:2]
        return operands[::-1] if self.function is Tensor.__rmatmul__ else operands

    def order_axes(self, keys: int, x: Tensor) -> tuple[int, ...] | None:
        """Return the axes of the weights x in the order (..., queries, keys), as the function, a product, reads them.

        `keys` is the axis of the keys, from 0. The result is None if the product does not sum over this axis alone, or
        if several axes may be the queries.
        """
        if self.function is torch.einsum:
            return _read_equation(keys, self.inputs[0], self.tensors, x)
        operands = self.operands
        if len(operands) < 2 or x.ndim < 2 or self.function is torch.tensordot:
            return None
        left, right = operands
        axes = tuple(range(x.ndim))
        if x is left and keys == axes[-1]:
            return axes
        if x is right and keys == axes[-2]:
            return (*axes[:-2], axes[-1], axes[-2])
        return None


def _read_equation(keys: int, equation: Any, tensors: list[Tensor], x: Tensor) -> tuple[int, ...] | None:
    """Return the result of `TorchCall.order_axes` for an equation of einsum such as "bhij,bhjd->bhid"."""
    if not isinstance(equation, str) or "->" not in equation or len(tensors) != 2:
        return None
    terms, output = equation.replace(" ", "").split("->")
    given = terms.split(",")
    own, other = given if tensors[0] is x else given[::-1]
    leading = DIGITS[: x.ndim - len(own.replace("...", ""))]
    own, other, output = (term.replace("...", leading) for term in (own, other, output))
    summed = [axis for axis, letter in enumerate(own) if letter not in output]
    queries = [axis for axis, letter in enumerate(own) if letter in output and letter not in other]
    if len(set(own)) != x.ndim or summed != [keys] or own[keys] not in other or len(queries) != 1:
        return None
    return (*[axis for axis in range(x.ndim) if axis not in (*queries, keys)], *queries, keys)
