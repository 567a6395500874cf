"""Sightline for JAX: attention inside compiled programs, with gradients.

`sightline.attention` takes JAX arrays and tracers. `dot_product_attention` has the signature of the `jax.nn` function.

Importing this package registers an XLA custom call, the function by which compiled programs run attention. A process
that loads an exported program must import this package first. MissingExtraError is raised if JAX is not installed.
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

from .custom_call import register_custom_call
from .functional import dot_product_attention

register_custom_call()

__all__ = ["dot_product_attention"]


def __getattr__(name: str) -> ModuleType:
    if name == "distributed":  # imported when first accessed
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
