"""The list of rollouts, groups and comparisons in a real Chromium: filters, orders, marks, neighbours, and links."""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import GroupResult, Prompt, Sample, SampleStatus
from support.browsed_pages import Clicks, Watched, opened, visited
from support.buffer_run import World
from support.dashboard import fill, serving, written
from support.learned_runs import answer

pytestmark = pytest.mark.usefixtures("forks")

STEPS, CHECKPOINT, SEARCHED = 5, 4, 3
"""Steps of the run, the last one that a checkpoint has dropped, and the one that is searched."""
LONGEST = 47
"""Tokens of the longest wrong answer of that step."""


@dataclass
class Stepped:
    """A run of `STEPS` steps, its first ones in an archive: the addresses of the dashboards of both. `longest`: the
    group with the longest wrong answer of the step `SEARCHED`; `same`: one of its prompt, of the last step."""

    live: str
    archive: str
    longest: int
    same: int


def answers(world: World, row: int, *samples: Sample) -> int:
    """Admit the prompt of a row, and put these answers; returns the number of the group."""
    return answer(world, Prompt(f"prompt {row}", answer=str(row), row=row), *samples)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stepped]:
    folder = tmp_path_factory.mktemp("steps")
    archive = folder / "archive"
    archive.mkdir()
    rules: dict[str, object] = {"archive": True, "max_staleness": 100, "max_uncheckpointed_steps": 100}
    with EmbeddedServer(folder) as server, Buffer.connect(server.url, "sums") as buffer:
        world = World(buffer).start(math=rules)
        longest = 0
        for step in range(1, STEPS + 1):
            wrong = "x" * (LONGEST if step == SEARCHED else LONGEST - step)
            second = answers(world, 7, written("short", reward=1), written(wrong, reward=0))
            longest = second if step == SEARCHED else longest
            answers(world, step, written("y" * 60, reward=1), written("wrong", reward=0))
            world.train(step, math=2)
            if step == CHECKPOINT:
                buffer.checkpoint(world.held, step)
                Archiver(buffer, str(archive), wait_s=0).finish(threading.Event())
        answers(
            world,
            7,
            written("half", reward=0.5),
            Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error="no answer"),
        )
        fill(world, 60)
        (folder / "rollq.toml").write_text(
            f'run = "sums"\n[redis]\nbuffer_url = "{server.url}"\n'
            '[tasks.math]\nprompts = "p.jsonl"\njudge = "exact_match"\nbatch_groups = 2\ngroup_size = 2\n'
            f'[worker]\nengine = "simulated"\n[archive]\nurl = "{archive}"\n'
        )
        with serving(str(folder / "rollq.toml")) as live, serving("--archive", str(archive)) as archived:
            yield Stepped(live, archived, longest, second)


@pytest.fixture(params=["live", "archive"])
def address(request: pytest.FixtureRequest, stepped: Stepped) -> str:
    return str(getattr(stepped, request.param))


@pytest.fixture
def page(tab: Watched, address: str) -> Iterator[Page]:
    """The page of the run or of its archive, on a laptop; at the end nothing was wrong."""
    with visited(tab, address) as page:
        yield page


def listed(page: Page) -> Locator:
    """The rows of the list."""
    return page.get_by_role("table", name="Groups", exact=True).locator("tbody tr")


def longest_wrong(page: Page) -> Clicks:
    """From the page of the run, list the wrong answers of a step, the longest first."""
    clicks = Clicks(page)
    clicks.on(page.get_by_role("link", name="Rollouts", exact=True))
    page.get_by_label("Step", exact=True).fill(str(SEARCHED))
    clicks.on(page.get_by_role("button", name="Samples of reward 0"))
    clicks.on(page.get_by_role("button", name="longest"))
    expect(page.get_by_role("columnheader", name="longest")).to_have_attribute("aria-sort", "descending")
    expect(page.locator("#view-rollouts .note[role=status]")).to_contain_text("shown")
    return clicks


def test_the_longest_wrong_answer_of_a_dropped_step_is_three_clicks_away(page: Page, stepped: Stepped) -> None:
    assert longest_wrong(page).count == 3
    expect(listed(page)).to_have_count(2)
    expect(listed(page).first).to_contain_text(f"math {stepped.longest}")
    expect(listed(page).first.get_by_role("cell", name=str(LONGEST), exact=True)).to_be_visible()
    expect(listed(page).first.get_by_role("img")).to_have_accessible_name(
        "2 samples: 1 of reward 1, 1 of reward 0, 1 found"
    )
    listed(page).first.focus()
    page.keyboard.press("Enter")
    found = page.get_by_role("article", name="sample 1")
    expect(found.locator(".tag")).to_have_text("longest")
    expect(found).to_be_in_viewport()
    expect(page.get_by_role("heading", level=1)).to_be_in_viewport()
    expect(page.locator(".ringed")).to_have_text("Ringed: the sample that matches the list's filters")
    expect(page.get_by_role("article", name="sample 0")).not_to_have_class(re.compile("found"))


