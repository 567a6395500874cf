"""`torch.vmap` of attention and its derivatives: one call for all elements of the mapped axis.

The mapped axis becomes a leading batch axis of query, key, value and the outputs. `call.batching` writes the formulas
of the joined call. An operand that is the same in every element is expanded with stride 0. All elements share a table
that is the same in every element, unless the call returns its gradient. If sinks differ between elements, and in every
derivative of a call with sinks, the axes of elements, batch and heads are joined to one axis of heads.

Dropout with one seed for all elements drops the same weights in each. The random numbers depend on the position in the
batch, so these elements are computed one after another. If seeds differ, one call with the first seed computes all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..call.batching import join_spec
from ..call.problem import NUM_OPERANDS
from ..call.spec import CallSpec
from ..statistics import Statistic, lse

if TYPE_CHECKING:
    from .derivatives import Derivative

ShapeDtype = tuple[tuple[int, ...], torch.dtype]  # the shape and the dtype of a tensor
LSE = lse()


def batch(
    apply: Callable[..., Sequence[Tensor]],
    derivative: Derivative,
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    size: int,
) -> list[Tensor]:
    """Return the outputs of all elements; their first axis is the mapped one.

    apply : the function that computes a derivative of its tensors
    dims : the mapped axis of each tensor; None for a tensor that is the same in every element
    size : the number of elements
    """
    if derivative.spec.has_seed and dims[-1] is None:
        pairs = list(zip(tensors, dims, strict=True))
        elements = [[x if dim is None else x.select(dim, k) for x, dim in pairs] for k in range(size)]
        results = [apply(derivative, *element) for element in elements]
        return [torch.stack(list(arrays)) for arrays in zip(*results, strict=True)]
    join = _Join(derivative, tensors, dims, size)
    outputs = apply(join.derivative, *join.inputs)
    return [join.split(kind, output) for kind, output in zip(join.output_kinds, outputs, strict=True)]


@dataclass(frozen=True)
class _Kind:
    """The kind of a tensor of a derivative, which says what its axes are.

    name : "rows" for an array with the axes (*batch_shape, H, ...), "table", "sinks" or "seed"
    of : the statistic that the array belongs to; it says whether heads or batch are averaged
    """

    name: str
    of: Statistic = LSE


ROWS, TABLE, SINKS, SEED = (_Kind(name) for name in ("rows", "table", "sinks", "seed"))


class _Join:
    """The joined call for the elements of a mapped call.

    `join` makes inputs of the joined call as linear functions of the elements' inputs. `split` applies the transposed
    functions to its outputs. So a derivative of the joined call is the joined call of the derivative. The joined call
    computes statistics without means over the axes that it joins.

    derivative, inputs : the joined call
    output_kinds : the kind of each output
    """

    def __init__(
        self, derivative: Derivative, tensors: Sequence[Tensor], dims: Sequence[int | None], size: int
    ) -> None:
        spec, first = derivative.spec, len(tensors) - derivative.spec.num_arrays
        shapes = [[n for axis, n in enumerate(x.shape) if axis != dim] for x, dim in zip(tensors, dims, strict=True)]
        types = tuple([(tuple(shape), x.dtype) for shape, x in zip(shapes, tensors, strict=True)])[first:]
        problem = spec.problem(spec.unflatten([_example(*each) for each in types]))
        self.batch_shape, self.size, self.num_heads = problem.batch_shape, size, problem.H
        results = [_Kind("rows", statistic) for statistic in problem.see for _ in range(statistic.num_arrays)]
        kinds, output_kinds = _kinds(derivative, [ROWS, ROWS, *results])
        has_gradients = derivative.order > 0
        self.has_joined_heads = SINKS in kinds and (
            has_gradients or any(kind is SINKS and dim is not None for kind, dim in zip(kinds, dims, strict=True))
        )
        learned = derivative.learned_tables
        tables = first + spec.table_places.start
        is_mapped = tuple([dims[tables + k] is not None or k in learned for k in range(spec.num_tables)])
        joined = _join_spec(spec, types, is_mapped, size, self.has_joined_heads)
        self.derivative, self.output_kinds = derivative.with_spec(joined), output_kinds
        stays = {tables + k for k, one in enumerate(is_mapped) if not one}
        self.inputs = [
            x if place in stays else self.join(kind, x, dim)
            for place, (kind, x, dim) in enumerate(zip(kinds, tensors, dims, strict=True))
        ]

    def join(self, kind: _Kind, tensor: Tensor, dim: int | None) -> Tensor:
        """Return an input of the elements as an input of the joined call."""
        if kind is SEED:
            return tensor.select(dim or 0, 0)
        if kind is SINKS and not self.has_joined_heads:
            return tensor
        tensor = tensor.expand(self.size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        if kind is TABLE:
            return tensor
        if kind is SINKS:
            tensor = tensor[:, None].expand(self.size, self.num_batches, self.num_heads)
            return tensor.reshape(-1)
        heads = (self.num_heads,) * (kind.of.over_heads and self.has_joined_heads)
        rest = tensor.shape[1 if kind.of.over_batch else 1 + len(self.batch_shape) :]
        shape = self.size, *self.batch_shape, *heads, *rest
        tensor = self.mean(kind).spread(tensor, shape, len(self.batch_shape), has_heads=True, first=1)
        return tensor.flatten(0, 1 + len(self.batch_shape)).unsqueeze(0) if self.has_joined_heads else tensor

    def split(self, kind: _Kind, tensor: Tensor) -> Tensor:
        """Return an output of the joined call as an output of the elements."""
        if kind is TABLE:
            return tensor
        if kind is SINKS:
            return tensor.view(self.size, self.num_batches, self.num_heads).sum(1)
        if self.has_joined_heads:
            heads = tensor.shape[1] // max(self.size * self.num_batches, 1)  # those of query or those of key
            tensor = tensor.reshape(self.size, *self.batch_shape, heads, *tensor.shape[2:])
        averaged: Tensor = self.mean(kind).average(tensor, len(self.batch_shape), first=1)
        return averaged

    @property
    def num_batches(self) -> int:
        return math.prod(self.batch_shape)

    def mean(self, kind: _Kind) -> Any:
        """Return the mean over the axes that are joined, or a statistic without a mean."""
        of: Any = kind.of
        return replace(of, over_heads=False, factors=1.0) if of.over_heads and not self.has_joined_heads else of


def _kinds(derivative: Derivative, results: list[_Kind]) -> tuple[list[_Kind], list[_Kind]]:
    """Return the kinds of a derivative's tensors and outputs; `results` are the kinds of the results of order 0."""
    if derivative.below is None:
        spec = derivative.spec
        tensors = [ROWS] * NUM_OPERANDS + [TABLE] * spec.num_tables + [SINKS] * spec.has_sinks + [SEED] * spec.has_seed
        return tensors, results
    below, outputs = _kinds(derivative.below, results)
    if derivative.order == 1:
        outputs = [outputs[k] for k in derivative.gradient_indices] + [ROWS, ROWS]
    kinds = outputs + below
    return kinds, [kinds[place] for place in derivative.output_places]


def _example(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


@lru_cache(256)
def _join_spec(
    spec: CallSpec, types: tuple[ShapeDtype, ...], is_mapped: tuple[bool, ...], size: int, has_joined_heads: bool
) -> CallSpec:
    """Return the specification of the joined call. `types` are the types of one element's arrays."""
    old = spec.unflatten([_example(*each) for each in types])
    pairs = zip(old.tables, is_mapped, strict=True)
    new = [_example((size, *x.shape) if one else x.shape, x.dtype) for x, one in pairs]

    def change(statistic: Any) -> Any:
        """Return the statistic without the mean over the batch, and without the mean over heads if heads are joined."""
        is_over_heads = statistic.over_heads and not has_joined_heads
        return replace(statistic, over_batch=False) if is_over_heads else statistic.unaveraged

    return join_spec(spec, old, new, is_mapped, has_joined_heads=has_joined_heads, change=change)
