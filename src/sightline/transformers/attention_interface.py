"""The functions that transformers calls for `attn_implementation="sightline"`, and `register`, which registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..arrays.operations import is_traced
from ..call.problem import Options
from ..errors import ParameterError
from ..formula.expression import SYMBOLS, Expression
from ..formula.library import bias
from ..formula.library import softcap as softcap_score
from ..formula.tables import Table
from ..statistics import weights
from ..torch.layer_calls import LayerCall, attend_for_layer
from ..torch.watching.attention_finder import is_watched
from . import compatibility
from .decoding_cache import StoredTensor
from .masks_and_biases import FormulaMask, PositionBias, Unpadding, serve_position_biases, sightline_mask
from .model_contexts import ADDED_MASKS, add_masks
from .presses import OBSERVED

b, h, i, j = (SYMBOLS[name] for name in "bhij")
UNSUPPORTED_ARGUMENTS = {  # arguments of a few models that change the result, with their meaning
    "indices": "keys that an indexer selects",
    "block_indices": "blocks of keys that an indexer selects",
    "sinks": "sinks for each query",
}


# by layer that returns the weights of only some heads: dicts from layers to these heads, of which the last one counts
RETURNED_HEADS: WeakKeyDictionary[nn.Module, tuple[dict[nn.Module, tuple[int, ...]], ...]] = WeakKeyDictionary()


def register() -> None:
    """Register "sightline" in transformers' interfaces for attention and for masks.

    The mask function is needed: without one, transformers makes no mask, and attention ignores padding.
    """
    for name in compatibility.allow_continuous_batching(compatibility.NAME):
        AttentionInterface.register(name, _attend)
        AttentionMaskInterface.register(name, _make_mask)


def _make_mask(config: Any = None, **options: Any) -> Tensor | None:
    """Return the mask of a model's layers, which run after this call, and let these layers make `PositionBias`es."""
    serve_position_biases(type(config).__module__)
    return sightline_mask(**compatibility.mask_arguments(**options))


def _attend(module: nn.Module, query: Tensor, key: Tensor, *inputs: Any, **options: Any) -> Any:
    """Call `sightline_attention`, outside of compiled code if Python has to choose what a `Cache` keeps or reads."""
    attention = _uncompiled_attention if isinstance(key, StoredTensor) else sightline_attention
    return attention(module, query, key, *inputs, **options)


