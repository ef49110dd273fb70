"""Runs that are broken on purpose, with real processes: `rollq status` alone says what is wrong, on its first line.

`rollq dashboard` says it at its top, by the same words.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from playwright.sync_api import Browser, sync_playwright

from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.main import main
from support.dashboard import serving
from support.forked_roles import role
from support.forks import FORKS
from support.loop_trainer import train
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import wait_until

JUDGE = "def judge(prompt, sample):\n    raise KeyError('answer of ' + str(prompt.content)[:3])\n"


class BrokenRun:
    """A run in `folder`. Its trainer is a custom loop, its engines are simulated."""

    def __init__(self, folder: Path, server: EmbeddedServer, run: str, roles: ExitStack, browser: Browser) -> None:
        self._folder, self._server, self._run, self._roles = folder, server, run, roles
        self._browser = browser
        (folder / "p.jsonl").write_text("".join(f'{{"prompt": "p{row}", "answer": "1"}}\n' for row in range(50)))
        (folder / "broken_judge.py").write_text(JUDGE)
        tiny_qwen3().save_pretrained(folder / "model")
        self.write()

    def write(self, judge: str = "") -> None:
        """Write the settings, with a judge of the user's if one is named."""
        (self._folder / "rollq.toml").write_text(
            f'run = "{self._run}"\n[redis]\nbuffer_url = "{self._server.url}"\n[tasks.math]\nprompts = "p.jsonl"\n'
            + (f'judge = "{judge}"\n' if judge else "")
            + 'batch_groups = 4\ngroup_size = 2\n[worker]\nengine = "simulated"\ngrace_s = 1.0\n'
            "options = { lengths = [3, 5], tokens_per_s = 500.0 }\n"
        )

    def start(self, *names: str) -> None:
        """Start roles by their commands."""
        for name in names:
            self._roles.enter_context(role(self._folder, name, "rollq.toml"))

    def train(self, steps: int = 100_000) -> BaseProcess:
        """Start the trainer, once the producer has registered the task."""
        self.until("starting: no trainer has started")
        trainer = FORKS.Process(target=train, args=(self._server.url, self._run, self._folder / "model", steps))
        trainer.start()
        self._roles.callback(trainer.join)
        self._roles.callback(trainer.kill)
        return trainer

    def rollq(self, *arguments: str) -> str:
        """What a command prints."""
        return CliRunner().invoke(main, [*arguments, str(self._folder / "rollq.toml")]).output

    def until(self, *words: str) -> str:
        """Wait until `rollq status` begins with a diagnosis that has these words, and return it."""
        seen = ""

        def shown() -> bool:
            nonlocal seen
            seen = " ".join(self.rollq("status").partition("\n\n")[0].split())
            return all(word in seen for word in words)

        wait_until(shown, otherwise=lambda: seen)
        return seen

    def until_in_browser(self, *words: str) -> None:
        """Wait until `rollq status` and the page have the same diagnosis, with these words; only numbers may differ."""
        with serving(str(self._folder / "rollq.toml")) as address:
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
def broken(fresh_server: EmbeddedServer, run_name: str, tmp_path: Path, browser: Browser) -> Iterator[BrokenRun]:
    with ExitStack() as roles:
        yield BrokenRun(tmp_path, fresh_server, run_name, roles, browser)


def test_a_run_without_workers(broken: BrokenRun) -> None:
    broken.start("produce")
    broken.train()
    broken.until_in_browser(
        "starving: no worker is alive; 8 groups of task math are pending; the trainer has waited",
        "task math has 0 of 4 groups",
        "`rollq work`",
    )
    first = broken.rollq("status").splitlines()[0]
    assert first.startswith("starving: no worker is alive; ")


def test_a_run_whose_judge_raises(broken: BrokenRun) -> None:
    broken.write(judge="broken_judge.judge")
    broken.start("produce", "work")
    broken.train()
    broken.until("failing: ", "task math", "KeyError")
    broken.until_in_browser(
        "failing: production of task math has stopped: every one of the last",
        "the limit stop_after_failures = 64 is reached",
        "KeyError",
        "because of that the trainer failed at step 1",
        "restart every worker",
    )


def test_a_run_whose_trainer_is_gone(broken: BrokenRun) -> None:
    broken.start("produce", "work")
    trainer = broken.train()
    broken.until("training: ")
    trainer.kill()
    trainer.join()
    broken.until_in_browser("trainer gone: nothing has been heard of the trainer for", "start the trainer again")


def test_a_run_that_is_paused(broken: BrokenRun) -> None:
    broken.start("produce", "work")
    broken.train()
    broken.until("training: ")
    broken.rollq("pause")
    broken.until_in_browser("paused: task math set to pause", "`rollq resume`")
    broken.rollq("resume")
    broken.until("training: ")


def test_a_run_whose_memory_is_full(broken: BrokenRun, fresh_server: EmbeddedServer) -> None:
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


def test_a_run_that_is_over(broken: BrokenRun) -> None:
    broken.start("produce", "work")
    broken.train(steps=3).join()
    broken.until_in_browser("finished: the trainer has ended after step 3")
