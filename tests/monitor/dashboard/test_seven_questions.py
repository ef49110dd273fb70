"""The seven questions of somebody who watches a run, answered by its page in three clicks, and by commands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, expect

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.main import main
from support.browsed_pages import Clicks, Watched, visited
from support.dashboard import serving
from support.learned_runs import CHANGED, LONG, SEARCHED, kept_alive, learn, write_settings

pytestmark = pytest.mark.usefixtures("forks")

STEPS = 45


@dataclass
class Compared:
    """Two runs on a server, the second one better: their settings, and the address of the dashboard of the first.
    `longest`: its group with the longest wrong answer of step `SEARCHED`."""

    first: Path
    second: Path
    address: str
    longest: int


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    folder = tmp_path_factory.mktemp("questions")
    archive = folder / "archive"
    archive.mkdir()
    with (
        EmbeddedServer(folder) as server,
        Buffer.connect(server.url, "run-a") as one,
        Buffer.connect(server.url, "run-b") as other,
    ):
        runs = learn(one, archive, steps=STEPS, gain=0.01), learn(other, archive, steps=STEPS, gain=0.0125)
        first, second = (
            write_settings(folder / f"{name}.toml", name, server.url, archive) for name in ("run-a", "run-b")
        )
        with kept_alive(*runs), serving(str(first)) as address:
            yield Compared(first, second, address, runs[0].longest)


@pytest.fixture
def page(tab: Watched, compared: Compared) -> Iterator[Page]:
    with visited(tab, compared.address) as page:
        yield page


def rollq(*words: object) -> str:
    """What a command prints."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def by_step(settings: Path) -> list[dict[str, str]]:
    """The rows of `rollq status --steps`, by the titles of its columns."""
    _, table, _ = rollq("status", settings, "--steps").split("\n\n")
    header, *rows = (line.split() for line in table.splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.long
def test_is_it_learning(page: Page, compared: Compared) -> None:
    said = page.locator(".headline")
    expect(said).to_contain_text(
        re.compile("Reward, mean of 10 steps.*higher than the 10 steps before.*higher than the first 10")
    )
    expect(said).to_contain_text(re.compile("held_out, evaluated at step 40.*higher than the first time"))
    rows = by_step(compared.first)
    assert float(rows[0]["reward"]) + 0.2 < float(rows[-1]["reward"])
    held_out = [float(row["held_out"]) for row in rows if row["held_out"] != "-"]
    assert len(held_out) == STEPS // 10
    assert held_out == sorted(held_out)


def test_are_answers_getting_longer(page: Page, compared: Compared) -> None:
    expect(page.locator(".headline")).to_contain_text(
        re.compile("Response length, mean of 10 steps.*higher than the 10 steps before.*higher than the first 10")
    )
    rows = by_step(compared.first)
    assert float(rows[-1]["length"]) > 2 * float(rows[0]["length"])


def test_which_task_is_worst(page: Page, compared: Compared) -> None:
    worst = page.get_by_role("table", name="Tasks").get_by_role("row").filter(has_text="lowest")
    expect(worst).to_have_count(1)
    expect(worst.get_by_role("cell").first).to_have_text("code")
    (line,) = (line for line in rollq("status", compared.first).splitlines() if " lowest " in line)
    assert line.split()[0] == "code"


def test_show_me_the_longest_wrong_answer_of_step_3(page: Page, compared: Compared) -> None:
    clicks = Clicks(page)
    clicks.on(page.get_by_role("link", name="Rollouts", exact=True))
    page.get_by_label("Step", exact=True).fill(str(SEARCHED))
    clicks.on(page.get_by_role("button", name="Samples of reward 0"))
    clicks.on(page.get_by_role("button", name="longest"))
    first = page.get_by_role("table", name="Groups", exact=True).locator("tbody tr").first
    expect(first).to_contain_text(f"math {compared.longest}")
    first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("article").filter(has=page.locator(".tag", has_text="longest"))).to_contain_text(LONG)
    assert clicks.count == 3


def test_the_longest_wrong_answer_of_step_3_is_two_commands(compared: Compared) -> None:
    query = f'{{"step": {SEARCHED}, "sample": {{"reward": 0}}}}'
    found = rollq("groups", "query", compared.first, query, "--sort", "-tokens", "--limit", "1")
    task, number = found.splitlines()[1].split()[:2]
    assert (task, int(number)) == ("math", compared.longest)
    assert LONG in rollq("groups", "show", compared.first, task, number)


def test_which_machine_is_stuck(page: Page, compared: Compared) -> None:
    expect(page.locator("#sentence")).to_contain_text(re.compile("on gpu-node-2, process 4713, has said nothing for"))
    first = page.get_by_role("table", name="Workers").locator("tbody tr").first
    expect(first).to_contain_text("gpu-node-2")
    expect(first).to_contain_text("dead")
    page.get_by_role("link", name="Rollouts", exact=True).click()
    cut = "box => box.scrollHeight > box.clientHeight"
    assert page.locator("#diagnosis p").first.evaluate(cut) is False
    said = " ".join(rollq("status", compared.first).split())
    assert "on gpu-node-2, process 4713, has said nothing for" in said


def test_what_changed_at_step_40(page: Page, compared: Compared) -> None:
    rows = page.get_by_role("table", name="Changes").get_by_role("row", name=re.compile(f"^{CHANGED} "))
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="max_staleness 2 -> 4")).to_contain_text("math")
    expect(rows.filter(has_text="learning_rate 0.001 -> 0.0003")).to_have_count(1)
    *_, changes = rollq("status", compared.first, "--steps").split("\n\n")
    assert sorted(line.split(maxsplit=2) for line in changes.splitlines()[1:]) == [
        ["40", "-", "learning_rate 0.001 -> 0.0003"],
        ["40", "math", "max_staleness 2 -> 4"],
    ]


@pytest.mark.long
def test_is_run_b_better_than_run_a(page: Page, compared: Compared) -> None:
    page.get_by_label("Compare with").select_option("run-b")
    said = page.locator(".headline")
    expect(said).to_contain_text(
        re.compile(f"Reward, means of 10 steps up to step {STEPS}.*run-a.*run-b.*higher than run-a")
    )
    expect(said).to_contain_text(re.compile("held_out, evaluated at step 40.*run-a.*run-b.*higher than run-a"))
    first, second = by_step(compared.first)[-1], by_step(compared.second)[-1]
    assert first["step"] == second["step"]
    assert float(first["reward"]) < float(second["reward"])
