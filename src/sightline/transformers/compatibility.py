"""What this package reads of transformers beyond its documented interface. No other file imports from its submodules.

`TRIED` lists the versions with which its tests ran. Where versions differ, this file asks for signatures and
attributes, never for the number of the version.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import continuous_batching
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.whisper.tokenization_whisper import LANGUAGES, _combine_tokens_into_words

from ..data import tried_versions
from ..errors import ParameterError
from ..torch.layer_calls import restore_on_exit, wrapping

__all__ = ["LANGUAGES", "DynamicLayer", "DynamicSlidingWindowLayer"]

NAME = "sightline"  # the attention implementation of this library
TRIED = tried_versions()["transformers"]
PAGED_PREFIX = "paged|"  # before 5.23, `generate_batch` puts it in front of the name of an attention implementation
STORED_IMPLEMENTATION = "_attn_implementation_internal"  # the attribute of a configuration that stores its choice
PAGED_WINDOW = "paged_window"  # in the arguments of attention in `generate_batch`: the window of the layer, or None


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


# `PretrainedConfig` in transformers 4
PreTrainedConfig: Any = getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig
# the name of the argument of models, layers and `generate` that takes a cache
CACHE = "cache" if "cache" in _parameters(masking_utils.create_causal_mask) else "past_key_values"
combine_tokens_into_words = _combine_tokens_into_words
causal_mask_function = masking_utils.causal_mask_function
bidirectional_mask_function = getattr(masking_utils, "bidirectional_mask_function", None)
attention_function = ALL_ATTENTION_FUNCTIONS.__getitem__  # of the name of an implementation


# -- layers and configurations -------------------------------------------------------------------------------------


def uses_attention_interface(kind: Any) -> bool:
    """True if a method of the module class, or of a base class, reads ALL_ATTENTION_FUNCTIONS of transformers."""
    if issubclass(kind, PreTrainedModel):
        return False
    methods = [inspect.unwrap(method) for method in vars(kind).values() if inspect.isfunction(method)]
    own = any("ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in methods)
    return own or any(uses_attention_interface(base) for base in kind.__bases__ if issubclass(base, nn.Module))


def can_set_implementation(model: PreTrainedModel) -> bool:
    """True if the users of the model may choose its `attn_implementation`."""
    return bool(model._can_set_attn_implementation())


def read_implementation(config: Any) -> str | None:
    """Return the `attn_implementation` of a configuration, without the prefix for `generate_batch`."""
    name = config._attn_implementation
    return name.removeprefix(PAGED_PREFIX) if isinstance(name, str) else None


def change_position_biases(configuration: str, change: Callable[[Any], Any]) -> None:
    """Replace the methods of layers that return position biases as those of T5 do, in a family of models.

    `configuration` is the module of the family's configuration, such as "transformers.models.t5.configuration_t5".
    """
    module = sys.modules.get(configuration.replace(".configuration_", ".modeling_"))
    for layer in vars(module).values() if module is not None else ():
        if isinstance(layer, type) and issubclass(layer, nn.Module) and hasattr(layer, "compute_bias"):
            names = ["self", "query_length", "key_length", "device", "past_seen_tokens"]
            if list(_parameters(layer.compute_bias)) == names:
                layer.compute_bias = change(layer.compute_bias)


@contextmanager
def generating_windows(model: Any, generate: Callable[..., Any]) -> Iterator[None]:
    """Let `generate` of a Whisper model compute each window of the audio by `generate(own function, *arguments)`.

    The model uses "sightline" all the time, also if several threads call it: its `generate` sets "eager" to get times
    of tokens, and the property of a changed configuration class ignores that.
    """
    kept = property(lambda config: NAME, lambda config, value: None)
    config, kind, own = model.config, type(model.config), partial(type(model).generate_with_fallback, model)

    def generate_window(_: Any, *inputs: Any, **options: Any) -> Any:
        return generate(own, *inputs, **options)  # not by the function of another thread

    with restore_on_exit(config, "__class__"), wrapping(model, "generate_with_fallback", generate_window):
        config.__class__ = type(kind.__name__, (kind,), {"_attn_implementation": kept})
        yield


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model or a layer; None if there is none."""
    found = (arguments.get(name) for name in ("cache", "past_key_values", "past_key_value"))
    return next((cache for cache in found if isinstance(cache, Cache)), None)


def collects(kind: str, options: Mapping[str, Any]) -> bool:
    """True if the model that runs returns values of its layers, such as "attentions" or "router_logits".

    `options` are arguments of a layer. Versions with `output_capturing` do not pass them `output_attentions=`.
    """
    capturing = getattr(transformers.utils, "output_capturing", None)
    collected = None if capturing is None else capturing._active_collector.get()
    return bool(options.get(f"output_{kind}")) or any(name.endswith(kind) for name in collected or ())


# -- masks ---------------------------------------------------------------------------------------------------------


