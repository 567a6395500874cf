"""Attention over a sequence that is divided among the processes of a group of `torch.distributed`."""

from __future__ import annotations

from .collectives import shard, unshard
from .sharded_attention import attention

__all__ = ["attention", "shard", "unshard"]
