"""DTensors: the local tensors and the group of a DTensor that is sharded along its positions, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ...errors import ParameterError

Placement = tuple[Any, tuple[Any, ...], tuple[int, ...]] | None  # mesh, placements, and the shape except d_v


def check_tensors(named: dict[str, Any]) -> None:
    """Raise ParameterError if an array is not a tensor."""
    for name, array in named.items():
        if not isinstance(array, Tensor):
            raise ParameterError(f"{name} is a {type(array).__name__}", "a tensor of torch", "torch.as_tensor(array)")


def local_tensors(query: Any, key: Any, value: Any, group: Any) -> tuple[list[Any], Any, Placement]:
    """Return (query, key and value of this rank, the group, the placement of the output; None for plain tensors).

    Raises
    ------
    ParameterError
        Some arrays are DTensors and others are not. The DTensors have different placements. They are sharded along
        another axis than the positions, or along several axes of the mesh.
    """
    arrays = [query, key, value]
    kinds = {isinstance(array, DTensor) for array in arrays}
    if kinds == {False}:
        return arrays, group, None
    if len(kinds) > 1:
        raise ParameterError(
            "DTensors and other arrays", "three of one kind", "DTensor.from_local(x, mesh, [Shard(-2)])"
        )
    if len({(array.device_mesh, array.placements) for array in arrays}) > 1:
        raise ParameterError("DTensors of different placements", "one placement", "redistribute them to Shard(-2)")
    mesh, placements = query.device_mesh, query.placements
    sharded = [axis for axis, place in enumerate(placements) if isinstance(place, Shard)]
    others = [place for axis, place in enumerate(placements) if axis not in sharded and not place.is_replicate()]
    if len(sharded) != 1 or others or placements[sharded[0]].dim % query.ndim != query.ndim - 2:
        raise ParameterError(
            f"DTensors with the placements {placements}",
            "Shard of the positions, axis −2, on one axis of the mesh, and Replicate on the others",
            "query.redistribute(mesh, [Shard(query.ndim - 2)])",
        )
    placement = mesh, tuple(placements), tuple(query.shape[:-1])
    return [array.to_local() for array in arrays], mesh.get_group(sharded[0]), placement


def to_dtensor(output: Tensor, placement: Placement) -> Any:
    """Return the output with this placement; the tensor itself if it is None."""
    if placement is None:
        return output
    mesh, placements, rows = placement
    shape = torch.Size([*rows, output.shape[-1]])
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(output, mesh, placements, run_check=False, shape=shape, stride=strides)
