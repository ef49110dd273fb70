"""The page in a real Chromium: what it shows, two clicks to a token, the keyboard alone, sizes, and hostile texts."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.query.selection import MOST_READ
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Status
from support.browsed_pages import Clicks, Watched, inspected, opened, visited
from support.buffer_run import World
from support.dashboard import HOSTILE, REPORT, TOKEN, fill, put, remember, serving, written
from support.trained_run import MISMATCH, archive_many, train_annotated
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forks")

MANY = 10_000
MOST_DRAWN, MOST_TOKENS = 110, 4000
"""Rows of a table, and tokens of a sample, that are elements of the page at a time."""
SCHEMES, WIDTHS = ("light", "dark"), (390, 1280)
LONG = 30_000
REFRESHED = re.compile("^page refreshed [0-2] s ago$")
READ = re.compile("^(training|trainer gone|finished):$")
"""The state of a run whose trainer is not there: it never was, has ended, or may have been silent for long."""


@dataclass
class Shown:
    """A run with many groups, and the address of its dashboard. `hostile`: the group whose texts are HTML; `long`: one
    of task words, whose answers have `LONG` tokens; `trained`: one that a trainer has trained, and annotated;
    `with_tools`: one whose prompt offers two tools, and whose second sample had another."""

    buffer: Buffer
    address: str
    hostile: int
    long: int
    trained: int
    with_tools: int


def tool(name: str) -> dict[str, object]:
    """The definition of a tool without parameters."""
    return {"type": "function", "function": {"name": name, "description": HOSTILE, "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("dashboard")
    with EmbeddedServer(folder) as server, Buffer.connect(server.url, "sums") as buffer:
        rules: dict[str, object] = {"max_staleness": 4}
        world = World(buffer).start(
            math=rules, code=rules, books={"offline": True}, alone=rules, words={"group_size": 4}
        )
        buffer.change_rules("alone", {"batch_groups": 0}, batch_step=1)
        trained = put(world, written("first", reward=0.25), written("second"))
        fill(world, MANY)
        offered = (tool("add"), tool(HOSTILE))
        samples = [replace(written(name), tools=tools) for name, tools in (("same", offered), ("own", offered[:1]))]
        with_tools = put(world, *samples, prompt=Prompt("1 + 2?", answer="3", tools=offered))
        put(world, *[Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error=HOSTILE)] * 2)
        long = put(world, *[written("ten chars " * (LONG // 10))] * 4, task="words")
        hostile = put(world, written(HOSTILE, talks=True), written(HOSTILE, reward=0.25))
        (folder / "archive").mkdir()
        train_annotated(server.url, "sums", folder / "archive", folder)
        for task in ("math", "code"):
            remember(buffer, task, 40)
        (folder / "rollq.toml").write_text(
            f'run = "sums"\n[redis]\nbuffer_url = "{server.url}"\n'
            '[tasks.math]\nprompts = "p.jsonl"\njudge = "exact_match"\nbatch_groups = 2\ngroup_size = 2\n'
            f'max_tokens = 64\n[worker]\nengine = "simulated"\n[archive]\nurl = "{folder / "archive"}"\n'
        )
        with serving(str(folder / "rollq.toml"), token=TOKEN) as address:
            yield Shown(buffer, address, hostile, long, trained, with_tools)


@pytest.fixture
def page(tab: Watched, shown: Shown) -> Iterator[Page]:
    """The page of the run, on a laptop; at the end nothing was wrong, and no other host was asked."""
    with visited(tab, shown.address) as page:
        yield page
        assert page.evaluate("window.hacked") is None


def test_a_token_is_two_clicks_away_among_ten_thousand_groups(page: Page, shown: Shown) -> None:
    expect(page.locator("#state")).to_have_text(READ)
    page.get_by_role("row", name=f"math {shown.hostile} ").click()
    page.locator(".sample").nth(1).locator(".tokens span").nth(len(HOSTILE.encode()) // 2 - 1).click()
    values = inspected(page)
    middle = HOSTILE.encode()[len(HOSTILE.encode()) // 2 - 1]
    assert values["id"] == str(middle)
    assert values["text"] == f'"{chr(middle)}"'.replace('"""', '"\\""')
    assert (values["version"], values["loss mask"]) == ("0", "masked")
    assert -2.1 < float(values["logprob"]) < -1.9
    assert (values["reward"], values["part exact"], values["part format"]) == ("0.250", "0.250", "0.125")


