"""OpenAI's completions, `POST /v1/completions`: a string or token ids that the model continues. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.gateway.calls import Answer, Call, CallRefused
from rollq.workers.gateway.protocols import fields
from rollq.workers.gateway.protocols.writing import DONE, event, openai_error, openai_usage

SERVED: Final = frozenset(("model", "prompt", "max_tokens", "stop", "stream"))
WITHOUT_EFFECT: Final = frozenset(("stream_options", "n", "best_of", "user"))
"""Fields that do not affect the answer."""
REFUSED: Final = {
    "echo": "the answer does not repeat the prompt",
    "suffix": "this model continues texts, and does not fill them in",
}
LARGEST_ID: Final = 2**31 - 1


def parse(body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
    """See `CallProtocol.parse`."""
    body = fields.mapping(body, "the body")
    fields.absent(body, REFUSED)
    fields.one_answer(body, "n")
    fields.one_answer(body, "best_of")
    fields.wants_usage(body)
    text, ids = _prompt(body.get("prompt"))
    return Call(
        model=fields.nonempty(body.get("model"), "model"),
        text=text,
        ids=ids,
        max_tokens=fields.count(body.get("max_tokens"), "max_tokens"),
        stop=fields.texts(body.get("stop"), "stop"),
        stream=fields.flag(body.get("stream"), "stream"),
        repeats=fields.repeats(headers),
        ignored=fields.unused(body, SERVED | WITHOUT_EFFECT, {}),
    )


def answer(call: Call, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """See `CallProtocol.answer`."""
    return {**_chunk(call, answer, answer.content, _finish(answer)), "usage": openai_usage(answer)}


def events(call: Call, body: Mapping[str, Any], answer: Answer) -> Iterator[bytes]:
    """See `CallProtocol.events`."""
    with_usage = fields.wants_usage(body)
    chunk = _chunk(call, answer, answer.content, _finish(answer))
    yield event({**chunk, "usage": None} if with_usage else chunk)
    if with_usage:
        yield event({**chunk, "choices": [], "usage": openai_usage(answer)})
    yield DONE


def error(refused: CallRefused) -> dict[str, Any]:
    """See `CallProtocol.error`."""
    return openai_error(refused)


def error_events(call: Call, refused: CallRefused) -> Iterator[bytes]:
    """See `CallProtocol.error_events`."""
    yield event(openai_error(refused))


def _chunk(call: Call, answer: Answer, text: str, finish: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.number}",
        "object": "text_completion",
        "created": answer.created_s,
        "model": call.model,
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}],
    }


def _finish(answer: Answer) -> str:
    return "length" if answer.finish_reason == FinishReason.LENGTH else "stop"


def _prompt(prompt: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """Return a string or token ids. A list of one prompt counts as the prompt."""
    if isinstance(prompt, str):
        return fields.text(prompt, "prompt"), None
    entries = fields.items(prompt, "prompt")
    if not entries:
        raise CallRefused("prompt must not be empty")
    if not isinstance(entries[0], int):
        if len(entries) > 1:
            raise CallRefused("prompt must be one prompt: ask for one answer at a time")
        if isinstance(entries[0], str):
            return fields.text(entries[0], "prompt[0]"), None
        entries = fields.items(entries[0], "prompt[0]")
    if not entries or not all(map(_is_token_id, entries)):
        raise CallRefused("prompt must be a string or a list of token ids")
    return None, tuple(entries)


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_ID