def sightline_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    make_score: Callable[[Tensor, Tensor, Unpadding | None], Expression] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for a layer of a transformers model, which calls this function.

    module : the attention layer
    query, key, value : (B, H, n, d_k), (B, G, m, d_k), (B, G, m, d_v), without repeated heads. If a
        `sightline.transformers.Cache` stores floats of another dtype than the query's, attention is computed in the
        cache's dtype. If the cache is quantised, the dtype is the query's, or float32 for a query in float64.
    attention_mask : `FormulaMask`, or tensor broadcastable to (B, H, n, m): booleans, True where the query attends to
        the key, or logits, added to the scaled scores. None hides nothing; a causal layer always has a mask.
    dropout : the probability that a weight is dropped, in training only
    scaling : default 1/√d_k
    softcap : the cap t: a scaled score s becomes t tanh(s / t), before biases are added
    s_aux, position_bias : the sinks (H,), and what is added to the scaled scores, broadcastable to (B, H, n, m)
    cache : in continuous batching, the PagedAttentionCache that does not store the new keys yet. Transformers 5.24 and
        later store them before this call. B is then 1, and n is the number of new tokens of all requests.
    make_score : returns the score, a formula of the rows of the call, for query, key and unpadding, which is None
        unless query and key are the real tokens of a padded batch
    options : with `output_attentions` the weights are returned; others than `UNSUPPORTED_ARGUMENTS` are ignored

    Returns the output (B, n, H, d_v), and the weights (B, H, n, m) before dropout if the model returns attentions, else
    None. A layer in `RETURNED_HEADS` returns the weights of some heads, and a layer under `pressing` the rows that the
    press of kvpress reads. Raise ParameterError for an unsupported argument, and for a causal layer with several
    queries and no mask.
    """
    _refuse_unsupported(module, options, attention_mask, position_bias)
    is_paged = cache is not None or compatibility.PAGED_WINDOW in options
    if is_paged:
        query, key, value, attention_mask = read_paged_cache(module, query, key, value, cache, options)
    compatibility.check_mask(module, query, attention_mask, options)
    is_compiled, mask = is_traced(query), attention_mask
    if isinstance(mask, FormulaMask):
        if is_compiled:
            mask = mask.clone()  # the dense array
        elif module not in ADDED_MASKS:
            mask.warn_of_restarts(options.get("position_ids"))

    heads = RETURNED_HEADS[module][-1][module] if module in RETURNED_HEADS else None
    needs_weights = heads != () and _needs_weights(module, options, is_compiled)
    is_stored, unpadding = isinstance(key, StoredTensor), getattr(mask, "unpadding", None)
    if unpadding is not None and (needs_weights or is_stored or is_watched()):  # what has the padded shape
        query, mask, of_tokens = unpadding.pad(query), mask.padded, None
        if not is_stored:  # a cache stores padded rows
            key, value = unpadding.pad(key), unpadding.pad(value)
    else:
        unpadding, of_tokens = None, unpadding
    made = make_score and make_score(query, key, of_tokens)
    score, mask = _read_scores(softcap, position_bias, mask, made, of_tokens)
    presses = OBSERVED.get(module, ()) if query.shape[-2] > 1 else ()  # kvpress evicts after the prompt alone
    returned = [weights()] if needs_weights else [statistic(query.shape[-2]) for statistic in presses[-1:]]
    evicting, observed = key.evicting if isinstance(key, StoredTensor) else None, []
    if evicting is not None:
        has_padding = unpadding is not None or getattr(mask, "is_real", None) is not None
        observed = evicting.observed(query.shape[-2], has_padding)
        mask = _at_positions(mask)

    see, dropout = [*returned, *observed] or None, dropout if module.training else 0.0
    formula = mask if is_compiled else add_masks(module, mask, query, key)
    attention_options = Options(formula, score, see, scaling, s_aux, dropout)
    call = LayerCall("self", getattr(mask, "query_start", None), getattr(mask, "key_start", 0))
    output, seen = attend_for_layer(*_read_cache(query, key, value), call, attention_options)
    if evicting is not None:
        evicting.evict(query.shape[-2], *seen[len(returned) :])
    if unpadding is not None:
        output = unpadding.flatten(output)
    output = output.transpose(1, 2).contiguous().to(query.dtype)
    if is_paged:
        output = output.flatten(0, 1)[None]
    if not returned:
        return output, None if heads is None else query.new_empty(len(query), 0, query.shape[2], 0)
    rows = seen[0] if seen[0].ndim == 4 else seen[0][:, :, None]  # as a press reads weights
    return output, rows[:, list(heads)] if heads is not None and needs_weights else rows


_uncompiled_attention = torch.compiler.disable(sightline_attention)  # type: ignore[no-untyped-call]


def _read_cache(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any, Any]:
    """Return query, key and value for attention. If the key is a `StoredTensor`, they are query, its `KVCache`, None.

    The query gets the dtype of the cache. If the cache is quantised, only a float64 query is converted, to float32.
    """
    if not isinstance(key, StoredTensor):
        return query, key, value
    wide = torch.float32 if query.dtype == torch.float64 else query.dtype
    dtype = getattr(torch, str(key.cache.dtype)) if key.cache.row_formats is None else wide
    return query.to(dtype), key.cache, None


def _at_positions(mask: Any) -> Any:
    """Return a dense mask (B or 1, H or 1, n, m) as a formula, which also reads it at the keys that a cache kept."""
    if isinstance(mask, FormulaMask) or not isinstance(mask, Tensor):
        return mask
    entry, head = (symbol if length > 1 else 0 for symbol, length in zip((b, h), mask.shape, strict=False))
    return Table(mask)[entry, head, i, j]


def _refuse_unsupported(module: nn.Module, options: dict[str, Any], attention_mask: Any, position_bias: Any) -> None:
    """Raise ParameterError for an argument that changes the result and is not supported."""
    for name, meaning in UNSUPPORTED_ARGUMENTS.items():
        if options.get(name) is not None:
            given, cure = f"{name}= of {type(module).__name__}: {meaning}", 'attn_implementation="eager" for this model'
            raise ParameterError(given, "masks, biases, soft caps and one sink for each head", cure)
    is_dense = position_bias is not None and not isinstance(position_bias, PositionBias)
    if is_dense and getattr(attention_mask, "unpadding", None) is not None:
        given = f"position_bias= of {type(module).__name__} in `unpadded`, where the bias does not fit the real tokens"
        raise ParameterError(given, "layers without position biases in `unpadded`", "call the model without `unpadded`")


def _read_scores(
    softcap: float | None, position_bias: Tensor | None, mask: Any, made: Any, unpadding: Unpadding | None
) -> tuple[Any, Any]:
    """Return the score of attention, or None, and the mask, which is None if its logits became part of the score."""
    score: Any = made if softcap is None else softcap_score(float(softcap))
    if isinstance(position_bias, PositionBias):
        formula = position_bias.formula
        score = _add_to_score(formula if unpadding is None else formula.rewrite(unpadding.symbols), score)
    elif position_bias is not None:
        is_known = not position_bias.requires_grad and not is_traced(position_bias)
        if not is_known or bool(position_bias.any()):  # T5 gives layers without biases an array of zeros
            score = _add_to_score(position_bias, score)
    if isinstance(mask, Tensor) and mask.is_floating_point():
        score, mask = _add_to_score(mask, score), None
    return score, mask


def _add_to_score(added: Any, score: Any) -> Any:
    """Return the score plus `added`, an array or a formula of s. Without a score, return `added`."""
    if score is None:
        return added
    added = added if isinstance(added, Expression) else bias(added)
    return added.with_scores(score if isinstance(score, Expression) else bias(score))


def _needs_weights(module: nn.Module, options: dict[str, Any], is_compiled: bool) -> bool:
    """True if an option of the call, the model's configuration or a hook of transformers asks for the weights."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    return bool(options.get("output_attentions")) if is_compiled else compatibility.collects("attentions", options)


