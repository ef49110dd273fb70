"""rollq's chat formats beside the parsers of vLLM with the same names, on the same turns."""

from collections.abc import Mapping

import pytest

from rollq.workers.agents.chat_formats import BUILT_IN
from rollq.workers.agents.tool_calls import ToolCall, parse_arguments
from rollq.workers.agents.vllm_parsers import _backend, _call, _compose
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import PLAIN
from support.chat_families import CHATML, DEEPSEEK, GLM, LLAMA, MISTRAL, THINK, TOOL_CALL, tokenizer_with
from support.exchanges import EXCHANGES, TOOLS, Exchange

REASONING = {
    "hermes": "qwen3", "qwen3_coder": "qwen3", "qwen3_xml": "qwen3", "glm45": "glm45", "glm47": "glm45",
    "deepseek_v3": "deepseek_r1", "deepseek_v31": "deepseek_r1", "mistral": "mistral",
}  # fmt: skip
"""Name of a tool parser -> the reasoning parser that is used with it in vLLM."""
COMPLETED = "vLLM runs a call that was cut off, or that lacks a part, with what there is"
SHOWN = "vLLM shows a call that it cannot read as text, and the turn has no call"
DROPPED = "vLLM drops the text after a call, or around it"
IN_THOUGHTS = "vLLM runs a call within thoughts that are still open"
QWEN3_XML = {
    "opened thoughts that were cut off": IN_THOUGHTS,
    "a function that was cut off": COMPLETED,
    "a parameter that was cut off": COMPLETED,
    "a parameter that is not closed": COMPLETED,
}
GLM_CALLS = {
    "opened thoughts that were cut off": IN_THOUGHTS,
    "an unknown tool": "vLLM ignores calls of unknown tools; rollq answers them",
    "a call that was cut off": COMPLETED,
    "an argument without a value": COMPLETED,
    "a key that is not closed": COMPLETED,
    "text after an argument": COMPLETED,
}
DIFFERENT: Mapping[str, Mapping[str, str]] = {
    "hermes": {
        "thoughts that were cut off": IN_THOUGHTS,
        "opened thoughts that were cut off": IN_THOUGHTS,
        "a call within thoughts": "vLLM's qwen3 ends thoughts at a call, though they are closed later",
        "a call without arguments": SHOWN,
        "a call that was cut off": "vLLM runs none of the calls if the last was cut off",
        "no JSON": SHOWN,
        "JSON that is no object": SHOWN,
    },
    "qwen3_coder": QWEN3_XML,
    "qwen3_xml": QWEN3_XML,
    "glm45": GLM_CALLS,
    "glm47": GLM_CALLS,
    "llama3_json": {
        "text around a call": DROPPED,
        "a tool that Llama knows": SHOWN,
        "code": SHOWN,
        "a call that was cut off": SHOWN,
        "invalid JSON": SHOWN,
    },
    "mistral": {
        "an id": "vLLM takes the id for a part of the name, unless the tokenizer is Mistral's",
        "a mark within an argument": "vLLM looks for marks first and then for JSON",
        "text after a call": DROPPED,
        "thoughts in the first form of Magistral": "vLLM knows their second form alone",
        "thoughts that were cut off": IN_THOUGHTS,
        "a list that was cut off": SHOWN,
        "a name alone": COMPLETED,
        "no JSON": COMPLETED,
        "an empty list": SHOWN,
    },
    "deepseek_v31": {"calls with text around them": DROPPED, "no name": COMPLETED},
}
"""Name of a format -> the exchanges that vLLM's parser reads otherwise, and how."""
CASES = [
    pytest.param(name, shows, id=f"{name}: {shows}")
    for name, exchanges in EXCHANGES.items()
    if name not in ("harmony", "openai")  # it parses token ids, for vLLM's server alone
    for shows in exchanges
]
TOKENS = (*CHATML, *TOOL_CALL, *THINK, *DEEPSEEK, *LLAMA, *MISTRAL, *GLM)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[HfTokenizer, HfTokenizer]:
    """With the tokens of all families, of Mistral's before version 11 and since then."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return (
        tokenizer_with(folder / "older", TOKENS, PLAIN, "<|endoftext|>", None),
        tokenizer_with(
            folder / "newer", (*TOKENS, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"), PLAIN, "<|endoftext|>", None
        ),
    )


def of_vllm(tokenizer: HfTokenizer, name: str, exchange: Exchange) -> tuple[object, str, str]:
    """Calls, content and thoughts that vLLM's parsers find, without space around the texts."""
    thinks = exchange.reasoning is not None
    parser = _compose(name, REASONING.get(name, "") if thinks else "")
    ids = tokenizer.encode(exchange.text)
    reasoning, content, found = _call(parser, _backend(tokenizer), exchange.text, ids, TOOLS)
    calls = [parse_arguments(call.name, call.arguments or "{}", "") for call in found or ()]
    return [call for call in calls if isinstance(call, ToolCall)], (content or "").strip(), (reasoning or "").strip()


@pytest.mark.parametrize(("name", "shows"), CASES)
def test_a_turn_means_the_same_or_is_listed(tokenizers: tuple[HfTokenizer, HfTokenizer], name: str, shows: str) -> None:
    exchange = EXCHANGES[name][shows]
    turn = BUILT_IN[name].parser(exchange.text, TOOLS, exchange.prompt)
    ours = (list(turn.well_formed), turn.content.strip(), (turn.reasoning or "").strip())
    theirs = of_vllm(tokenizers["[TOOL_CALLS][" not in exchange.text.replace(" ", "")], name, exchange)
    assert (theirs == ours) == (shows not in DIFFERENT.get(name, {})), theirs


def test_what_is_listed_exists() -> None:
    assert all(DIFFERENT[name].keys() <= EXCHANGES[name].keys() for name in DIFFERENT)
