"""A request that offers no tools gets no calls, in any protocol: what the model wrote is text."""

from typing import Any

import pytest

from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, call, chat_tokenizer
from support.served_gateway import Served, with_served

SAID = f"I call:\n{call('calculator', expression='6*7')}"
QUESTION = {"messages": [{"role": "user", "content": "6*7?"}]}
TOOL = {"name": "calculator", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chat(answer: dict[str, Any]) -> tuple[Any, ...]:
    (choice,) = answer["choices"]
    return choice["message"]["content"], choice["message"].get("tool_calls"), choice["finish_reason"]


def completion(answer: dict[str, Any]) -> tuple[Any, ...]:
    (choice,) = answer["choices"]
    return choice["text"], None, choice["finish_reason"]


def message(answer: dict[str, Any]) -> tuple[Any, ...]:
    (block,) = answer["content"]
    return block["text"], None, {"end_turn": "stop"}[answer["stop_reason"]]


def response(answer: dict[str, Any]) -> tuple[Any, ...]:
    (item,) = answer["output"]
    return item["content"][0]["text"], None, {"completed": "stop"}[answer["status"]]


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("chat/completions", QUESTION, chat),
        ("chat/completions", {**QUESTION, "tools": []}, chat),
        (
            "chat/completions",
            {**QUESTION, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "none"},
            chat,
        ),
        ("completions", {"prompt": "6*7?"}, completion),
        ("messages", {**QUESTION, "max_tokens": 500}, message),
        ("responses", {"input": "6*7?"}, response),
    ],
)
def test_a_request_without_tools_gets_the_text_as_it_is(
    path: str, body: dict[str, Any], read: Any, tokenizer: HfTokenizer
) -> None:
    async def use(given: Served) -> None:
        status, answer, _ = await given.post(f"/s/{given.token}/v1/{path}", {"model": "m", **body})
        assert status == 200
        assert read(answer) == (SAID, None, "stop")

    with_served(Model(tokenizer, [SAID]), use)
