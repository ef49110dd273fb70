"""Responses with OpenAI's SDK, against a real server."""

from typing import TYPE_CHECKING, Any

import pytest

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.gateway.calls import Answer, Call, CallRefused, context_full
from rollq.workers.gateway.protocols import responses
from support.canned_gateway import CREATED_S, CannedGateway, canned

if TYPE_CHECKING:  # takes seconds to import, in every test process
    from openai import OpenAI

EMPTY: Any = {"type": "object", "properties": {}}
TOOL: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": EMPTY, "strict": False}
DEFINITION = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": EMPTY}}
CALLS = (ToolCall("add", {"a": 1}, "x", '{"a":1}'), ToolCall("add", {"b": [2]}, "y", '{"b": [2]}'))
USER: Any = {"role": "user", "content": "1 + 1?"}


def client(server: CannedGateway) -> "OpenAI":
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="key")


def ask(server: CannedGateway, **options: Any) -> Any:
    with client(server) as sdk:
        return sdk.responses.create(**{"model": "policy", "input": [USER], **options})


def streamed(server: CannedGateway, **options: Any) -> Any:
    """The response that the SDK puts together from a stream."""
    options = {"model": "policy", "input": [USER], **options}
    with client(server) as sdk, sdk.responses.stream(**options) as stream:
        return stream.get_final_response()


def last_of_stream(server: CannedGateway) -> Any:
    """The response of the last event; the SDK puts together complete ones alone."""
    with client(server) as sdk:
        return list(sdk.responses.create(model="policy", input=[USER], stream=True))[-1].response  # type: ignore[union-attr]


def parse(**body: Any) -> Call:
    return responses.parse({"model": "policy", "input": [USER], **body}, {})