def test_what_a_trainer_made_of_a_token_is_two_clicks_away_among_ten_thousand_groups(page: Page, shown: Shown) -> None:
    assert shown.buffer.counts("math").statuses[Status.COMPLETED] >= MANY - 2
    clicks = Clicks(page)
    link = page.get_by_role("link", name=f"math {shown.trained}", exact=True)
    clicks.on(page.get_by_role("table", name="Latest rollouts").get_by_role("row").filter(has=link))
    clicks.on(page.locator(".sample").first.locator(".tokens span").last)
    values = inspected(page)
    assert clicks.count == 2
    assert (values["version"], values["loss mask"], values["mismatch"]) == ("0", "counted", f"{MISMATCH:.4f}")
    assert float(values["trainer logprob"]) == pytest.approx(float(values["logprob"]) + MISMATCH)
    assert (values["reward"], values["part exact"], values["part format"]) == ("0.250", "0.250", "0.125")
    assert values["clipped"] in ("yes", "no")
    assert float(values["advantage"]) < 0


@pytest.mark.parametrize("address", ["#/%E0", "#/rollouts%"])
def test_an_address_that_nobody_has_encoded_shows_the_run(page: Page, shown: Shown, address: str) -> None:
    page.goto("about:blank")
    page.goto(f"{shown.address}/{address}")
    expect(page.locator("#state")).to_have_text(READ)
    expect(page.get_by_role("heading", name="Trainer", exact=True)).to_be_visible()


def test_the_page_says_where_the_trainer_is(page: Page, shown: Shown) -> None:
    trainer = shown.buffer.trainer_state()
    assert trainer is not None
    assert trainer.place is not None
    expect(page.locator("#view-run")).to_contain_text(f"process{trainer.place.host}:{trainer.place.pid}")


def test_tokens_are_coloured_by_what_the_trainer_wrote(page: Page, shown: Shown) -> None:
    page.goto(f"{shown.address}/#/rollouts/math/{shown.trained}")
    spans = page.locator(".tokens").first.locator("span")
    page.get_by_text("mismatch", exact=True).click()
    expect(spans.first).to_have_class(re.compile(r"\bl3\b"))
    expect(spans.nth(1)).to_have_class(re.compile(r"\bm0\b"))
    expect(page.locator(".controls .legend")).to_contain_text("not trained")
    for name in ("trainer logprob", "ratio", "clipped", "advantage"):
        page.get_by_text(name, exact=True).first.click()
        expect(spans.first).to_have_class(re.compile(r"\bt \w+"))
    page.goto(f"{shown.address}/#/rollouts/math/{shown.hostile}")
    expect(page.locator("#annotations")).to_contain_text("has not trained this group")
    assert page.get_by_text("mismatch", exact=True).count() == 0


