"""How long the dashboard's page blocks its main thread: 1,000 steps, 10,000 groups, 500 workers, long answers.

While the main thread is blocked, Chromium draws nothing and ignores all keys. It does not report tasks below 50 ms,
which count as 0.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.results import Result
from benchmarks.watching import REPORT
from benchmarks.world import TASK, admit_and_lease, results_of, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment, VersionSpan

STEPS, GROUPS, WORKERS, TOKENS, GROUP_SIZE = 1_000, 10_000, 500, 30_000, 4
AT_ONCE = 200
"""Groups that are put at a time."""
UPDATES = 6
"""The seconds of updates that are watched for one value: events arrive each second, and the curves each 5 seconds."""
PATIENCE_MS = 60_000
RULES = TaskRules(batch_groups=256, group_size=GROUP_SIZE, max_staleness=100_000)
OBSERVE = """
  window.longTasks = [];
  window.frames = [];
  new PerformanceObserver((list) => {
    for (const one of list.getEntries()) window.longTasks.push([one.startTime, one.duration]);
  }).observe({ type: "longtask" });
  const tick = (now) => { window.frames.push(now); requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
"""
SETTLED = "() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 300))"
SCROLL = """
  async ([selector, frames]) => {
    const box = document.querySelector(selector);
    const distance = (box.scrollHeight - box.clientHeight) / frames;
    box.scrollTop = 0;
    for (let at = 0; at < frames; at++) {
      box.scrollBy(0, distance);
      await new Promise(requestAnimationFrame);
    }
  }
"""
FRAMES = 120
"""The frames of a scroll from the top to the end."""


def measure(quick: bool) -> list[Result]:
    """A result for each action of a user: the longest time for which the main thread was blocked."""
    from playwright.sync_api import sync_playwright

    steps, groups, workers, tokens, repetitions = (
        (50, 400, 70, 2_000, 1) if quick else (STEPS, GROUPS, WORKERS, TOKENS, 5)
    )
    chromium = shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("no chromium on the PATH (Debian: apt-get install chromium)")
    with server() as running, run(running.url, "shown", RULES) as (buffer, epoch), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _learn(buffer, epoch, steps)
        _fill(buffer, epoch, groups, tokens)
        stack.enter_context(_reporting(running.url, buffer.run, workers))
        address = stack.enter_context(serving(_write_settings(folder, running.url)))
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        stack.callback(browser.close)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script(OBSERVE)
        found = _Watched(page)
        with tqdm(total=repetitions, desc="repetitions", leave=False, disable=None) as bar:
            for _ in range(repetitions):
                _visit(found, address, groups, workers)
                bar.update()
    size = f"{steps:,} steps, {groups:,} groups, {workers} workers, {GROUP_SIZE} answers of {tokens:,} tokens"
    return [
        Result(
            name=f"dashboard-{what.replace(' ', '-')}",
            what=f"longest blocked main thread of the dashboard's page: {what}; {size}",
            unit="ms",
            target=100.0,
            better="lower",
            values=tuple(found.blocked_ms[what]),
            details={"longest_frame_ms": max(found.frame_ms[what]), "elements": max(found.elements[what])},
        )
        for what in found.blocked_ms
    ]


@dataclass
class _Watched:
    """A page, and the measurements of each action on it, one for each repetition."""

    page: Any
    blocked_ms: dict[str, list[float]] = field(default_factory=dict)
    frame_ms: dict[str, list[float]] = field(default_factory=dict)
    elements: dict[str, list[float]] = field(default_factory=dict)

    def during(self, what: str, do: Callable[[], object]) -> None:
        """Perform an action, and note the longest task and the longest time between two frames until the page is
        idle."""
        page = self.page
        page.evaluate(SETTLED)
        page.evaluate("() => { window.longTasks.length = 0; window.frames.length = 0; }")
        do()
        page.evaluate(SETTLED)
        tasks, frames = page.evaluate("() => [window.longTasks, window.frames]")
        gaps = [after - before for before, after in pairwise(frames)]
        self.blocked_ms.setdefault(what, []).append(max((lasted for _, lasted in tasks), default=0.0))
        self.frame_ms.setdefault(what, []).append(max(gaps, default=0.0))
        elements = page.evaluate("() => document.querySelectorAll('*').length")
        self.elements.setdefault(what, []).append(elements)


def _visit(found: _Watched, address: str, groups: int, workers: int) -> None:
    """Perform each measured action once."""
    page = found.page
    page.goto("about:blank")
    page.goto(address)
    page.get_by_role("button", name=re.compile(f"Show all {workers}")).click()
    page.get_by_role("cell", name=f"worker-{0:03}-0123abcd").wait_for()
    found.during("updates of the run", lambda: page.wait_for_timeout(UPDATES * 1000))
    found.during("a pointer over the curves", lambda: _point(page))
    axis = page.get_by_label("Axis of the curves")
    for value in ("time", ""):
        found.during("another axis", partial(axis.select_option, value))
    found.during("a scroll through the workers", lambda: page.evaluate(SCROLL, ["[aria-label=Workers]", FRAMES]))
    page.get_by_role("link", name="Rollouts").click()
    said = page.locator("#view-rollouts .note[role=status]")
    said.filter(has_text="groups shown").wait_for()
    more = page.get_by_role("button", name="More", exact=True)
    found.during("more groups, again and again", lambda: _read_all(page, more, said))
    if f"{groups + 1:,} groups shown" not in said.inner_text():
        raise RuntimeError(f"the page does not show {groups + 1:,} groups: {said.inner_text()}")
    found.during("a scroll through the groups", lambda: page.evaluate(SCROLL, ["html", FRAMES]))
    found.during("opening a group", lambda: _open(page, f"{address}/#/rollouts/{TASK}/{groups + 1}"))
    found.during("more tokens, again and again", lambda: _read_tokens(page))
    found.during("a scroll through the tokens", lambda: page.evaluate(SCROLL, [".tokens", FRAMES]))
    for mode in ("loss mask", "logprob", "version"):
        found.during("another colouring", page.locator(".choice").get_by_text(mode, exact=True).click)
    found.during("going back to the groups", lambda: page.keyboard.press("Escape"))


def _point(page: Any) -> None:
    """Move the pointer over a chart of curves, which moves a line in all of them."""
    page.get_by_role("figure", name="Loss").scroll_into_view_if_needed()
    box = page.get_by_role("figure", name="Loss").bounding_box()
    for at in range(FRAMES):
        page.mouse.move(box["x"] + 50 + at * (box["width"] - 60) / FRAMES, box["y"] + box["height"] / 2)


def _open(page: Any, address: str) -> None:
    page.goto(address)
    page.locator(".tokens").nth(GROUP_SIZE - 1).wait_for()


def _read_all(page: Any, more: Any, said: Any) -> None:
    """Read all pages of the list."""
    while more.is_visible():
        before = said.inner_text()
        more.click()
        page.wait_for_function(
            "([said, before]) => said.textContent !== before && said.textContent !== 'reading ...'",
            arg=[said.element_handle(), before],
        )


def _read_tokens(page: Any) -> None:
    """Read all tokens of all samples."""
    for sample in page.locator(".sample").all():
        more = sample.locator(".as-tokens button")
        while more.is_visible():
            before = more.inner_text()
            more.click()
            page.wait_for_function(
                "([more, before]) => more.hidden || more.textContent !== before", arg=[more.element_handle(), before]
            )


def _learn(buffer: Buffer, epoch: TrainerEpoch, steps: int) -> None:
    """Report steps with the numbers of all curves that a trainer of one task has."""
    generator = np.random.default_rng(3)
    for step in range(1, steps + 1):
        one = [float(value) for value in generator.random(20)]
        lengths = {"mean": 100 * one[0], "p95": 200 * one[1], "max": 250 * one[2], "clip_ratio": one[3]}
        facts = {"frac_reward_zero_std": one[4], "entropy": one[5], "loss": one[6], "gradient_norm": one[7]}
        facts |= {"learning_rate": one[8], "kl": one[9], "clip_fraction": one[10], "masked_fraction": one[11]}
        facts |= {"staleness": one[12], "tokens_per_s": one[13], "wait_s": one[14], "train_s": one[15]}
        rewards = {"reward": one[16], "rewards": {"math": one[17], "code": one[18]}, "response_length": lengths}
        buffer.report_trainer(epoch, {"step": step, **facts, **rewards})
        if step % 10 == 0:
            buffer.report_evaluations(epoch, step, {"held_out": one[19]})


def _fill(buffer: Buffer, epoch: TrainerEpoch, groups: int, tokens: int) -> None:
    """Put many groups of short answers, and one last group of long answers."""
    generator = np.random.default_rng(1)
    short = [_sample(generator, 40) for _ in range(GROUP_SIZE)]
    for start in range(0, groups, AT_ONCE):
        wanted = min(AT_ONCE, groups - start)
        buffer.put(results_of(admit_and_lease(buffer, epoch.epoch, start, wanted, 0), [short] * wanted))
    long = [_sample(generator, tokens) for _ in range(GROUP_SIZE)]
    buffer.put(results_of(admit_and_lease(buffer, epoch.epoch, groups, 1, 0), [long]))


def _sample(generator: np.random.Generator, tokens: int) -> Sample:
    """A sample of random words with one token for each letter, made by two versions, with a masked part."""
    ids = generator.integers(ord("a"), ord("z") + 1, tokens).astype(np.int32)
    ids[generator.random(tokens) < 0.15] = ord(" ")
    mask = np.ones(tokens, bool)
    mask[tokens // 3 : tokens // 2] = False
    segment = Segment(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=ids,
        logprobs=-4 * generator.random(tokens, dtype=np.float32),
        versions=(VersionSpan(1, 0, tokens),),
        loss_mask=mask,
    )
    text = bytes(ids.tolist()).decode()
    return Sample((segment,), SampleStatus.COMPLETED, FinishReason.STOP, float(generator.random()), text=text)


@contextmanager
def _reporting(url: str, run_name: str, workers: int) -> Iterator[None]:
    """Workers that report new numbers each second."""
    stop = threading.Event()

    def report() -> None:
        generator = np.random.default_rng(2)
        with Buffer.connect(url, run_name) as buffer:
            while not stop.is_set():
                for number in range(workers):
                    changes = {
                        "in_flight": int(generator.integers(256)),
                        "tokens_per_s": float(generator.integers(5000)),
                    }
                    buffer.report_worker(f"worker-{number:03}-0123abcd", {**REPORT, **changes})
                stop.wait(0.5)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    yield
    stop.set()
    reporter.join()


@contextmanager
def serving(settings: Path, name: str = "dashboard") -> Iterator[str]:
    """`rollq dashboard`, or another command that serves, at a free port."""
    command = [sys.executable, "-m", "rollq.cli.main", name, str(settings), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline() if process.stderr else ""
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
            if address is None:
                raise RuntimeError(f"`rollq {name}` has not started: {line}")
            yield address[0]
        finally:
            process.terminate()


def _write_settings(folder: Path, url: str) -> Path:
    path = folder / "rollq.toml"
    path.write_text(
        f'run = "shown"\n[redis]\nbuffer_url = "{url}"\n[tasks.{TASK}]\nprompts = "p.jsonl"\njudge = "exact_match"\n'
        f'batch_groups = 256\ngroup_size = {GROUP_SIZE}\n[worker]\nengine = "simulated"\n'
    )
    return path
