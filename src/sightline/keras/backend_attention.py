"""Attention on the tensors of Keras's backend, with a mask that is given as several conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any

import keras

from ..api.functions import attention
from ..arrays.operations import detach
from ..errors import ShapeError
from ..formula.expression import Expression
from ..formula.library import causal, dense, window
from ..statistics import Statistic, weights

IS_TENSORFLOW, IS_JAX = (keras.backend.backend() == name for name in ("tensorflow", "jax"))
if IS_TENSORFLOW:
    from . import tensorflow_attention

Observer = Callable[[str, Sequence[Any]], None]  # (the layer's path, results (B, H, n, …) of its statistics)
observers: list[tuple[Sequence[Statistic], Observer]] = []  # of the open contexts of `observing`


@contextmanager
def observing(see: Sequence[Statistic], observer: Observer) -> Iterator[None]:
    """Give `observer` the statistics `see` of every call of a Sightline layer in this context. Calls must be eager."""
    observers.append((see, observer))
    try:
        yield
    finally:
        observers.pop()


@dataclass(frozen=True)
class AttentionMask:
    """The mask of a Keras layer as several conditions, which must all allow a pair.

    arrays : bool tensors of Keras's backend, broadcastable to the scores (..., H, n, m)
    is_causal : hides keys after the query's own position
    window : hides keys at this distance from the query or farther; None if there is no window
    """

    arrays: tuple[Any, ...] = ()
    is_causal: bool = False
    window: int | None = None

    def formula(self, arrays: Sequence[Any]) -> Expression | None:
        """Return the mask as a formula, None if it has no condition. `arrays` are `self.arrays` or NumPy copies."""
        parts = [dense(array) for array in arrays]
        if self.is_causal:
            parts.append(causal())
        if self.window is not None:
            parts.append(window(self.window, self.window - 1))
        return reduce(and_, parts) if parts else None


def expand(mask: Any, axes: str) -> Any:
    """Return a mask as booleans with the four axes of the scores (B, H, n, m).

    `axes` has a letter for each axis of the given mask: b for batch, h for head, i for query and j for key. The other
    axes of the result have length 1.
    """
    mask = keras.ops.cast(mask, "bool")
    if len(mask.shape) != len(axes):
        allowed = f"a shape with the axes ({', '.join(axes)}): b batch, h head, i query, j key"
        raise ShapeError(f"a mask of shape {tuple(mask.shape)}", allowed, "reshape the mask to these axes")
    return mask[tuple([slice(None) if axis in axes else None for axis in "bhij"])]


def attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: AttentionMask,
    dropout: float = 0.0,
    seed: Any = None,
    with_weights: bool = False,
    layer: str = "",
) -> tuple[Any, Any]:
    """Return (output, weights). The weights are those before dropout; they are None if `with_weights` is False.

    query, key, value : (..., H, n, d_k), (..., H, m, d_k) and (..., H, m, d_v), tensors of Keras's backend
    seed : a scalar tensor of integers from 0 to 2³¹ − 2, required with dropout
    layer : the path of the calling layer, which observers receive
    """
    for see, observer in observers:
        _observe(query, key, value, mask, see, partial(observer, layer))
    if IS_TENSORFLOW:
        return tensorflow_attention.attend(query, key, value, mask, dropout, seed, with_weights)
    if seed is not None and not IS_JAX:
        seed = int(seed)
    formula, see = mask.formula(mask.arrays), [weights()] if with_weights else []
    output, seen = attention(query, key, value, mask=formula, dropout=dropout, seed=seed, see=see)
    return output, seen[0] if with_weights else None


def _observe(
    query: Any, key: Any, value: Any, mask: AttentionMask, see: Sequence[Statistic], observer: Callable[[Any], None]
) -> None:
    """Compute the statistics of a call once more, without output and gradients, and pass them to the observer."""
    arrays = query, key, value, *mask.arrays
    query, key, value, *masks = arrays if IS_JAX else map(detach, arrays)
    observer(attention(query, key, value, mask=mask.formula(masks), see=list(see))[1])
