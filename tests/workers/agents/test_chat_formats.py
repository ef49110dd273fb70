"""Chat formats: how turns of the model are parsed, by name, and how conversations keep them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, SampleStatus, Status
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.environments import Opening, Step
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn, forms, shows_calls
from rollq.workers.groups.agent_loops import check_loop, make_loop
from rollq.workers.run import Worker
from rollq.workers.tokenizers.byte import ByteTokenizer
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import PLAIN, Model, call, chat_tokenizer, converse, rollout
from support.chat_families import BUILT_IN, THOUGHT, TOOL, Family, family_tokenizer, sample_of
from support.chat_round_trip import check_exact, check_second_question, check_tools, tool_turns
from support.worker_run import Script, WorkerWorld

SIX = ToolCall("calculator", {"expression": "6*7"})
SEVEN = ToolCall("calculator", {"expression": "7*6"})
GPT_OSS = BUILT_IN["GPT-OSS"]


@pytest.fixture(params=list(BUILT_IN))
def family(request: pytest.FixtureRequest) -> Family:
    return BUILT_IN[request.param]


@pytest.fixture
def tokenizer(family: Family, tmp_path: Path) -> HfTokenizer:
    return family_tokenizer(tmp_path, family)


def parse(tokenizer: HfTokenizer, family: Family, text: str) -> Turn:
    """A turn as the family's format parses it."""
    found = make_format(**{"tool_parser": "hermes", **family.parsers})
    return asyncio.run(found.parse(tokenizer, text, [], (TOOL,), family.prompt))


def test_a_conversation_with_tools_keeps_the_tokens_of_the_model(family: Family, tmp_path: Path) -> None:
    check_tools(tmp_path, family)


def test_thoughts_are_in_later_prompts_as_the_template_wants(family: Family, tmp_path: Path) -> None:
    check_second_question(tmp_path, family)


def test_a_model_without_tools_converses_in_its_template(tmp_path: Path) -> None:
    gemma = Family("trl:gemma3", {}, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", call="")
    tokenizer = family_tokenizer(tmp_path, gemma)
    turns = [("Forty-two 😀", False), ("Forty-two", False)]
    sample, model = sample_of(tokenizer, gemma, turns, "environment", environment=f"{__name__}.Asking")
    check_exact(tokenizer, sample, model)
    assert (sample.status, len(sample.segments)) == (SampleStatus.COMPLETED, 1)


class Asking:
    """An environment without tools that asks a second question."""

    asked = False

    async def setup(self, prompt: Any, session: str) -> Opening:
        return Opening()

    async def step(self, text: str) -> Step:
        if self.asked:
            return Step(done=True)
        self.asked = True
        return Step(({"role": "user", "content": f"{text}? And 7*6?"},))

    async def teardown(self) -> None:
        pass


def test_calls_are_parsed_with_what_is_around_them(family: Family, tokenizer: HfTokenizer) -> None:
    turn = parse(tokenizer, family, family.thinking(family.calling("6*7")))
    assert (turn.calls, turn.content.strip()) == ((SIX,), "")
    assert (turn.reasoning or "").strip() == (THOUGHT if family.thinks else "")


def test_an_answer_has_no_calls(family: Family, tokenizer: HfTokenizer) -> None:
    turn = parse(tokenizer, family, family.thinking(family.saying("Zweiundvierzig 😀 ٤٢")))
    assert (turn.calls, turn.content.strip()) == ((), "Zweiundvierzig 😀 ٤٢")


def test_parallel_calls_have_different_ids(family: Family, tokenizer: HfTokenizer) -> None:
    if family.between is None:  # it makes one call in a turn
        return
    turn = parse(tokenizer, family, family.thinking(family.calling("6*7", "7*6")))
    assert turn.calls == (SIX, SEVEN)
    assert len({one.id for one in turn.well_formed}) == 2


def test_unicode_arguments_arrive(family: Family, tokenizer: HfTokenizer) -> None:
    turn = parse(tokenizer, family, family.thinking(family.calling("六×七 😀")))
    assert turn.calls == (ToolCall("calculator", {"expression": "六×七 😀"}),)


def test_calls_within_thoughts_are_not_calls(family: Family, tokenizer: HfTokenizer) -> None:
    if not family.thinks or family.template == "trl:gptoss":  # there, a message to a tool is a call wherever it is
        return
    thought = f"Perhaps {family.calling('6*7')}?"
    turn = parse(tokenizer, family, family.thinking(family.saying("No."), thought=thought))
    assert (turn.calls, turn.content.strip()) == ((), "No.")
    cut_off = parse(tokenizer, family, family.thinking("", thought=thought).partition(thought)[0] + thought)
    assert (cut_off.calls, cut_off.content) == ((), "")
    assert "6*7" in (cut_off.reasoning or "")


def test_a_call_that_is_cut_off_is_malformed(family: Family, tokenizer: HfTokenizer) -> None:
    turn = parse(tokenizer, family, family.thinking(family.calling("6*7").partition("6*7")[0]))
    assert [type(call) for call in turn.calls] == [Malformed]


def test_a_turn_cut_off_anywhere_makes_no_other_call(family: Family, tokenizer: HfTokenizer) -> None:
    whole = family.thinking(family.calling("6*7"))
    for length in range(len(whole)):
        assert parse(tokenizer, family, whole[:length]).well_formed in ((), (SIX,))


def test_a_malformed_call_is_answered_and_the_model_tries_again(family: Family, tokenizer: HfTokenizer) -> None:
    broken = family.thinking(family.calling("6*7").partition("6*7")[0])
    turns = [(broken, True), *tool_turns(family)[1:]]
    sample, model = sample_of(tokenizer, family, turns, "tools", tools={"calculator": {}})
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, None)
    check_exact(tokenizer, sample, model)
    (told,) = (one["content"] for one in sample.extra["messages"] if "error: " in one["content"])
    assert told in tokenizer.decode(model.requests[1].prompt_ids.tolist(), special=True)