def mask_arguments(cache_position: Tensor | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of a mask function with `q_length` and `q_offset`, in place of the positions of queries."""
    if cache_position is None:
        return options
    return {"q_length": len(cache_position), "q_offset": cache_position[0], "device": cache_position.device} | options


def make_dense_mask(q_length: int, q_offset: int | Tensor, device: Any, **options: Any) -> Tensor:
    """Return the bool array (B, 1, n, m) of transformers' own function, which is never skipped."""
    accepted = _parameters(masking_utils.sdpa_mask)
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if "cache_position" in accepted:
        options["cache_position"] = torch.arange(q_length, device=device) + q_offset
    else:
        options |= {"q_length": q_length, "q_offset": q_offset, "device": device}
    found: Tensor = masking_utils.sdpa_mask(**{k: v for k, v in (options | skips).items() if k in accepted})
    return found


# -- caches --------------------------------------------------------------------------------------------------------


def positions_to_remove(number: int, length: int) -> int | None:
    """Return how many of `length` positions `crop(number)` removes; None if the version refuses the number.

    −3 removes the last three. Before 5.13, a positive number is the length that remains.
    """
    if number <= 0:
        return min(-number, length)
    return max(length - number, 0) if "max_length" in _parameters(DynamicLayer.crop) else None


# -- continuous batching -------------------------------------------------------------------------------------------


def allow_continuous_batching(name: str) -> tuple[str, ...]:
    """Let `generate_batch` use the attention implementation `name`; return the names under which it looks for it.

    In 5.23 and later, `ContinuousBatchingManager.switch_to_cb_friendly_attn` refuses all names but "sdpa",
    "paged|eager" and those with "flash". Earlier versions look for "paged|" before the name. In 5.24 and later, a layer
    stores its keys before it calls attention, so `PagedAttentionCache.update` also notes the window of the layer.
    """
    manager, cache = continuous_batching.ContinuousBatchingManager, continuous_batching.PagedAttentionCache
    switch, update = getattr(manager, "switch_to_cb_friendly_attn", None), cache.update
    if _stores_before_attention(update):

        @wraps(update)
        def update_and_note(
            paged: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
        ) -> Any:
            found = update(paged, key_states, value_states, layer_idx, kwargs=kwargs)
            kwargs[PAGED_WINDOW] = _window(paged, layer_idx)
            return found

        cache.update = update_and_note
    if switch is None:
        return name, PAGED_PREFIX + name

    @wraps(switch)
    def switch_other_names(self: Any, model: Any, *inputs: Any, **options: Any) -> None:
        if model.config._attn_implementation != name:
            switch(self, model, *inputs, **options)

    manager.switch_to_cb_friendly_attn = switch_other_names
    return (name,)


def _stores_before_attention(update: Callable[..., Any]) -> bool:
    """True if `PagedAttentionCache.update` takes one dict of all arguments of attention, which it changes."""
    found = _parameters(update).get("kwargs")
    return found is not None and found.kind is not inspect.Parameter.VAR_KEYWORD


def _window(cache: Any, layer: int) -> int | None:
    """Return the sliding window of a layer in a `PagedAttentionCache`; raise ParameterError where windows are wrong."""
    if hasattr(cache, "layer_to_allocator"):
        return getattr(cache.layer_to_allocator[layer], "sliding_window", None)
    if cache.sliding_windows[layer] != 1:  # 1 stands for no window
        raise ParameterError(
            f"generate_batch of a layer with a sliding window, in transformers {transformers.__version__}, whose paged "
            "cache returns other keys than those of the window",
            f"models without windows, or a version whose paged cache has cache allocators, such as {TRIED[-1]}",
            "pip install -U transformers; or model.generate for each prompt",
        )
    return None


def update_paged_cache(
    cache: Any, layer: Any, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Store the new keys and values (1, G, n, d) of a layer; return those (1, G, m, d) that its queries may need.

    In `options`, `PAGED_WINDOW` is set, and `cu_seq_lens_k` of the layer replaces those of all kinds of layers.
    """
    if _stores_before_attention(cache.update):
        found: tuple[Tensor, Tensor] = cache.update(key, value, layer, kwargs=options)
        return found
    key, value = cache.update(key, value, layer, options["read_index"], options["write_index"])
    width = options[PAGED_WINDOW] = _window(cache, layer)
    ends = options["cu_seq_lens_k"]
    if isinstance(ends, dict):  # by kind of layer
        options["cu_seq_lens_k"] = ends["full_attention" if width is None else "sliding_attention"]
    if key.ndim == 3:
        key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    return key, value


def check_mask(module: nn.Module, query: Tensor, attention_mask: Any, options: Mapping[str, Any]) -> None:
    """Raise ParameterError if a causal layer has several queries and no mask, as if nothing was hidden from them.

    Transformers' masks for "sightline" are never None for such a layer, so the layer was called in a way unknown here.
    """
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)  # the default of transformers' own functions
    if attention_mask is None and is_causal and query.shape[2] > 1:
        raise ParameterError(
            f"no mask for the causal layer {type(module).__name__} with {query.shape[2]} queries, from transformers "
            f"{transformers.__version__}",
            f"a mask, or a paged cache of `generate_batch`, as in transformers {TRIED[0]} to {TRIED[-1]}",
            'attn_implementation="sdpa" for this call; or is_causal = False in a layer that hides no keys',
        )
