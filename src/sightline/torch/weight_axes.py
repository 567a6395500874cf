"""The axes of weights that a model computes by hand: where functions move them, and over which a product sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


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


def call_with(
    other: Tensor, function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any], x: Tensor
) -> Any:
    """Return `function(*inputs, **options)` with the tensor `other` in place of x."""
    changed = {name: other if option is x else option for name, option in options.items()}
    return function(*[other if given is x else given for given in inputs], **changed)


def find_axis(
    axis: int, function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any], x: Tensor
) -> int:
    """Return the index of an axis of x after `function`, found by a call on a tensor whose lengths all differ."""
    lengths = range(2, x.ndim + 2)
    moved = call_with(torch.empty(*lengths, device="meta"), function, inputs, options, x)
    return list(moved.shape).index(lengths[axis])


def find_operands(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors of a call that `function`, one of PRODUCTS, multiplies, from left to right."""
    if function is torch.einsum:
        return tensors
    operands = tensors[1:3] if function in WITH_SUMMAND else tensors[:2]
    return operands[::-1] if function is Tensor.__rmatmul__ else operands


def order_axes(
    keys: int, function: Callable[..., Any], inputs: tuple[Any, ...], tensors: list[Tensor], x: Tensor
) -> tuple[int, ...] | None:
    """Return the axes of the weights x in the order (..., queries, keys), as one of PRODUCTS reads them.

    The result is None if the product does not sum over the axis `keys` alone, or if several axes may be the queries.

    Parameters
    ----------
    keys : the axis of the keys, from 0
    function, inputs : the product and its positional arguments
    tensors : the tensors among all arguments
    x : the weights, one of these tensors
    """
    if function is torch.einsum:
        return _read_equation(keys, inputs[0], tensors, x)
    operands = find_operands(function, tensors)
    if len(operands) < 2 or x.ndim < 2 or function is torch.tensordot:
        return None
    left, right = operands
    axes = tuple(range(x.ndim))
    if x is left and keys == axes[-1]:
        return axes
    if x is right and keys == axes[-2]:
        return (*axes[:-2], axes[-1], axes[-2])
    return None


def _read_equation(keys: int, equation: Any, tensors: list[Tensor], x: Tensor) -> tuple[int, ...] | None:
    """Return the result of `order_axes` for an equation of einsum such as "bhij,bhjd->bhid"."""
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
