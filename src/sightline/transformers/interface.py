"""Attention as models of transformers ask for it: the name "sightline" of their two interfaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import output_capturing

from ..errors import ParameterError
from ..formula.expression import Expression
from ..formula.library import bias, dense
from ..formula.library import softcap as softcap_score
from ..statistics import weights
from ..torch.hooks import attend
from .formula_mask import FormulaMask, sightline_mask

__all__ = ["NAME", "register", "sightline_attention"]

NAME = "sightline"
UNSUPPORTED_ARGUMENTS = {  # arguments that change the answer, of a few models
    "cache": "a paged cache, of continuous batching",
    "indices": "keys chosen by an indexer",
    "block_indices": "blocks of keys chosen by an indexer",
    "sinks": "sinks of each query",
}


def register() -> None:
    """Enter "sightline" in both interfaces. Without the one for masks, transformers would make none: no padding."""
    AttentionInterface.register(NAME, sightline_attention)
    AttentionMaskInterface.register(NAME, sightline_mask)


def sightline_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `transformers.AttentionInterface` calls.

    Parameters
    ----------
    module : the attention layer that asks
    query : (B, H, n, d_k)
    key, value : (B, G, m, d_k) and (B, G, m, d_v); shared heads are not repeated
    attention_mask : a `FormulaMask`, or (…, n, m) bool, True attends, or floats to be added, in logits; optional
        None hides nothing, as in the models' own code: masks that are causal always come.
    dropout : float, default 0
        Taken in training only.
    scaling : float, default 1/√d_k
    softcap : float, optional
        t tanh(s / t), of the scaled scores.
    s_aux : (H,) floats, optional
        Sinks.
    position_bias : (…, H, n, m) floats, optional
        Added to the scaled scores.
    options
        `output_attentions`; others are ignored, but for `UNSUPPORTED_ARGUMENTS`.

    Returns
    -------
    output : (B, n, H, d_v)
    weights : (B, H, n, m) before dropout where the model was asked for attentions, else None

    Raises
    ------
    ParameterError
        An argument of `UNSUPPORTED_ARGUMENTS`.
    """
    for name, meaning in UNSUPPORTED_ARGUMENTS.items():
        if options.get(name) is not None:
            raise ParameterError(
                f"{name}= of {type(module).__name__}: {meaning}",
                "masks, biases, soft caps and sinks of each head",
                'attn_implementation="eager" for this model',
            )
    score = None if softcap is None else softcap_score(float(softcap))
    mask: Any = None
    if position_bias is not None:
        score = _add_to_score(position_bias, score)
    if isinstance(attention_mask, FormulaMask):
        mask = attention_mask.formula
    elif attention_mask is not None and attention_mask.is_floating_point():
        score = _add_to_score(attention_mask, score)
    elif attention_mask is not None:
        mask = dense(attention_mask)
    output, seen = attend(
        module,
        query,
        key,
        value,
        query_start=getattr(attention_mask, "query_start", None),
        key_start=getattr(attention_mask, "key_start", 0),
        mask=mask,
        score=score,
        scale=scaling,
        sinks=s_aux,
        dropout=dropout if module.training else 0.0,
        see=[weights()] if _needs_weights(module, options) else [],
    )
    return output.transpose(1, 2).contiguous(), seen[0] if seen else None


def _add_to_score(array: Tensor, score: Expression | None) -> Expression:
    """The score with these numbers added."""
    added = bias(array)
    return added if score is None else added.with_scores(score)


def _needs_weights(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether weights were asked for: by argument, by configuration, or by the hooks that collect a model's outputs."""
    if options.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    if torch.compiler.is_compiling():
        return False
    collected = output_capturing._active_collector.get()
    return any(name.endswith("attentions") for name in collected or ())
