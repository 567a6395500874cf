"""Sightline for Keras 3 on its torch backend: attention as a layer.

The import raises MissingExtraError if Keras is not installed, and ParameterError if its backend is not torch.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import MissingExtraError, ParameterError

CURE = "pip install torch, and set the environment variable KERAS_BACKEND=torch before keras is first imported"

try:
    import keras
except ImportError as error:
    if find_spec("keras") is not None:  # Keras is installed, but its backend is not
        raise ParameterError(f"Keras does not load ({error})", "Keras on its torch backend", CURE) from error
    raise MissingExtraError(
        "sightline.keras without Keras", "Keras 3.9 or later", 'pip install "sightline-attention[keras]" torch'
    ) from error
if keras.backend.backend() != "torch":
    raise ParameterError(f"Keras on its {keras.backend.backend()} backend", "the torch backend", CURE)

from .layer import ScaledDotProductAttention  # noqa: E402  after the check of the backend

__all__ = ["ScaledDotProductAttention"]