def test_a_group_is_quarantined_released_and_dropped_in_the_browser(page: Page, shown: Shown) -> None:
    number = put(World(shown.buffer), written("aside"), written("aside"))
    page.goto(f"{shown.address}/#/rollouts/math/{number}")
    dialog, status = page.get_by_role("dialog"), page.locator("#view-group .bar .pill")
    for verb, said, then in (
        ("Quarantine", "completed -> failed.", "failed"),
        ("Requeue", "failed -> pending.", "pending"),
    ):
        page.get_by_role("button", name=f"{verb} group math {number}").click()
        if verb == "Quarantine":
            dialog.get_by_label("Token").fill(TOKEN)
            page.keyboard.press("Enter")
        expect(dialog).to_contain_text(said)
        assert shown.buffer.inspect("math", number)["status"] == said.split()[0]
        dialog.get_by_role("button", name=verb).click()
        expect(status).to_have_text(then)
    page.get_by_role("button", name=f"Quarantine group math {number}").click()
    expect(dialog).to_contain_text("Nothing changes: it is pending")
    expect(dialog.get_by_role("button", name="Quarantine")).to_be_hidden()
    page.keyboard.press("Escape")
    page.get_by_role("button", name=f"Drop group math {number}").click()
    dialog.get_by_role("button", name="Drop").click()
    expect(page.locator("#said")).to_contain_text("pending -> gone.")
    expect(page.get_by_role("table", name="Groups")).to_be_visible()
    assert shown.buffer.counts("math").dropped["by_hand"] == 1


def test_the_run_is_shown_with_charts_tables_and_errors(page: Page, shown: Shown) -> None:
    shown.buffer.report_worker("worker-1", REPORT)
    workers = page.get_by_role("table", name="Workers")
    expect(workers).to_contain_text("worker-1")
    for title in ("host", "process", "samples", "of batch"):
        expect(workers.get_by_role("columnheader", name=title, exact=True)).to_be_visible()
    for text in ("box", "4242", "21 / 64"):
        expect(workers.get_by_role("cell", name=text, exact=True)).to_be_visible()
    expect(page.get_by_role("table", name="Tasks")).to_contain_text("math")
    errors = page.locator(".errors summary")
    expect(errors).to_contain_text(re.compile(r"1 error, the last .* ago: math: .*<script>"))
    errors.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("table", name="Last errors")).to_contain_text("<script>")
    expect(page.get_by_role("row", name="alone retired")).to_be_visible()
    expect(page.get_by_label("Task of the charts")).to_have_value("math")
    assert page.locator("path.line").count() >= 6
    expect(page.locator("#age")).to_have_text(REFRESHED)
    page.get_by_label("Task of the charts").select_option("math")
    tokens = page.get_by_role("figure", name="Tokens per second")
    expect(tokens.locator(".legend")).to_contain_text("880")
    page.get_by_role("table", name="Tasks").get_by_role("link", name=re.compile("10,00")).click()
    expect(page.get_by_role("table", name="Groups")).to_contain_text(f"math {shown.hostile}")
    assert page.get_by_label("Task", exact=True).input_value() == "math"
    assert page.get_by_label("Status", exact=True).input_value() == "completed"


def test_five_hundred_workers_are_shown_when_they_are_asked_for(page: Page, shown: Shown) -> None:
    for number in range(500):
        shown.buffer.report_worker(f"x{number:03d}", REPORT)
    table, scrolled = page.get_by_role("table", name="Workers"), page.get_by_role("region", name="Workers")
    workers = table.locator("tbody tr")
    page.get_by_role("button", name=re.compile("Show all 50[01] workers")).click()
    expect(table).to_have_attribute("aria-rowcount", re.compile("50[12]"))
    for place, name in (("box.scrollHeight", "x499"), ("0", "x000")):
        scrolled.evaluate(f"box => {{ box.scrollIntoView(); box.scrollTo(0, {place}); }}")
        expect(table.get_by_role("cell", name=name, exact=True)).to_be_in_viewport()
        assert workers.count() <= MOST_DRAWN
    page.get_by_role("button", name="Show the first 60").click()
    expect(workers).to_have_count(60)


def test_groups_are_found_and_listed_by_the_page(page: Page, shown: Shown) -> None:
    page.get_by_role("link", name="Rollouts").click()
    rows = page.get_by_role("table", name="Groups").locator("tbody tr")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="More").click()
    expect(page.locator("#view-rollouts .note")).to_contain_text("250 groups shown")
    assert rows.count() <= MOST_DRAWN
    page.get_by_label("Status", exact=True).select_option("failed")
    expect(rows).to_have_count(1)
    page.get_by_label("Status", exact=True).select_option("")
    page.get_by_label("In the answers").fill("onerror")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#view-rollouts .note")).to_contain_text("128 read")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text(f"math {shown.hostile}")


