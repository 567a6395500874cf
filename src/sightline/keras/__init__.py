"""Sightline for Keras 3, on its torch backend: attention as a layer."""

from __future__ import annotations

from ..errors import MissingExtraError, ParameterError

try:
    import keras
except ImportError as error:
    raise MissingExtraError(
        "sightline.keras, and no Keras", "Keras 3.9 or later", 'pip install "sightline-attention[keras]" torch'
    ) from error
if keras.backend.backend() != "torch":
    raise ParameterError(
        f"Keras on its {keras.backend.backend()} backend",
        "the torch backend",
        "set the environment variable KERAS_BACKEND=torch before keras is first imported",
    )

from .layer import ScaledDotProductAttention

__all__ = ["ScaledDotProductAttention"]
