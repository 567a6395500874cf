"""AttentionMask, the mask of a Keras layer in parts: a formula without an array of n · m booleans where possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import keras

from ..errors import ShapeError
from ..formula.expression import Expression
from ..formula.library import causal, dense, window


@dataclass(frozen=True)
class AttentionMask:
    """The parts of a mask. A query attends to a key if every part allows the pair.

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
        """Return the mask as a formula. `arrays` are those of the mask, as tensors or as NumPy arrays."""
        parts = [dense(array) for array in arrays]
        if self.is_causal:
            parts.append(causal())
        if self.window is not None:
            parts.append(window(self.window, self.window - 1))
        return reduce(and_, parts) if parts else None


def expand(mask: Any, axes: str) -> Any:
    """Return a mask with the given axes, among b, h, i and j, as booleans with the axes of the scores (B, H, n, m)."""
    mask = keras.ops.cast(mask, "bool")
    if len(mask.shape) != len(axes):
        raise ShapeError(
            f"a mask of shape {tuple(mask.shape)}", f"the axes ({', '.join(axes)})", "one entry for each of these axes"
        )
    return mask[tuple([slice(None) if axis in axes else None for axis in "bhij"])]