def test_a_link_shows_the_same_list_and_clear_shows_all(page: Page, address: str) -> None:
    longest_wrong(page)
    expect(listed(page)).to_have_count(2)
    link, rows = page.url, listed(page).all_inner_texts()
    page.goto("about:blank")
    page.goto(link)
    expect(listed(page)).to_have_count(2)
    assert listed(page).all_inner_texts() == rows
    expect(page.get_by_label("Sample reward, to")).to_have_value("0")
    expect(page.get_by_role("button", name="Samples of reward 0")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("link", name="Run", exact=True).click()
    page.get_by_role("link", name="Rollouts", exact=True).click()
    expect(page).to_have_url(link)
    for name in ("mean reward found", "longest found"):
        expect(page.get_by_role("columnheader", name=name)).to_be_visible()
    page.get_by_role("button", name="Clear", exact=True).click()
    expect(page).to_have_url(f"{address}/#/rollouts")
    for name in ("mean reward", "longest"):
        expect(page.get_by_role("columnheader", name=re.compile(f"{name}( .)?$"))).to_be_visible()
    expect(page.get_by_label("Step", exact=True)).to_have_value("")
    expect(listed(page).nth(2)).to_be_visible()


def test_a_status_has_a_count_where_the_buffer_has_all_its_groups(browser: Browser, stepped: Stepped) -> None:
    context, watched = opened(browser, f"{stepped.live}/#/rollouts")
    options = watched.page.get_by_label("Status", exact=True).locator("option")
    expect(options.filter(has_text="pending")).to_have_text("pending (0)")
    for name in ("archived", "failed", "leaving"):
        expect(options.filter(has_text=name)).to_have_text(name)
    context.close()


def test_heads_sort_by_mouse_and_keyboard(page: Page) -> None:
    page.get_by_role("link", name="Rollouts", exact=True).click()
    head, steps = page.get_by_role("columnheader", name="step"), "tr td:nth-child(2)"
    for order, says in ((True, "descending"), (False, "ascending")):
        head.get_by_role("button").focus()
        page.keyboard.press("Enter")
        expect(head).to_have_attribute("aria-sort", says)
        expect(page.locator("#view-rollouts .note[role=status]")).to_contain_text("shown")
        found = [int(text) for text in page.locator(f"#view-rollouts tbody {steps}").all_inner_texts()]
        assert found == sorted(found, reverse=order)
    page.keyboard.press("Enter")
    expect(head).not_to_have_attribute("aria-sort", re.compile("."))


def test_filters_choose_single_samples(page: Page) -> None:
    page.get_by_role("link", name="Rollouts", exact=True).click()
    page.get_by_label("Tokens of a sample, from").fill("55")
    page.get_by_role("button", name="Samples of reward 1").click()
    page.get_by_label("Step", exact=True).fill("2")
    page.keyboard.press("Enter")
    expect(listed(page)).to_have_count(1)
    expect(listed(page).get_by_role("cell", name="60", exact=True)).to_be_visible()
    page.get_by_role("button", name="Samples of reward 0").click()
    expect(page.get_by_role("table", name="Groups", exact=True)).to_contain_text("no groups")
    page.get_by_role("button", name="Samples of reward 0").click()
    expect(page.get_by_label("Sample reward, from")).to_have_value("")
    page.get_by_label("Ended by").select_option("length")
    expect(page.get_by_role("table", name="Groups", exact=True)).to_contain_text("no groups")
    page.get_by_label("Ended by").select_option("stop")
    expect(listed(page)).to_have_count(1)


def test_neighbours_are_those_of_the_list(page: Page, stepped: Stepped) -> None:
    longest_wrong(page)
    other = listed(page).nth(1).locator("a").inner_text()
    listed(page).first.focus()
    page.keyboard.press("Enter")
    heading = page.get_by_role("heading", level=1)
    expect(page.get_by_role("link", name="next")).to_be_visible()
    page.keyboard.press("j")
    expect(heading).to_have_text(other)
    expect(page.locator(".steps")).to_have_text(re.compile("previous.*next$"))
    page.keyboard.press("k")
    expect(heading).to_have_text(f"math {stepped.longest}")
    page.get_by_role("link", name="next").click()
    expect(heading).to_have_text(other)
    page.reload()
    expect(page.get_by_role("link", name="previous")).to_be_visible()
    page.keyboard.press("Escape")
    expect(listed(page)).to_have_count(2)


def test_two_steps_of_a_prompt_are_compared(page: Page, address: str, stepped: Stepped) -> None:
    page.goto(f"{address}/#/rollouts/math/{stepped.longest}")
    same = page.get_by_role("table", name="Groups of the same prompt")
    first = same.get_by_role("row").nth(1)
    expect(first.get_by_role("cell").nth(1)).to_have_text("1")
    first.get_by_role("link", name="compare").click()
    facts = page.get_by_role("table", name="Groups compared").locator("tbody tr")
    expect(facts).to_have_count(2)
    expect(facts.nth(0).get_by_role("cell").nth(1)).to_have_text(str(SEARCHED))
    expect(facts.nth(1).get_by_role("cell").nth(1)).to_have_text("1")
    cards = page.get_by_role("article")
    expect(cards).to_have_count(4)
    expect(cards.locator(".reward")).to_have_text(["reward 1.000", "reward 1.000", "reward 0.000", "reward 0.000"])
    left, right = (cards.nth(at).bounding_box() for at in (2, 3))
    assert left
    assert right
    assert left["y"] == right["y"]
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.locator("#view-compare .turn")).to_have_text("userprompt 7")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"math {stepped.longest}")