def test_an_unknown_tool_is_answered(family: Family, tokenizer: HfTokenizer) -> None:
    abacus = family.thinking(family.calling("6*7").replace("calculator", "abacus"))
    sample, model = sample_of(
        tokenizer, family, [(abacus, True), tool_turns(family)[-1]], "tools", tools={"calculator": {}}
    )
    check_exact(tokenizer, sample, model)
    (answer,) = (one for one in sample.extra["messages"] if one["role"] == "tool")
    assert answer["content"] == "error: there is no tool 'abacus'; use one of calculator"


def test_gpt_oss_with_a_remark_between_thoughts_and_call_is_rendered(tmp_path: Path) -> None:
    remark = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
    turns = [(GPT_OSS.thinking(remark + GPT_OSS.calling("6*7")), True), tool_turns(GPT_OSS)[-1]]
    tokenizer = family_tokenizer(tmp_path, GPT_OSS)
    sample, model = sample_of(tokenizer, GPT_OSS, turns, "tools", tools={"calculator": {}})
    check_exact(tokenizer, sample, model)
    assert (sample.status, len(sample.segments)) == (SampleStatus.COMPLETED, 2)  # its template has no place for remarks
    assert THOUGHT in tokenizer.decode(model.requests[1].prompt_ids.tolist())


def test_a_turn_that_reaches_max_tokens_in_its_thoughts_ends_the_sample(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, GPT_OSS)
    thought = tokenizer.encode("<|channel|>analysis<|message|>Let me see" + GPT_OSS.calling("6*7"))
    loop = make_loop("tools", {"tools": {"calculator": {}}, "tool_parser": "harmony"})
    sample = converse(loop, Model(tokenizer, [thought * 2]), max_tokens=len(thought), max_prompt_tokens=10_000)
    assert (sample.finish_reason, len(sample.segments[0].response_ids)) == (FinishReason.LENGTH, len(thought))
    assert [message["role"] for message in sample.extra["messages"]] == ["assistant"]


def test_an_interrupted_conversation_continues_with_the_messages_that_were_rendered(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, GPT_OSS)
    turns = [tokenizer.encode(text + (GPT_OSS.call_end or "") * calls) for text, calls in tool_turns(GPT_OSS)]
    loop = make_loop("tools", {"tools": {"calculator": {}}, "tool_parser": "harmony"})
    first = Model(tokenizer, [turns[0], FinishReason.ABORT])
    kept = converse(loop, first, max_tokens=10_000, max_prompt_tokens=10_000)
    assert kept.status is SampleStatus.ABORTED
    second = Model(tokenizer, turns[1:])
    asked = replace(rollout(second, Prompt("6*7?"), max_tokens=10_000, max_prompt_tokens=10_000), previous=kept)
    sample: Sample = asyncio.run(loop.run(asked))
    assert (sample.status, sample.text, len(sample.segments)) == (SampleStatus.COMPLETED, "It is 42", 1)


