"""The processes of the tests of `sightline.torch.distributed`, started once."""

import pytest

from distributed_ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Four processes that form groups of one to four ranks."""
    found = Ranks(4)
    yield found
    found.close()
