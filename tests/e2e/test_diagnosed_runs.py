"""Runs that are broken on purpose, with real processes: `rollq status` alone says what is wrong, on its first line.

`rollq dashboard` says it at its top, by the same words.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from playwright.sync_api import Browser, sync_playwright

from rollq.buffer.store.embedded_server import EmbeddedServer
from support.broken_run import BrokenRun
from support.dashboard import serving
from support.waiting import wait_until


class SeenRun(BrokenRun):
    """A broken run at which a browser looks, too."""

    def __init__(self, folder: Path, server: EmbeddedServer, run: str, roles: ExitStack, browser: Browser) -> None:
        super().__init__(folder, server, run, roles)
        self._browser = browser

    def until_in_browser(self, *words: str) -> None:
        """Wait until `rollq status` and the page have the same diagnosis, with these words; only numbers may differ."""
        with serving(str(self.folder / "rollq.toml")) as address:
            page = self._browser.new_page()
            page.goto(address)
            wait_until(lambda: _numberless(page.inner_text("#diagnosis div")) == _numberless(self.until(*words)))
            page.close()


def _numberless(text: str) -> str:
    """A text without its numbers, those of the steps too, and without the marks of code."""
    line = re.sub(r" \d\. ", " ", " ".join(text.replace("`", "").split()))
    return re.sub(r"[\d.,]+ (ms|s|min)?", "0 ", line)


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def broken(fresh_server: EmbeddedServer, run_name: str, tmp_path: Path, browser: Browser) -> Iterator[SeenRun]:
    with ExitStack() as roles:
        yield SeenRun(tmp_path, fresh_server, run_name, roles, browser)


def test_a_run_without_workers(broken: SeenRun) -> None:
    broken.start("produce")
    broken.train()
    broken.until_in_browser(
        "starving: no worker is alive; 8 groups of task math are pending; the trainer has waited",
        "task math has 0 of 4 groups",
        "`rollq work`",
    )
    first = broken.rollq("status").splitlines()[0]
    assert first.startswith("starving: no worker is alive; ")


def test_a_run_whose_judge_raises(broken: SeenRun) -> None:
    broken.write(judge="broken_judge.judge")
    broken.start("produce", "work")
    broken.train()
    broken.until("failing: ", "task math", "KeyError")
    broken.until_in_browser(
        "failing: production of task math has stopped: all of the last",
        "the limit stop_after_failures = 64 is reached",
        "KeyError",
        "because of that the trainer failed at step 1",
        "restart every worker",
    )


@pytest.mark.long
def test_a_run_whose_trainer_is_gone(broken: SeenRun) -> None:
    broken.start("produce", "work")
    trainer = broken.train()
    broken.until("training: ")
    trainer.kill()
    trainer.join()
    broken.until_in_browser("trainer gone: nothing has been heard of the trainer on", "start the trainer again")


def test_a_run_that_is_paused(broken: SeenRun) -> None:
    broken.start("produce", "work")
    broken.train()
    broken.until("training: ")
    broken.rollq("pause")
    broken.until_in_browser("paused: task math set to pause", "`rollq resume`")
    broken.rollq("resume")
    broken.until("training: ")


def test_a_run_whose_memory_is_full(broken: SeenRun, fresh_server: EmbeddedServer) -> None:
    broken.start("produce", "work")
    broken.train()
    broken.until("training: ")
    with redis.Redis.from_url(fresh_server.url) as client:
        client.setrange(
            "ballast", 50_000_000, b"x"
        )  # against it, buffers of connections that come and leave are nothing
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.02))
    broken.until_in_browser(
        "memory full: the server's memory is full to", "no new groups are admitted", "`redis-cli CONFIG SET maxmemory"
    )


@pytest.mark.long
def test_a_run_that_is_over(broken: SeenRun) -> None:
    broken.start("produce", "work")
    broken.train(steps=3).join()
    broken.until_in_browser("finished: the trainer has ended after step 3")
