"""Engines and trainer take turns: producer and workers as processes, the trainer here."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Status
from rollq.cli.settings.file import load_settings
from rollq.consumer import Consumer, ConsumerSettings
from support.waiting import PATIENCE_S

SETTINGS = """
run = "{run}"
[redis]
buffer_url = "{url}"
[tasks.math]
prompts = "prompts.jsonl"
rows.answer_field = ""
judge = "judges.fair"
batch_groups = 4
group_size = 2
max_staleness = 0
[producer]
strategy = "sync"
[worker]
engine = "simulated"
grace_s = 0
[worker.options]
lengths = [5, 20]
tokens_per_s = 1000.0
"""


@pytest.fixture
def folder(tmp_path: Path, server_url: str, run_name: str) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    (tmp_path / "judges.py").write_text("def fair(prompt, sample):\n    return 0.5\n")
    (tmp_path / "rollq.toml").write_text(SETTINGS.format(run=run_name, url=server_url))
    return tmp_path


@contextmanager
def role(folder: Path, name: str) -> Iterator[None]:
    command = [sys.executable, "-m", "rollq.cli.main", name, str(folder / "rollq.toml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def wait_for_workers(buffer: Buffer, count: int) -> None:
    with buffer.events() as events:
        while len(buffer.workers()) < count:
            events.wait(0.5)


@pytest.mark.long
def test_xm04_one_batch_is_generated_then_engines_sleep_while_it_is_trained_then_they_wake_and_swap(
    folder: Path, server_url: str, run_name: str, buffer: Buffer
) -> None:
    settings = load_settings(folder / "rollq.toml", {})
    buffer.create_run()
    buffer.register_task("math", settings.tasks["math"])
    with ExitStack() as stack:
        for name in ("produce", "work", "work"):
            stack.enter_context(role(folder, name))
        wait_for_workers(buffer, 2)  # one that starts while step 1 is trained is first paused, and then asleep
        consumer = stack.enter_context(
            Consumer.connect(
                server_url,
                run=run_name,
                weights={},
                settings=ConsumerSettings(colocated=True, timeout_s=PATIENCE_S),
            )
        )
        for step in (1, 2, 3):
            batch = next(consumer)
            reports = buffer.workers()
            assert {report["state"] for report in reports.values()} == {"asleep"}
            assert {sample.segments[0].versions[0].version for sample in batch.samples} == {step - 1}
            counts = buffer.counts("math")
            assert counts.clock.control is Control.SLEEP
            assert counts.progress["admitted"] == 4 * step, "exactly one batch is generated"
            assert counts.statuses[Status.RUNNING] == 0
            if step == 2:  # one that joins now does not generate either
                stack.enter_context(role(folder, "work"))
                wait_for_workers(buffer, len(reports) + 1)
                assert buffer.counts("math").progress["produced"] == counts.progress["produced"]
            consumer.publish({}, step=batch.step)
            assert buffer.clock("math").control is Control.RUN
            consumer.commit(batch)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('strategy = "sync"', 'strategy = "async"', "which needs producer.strategy = 'sync'"),
        ("max_staleness = 0", "max_staleness = 1", "tasks.math needs max_staleness = 0 and sync_weights_interval = 1"),
        (
            "max_staleness = 0",
            "max_staleness = 0\nstaleness.sync_weights_interval = 2",
            "tasks.math needs max_staleness = 0",
        ),
    ],
)
def test_settings_that_cannot_take_turns_are_refused(folder: Path, old: str, new: str, message: str) -> None:
    path = folder / "rollq.toml"
    trainer = '[trainer]\nmodel = "m"\noutput = "o"\nsteps = 1\ncolocated = true\n'
    path.write_text(path.read_text().replace(old, new) + trainer)
    with pytest.raises(ConfigError, match=message):
        load_settings(path, {})
