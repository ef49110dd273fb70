"""docs/guide/segments.svg shows the segments that sessions of the gateway make."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from rollq.buffer.values.rollouts import Segment
from rollq_docs.segments import MASKED, PICTURE, PROMPT, SCENES, TRAINED, Scene, svg
from support.chat_engine import FORGETFUL, PLAIN, Model, call, chat_tokenizer
from support.gateway_calls import CALCULATOR, Client, make_session, run

SUM = call("calculator", expression="6*7")


async def call_a_tool(client: Client) -> None:
    client.tools = (CALCULATOR,)
    answer = await client.say("question")
    client.messages += ({"role": "tool", "tool_call_id": answer.calls[0].id, "content": "42"},)
    await client.ask()


async def think(client: Client) -> None:
    await client.say("question")
    await client.say("next question")


async def branch(client: Client) -> None:
    await client.say("question")
    other = Client(client.session, client.messages)
    await asyncio.gather(client.say("part 1"), other.say("part 2"))


async def use_a_subagent(client: Client) -> None:
    client.tools = (CALCULATOR,)
    answer = await client.say("question")
    result = await Client(client.session).say("task of the subagent")
    client.messages += ({"role": "tool", "tool_call_id": answer.calls[0].id, "content": result.content},)
    await client.ask()


async def compact(client: Client) -> None:
    await client.say("question")
    summary = await client.say("summarise")
    await Client(client.session).say(f"{summary.content}, next question")


PROGRAMS: Mapping[str, tuple[Callable[[Client], Awaitable[None]], Sequence[str], str]] = {
    "a tool call, and its result": (call_a_tool, [SUM, "It is 42"], PLAIN),
    "the template drops earlier thoughts": (think, ["<think>six</think>42", "43"], FORGETFUL),
    "two calls continue one answer": (branch, ["plan", "answer 1", "answer 2"], PLAIN),
    "a subagent, which gets a task": (use_a_subagent, [SUM, "42", "It is 42"], PLAIN),
    "the history is compacted": (compact, ["answer", "summary", "answer"], PLAIN),
}
"""What a program does in each scene, what the model says, and its chat template."""


def kinds(segment: Segment) -> list[str]:
    """The kinds of a segment's tokens, in order."""
    mask = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
    return [PROMPT, *(TRAINED if trained else MASKED for trained, _ in groupby(mask.tolist()))]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.title)
def test_a_scene_has_the_segments_of_a_session(scene: Scene, tmp_path: Path) -> None:
    program, words, template = PROGRAMS[scene.title]
    session = make_session(Model(chat_tokenizer(tmp_path, template), words))
    run(lambda: program(Client(session)))
    drawn = [[block.kind for block in segment] for segment in scene.segments]
    assert sorted(map(kinds, session.sample(extra={}).segments)) == sorted(drawn)


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text("utf-8") == svg()
