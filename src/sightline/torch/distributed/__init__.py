"""Attention over a sequence that is divided among the processes of a group of `torch.distributed`."""

from __future__ import annotations

from .dispatch import attention
from .shard import shard, unshard

__all__ = ["attention", "shard", "unshard"]
