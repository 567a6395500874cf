"""One browser for all tests of the explorer page. Without a Chromium these tests are skipped."""

import pytest

import browser


@pytest.fixture(scope="session")
def chromium():
    if browser.found() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    opened = browser.Browser()
    yield opened
    opened.close()
