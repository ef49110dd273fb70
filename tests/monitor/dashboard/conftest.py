"""A real Chromium for the tests of the dashboard's page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from support.browsed_pages import Watched, opened


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Watched]:
    """A tab on a laptop, for `visited`."""
    context, watched = opened(browser, "about:blank")
    yield watched
    context.close()
