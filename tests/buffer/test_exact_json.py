"""JSON whose integers keep their digits."""

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import Prompt
from rollq.buffer.wire.frame_decoding import decode_sample
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.prompts import decode_prompt, encode_prompt
from support.made_samples import a_sample

LARGE = 12345678901234567890124
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_written_is_read_again(value: Any) -> None:
    written = exact_json.dumps(value)
    assert exact_json.loads(written) == exact_json.loads(written.decode()) == value
    assert json.loads(written) == value


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, LARGE, -LARGE, 10**400])
def test_an_integer_keeps_its_digits(number: int) -> None:
    assert exact_json.loads(str(number)) == number
    assert exact_json.loads(f'{{"a": [{number}, "b"]}}'.encode()) == {"a": [number, "b"]}
    assert exact_json.dumps({"b": (number,), "a": 1}, option=orjson.OPT_SORT_KEYS) == b'{"a":1,"b":[%d]}' % number


@pytest.mark.parametrize(
    "text",
    ["NaN", "[Infinity]", "{'a': 1}", '{"a": 1e400}', '"\\ud800"', '"\t"', "[1,]", "01", '{"a": 1}}', "[" * 2000, ""],
)
def test_what_is_not_json_is_refused_also_beside_a_large_integer(text: str) -> None:
    for refused in (text, f"[{LARGE}, {text}]"):
        with pytest.raises(ValueError, match=r"column|nested"):
            exact_json.loads(refused)


@pytest.mark.parametrize("text", ["9" * 5000, f"[{'9' * 400}.5]", "[" * 1000 + "9" * 20 + "]" * 1000])
def test_what_python_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"digits|infinite|nested"):
        exact_json.loads(text)


def test_what_json_has_not_cannot_be_written_beside_a_large_integer() -> None:
    deep: Any = LARGE
    for _ in range(3000):
        deep = [deep]
    for value in ([LARGE, object()], {LARGE: 1}, [LARGE, "\ud800"], deep):
        with pytest.raises(TypeError):
            exact_json.dumps(value)


def test_prompts_and_samples_keep_large_integers() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": LARGE}}}
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]})
    prompt = Prompt(messages, answer=LARGE, metadata={"id": -LARGE})
    assert decode_prompt(encode_prompt(prompt)) == prompt
    sample = a_sample(extra={"messages": list(messages)})
    assert decode_sample(encode_samples([sample])).extra == sample.extra


def nested(levels: int, opening: str, inner: str) -> str:
    """A value in JSON, that many levels deep."""
    return opening * levels + inner + ("]" if opening == "[" else "}") * levels


@pytest.mark.parametrize("inner", ["1", str(LARGE), "0.10000000000000000001"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("read", [exact_json.loads, exact_json.loads_as_written])
def test_what_is_nested_too_deeply_to_be_written_is_not_read(
    read: Callable[[str], Any], opening: str, inner: str
) -> None:
    assert exact_json.dumps(read(nested(exact_json.MOST_LEVELS, opening, inner)))
    for levels in (exact_json.MOST_LEVELS + 1, 900, 1000, 1023, 5000, 100_000):
        with pytest.raises(ValueError, match=r"nested more than 254 levels|depth limit"):
            read(nested(levels, opening, inner))


def test_many_values_beside_each_other_are_not_deep() -> None:
    assert len(exact_json.loads("[" + ",".join(["[]"] * 10_000) + "]")) == 10_000
