"""Pages in a real Chromium: what went wrong in them, how many clicks they took, and the values of a token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from support.waiting import PATIENCE_S

expect.set_options(timeout=PATIENCE_S * 1000)


LAPTOP = 1280
HEIGHT = 800


@dataclass
class Watched:
    """A page, and what went wrong in it: errors, and requests to other hosts than `host`."""

    page: Page
    host: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass
class Clicks:
    """Counts the clicks on a page."""

    page: Page
    count: int = 0

    def on(self, locator: Locator) -> None:
        locator.click()
        self.count += 1


def opened(
    browser: Browser, address: str, *, width: int = LAPTOP, scheme: str = "light"
) -> tuple[BrowserContext, Watched]:
    """A page at an address, in a context that the caller closes."""
    context = browser.new_context(
        viewport={"width": width, "height": HEIGHT}, color_scheme="dark" if scheme == "dark" else "light"
    )
    context.set_default_timeout(PATIENCE_S * 1000)
    watched = Watched(context.new_page(), urlsplit(address).netloc)
    page, problems = watched.page, watched.problems
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda asked: problems.append(asked.url) if urlsplit(asked.url).netloc != watched.host else None)
    page.goto(address)
    return context, watched


@contextmanager
def visited(tab: Watched, address: str) -> Iterator[Page]:
    """A page at an address in a tab that many tests use, since each new one takes half a second of a processor. It is
    loaded anew, without anything that an earlier page has stored, and at the end nothing was wrong in it."""
    page = tab.page
    tab.host = urlsplit(address).netloc
    tab.problems.clear()
    page.goto(address)
    try:
        yield page
        assert tab.problems == []
    finally:
        page.unroute_all()
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": LAPTOP, "height": HEIGHT})
        try:
            page.evaluate("location.protocol === 'about:' || sessionStorage.clear()")
        finally:
            tab.host = ""
            page.goto("about:blank")


def inspected(page: Page) -> dict[str, str]:
    """The values of a token that are shown."""
    names, values = page.locator(".inspector dt"), page.locator(".inspector dd")
    return dict(zip(names.all_inner_texts(), values.all_inner_texts(), strict=True))
