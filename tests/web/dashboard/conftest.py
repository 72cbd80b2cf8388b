"""What the tests of the dashboard's page start from."""

from collections.abc import Iterator

import pytest
from browser import Browser, browsing


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser, which opens pages."""
    with browsing() as found:
        yield found
