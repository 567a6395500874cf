"""Arguments that other attention functions have, and what to write in this library in their place.

`attention` and the functions with the same options call `refuse_arguments`. The names come from the signatures of
torch's `scaled_dot_product_attention` and `flex_attention`, `jax.nn.dot_product_attention`, Keras, Hugging Face
transformers, FlashAttention and xFormers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from ..errors import UnknownArgumentError

# the options of `attention`, in the order of its signature
OPTIONS = ("mask", "score", "scale", "sinks", "dropout", "seed", "see", "kernel", "threads", "layout")

_CAUSAL = 'mask=sightline.causal(); causal("lower right") if the queries are the last positions of the keys'
_MASK_ARRAY = (
    "mask=array if it holds True where a query attends; mask=~array if it holds True where a key is hidden; "
    "mask=array != 0 if it holds zeros and ones; score=sightline.bias(array) if its numbers are added to the scores"
)
_KEY_LENGTHS = (
    "mask=sightline.padding(lengths) if the padding comes last; "
    "mask=array[:, None, None] for booleans (B, m) that are True for real keys"
)
_WEIGHTS = "see=[sightline.weights()], which returns (output, (weights,))"
_LSE = "see=[sightline.lse()], which returns (output, (lse,)); sightline.max_score() is the largest score"
_GROUPS = "nothing: the number of query heads may be any multiple of the number of key heads"
_DOCUMENTS = "mask=sightline.documents(lengths=numpy.diff(cu_seqlens)), with query, key and value packed on one axis"
_WINDOW = (
    "mask=sightline.window(left, right), where left counts the query's own position: window(256) is causal, and "
    'FlashAttention\'s window_size=(left, right) is window(left + 1, right, "lower right"), (-1, 0) is '
    'causal("lower right"), (-1, -1) is no mask'
)
_SOFTCAP = "score=sightline.softcap(cap)"
_NO_OPTION = "nothing: the result is deterministic, and `kernel` or `threads` choose how it is computed"

CURES: dict[str, str] = {
    **dict.fromkeys(("is_causal", "causal", "use_causal_mask"), _CAUSAL),
    **dict.fromkeys(("attn_mask", "attention_mask"), _MASK_ARRAY),
    **dict.fromkeys(("attn_bias", "bias", "position_bias", "attention_bias"), "score=sightline.bias(array)"),
    **dict.fromkeys(("key_padding_mask", "padding_mask", "key_value_seq_lengths", "seqlens"), _KEY_LENGTHS),
    **dict.fromkeys(("dropout_p", "dropout_rate", "p", "attention_dropout"), "dropout=0.1"),
    "training": "dropout=0.1 in training, and dropout=0 otherwise",
    **dict.fromkeys(("enable_gqa", "num_key_value_groups"), _GROUPS),
    "score_mod": "score=score_mod; a function (score, b, h, q_idx, kv_idx) works unchanged",
    "block_mask": "mask=mask_mod, which needs no create_block_mask; mask=block_mask works too",
    "mask_mod": "mask=mask_mod; a function (b, h, q_idx, kv_idx) works unchanged",
    **dict.fromkeys(("return_lse", "return_softmax_lse", "return_aux", "return_residual"), _LSE),
    **dict.fromkeys(
        ("need_weights", "return_attn_probs", "return_attention_scores", "output_attentions", "return_weights"),
        _WEIGHTS,
    ),
    **dict.fromkeys(("window_size", "local_window_size", "sliding_window", "window"), _WINDOW),
    **dict.fromkeys(("softcap", "logits_soft_cap", "tanh_softcap"), _SOFTCAP),
    "alibi_slopes": 'score=sightline.alibi(slopes), with mask=sightline.causal("lower right")',
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), _DOCUMENTS),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling", "scale_factor"), "scale=number"),
    **dict.fromkeys(("s_aux", "sink", "learnable_sink", "attention_sinks"), "sinks=array of one logit for each head"),
    **dict.fromkeys(("deterministic", "backend", "implementation", "kernel_options", "op"), _NO_OPTION),
    **dict.fromkeys(("qkv_format", "input_layout", "tensor_layout", "is_bhsd"), 'layout="BHND" or layout="BNHD"'),
    **dict.fromkeys(("group", "method"), "nothing here: sightline.torch.distributed.attention has it"),
    "shards": 'layout="contiguous" or layout="zigzag" of sightline.torch.distributed.attention',
    **dict.fromkeys(("past_key_value", "past_key_values", "kv_cache", "cache"), "attention(query, cache) of a KVCache"),
}
POSITIONAL_CURE = "write the names: attention(query, key, value, mask=..., score=...)"


def refuse_arguments(
    name: str, function: Callable[..., Any], positional: Sequence[Any], unknown: dict[str, Any]
) -> NoReturn:
    """Raise UnknownArgumentError for arguments that `attention` and the functions with its options do not have.

    name, function : the function, and its name in the error
    positional : the positional arguments after `value`
    unknown : the keyword arguments that the function does not have

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(2)
    >>> sightline.attention(x, x, x, softmax_scale=2.0)
    Traceback (most recent call last):
      ...
    sightline.errors.UnknownArgumentError: attention(..., softmax_scale=)
      allowed: query, key, value, mask=, score=, scale=, sinks=, dropout=, seed=, see=, kernel=, threads=, layout=
      cure:    for softmax_scale= write scale=number
    """
    options: dict[str, Any] = inspect.unwrap(function).__kwdefaults__
    if unknown:
        given = f"{name}(..., {', '.join(f'{each}=' for each in unknown)})"
        cure = "; ".join(_suggest(each, options) for each in unknown)
    else:
        kinds = ", ".join(type(argument).__name__ for argument in positional)
        given = f"{name} with positional arguments after value: {kinds}"
        cure = POSITIONAL_CURE
    raise UnknownArgumentError(given, "query, key, value, " + ", ".join(f"{each}=" for each in options), cure)


def _suggest(name: str, options: Collection[str]) -> str:
    """Return what to write in place of a keyword argument of a function with these options."""
    if name in (*OPTIONS, "source"):
        return f"leave {name}= out, which only other functions of sightline have"
    if name in CURES:
        return f"for {name}= write {CURES[name]}"
    similar = get_close_matches(name, options, 1) or get_close_matches(name, CURES, 1)
    if not similar:
        return f"leave {name}= out"
    meant = similar[0]
    return f"{name}= may mean {meant}=" + (f": write {CURES[meant]}" if meant in CURES else "")
