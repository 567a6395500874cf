"""Attention over keys and values that lie on disk, in blocks that fit a limit of memory."""

from __future__ import annotations

from .call import attention_from_disk

__all__ = ["attention_from_disk"]
