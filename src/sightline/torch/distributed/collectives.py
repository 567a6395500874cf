"""Functions on shards: `shard`, `unshard`, and exchanges of tensors between all ranks, which have gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.partition.shards import ShardLayout, Shards, Span, check_shards, divide
from ...errors import ParameterError, ShapeError
from .agreement import agree, describe_shard
from .group import Group


def shard(x: Tensor, *, group: Any = None, layout: ShardLayout = "contiguous", axis: int = -2) -> Tensor:
    """Return this rank's shard of a tensor that every rank has whole.

    Parameters
    ----------
    x : (..., n, ...)
        The tensor with the whole sequence, with the same entries on every rank.
    group : ProcessGroup or DeviceMesh of one axis, optional
        The ranks. The default is all processes.
    layout : {"contiguous", "zigzag"}
        The division of the positions. "contiguous" gives rank r the r-th of R parts. "zigzag" gives rank r the parts r
        and 2R − 1 − r of 2R. Parts begin at multiples of 4.
    axis : int, default −2
        The axis of the positions.

    Returns
    -------
    shard : (..., n_r, ...)
        A contiguous tensor. It has a gradient: each rank's gradient of x is 0 outside its own shard.

    Raises
    ------
    ParameterError
        torch.distributed is not initialized, `layout` is neither of the two words, or `x` is no tensor.
    ShapeError
        `x` has no such axis.
    """
    own = Group(group)
    check_axis(x, axis)
    return cut_spans(x, divide(x.shape[axis], own.size, layout).ranks[own.rank], axis)


def unshard(x: Tensor, *, group: Any = None, layout: ShardLayout = "contiguous", axis: int = -2) -> Tensor:
    """Return the whole tensor from the shards of all ranks; the inverse of `shard`.

    Parameters
    ----------
    x : (..., n_r, ...)
        This rank's shard.
    group, layout, axis : as in `shard`

    Returns
    -------
    whole : (..., n, ...)
        The whole tensor, on every rank. It has a gradient: a shard's gradient is the sum of the gradients of all ranks.

    Raises
    ------
    ShapeError
        The shards do not have the lengths that `shard` gives them, or `x` has no such axis. With layout="contiguous"
        all lengths are allowed.
    RankError
        The shards of the ranks differ in dtype, in `requires_grad`, or in a length on another axis than `axis`. Or
        another rank passed other arguments, died or did not answer within the group's timeout.
    """
    own = Group(group)

    def describe() -> tuple[tuple[int, ...], dict[str, str]]:
        check_axis(x, axis)
        return (x.shape[axis],), {"layout": str(layout)} | describe_shard("x", x, axis)

    numbers = agree(own, describe, x)
    shards = check_shards("shards", [row[0] for row in numbers], layout)
    return apply_maps(own, [gathering(own, shards, axis % x.ndim)], [x])[0]


def check_axis(x: Any, axis: int) -> None:
    """Raise ParameterError if `x` is no tensor, and ShapeError if the tensor does not have the axis."""
    if not isinstance(x, Tensor):
        raise ParameterError(f"x is a {type(x).__name__}", "a tensor of torch", "torch.as_tensor(x)")
    if not -x.ndim <= axis < x.ndim:
        given = f"axis={axis} of a tensor of shape {tuple(x.shape)}"
        cure = "axis=0 for one number per position; axis=-2 for query, key and value, the default"
        raise ShapeError(given, "the axis of the positions, one of the tensor's axes", cure)


class LinearMap(NamedTuple):
    """An exchange of a tensor between all ranks, and its transpose, which is the exchange of its gradient.

    A loss is the sum of the losses of all ranks.
    """

    apply: Callable[[Tensor], Tensor]
    apply_transposed: Callable[[Tensor], Tensor]

    @property
    def transposed(self) -> LinearMap:
        return LinearMap(self.apply_transposed, self.apply)


def apply_maps(group: Group, maps: Sequence[LinearMap], arrays: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return each array as its map gives it. All ranks make the same call."""
    found: tuple[Tensor, ...] = _ApplyMaps.apply(group, tuple(maps), *arrays)  # type: ignore[no-untyped-call]
    return found