def test_samples_differ_by_reward_and_are_coloured_by_it(browser: Browser, stepped: Stepped) -> None:
    context, watched = opened(browser, f"{stepped.live}/#/rollouts/math/{stepped.same}")
    page = watched.page
    right, wrong = (page.get_by_role("article", name=f"sample {at}") for at in (0, 1))
    expect(right).to_have_class(re.compile(r"\bfull\b"))
    expect(wrong).to_have_class(re.compile(r"\bzero\b"))
    assert right.locator(".marks path").evaluate_all("all => all.map((one) => one.className.baseVal)") == [
        "edge",
        "full",
    ]
    page.locator(".choice").get_by_text("reward", exact=True).click()
    expect(right.locator(".tokens span").first).to_have_class(re.compile(r"\bplus\b"))
    expect(wrong.locator(".tokens span").first).to_have_class(re.compile(r"\bminus\b"))
    expect(page.locator(".controls .legend")).to_contain_text("above the group's mean")
    assert watched.problems == []
    context.close()


def test_on_a_phone_the_filters_are_behind_a_button(browser: Browser, stepped: Stepped) -> None:
    address = f"{stepped.archive}/#/rollouts?step={SEARCHED}&max_reward=0"
    context, watched = opened(browser, address, width=390)
    page = watched.page
    expect(page.get_by_role("search")).to_be_hidden()
    expect(page.locator(".filtering .bar")).to_have_text(f"Filter (2)step {SEARCHED}, reward up to 0")
    page.get_by_role("button", name="Filter (2)").click()
    page.get_by_label("In the prompt").fill("prompt 7")
    page.keyboard.press("Enter")
    expect(page.get_by_role("search")).to_be_hidden()
    expect(listed(page)).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.problems == []
    context.close()


@pytest.mark.long
def test_two_hundred_rows_of_marks_are_few_elements(browser: Browser, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server, Buffer.connect(server.url, "sums") as buffer:
        world = World(buffer).start(math={"group_size": 16, "batch_groups": 300})
        world.admit(200)
        rewards = [0.0, 1.0, 0.5] * 5 + [0.25]
        samples = tuple(written("a", reward=reward) for reward in rewards)
        buffer.put([GroupResult(lease, samples) for lease in world.lease(200)])
        with serving("--url", server.url, "--run", "sums") as address:
            context, watched = opened(browser, f"{address}/#/rollouts?max_reward=0")
            page = watched.page
            page.get_by_role("button", name="More").click()
            expect(page.locator("#view-rollouts .note[role=status]")).to_contain_text("200 groups shown")
            first = listed(page).first
            expect(first.get_by_role("img")).to_have_accessible_name(
                "16 samples: 5 of reward 1, 6 between 0 and 1, 5 of reward 0, 5 found"
            )
            assert first.locator("path").count() <= 5
            assert page.evaluate("document.querySelectorAll('*').length") < 4000
            context.close()
