"""Chat completions with OpenAI's SDK, against a real server."""

from typing import TYPE_CHECKING, Any

import pytest

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.gateway.calls import Answer, Call, CallRefused, context_full
from rollq.workers.gateway.protocols import chat
from support.canned_gateway import CREATED_S, CannedGateway, canned

if TYPE_CHECKING:  # takes seconds to import, in every test process
    from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALLS = (ToolCall("add", {"a": 1}, "x", '{"a":1}'), ToolCall("add", {"b": [2]}, "y", '{"b": [2]}'))
USER: Any = {"role": "user", "content": "1 + 1?"}


def client(server: CannedGateway, **options: Any) -> "OpenAI":
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="key", **options)


def ask(server: CannedGateway, **options: Any) -> Any:
    with client(server) as sdk:
        return sdk.chat.completions.create(model="policy", messages=[USER], **options)


def streamed(server: CannedGateway, **options: Any) -> Any:
    """The completion that the SDK puts together from a stream."""
    with client(server) as sdk, sdk.chat.completions.stream(model="policy", messages=[USER], **options) as stream:
        stream.until_done()
        return stream.get_final_completion()


def parse(**body: Any) -> Call:
    return chat.parse({"model": "policy", "messages": [USER], **body}, {})


@pytest.mark.parametrize("way", [ask, streamed])
def test_the_sdk_reads_text_and_thoughts(way: Any) -> None:
    with CannedGateway(canned("It is 2.", reasoning="1 + 1 …")) as server:
        completion = way(server)
    message = completion.choices[0].message
    assert (message.role, message.content, message.reasoning_content) == ("assistant", "It is 2.", "1 + 1 …")
    assert (completion.id, completion.model, completion.created) == ("chatcmpl-0", "policy", CREATED_S)
    assert completion.choices[0].finish_reason == "stop"
    assert server.calls[0].stream == (way is streamed)


@pytest.mark.parametrize("way", [ask, streamed])
def test_the_sdk_reads_tool_calls(way: Any) -> None:
    with CannedGateway(canned("", *CALLS)) as server:
        completion = way(server, tools=[TOOL])
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [
        (call.id, call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls
    ] == [
        ("call00000", "function", "add", '{"a":1}'),
        ("call00001", "function", "add", '{"b": [2]}'),
    ]
    assert server.calls[0].tools == (TOOL,)


def test_the_usage_is_true_and_streamed_only_when_asked_for() -> None:
    with CannedGateway(*[canned("2", reasoning="so")] * 3) as server:
        usage = ask(server).usage
        assert streamed(server, stream_options={"include_usage": True}).usage == usage
        assert streamed(server).usage is None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 7, 18)
    assert usage.completion_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize(
    ("answer", "finish"),
    [
        (canned("2", finish_reason=FinishReason.LENGTH), "length"),
        (canned("2", stop_text="\n"), "stop"),
        (canned("", *CALLS, finish_reason=FinishReason.STOP), "tool_calls"),
        (canned("", *CALLS, finish_reason=FinishReason.LENGTH), "length"),
    ],
)
def test_the_sdk_learns_why_an_answer_ended(answer: Answer, finish: str) -> None:
    with CannedGateway(answer) as server:
        assert ask(server).choices[0].finish_reason == finish


@pytest.mark.parametrize("reasoning", [None, "", "Add\nthem. é"])
@pytest.mark.parametrize("way", [ask, streamed])
def test_what_the_sdk_sends_back_is_what_it_was_given(way: Any, reasoning: str | None) -> None:
    with CannedGateway(canned("Adding.", *CALLS, reasoning=reasoning), canned("2")) as server:
        message = way(server, tools=[TOOL]).choices[0].message
        results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
        with client(server) as sdk:
            sdk.chat.completions.create(model="policy", messages=[USER, message, *results])
    said, *answers = server.calls[1].messages[1:]
    assert said.get("reasoning_content") == reasoning
    assert said["content"] == "Adding."
    assert [call["id"] for call in said["tool_calls"]] == ["call00000", "call00001"]
    assert [call["function"] for call in said["tool_calls"]] == [
        {"name": "add", "arguments": '{"a":1}'},
        {"name": "add", "arguments": '{"b": [2]}'},
    ]
    assert answers == [
        {"role": "tool", "content": "2", "tool_call_id": f"call0000{index}", "name": "add"} for index in (0, 1)
    ]


