"""Agents over the gateway whose workers are killed: what an agent has seen is never lost, and never sampled again."""

import json
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rollouts import Status
from rollq.buffer.store.server import EmbeddedServer
from rollq.workers.gateway.gateway import KEY_VARIABLE
from support import plain_agent
from support.calling_engine import CALLS, words
from support.chat_engine import EOS, chat_tokenizer
from support.power_cut import kill_synced
from support.waiting import PATIENCE_S, wait_until
from support.worker_processes import Workers
from support.worker_run import WorkerWorld

DEATHS = (0, 6)
"""Turns at which the engine dies."""
ENGINE = "support.calling_engine.CallingEngine"
RULES: dict[str, Any] = {
    "batch_groups": 4, "group_size": 1, "max_tokens": 4000, "partial_rollout": True, "max_staleness": 99,
    "max_deaths": 99, "agent_loop": "harness", "judge": "support.harness_judge.exit_code",
}  # fmt: skip


DIES_ONCE = """
import os
if not os.path.exists({first!r}):
    open({first!r}, "x").close()
    print("no luck", flush=True)
    os.kill(os.getpid(), 9)
"""


def rules(*command: str, **options: Any) -> dict[str, Any]:
    """The task of an agent."""
    return {**RULES, "agent_options": {"command": command, "tool_parser": "hermes", **options}}