def test_the_keyboard_alone_is_enough(page: Page, shown: Shown) -> None:
    expect(page.locator("#state")).to_have_text(READ)
    keys = page.keyboard
    keys.press("/")
    expect(page.locator("#search")).to_be_focused()
    keys.type("onerror")
    keys.press("Enter")
    rows = page.get_by_role("table", name="Groups").locator("tbody tr")
    expect(rows).to_have_count(1)
    keys.press("Escape")
    expect(page.locator("#search")).not_to_be_focused()
    page.get_by_label("In the answers").fill("")
    keys.press("Enter")
    expect(rows).to_have_count(50)
    for _ in range(20):
        if page.evaluate("document.activeElement.matches('tbody tr')"):
            break
        keys.press("Tab")
    expect(rows.nth(0)).to_be_focused()
    keys.press("ArrowDown")
    keys.press("ArrowDown")
    keys.press("ArrowUp")
    expect(rows.nth(1)).to_be_focused()
    keys.press("Home")
    keys.press("Enter")
    expect(page.get_by_role("heading", level=1, name=f"math {shown.hostile}")).to_be_focused()
    for _ in range(20):
        if page.evaluate("document.activeElement.className") == "tokens":
            break
        keys.press("Tab")
    assert inspected(page)["token"] == "0"
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    assert (inspected(page)["token"], inspected(page)["logprob"]) == ("2", f"{-8 / (len(HOSTILE.encode()) - 1):.4f}")
    keys.press("End")
    assert inspected(page)["token"] == str(len(HOSTILE.encode()) - 1)
    keys.press("Escape")
    expect(rows).to_have_count(50)
    expect(page.locator("#view-group")).to_be_hidden()


def test_the_calls_of_an_agent_are_listed_with_their_segments(page: Page, shown: Shown) -> None:
    page.goto(f"{shown.address}/#/rollouts/math/{shown.hostile}")
    listed = page.get_by_role("article", name="sample 0").locator(".calls li")
    expect(listed).to_have_text([
        "call 0: 3 tokens, segment 0", "call 1 after 0: 3 tokens, segment 0", "call 2 after 0: 3 tokens, segment 1",
        f"call 3: 3 tokens, not trained, {HOSTILE}",
    ])  # fmt: skip
    left = [float(item.evaluate("item => item.getBoundingClientRect().left")) for item in listed.all()]
    assert left[0] == left[1] < left[2]


def test_tools_are_named_and_their_definitions_can_be_opened(page: Page, shown: Shown) -> None:
    page.goto(f"{shown.address}/#/rollouts/math/{shown.with_tools}")
    offered = page.locator("#view-group .tools")
    expect(offered.locator("summary")).to_have_text([f"tools: add, {HOSTILE}", "tools: add"])
    expect(page.get_by_role("article", name="sample 1").locator(".tools")).to_have_count(1)
    definition = offered.first.locator("pre").first
    expect(definition).to_be_hidden()
    offered.first.locator("summary").click()
    expect(definition).to_be_visible()
    assert json.loads(definition.inner_text()) == tool("add")


def test_hostile_texts_are_shown_as_texts(page: Page, shown: Shown) -> None:
    page.goto(f"{shown.address}/#/rollouts/math/{shown.hostile}")
    expect(page.locator(".tokens").first).to_contain_text("<script>")
    page.get_by_text("conversation", exact=True).click()
    expect(page.locator(".turn.tool .text")).to_contain_text("<img src=x onerror=")
    assert page.locator("main img").count() == 0
    assert page.locator("main script").count() == 0
    page.goto(f"{shown.address}/#/rollouts?status=failed&q=%3Cimg%3E")
    expect(page.get_by_label("In the answers")).to_have_value("<img>")


