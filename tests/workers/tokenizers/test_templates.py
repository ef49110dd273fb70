"""Chat templates by settings: their options, files with other ones, and identities."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.gateway.calls import CallRefused
from rollq.workers.gateway.protocols import chat
from rollq.workers.groups.read_prompts import read_prompt, tokenizer_of
from rollq.workers.tokenizers.byte import ByteTokenizer
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from rollq.workers.tokenizers.templates import template_identity
from support.chat_engine import PLAIN, Model, chat_tokenizer
from support.chat_families import BUILT_IN, TOOL, Interview, family_tokenizer, sample_of
from support.gateway_calls import make_session, run, serve

QUESTION = {"role": "user", "content": "6*7?"}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    QUESTION,
    {"role": "assistant", "content": "", "reasoning_content": "A product.", "tool_calls": [
        {"type": "function", "id": "call_0", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}}
    ]},
    {"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": "42"},
]  # fmt: skip
NO_THOUGHTS = {"enable_thinking": False}
CLOSED = "<think>\n\n</think>\n\n"
"""How a prompt of Qwen3 ends with thinking off."""


@pytest.fixture
def qwen3(tmp_path: Path) -> HfTokenizer:
    return family_tokenizer(tmp_path, BUILT_IN["Qwen3"])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", NO_THOUGHTS),
        ("Qwen3", {"enable_thinking": True}),
        ("Qwen3.6", NO_THOUGHTS),
        ("GLM-4.5", NO_THOUGHTS),
        ("GPT-OSS", {"reasoning_effort": "high", "model_identity": "You count."}),
    ],
)
@pytest.mark.parametrize("tools", [(), (TOOL,)])
@pytest.mark.parametrize("turns", [2, 4])
def test_options_render_as_in_transformers(
    tmp_path: Path, family: str, options: dict[str, Any], tools: Sequence[Any], turns: int
) -> None:
    ours = family_tokenizer(tmp_path, BUILT_IN[family]).with_options(options)
    plain: Any = AutoTokenizer.from_pretrained(tmp_path)
    messages = CONVERSATION[:turns]
    expected = plain.apply_chat_template(
        messages, tools=list(tools) or None, add_generation_prompt=True, return_dict=False, **options
    )
    assert ours.chat(messages, tools) == expected


def test_thinking_is_off_where_a_task_says_so(qwen3: HfTokenizer) -> None:
    without = tokenizer_of(qwen3, NO_THOUGHTS)
    assert without.render([QUESTION]).endswith(CLOSED)
    assert not tokenizer_of(qwen3, {}).render([QUESTION]).endswith(CLOSED)
    assert tokenizer_of(qwen3, dict(NO_THOUGHTS)) is without  # which the loops' caches need


def test_a_prompt_is_read_with_the_options(qwen3: HfTokenizer) -> None:
    tokenizer = tokenizer_of(qwen3, NO_THOUGHTS)
    read = asyncio.run(read_prompt(Prompt((QUESTION,)), tokenizer))
    assert qwen3.decode(read.ids.tolist(), special=True).endswith(CLOSED)
    assert read.tokenizer is tokenizer


def test_every_turn_of_an_agent_loop_has_the_options(qwen3: HfTokenizer) -> None:
    tokenizer = qwen3.with_options(NO_THOUGHTS)
    turns = [("It is 42.", False), ("It is 42.", False)]
    _, model = sample_of(
        tokenizer, BUILT_IN["Qwen3"], turns, "environment", environment=f"{Interview.__module__}.Interview"
    )
    contexts = [tokenizer.decode(request.context.tolist(), special=True) for request in model.requests]
    assert len(contexts) == 2
    assert all(context.endswith(CLOSED) for context in contexts)


def test_calls_through_the_gateway_have_the_options_of_the_task_and_no_others(qwen3: HfTokenizer) -> None:
    tokenizer = qwen3.with_options(NO_THOUGHTS)
    model = Model(tokenizer, [tokenizer.encode("It is 42.<|im_end|>")])
    session = make_session(model)

    def asked(**more: Any) -> Any:
        return chat.parse({"model": "rollq", "messages": [QUESTION], **more}, {})

    async def ask() -> None:
        for refused in ({"enable_thinking": True}, {"reasoning_effort": "low"}):
            with pytest.raises(CallRefused, match=r"rows\.template_options"):
                await serve(session, asked(chat_template_kwargs=refused))
        await serve(session, asked(chat_template_kwargs=NO_THOUGHTS))

    run(ask)
    (request,) = model.requests
    assert tokenizer.decode(request.context.tolist(), special=True).endswith(CLOSED)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"enable_thinkin": False}, r"rows\.template_options\.enable_thinkin: .* did you mean 'enable_thinking'\?"),
        ({"colour": "red"}, r"rows\.template_options\.colour: the chat template never reads this name; leave it out"),
        ({"messages": []}, r"rows\.template_options\.messages: comes with each conversation"),
        ({"add_generation_prompt": False}, r"add_generation_prompt: comes with each conversation"),
        ({"enable_thinking": 10**30}, r"rows\.template_options: a value does not fit in JSON"),
    ],
)
def test_a_name_that_has_no_effect_is_refused(qwen3: HfTokenizer, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        qwen3.with_options(options)


def test_a_name_that_the_template_sets_itself_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "{% set mark = '!' %}{{ mark }}{{ colour }}{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=r"rows\.template_options\.mark: the chat template never reads this name"):
        tokenizer.with_options({"mark": "?"})
    assert tokenizer.with_options({"colour": "red"}).render([QUESTION]) == "!red6*7?"


def test_options_without_a_template_are_refused(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"rows\.template_options: .* no chat template"):
        HfTokenizer(tmp_path).with_options(NO_THOUGHTS)
    with pytest.raises(ConfigError, match=r"rows\.template_options: needs the chat template"):
        tokenizer_of(ByteTokenizer(), NO_THOUGHTS)


def test_a_tag_of_transformers_is_no_error(tmp_path: Path) -> None:
    template = PLAIN.replace("{{ message.content }}", "{%- generation %}{{ colour }}{% endgeneration -%}")
    assert "red" in chat_tokenizer(tmp_path, template).with_options({"colour": "red"}).render([QUESTION])


def test_a_file_replaces_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path)
    file = tmp_path / "short.jinja"
    file.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}{{ mark }}")
    assert HfTokenizer(tmp_path, file).render([QUESTION]) == "<6*7?>"
    assert HfTokenizer(tmp_path, file).with_options({"mark": "!"}).render([QUESTION]) == "<6*7?>!"
    assert HfTokenizer(tmp_path).render([QUESTION]) == "user: 6*7?<eos>\nassistant: "


def test_a_file_with_an_error_is_refused_with_its_line(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path)
    file = tmp_path / "broken.jinja"
    file.write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    with pytest.raises(ConfigError, match=r"worker\.chat_template: .*broken\.jinja:2: "):
        HfTokenizer(tmp_path, file)
    with pytest.raises(ConfigError, match=r"worker\.chat_template: cannot read .*none\.jinja"):
        HfTokenizer(tmp_path, tmp_path / "none.jinja")


def test_identities_tell_templates_and_options_apart(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path)
    file = tmp_path / "short.jinja"
    file.write_text("{{ messages[0].content }}")
    kinds: list[tuple[Path | None, dict[str, Any]]] = [(None, {}), (None, NO_THOUGHTS), (file, {}), (file, NO_THOUGHTS)]
    assert len({template_identity(tmp_path, *kind) for kind in kinds}) == len(kinds)


def test_a_template_is_the_same_in_every_place(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path)
    known = template_identity(tmp_path, None, {})
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert template_identity(tmp_path, tmp_path / "own.jinja", {}) == known
    (tmp_path / "chat_template.jinja").unlink()
    assert template_identity(tmp_path, None, {}).startswith("none ")
    config = tmp_path / "tokenizer_config.json"
    config.write_bytes(orjson.dumps(orjson.loads(config.read_bytes()) | {"chat_template": PLAIN}))
    assert template_identity(tmp_path, None, {}) == known
