"""Agents with real clients over the gateway, with a real vLLM: what is trained is what vLLM made, token for token.

Each agent thinks, calls a tool, has two subagents, and compacts its history. vLLM plays a part, so that the agents have
something to do: a test chooses the tokens of calls and answers, and vLLM draws those of thoughts.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Prompt, Sample, Segment
from rollq.workers.agents.loops import Rollout, prompt_tokens
from rollq.workers.engines.protocol import Sampling
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.settings import GatewaySettings
from support.agent_programs import programs, python_with
from support.chat_engine import call
from support.client_programs import AGENTS, LANGCHAIN, OPENAI, PYDANTIC_AI, SMOLAGENTS
from support.documented_commands import ROOT
from support.played_vllm import CONTEXT_TOKENS, TEMPERATURE, Play, PlayedVllm, Words, check, make_model
from support.vllm_run import SharedEngine

CODEX = (ROOT / "examples" / "clients" / "codex.sh").read_text("utf-8")
COMPACT_AT = 15_000
"""Tokens at which Codex compacts: its first request has 12,000, and 19,000 follow a long output of a tool."""
THOUGHT = ("<think>\n", 12, "\n</think>\n\n")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """An engine that plays parts."""
    folder = make_model(tmp_path_factory.mktemp("model"))
    engine = SharedEngine(lambda: PlayedVllm(folder))
    yield engine
    engine.close()


def checked_sample(
    shared: SharedEngine, parts: Mapping[str, Words], folder: Path, *command: str, **env: str
) -> tuple[Sample, Counter[str]]:
    """The sample of a program whose model says `parts`, which has been checked, and how often it said each of them."""
    engine = shared.engine
    assert isinstance(engine, PlayedVllm)
    play = engine.play = Play(parts)

    async def work() -> Sample:
        gateway = Gateway(GatewaySettings())
        options = {"command": command, "env": env, "workspace": folder, "tool_parser": "hermes"}
        loop = make_loop("harness", {**options, "reasoning_parser": "qwen3"}, gateway)
        server = Server(gateway)
        await server.start()
        prompt = Prompt("What is 6*7?")
        rollout = Rollout(
            prompt=prompt,
            prompt_ids=prompt_tokens(prompt, engine.tokenizer),
            previous=EMPTY_SAMPLE,
            sampling=Sampling(max_tokens=CONTEXT_TOKENS // 2, temperature=TEMPERATURE, seed=5),
            max_prompt_tokens=CONTEXT_TOKENS // 2,
            priority=0,
            tokenizer=engine.tokenizer,
            generate=engine.generate,
            session="math/1/0/1",
        )
        try:
            return await loop.run(rollout)
        finally:
            await server.close()

    sample: Sample = shared.run(work())
    assert sample.extra["harness"]["exit_code"] == 0, sample.extra["harness"]["output"]
    check(sample, play, engine.tokenizer, engine.model)
    return sample, play.said


def says_summary(shared: SharedEngine, segment: Segment) -> bool:
    """Whether a segment goes on from the summary."""
    assert isinstance(shared.engine, PlayedVllm)
    return "6*7 is 42." in shared.engine.tokenizer.decode(segment.prompt_ids.tolist())


def openings(sample: Sample) -> int:
    """How many calls continue no other."""
    return sum(fact["parent"] is None for fact in sample.extra["calls"])


CALLS = "\n".join(call("check", task=f"Check part {number}.") for number in range(2))
WORK_OUT = (*THOUGHT, call("calculator", expression="6*7"))
SUMMARY = (*THOUGHT, "6*7 is 42.")
ANSWER = (*THOUGHT, "It is 42")
FINAL = (*THOUGHT, call("final_answer", answer="It is 42"))
PARTS: Mapping[str, Words] = {
    "Summarise.": SUMMARY,
    "So far: ": ANSWER,
    "</tool_response>\n<tool_response>": WORK_OUT,
    "<tool_response>": ANSWER,
    "Check part": WORK_OUT,
    "6*7?": (*THOUGHT, CALLS),
}
PARTS_OF_SMOLAGENTS: Mapping[str, Words] = {
    "Summarise.": SUMMARY,
    "from your managed agent": WORK_OUT,
    "Check part": WORK_OUT,
    "6*7?": (*THOUGHT, CALLS),
    "Observation": FINAL,
}
PARTS_OF_LANGCHAIN: Mapping[str, Words] = {
    "Messages to summarize": SUMMARY,
    "</tool_response>\n<tool_response>": WORK_OUT,
    "<tool_response>": ANSWER,
    "Check part": WORK_OUT,
    "6*7?": (*THOUGHT, CALLS),
}
PARTS_OF_AGENTS = {**PARTS, "6*7?": (*THOUGHT, CALLS.replace('"task"', '"input"'))}
PROGRAMS = {
    "openai": (OPENAI, PARTS),
    "langchain": (LANGCHAIN, PARTS_OF_LANGCHAIN),
    "agents": (AGENTS, PARTS_OF_AGENTS),
    "pydantic_ai": (PYDANTIC_AI, PARTS),
    "smolagents": (SMOLAGENTS, PARTS_OF_SMOLAGENTS),
}


@pytest.mark.parametrize(
    "client", [pytest.param(client, marks=[] if client == "openai" else pytest.mark.slow) for client in PROGRAMS]
)
def test_an_agent_with_subagents_that_compacts_its_history(client: str, shared: SharedEngine, tmp_path: Path) -> None:
    program, parts = PROGRAMS[client]
    (tmp_path / "agent.py").write_text(program)
    python = sys.executable if client == "openai" else python_with(client)
    sample, said = checked_sample(shared, parts, tmp_path, python, "agent.py")
    assert sample.extra["harness"]["output"].endswith("It is 42")
    assert said.keys() == parts.keys()
    assert said["Check part"] == 2
    assert len(sample.segments) == (8 if client == "smolagents" else 5)
    assert says_summary(shared, sample.segments[-1])


@pytest.mark.slow
def test_claude_code_with_subagents_and_its_compaction(shared: SharedEngine, tmp_path: Path) -> None:
    agents = [call("Agent", description="Check", prompt=f"Check part {n}.", subagent_type="claude") for n in range(2)]
    shell = call("Bash", command="echo $((6*7))", description="Work out a product")
    parts = {
        "summary of the conversation": (*THOUGHT, "<summary>6*7 is 42.</summary>"),
        "Go on now.": ANSWER,
        "<tool_response>": (*THOUGHT, "It is right. ", 3),
        "Check part": (*THOUGHT, shell),
        "6*7": (*THOUGHT, "\n".join(agents)),
    }
    claude = f"{programs() / 'claude'} -p --allowedTools Bash"
    script = f'{claude} && {claude} --continue /compact && {claude} --continue "Go on now."'
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    sample, said = checked_sample(shared, parts, tmp_path, "sh", "-c", script, **quiet)
    assert sample.extra["harness"]["output"].endswith("It is 42")
    assert said.keys() == parts.keys()
    assert said["Check part"] == 2
    assert says_summary(shared, sample.segments[-1])
    assert openings(sample) == 5  # of the agent, of two subagents, of the summary, and after it


@pytest.mark.slow
def test_codex_with_subagents_and_its_compaction(shared: SharedEngine, tmp_path: Path) -> None:
    agents = [call("multi_agent_v1__spawn_agent", message=f"Check part {n}.") for n in range(2)]
    both = "until [ -e part0 ] && [ -e part1 ]; do sleep 0.1; done; seq 1 2000"
    told = "<subagent_notification>"  # comes when the subagents have ended: with results, after them, or never
    parts = {
        "CONTEXT CHECKPOINT": SUMMARY,
        "6*7 is 42.": ANSWER,
        "agent_id": (*THOUGHT, call("exec_command", cmd=both, yield_time_ms=30_000)),
        "1999": (*THOUGHT, call("exec_command", cmd="true")),
        "<tool_response>": (*THOUGHT, "It is right. ", 3),
        told: ANSWER,
        "Check part 0.": (*THOUGHT, call("exec_command", cmd="touch part0")),
        "Check part 1.": (*THOUGHT, call("exec_command", cmd="touch part1")),
        "6*7": (*THOUGHT, "\n".join(agents)),
    }
    settings = CODEX.replace('model = "policy"', f'model = "policy"\nmodel_auto_compact_token_limit = {COMPACT_AT}')
    script = settings.replace("exec codex", f"exec {programs() / 'codex'}")
    sample, said = checked_sample(shared, parts, tmp_path, "sh", "-c", script)
    assert sample.extra["harness"]["output"].endswith("It is 42")
    assert said.keys() | {told} == parts.keys()
    assert said["Check part 0."] == said["Check part 1."] == 1
    assert says_summary(shared, sample.segments[-1])
    assert openings(sample) == 4  # of the agent, of two subagents, and after the summary, which continues the agent's
