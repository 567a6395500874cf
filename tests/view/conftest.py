"""One browser for all tests of the explorer page."""

import pytest

import browser


@pytest.fixture(scope="session")
def chromium():
    opened = browser.Browser()
    yield opened
    opened.close()
