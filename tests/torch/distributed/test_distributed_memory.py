"""The memory of a rank: its shards and results, one shard of keys and values, and 64 MB."""

import sys

import pytest

from distributed_checks import held_bytes
from distributed_ranks import Ranks

LENGTH, HEADS, WIDTH = 8192, 8, 64


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_memory_beside_the_shards(monkeypatch):
    """glibc keeps freed memory of some megabytes for later calls, unless a fixed threshold forbids it."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 17))
    ranks = Ranks(2)
    try:
        shard = 2 * LENGTH // 2 * HEADS * WIDTH * 4  # keys and values
        for held in ranks.run(held_bytes, LENGTH, HEADS, WIDTH):
            assert held < shard + 64e6
    finally:
        ranks.close()
