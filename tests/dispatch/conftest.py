import pytest

from cached_calls import clear


@pytest.fixture(autouse=True)
def empty_call_cache():
    clear()
