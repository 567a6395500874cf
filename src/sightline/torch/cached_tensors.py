"""How the call cache reads the layouts and addresses of tensors."""

from __future__ import annotations

import torch
from torch import _C, Tensor
from torch.nn import Parameter

from ..arrays.layouts import BOOLEANS, FRAMEWORKS, MAX_GPUS, Layout, Tensors, make_kind
from ..arrays.operations import TORCH
from ..call.lookup import LOOKUP
from .interception import INTERCEPTIONS

_DLPACK_CODES = {  # the code of each dtype in the struct DLDataType of DLPack
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), 0),
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64), 1),
    **dict.fromkeys((torch.float16, torch.float32, torch.float64), 2),
    torch.bfloat16: 4,
    torch.bool: 6,
}


def _read(tensor: Tensor) -> tuple[Layout, int] | None:
    """Return the layout and the address of a tensor; None if the call cache cannot serve the tensor."""
    gpu = 0 if tensor.is_cpu else 1 + tensor.get_device() if tensor.is_cuda else None
    if gpu is None or gpu > MAX_GPUS or tensor.dtype not in _DLPACK_CODES or tensor.is_neg():
        return None
    size = tensor.dtype.itemsize
    dtype = 1 << 16 | 8 * size << 8 | _DLPACK_CODES[tensor.dtype]
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    try:
        strides = tuple([size * stride for stride in tensor.stride()])
        address = tensor.data_ptr()
        layout = Layout(make_kind(size, dtype, needs_gradient, True, gpu), tuple(tensor.shape), strides)
        return (layout, address) if address else None
    except RuntimeError:  # tensors that are sparse, nested or opaque have no strides
        return None


def register_tensors() -> None:
    """Let the call cache serve tensors. The module `sightline.torch.dispatch` calls this function on import."""
    BOOLEANS.add(torch.bool)
    FRAMEWORKS.update({Tensor: TORCH, Parameter: TORCH})
    conditions = *INTERCEPTIONS, _C._is_any_autocast_enabled
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    LOOKUP.serve_tensors(Tensors((Tensor, Parameter), _read, conditions, torch.is_grad_enabled, exchange))
