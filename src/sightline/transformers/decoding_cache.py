"""`Cache`: keys and values of a transformers model during generation, with a `KVCache` for each layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from ..arrays.operations import to_numpy
from ..errors import ParameterError
from ..eviction import Policy
from ..kv_cache import KVCache
from ..kv_cache.argument_checks import read_owners
from ..kv_cache.row_positions import find_rows
from ..statistics import Statistic
from .compatibility import CACHE, DynamicLayer, DynamicSlidingWindowLayer, positions_to_remove
from .masks_and_biases import WrapperTensor

SLACK = 4  # a sliding layer stores up to 1 / SLACK of its window more than it needs, so it rarely copies positions


class Cache(DynamicCache):  # type: ignore[misc]
    """A `transformers.Cache` that appends a token without a copy of the earlier ones, unless its storage is full.

    `model.generate(..., cache=sightline.transformers.Cache())` generates the tokens that transformers' own
    `DynamicCache` gives: greedy, sampled, by beams or with drafts. Before transformers 5.24 the argument is
    `past_key_values`. `DynamicCache` copies all keys and values of a layer at every token. Here each layer has a
    `sightline.KVCache`, and the layer's attention reads views of its storage. The views are plain tensors, so models
    with another attention implementation work too.

    Parameters
    ----------
    config : transformers.PreTrainedConfig, optional
        The model's configuration. With it, a layer with a sliding window stores at most 2.5 windows, usually 1.25.
        Default: every layer stores all positions, as in `DynamicCache()`.
    dtype : {"float16", "bfloat16", "float32", "float64", "int8", "int4", "float8_e4m3fn"} or a pair, optional
        The dtype of the stored keys and values, such as "bfloat16" for half the memory of a float32 model. Models with
        `attn_implementation="sightline"` then compute attention in this dtype. "int8", "int4", "float8_e4m3fn", or a
        pair of them such as ("int8", "int4") for keys and values, make each layer's `KVCache` quantised. Default: the
        model's dtype.
    evict : Policy, optional
        The policy that chooses the keys to keep, such as `sightline.eviction.SnapKV(budget=1024)`. Default: keep all.

    Raises
    ------
    DtypeError
        dtype is not one of those above.
    ParameterError
        A layer's keys require a gradient: call the model under `torch.no_grad()`, as `generate` does. An
        encoder-decoder model has a single cache. `config` is no configuration, has fewer layers than the model, or is
        missing for a model with layers that store no keys, such as linear attention. The cache has another dtype than
        the model, and the model's own code reads the stored keys, with another `attn_implementation` or in DeepSeek V3.
        `evict` is no policy. A policy that reads only positions meets texts with padding.

    Notes
    -----
    An encoder-decoder model needs a cache for self-attention and one for cross-attention:
    `transformers.EncoderDecoderCache(Cache(), Cache())`. With a single `DynamicCache`, transformers joins the keys of
    both kinds of attention, and the text is wrong. With a single `Cache`, an error is raised.

    With `evict`, each layer without a window keeps the keys that the policy chooses after a call. Masks still read the
    positions of the text. Only attention of this library reads such a cache, so the model needs
    `attn_implementation="sightline"`. Decoding with drafts raises an error, because evicted keys do not come back.

    `copy.deepcopy(cache)` copies no keys and values. The copy and the original share them until the copy or the
    original appends, so a prompt that many texts continue is computed and stored once.

    With `config`, layers of other kinds are those of `DynamicCache(config=config)`, such as layers of linear attention,
    or layers of Falcon-H1, which compute linear attention and attention.

    Examples
    --------
    >>> import torch, transformers, sightline.transformers
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sightline")
    >>> ids = torch.arange(5)[None]
    >>> cache = sightline.transformers.Cache()
    >>> model.generate(ids, cache=cache, max_new_tokens=3, do_sample=False).shape
    torch.Size([1, 8])
    >>> cache.get_seq_length(), cache.layers[0].cache.dtype
    (7, 'float32')
    """

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(
        self, *, config: Any = None, dtype: str | tuple[str, str] | None = None, evict: Policy | None = None
    ) -> None:
        KVCache(dtype=dtype)  # raises for other dtypes
        if not (evict is None or isinstance(evict, Policy)):
            allowed = "a policy of sightline.eviction"
            raise ParameterError(f"evict={evict!r}", allowed, "evict=sightline.eviction.SnapKV(budget=1024)")
        if not (config is None or hasattr(config, "get_text_config")):
            raise _needs_config(f"config= of type {type(config).__name__}")
        super().__init__(config=config)
        make = partial(FullLayer, dtype) if evict is None else partial(EvictingLayer, dtype, evict)
        for place, layer in enumerate(self.layers):  # layers of other kinds stay
            if type(layer) is DynamicLayer:
                self.layers[place] = make()
            elif type(layer) is DynamicSlidingWindowLayer:
                self.layers[place] = SlidingLayer(dtype, sliding_window=layer.sliding_window)
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = make

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, G, t, d) to a layer, and return those that the layer's queries may attend to."""
        if layer_idx and (layer_idx >= len(self.layers) or not self.layers[layer_idx].is_initialized):
            self._check_first_run(layer_idx)
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *arguments, **options)
        return found

    def fork(self, counts: int | Sequence[int]) -> None:
        """Replace sequence b by counts[b] sequences that share the stored keys and values. An int counts for every b.

        A prompt that many texts begin with is then computed, stored and read once; see `KVCache.fork`. The model needs
        `attn_implementation="sightline"`. Layers with a sliding window, and layers that are not attention, copy what
        they store. With a policy that evicts keys at every step, every layer copies the shared keys at the first step.
        """
        batch = next((len(layer.keys) for layer in self.layers if getattr(layer, "keys", None) is not None), None)
        if batch is None:
            given = f"fork({counts!r}) of an empty Cache"
            raise ParameterError(given, "a Cache with keys", f"model(ids, {CACHE}=cache) first")
        owners = torch.from_numpy(read_owners(counts, batch))  # raises an error before a layer has changed
        for layer in self.layers:
            if layer.is_initialized and isinstance(layer, FullLayer) and not isinstance(layer, SlidingLayer):
                layer.fork(counts)
            elif layer.is_initialized:
                layer.reorder_cache(owners)

    def get_conv_state(self, layer_idx: int, *arguments: Any, **options: Any) -> Tensor | None:
        """Return the first state that a layer with linear attention reads; raise ParameterError without `config`."""
        if self.layer_class_to_replicate is not None:
            raise _needs_config(f"layer {layer_idx} without keys and values, and a Cache without config=")
        found: Tensor | None = super().get_conv_state(layer_idx, *arguments, **options)
        return found

    def _check_first_run(self, layer_idx: int) -> None:
        """Raise ParameterError if the cache was made for other layers, or if the layer before this one got keys twice.

        A decoder with a single cache gives each layer two appends: the keys of self-attention and of cross-attention.
        """
        if not self.layers:
            raise _needs_config("layer 0 without keys and values, and a Cache without config=")
        if self.layer_class_to_replicate is None and layer_idx >= len(self.layers):
            raise _needs_config(
                f"layer {layer_idx} of a model, and a Cache whose config= has {len(self.layers)} layers"
            )
        before = self.layers[layer_idx - 1] if layer_idx <= len(self.layers) else None
        if isinstance(before, FullLayer) and before.appends > 1:
            given = f"one Cache for the self-attention and the cross-attention of layer {layer_idx - 1}"
            allowed = "one Cache for self-attention and one for cross-attention"
            raise ParameterError(given, allowed, f"{CACHE}=transformers.EncoderDecoderCache(Cache(), Cache())")


