"""Convert DTensors that are sharded along the positions to local tensors, and a local output to a DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ...errors import ParameterError

Placement = tuple[Any, tuple[Any, ...], tuple[int, ...]] | None  # mesh, placements, and the shape except d_v


def check_tensors(named: dict[str, Any]) -> None:
    """Raise ParameterError if the arrays are neither three tensors nor three DTensors that `attention` takes.

    The DTensors that `attention` takes have one placement: sharded along the positions on one axis of the mesh, and
    replicated on the other axes.
    """
    for name, array in named.items():
        if not isinstance(array, Tensor):
            raise ParameterError(f"{name} is a {type(array).__name__}", "a tensor of torch", "torch.as_tensor(array)")
    arrays = list(named.values())
    given = [array for array in arrays if isinstance(array, DTensor)]
    if not given:
        return
    if len(given) < len(arrays):
        raise ParameterError(
            "DTensors and plain tensors as query, key and value",
            "three DTensors, or three plain tensors",
            "DTensor.from_local(x, mesh, [Shard(-2)])",
        )
    if len({(array.device_mesh, array.placements) for array in given}) > 1:
        raise ParameterError("DTensors of different placements", "one placement", "redistribute all to Shard(-2)")
    first: Any = given[0]
    sharded = _sharded_axes(first)
    others = [place for axis, place in enumerate(first.placements) if axis not in sharded and not place.is_replicate()]
    if len(sharded) != 1 or others or first.placements[sharded[0]].dim % first.ndim != first.ndim - 2:
        raise ParameterError(
            f"DTensors with the placements {first.placements}",
            "Shard of the positions, axis −2, on one axis of the mesh, and Replicate on the others",
            "query.redistribute(mesh, [Shard(query.ndim - 2)])",
        )


def local_tensors(arrays: list[Any], group: Any) -> tuple[list[Any], Any, Placement]:
    """Return (local arrays, group, placement of the output). The placement of plain tensors is None.

    Arrays that `check_tensors` refuses raise no error here, because this rank needs the group to report the error.
    """
    local = [array.to_local() if isinstance(array, DTensor) else array for array in arrays]
    query = arrays[0]
    if not all(isinstance(array, DTensor) for array in arrays) or len(_sharded_axes(query)) != 1:
        return local, group, None
    mesh, (axis,) = query.device_mesh, _sharded_axes(query)
    return local, mesh.get_group(axis), (mesh, tuple(query.placements), tuple(query.shape[:-1]))


def _sharded_axes(array: Any) -> list[int]:
    """Return the axes of the mesh along which a DTensor is sharded."""
    return [axis for axis, place in enumerate(array.placements) if isinstance(place, Shard)]


def to_dtensor(output: Tensor, placement: Placement) -> Any:
    """Return the output as a DTensor with this placement; `output` itself if the placement is None."""
    if placement is None:
        return output
    mesh, placements, rows = placement
    shape = torch.Size([*rows, output.shape[-1]])
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(output, mesh, placements, run_check=False, shape=shape, stride=strides)
