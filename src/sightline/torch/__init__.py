"""Sightline for torch: `scaled_dot_product_attention` with torch's signature, and attention layers.

`sightline.attention` itself also accepts torch tensors.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from ..errors import MissingExtraError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("sightline.torch without torch", "torch 2.6 or later", "pip install torch") from error

from . import registry as registry  # adds this library to torch's registry
from .flash_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, varlen_attn
from .functional import scaled_dot_product_attention
from .layers import MultiHeadAttention, ScaledDotProductAttention, SelfAttention
from .qk_clipping import qk_clip
from .replacement import Replacement, replacing

__all__ = [
    "MultiHeadAttention",
    "Replacement",
    "ScaledDotProductAttention",
    "SelfAttention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "qk_clip",
    "replacing",
    "scaled_dot_product_attention",
    "varlen_attn",
]


def __getattr__(name: str) -> ModuleType:
    if name in ("distributed", "flex"):  # imported when first accessed
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
