"""The normal form of calls: equivalent requests have the same digest. Pure.

Clients write the same history differently from call to call: they change ids, reorder argument keys, or leave out
thoughts. The normal form ignores these differences. It represents a recorded answer by its number, even if the client
repeats the answer differently.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import orjson

from rollq.buffer.common import exact_json
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.agents.turns import Turn
from rollq.workers.gateway.calls import Call

DIGEST_BYTES = 16
OPENING = bytes(DIGEST_BYTES)
"""The digest of a history without messages."""


def digest_of(*parts: bytes) -> bytes:
    """A digest of these parts, in order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def after_message(history: bytes, message: Message) -> bytes:
    """The digest of a history after one more message, which is not a recorded answer."""
    calls = [_call_key(call) for call in message.get("tool_calls") or ()]
    fields = [message["role"], message.get("content") or "", message.get("reasoning_content") or "", calls]
    return digest_of(history, b"message", orjson.dumps(fields))


def after_answer(history: bytes, number: int) -> bytes:
    """The digest of a history after the answer to call `number`."""
    return digest_of(history, b"answer", number.to_bytes(8, "little"))


def after_text(text: str | None, ids: Sequence[int] | None) -> bytes:
    """The digest of a completion's history."""
    return digest_of(OPENING, b"text", orjson.dumps([text, ids]))


def request_digest(history: bytes, call: Call) -> bytes:
    """The digest of a whole request: its history, its tools and its parameters."""
    wanted = [call.tools, call.tool_choice, call.max_tokens, call.stop, *([] if call.schema is None else [call.schema])]
    return digest_of(history, b"request", exact_json.dumps(wanted, option=orjson.OPT_SORT_KEYS))


def repeats_turn(message: Message, turn: Turn, stop_text: str | None) -> bool:
    """Whether a client's assistant message repeats this turn of the model, as sent to the client.

    Thoughts may be missing, the stop text may follow, and call arguments are compared as JSON.
    """
    thoughts = message.get("reasoning_content")
    if thoughts and thoughts.strip() != (turn.reasoning or "").strip():
        return False
    given, made = message.get("tool_calls") or (), shown_calls(turn)
    if len(given) != len(made) or not all(map(_repeats_call, given, made)):
        return False
    content, shown = (message.get("content") or "").strip(), shown_content(turn, stop_text)
    return content == shown.strip() or (stop_text is not None and content == (shown + stop_text).strip())


def shown_content(turn: Turn, stop_text: str | None) -> str:
    """A turn's text for a client, up to the stop text; with the text of calls if one cannot be parsed. If the turn
    has calls, the text has no white space around it."""
    content = turn.text if len(turn.well_formed) < len(turn.calls) else turn.content
    if stop_text is not None:
        content = content.partition(stop_text)[0]
    return content.strip() if shown_calls(turn) else content


def shown_calls(turn: Turn) -> Sequence[ToolCall]:
    """A turn's tool calls for a client; empty if a call cannot be parsed."""
    return () if len(turn.well_formed) < len(turn.calls) else turn.well_formed


def canonical_arguments(raw: Any) -> str:
    """A call's arguments as JSON with sorted keys; unchanged if they are not JSON."""
    try:
        value = exact_json.loads(raw) if isinstance(raw, str) else raw
        return exact_json.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except (ValueError, TypeError):
        return str(raw)


def _repeats_call(given: Mapping[str, Any], made: ToolCall) -> bool:
    name, arguments = _call_key(given)
    raw = made.raw_arguments
    return name == made.name and (arguments == canonical_arguments(raw) or arguments == _as_javascript(raw))


def _as_javascript(raw: str) -> str:
    """The canonical form of arguments that a JavaScript client, where all numbers are doubles, has read and written."""
    value = json.loads(raw, parse_int=_double, parse_float=_double)
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _double(number: str) -> int | float:
    value = float(number)
    return int(Decimal(repr(value))) if value.is_integer() and abs(value) < 1e21 else value


def _call_key(call: Mapping[str, Any]) -> list[str]:
    function = call["function"]
    return [function["name"], canonical_arguments(function["arguments"])]
