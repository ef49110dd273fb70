"""Claude Code and Codex, the real programs, as harnesses: their calls become the segments of a sample."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Prompt, Sample
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.settings import GatewaySettings
from support.agent_programs import programs as installed
from support.chat_engine import Model, call, chat_tokenizer, rollout
from support.gateway_calls import as_stored, run, trained_tokens

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 400_000
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders for temporary files that no other test uses: samples have the same name in all of them."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture(scope="module")
def programs() -> Path:
    return installed()


def sample_of(
    words: list[str],
    folder: Path,
    command: list[str],
    *,
    previous: Sample = EMPTY_SAMPLE,
    recorded: list[Sample] | None = None,
    env: Mapping[str, str] = QUIET,
) -> tuple[Sample, Model]:
    """The sample of a program that talks to a model with these words; `recorded` gets it at every call."""
    model, kept = Model(chat_tokenizer(folder), words), [] if recorded is None else recorded
    ends: list[Callable[[], object]] = []

    async def record(sample: Sample) -> bool:
        kept.append(sample)
        return True

    async def work() -> Sample:
        gateway = Gateway(GatewaySettings())
        loop = make_loop("harness", {"command": command, "env": dict(env), "tool_parser": "hermes"}, gateway)
        server = Server(gateway)
        await server.start()
        try:
            prompt = Prompt("Use Bash to print six.")
            given = rollout(model, prompt, max_tokens=PROMPT_TOKENS, max_prompt_tokens=PROMPT_TOKENS)
            return await loop.run(replace(given, previous=previous, record=record, at_end=ends.append))
        finally:
            await server.close()
            for end in ends:
                end()

    return run(work), model


def test_claude_code_uses_a_tool_in_one_segment(programs: Path, tmp_path: Path) -> None:
    words = [call("Bash", command="echo $((3+3))", description="Print six"), "It is 6."]
    command = [str(programs / "claude"), "-p", "--allowedTools", "Bash"]
    sample, model = sample_of(words, tmp_path, command)
    assert (sample.text, sample.extra["harness"]) == ("It is 6.", {**sample.extra["harness"], "exit_code": 0})
    assert sample.extra["harness"]["output"] == "It is 6."
    assert len(model.requests) == 2
    (segment,) = sample.segments
    assert segment.loss_mask is not None
    text = model.tokenizer.decode(segment.response_ids[~segment.loss_mask].tolist(), special=True)
    assert "6" in text
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


def test_the_next_attempt_of_claude_code_is_answered_from_the_record(programs: Path, tmp_path: Path) -> None:
    words = [call("Bash", command="echo $((3+3))", description="Print six"), "It is 6."]
    command = [str(programs / "claude"), "-p", "--allowedTools", "Bash"]
    recorded: list[Sample] = []
    sample_of(words, tmp_path, command, recorded=recorded)
    sample, model = sample_of([], tmp_path, command, previous=as_stored(recorded))
    assert (sample.text, len(model.requests)) == ("It is 6.", 0)
    assert sample.extra["replayed_calls"] == 2


def test_a_subagent_of_claude_code_is_another_segment(programs: Path, tmp_path: Path) -> None:
    spawn = call("Agent", description="Say hi", prompt="say hi", subagent_type="claude")
    command = [str(programs / "claude"), "-p"]
    sample, _ = sample_of([spawn, "Hi.", "It said hi."], tmp_path, command)
    assert (sample.text, sample.extra["harness"]["exit_code"]) == ("It said hi.", 0)
    assert [(fact["parent"], fact["segment"]) for fact in sample.extra["calls"]] == [(None, 0), (None, 1), (0, 0)]
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


def test_codex_uses_a_tool(programs: Path, tmp_path: Path) -> None:
    shell = call("exec_command", cmd="echo $((3+3))")
    command = ["sh", "-c", CODEX.format(codex=programs / "codex")]
    sample, model = sample_of([shell, "It is 6."], tmp_path, command)
    assert sample.extra["harness"]["exit_code"] == 0, sample.extra["harness"]["output"]
    assert sample.text == "It is 6."
    assert len(model.requests) == 2
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


CODEX = """
mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" << EOF
model = "policy"
model_provider = "rollq"
[model_providers.rollq]
name = "rollq"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
EOF
exec {codex} exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -
"""