class _ApplyMaps(torch.autograd.Function):
    """Linear maps of several tensors. All ranks must make the same transfers, but their losses may read other results.

    So one node of the graph has all tensors of a call. Before the backward pass the ranks tell each other which results
    have gradients. Only these are sent.
    """

    @staticmethod
    def forward(ctx: Any, group: Group, maps: tuple[LinearMap, ...], *arrays: Tensor) -> tuple[Tensor, ...]:
        results = [linear_map.apply(x) for linear_map, x in zip(maps, arrays, strict=True)]
        ctx.group, ctx.transposed = group, [linear_map.transposed for linear_map in maps]
        ctx.results = [x.new_empty(()).expand(x.shape) for x in results]  # shapes, dtypes and devices, without memory
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x in results if not x.is_floating_point()])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        flags = torch.tensor(
            [gradient is not None for gradient in gradients], dtype=torch.int64, device=ctx.results[0].device
        )
        is_wanted = torch.stack(ctx.group.exchange(flags, "which results have gradients")).any(dim=0).tolist()
        d_results = [torch.zeros_like(x) if d is None else d for d, x in zip(gradients, ctx.results, strict=True)]
        wanted = list(compress(d_results, is_wanted))
        d_arrays = iter(apply_maps(ctx.group, list(compress(ctx.transposed, is_wanted)), wanted))
        return None, None, *[next(d_arrays) if is_needed else None for is_needed in is_wanted]


def gathering(group: Group, shards: Shards, axis: int) -> LinearMap:
    """Return the map from each rank's shard to the whole tensor. Its transpose adds the ranks' shards of the wholes."""
    arguments: dict[str, Any] = {"group": group, "shards": shards, "axis": axis}
    return LinearMap(partial(_gather, **arguments), partial(_scatter, **arguments))


def _gather(x: Tensor, group: Group, shards: Shards, axis: int) -> Tensor:
    """Return the whole tensor from the shards of all ranks."""
    shapes = [(*x.shape[:axis], length, *x.shape[axis + 1 :]) for length in shards.lengths]
    buffers = [x.new_empty(shape) for shape in shapes]
    return join_shards(group.send_to_all([x.contiguous()] * group.size, buffers, "shards"), shards, axis)


def _scatter(whole: Tensor, group: Group, shards: Shards, axis: int) -> Tensor:
    """Return the sum of this rank's shards of the whole tensors of all ranks, added in the order of the ranks."""
    parts = [cut_spans(whole, spans, axis) for spans in shards.ranks]
    buffers = [torch.empty_like(parts[group.rank]) for _ in parts]
    found = group.send_to_all(parts, buffers, "gradients of shards")
    total = found[0].clone()
    for part in found[1:]:
        total += part
    return total


def cut_spans(x: Tensor, spans: Sequence[Span], axis: int) -> Tensor:
    """Return the positions of some spans on `axis` of a tensor with the whole sequence, as one contiguous tensor."""
    parts = [x.narrow(axis, span.start, len(span)) for span in spans]
    return torch.cat([x.narrow(axis, 0, 0), *parts], dim=axis).contiguous()


def join_shards(parts: Sequence[Tensor], shards: Shards, axis: int) -> Tensor:
    """Return the tensor with the whole sequence from the parts of all ranks."""
    shape = list(parts[0].shape)
    shape[axis] = shards.length
    whole = parts[0].new_empty(shape)
    for spans, part in zip(shards.ranks, parts, strict=True):
        for span in spans:
            whole.narrow(axis, span.start, len(span)).copy_(part.narrow(axis, span.row, len(span)))
    return whole
