"""The section on learning in a real Chromium: curves by step and time, linked hover, comparisons, files, addresses."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from support.browsed_pages import Watched, opened, visited
from support.buffer_run import World
from support.dashboard import serving

pytestmark = pytest.mark.usefixtures("forks")

STEPS = 60


@dataclass
class Curves:
    """A server with two runs that have learnt, and the address of the dashboard of the first."""

    server: EmbeddedServer
    address: str


def learn(buffer: Buffer, gain: float) -> None:
    """Report `STEPS` steps whose reward grows by `gain` each, an evaluation each 10, and a change of rules at 40."""
    world = World(buffer).start(math={"max_staleness": 2}, code={})
    for step in range(1, STEPS + 1):
        reward = gain * step
        facts = {"rewards": {"math": reward, "code": reward / 2}, "loss": 1 / step, "gradient_norm": 0.5}
        lengths = {"response_length": {"mean": 100.0 + step, "max": 200.0}}
        buffer.report_trainer(world.held, {"step": step, "reward": reward, **facts, **lengths})
        if step % 10 == 0:
            buffer.report_evaluations(world.held, step, {"held_out": reward * 0.75})


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Curves]:
    folder = tmp_path_factory.mktemp("curves")
    with EmbeddedServer(folder) as server, Buffer.connect(server.url, "sums") as buffer:
        learn(buffer, 0.01)
        buffer.change_rules("math", {"max_staleness": 4})
        with Buffer.connect(server.url, "slower") as other:
            learn(other, 0.005)
        with serving("--url", server.url, "--run", "sums") as address:
            yield Curves(server, address)


@pytest.fixture
def page(tab: Watched, curves: Curves) -> Iterator[Page]:
    with visited(tab, curves.address) as page:
        yield page


def figure(page: Page, name: str) -> Locator:
    return page.locator(".learning").get_by_role("figure", name=name)


def test_the_first_section_says_whether_the_run_learns(page: Page) -> None:
    headline = page.locator(".headline")
    expect(headline).to_contain_text("Reward, mean of 10 steps")
    expect(headline).to_contain_text(re.compile("0.5[56].*0.10 higher than the 10 steps before"))
    expect(headline).to_contain_text(re.compile("0.5[56].*0.50 higher than the first 10 steps"))
    expect(headline).to_contain_text(re.compile("Response length.*156.*50 higher than the first 10 steps"))
    expect(headline).to_contain_text(re.compile("held_out, evaluated at step 60.*0.45"))
    reward = figure(page, "Reward")
    expect(reward.locator(".legend li")).to_have_text(["reward0.60", "code0.30", "math0.60", "held_out0.45"])
    expect(reward.locator("path.dots")).to_have_count(1)
    expect(page.get_by_role("table", name="Changes")).to_contain_text("max_staleness 2 -> 4")
    assert page.locator("#view-run > *").first.get_attribute("aria-label") == "Learning"


def test_all_charts_show_the_step_that_one_points_at(page: Page) -> None:
    expect(figure(page, "Reward").locator("path.line").first).to_be_visible()
    figure(page, "Loss").focus()
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    for name, value in (("Reward", "0.59"), ("Response length", "159"), ("Loss", "0.02")):
        expect(figure(page, name).locator(".when")).to_have_text("step 59")
        expect(figure(page, name).locator(".legend b").first).to_have_text(value)
    expect(page.locator(".readout")).to_contain_text(re.compile(r"^step 59 at \d\d:\d\d:\d\d$"))


def test_a_change_of_rules_is_pointed_at_in_all_charts(page: Page) -> None:
    row = page.get_by_role("table", name="Changes").get_by_role("row", name="max_staleness")
    step = row.get_by_role("cell").first.inner_text()
    row.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".readout")).to_contain_text("math max_staleness 2 -> 4")
    expect(page).to_have_url(re.compile(f"at={step}"))
    page.reload()
    expect(page.locator(".readout")).to_contain_text("math max_staleness 2 -> 4")


def test_a_held_step_leads_to_its_rollouts_and_is_released(page: Page, curves: Curves) -> None:
    held = page.locator(".held")
    page.goto(f"{curves.address}/#/?at=3")
    expect(held).to_have_text("Step 3 is held: its rollouts \u00b7 release")
    held.get_by_role("link", name="release").click()
    expect(held).to_be_empty()
    page.go_back()
    expect(held).to_have_text("Step 3 is held: its rollouts \u00b7 release")
    page.keyboard.press("Escape")
    expect(held).to_be_empty()
    expect(page).not_to_have_url(re.compile("at="))
    page.goto(f"{curves.address}/#/?first=11-20&second=41-50&at=2")
    expect(held).to_contain_text("Step 13 is held: its rollouts")
    expect(held).to_contain_text("Step 43 is held: its rollouts")
    held.get_by_role("link", name="its rollouts").last.click()
    expect(page).to_have_url(f"{curves.address}/#/rollouts?step=43")


def test_another_run_is_compared_dashed_and_stays_in_the_address(page: Page) -> None:
    page.get_by_label("Compare with").select_option("slower")
    for _ in range(2):
        lines = figure(page, "Loss").locator("path.line")
        expect(lines).to_have_count(2)
        expect(lines.nth(1)).to_have_class(re.compile(r"\bdash1\b"))
        expect(figure(page, "Loss").locator(".legend li")).to_have_text(["sums0.02", "slower0.02"])
        expect(page.locator(".headline")).to_contain_text(
            re.compile("Reward, means of 10 steps up to step 60.*sums 0.5[56] . slower 0.28.*0.28 lower than sums")
        )
        expect(page.locator(".headline")).to_contain_text(
            re.compile("held_out, evaluated at step 60.*sums 0.45 . slower 0.2[23].*lower than sums")
        )
        expect(page).to_have_url(re.compile("other=slower"))
        page.reload()


def test_two_runs_stand_together_and_are_named_once(page: Page) -> None:
    titles = page.locator("#view-run > section > h2")
    order = ["Trainer", "Tasks", "Workers", "More curves", "Latest rollouts"]
    expect(titles).to_have_text(order)
    page.get_by_label("Compare with").select_option("slower")
    expect(page.locator(".learning .bar > .legend li")).to_have_text(["sums", "slower"])
    entry = figure(page, "Reward").locator(".legend li").filter(has_text="math")
    expect(entry).to_have_text("math0.60 0.30")
    expect(entry.locator(".key")).to_have_count(2)
    expect(page.get_by_text("All below is of the run sums alone.")).to_be_visible()
    expect(titles).to_have_text(["More curves", *order[:3], order[-1]])
    page.get_by_label("Compare with").select_option("")
    expect(page.get_by_text("All below is of the run sums alone.")).to_be_hidden()
    expect(titles).to_have_text(order)


def test_two_ranges_of_a_run_start_at_one_place(page: Page) -> None:
    page.get_by_label("Compare with").select_option("two ranges of steps")
    expect(page).to_have_url(re.compile("first=1-30&second=31-60"))
    page.get_by_label("First steps").fill("11-20")
    page.get_by_label("Second steps").fill("41-50")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("first=11-20&second=41-50"))
    legend = figure(page, "Loss").locator(".legend li")
    expect(legend).to_have_text(["11\u201320" + "0.05", "41\u201350" + "0.02"])
    expect(figure(page, "Loss").locator("svg text").last).to_have_text(re.compile(r"^\+\d$"))
    figure(page, "Loss").focus()
    page.keyboard.press("ArrowLeft")
    expect(figure(page, "Reward").locator(".when")).to_have_text("steps 20 and 50")


def test_a_late_answer_breaks_off_no_other_drawing(page: Page) -> None:
    held: list[Route] = []
    page.route("**/api/curves?run=slower", lambda route: held.append(route))
    choice = page.get_by_label("Compare with")
    choice.select_option("slower")
    expect(page.locator(".learning > [role=status]")).to_contain_text("reading the curves of slower")
    choice.select_option("")
    page.get_by_label("Axis of the curves").select_option("over time")
    expect(figure(page, "Loss").locator("path.line")).to_have_count(1)
    for route in held:
        route.continue_()
    expect(page.locator(".learning > [role=status]")).to_be_empty()
    for chart in page.locator(".group[open] figure").all():
        expect(chart.locator("path.line").first).to_have_attribute("d", re.compile("^M"))
    page.unroute("**/api/curves?run=slower")
    choice.select_option("slower")
    expect(figure(page, "Loss").locator("path.line")).to_have_count(2)


@pytest.mark.long
def test_curves_come_from_files_while_the_server_is_gone(
    browser: Browser, fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    output = tmp_path / "trained"
    output.mkdir()
    lines = [{"step": step, "time_s": 1e9 + step, "reward": step / 10} for step in range(1, 6)]
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        (tmp_path / "rollq.toml").write_text(
            f'run = "sums"\n[redis]\nbuffer_url = "{fresh_server.url}"\n'
            '[tasks.math]\nprompts = "p.jsonl"\njudge = "exact_match"\nbatch_groups = 2\ngroup_size = 2\n'
            'max_tokens = 64\n[worker]\nengine = "simulated"\n'
            f'[trainer]\nmodel = "model"\noutput = "{output}"\nsteps = 9\n'
        )
        World(buffer).start(math={})
        with serving(str(tmp_path / "rollq.toml")) as address:
            context, watched = opened(browser, address)
            fresh_server.stop()
            said = watched.page.locator(".learning > [role=status]")
            expect(said).to_contain_text("from the trainer's files, up to step 5")
            expect(figure(watched.page, "Reward").locator(".legend b")).to_have_text("0.50")
            fresh_server.start()
            expect(said).to_have_text("no train step has ended yet")
            context.close()
