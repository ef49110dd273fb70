"""vLLM's parsers of calls and thoughts in the loops of several turns, without an engine."""

import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import FinishReason, SampleStatus
from rollq.workers.agents import vllm_parsers
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn
from rollq.workers.agents.vllm_parsers import VllmFormat, known_parsers
from rollq.workers.groups.agent_loops import check_loop, make_loop
from rollq.workers.tokenizers.byte import ByteTokenizer
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import PLAIN, Model, converse
from support.chat_families import DEEPSEEK, OF_VLLM, THOUGHT, TOOL, Family, family_tokenizer, sample_of, tokenizer_with
from support.chat_round_trip import check_exact, check_second_question, check_tools, tool_turns
from support.waiting import PATIENCE_S

SIX = ToolCall("calculator", {"expression": "6*7"})
PHI = '[{"name": "calculator", "arguments": {"expression": "6*7"}}]'
TOKENS_OF_ALL = (
    *DEEPSEEK, "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "<tool_calls>", "</tool_calls>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<assistant>", "</assistant>", "<response>", "</response>",
    "<mm:think>", "</mm:think>", "<tool_call>", "</tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "Ġ</", "</", "think", "Ġthink", "><", ">", "<", ">Ċ", ">ĊĊ", "<ifm|think>",
    "</ifm|think>", "<ifm|think_fast>", "</ifm|think_fast>", "<ifm|think_faster>", "</ifm|think_faster>",
)  # fmt: skip
TOOLS: Mapping[str, Any] = {"calculator": {}}


@pytest.fixture(params=list(OF_VLLM))
def family(request: pytest.FixtureRequest) -> Family:
    return OF_VLLM[request.param]


@pytest.fixture
def tokenizer(family: Family, tmp_path: Path) -> HfTokenizer:
    return family_tokenizer(tmp_path, family)


@pytest.fixture(scope="module")
def any_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("any"), TOKENS_OF_ALL, PLAIN, "<eos>", None)


def parse(tokenizer: HfTokenizer, parsers: Mapping[str, str], *texts: str, prompt: str = "") -> list[Turn]:
    found = make_format(**{"tool_parser": "hermes", **parsers})

    async def run() -> list[Turn]:
        return [await found.parse(tokenizer, text, tokenizer.encode(text), (TOOL,), prompt) for text in texts]

    return asyncio.run(run())


def test_a_conversation_with_tools_keeps_the_tokens_of_the_model(family: Family, tmp_path: Path) -> None:
    check_tools(tmp_path, family)


def test_thoughts_are_in_later_prompts_as_the_template_wants(family: Family, tmp_path: Path) -> None:
    check_second_question(tmp_path, family)


def test_turns_are_parsed_into_thoughts_content_and_calls(family: Family, tokenizer: HfTokenizer) -> None:
    call, answer, both, unicode = parse(
        tokenizer,
        family.parsers,
        family.thinking(family.calling("6*7")),
        family.thinking(family.saying("Zweiundvierzig 😀 ٤٢")),
        family.thinking(family.calling("6*7", "7*6")),
        family.thinking(family.calling("六×七 😀")),
    )
    assert call.calls == (SIX,)
    assert (answer.calls, answer.content.strip()) == ((), "Zweiundvierzig 😀 ٤٢")
    assert both.calls == (SIX, ToolCall("calculator", {"expression": "7*6"}))
    assert len({one.id for one in both.well_formed}) == 2
    assert unicode.calls == (ToolCall("calculator", {"expression": "六×七 😀"}),)
    if family.thinks:
        assert [(turn.reasoning or "").strip() for turn in (call, answer)] == [THOUGHT, THOUGHT]


def test_calls_within_thoughts_are_not_calls(family: Family, tokenizer: HfTokenizer) -> None:
    if not family.thinks:
        return
    thought = f"Perhaps {family.calling('6*7')}?"
    (turn,) = parse(tokenizer, family.parsers, family.thinking(family.saying("No."), thought=thought))
    assert (turn.calls, turn.content.strip()) == ((), "No.")
    assert turn.reasoning is not None
    assert "6*7" in turn.reasoning


def test_a_turn_cut_off_anywhere_makes_no_other_call(family: Family, tokenizer: HfTokenizer) -> None:
    whole = family.thinking(family.calling("6*7"))
    for turn in parse(tokenizer, family.parsers, *(whole[:length] for length in range(len(whole)))):
        assert turn.well_formed in ((), (SIX,)), turn


def test_a_broken_call_is_malformed_where_a_token_shows_it(family: Family, tokenizer: HfTokenizer) -> None:
    broken = (family.thinking(text) for text in (family.calling("6*7")[:-25], family.calling('"')))
    cut, quote = parse(tokenizer, family.parsers, *broken)
    assert cut.well_formed == ()
    assert quote.well_formed in ((), (ToolCall("calculator", {"expression": '"'}),))  # not all families write JSON
    assert [type(call) for call in cut.calls] == [Malformed]


def test_random_text_is_parsed(family: Family, tokenizer: HfTokenizer) -> None:
    rng = random.Random(0)
    pieces = [*family.tokens, family.calling("6*7"), THOUGHT, "{", "}", "[", '"', ":", "\n", "😀", "\0"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(1, 30))) for _ in range(100)]
    for turn in parse(tokenizer, family.parsers, *texts):
        assert all(isinstance(call, ToolCall | Malformed) for call in turn.calls)


