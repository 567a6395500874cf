"""Tensors without entries, which a model passes unchanged to attention: `WrapperTensor`, and `StoredTensor` of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import ParameterError
from ..kv_cache import KVCache

if TYPE_CHECKING:
    from .decoding_cache import EvictingLayer


class WrapperTensor(Tensor):
    """A tensor with a shape, a dtype, a device and attributes, and without entries.

    Any other operation than the read of an attribute computes the dense tensor, and reads that.

    Attributes
    ----------
    dense : callable
        It returns the dense tensor.
    """

    dense: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: Any, device: Any, dtype: torch.dtype = torch.bool, **attributes: Any) -> Self:
        tensor: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        vars(tensor).update(attributes)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_dense(function, inputs, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({vars(self).get('formula', self.dtype)}, {tuple(self.shape)})"


def call_dense(function: Any, inputs: Any, kwargs: Any) -> Any:
    """Call a function with the dense tensor in place of each `WrapperTensor`."""

    def dense(value: Any) -> Any:
        return value.dense() if isinstance(value, WrapperTensor) else value

    return function(*tree_map(dense, inputs), **tree_map(dense, kwargs or {}))


class StoredTensor(WrapperTensor):
    """A tensor (B, G, m, d) with the model's dtype and no entries, in place of keys or values in a `KVCache`.

    A `sightline.transformers.Cache` that stores another dtype, evicts keys or was forked returns such tensors. A model
    passes the tensor to its attention, and `sightline_attention` reads the `KVCache`. Other operations raise an error.

    Attributes
    ----------
    cache : KVCache
    evicting : EvictingLayer, optional
        The layer of a `Cache` that evicts keys after attention.
    """

    cache: KVCache
    evicting: EvictingLayer | None = None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        stored = next(x.cache.dtype for x in tree_leaves((inputs, kwargs)) if isinstance(x, cls))
        raise ParameterError(
            f"{function} of keys or values in a sightline.transformers.Cache that stores {stored}, evicts keys, or was "
            "forked",
            'models that pass keys and values to attention unchanged, with attn_implementation="sightline"',
            'model.set_attn_implementation("sightline"). For models that compute with the stored keys, as DeepSeek V3 '
            "does, Cache() without dtype= and evict=, and cache.batch_repeat_interleave(count) in place of fork(count)",
        )