def read_paged_cache(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, cache: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Expression]:
    """Store the new keys and values of a layer; return query, key, value and mask of the call for all requests.

    A query attends to the keys first ≤ j ≤ last: the keys of its own request up to its position, in the layer's window.
    If each request has one new token, the axis of tokens becomes the batch axis, and all batch entries share one array
    of keys. Then no query computes scores with the keys of another request.

    query, key, value : (1, H, n, d_k), (1, G, n, d_k), (1, G, n, d_v), the new tokens of one request after the other
    cache : PagedAttentionCache, or None if it stores the new keys already
    options : `cu_seq_lens_q` and `cu_seq_lens_k`, the places where the queries and keys of each request start and end,
        and `read_index` and `write_index`, the places in the cache
    """
    if module in ADDED_MASKS:
        raise ParameterError("masking(...) in continuous batching", "the model's own masks", "call model.generate")
    n = query.shape[2]
    if cache is not None:
        key, value = compatibility.update_paged_cache(cache, module.layer_idx, key, value, options)
    ends, key_ends = (options[name].long() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    lengths = ends.diff()
    request = torch.repeat_interleave(lengths)
    last = torch.arange(len(request), device=query.device) + (key_ends - ends)[1:][request]
    start = key_ends[:-1][request]
    width = options[compatibility.PAGED_WINDOW]
    first = start if width is None else torch.maximum(start, last - width + 1)
    row: Expression = i
    if n == len(lengths) == len(request):
        row, query = b, query.transpose(0, 2)
        key, value = key.expand(n, -1, -1, -1), value.expand(n, -1, -1, -1)
    return query, key, value, (j >= Table(first)[row]) & (j <= Table(last)[row])
