"""The share of the server's time that a dashboard in a browser and a Prometheus take, on a run with 500 workers."""

import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.dashboard import serving
from benchmarks.fill import fill, in_bulk
from benchmarks.results import Result
from benchmarks.watching import GROUPS, RULES, WORKERS, commands_us, cpu_s, report, surround
from benchmarks.world import TASK, run, server

SCRAPE_S = 15.0


def measure(quick: bool) -> list[Result]:
    """One result: the CPU time of the server for both, less that while nobody asks, as a share of the elapsed time."""
    groups, workers, turns, turn_s = (500, 20, 2, 3.0) if quick else (GROUPS, WORKERS, 5, 45.0)
    values, commands = [], []
    with server() as running, run(running.url, "watched", RULES) as (buffer, epoch), ExitStack() as stack:
        with in_bulk(buffer.client):
            fill(buffer, [(0, groups)], RULES.group_size)
        surround(buffer, workers)
        settings = _write_settings(Path(stack.enter_context(tempfile.TemporaryDirectory())), running.url)
        dashboard = stack.enter_context(serving(settings))
        metrics = stack.enter_context(serving(settings, "metrics"))
        browser = stack.enter_context(_chromium())
        for _ in tqdm(range(turns), desc="turns", leave=False, disable=None):
            report(buffer, workers)
            buffer.renew_trainer(epoch)
            before_s = cpu_s(buffer)
            time.sleep(turn_s)
            idle_s = cpu_s(buffer) - before_s
            with _watched(browser, dashboard, metrics):
                before_s, before_us = cpu_s(buffer), commands_us(buffer)
                time.sleep(turn_s)
                values.append(max(1e-4, (cpu_s(buffer) - before_s - idle_s) / turn_s * 100))
                commands.append((commands_us(buffer) - before_us) / turn_s / 1e4)
    return [
        Result(
            name="watched",
            what=f"server's CPU for an open dashboard, and metrics each {SCRAPE_S:.0f} s, of {groups:,} groups and "
            f"{workers} workers",
            unit="%",
            target=1.0,
            better="lower",
            values=tuple(values),
            details={"in_commands_percent": sum(commands) / len(commands)},
        )
    ]


@contextmanager
def _chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("no chromium on the PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@contextmanager
def _watched(browser: Any, dashboard: str, metrics: str) -> Iterator[None]:
    """Keep the page open on the run, and request metrics repeatedly."""
    stop = threading.Event()
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(dashboard)
    page.get_by_text("worker-000").first.wait_for()
    thread = threading.Thread(target=_scrape, args=(metrics, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        page.close()


def _scrape(address: str, stop: threading.Event) -> None:
    while True:
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            answer.read()
        if stop.wait(SCRAPE_S):
            return


def _write_settings(folder: Path, url: str) -> Path:
    path = folder / "rollq.toml"
    path.write_text(
        f'run = "watched"\n[redis]\nbuffer_url = "{url}"\n[tasks.{TASK}]\nprompts = "p.jsonl"\n'
        f'judge = "exact_match"\nbatch_groups = {RULES.batch_groups}\ngroup_size = {RULES.group_size}\n'
        '[worker]\nengine = "simulated"\n'
    )
    return path
