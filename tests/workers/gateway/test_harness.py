import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample
from rollq.workers.gateway.harnesses import local
from rollq.workers.gateway.harnesses.process import HarnessFolder, sessions_folder
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.settings import GatewaySettings
from support.chat_engine import Model, chat_tokenizer, rollout
from support.gateway_calls import run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "agent_options of agent loop 'harness': command: is required, but missing"),
        ({"command": [sys.executable], "max_file_mb": float("inf")}, "max_file_mb = inf: must be less than"),
        ({"command": []}, "command = []: must have at least 1 item"),
        ({"command": ["no-such-program", "-x"]}, "agent_options.command: 'no-such-program' is not on the PATH"),
        ({"command": [sys.executable], "workspace": "nowhere"}, "agent_options.workspace: 'nowhere' is not a folder"),
        (
            {"command": [sys.executable], "calls": "no.such.function"},
            "agent_options.calls: function 'no.such.function'",
        ),
        ({"command": [sys.executable], "tool_parser": "nothing"}, "agent_options.tool_parser 'nothing' "),
        ({"command": [sys.executable], "turns": 3}, "turns"),
        ({"command": [sys.executable], "workspace_field": "folder"}, "agent_options.workspace, which is missing"),
        ({"command": [sys.executable], "writable": ["nowhere"]}, "agent_options.writable: 'nowhere' is not a folder"),
        (
            {"command": [sys.executable], "max_processes": 300},
            "max_processes = 300: must be greater",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_loop("harness", options)
    assert words in str(refused.value)


def test_a_program_of_the_workspace_need_not_be_on_the_path(tmp_path: Path) -> None:
    make_loop("harness", {"command": ["./agent"], "workspace": tmp_path})


def test_a_folder_that_is_made_while_its_sample_is_stopped_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "sessions"))
    (tmp_path / "sessions").mkdir()
    begun, go, make = threading.Event(), threading.Event(), HarnessFolder.make

    def late(template: Path | None, name: str) -> HarnessFolder:
        begun.set()
        go.wait()
        return make(template, name)

    ends: list[Callable[[], object]] = []

    async def work() -> None:
        loop = make_loop("harness", {"command": [sys.executable], "tool_parser": ""})
        monkeypatch.setattr(HarnessFolder, "make", late)
        given = rollout(Model(chat_tokenizer(tmp_path / "model"), []), Prompt("Hi"))
        running = asyncio.ensure_future(loop.run(replace(given, at_end=ends.append)))
        await asyncio.to_thread(begun.wait)
        running.cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.wait([running])
        assert running.cancelled()

    run(work)
    for end in ends:
        end()
    assert list(sessions_folder().iterdir()) == []


DONE = """
import json, os, time, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()

question = {"role": "user", "content": "Hi"}
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "m", "messages": [question]})
post(os.environ["ROLLQ_SESSION_URL"] + "/reward", {"reward": None})
time.sleep(0.5)
print("cleaned up")
"""


def test_a_command_that_leaves_its_reward_to_the_judge_may_clean_up(tmp_path: Path) -> None:
    async def work() -> Sample:
        gateway = Gateway(GatewaySettings())
        server = Server(gateway)
        await server.start()
        try:
            loop = make_loop(
                "harness",
                {"command": [sys.executable, "-c", DONE], "tool_parser": "", "program_rewards": True},
                gateway,
            )
            return await loop.run(rollout(Model(chat_tokenizer(tmp_path), ["Hello"]), Prompt("Hi")))
        finally:
            await server.close()

    sample = run(work)
    assert (sample.text, sample.finish_reason, sample.reward) == ("Hello", FinishReason.STOP, None)
    assert sample.extra["harness"]["output"] == "cleaned up"


