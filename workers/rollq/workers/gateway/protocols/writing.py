"""Parts of answers and errors that several protocols share. Pure."""

from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.gateway.calls import CONTEXT_FULL, Answer, CallRefused

DONE: Final = b"data: [DONE]\n\n"
"""The end of a completion stream."""

_KINDS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def event(data: Any, kind: str | None = None) -> bytes:
    """A server-sent event with or without a type."""
    head = b"" if kind is None else b"event: %b\n" % kind.encode()
    return b"%bdata: %b\n\n" % (head, exact_json.dumps(data))


def arguments_of(call: ToolCall) -> str:
    """A call's arguments as the JSON that the model wrote."""
    return call.raw_arguments or exact_json.dumps(call.arguments).decode()


def openai_finish(answer: Answer) -> str:
    """The finish reason of an answer, in the words of completions."""
    if answer.finish_reason == FinishReason.LENGTH:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def openai_usage(answer: Answer) -> dict[str, Any]:
    """An answer's token counts, in the form of completions."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.response_tokens,
        "total_tokens": answer.prompt_tokens + answer.response_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


def openai_error(refused: CallRefused) -> dict[str, Any]:
    """An error's body in OpenAI's form."""
    kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    code = "context_length_exceeded" if refused.code == CONTEXT_FULL else refused.code
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": code}}
