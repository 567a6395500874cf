"""Attention on the tensors of Keras's backend."""

from __future__ import annotations

from typing import Any

import keras

from ..api.functions import attention
from ..statistics import weights
from .attention_mask import AttentionMask

if keras.backend.backend() == "tensorflow":
    from . import tensorflow_attention


def attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: AttentionMask,
    dropout: float = 0.0,
    seed: Any = None,
    with_weights: bool = False,
) -> tuple[Any, Any]:
    """Return the output of attention, and the weights before dropout or None.

    Parameters
    ----------
    query, key, value : (..., H, n, d_k), (..., H, m, d_k) and (..., H, m, d_v), tensors of Keras's backend
    mask : its arrays are tensors of the backend too
    dropout : the probability that a weight is dropped
    seed : a scalar tensor of integers from 0 to 2³¹ − 2, required with dropout
    with_weights : return the weights, which need O(n · m) memory
    """
    if keras.backend.backend() == "tensorflow":
        return tensorflow_attention.attend(query, key, value, mask, dropout, seed, with_weights)
    if seed is not None and keras.backend.backend() != "jax":
        seed = int(seed)
    output, seen = attention(
        query,
        key,
        value,
        mask=mask.formula(mask.arrays),
        dropout=dropout,
        seed=seed,
        see=[weights()] if with_weights else [],
    )
    return output, seen[0] if with_weights else None
