"""The kind `verifiers` without the package: its options, and the processes of its runners."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, SampleStatus
from rollq.cli.settings.environment_rows import identities
from rollq.cli.settings.file import load_settings
from rollq.environments.kinds import Level
from rollq.environments.verifiers import runners as runners_module
from rollq.environments.verifiers.checking import findings
from rollq.environments.verifiers.kind import Verifiers
from rollq.environments.verifiers.loop import RunnerLoop
from rollq.environments.verifiers.other_python import variables
from rollq.workers.gateway.open_sessions import KEY_VARIABLE, Gateway
from rollq.workers.groups.agent_loops import close_loop, is_offered, make_loop
from rollq.workers.settings import GatewaySettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, chat_tokenizer, rollout
from support.gateway_calls import run
from support.pretended_runner import pretended_python
from support.served_gateway import listening


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def options_of(**options: Any) -> dict[str, Any]:
    settings = Verifiers().open("sums", options, "train").settings()
    return dict(settings["agent_options"]) | {"tool_parser": "hermes"}


def loop_of(gateway: Gateway, **options: Any) -> RunnerLoop:
    made = make_loop("rollq.environments.verifiers.loop.verifiers_loop", options_of(**options), gateway)
    assert isinstance(made, RunnerLoop)
    return made


def sample_of(loop: RunnerLoop, tokenizer: HfTokenizer) -> Any:
    return loop.run(rollout(Model(tokenizer, ["2"]), Prompt("1+1?")))


def test_options_become_those_of_the_loop() -> None:
    made = Verifiers().open("sums", {"python": "p", "harness": "null", "concurrent": 8, "environment": ["A"]}, "test")
    settings = made.settings()
    assert settings["agent_options"] == {
        "environment": {"taskset": "sums", "config": {}, "harness": "null", "split": "test"},
        "python": "p", "runners": 2, "concurrent": 8, "variables": ["A"],
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"env_options\.harnes: unknown key.*'harness'"):
        Verifiers().open("sums", {"harnes": "null"}, "train")


def test_a_settings_file_names_a_task_set_and_a_python_beside_it(tmp_path: Path) -> None:
    python = pretended_python(tmp_path, version="0.4.0")
    file = tmp_path / "rollq.toml"
    file.write_text(
        'run = "desk"\n[tasks.desk]\nenv = "verifiers:sums"\nbatch_groups = 8\n'
        f'env_options = {{ python = "{python.relative_to(tmp_path)}" }}\n'
    )
    settings = load_settings(file, {})
    assert settings.tasks["desk"].agent_options["python"] == str(python)
    assert identities(settings)["environment of tasks.desk"].startswith("verifiers:sums (verifiers 0.4.0, package sums")


def test_a_python_without_verifiers_is_refused(tmp_path: Path) -> None:
    gateway = Gateway(GatewaySettings())
    with pytest.raises(ConfigError, match=r'env_options\.python = "/no/python": no such program'):
        loop_of(gateway, python="/no/python")
    with pytest.raises(ConfigError, match=r"env_options\.python is not set, .* has no package verifiers"):
        next(Verifiers().open("sums", {}, "train").rows())
    old = pretended_python(tmp_path, version="0.3.1")
    with pytest.raises(ConfigError, match=r"has verifiers 0\.3\.1: .* -m pip install .verifiers>=0\.4,<0\.5"):
        loop_of(gateway, python=str(old))


def test_a_variable_that_the_worker_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NOT_THERE"):
        loop_of(Gateway(GatewaySettings()), python=str(pretended_python(tmp_path)), environment=["NOT_THERE"])


def test_runners_get_no_secret_and_find_the_user_s_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    monkeypatch.setenv("MY_API_KEY", "named")
    monkeypatch.syspath_prepend("/modules/of/a/user")
    given = variables(["MY_API_KEY"])
    assert given["MY_API_KEY"] == "named"
    assert not [name for name in given if name.startswith("ROLLQ_")]
    folders = given["PYTHONPATH"].split(os.pathsep)
    assert "/modules/of/a/user" in folders
    assert not [folder for folder in folders if "site-packages" in folder]


def test_a_runner_takes_sessions_with_a_key_of_its_own(
    tokenizer: HfTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    python = str(pretended_python(tmp_path))

    async def work() -> None:
        async with listening() as (gateway, _):
            loop, other = loop_of(gateway, python=python), loop_of(gateway, python=python)
            assert loop.runners is other.runners  # a task and its evaluation share them
            assert not is_offered(loop)
            samples: list[Sample] = await asyncio.gather(*(sample_of(each, tokenizer) for each in (loop, other) * 3))
            await close_loop(loop)
            for sample in samples:
                assert (sample.reward, sample.finish_reason) == (0.5, FinishReason.LENGTH)
                assert sample.extra["program"]["environment"]["taskset"] == "sums"

    run(work)


def test_sessions_of_a_dead_runner_fail_and_another_starts(
    tokenizer: HfTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners_module, "PAUSES_S", (0.05, 0.1))
    python = pretended_python(tmp_path, "session")

    async def work() -> None:
        async with listening() as (gateway, _):
            loop = loop_of(gateway, python=str(python), runners=1)
            lost = asyncio.create_task(sample_of(loop, tokenizer))
            while not (python.parent / "pid").exists() or not (pid := (python.parent / "pid").read_text()):
                await asyncio.sleep(0.02)
            (python.parent / "ends").write_text("")
            os.kill(int(pid), signal.SIGKILL)
            sample = await lost
            assert (sample.status, sample.failure) == (SampleStatus.FAILED, FailureKind.PROGRAM)
            assert sample.error == "the runner of verifiers died of signal 9"
            again = await sample_of(loop, tokenizer)
            assert again.reward == 0.5
            await close_loop(loop)

    run(work)


def test_samples_fail_while_no_runner_starts(
    tokenizer: HfTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners_module, "PAUSES_S", (0.05, 0.1))
    python = str(pretended_python(tmp_path, "start"))

    async def work() -> None:
        async with listening() as (gateway, _):
            loop = loop_of(gateway, python=python)
            sample = await sample_of(loop, tokenizer)
            assert sample.failure is FailureKind.PROGRAM
            said = "the runner of verifiers ended with exit code 1: there is no task set of this name"
            assert sample.error == said
            await close_loop(loop)

    run(work)


def test_without_runners_others_take_the_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        loop_of(Gateway(GatewaySettings()), runners=0)
    monkeypatch.setenv(KEY_VARIABLE, "key")
    assert is_offered(loop_of(Gateway(GatewaySettings()), runners=0))


def test_findings_count_failures_and_rewards_of_nothing() -> None:
    failed = {"path": "/fail", "body": {"kind": "tool", "reason": "gone"}, "seconds": 1.0}
    paid = {"path": "/reward", "body": {"reward": 1.5}, "seconds": 3.0}
    found = list(findings([{"outcomes": [paid, failed, failed, paid], "left": 2}]))
    assert [(each.level, each.text, each.row) for each in found] == [
        (Level.ERROR, "2 of 4 episodes fail: tool: gone", 1),
        (Level.NOTE, 'the answer "0" earns 1.5 on average; an episode takes 2 s without a model', None),
        (Level.WARNING, 'the answer "0" earns at least 1.5 in each of 2 rows', None),
        (Level.ERROR, "2 processes remain after the episodes", None),
    ]
    assert list(findings([{"outcomes": [], "left": 0}])) == []