TOO_LARGE = "since its output or another file reached max_file_mb = 0.005"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "cat /dev/zero"], TOO_LARGE),
        (["sh", "-c", "exec cat /dev/zero > file"], TOO_LARGE),
        (
            [sys.executable, "-c", "open('file', 'wb', 0).write(b'x' * 9999), open('file', 'ab', 0).write(b'x')"],
            "File too large",
        ),
    ],
)
def test_a_command_that_writes_too_much_is_told_so(command: list[str], words: str, tmp_path: Path) -> None:
    async def work() -> str | None:
        options = {"command": command, "tool_parser": "", "max_file_mb": 0.005}
        sample = await make_loop("harness", options).run(
            rollout(Model(chat_tokenizer(tmp_path / "model"), []), Prompt("Hi"))
        )
        return sample.error

    error = run(work)
    assert error is not None
    assert words in error


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("folders/a", "folders/b/c", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "folders" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "folders"


def sample_of_row(metadata: dict[str, Any], folders: Path) -> Sample:
    """The sample of a command that shows its workspace and the metadata of its row."""
    show = 'cat file; echo; cat "$ROLLQ_SESSION_METADATA"'
    options = {"command": ["sh", "-c", show], "tool_parser": "", "workspace": folders, "workspace_field": "folder"}
    prompt = Prompt("Hi", answer="secret", metadata=metadata)
    model = Model(chat_tokenizer(folders.parent / "model"), [])
    return run(lambda: make_loop("harness", options).run(rollout(model, prompt)))


@pytest.mark.parametrize("name", ["a", "b/c", "./b/../a"])
def test_a_row_names_its_workspace_and_the_command_gets_its_metadata(name: str, folders: Path) -> None:
    metadata = {"folder": name, "id": 2**70, "level": [1, None]}
    sample = sample_of_row(metadata, folders)
    shown, given = sample.extra["harness"]["output"].splitlines()
    assert shown == ("folders/b/c" if name == "b/c" else "folders/a")
    assert exact_json.loads(given) == metadata


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "is None, not the name of a folder"),
        ({"folder": ""}, "is '', not the name of a folder"),
        ({"folder": 3}, "is 3, not the name of a folder"),
        ({"folder": "a\0"}, "not the name of a folder"),
        ({"folder": "."}, "'.', leaves "),
        ({"folder": "../outside"}, "'../outside', leaves "),
        ({"folder": "link"}, "'link', leaves "),
        ({"folder": "/etc"}, "'/etc', leaves "),
        ({"folder": "none"}, "none is not a folder"),
    ],
)
def test_a_row_names_no_folder_outside(metadata: dict[str, Any], words: str, folders: Path) -> None:
    with pytest.raises(SampleFailed) as failed:
        sample_of_row(metadata, folders)
    assert failed.value.kind is FailureKind.PROMPT
    assert words in str(failed.value)


def test_a_system_without_namespaces_is_named_and_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hidden: list[bool] = []
    monkeypatch.setattr(local, "problem", lambda _: "unshare: not permitted")
    monkeypatch.setattr(local, "hide_memory", lambda: hidden.append(True))
    loop = make_loop("harness", {"command": ["sh", "-c", "ls /proc | wc -l"], "tool_parser": ""})
    sample = run(lambda: loop.run(rollout(Model(chat_tokenizer(tmp_path), []), Prompt("Hi"))))
    assert sample.extra["harness"]["exit_code"] == 0
    (line,) = [line for line in caplog.messages if "not separated" in line]
    assert "(unshare: not permitted)" in line
    assert hidden == [True]


def test_a_command_that_needs_its_workspace_at_a_path_is_refused_without_namespaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "problem", lambda _: "unshare: not permitted")
    monkeypatch.setattr(local, "hide_memory", lambda: None)
    with pytest.raises(ConfigError, match=r'agent_options\.workspace_at = "/app" needs namespaces of Linux'):
        make_loop("harness", {"command": ["sh"], "workspace_at": "/app"})


@pytest.mark.parametrize("path", ["app", "/", "/..", "/app/x", "/tmp", "/usr", "/app\n"])
def test_a_workspace_is_at_no_path_of_the_system(path: str) -> None:
    with pytest.raises(ConfigError, match=r"workspace_at = .*: must be a path directly below /, as /app"):
        make_loop("harness", {"command": ["sh"], "workspace_at": path})
