"""How the call cache reads the layouts and addresses of tensors, and how it allocates tensors for results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import _C, Tensor
from torch.nn import Parameter

from ..arrays.layouts import ADAPTERS, BOOLEANS, MAX_GPUS, ArrayAdapter, Layout, Tensors, make_kind
from ..arrays.operations import empty
from ..call.lookup import LOOKUP
from .interception import INTERCEPTIONS
from .operator import make_seed

_DLPACK_CODES = {  # the code of each dtype in the struct DLDataType of DLPack
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), 0),
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64), 1),
    **dict.fromkeys((torch.float16, torch.float32, torch.float64), 2),
    torch.bfloat16: 4,
    torch.bool: 6,
}


def make_empty(shape: tuple[int, ...], dtype: torch.dtype | str, heads_in_rows: bool = False) -> Callable[[], Tensor]:
    """Return a function without arguments that allocates a tensor as `arrays.operations.empty` does."""
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    if heads_in_rows:
        strides = empty(shape, "float32", torch.empty((), device="meta"), heads_in_rows).stride()
        return partial(torch.empty_strided, shape, strides, dtype=dtype, device="cpu")
    example = torch.empty((), dtype=dtype, device="cpu").expand(shape)  # it has the memory of one number
    return partial(torch.empty_like, example)  # half the time of `torch.empty` with a dtype


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


def _finish_lse(lse: Tensor, output: Tensor) -> Tensor:
    return lse if output.dtype == torch.float64 else lse.float()


def register_tensors() -> None:
    """Let the call cache serve tensors. The module `sightline.torch.dispatch` calls this function on import."""
    BOOLEANS.add(torch.bool)
    adapter = ArrayAdapter(Tensor.data_ptr, make_empty, _finish_lse, lambda: int(make_seed(None)))
    ADAPTERS.update({Tensor: adapter, Parameter: adapter})
    LOOKUP.serve_tensors(
        Tensors(
            (Tensor, Parameter),
            _read,
            (*INTERCEPTIONS, _C._is_any_autocast_enabled),
            torch.is_grad_enabled,
            getattr(Tensor, "__dlpack_c_exchange_api__", None),
        )
    )
