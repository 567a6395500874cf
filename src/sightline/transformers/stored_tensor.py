"""`StoredTensor`: keys or values of a model in a `KVCache`, where only the attention of this library reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import ParameterError
from ..kv_cache import KVCache

if TYPE_CHECKING:
    from .decoding_cache import EvictingLayer


class StoredTensor(Tensor):
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
    evicting: EvictingLayer | None

    @staticmethod
    def __new__(
        cls,
        cache: KVCache,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Any,
        evicting: EvictingLayer | None = None,
    ) -> StoredTensor:
        tensor: StoredTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor.cache, tensor.evicting = cache, evicting
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({self.cache.dtype}, {tuple(self.shape)})"
