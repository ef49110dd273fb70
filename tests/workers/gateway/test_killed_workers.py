"""Agents over the gateway, with whole workers: sessions that a worker leaves open, records that do not fit, rewards."""

import json
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import Status
from rollq.workers.gateway.open_sessions import KEY_VARIABLE
from support import plain_agent
from support.calling_engine import CALLS, ENGINE
from support.chat_engine import chat_tokenizer
from support.killed_agents import agents_of, rules
from support.waiting import PATIENCE_S, wait_until
from support.worker_processes import Workers
from support.worker_run import WorkerWorld


def has_made(notes: Path, calls: int) -> bool:
    """Whether the engine has answered so many calls."""
    return notes.exists() and len(notes.read_text().split()) >= calls


@pytest.mark.parametrize("place", ["harness", "outside"])
def test_a_worker_that_stops_leaves_its_open_sessions_to_the_next(
    place: str, buffer: Buffer, server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    chat_tokenizer(tmp_path / "model")
    agent, notes = tmp_path / "agent.py", tmp_path / "notes"
    agent.write_text(Path(plain_agent.__file__).read_text())
    task = rules(sys.executable, str(agent))
    if place == "outside":
        task |= {"agent_loop": "outside", "agent_options": {"tool_parser": "hermes"}}
    with ExitStack() as stack:
        workers = Workers(WorkerWorld(buffer, server_url, task), stack, tmp_path)
        workers.world.admit(1)
        worker = workers.start(ENGINE, model=tmp_path / "model", notes=notes, silent=3)
        outside = take_session(buffer, agent) if place == "outside" else None
        workers.until(lambda: has_made(notes, 3))
        assert len(list(temporary.glob("rollq-sessions-*/*"))) == (1 if place == "harness" else 0)
        worker.terminate()
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
        wait_until(lambda: not agents_of(tmp_path))
        if outside is not None:
            assert outside.wait() == 1
        workers.until(lambda: workers.world.count(Status.ABORTED) == 1)
        assert list(temporary.glob("rollq-*/*")) == []
        workers.world.recycle(1)  # as the producer does
        workers.start(ENGINE, model=tmp_path / "model", notes=notes)
        if place == "outside":
            assert take_session(buffer, agent, "own").wait() == 0
        (sample,) = workers.result()
    assert notes.read_text().split() == [str(turn) for turn in range(CALLS)]
    assert sample.extra["replayed_calls"] == 3


def take_session(buffer: Buffer, agent: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start an agent elsewhere, once a worker gives it a session."""
    given: dict[str, Any] = {}

    def is_given() -> bool:
        for report in buffer.workers().values():
            with suppress(OSError, KeyError):  # it has no session, has ended, or does not listen yet
                request = urllib.request.Request(report["gateway"] + "/sessions", b"", {"Authorization": "Bearer key"})
                with urllib.request.urlopen(request) as response:
                    given.update(json.load(response))
                return True
        return False

    wait_until(is_given)
    assert (given["task"], given["row"], given["sample"], given["evaluation"]) == ("math", None, 0, False)
    variables = {
        "OPENAI_BASE_URL": given["openai_base_url"],
        "OPENAI_API_KEY": given["token"],
        "REWARD_TOKEN": given["reward_token"],
        "ROLLQ_SESSION_URL": given["session_url"],
    }
    command = [sys.executable, str(agent), *arguments]
    started = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert started.stdin is not None
    started.stdin.write(given["prompt"].encode())
    started.stdin.close()
    return started


def test_an_agent_whose_records_do_not_fit_fails_with_the_limit_and_the_remedy(
    buffer: Buffer, server_url: str, tmp_path: Path
) -> None:
    chat_tokenizer(tmp_path / "model")
    with ExitStack() as stack:
        task = rules(sys.executable, plain_agent.__file__)
        workers = Workers(WorkerWorld(buffer, server_url, task), stack, tmp_path)
        workers.world.admit(1)
        workers.start(ENGINE, model=tmp_path / "model", notes=tmp_path / "notes", array_bytes=300_000)
        log = tmp_path / "worker-1.log"
        workers.until(lambda: log.exists() and "RecordsFull" in log.read_text())
    said = log.read_text()
    assert "the calls of one group have filled its records, 16384 calls or 64 MiB: " in said
    assert "lower max_calls or max_made_tokens in agent_options, or group_size" in said


def test_an_agent_gives_its_own_reward(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "model")
    with ExitStack() as stack:
        task = rules(sys.executable, plain_agent.__file__, "own", program_rewards=True)
        workers = Workers(WorkerWorld(buffer, server_url, task), stack, tmp_path)
        workers.world.admit(1)
        workers.start(ENGINE, model=tmp_path / "model", notes=tmp_path / "notes")
        (sample,) = workers.result()
    assert (sample.reward, dict(sample.reward_parts)) == (0.5, {"style": 0.25})
    assert sample.extra["judge"] == "session"
