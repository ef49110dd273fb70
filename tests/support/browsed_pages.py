"""Pages in a real Chromium: what went wrong in them, how many clicks they took, and the values of a token."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from support.waiting import PATIENCE_S

expect.set_options(timeout=PATIENCE_S * 1000)


@dataclass
class Watched:
    """A page, and what went wrong in it."""

    page: Page
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
    browser: Browser, address: str, *, width: int = 1280, scheme: str = "light"
) -> tuple[BrowserContext, Watched]:
    """A page at an address, in a context that the caller closes. It notes errors and requests to other hosts."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme="dark" if scheme == "dark" else "light"
    )
    context.set_default_timeout(PATIENCE_S * 1000)
    watched = Watched(context.new_page())
    page, host = watched.page, urlsplit(address).netloc
    page.on("console", lambda said: watched.problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: watched.problems.append(str(error)))
    page.on("request", lambda asked: watched.problems.append(asked.url) if urlsplit(asked.url).netloc != host else None)
    page.goto(address)
    return context, watched


def inspected(page: Page) -> dict[str, str]:
    """The values of a token that are shown."""
    names, values = page.locator(".inspector dt"), page.locator(".inspector dd")
    return dict(zip(names.all_inner_texts(), values.all_inner_texts(), strict=True))
