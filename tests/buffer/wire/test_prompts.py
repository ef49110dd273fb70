"""Prompts keep what they ask, and are refused when nothing usable is asked."""

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.buffer.errors import CorruptFrame, InvalidPrompt
from rollq.buffer.values.rollouts import ImageRef, Prompt
from rollq.buffer.wire.prompts import decode_prompt, encode_prompt

PROFILE = settings(derandomize=True, max_examples=200, deadline=None, database=None)

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?", "name": None})


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt("What is 3 + 4?"),
        Prompt("¿Cuánto es 3 + 4? 🧮\n\0", answer="7"),
        Prompt(CHAT, answer={"value": 7, "unit": None}, metadata={"source": ["a", {"line": 3}]}),
        Prompt("", ids=(0, 5, 2**31 - 1)),
        Prompt((), ids=(1,)),
        Prompt("x", answer=[1.5, True, None, ""]),
        Prompt(CHAT, tools=({"type": "function", "function": {"name": "add", "parameters": {"default": None}}},)),
        Prompt("<image>", images=(ImageRef("file:///a.png", "0" * 64),), image_options={"size": {"width": 3}}),
        Prompt(CHAT, images=(ImageRef("https://x/y.png", "1" * 64), ImageRef("data:;base64,AAAA", "f" * 64))),
    ],
)
def test_a_prompt_comes_back_as_it_was(prompt: Prompt) -> None:
    assert decode_prompt(encode_prompt(prompt)) == prompt


def test_numpy_values_become_plain_ones() -> None:
    prompt = Prompt(
        "x", answer=np.float64(0.5), ids=(np.int64(4),), metadata={"n": np.int32(3), "v": np.arange(2)}  # type: ignore[arg-type]
    )  # fmt: skip
    decoded = decode_prompt(encode_prompt(prompt))
    assert decoded == Prompt("x", answer=0.5, ids=(4,), metadata={"n": 3, "v": [0, 1]})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"content": ""}, "content and ids are empty"),
        ({"content": ()}, "content and ids are empty"),
        ({"content": None}, "content must be a string or a tuple of chat messages, not NoneType"),
        ({"content": [{"role": "user", "content": "x"}]}, "content must be .*, not list"),
        ({"content": ("x",)}, r"content\[0\] must be an object with a 'role', not 'x'"),
        ({"content": (*CHAT, {"content": "x"})}, r"content\[2\] must be"),
        ({"content": ({"role": 3, "content": "x"},)}, r"content\[0\] must be"),
        ({"ids": ()}, r"ids must be a list of token ids, not \(\)"),
        ({"ids": [1]}, r"ids must be a tuple of token ids, not \[1\]"),
        ({"ids": (1, 2.0)}, "ids contains values that are not integers"),
        ({"ids": (1, True)}, "ids contains values that are not integers"),
        ({"ids": (1, -1)}, "ids range from -1 to 1"),
        ({"ids": (2**31,)}, "ids range from 2147483648"),
        ({"metadata": None}, "metadata must be a mapping, not NoneType"),
        ({"metadata": {"x": {1, 2}}}, "cannot be written as JSON"),
        ({"answer": "\ud800"}, "cannot be written as JSON"),
        ({"answer": {1}}, "cannot be written as JSON"),
    ],
)
def test_an_unusable_prompt_is_refused_by_field(changes: dict[str, Any], problem: str) -> None:
    fields: dict[str, Any] = {"content": "x"}
    with pytest.raises(InvalidPrompt, match=problem):
        encode_prompt(Prompt(**(fields | changes)))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "not an object with the fields"),
        (b'{"content":"x"}', "not an object with the fields"),
        (b'{"content":"x","answer":null,"ids":null,"metadata":{},"more":1}', "not an object with the fields"),
        (b'{"content":{},"answer":null,"ids":null,"metadata":{}}', "content must be .*, not dict"),
        (b'{"content":"x","answer":null,"ids":[],"metadata":{}}', "ids must be"),
        (b'{"content":"x","answer":null,"ids":[1.5],"metadata":{}}', "ids contains"),
        (b'{"content":"x","answer":null,"ids":null,"metadata":[]}', "metadata must be a mapping, not list"),
    ],
)
def test_bytes_that_are_no_prompt_are_corrupt(data: bytes, problem: str) -> None:
    with pytest.raises(CorruptFrame, match=problem):
        decode_prompt(data)


@PROFILE
@given(st.binary(max_size=60))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptFrame):
        decode_prompt(data)


@PROFILE
@given(st.integers(min_value=0), st.integers(0, 255))
def test_a_changed_byte_gives_a_prompt_or_corrupt(position: int, value: int) -> None:
    data = bytearray(encode_prompt(Prompt(CHAT, ids=(1, 2), metadata={"a": 1})))
    data[position % len(data)] = value
    try:
        prompt = decode_prompt(bytes(data))
    except CorruptFrame:
        return
    assert orjson.loads(encode_prompt(prompt)) == orjson.loads(bytes(data))


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (
            ImageRef("http://x/y.png", "0" * 64),
            r"images\[0\]: the URL must begin with one of file:///, https://, data",
        ),
        (ImageRef("relative.png", "0" * 64), "the URL must begin with"),
        (ImageRef("file:///a.png", "0" * 63), "sha256 must be 64 hex digits"),
        (ImageRef("file:///a.png", 5), "sha256 must be 64 hex digits"),  # type: ignore[arg-type]
        (ImageRef(None, "0" * 64), "the URL must begin with"),  # type: ignore[arg-type]
    ],
)
def test_images_are_references(image: ImageRef, problem: str) -> None:
    with pytest.raises(InvalidPrompt, match=problem):
        encode_prompt(Prompt("x", images=(image,)))


@pytest.mark.parametrize(
    ("images", "options"),
    [("a.png", {}), (["a.png"], {}), ([{"url": "file:///a"}], {}), ([{"url": "file:///a", "sha256": "0" * 64}], [])],
)
def test_damaged_images_are_noticed(images: Any, options: Any) -> None:
    fields: dict[str, Any] = {"content": "x", "answer": None, "ids": None, "metadata": {}}
    with pytest.raises(CorruptFrame):
        decode_prompt(orjson.dumps(fields | {"images": images, "image_options": options}))
