"""One prompt as JSON, the readable form in which Redis keeps it."""

import re
from collections.abc import Mapping

import numpy as np
import orjson

from rollq.buffer.common import exact_json
from rollq.buffer.errors import CorruptFrame, InvalidPrompt
from rollq.buffer.values.rollouts import ImageRef, Prompt

MAX_ID = (1 << 31) - 1
"""Token ids are int32."""

IMAGE_SCHEMES = ("file:///", "https://", "data:;base64,")
SHA256 = re.compile(r"[0-9a-f]{64}")

_FIELDS = {"content", "answer", "ids", "metadata"}
_IMAGE_FIELDS = {"images", "image_options"}  # only of prompts with images
_TOOLS_FIELD = "tools"  # only of prompts with tools
_IMAGE = {"url", "sha256"}


def encode_prompt(prompt: Prompt) -> bytes:
    """Return a prompt as JSON. Numpy scalars and arrays in `answer` and `metadata` become plain numbers and lists.

    Raises `InvalidPrompt`, naming the field, for an empty prompt or a prompt that cannot be written as JSON.
    """
    problem = prompt_problem(prompt)
    if problem is not None:
        raise InvalidPrompt(problem)
    fields = {
        "content": prompt.content if isinstance(prompt.content, str) else [dict(message) for message in prompt.content],
        "answer": prompt.answer,
        "ids": prompt.ids,
        "metadata": dict(prompt.metadata),
    }
    if prompt.images:
        fields["images"] = [{"url": image.url, "sha256": image.sha256} for image in prompt.images]
        fields["image_options"] = dict(prompt.image_options)
    if prompt.tools:
        fields[_TOOLS_FIELD] = [dict(tool) for tool in prompt.tools]
    try:
        return exact_json.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidPrompt(f"a field of the prompt cannot be written as JSON: {error}") from None


def decode_prompt(data: bytes) -> Prompt:
    """Return the prompt that `encode_prompt` wrote. Raises `CorruptFrame` for any other bytes."""
    try:
        fields = exact_json.loads(data)
    except ValueError as error:
        raise CorruptFrame(f"prompt of {len(data)} bytes is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.keys() - {_TOOLS_FIELD} not in (_FIELDS, _FIELDS | _IMAGE_FIELDS):
        raise CorruptFrame(f"prompt of {len(data)} bytes is not an object with the fields {sorted(_FIELDS)}")
    content, ids, images = fields["content"], fields["ids"], fields.get("images", [])
    if not isinstance(images, list) or not all(map(_is_image, images)):
        raise CorruptFrame(f"prompt of {len(data)} bytes: images are not objects with the fields {sorted(_IMAGE)}")
    tools = fields.get(_TOOLS_FIELD, [])
    if not isinstance(tools, list):
        raise CorruptFrame(f"prompt of {len(data)} bytes: tools are not a list")
    prompt = Prompt(
        content=tuple(content) if isinstance(content, list) else content,
        answer=fields["answer"],
        ids=tuple(ids) if isinstance(ids, list) else ids,
        metadata=fields["metadata"],
        images=tuple(ImageRef(**image) for image in images),
        image_options=fields.get("image_options", {}),
        tools=tuple(tools),
    )
    problem = prompt_problem(prompt)
    if problem is not None:
        raise CorruptFrame(f"prompt of {len(data)} bytes: {problem}")
    return prompt


def _is_image(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == _IMAGE


def message_problem(name: str, message: object) -> str | None:
    """Return the problem with the chat message called `name`, or None."""
    if isinstance(message, Mapping) and isinstance(message.get("role"), str):
        return None
    return f"{name} must be an object with a 'role', not {message!r:.80}"


def tools_problem(name: str, tools: object) -> str | None:
    """Return the problem with the tool definitions called `name`, or None."""
    if not isinstance(tools, tuple | list):
        return f"{name} must be a list of tools, not {tools!r:.80}"
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return (
                f'{name}[{number}] must be an object like {{"type": "function", "function": {{"name": ...}}}}, '
                f"not {tool!r:.80}"
            )
    return None


def ids_problem(name: str, ids: object) -> str | None:
    """Return the problem with the prompt's token ids called `name`, or None."""
    if not isinstance(ids, tuple | list) or not ids:
        return f"{name} must be a list of token ids, not {ids!r:.80}"
    if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, ids))):
        return f"{name} contains values that are not integers"
    if min(ids) < 0 or max(ids) > MAX_ID:
        return f"{name} range from {min(ids)} to {max(ids)}; token ids range from 0 to {MAX_ID}"
    return None


def prompt_problem(prompt: Prompt) -> str | None:
    """Return the problem with a prompt's fields, or None."""
    metadata: object = prompt.metadata
    if not isinstance(metadata, Mapping):
        return f"metadata must be a mapping, not {type(metadata).__name__}"
    if problem := _images_problem(prompt) or tools_problem("tools", prompt.tools):
        return problem
    if prompt.ids is None:
        return _content_problem(prompt.content) or (None if prompt.content else "both content and ids are empty")
    ids: object = prompt.ids
    if not isinstance(ids, tuple):
        return f"ids must be a tuple of token ids, not {ids!r:.80}"
    return _content_problem(prompt.content) or ids_problem("ids", ids)


def _content_problem(content: object) -> str | None:
    if not isinstance(content, str | tuple):
        return f"content must be a string or a tuple of chat messages, not {type(content).__name__}"
    if isinstance(content, str):
        return None
    problems = (message_problem(f"content[{index}]", message) for index, message in enumerate(content))
    return next((problem for problem in problems if problem), None)


def _images_problem(prompt: Prompt) -> str | None:
    for number, image in enumerate(prompt.images):
        url: object = image.url
        if not isinstance(url, str) or not url.startswith(IMAGE_SCHEMES):
            return f"images[{number}]: the URL must begin with one of {', '.join(IMAGE_SCHEMES)}, not {url!r:.80}"
        digest: object = image.sha256
        if not isinstance(digest, str) or SHA256.fullmatch(digest) is None:
            return f"images[{number}]: sha256 must be 64 hex digits, not {digest!r:.80}"
    options: object = prompt.image_options
    return None if isinstance(options, Mapping) else f"image_options must be a mapping, not {type(options).__name__}"
