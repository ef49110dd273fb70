"""Payloads of claimed groups: what is missing or does not belong there is refused, never made up."""

import pytest

from rollq.buffer.calls.claiming import MOST_FRAME_BYTES
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.errors import CorruptGroup
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import WHOLE, Prompt
from rollq.buffer.wire.frame_encoding import encode_samples
from support.buffer_run import World


@pytest.mark.parametrize(
    ("change", "found"),
    [("lose", []), ("plant", ["7", "all"]), ("replace", ["0"])],
    ids=["lost", "planted", "replaced"],
)
def test_a_group_without_exactly_its_samples_is_corrupt(world: World, change: str, found: list[str]) -> None:
    world.start().complete(2)
    rollout = task_keys(world.buffer.run, "math").rollout(1)
    client = world.buffer.client
    frame = client.hget(rollout, WHOLE)
    match change:
        case "lose":
            client.delete(rollout)
        case "plant":
            client.hset(rollout, "7", frame)
        case "replace":
            client.hdel(rollout, WHOLE)
            client.hset(rollout, "0", frame)
    claimed = world.claim(1)
    with pytest.raises(CorruptGroup, match=r"group 1 of task 'math': it has samples .* and 2 are needed") as caught:
        world.buffer.fetch(claimed.groups)
    assert str(found) in str(caught.value)
    assert caught.value.group_id == 1


def test_small_groups_come_with_their_claim(world: World) -> None:
    world.start().admit(2)
    world.put(world.lease(2), text="short")
    claimed = world.claim(1)
    read = world.buffer.fetch([group._replace(stored=()) for group in claimed.groups])
    for group in claimed.groups:
        world.buffer.client.delete(task_keys(world.buffer.run, "math").rollout(group.group_id))
    for got, expected in zip(world.buffer.fetch(claimed.groups), read, strict=True):
        assert got.prompt == expected.prompt
        assert (got.task, got.group_id, got.oldest_version) == (
            expected.task,
            expected.group_id,
            expected.oldest_version,
        )
        assert encode_samples(got.samples) == encode_samples(expected.samples)


def test_the_first_groups_come_with_their_claim_as_far_as_they_fit(world: World) -> None:
    world.start(math={"batch_groups": 3}).admit(3)
    world.put(world.lease(3), text="short")
    groups = world.claim(1, math=3).groups
    sizes = [sum(map(len, group.stored)) for group in groups]
    keys = task_keys(world.buffer.run, "math")
    assert sizes[0] == world.buffer.sizes_bytes(groups)[0] + world.buffer.client.hstrlen(keys.group(1), "prompt")

    def come(frame_bytes: int) -> list[bool]:
        again = world.buffer.claim(world.held, 1, {"math": 3}, frame_bytes=frame_bytes)
        assert isinstance(again, Claimed)
        assert len(world.buffer.fetch(again.groups)) == 3
        return [bool(group.stored) for group in again.groups]

    assert come(0) == [False] * 3
    assert come(sizes[0] - 1) == [False] * 3
    assert come(sum(sizes) - 1) == [True, True, False]
    assert come(sizes[0]) == [True, False, False]
    assert come(sum(sizes)) == [True] * 3


def test_a_group_with_a_large_prompt_does_not_come_with_its_claim(world: World) -> None:
    clock = world.start().buffer.clock("math")
    texts = ["small", "x" * MOST_FRAME_BYTES]
    prompts = [(Prompt(text), row) for row, text in enumerate(texts, 1)]
    world.buffer.admit("math", prompts, epoch=clock.epoch, cursor=0, target=100, step=clock.step)
    world.put(world.lease(2), text="short")
    claimed = world.claim(1)
    assert [bool(group.stored) for group in claimed.groups] == [True, False]
    assert [group.prompt.content for group in world.buffer.fetch(claimed.groups)] == texts


def test_a_payload_in_another_store_does_not_come_with_the_claim(world: World) -> None:
    world.start(math={"batch_groups": 4}).complete(4)
    claimed = world.claim(1, math=4)
    come = [bool(group.stored) for group in claimed.groups]
    assert come == [PayloadName.parse("math", group.payload) is None for group in claimed.groups]
    assert len(world.buffer.fetch(claimed.groups)) == 4


@pytest.mark.plain_server  # on a cluster, such a payload is in another slot
def test_a_payload_beside_its_group_comes_with_the_claim_if_it_fits(world: World) -> None:
    world.start()
    world.admit(2)
    text = "x" * 40_000
    world.put(world.lease(2), text=text)
    large = world.claim(1)
    assert [bool(group.payload and group.stored) for group in large.groups] == [True, True]
    without = world.buffer.claim(world.held, 1, {"math": 2}, frame_bytes=60_000)
    assert isinstance(without, Claimed)
    assert [bool(group.stored) for group in without.groups] == [True, False]
    for groups in (large.groups, without.groups):
        assert [group.samples[0].text for group in world.buffer.fetch(groups)] == [text, text]


def test_groups_of_a_batch_that_fills_come_with_it(world: World) -> None:
    world.start(math={"batch_groups": 3, "order": "arrival"}).admit(3)
    world.put(world.lease(2), text="short")
    first = world.buffer.claim(world.held, 1, {"math": 3}, so_far=True)
    assert isinstance(first, Claimed)
    world.put(world.lease(1), text="short")
    whole = world.buffer.claim(world.held, 1, {"math": 3}, known=first)
    assert isinstance(whole, Claimed)
    assert [bool(group.stored) for group in whole.groups] == [True] * 3
