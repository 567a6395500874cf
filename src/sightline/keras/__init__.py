"""Sightline for Keras 3 on its backends torch, JAX and TensorFlow: attention as a layer, and a monitor of its training.

The import raises MissingExtraError if Keras is not installed, and ParameterError if Keras has another backend or one
that is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import MissingExtraError, ParameterError

BACKENDS = ("torch", "jax", "tensorflow")
ALLOWED = "Keras on its backend torch, jax or tensorflow"
CURE = "install the backend, and set KERAS_BACKEND, as in KERAS_BACKEND=torch, before keras is first imported"

try:
    import keras
except ImportError as error:
    if find_spec("keras") is not None:  # Keras is installed, but its backend is not
        raise ParameterError(f"Keras does not load ({error})", ALLOWED, CURE) from error
    given = "sightline.keras without Keras"
    raise MissingExtraError(given, "Keras 3.10 or later", 'pip install "sightline-attention[keras]" torch') from error
if keras.backend.backend() not in BACKENDS:
    raise ParameterError(f"Keras on its {keras.backend.backend()} backend", ALLOWED, CURE)

from .layer import ScaledDotProductAttention  # noqa: E402  after the check of the backend
from .monitor_callback import MonitorCallback  # noqa: E402
from .multi_head_attention import MultiHeadAttention  # noqa: E402

__all__ = ["MonitorCallback", "MultiHeadAttention", "ScaledDotProductAttention"]