def test_the_colours_say_what_they_mean(page: Page, shown: Shown) -> None:
    page.goto(f"{shown.address}/#/rollouts/math/{shown.hostile}")
    first, last = (page.locator(".tokens").first.locator("span").nth(at) for at in (0, len(HOSTILE.encode()) - 1))
    expect(first).to_have_class(re.compile(r"\bv0\b"))
    page.get_by_text("loss mask", exact=True).click()
    expect(page.locator(".controls .legend")).to_contain_text("masked")
    expect(first).to_have_class(re.compile(r"\bm1\b"))
    page.get_by_text("logprob", exact=True).click()
    expect(first).to_have_class(re.compile(r"\bl0\b"))
    expect(last).to_have_class(re.compile(r"\bl5\b"))


def test_ten_thousand_groups_are_scrolled_with_few_elements(page: Page, shown: Shown) -> None:
    page.goto(f"{shown.address}/#/rollouts?task=math&status=completed")
    said, more = page.locator("#view-rollouts .note"), page.get_by_role("button", name="More")
    rows = page.get_by_role("table", name="Groups").locator("tbody tr")
    expect(said).to_contain_text("50 groups shown")
    while "which are all" not in (text := said.inner_text()):
        more.click()
        expect(said).not_to_have_text(re.compile(f"{re.escape(text)}|reading"))
    assert int(text.split()[0].replace(",", "")) >= MANY - 2
    page.get_by_role("table", name="Groups").evaluate("table => table.querySelector('tbody tr').focus()")
    page.keyboard.press("End")
    expect(page.locator(":focus")).to_be_in_viewport()
    last = page.locator(":focus td").first.inner_text()
    page.keyboard.press("ArrowUp")
    expect(page.locator(":focus td").first).not_to_have_text(last)
    for share in (0.5, 0.2, 0.9, 0):
        page.evaluate(f"scrollTo(0, {share} * document.documentElement.scrollHeight)")
        wait_until(lambda: page.evaluate("Boolean(document.elementFromPoint(400, 600)?.closest('tbody tr'))"))
        assert rows.count() <= MOST_DRAWN
    expect(page.get_by_role("link", name=f"math {shown.hostile}", exact=True)).to_be_in_viewport()
    assert page.evaluate("document.querySelectorAll('*').length") < 3000