@pytest.mark.parametrize("template", [PLAIN, PLAIN.replace("message.content", "message.content + none")])
def test_a_template_without_calls_gets_the_text_of_a_turn(template: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    assert not shows_calls(tokenizer)
    assert forms(Turn("so f()", "so ", calls=(ToolCall("f", {}),)), tokenizer) == (
        {"role": "assistant", "content": "so f()"},
    )


def test_without_parsers_the_loops_keep_text_as_before(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    text = f"<think>{THOUGHT}</think>{call('calculator', expression='6*7')}"
    sample = converse(make_loop("tools", {"tools": {"calculator": {}}}), Model(tokenizer, [text, "It is 42"]))
    assert sample.extra["messages"][0] == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tool_parser": "kimi_k2"},
            r"agent_options.tool_parser 'kimi_k2' needs vLLM, which is not installed here: "
            r"use auto or one of hermes, .*glm45.*, or pip install 'rollq\[vllm\]'",
        ),
        ({"reasoning_parser": "qwen3"}, "agent_options.reasoning_parser 'qwen3' needs vLLM.*: leave it out, or pip"),
        (
            {"tool_parser": "harmony", "reasoning_parser": "openai_gptoss"},
            "agent_options.tool_parser 'harmony' parses thoughts too: leave out reasoning_parser",
        ),
        (
            {"tool_parser": "auto", "reasoning_parser": "qwen3"},
            "agent_options.tool_parser 'auto' parses thoughts too: leave out reasoning_parser",
        ),
    ],
)
def test_a_parser_that_cannot_be_had_is_refused_at_start(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loop("tools", {"tools": {"calculator": {}}, **options})
    with pytest.raises(ConfigError, match=message):
        make_loop("environment", {"environment": "support.chat_families.Interview", **options})


@pytest.mark.parametrize(
    ("name", "token"),
    [("harmony", r"<\|start\|>"), ("mistral", r"\[TOOL_CALLS\]"), ("deepseek_v31", "<｜tool▁calls▁begin｜>")],
)
def test_a_format_whose_tokens_are_missing_is_refused(name: str, token: str, tmp_path: Path) -> None:
    loop = make_loop("tools", {"tools": {"calculator": {}}, "tool_parser": name})
    with pytest.raises(ConfigError, match=rf"tool_parser {name!r} needs a tokenizer with the token '{token}'"):
        check_loop(loop, chat_tokenizer(tmp_path))


def test_auto_needs_a_chat_template_that_it_knows(tmp_path: Path) -> None:
    loop = make_loop("tools", {"tools": {"calculator": {}}, "tool_parser": "auto"})
    with pytest.raises(ConfigError, match="'auto' does not know the chat template of this model: name one of hermes, "):
        check_loop(loop, chat_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=r"'auto' needs a chat template, .*has none: .*or name one of hermes, "):
        check_loop(loop, ByteTokenizer())


def last_answer(prompt: Prompt, sample: Sample) -> float:
    """A judge that wants the answer alone."""
    return float(sample.text == "It is 42")


def test_a_worker_makes_and_judges_conversations_in_a_chat_format(
    buffer: Buffer, server_url: str, tmp_path: Path
) -> None:
    tokenizer = family_tokenizer(tmp_path, GPT_OSS)
    options = {"tools": {"calculator": {}}, "tool_parser": "harmony"}
    rules = {"agent_loop": "tools", "agent_options": options, "max_tokens": 4096, "judge": f"{__name__}.last_answer"}
    world = WorkerWorld(buffer, server_url, rules)
    world.admit(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 2)

    world.play(scene, engine="support.harmony_engine.HarmonyEngine", options={"model": tmp_path})
    samples = [sample for _, group in world.results(2) for sample in group]
    assert [(sample.reward, sample.error, len(sample.segments)) for sample in samples] == [(1.0, None, 1)] * 4
    for sample in samples:
        (segment,) = sample.segments
        assert segment.loss_mask is not None
        said = tokenizer.decode(segment.response_ids[segment.loss_mask].tolist(), special=True)
        assert said == "".join(text + ("<|call|>" if calls else "<|return|>") for text, calls in tool_turns(GPT_OSS))
        assert sample.extra["messages"][0]["reasoning_content"] == THOUGHT
        assert sample.extra["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"expression": "6*7"}


def test_a_worker_refuses_a_parser_that_its_tokenizer_does_not_suit(
    buffer: Buffer, server_url: str, tmp_path: Path
) -> None:
    chat_tokenizer(tmp_path)
    options = {"tools": {"calculator": {}}, "tool_parser": "harmony"}
    world = WorkerWorld(buffer, server_url, {"agent_loop": "tools", "agent_options": options})

    async def scene(worker: Worker, script: Script) -> None:
        raise AssertionError("the worker has started")

    with pytest.raises(ConfigError, match="'harmony' needs a tokenizer with the token"):
        world.play(scene, engine="support.harmony_engine.HarmonyEngine", options={"model": tmp_path})