@pytest.mark.parametrize(
    ("refused", "kind", "asked"),
    [
        (CallRefused("no", code="session_over"), "BadRequestError", 1),
        (context_full(5000, 4096), "BadRequestError", 1),
        (CallRefused("who?", status=401, code="no_session"), "AuthenticationError", 1),
        (CallRefused("wait", status=429, code="busy"), "RateLimitError", 3),
        (CallRefused("wait", status=503, code="starting"), "InternalServerError", 3),
    ],
)
def test_errors_are_the_sdks(refused: CallRefused, kind: str, asked: int) -> None:
    import openai

    with CannedGateway(*[refused] * 3) as server, pytest.raises(getattr(openai, kind)) as raised:
        ask(server)
    assert raised.value.body["message"] == refused.message
    assert raised.value.code == ("context_length_exceeded" if "too long" in refused.message else refused.code)
    assert [call.repeats for call in server.calls] == list(range(asked))


def test_a_stream_that_breaks_down_raises() -> None:
    import openai

    broken = CallRefused("over", status=200, code="session_over")
    with CannedGateway(broken) as server, client(server) as sdk, pytest.raises(openai.APIError, match="over"):
        list(sdk.chat.completions.create(model="policy", messages=[USER], stream=True))


def test_all_forms_of_content_are_texts() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse(
        messages=[
            {"role": "developer", "content": blocks},
            {"role": "user", "content": blocks, "name": "Ann"},
            {"role": "assistant", "content": [*blocks, {"type": "refusal", "refusal": "no"}], "reasoning": "so"},
            {"role": "system", "content": "again"},
            {"role": "assistant", "content": None, "tool_calls": [tool_call("c", "add", "")]},
            {"role": "tool", "tool_call_id": "c", "content": blocks},
            {"role": "tool", "tool_call_id": "unknown", "content": ""},
        ]
    )
    assert call.messages == (
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "abno", "reasoning_content": "so"},
        {"role": "system", "content": "again"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call("c", "add", "{}")]},
        {"role": "tool", "content": "a\nb", "tool_call_id": "c", "name": "add"},
        {"role": "tool", "content": "", "tool_call_id": "unknown"},
    )


def tool_call(id: str, name: str, arguments: str) -> Any:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_what_has_no_effect_is_named_if_it_is_set() -> None:
    call = parse(
        temperature=0, top_p=None, seed=3, logprobs=False, logit_bias={}, n=1, user="me", stop=["a", "b"],
        max_tokens=5, max_completion_tokens=4, parallel_tool_calls=False, modalities=["text"], metadata={"a": "b"},
        response_format={"type": "json_object"}, tool_choice={"type": "function", "function": {"name": "add"}},
        tools=[{"type": "custom", "custom": {"name": "x"}}, TOOL],
    )  # fmt: skip
    assert call.ignored == (
        "temperature",
        "seed",
        "parallel_tool_calls",
        "response_format",
        "tools.custom",
        "tool_choice",
    )
    assert (call.stop, call.max_tokens, call.tools, call.tool_choice) == (("a", "b"), 4, (TOOL,), "auto")


def test_a_limit_that_no_answer_reaches_stays_a_number_of_32_bits() -> None:
    assert parse(max_tokens=10**400).max_tokens == 2**31 - 1


def test_the_choice_of_tools_is_kept_unless_it_names_one() -> None:
    assert [parse(tool_choice=choice).tool_choice for choice in ("none", "required", "auto", None)] == [
        "none", "required", "auto", "auto",
    ]  # fmt: skip


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_an_image_in_a_tools_result_is_replaced() -> None:
    call = parse(messages=[USER, {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}])
    assert call.messages[1]["content"] == "(This model cannot read what is here.)"
    assert call.ignored == ("messages.image_url",)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"messages": None}, "messages must not be empty"),
        ({"messages": {}}, "messages must be a list, not an object"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object, not a string"),
        ({"messages": [{"role": "bot", "content": "hi"}]}, r"messages\[0\].role must be"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content must be a list"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\[0\].content\[0\] is image_url"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"messages\[0\].content has half of a surrogate pair"),
        ({"messages": [{"role": "tool", "content": "2"}]}, r"messages\[0\].tool_call_id must be a string, not null"),
        ({"model": ""}, "model must not be empty"),
        ({"model": None}, "model must be a string"),
        ({"n": 2}, "n must be 1"),
        ({"stream": 1}, "stream must be true or false, not this number"),
        ({"stream_options": []}, "stream_options must be an object"),
        ({"stop": ["a", ""]}, "stop must not have an empty string"),
        ({"stop": [1]}, r"stop\[0\] must be a string"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer"),
        ({"max_tokens": True}, "max_tokens must be a positive integer"),
        ({"max_completion_tokens": 1e30}, "max_completion_tokens must be a positive integer"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function must be an object, not null"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "parameters of tools"),
        ({"tool_choice": "add"}, "tool_choice must be an object"),
        ({"functions": [{"name": "a"}]}, "functions is not supported: define `tools`"),
        ({"audio": {"voice": "x"}}, "audio is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(CallRefused, match=problem) as refused:
        parse(**body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")