def agents_of(folder: Path) -> list[int]:
    """The processes that run the agent of a test."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder / "agent.py") in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def has_made(notes: Path, calls: int) -> bool:
    """Whether the engine has answered so many calls."""
    return notes.exists() and len(notes.read_text().split()) >= calls


@pytest.mark.parametrize("kills", [(1, 5, 11), pytest.param(tuple(range(12)), marks=pytest.mark.slow)])
def test_a_session_whose_worker_is_killed_at_any_call_is_replayed_from_the_record(
    kills: tuple[int, ...], buffer: Buffer, server_url: str, tmp_path: Path
) -> None:
    tokenizer, notes, agent = chat_tokenizer(tmp_path / "model"), tmp_path / "notes", tmp_path / "agent.py"
    agent.write_text(Path(plain_agent.__file__).read_text())
    notes.touch()
    with ExitStack() as stack:
        workers = Workers(WorkerWorld(buffer, server_url, rules(sys.executable, str(agent))), stack, tmp_path)
        workers.world.admit(1)
        for version, silent in enumerate(kills):
            if version:
                workers.world.publish(version)
            worker = workers.start(ENGINE, model=tmp_path / "model", notes=notes, silent=silent)
            if silent:
                workers.until_parts(silent)
            workers.until(lambda: bool(agents_of(tmp_path)))
            workers.kill(worker)
            wait_until(lambda: not agents_of(tmp_path))  # it has died with its worker
        workers.world.publish(len(kills))
        workers.start(ENGINE, model=tmp_path / "model", notes=notes)
        (sample,) = workers.result()
    assert notes.read_text().split() == [str(turn) for turn in range(CALLS)]  # each was sampled once
    (segment,) = sample.segments
    assert segment.loss_mask is not None
    assert segment.response_ids[segment.loss_mask].tolist() == [
        id for turn in range(CALLS) for id in (*tokenizer.encode(words(turn)), EOS)
    ]
    assert (sample.reward, sample.extra["harness"]["exit_code"]) == (1.0, 0)
    assert sample.extra["replayed_calls"] == kills[-1]
    assert {span.version for span in segment.versions} <= set(range(len(kills) + 1))


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
        assert len(list(temporary.glob("rollq-session-*"))) == (1 if place == "harness" else 0)
        worker.terminate()
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
        wait_until(lambda: not agents_of(tmp_path))
        if outside is not None:
            assert outside.wait() == 1
        workers.until(lambda: workers.world.count(Status.ABORTED) == 1)
        assert list(temporary.glob("rollq-*")) == []
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
    variables = {
        "OPENAI_BASE_URL": given["openai_base_url"],
        "OPENAI_API_KEY": given["token"],
        "ROLLQ_SESSION_URL": given["session_url"],
    }
    command = [sys.executable, str(agent), *arguments]
    started = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert started.stdin is not None
    started.stdin.write(given["prompt"].encode())
    started.stdin.close()
    return started


def test_an_engine_that_dies_at_any_call_is_replaced_and_nothing_is_sampled_twice(
    buffer: Buffer, server_url: str, tmp_path: Path
) -> None:
    chat_tokenizer(tmp_path / "model")
    with ExitStack() as stack:
        workers = Workers(WorkerWorld(buffer, server_url, rules(sys.executable, plain_agent.__file__)), stack, tmp_path)
        workers.world.admit(1)
        workers.start(ENGINE, model=tmp_path / "model", notes=tmp_path / "notes", dies=DEATHS)
        for turn in DEATHS:
            workers.until((tmp_path / f"notes.died-{turn}").exists)
            workers.until(lambda: workers.world.count(Status.PENDING) == 1)
            workers.world.tickets(1)  # as the producer does for groups that went back
        (sample,) = workers.result()
    assert (tmp_path / "notes").read_text().split() == [str(turn) for turn in range(CALLS)]
    assert (sample.reward, len(sample.segments), sample.extra["replayed_calls"]) == (1.0, 1, DEATHS[-1])


def test_a_server_that_is_killed_again_and_again_delays_a_session_and_changes_nothing(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "model")
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as stack:
        buffer = stack.enter_context(Buffer.connect(server.url, "sums"))
        buffer.wait_out_outages()
        task = {**rules(sys.executable, plain_agent.__file__), "lease_s": 600}
        workers = Workers(WorkerWorld(buffer, server.url, task), stack, tmp_path)
        workers.world.admit(1)
        workers.start(ENGINE, model=tmp_path / "model", notes=tmp_path / "notes")
        for calls in (1, 4, 8):
            workers.until(partial(has_made, tmp_path / "notes", calls))
            with suppress(AssertionError):  # the last write was not synced in time: then it is repeated
                kill_synced(server, buffer.client)
            server.stop()
            server.start()
        (sample,) = workers.result()
    assert (tmp_path / "notes").read_text().split() == [str(turn) for turn in range(CALLS)]
    assert (sample.reward, len(sample.segments)) == (1.0, 1)
    assert "replayed_calls" not in sample.extra


def test_an_agent_that_dies_fails_its_sample_alone(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "model")
    agent = tmp_path / "agent.py"
    agent.write_text(DIES_ONCE.format(first=str(tmp_path / "first")) + Path(plain_agent.__file__).read_text())
    with ExitStack() as stack:
        task = {**rules(sys.executable, str(agent)), "group_size": 3, "min_valid_samples": 2}
        task["agent_options"]["concurrent"] = 1
        workers = Workers(WorkerWorld(buffer, server_url, task), stack, tmp_path)
        workers.world.admit(1)
        workers.start(ENGINE, model=tmp_path / "model", notes=tmp_path / "notes")
        samples = workers.result()
    dead = [sample for sample in samples if sample.error]
    assert [sample.error for sample in dead] == ["the command ended with exit code 137: no luck"]
    assert [sample.reward for sample in samples if not sample.error] == [1.0, 1.0]
    assert dead[0].reward is None


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
    assert "set max_calls or max_made_tokens of agent_options, or group_size, lower" in said


def test_an_agent_gives_its_own_reward(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "model")
    with ExitStack() as stack:
        task = rules(sys.executable, plain_agent.__file__, "own")
        workers = Workers(WorkerWorld(buffer, server_url, task), stack, tmp_path)
        workers.world.admit(1)
        workers.start(ENGINE, model=tmp_path / "model", notes=tmp_path / "notes")
        (sample,) = workers.result()
    assert (sample.reward, dict(sample.reward_parts)) == (0.5, {"style": 0.25})
    assert sample.extra["judge"] == "session"
