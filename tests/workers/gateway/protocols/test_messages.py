"""Messages with Anthropic's SDK, against a real server."""

from typing import TYPE_CHECKING, Any

import pytest

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.gateway.calls import Answer, Call, CallRefused, context_full
from rollq.workers.gateway.protocols import messages
from support.canned_gateway import CannedGateway, canned

if TYPE_CHECKING:  # takes seconds to import, in every test process
    from anthropic import Anthropic

TOOL: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
DEFINITION = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALLS = (ToolCall("add", {"a": 1}, "x", '{"a": 1}'), ToolCall("add", {"b": [2.5, "é"]}, "y", '{"b": [2.5, "é"]}'))
USER: Any = {"role": "user", "content": "1 + 1?"}


def client(server: CannedGateway) -> "Anthropic":
    from anthropic import Anthropic

    return Anthropic(base_url=server.url, auth_token="key")


def ask(server: CannedGateway, **options: Any) -> Any:
    options = {"model": "policy", "max_tokens": 100, "messages": [USER], **options}
    with client(server) as sdk:
        return sdk.messages.create(**options)


def streamed(server: CannedGateway, **options: Any) -> Any:
    """The message that the SDK puts together from a stream."""
    options = {"model": "policy", "max_tokens": 100, "messages": [USER], **options}
    with client(server) as sdk, sdk.messages.stream(**options) as stream:
        return stream.get_final_message()


def parse(**body: Any) -> Call:
    return messages.parse({"model": "policy", "max_tokens": 100, "messages": [USER], **body}, {})


@pytest.mark.parametrize("way", [ask, streamed])
def test_the_sdk_reads_text_and_thoughts(way: Any) -> None:
    with CannedGateway(canned("It is 2.", reasoning="1 + 1 …")) as server:
        message = way(server)
    thought, said = message.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "1 + 1 …", "answer-0")
    assert (said.type, said.text) == ("text", "It is 2.")
    assert (message.id, message.model, message.role, message.type) == ("msg_0", "policy", "assistant", "message")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 7)
    assert server.calls[0].stream == (way is streamed)
    assert server.calls[0].max_tokens == 100


@pytest.mark.parametrize("way", [ask, streamed])
def test_the_sdk_reads_tool_calls(way: Any) -> None:
    with CannedGateway(canned("", *CALLS)) as server:
        message = way(server, tools=[TOOL])
    assert message.stop_reason == "tool_use"
    assert [(block.type, block.id, block.name, block.input) for block in message.content] == [
        ("tool_use", "call00000", "add", {"a": 1}),
        ("tool_use", "call00001", "add", {"b": [2.5, "é"]}),
    ]
    assert server.calls[0].tools == (DEFINITION,)


@pytest.mark.parametrize("way", [ask, streamed])
@pytest.mark.parametrize(
    ("answer", "reason", "stop"),
    [
        (canned("2", finish_reason=FinishReason.LENGTH), "max_tokens", None),
        (canned("2", stop_text="\n"), "stop_sequence", "\n"),
        (canned(""), "end_turn", None),
        (canned("", *CALLS, finish_reason=FinishReason.STOP), "tool_use", None),
        (canned("", *CALLS, finish_reason=FinishReason.LENGTH), "max_tokens", None),
    ],
)
def test_the_sdk_learns_why_an_answer_ended(way: Any, answer: Answer, reason: str, stop: str | None) -> None:
    with CannedGateway(answer) as server:
        message = way(server)
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)


