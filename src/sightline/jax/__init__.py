"""Sightline for JAX: attention inside compiled programs, with gradients.

`sightline.attention` takes JAX arrays and tracers. `dot_product_attention` has the signature of JAX's function.

The import registers the custom call of XLA by which programs run attention, so a process that loads an exported program
imports this package first. The import raises MissingExtraError if JAX is not installed.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from ..errors import MissingExtraError

try:
    import jax  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "sightline.jax without JAX", "JAX 0.7 to 0.10", 'pip install "sightline-attention[jax]"'
    ) from error

from .custom_call import register
from .functional import dot_product_attention

register()

__all__ = ["dot_product_attention"]


def __getattr__(name: str) -> ModuleType:
    if name == "distributed":  # imported when first accessed
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
