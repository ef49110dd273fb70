"""`rollq dashboard` as a process, and runs worth looking at."""

import os
import re
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.history import HISTORY_COUNTERS
from rollq.buffer.values.rollouts import (
    FinishReason,
    GroupResult,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    Status,
    VersionSpan,
)
from rollq.cli.main import main
from support.buffer_run import World
from support.forks import fork
from support.waiting import PATIENCE_S, wait_until

TOKEN = "a-token-of-twenty-one"
HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script> \u202e\'"</td>'
"""The text of a model that would like to be HTML."""
REPORT = {
    "engine": "simulated", "state": "serving", "in_flight": 3, "samples_in_flight": 21, "capacity": 64, "host": "box",
    "pid": 4242, "tokens_per_s": 512.0, "groups": 40,
}  # fmt: skip
PIPE_BYTES = 1 << 16
LEASED = 200
"""Groups that are admitted, leased and put in one go."""


@contextmanager
def serving(*arguments: str, token: str = "", name: str = "dashboard", files: int | None = None) -> Iterator[str]:
    """`rollq dashboard`, or another command that serves pages, at a free port; it must end cleanly by SIGTERM, and log
    less than a pipe takes. `files` is the number of files that it may open."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = fork(Path.cwd(), log, _serve, (name, *arguments, "--port", "0"), token, files)

        def served() -> re.Match[str] | None:
            return re.search(r"serving at (http://127\.0\.0\.1:\d+)\n", log.read_text() if log.exists() else "")

        try:
            wait_until(lambda: served() is not None or not process.is_alive())
            found = served()
            assert found, log.read_text()
            yield found[1]
            process.terminate()
            process.join(PATIENCE_S)
            text = log.read_text()
            assert process.exitcode == 0, text
            assert "Traceback" not in text, text
            assert "ERROR" not in text
            assert len(text) < PIPE_BYTES
        finally:
            process.kill()
            process.join()


def _serve(words: tuple[str, ...], token: str, files: int | None) -> None:
    os.environ["ROLLQ_DASHBOARD_TOKEN"] = token
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    main(words)


def written(
    text: str, *, reward: float = 0.5, versions: Sequence[int] = (0,), talks: bool = False, worker: str = "worker"
) -> Sample:
    """A sample whose tokens are the bytes of `text`, in equal parts by `versions`; those in the middle are masked."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    tokens, share = len(ids), len(ids) // len(versions)
    spans = [VersionSpan(1, version, share) for version in versions[:-1]]
    spans.append(VersionSpan(1, versions[-1], tokens - share * len(spans)))
    mask = np.ones(tokens, bool)
    mask[tokens // 3 : tokens // 2] = False
    logprobs = -np.linspace(0, 4, tokens, dtype=np.float32)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": HOSTILE},
        {"role": "assistant", "content": text},
    ]
    numbered = [(0, None, 0, None), (1, 0, 0, None), (2, 0, 1, None), (3, None, None, HOSTILE)]
    calls = [
        {"number": number, "parent": parent, "segment": segment, "tokens": 3, "left_out": why}
        for number, parent, segment, why in numbered
    ]
    facts = {"worker": worker, "judge": "exact_match", "judge_s": 0.25}
    return Sample(
        (Segment(np.array([1, 2], np.int32), ids, logprobs, tuple(spans), mask),), SampleStatus.COMPLETED,
        FinishReason.STOP, reward, {"exact": reward, "format": 0.125}, text,
        extra={**facts, "messages": messages, "calls": calls} if talks else facts,
    )  # fmt: skip


def put(world: World, *samples: Sample, task: str = "math", prompt: Prompt | None = None) -> int:
    """Admit a group, of any prompt by default, and put these samples; returns its number."""
    if prompt is None:
        world.admit(1, task)
    else:
        clock, cursor = world.buffer.clock(task), int(world.buffer.counts(task).progress["cursor"])
        prompts = [(prompt, cursor + 1)]
        world.buffer.admit(task, prompts, epoch=clock.epoch, cursor=cursor, target=1_000_000, step=clock.step)
    (lease,) = world.lease(1, task)
    world.buffer.put([GroupResult(lease, samples)])
    return lease.group_id


def fill(world: World, groups: int, task: str = "math") -> None:
    """Complete many groups of two short samples."""
    for start in range(0, groups, LEASED):
        world.admit(min(LEASED, groups - start), task)
        leases = world.lease(LEASED, task)
        world.buffer.put([GroupResult(lease, (written(f"answer {lease.group_id}"),) * 2) for lease in leases])


def remember(buffer: Buffer, task: str, rows: int) -> None:
    """Write a history of `rows` rows, of a task that puts 11 groups of 800 tokens in each."""
    now_ms, key = buffer.server_ms(), task_keys(buffer.run, task).prefix + "history"
    for row in range(rows):
        counters = {"produced": row * 11, "tokens": row * 8800, "reward_sum": row * 11, "reward_count": row * 44}
        statuses = ["4"] * len(Status)
        values = [now_ms - (rows - row) * 10_000, 1, row, 4, *statuses, *(counters.get(n, 0) for n in HISTORY_COUNTERS)]
        buffer.client.rpush(key, ",".join(map(str, values)))
