"""Attention on the tensors of Keras's backend, and its mask in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any

import keras

from ..api.functions import attention
from ..errors import ShapeError
from ..formula.expression import Expression
from ..formula.library import causal, dense, window
from ..statistics import Statistic, weights

if keras.backend.backend() == "tensorflow":
    from . import tensorflow_attention


Observer = Callable[[str, Sequence[Any]], None]  # (the layer's path, results (B, H, n, …) of its statistics)
observers: list[tuple[Sequence[Statistic], Observer]] = []  # of the open contexts of `observing`


@contextmanager
def observing(see: Sequence[Statistic], observer: Observer) -> Iterator[None]:
    """Hand the statistics of the calls of this package's layers to the observer. All calls in the context are eager."""
    observers.append((see, observer))
    try:
        yield
    finally:
        observers.pop()


@dataclass(frozen=True)
class AttentionMask:
    """The mask of a Keras layer in parts: where possible a formula, without an array of n · m booleans.

    A query attends to a key if every part allows the pair.

    Parameters
    ----------
    arrays : bool tensors of Keras's backend, broadcastable to the scores (..., H, n, m)
    is_causal : hides keys after the query's own position
    window : hides keys at this distance from the query or farther; None if there is no window
    """

    arrays: tuple[Any, ...] = ()
    is_causal: bool = False
    window: int | None = None

    def formula(self, arrays: Sequence[Any]) -> Expression | None:
        """Return the mask as a formula. `arrays` are `self.arrays`, or the same arrays in NumPy."""
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
        raise ShapeError(
            f"a mask of shape {tuple(mask.shape)}",
            f"a shape with the axes ({', '.join(axes)})",
            "one entry for each of these axes",
        )
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
    """Return (output, weights). The weights are those before dropout, or None unless `with_weights` is True.

    Parameters
    ----------
    query, key, value : (..., H, n, d_k), (..., H, m, d_k) and (..., H, m, d_v), tensors of Keras's backend
    mask : the mask in parts; its arrays are tensors of Keras's backend
    dropout : the probability that a weight is dropped
    seed : a scalar tensor of integers from 0 to 2³¹ − 2, required with dropout
    with_weights : return the weights, which need O(n · m) memory
    layer : the path of the layer that calls, for observers
    """
    for see, observer in observers:
        _observe(query, key, value, mask, see, partial(observer, layer))
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


def _observe(
    query: Any, key: Any, value: Any, mask: AttentionMask, see: Sequence[Statistic], observer: Callable[[Any], None]
) -> None:
    """Compute the statistics of a call, apart from its output, and hand their results to the observer."""
    backend = keras.backend.backend()
    arrays = [query, key, value, *mask.arrays]
    if backend == "tensorflow":
        arrays = [x.numpy() for x in arrays]
    elif backend == "torch":
        arrays = [x.detach() for x in arrays]
    query, key, value, *masks = arrays
    observer(attention(query, key, value, mask=mask.formula(masks), see=list(see))[1])
