"""Payloads of claimed groups: what is missing or does not belong there is refused, never made up."""

import pytest

from rollq.buffer.errors import CorruptGroup
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import WHOLE
from support.buffer_run import World


@pytest.mark.parametrize(
    ("change", "found"),
    [("lose", []), ("plant", ["7", "all"]), ("replace", ["0"])],
    ids=["lost", "planted", "replaced"],
)
def test_a_group_without_exactly_its_samples_is_corrupt(world: World, change: str, found: list[str]) -> None:
    world.start().complete(2)
    claimed = world.claim(1)
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
    with pytest.raises(CorruptGroup, match=r"group 1 of task 'math': it has samples .* and 2 are needed") as caught:
        world.buffer.fetch(claimed.groups)
    assert str(found) in str(caught.value)
    assert caught.value.group_id == 1
