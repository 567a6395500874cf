"""Fixtures of the tests of `attention_from_disk`."""

import pytest

from disk_calls import SIZES
from sightline.api.out_of_core import call


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a call of `disk_calls` has many work items."""
    monkeypatch.setattr(call, "choose_sizes", lambda *_: SIZES)
