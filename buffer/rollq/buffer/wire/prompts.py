"""One prompt as JSON, the form in which Redis keeps it and people can read it there."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from rollq.buffer.errors import CorruptFrame, InvalidPrompt
from rollq.buffer.rollouts import Prompt

MAX_ID = (1 << 31) - 1
"""Token ids are int32."""

_FIELDS = {"content", "answer", "ids", "metadata"}


def encode_prompt(prompt: Prompt) -> bytes:
    """Return a prompt as JSON. Numpy scalars and arrays in `answer` and `metadata` become plain numbers and lists.

    Raises `InvalidPrompt`, naming the field, for a prompt that asks nothing or that JSON cannot hold.
    """
    problem = _problem(prompt)
    if problem is not None:
        raise InvalidPrompt(problem)
    fields = {
        "content": prompt.content if isinstance(prompt.content, str) else [dict(message) for message in prompt.content],
        "answer": prompt.answer,
        "ids": prompt.ids,
        "metadata": dict(prompt.metadata),
    }
    try:
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidPrompt(f"a field of the prompt cannot be written as JSON: {error}") from None


def decode_prompt(data: bytes) -> Prompt:
    """Return the prompt of `encode_prompt`'s bytes. Raises `CorruptFrame` when they are not such a prompt."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptFrame(f"prompt of {len(data)} bytes is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise CorruptFrame(f"prompt of {len(data)} bytes is not an object with the fields {sorted(_FIELDS)}")
    content, ids = fields["content"], fields["ids"]
    prompt = Prompt(
        content=tuple(content) if isinstance(content, list) else content,
        answer=fields["answer"],
        ids=tuple(ids) if isinstance(ids, list) else ids,
        metadata=fields["metadata"],
    )
    problem = _problem(prompt)
    if problem is not None:
        raise CorruptFrame(f"prompt of {len(data)} bytes: {problem}")
    return prompt


def _problem(prompt: Prompt) -> str | None:
    """Return what is wrong with a prompt's fields, or None."""
    content: Any = prompt.content
    ids: Any = prompt.ids
    if not isinstance(content, str | tuple):
        return f"content is {type(content).__name__}, a text or a tuple of chat messages is needed"
    if isinstance(content, tuple):
        messages: tuple[Any, ...] = content
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                return f'content[{index}] is {message!r:.80}, a message {{"role": ..., "content": ...}} is needed'
    if ids is not None:
        if not isinstance(ids, tuple) or not ids:
            return f"ids is {ids!r:.80}, a tuple of token ids or None is needed"
        if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, ids))):
            return "ids holds something else than integers"
        if min(ids) < 0 or max(ids) > MAX_ID:
            return f"ids go from {min(ids)} to {max(ids)}, token ids go from 0 to {MAX_ID}"
    elif not content:
        return "content is empty, and there are no ids: nothing is asked"
    metadata: Any = prompt.metadata
    if not isinstance(metadata, Mapping):
        return f"metadata is {type(metadata).__name__}, a mapping is needed"
    return None