@pytest.mark.parametrize("reasoning", [None, "", "Add\nthem. é"])
@pytest.mark.parametrize("way", [ask, streamed])
def test_what_the_sdk_sends_back_is_what_it_was_given(way: Any, reasoning: str | None) -> None:
    with CannedGateway(canned("Adding.", *CALLS, reasoning=reasoning), canned("2")) as server:
        said = way(server, tools=[TOOL]).content
        results = [
            {"type": "tool_result", "tool_use_id": "call00000", "content": "2"},
            {"type": "tool_result", "tool_use_id": "call00001", "content": [{"type": "text", "text": "5"}]},
            {"type": "text", "text": "Go."},
        ]
        ask(server, messages=[USER, {"role": "assistant", "content": said}, {"role": "user", "content": results}])
    turn, *rest = server.calls[1].messages[1:]
    assert turn.get("reasoning_content") == reasoning
    assert turn["content"] == "Adding."
    assert turn["tool_calls"] == [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"b":[2.5,"é"]}'}},
    ]
    assert rest == [
        {"role": "tool", "content": "2", "tool_call_id": "call00000", "name": "add"},
        {"role": "tool", "content": "5", "tool_call_id": "call00001", "name": "add"},
        {"role": "user", "content": "Go."},
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
    import anthropic

    with CannedGateway(*[refused] * 3) as server, pytest.raises(getattr(anthropic, kind)) as raised:
        ask(server)
    problem = raised.value.body["error"]
    assert (problem["message"], problem["code"]) == (refused.message, refused.code)
    assert [call.repeats for call in server.calls] == list(range(asked))


def test_a_full_context_is_put_in_the_words_that_clients_look_for() -> None:
    assert messages.error(context_full(5000, 4096))["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 5000 tokens > 4096 maximum",
        "code": "context_full",
    }


def test_a_stream_that_breaks_down_raises() -> None:
    import anthropic

    broken = CallRefused("over", status=200, code="session_over")
    with CannedGateway(broken) as server, pytest.raises(anthropic.APIStatusError, match="over"):
        streamed(server)


def test_the_sdk_counts_tokens() -> None:
    with CannedGateway() as server, client(server) as sdk:
        assert sdk.messages.count_tokens(model="policy", messages=[USER], system="Add.", tools=[TOOL]).input_tokens == 2
    assert server.calls[0].messages == ({"role": "system", "content": "Add."}, USER)
    assert server.calls[0].tools == (DEFINITION,)


def test_system_texts_come_first_and_in_the_middle() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"}
    block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    call = parse(
        system=[billing, block, block],
        messages=[USER, {"role": "system", "content": "So."}, {"role": "system", "content": [block]}, USER],
    )
    assert call.messages == (
        {"role": "system", "content": "Be brief.\nBe brief."},
        USER,
        {"role": "system", "content": "So."},
        {"role": "system", "content": "Be brief."},
        USER,
    )
    assert parse(system=[billing]).messages == parse(system="").messages == (USER,)


def test_results_of_tools_and_texts_keep_their_order() -> None:
    def result(id: str, content: Any, **others: Any) -> Any:
        return {"type": "tool_result", "tool_use_id": id, "content": content, **others}

    text = {"type": "text", "text": "a"}
    image = {"type": "image", "source": {}}
    call = parse(
        messages=[
            {
                "role": "user",
                "content": [text, text, result("1", None, is_error=True), text, result("2", [text, image])],
            }
        ]
    )
    assert call.messages == (
        {"role": "user", "content": "a\na"},
        {"role": "tool", "content": "Error", "tool_call_id": "1"},
        {"role": "user", "content": "a"},
        {"role": "tool", "content": "a\n(This model cannot read what is here.)", "tool_call_id": "2"},
    )
    assert call.ignored == ("messages.image",)


def test_thoughts_that_cannot_be_read_are_left_out() -> None:
    blocks = [{"type": "redacted_thinking", "data": "?"}, {"type": "text", "text": "2"}, {"type": "text", "text": "."}]
    call = parse(messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert call.messages[1] == {"role": "assistant", "content": "2."}
    assert call.ignored == ("messages.redacted_thinking",)


def test_what_has_no_effect_is_named_if_it_is_set() -> None:
    call = parse(
        temperature=0.0, top_p=None, thinking={"type": "adaptive"}, metadata={"user_id": "me"}, stop_sequences=["a"],
        tools=[{"type": "web_search_20250305", "name": "web_search"}, {"type": "custom", **TOOL}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert call.ignored == (
        "temperature", "thinking", "tools.web_search_20250305", "tool_choice", "tool_choice.disable_parallel_tool_use",
    )  # fmt: skip
    assert (call.stop, call.tools, call.tool_choice) == (("a",), (DEFINITION,), "auto")


def test_the_choice_of_tools_is_kept_unless_it_names_one() -> None:
    choices = [parse(tool_choice={"type": kind}).tool_choice for kind in ("auto", "any", "none")]
    assert choices == ["auto", "required", "none"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "tool", "content": "2"}]}, r"messages\[0\].role must be user, assistant or system"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "must not end with the assistant's"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
            r"messages\[0\].content\[1\] is image",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, USER]}, "is server_tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be a string"),
        ({"system": [{"type": "text"}]}, r"system\[0\].text must be a string, not null"),
        ({"system": 3}, "system must be a list"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer"),
        ({"tools": [{"description": "no name"}]}, r"tools\[0\].name must be a string"),
        ({"tools": [{"name": "add", "input_schema": "no"}]}, r"parameters of tools\[0\] must be an object"),
        ({"tool_choice": "auto"}, "tool_choice must be an object"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type must be one of"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(CallRefused, match=problem) as refused:
        parse(**body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")


def test_an_input_that_no_json_can_hold_is_refused() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    for input in (deep, {"a": "\ud800"}):
        turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": input}]}
        with pytest.raises(CallRefused, match=r"messages\[0\].content\[0\].input cannot be written as JSON"):
            parse(messages=[turn, USER])
