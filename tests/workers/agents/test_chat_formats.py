"""Chat formats: how turns of the model are parsed, by name, and how conversations keep them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.rollouts import FinishReason, Prompt, Sample, SampleStatus, Status
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.environments import Opening, Step
from rollq.workers.agents.harmony import parse_harmony
from rollq.workers.agents.registry import check_loop, make_loop
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn, forms, shows_calls
from rollq.workers.run import Worker
from rollq.workers.tokenizers.byte import ByteTokenizer
from support.chat_engine import PLAIN, Model, call, chat_tokenizer, converse, rollout
from support.chat_families import BUILT_IN, HARMONY, THOUGHT, Family, family_tokenizer, sample_of
from support.chat_round_trip import check_exact, check_second_question, check_tools, tool_turns
from support.worker_run import Script, WorkerWorld

SIX = ToolCall("calculator", {"expression": "6*7"})
SEVEN = ToolCall("calculator", {"expression": "7*6"})
PIECES = (*HARMONY, "<tool_call>", "</tool_call>", "</think>", " to=f", "{", "}", '"name": "f"', "x")
GPT_OSS = BUILT_IN["GPT-OSS"]
QWEN3 = BUILT_IN["Qwen3"]
BY_NAME = {"Qwen3": QWEN3, **{name: family for name, family in BUILT_IN.items() if name.startswith("GPT-OSS")}}


def parse(family: Family, text: str) -> Turn:
    """A turn as the family's format parses it; the built-in ones need no tokenizer."""
    parsers = {"tool_parser": "hermes", **family.parsers}
    return asyncio.run(make_format(**parsers).parse(ByteTokenizer(), text, [], ()))


@pytest.mark.parametrize("family", BUILT_IN.values(), ids=BUILT_IN)
def test_a_conversation_with_tools_keeps_the_tokens_of_the_model(family: Family, tmp_path: Path) -> None:
    check_tools(tmp_path, family)


@pytest.mark.parametrize("family", BUILT_IN.values(), ids=BUILT_IN)
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


@pytest.mark.parametrize("family", BY_NAME.values(), ids=BY_NAME)
class TestEveryFamily:
    def test_calls_are_parsed_with_what_is_around_them(self, family: Family) -> None:
        turn = parse(family, family.thinking(family.calling("6*7")))
        assert turn.calls == (SIX,)
        assert turn.reasoning is not None
        assert turn.reasoning.strip() == THOUGHT
        assert turn.content.strip() == ""

    def test_an_answer_has_no_calls(self, family: Family) -> None:
        turn = parse(family, family.thinking(family.saying("Zweiundvierzig 😀 ٤٢")))
        assert (turn.calls, turn.content.strip()) == ((), "Zweiundvierzig 😀 ٤٢")
        assert parse(family, family.saying("42")) == Turn(family.saying("42"), "42")

    def test_parallel_calls_have_different_ids(self, family: Family) -> None:
        if family.between is None:  # it makes one call in a turn
            return
        turn = parse(family, family.calling("6*7", "7*6"))
        assert turn.calls == (SIX, SEVEN)
        assert len({one.id for one in turn.well_formed}) == 2

    def test_unicode_arguments_arrive(self, family: Family) -> None:
        assert parse(family, family.calling("六×七 😀")).calls == (ToolCall("calculator", {"expression": "六×七 😀"}),)

    def test_calls_within_thoughts_are_not_calls(self, family: Family) -> None:
        turn = parse(family, family.thinking(family.saying("No."), thought=f"Perhaps {family.calling('6*7')}?"))
        if family.parsers.get("tool_parser") != "harmony":  # there, a channel of its own is a call wherever it is
            assert (turn.calls, turn.content.strip()) == ((), "No.")

    def test_invalid_json_is_a_malformed_call(self, family: Family) -> None:
        for broken in (family.calling('6*7"')[:-4], family.calling('"')):
            calls = parse(family, broken).calls
            assert [type(one) for one in calls] == [Malformed]

    def test_a_turn_cut_off_anywhere_can_be_parsed(self, family: Family) -> None:
        whole = family.thinking(family.calling("6*7"))
        for length in range(len(whole)):
            turn = parse(family, whole[:length])
            assert turn.well_formed in ((), (SIX,))

    def test_a_malformed_call_is_answered_and_the_model_tries_again(self, family: Family, tmp_path: Path) -> None:
        tokenizer = family_tokenizer(tmp_path, family)
        turns = [(family.calling('"'), True), *tool_turns(family)[1:]]
        sample, model = sample_of(tokenizer, family, turns, "tools", tools={"calculator": {}})
        assert (sample.status, sample.error) == (SampleStatus.COMPLETED, None)
        check_exact(tokenizer, sample, model)
        (told,) = (one["content"] for one in sample.extra["messages"] if "error: " in one["content"])
        assert told in tokenizer.decode(model.requests[1].prompt_ids.tolist())

    def test_an_unknown_tool_is_answered(self, family: Family, tmp_path: Path) -> None:
        tokenizer = family_tokenizer(tmp_path, family)
        turns = [(family.calling("6*7").replace("calculator", "abacus"), True), tool_turns(family)[-1]]
        sample, _ = sample_of(tokenizer, family, turns, "tools", tools={"calculator": {}})
        (answer,) = (one for one in sample.extra["messages"] if one["role"] == "tool")
        assert answer["content"] == "error: there is no tool 'abacus', use one of calculator"

    @given(text=st.lists(st.sampled_from(PIECES)))
    @settings(deadline=None)
    def test_no_text_is_too_strange(self, family: Family, text: Sequence[str]) -> None:
        turn = parse(family, "".join(text))
        assert all(isinstance(one, ToolCall | Malformed) for one in turn.calls)


def test_harmony_reads_all_its_channels() -> None:
    turn = parse_harmony(
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{}<|call|>"
    )
    assert (turn.reasoning, turn.content, turn.calls) == ("A\nB", "I will look.", (ToolCall("calculator", {}),))
    assert parse_harmony("42") == Turn("42", "42")
    assert parse_harmony("<|channel|>ana") == Turn("<|channel|>ana", "")
    stranger = "<|channel|>final<|message|>1<|end|><|start|>user<|message|>2<|end|>"
    assert parse_harmony(stranger) == Turn(stranger, "1")


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
            {"tool_parser": "mistral"},
            r"agent_options.tool_parser 'mistral' would be one of vLLM's, which is not installed here: "
            r"use hermes or harmony, or pip install 'rollq\[vllm\]'",
        ),
        ({"reasoning_parser": "qwen3"}, "agent_options.reasoning_parser 'qwen3' would be .*: leave it out, or pip"),
        (
            {"tool_parser": "harmony", "reasoning_parser": "openai_gptoss"},
            "agent_options.tool_parser 'harmony' parses thoughts too: leave out reasoning_parser",
        ),
    ],
)
def test_a_parser_that_cannot_be_had_is_refused_at_start(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loop("tools", {"tools": {"calculator": {}}, **options})
    with pytest.raises(ConfigError, match=message):
        make_loop("environment", {"environment": "support.chat_families.Interview", **options})


def test_harmony_needs_its_tokens(tmp_path: Path) -> None:
    loop = make_loop("tools", {"tools": {"calculator": {}}, "tool_parser": "harmony"})
    with pytest.raises(ConfigError, match=r"'harmony' needs a tokenizer with the token '<\|start\|>'"):
        check_loop(loop, chat_tokenizer(tmp_path))


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
