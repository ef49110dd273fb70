"""Completions with OpenAI's SDK, against a real server."""

from typing import Any

import pytest

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.gateway.calls import Answer, Call, CallRefused
from rollq.workers.gateway.protocols import completions
from support.canned_gateway import CannedGateway, canned


def ask(server: CannedGateway, **options: Any) -> Any:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="key") as sdk:
        completion = sdk.completions.create(**{"model": "policy", "prompt": "1 + 1 =", **options})
        return list(completion) if options.get("stream") else completion


def parse(**body: Any) -> Call:
    return completions.parse({"model": "policy", "prompt": "1 + 1 =", **body}, {})


@pytest.mark.parametrize(
    ("answer", "finish"), [(canned(" 2", finish_reason=FinishReason.LENGTH), "length"), (canned(" 2"), "stop")]
)
def test_the_sdk_reads_a_completion(answer: Answer, finish: str) -> None:
    with CannedGateway(answer) as server:
        completion = ask(server, max_tokens=5, stop="\n")
    assert (completion.id, completion.model) == ("cmpl-0", "policy")
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (" 2", finish)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (11, 7)
    call = server.calls[0]
    assert (call.text, call.ids, call.messages) == ("1 + 1 =", None, ())
    assert (call.max_tokens, call.stop, call.stream) == (5, ("\n",), False)


def test_the_sdk_reads_a_stream() -> None:
    with CannedGateway(canned(" 2"), canned(" 2")) as server:
        (only,) = ask(server, stream=True)
        text, usage = ask(server, stream=True, stream_options={"include_usage": True})
    assert (only.choices[0].text, only.choices[0].finish_reason, only.usage) == (" 2", "stop", None)
    assert (text.choices[0].text, text.usage) == (" 2", None)
    assert (usage.choices, usage.usage.total_tokens) == ([], 18)


def test_errors_are_the_sdks() -> None:
    import openai

    with CannedGateway(CallRefused("no")) as server, pytest.raises(openai.BadRequestError, match="no"):
        ask(server)
    broken = CallRefused("over", status=200)
    with CannedGateway(broken) as server, pytest.raises(openai.APIError, match="over"):
        ask(server, stream=True)


def test_a_prompt_is_a_text_or_ids() -> None:
    assert parse(prompt=["1 + 1 ="]).text == "1 + 1 ="
    assert parse(prompt="").text == ""
    for ids in ([3, 0, 2**31 - 1], [[3, 0, 2**31 - 1]]):
        call = parse(prompt=ids)
        assert (call.text, call.ids) == (None, (3, 0, 2**31 - 1))


def test_what_has_no_effect_is_named_if_it_is_set() -> None:
    assert parse(temperature=0, logprobs=0, echo=False, n=1, best_of=1, user="me").ignored == (
        "temperature",
        "logprobs",
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": None}, "prompt must not be empty"),
        ({"prompt": []}, "prompt must not be empty"),
        ({"prompt": {}}, "prompt must be a list"),
        ({"prompt": ["a", "b"]}, "prompt must be one prompt"),
        ({"prompt": [[1], [2]]}, "prompt must be one prompt"),
        ({"prompt": [[]]}, "prompt must be a string or a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt must be a string or a list of token ids"),
        ({"prompt": [-1]}, "prompt must be a string or a list of token ids"),
        ({"prompt": [True]}, "prompt must be a string or a list of token ids"),
        ({"prompt": [2**31]}, "prompt must be a string or a list of token ids"),
        ({"prompt": [1.5]}, r"prompt\[0\] must be a list"),
        ({"n": 2}, "n must be 1"),
        ({"best_of": 2}, "best_of must be 1"),
        ({"echo": True}, "echo is not supported"),
        ({"suffix": "."}, "suffix is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(CallRefused, match=problem):
        parse(**body)