def test_long_answers_are_scrolled_and_coloured_with_few_elements(page: Page, shown: Shown) -> None:
    page.goto(f"{shown.address}/#/rollouts/words/{shown.long}")
    expect(page.locator(".tokens")).to_have_count(4)
    for sample in page.locator(".sample").all():
        more = sample.locator(".as-tokens button")
        for read in range(600, LONG, 4000):
            expect(more).to_have_text(f"Show more: {LONG - read:,} tokens are left")
            more.click()
        expect(more).to_be_hidden()
    box = page.locator(".tokens").first
    page.mouse.move(0, 0)  # a token that comes under the pointer is shown, too
    box.focus()
    page.keyboard.press("End")
    assert inspected(page)["token"] == str(LONG - 1)
    current = box.locator(".current")
    expect(current).to_be_in_viewport()
    page.locator(".choice").get_by_text("logprob", exact=True).click()
    expect(current).to_have_class(re.compile(r"\bl5 current$"))
    box.evaluate("box => box.scrollTo(0, 0)")
    expect(box.locator(".block").first.locator("span").first).to_have_class(re.compile(r"\bl0\b"))
    box.evaluate("box => box.scrollTo(0, box.scrollHeight / 2)")
    middle = box.locator("span").filter(visible=True).nth(MOST_TOKENS // 20)
    middle.hover()
    assert 0.4 * LONG < int(inspected(page)["token"]) < 0.6 * LONG
    assert box.locator("span").count() <= MOST_TOKENS
    assert page.evaluate("document.querySelectorAll('*').length") < 5 * MOST_TOKENS


def test_a_change_says_what_it_does_and_needs_the_token(page: Page, shown: Shown) -> None:
    page.get_by_role("button", name="Pause task math").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("run -> pause")
    assert shown.buffer.clock("math").control is Control.RUN
    dialog.get_by_role("button", name="Pause").click()
    expect(page.locator("#said")).to_have_text("task math: run -> pause")
    page.get_by_role("button", name="Resume task math").click()
    expect(dialog).to_contain_text("pause -> run")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Resume task math").click()
    dialog.get_by_role("button", name="Resume").click()
    wait_until(lambda: shown.buffer.clock("math").control is Control.RUN)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_view_fits_and_can_be_read(browser: Browser, shown: Shown, width: int, scheme: str) -> None:
    context, watched = opened(browser, shown.address, width=width, scheme=scheme)
    page = watched.page
    for view in ("", "#/rollouts", f"#/rollouts/math/{shown.hostile}"):
        page.goto(f"{shown.address}/{view}")
        expect(page.locator("#state")).to_have_text(READ)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        text, ground = (
            page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        assert contrast(text, ground) > 7
    assert watched.problems == []
    context.close()


def contrast(one: str, other: str) -> float:
    """The contrast of two colours `rgb(...)`, as WCAG defines it."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_server_that_goes_is_said_and_the_page_recovers(browser: Browser, fresh_server: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        fill(World(buffer).start(math={}), 1)
    with serving("--url", fresh_server.url, "--run", "sums") as address:
        context, watched = opened(browser, address)
        state = watched.page.locator("#state")
        expect(state).to_have_text(READ)
        assert watched.page.get_by_role("button", name="Pause").count() == 0
        fresh_server.stop()
        expect(state).to_have_text("lost:")
        expect(watched.page.locator("#diagnosis")).to_have_attribute("data-state", "lost")
        fresh_server.start()
        expect(state).to_have_text(READ)
        expect(watched.page.locator("#age")).to_have_text(REFRESHED)
        context.close()


def test_what_to_do_is_a_list_and_what_is_to_blame_is_red(browser: Browser, fresh_server: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        World(buffer).start(math={})
    with serving("--url", fresh_server.url, "--run", "sums") as address:
        context, watched = opened(browser, address)
        page = watched.page
        steps = page.locator("#to-do li")
        expect(steps.filter(has_text="start a worker: rollq work").locator("code")).to_have_text("rollq work")
        assert steps.count() >= 2
        workers = page.locator("dt", has_text=re.compile("^workers$")).locator("xpath=../dd")
        expect(workers).to_have_text("0 (1 or more wanted)")
        expect(workers).to_have_class("bad")
        expect(page.locator("dt", has_text="memory").locator("xpath=../dd")).not_to_have_class("bad")
        expect(page.get_by_role("table", name="Latest rollouts")).to_contain_text("leave at the next checkpoint")
        buffer_part = page.locator("details", has_text="Buffer")
        expect(buffer_part).to_contain_text("nothing in it now")
        expect(buffer_part).not_to_have_attribute("open", "")
        expect(page.locator("#diagnosis")).to_have_attribute("data-level", "attention")
        assert watched.problems == []
        context.close()


def test_groups_that_failed_are_counted_beside_the_chart_of_the_queue(page: Page, shown: Shown) -> None:
    expect(page.get_by_role("figure", name="Groups per second").locator(".legend")).to_contain_text("failed")
    depth = page.get_by_role("figure", name="Groups by status")
    expect(depth.locator(".legend .aside")).to_have_text("failed, kept for inspection1")
    assert depth.locator("path.s-failed").count() == 0


def test_samples_that_failed_are_shown_with_the_part_that_failed(page: Page, shown: Shown) -> None:
    expect(page.get_by_role("table", name="Tasks").get_by_role("row", name="math ")).to_contain_text("2 grader")
    failed = shown.buffer.newest("math", Status.FAILED)
    page.goto(f"{shown.address}/#/rollouts/math/{failed}")
    expect(page.get_by_role("article", name="sample 0").locator(".pill")).to_have_text("failed: grader")


def test_the_legend_and_the_table_show_the_same_moment(page: Page, shown: Shown) -> None:
    legend = page.get_by_role("figure", name="Groups by status").locator(".legend li")
    tasks = page.get_by_role("table", name="Tasks")
    titles = tasks.get_by_role("columnheader").all_inner_texts()
    cells = tasks.get_by_role("row", name="math ").get_by_role("cell")
    for status in ("completed", "running", "pending"):
        said = legend.filter(has_text=re.compile(f"^{status}")).locator("b")
        expect(said).to_have_text(cells.nth(titles.index(status)).inner_text())


def test_the_name_of_a_run_can_be_read_on_a_phone(browser: Browser, shown: Shown) -> None:
    context, watched = opened(browser, shown.address, width=390)
    name = watched.page.locator("#run-name")
    for view in ("", "#/rollouts"):
        watched.page.goto(f"{shown.address}/{view}")
        expect(name).to_have_text("sums")
        assert name.evaluate("name => name.scrollWidth <= name.clientWidth && name.clientWidth > 30")
    context.close()


def test_workers_fit_a_laptop(page: Page, shown: Shown) -> None:
    shown.buffer.report_worker("worker-1-0123abcd", {**REPORT, "host": "trainer-machine-17"})
    box = page.get_by_role("region", name="Workers")
    expect(box).to_contain_text("trainer-machine-17")
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_marks_of_an_axis_are_round_and_have_one_format(page: Page) -> None:
    found = page.evaluate(
        """async () => {
          const { valueAxis, stepAxis } = await import("/static/axes.js");
          const said = (axis) => axis.marks.map(axis.text).join(" ");
          return [[0, 0.83], [0, 2.5], [0.91, 0.97], [-0.2, 0.1], [0, 0], [0, 84_000], [0, 3e-6]]
            .map(([low, high]) => said(valueAxis(low, high)))
            .concat(said(valueAxis(0, 2.5, { least: 1 })), said(stepAxis(1, 40)));
        }"""
    )
    assert found == [
        "0.0 0.5 1.0", "0 1 2 3", "0.90 0.92 0.94 0.96 0.98", "-0.2 -0.1 0.0 0.1", "0.0 0.5",
        "0 50k 100k", "0 1e-6 2e-6 3e-6", "0 1 2 3", "10 20 30 40",
    ]  # fmt: skip


@pytest.mark.slow  # the same of a live run is a default test
def test_ten_thousand_archived_groups_are_browsed_without_a_server(
    browser: Browser, fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    (tmp_path / "archive").mkdir()
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        archive_many(buffer, tmp_path / "archive", MANY, 1000)
    fresh_server.stop()
    with serving("--archive", str(tmp_path / "archive")) as address:
        context, watched = opened(browser, address)
        page = watched.page
        expect(page.locator("#state")).to_have_text("archive:")
        expect(page.locator("#view-run")).to_contain_text("there are no charts")
        page.get_by_role("row", name="archived").first.click()
        page.locator(".tokens span").first.click()
        assert (inspected(page)["version"], inspected(page)["loss mask"]) == ("0", "counted")
        expect(page.locator("#annotations")).to_contain_text("no trainer's values")
        assert page.get_by_role("button", name="Drop").count() == 0
        page.get_by_role("link", name="Rollouts").click()
        rows = page.get_by_role("table", name="Groups").locator("tbody tr")
        expect(rows).to_have_count(50)
        page.get_by_label("Step").fill("3")
        page.get_by_label("In the answers").fill("answer 2999")
        page.keyboard.press("Enter")
        said, more = page.locator("#view-rollouts .note"), page.get_by_role("button", name="More")
        for read in range(MOST_READ, 1000, MOST_READ):
            expect(said).to_contain_text(f"{read} read")
            more.click()
        expect(said).to_contain_text("which are all; 1,000 read")
        expect(rows.first).to_contain_text("math 2999")
        assert watched.problems == []
        context.close()