def call_item(id: str, name: str, **others: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": "{}", **others}


def output_item(id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": output}


def tool_call(id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("way", [ask, streamed])
def test_the_sdk_reads_text_and_thoughts(way: Any) -> None:
    with CannedGateway(canned("It is 2.", reasoning="1 + 1 …")) as server:
        response = way(server)
    thought, said = response.output
    assert (thought.type, thought.id, thought.summary[0].text) == ("reasoning", "rs_0", "1 + 1 …")
    assert thought.encrypted_content is None
    assert (said.type, said.id, said.role, said.status) == ("message", "msg_0", "assistant", "completed")
    assert response.output_text == "It is 2."
    assert (response.id, response.model, response.created_at) == ("resp_0", "policy", CREATED_S)
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 7, 18)
    assert usage.output_tokens_details.reasoning_tokens == 3
    assert server.calls[0].stream == (way is streamed)


@pytest.mark.parametrize("way", [ask, streamed])
def test_the_sdk_reads_tool_calls(way: Any) -> None:
    with CannedGateway(canned("", *CALLS)) as server:
        response = way(server, tools=[TOOL])
    assert [(item.type, item.id, item.call_id, item.name, item.arguments) for item in response.output] == [
        ("function_call", "fc_0_0", "call00000", "add", '{"a":1}'),
        ("function_call", "fc_0_1", "call00001", "add", '{"b": [2]}'),
    ]
    assert server.calls[0].tools == (DEFINITION,)


def test_the_events_are_those_of_the_sdk_in_their_order() -> None:
    answer = canned("2", ToolCall("add", {}, "x", "{}"), ToolCall("sh", {"input": "ls"}, "y", ""), reasoning="so")
    custom: Any = {"type": "custom", "name": "sh"}
    with CannedGateway(answer) as server, client(server) as sdk:
        events = list(sdk.responses.create(model="policy", input="1?", tools=[TOOL, custom], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip


@pytest.mark.parametrize("way", [ask, last_of_stream])
@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (canned("2", finish_reason=FinishReason.LENGTH), "incomplete", "max_output_tokens"),
        (canned(""), "completed", None),
        (canned("", *CALLS), "completed", None),
    ],
)
def test_the_sdk_learns_why_an_answer_ended(way: Any, answer: Answer, status: str, reason: str | None) -> None:
    with CannedGateway(answer) as server:
        response = way(server)
    assert response.status == status
    assert response.output[-1].status == status
    assert getattr(response.incomplete_details, "reason", None) == reason


@pytest.mark.parametrize("reasoning", [None, "", "Add\nthem. é"])
@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
@pytest.mark.parametrize("way", [ask, streamed])
def test_what_the_sdk_sends_back_is_what_it_was_given(way: Any, include: Any, reasoning: str | None) -> None:
    with CannedGateway(canned("Adding.", *CALLS, reasoning=reasoning), canned("2")) as server:
        output = way(server, tools=[TOOL], include=include).output
        results = [output_item("call00000", "2"), output_item("call00001", [{"type": "input_text", "text": "5"}])]
        ask(server, input=[USER, *output, *results])
    said, *answers = server.calls[1].messages[1:]
    assert said.get("reasoning_content") == reasoning
    assert said["content"] == "Adding."
    assert said["tool_calls"] == [
        tool_call("call00000", "add", '{"a":1}'),
        tool_call("call00001", "add", '{"b": [2]}'),
    ]
    assert answers == [
        {"role": "tool", "content": "2", "tool_call_id": "call00000", "name": "add"},
        {"role": "tool", "content": "5", "tool_call_id": "call00001", "name": "add"},
    ]


def test_a_thought_comes_back_from_its_encrypted_content_alone() -> None:
    with CannedGateway(canned("2", reasoning="so\n…")) as server:
        thought = ask(server, include=["reasoning.encrypted_content"], store=False).output[0]
    item = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    assert parse(input=[USER, item, USER]).messages[1]["reasoning_content"] == "so\n…"


def test_thoughts_of_other_servers_are_read_if_they_are_texts() -> None:
    other = {"type": "reasoning", "encrypted_content": "gAAAA==", "summary": []}
    summary = {**other, "summary": [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]}
    content = {**summary, "content": [{"type": "reasoning_text", "text": "c"}]}
    assert parse(input=[USER, other, USER]).messages == (USER, USER)
    assert parse(input=[USER, other]).ignored == ("input.reasoning",)
    assert parse(input=[USER, summary, USER]).messages[1]["reasoning_content"] == "a\nb"
    assert parse(input=[USER, content, USER]).messages[1]["reasoning_content"] == "c"


def test_tools_of_namespaces_and_custom_tools_keep_the_callers_names() -> None:
    tools: Any = [
        {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [TOOL]},
        {"type": "custom", "name": "sh", "description": "Run.", "format": {"type": "grammar", "definition": "…"}},
        {"type": "web_search"},
    ]
    calls = (ToolCall("agents__add", {}, "x", "{}"), ToolCall("sh", {"input": "ls"}, "y", ""), ToolCall("sh", {"a": 1}))
    with CannedGateway(canned("", *calls), canned("2")) as server:
        output = ask(server, tools=tools).output
        ask(
            server,
            tools=tools,
            input=[USER, *output, {**output_item("call00001", "a.py"), "type": "custom_tool_call_output"}],
        )
    first, second = server.calls
    assert [tool["function"]["name"] for tool in first.tools] == ["agents__add", "sh"]
    assert first.tools[1]["function"]["parameters"]["required"] == ["input"]
    assert first.ignored == ("tools.custom.format", "tools.web_search")
    assert [(item.type, item.name) for item in output] == [
        ("function_call", "add"), ("custom_tool_call", "sh"), ("custom_tool_call", "sh"),
    ]  # fmt: skip
    assert (output[0].namespace, output[1].input, output[2].input) == ("agents", "ls", '{"a":1}')
    assert second.messages[1]["tool_calls"] == [
        tool_call("call00000", "agents__add"),
        tool_call("call00001", "sh", '{"input":"ls"}'),
        tool_call("call00002", "sh", '{"input":"{\\"a\\":1}"}'),
    ]
    assert second.messages[2]["name"] == "sh"


def test_items_in_the_order_of_an_answer_are_one_message() -> None:
    def thought(text: str) -> Any:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    said: Any = {"role": "assistant", "content": [{"type": "output_text", "text": "s"}]}
    call = parse(
        input=[
            USER, thought("a"), said, call_item("1", "add"), call_item("2", "add"),
            output_item("2", "x"), output_item("1", "y"),
            call_item("3", "add"), said, thought("b"), said, said, USER,
        ]
    )  # fmt: skip
    assert call.messages[1:-1] == (
        {"role": "assistant", "content": "s", "reasoning_content": "a",
         "tool_calls": [tool_call("1", "add"), tool_call("2", "add")]},
        {"role": "tool", "content": "x", "tool_call_id": "2", "name": "add"},
        {"role": "tool", "content": "y", "tool_call_id": "1", "name": "add"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call("3", "add")]},
        {"role": "assistant", "content": "s"},
        {"role": "assistant", "content": "s", "reasoning_content": "b"},
        {"role": "assistant", "content": "s"},
    )  # fmt: skip


def test_a_thought_may_come_back_as_a_message_of_its_text() -> None:
    thought: Any = {"role": "assistant", "content": "<think>\nso\n\n</think>"}
    said: Any = {"role": "assistant", "content": "<think>so</think> 2"}
    assert parse(input=[USER, thought, said, USER]).messages[1:-1] == (
        {"role": "assistant", "content": "<think>so</think> 2", "reasoning_content": "so\n"},
    )


def test_instructions_and_developers_are_the_system() -> None:
    text = {"type": "input_text", "text": "a"}
    call = parse(
        instructions="Be brief.",
        input=[{"type": "message", "role": "developer", "content": [text, text]}, {"role": "system", "content": "b"}],
    )
    assert call.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "a\na"},
        {"role": "system", "content": "b"},
    )
    assert parse(input="1 + 1?").messages == (USER,)