def _needs_config(given: str) -> ParameterError:
    return ParameterError(given, "the configuration of the model that uses the cache", "Cache(config=model.config)")


class StoredTensor(WrapperTensor):
    """A tensor (B, G, m, d) with the model's dtype and no entries, in place of keys or values in a `KVCache`.

    A `sightline.transformers.Cache` that stores another dtype, evicts keys or was forked returns such tensors. A model
    passes the tensor to its attention, and `sightline_attention` reads the `KVCache`. Other operations raise an error.

    evicting : the layer of a `Cache` that evicts keys after attention
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


class FullLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of a layer, in a `KVCache`.

    appends : the number of calls of `update`
    keys, values : (B, G, m, d), views of the storage, or `StoredTensor`s if the cache stores another dtype than the
        model's or was forked; None before the first update. A program that selects keys may assign other tensors.
    """

    keys: Any
    values: Any

    def __init__(self, dtype: str | tuple[str, str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._stored_dtype = dtype
        self._cache, self.appends = KVCache(dtype=dtype), 0
        self._views = self.keys, self.values

    @property
    def cache(self) -> KVCache:
        """The cache of the layer: a new cache of `keys` and `values` if other tensors were assigned to them."""
        if self.keys is not self._views[0] or self.values is not self._views[1]:
            self._views = self.keys, self.values
            self._cache = KVCache(dtype=self._stored_dtype)
            self._cache.append(self.keys, self.values)
        return self._cache

    def __deepcopy__(self, memo: dict[int, Any]) -> FullLayer:
        copied = copy.copy(self)
        copied._cache = copy.deepcopy(self.cache, memo)
        if self.cache.max_length:
            copied._set_views()
        return copied

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype, device and widths of the model's keys and values."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.values = self._views = key_states.new_empty(0), value_states.new_empty(0)
        is_own = self._stored_dtype in (None, str(self.dtype).removeprefix("torch."))
        self._has_views = is_own and not isinstance(self, EvictingLayer)
        self._heads, self._widths = key_states.shape[1], (key_states.shape[3], value_states.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, G, t, d), and return those that the layer's queries may attend to."""
        if key_states.dtype != value_states.dtype and torch.is_autocast_enabled(key_states.device.type):
            dtype = torch.get_autocast_dtype(key_states.device.type)  # that of attention: rotary keys are float32
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cache.append(key_states, value_states)
        self.appends += 1
        self._set_views()
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove positions at the end: −3 removes the last three. Some versions of transformers take other numbers."""
        removed = positions_to_remove(tokens_to_remove, self.cache.max_length)
        if removed is None:
            super().crop(tokens_to_remove)  # raises an error
        elif removed:
            self.cache.truncate(self.cache.max_length - removed)
            self._set_views()

    def reset(self) -> None:
        """Remove every position, and the storage."""
        self._cache, self.appends, self.is_initialized = KVCache(dtype=self._stored_dtype), 0, False
        self.keys, self.values = self._views = None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence b by sequence beam_idx[b]."""
        if self.get_seq_length() > 0:
            self.cache.reorder(beam_idx)
            self._set_views()

    def fork(self, counts: int | Sequence[int]) -> None:
        """Replace sequence b by counts[b] sequences that share what is stored."""
        self.cache.fork(counts)
        self._has_views &= self.cache.prefix is None  # attention of this library reads the parts
        self._set_views()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each sequence by `repeats` copies of it, one after the other."""
        if self.get_seq_length() > 0:
            self.reorder_cache(torch.arange(len(self.keys), device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences `indices`, which are read as in `tensor[indices]`."""
        if self.get_seq_length() > 0:
            self.reorder_cache(torch.arange(len(self.keys), device=self.device)[indices])

    def _set_views(self) -> None:
        self.keys, self.values = self._views = self._read(self.cache.max_length)

    def _read(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the last `count` stored keys and values, or all if fewer are stored."""
        first = max(self.cache.max_length - count, 0)
        if self._has_views:
            keys, values = self.cache.key, self.cache.value
            return (keys[:, :, first:], values[:, :, first:]) if first else (keys, values)
        cache = self.cache.last(count) if first else self.cache
        shape = self.cache.lengths.size, self._heads, cache.max_length
        stored = {"cache": cache, "evicting": self if isinstance(self, EvictingLayer) else None}
        key, value = (StoredTensor((*shape, width), self.device, self.dtype, **stored) for width in self._widths)
        return key, value


class EvictingLayer(FullLayer):
    """The keys and values of a layer. After a call of attention, a policy keeps some of them and drops the others."""

    def __init__(self, dtype: str | tuple[str, str] | None, policy: Policy) -> None:
        super().__init__(dtype)
        self.policy = policy
        self._sum: Any = None  # the statistic's sum over all calls, a number for each row, if `policy.adds`

    def observed(self, count: int, has_padding: bool) -> list[Statistic]:
        """Return the statistics, none or one, that attention of `count` queries has to record for the policy."""
        see = self.policy.see
        if see is None and has_padding:
            given = f"{self.policy!r}, which chooses keys by their positions alone, and texts with padding"
            cure = "generate for each text alone, or evict=sightline.eviction.SnapKV(budget=1024)"
            raise ParameterError(given, "texts of one length", cure)
        return [] if see is None or not (self.policy.adds or self._evicts(count)) else [see]

    def evict(self, count: int, seen: Any = None) -> None:
        """After a call of `count` queries, keep the keys that the policy chooses, if it evicts after such a call.

        `seen` is the result of the statistic of `observed`, if any. If `policy.adds`, it is added to the sum always.
        """
        if self.policy.adds:
            seen = to_numpy(seen)
            if self._sum is not None:
                seen[..., : self._sum.shape[-1]] += self._sum
            self._sum = seen
        if not self._evicts(count):
            return
        before = self.cache.key_positions
        self.cache.keep(self.policy(self.cache, seen))
        if self.policy.adds:
            kept, _ = find_rows(self.cache.key_positions, before)  # (B, G, rows)
            self._sum = np.take_along_axis(seen, kept.repeat(seen.shape[1] // kept.shape[1], 1), -1)
        self._set_views()

    def _evicts(self, count: int) -> bool:
        rows, prefix = self.cache.row_counts, self.cache.prefix
        rows = rows if prefix is None else rows + prefix.row_counts
        is_due = count > 1 or self.policy.in_steps
        return is_due and int(rows.max(initial=0)) > self.policy.budget

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self._sum is not None:
            self._sum = self._sum[beam_idx.cpu().numpy()]

    def fork(self, counts: int | Sequence[int]) -> None:
        super().fork(counts)
        if self._sum is not None:
            self._sum = np.repeat(self._sum, counts, axis=0)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ParameterError unless `tokens_to_remove` is 0: keys that were evicted meanwhile cannot come back."""
        if positions_to_remove(tokens_to_remove, self.cache.max_length) != 0:
            given = f"crop({tokens_to_remove}) of a Cache with evict={self.policy!r}"
            raise ParameterError(given, "generation without drafts", "Cache() without evict=")

    def reset(self) -> None:
        super().reset()
        self._sum = None


class SlidingLayer(FullLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """The keys and values of a layer with a sliding window of w positions. The next query needs the last w − 1.

    keys, values : the last w − 1 positions, or all stored positions after `activate_past_recording()`
    """

    record_past = False  # transformers sets it in versions that can crop a full window

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append t positions, and return the keys and values of the last w − 1 + t."""
        super().update(key_states, value_states)
        t = key_states.shape[-2]
        self.cumulative_length += t
        found = self._read(self.sliding_window - 1 + t)
        if not self.record_past:
            self._drop_earlier()
        return found

    def crop(self, tokens_to_remove: int) -> None:
        """Remove positions at the end (−3 removes the last three), and earlier ones that the window has left."""
        removed = positions_to_remove(tokens_to_remove, self.cumulative_length)
        if removed is None or (self.cumulative_length >= self.sliding_window and not self.record_past):
            DynamicSlidingWindowLayer.crop(self, tokens_to_remove)  # raises an error
            return
        if self.cache.max_length - removed < min(self.sliding_window - 1, self.cumulative_length - removed):
            raise ParameterError(
                f"crop({tokens_to_remove}) of a sliding layer that has dropped earlier positions, which it would need",
                "at most as many positions as were appended since the last crop",
                "crop once after a run of the model",
            )
        super().crop(-removed)
        self.cumulative_length -= removed
        self._drop_earlier()

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0

    def _set_views(self) -> None:
        count = self.cache.max_length if self.record_past else self.sliding_window - 1
        self.keys, self.values = self._views = self._read(count)

    def _drop_earlier(self) -> None:
        """Copy the last w − 1 positions to new storage if the storage is full."""
        needed = self.sliding_window - 1
        limit = needed + self.sliding_window // SLACK + 1
        if self.cache.max_length >= limit:
            self._cache = self.cache.last(needed, capacity=limit)
            self._set_views()