def test_an_unknown_tool_and_a_broken_call_are_answered(family: Family, tokenizer: HfTokenizer) -> None:
    abacus = family.thinking(family.calling("6*7").replace("calculator", "abacus"))
    turns = [(abacus, True), *tool_turns(family)]
    sample, model = sample_of(tokenizer, family, turns, "tools", tools=TOOLS)
    assert (sample.status, sample.error) == (SampleStatus.COMPLETED, None)
    check_exact(tokenizer, sample, model)
    answers = [one["content"] for one in sample.extra["messages"] if one["role"] != "assistant"]
    assert answers[0].startswith("error: ")
    assert answers[1:] == ["42", "42"]


def test_a_turn_that_reaches_max_tokens_in_its_thoughts_ends_the_sample(tokenizer: HfTokenizer, family: Family) -> None:
    text = family.thinks.partition("THOUGHT")[0] + "Let me see " * 20
    loop = make_loop("tools", {"tools": TOOLS, **family.parsers})
    sample = converse(loop, Model(tokenizer, [text]), max_tokens=100, max_prompt_tokens=10_000)
    assert (sample.finish_reason, len(sample.segments)) == (FinishReason.LENGTH, 1)


def test_a_malformed_call_is_answered_and_the_model_tries_again(tmp_path: Path) -> None:
    for name, family in OF_VLLM.items():
        tokenizer = family_tokenizer(tmp_path, family)
        turns = [(family.thinking(family.calling('"')), True), *tool_turns(family)]
        sample, model = sample_of(tokenizer, family, turns, "tools", tools=TOOLS)
        assert (sample.status, sample.error) == (SampleStatus.COMPLETED, None), name
        check_exact(tokenizer, sample, model)
        assert sample.extra["messages"][1]["content"].startswith("error: "), name


def test_the_calls_of_phi_are_kept_as_text_where_the_template_ignores_calls(tmp_path: Path) -> None:
    phi = Family("", {"tool_parser": "phi4_mini_json"}, ("<|tool_call|>", "<eos>"), "<eos>", call="")
    tokenizer = tokenizer_with(tmp_path, phi.tokens, PLAIN, phi.end, None)
    turns = [(f"functools{PHI}", True), ("It is 42", False)]
    sample, model = sample_of(tokenizer, phi, turns, "tools", tools=TOOLS)
    check_exact(tokenizer, sample, model)
    assert (sample.text, len(sample.segments)) == ("It is 42", 1)


CANNOT = {
    "tool_parser": {"cohere_command3", "cohere_command4", "dots", "hf", "openai"},
    "reasoning_parser": {"cohere_command3", "cohere_command4", "hf", "openai_gptoss"},
}
"""Parsers of vLLM that cannot be called: a package or metadata is missing, they parse for its server alone, or, as
`dots`, they are refused."""


@pytest.mark.parametrize("setting", CANNOT)
def test_all_other_parsers_of_vllm_can_be_called(setting: str, any_tokenizer: HfTokenizer) -> None:
    refused = {}
    for name in known_parsers(setting):
        try:
            make_format(**{"tool_parser": "", setting: name}).check(any_tokenizer)
        except ConfigError as error:
            refused[name] = str(error)
        else:
            (turn,) = parse(any_tokenizer, {setting: name}, "Hello")
            assert "Hello" in (turn.content, (turn.reasoning or "").strip()), name
    assert refused.keys() == CANNOT[setting], refused
    assert all(f"agent_options.{setting} {name!r}" in message for name, message in refused.items())


def test_names_that_do_not_exist_are_refused_with_those_that_do() -> None:
    ours = "use auto or one of hermes, .*, or one of vLLM's: .*kimi_k2"
    for setting, some in (("tool_parser", ours), ("reasoning_parser", "qwen3")):
        with pytest.raises(ConfigError, match=rf"agent_options.{setting} 'nothing' does not exist: .*{some}"):
            make_loop("tools", {"tools": TOOLS, setting: "nothing"})


def test_a_tokenizer_that_lacks_the_tokens_is_refused(tmp_path: Path) -> None:
    loop = make_loop("tools", {"tools": TOOLS, "tool_parser": "jamba"})
    with pytest.raises(ConfigError, match=r"tool_parser 'jamba' cannot be used with this tokenizer: .*token"):
        check_loop(loop, tokenizer_with(tmp_path, ("<eos>",), PLAIN, "<eos>", None))
    with pytest.raises(ConfigError, match="it is not a Hugging Face tokenizer"):
        check_loop(loop, ByteTokenizer())


def test_a_parser_that_fails_or_hangs_makes_a_malformed_call(
    any_tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Turn:
        raise SystemExit(4)

    monkeypatch.setattr(vllm_parsers, "_parse", fail)
    (turn,) = parse(any_tokenizer, {"tool_parser": "phi4_mini_json"}, "Hello")
    assert turn == Turn("Hello", "Hello", calls=turn.calls)
    assert "SystemExit" in str(turn.calls)
    monkeypatch.setattr(vllm_parsers, "_parse", lambda *args: time.sleep(PATIENCE_S))
    monkeypatch.setattr(vllm_parsers, "PARSE_TIMEOUT_S", 0.1)
    (turn,) = parse(any_tokenizer, {"tool_parser": "phi4_mini_json"}, "Hello")
    assert "took longer than 0.1 s" in str(turn.calls)


def test_an_expression_that_backtracks_leaves_the_event_loop_alone(
    any_tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_parsers, "UNBOUNDED", {})
    monkeypatch.setattr(vllm_parsers, "PARSE_TIMEOUT_S", 1.0)
    dots = VllmFormat.load("dots", "", instead="")

    async def run() -> tuple[Turn, int]:
        ticks = 0
        parsing = asyncio.ensure_future(dots.parse(any_tokenizer, "<dots_function_call>" + " " * 700, [], (TOOL,), ""))
        while not parsing.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return parsing.result(), ticks

    turn, ticks = asyncio.run(run())
    assert ticks > 10
    assert turn.text.startswith("<dots_function_call>")