@pytest.mark.parametrize(
    ("refused", "kind", "asked"),
    [
        (CallRefused("no", code="session_over"), "BadRequestError", 1),
        (context_full(5000, 4096), "BadRequestError", 1),
        (CallRefused("wait", status=503, code="starting"), "InternalServerError", 3),
    ],
)
def test_errors_are_the_sdks(refused: CallRefused, kind: str, asked: int) -> None:
    import openai

    with CannedGateway(*[refused] * 3) as server, pytest.raises(getattr(openai, kind)) as raised:
        ask(server)
    assert raised.value.code == (
        "context_length_exceeded" if asked == 1 and "long" in refused.message else refused.code
    )
    assert [call.repeats for call in server.calls] == list(range(asked))


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (CallRefused("over", status=400, code="session_over"), "invalid_prompt"),
        (context_full(5000, 4096), "context_length_exceeded"),
        (CallRefused("over", status=429, code="busy"), "rate_limit_exceeded"),
        (CallRefused("over", status=503, code="starting"), "server_is_overloaded"),
        (CallRefused("over", status=500, code="bug"), "server_error"),
    ],
)
def test_a_stream_that_breaks_down_fails_with_a_code_that_clients_know(refused: CallRefused, code: str) -> None:
    call = parse(stream=True)
    with CannedGateway(b"".join(responses.error_events(call, refused))) as server, client(server) as sdk:
        (event,) = sdk.responses.create(model="policy", input="1?", stream=True)
    assert event.type == "response.failed"
    assert event.response.status == "failed"
    assert event.response.error is not None
    assert (event.response.error.code, event.response.error.message) == (code, refused.message)


def test_what_has_no_effect_is_named_if_it_is_set() -> None:
    call = parse(
        temperature=1.0, top_p=None, reasoning={"effort": "low"}, text={"format": {"type": "text"}}, store=False,
        parallel_tool_calls=True, truncation="auto", max_output_tokens=9, client_metadata={"a": "b"},
        tool_choice={"type": "function", "name": "add"},
    )  # fmt: skip
    assert call.ignored == ("temperature", "reasoning", "truncation", "tool_choice")
    assert (call.max_tokens, call.tool_choice) == (9, "auto")
    assert [parse(tool_choice=choice).tool_choice for choice in ("none", "required", None)] == [
        "none", "required", "auto",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input": []}, "input must not be empty"),
        ({"input": 3}, "input must be a list, not this number"),
        ({"input": [{"type": "item_reference", "id": "rs_0"}]}, r"input\[0\].type item_reference is not supported"),
        (
            {"input": [{"role": "tool", "content": "2"}]},
            r"input\[0\].role must be user, assistant, system or developer",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "is input_image, and this model reads"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, r"input\[0\].name must be a string, not null"),
        ({"input": [{"type": "function_call_output"}]}, r"input\[0\].call_id must be a string"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "text"}]}]}, r"input\[0\].summary\[0\] is text"),
        ({"instructions": 3}, "instructions must be a string"),
        ({"previous_response_id": "resp_0"}, "previous_response_id is not supported: nothing is stored here"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"background": True}, "background is not supported: wait for the answer"),
        ({"include": 3}, "include must be a list"),
        (
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
            r"tools\[0\].tools\[0\].name",
        ),
        ({"max_output_tokens": "9"}, "max_output_tokens must be a positive integer, not a string"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(CallRefused, match=problem) as refused:
        parse(**body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")
