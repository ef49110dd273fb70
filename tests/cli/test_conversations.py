"""Conversations in files of finished samples: which tokens the assistant wrote, and which of them the loss counts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from click.testing import CliRunner

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import Sample, Segment
from rollq.cli.demo.tiny_model import make_tokenizer
from rollq.cli.imports.conversations import check_conversation, conversation_sample
from rollq.cli.main import main
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.buffer_run import World

PLAIN = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS = PLAIN.replace(
    "{{ message.content }}", "{{ message.content if loop.last else message.content.split('|') | last }}"
)
"""Like templates that leave out the reasoning of all turns but the last."""
WITHOUT_END = PLAIN.replace("{{ eos_token }}", "")

Make = Callable[[str], HfTokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def tokenizer(template: str) -> HfTokenizer:
        backend = make_tokenizer()
        backend.chat_template = template
        backend.save_pretrained(tmp_path / "tokenizer")
        return HfTokenizer(tmp_path / "tokenizer")

    return tokenizer


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]


def texts(tokenizer: HfTokenizer, segment: Segment) -> tuple[str, str]:
    prompt, response = segment.prompt_ids.tolist(), segment.response_ids.tolist()
    return tokenizer.decode(prompt, special=True), tokenizer.decode(response, special=True)


def counted(tokenizer: HfTokenizer, segment: Segment) -> str:
    mask = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
    return tokenizer.decode(segment.response_ids[mask].tolist(), special=True)


def sample_of(tokenizer: HfTokenizer, messages: Sequence[dict[str, Any]], *tools: dict[str, Any]) -> Sample:
    return conversation_sample(messages, tools, 1.0, tokenizer)


def test_every_turn_of_the_assistant_counts_and_nothing_else(make: Make) -> None:
    tokenizer = make(PLAIN)
    (segment,) = sample_of(tokenizer, TALK).segments
    assert texts(tokenizer, segment) == ("<user>a<eos><assistant>", "b<eos><user>c<eos><assistant>d<eos>")
    assert counted(tokenizer, segment) == "b<eos>d<eos>"


def test_a_template_that_drops_earlier_reasoning_starts_a_segment_for_each_turn(make: Make) -> None:
    tokenizer = make(FORGETS)
    talk = [said("user", "a"), said("assistant", "hm|b"), said("user", "c"), said("assistant", "ah|d")]
    first, second = sample_of(tokenizer, talk).segments
    assert texts(tokenizer, first) == ("<user>a<eos><assistant>", "hm|b<eos>")
    assert texts(tokenizer, second) == ("<user>a<eos><assistant>b<eos><user>c<eos><assistant>", "ah|d<eos>")
    assert first.loss_mask is second.loss_mask is None


def test_tools_and_their_results_are_rendered_and_do_not_count(make: Make) -> None:
    tokenizer = make(PLAIN)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
    talk = [said("user", "a"), said("assistant", "", tool_calls=[call]), said("tool", "3"), said("assistant", "d")]
    (segment,) = sample_of(tokenizer, talk, tool).segments
    assert texts(tokenizer, segment) == ("[add]<user>a<eos><assistant>", "(add)<eos><tool>3<eos><assistant>d<eos>")
    assert counted(tokenizer, segment) == "(add)<eos>d<eos>"


def test_turns_of_weight_0_do_not_count(make: Make) -> None:
    tokenizer = make(PLAIN)
    talk = [said("user", "a"), said("assistant", "b", weight=0), said("user", "c"), said("assistant", "d", weight=1)]
    (segment,) = sample_of(tokenizer, talk).segments
    assert counted(tokenizer, segment) == "d<eos>"


@pytest.mark.parametrize(
    ("template", "talk", "message"),
    [
        (WITHOUT_END, TALK, "message 1: the chat template does not render it as the end of the conversation before it"),
        (PLAIN, TALK[:3], "the last message has role 'user', expected 'assistant'"),
        (PLAIN, [said("user", "a"), said("assistant", "b", weight=0)], "so there is nothing to learn from"),
        (PLAIN, [said("user", "a"), said("assistant", "b", weight=0.5)], "weight is 0.5, expected 0 or 1"),
    ],
)
def test_conversations_that_cannot_be_learned_are_refused(
    make: Make, template: str, talk: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample_of(make(template), talk)


SETTINGS = """
run = "{run}"
[redis]
buffer_url = "{url}"
[worker]
engine = "simulated"
tokenizer = "tokenizer"
[tasks.talks]
offline = true
batch_groups = 1
group_size = {size}
max_tokens = 60
"""


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        (["hello", *TALK], [], "message 0 is 'hello', expected an object with a role"),
        ([*TALK[:3], said("assistant", 5)], [], "message 3: content is 5, expected a string"),  # type: ignore[arg-type]
        ([*TALK[:3], {"role": "assistant"}], [], "message 3: content is None, expected a string"),
        (TALK, '[{"type": "function"}]', "field 'tools' is .*, expected a list of objects"),
    ],
)
def test_malformed_messages_and_tools_are_refused(messages: list[Any], tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_conversation(messages, tools)


def test_the_tasks_system_prompt_is_rendered_and_another_prompt_is_not_taken(
    make: Make, tmp_path: Path, server_url: str, run_name: str
) -> None:
    tokenizer = make(PLAIN)
    settings, data = tmp_path / "rollq.toml", tmp_path / "talks.jsonl"
    rules = SETTINGS.format(run=run_name, url=server_url, size=1) + 'rows.system_prompt = "s"\n'
    settings.write_text(rules)
    data.write_bytes(orjson.dumps({"messages": TALK, "prompt": "z"}))
    command = ["import", str(settings), "talks", str(data), "--reward", "1", "--without-logprobs"]
    assert CliRunner().invoke(main, command).exit_code == 0
    with Buffer.connect(server_url, run_name) as buffer:
        world = World(buffer)
        world.begin(0, launch_id="a trainer")
        (group,) = buffer.fetch(world.claim(1, talks=1).groups)
    assert group.prompt.content == (said("system", "s"), said("user", "a"))
    assert texts(tokenizer, group.samples[0].segments[0])[0] == "<system>s<eos><user>a<eos><assistant>"


@pytest.mark.parametrize("size", [1, 2])
def test_a_file_of_conversations_is_imported(
    make: Make, tmp_path: Path, server_url: str, run_name: str, size: int
) -> None:
    tokenizer = make(PLAIN)
    settings, data = tmp_path / "rollq.toml", tmp_path / "talks.jsonl"
    settings.write_text(SETTINGS.format(run=run_name, url=server_url, size=size))
    data.write_bytes(orjson.dumps({"messages": TALK, "topic": "letters"}))
    command = ["import", str(settings), "talks", str(data), "--reward", "1", "--without-logprobs"]
    result = CliRunner().invoke(main, command)
    if size == 2:
        assert "talks.jsonl:1: 'messages' is one conversation, so group_size must be 1, not 2" in result.output
        return
    assert result.exit_code == 0, result.output
    with Buffer.connect(server_url, run_name) as buffer:
        world = World(buffer)
        world.begin(0, launch_id="a trainer")
        (group,) = buffer.fetch(world.claim(1, talks=1).groups)
    assert group.prompt.content == (said("user", "a"),)
    assert group.prompt.metadata == {"topic": "letters"}
    (sample,) = group.samples
    assert counted(tokenizer, sample.segments[0]) == "b<eos>d<eos>"
    assert (sample.reward, sample.text, sample.extra["turns"]) == (1.0, "d", 2)
