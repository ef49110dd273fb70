"""The sizing formula: its parts, and that a run which is as full as it can be takes less."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import SalvageOutcome
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.connection import Patience, open_client
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.servers import OneServer
from rollq.buffer.values.rollouts import MOST_PART_BYTES, Lease, Prompt, SamplePart, SampleStatus
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.group_fields import MOST_INLINE_BYTES
from rollq.monitor.doctor.examine import (
    Sizing,
    Weights,
    examine_sizing,
    measured_tasks,
    read_sizing,
    with_payload,
)
from rollq.monitor.doctor.facts import read_facts
from rollq.monitor.doctor.findings import Level
from rollq.monitor.doctor.sizing import (
    TaskSize,
    group_bytes,
    largest_payload,
    live_groups,
    maxmemory_for,
    outside_bytes,
    parts_bytes,
    placed,
    primary_bytes,
    salvaged_groups,
    scheduled_groups,
    used_bytes,
)
from rollq.workers.engines.protocol import REPORT_TOKENS, Sampling
from support.any_server import AnyServer
from support.buffer_run import OUTSIDE_BYTES, World, make_sample, payloads_in
from support.finished_groups import finished_groups
from support.parts import in_parts
from support.waiting import wait_until

RULES = TaskRules(batch_groups=10, max_staleness=2)


def test_the_groups_of_a_run_are_bounded_by_its_settings() -> None:
    size = TaskSize(RULES, payload_bytes=1000, checkpoint_steps=5)
    assert (scheduled_groups(size), live_groups(size)) == (40, 90)
    fresh = replace(size, rules=RULES.model_copy(update={"resume": "fresh"}))
    assert live_groups(fresh) == 40
    slow_sync = replace(size, rules=RULES.model_copy(update={"sync_weights_interval": 3}))
    assert live_groups(slow_sync) == 150
    tail = replace(
        size, rules=RULES.model_copy(update={"tail_batch_trigger_size": 7}), surplus_groups=2, audited_groups=3
    )
    assert live_groups(tail) == 102
    grown = replace(size, rules=RULES.model_copy(update={"schedule": ((5, 20),)}))
    assert live_groups(grown) == 180


def test_groups_in_generation_are_counted_with_their_parts() -> None:
    whole = TaskSize(RULES, payload_bytes=1000, checkpoint_steps=5)
    size = replace(whole, rules=RULES.model_copy(update={"partial_rollout": True}))
    assert (salvaged_groups(whole), salvaged_groups(size)) == (0, 40)
    assert used_bytes([size]) == used_bytes([whole]) + 40 * 1.25 * 1500
    assert parts_bytes(2**30) == 1.25 * MOST_PART_BYTES


def test_memory_is_the_sum_of_groups_tickets_and_weights() -> None:
    size = TaskSize(RULES, payload_bytes=1000, checkpoint_steps=5)
    assert group_bytes(1000) == 3750
    assert used_bytes([size, size], weights_bytes=7) == 2 * (90 * 3750 + 40 * 6000) + 7
    assert maxmemory_for(1000) == 1300


def test_a_payload_is_placed_by_its_size() -> None:
    size = TaskSize(RULES, payload_bytes=50_100, checkpoint_steps=5)
    assert placed(size, 100, min_outside=None, spread=False) == size
    assert placed(size, 100, min_outside=50_001, spread=False) == size
    outside = replace(size, outside_bytes=50_000)
    assert placed(size, 100, min_outside=50_000, spread=True) == outside
    assert placed(size, 100, min_outside=50_001, spread=True) == replace(size, spread_bytes=50_000)
    small = replace(size, payload_bytes=MOST_INLINE_BYTES + 100)
    assert placed(small, 100, min_outside=None, spread=True) == small


def test_of_a_payload_outside_the_server_keeps_only_the_group() -> None:
    size = TaskSize(RULES, payload_bytes=50_100, checkpoint_steps=5, outside_bytes=50_000)
    assert used_bytes([size]) == 90 * group_bytes(100) + 40 * 6000
    assert outside_bytes([size, size]) == 2 * 90 * 50_000
    partial = replace(size, rules=RULES.model_copy(update={"partial_rollout": True}))
    assert used_bytes([partial]) == used_bytes([size]) + 40 * (parts_bytes(50_100) + 1.25 * 50_000)


def test_a_primary_has_its_tasks_and_a_share_of_large_payloads() -> None:
    small = TaskSize(RULES, payload_bytes=1000, checkpoint_steps=5)
    large = replace(small, payload_bytes=50_100, spread_bytes=50_000)
    share = 90 * 1.25 * 50_000 / 3
    assert primary_bytes([], [small, large], 3) == share
    assert primary_bytes([small, large], [small, large], 3, weights_bytes=7) == (
        90 * (group_bytes(1000) + group_bytes(100)) + share + 7
    )


@pytest.mark.parametrize(("tokens", "top_ks"), [(1, ()), (1000, ()), (1000, (0, 0)), (1000, (8,))])
def test_no_sample_is_larger_than_the_settings_allow(tokens: int, top_ks: tuple[int, ...]) -> None:
    sample, arrays = make_sample(0, tokens=tokens), {}
    for pool, top_k in enumerate(top_ks):
        arrays[f"{pool}_logprobs"] = np.ones(tokens, np.float32)
        if top_k:
            arrays[f"{pool}_top_ids"] = np.ones((tokens, top_k), np.int32)
            arrays[f"{pool}_top_logprobs"] = np.ones((tokens, top_k), np.float32)
    scored = replace(sample, segments=(replace(sample.segments[0], arrays=arrays),))
    assert len(encode_samples([sample])) <= len(encode_samples([scored])) <= largest_payload(1, 2, tokens, top_ks)


class AloneWorld(World):
    """The only run on its server."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._empty_bytes = self._server_bytes()

    @property
    def bytes(self) -> int:
        """Memory of the server that the run takes."""
        return self._server_bytes() - self._empty_bytes

    @property
    def size(self) -> TaskSize:
        """The size of its only task."""
        (size,) = measured_tasks(self.buffer).values()
        return size

    def settle_below(self, most: float) -> None:
        """Wait until the run takes less: what waits to be written to the append-only file counts until then."""
        wait_until(lambda: self.bytes < most, otherwise=lambda: f"{self.bytes} bytes, not {most}")

    def _server_bytes(self) -> int:
        return int(self.buffer.client.info("memory")["used_memory"])


@pytest.fixture
def trained(fresh_server_of_each_kind: EmbeddedServer, run_name: str) -> Iterator[AloneWorld]:
    """A run that has trained five batches of 10 groups since its checkpoint."""
    with Buffer.connect(fresh_server_of_each_kind.url, run_name) as buffer:
        world = AloneWorld(buffer)
        rules = {"batch_groups": 10, "group_size": 8, "max_staleness": 1, "max_uncheckpointed_steps": 5}
        world.start(math={**rules, "partial_rollout": True})
        for step in range(1, 6):
            world.admit(10)
            world.put(world.lease(10), tokens=2048)
            world.train(step, math=10)
        yield world


def test_small_groups_take_less_than_the_formula_says(fresh_server_of_each_kind: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server_of_each_kind.url, run_name) as buffer:
        world = AloneWorld(buffer)
        world.start(math={"batch_groups": 100, "group_size": 1})
        for cursor in (0, 100):  # the first ones also make the keys that all groups share
            before = world.bytes
            prompts = [(Prompt("a long question " * 20), cursor + number) for number in range(1, 101)]
            buffer.admit("math", prompts, epoch=buffer.clock("math").epoch, cursor=cursor, target=200, step=1)
            for _ in range(20):  # the buffer of a large call counts until the server shrinks it, sooner or later
                world.put(world.lease(5), tokens=16, text="")
            most = 100 * group_bytes(world.size.payload_bytes)  # here, as to look at the groups takes memory, too
        world.settle_below(before + most)


def without_partial_rollout(size: TaskSize) -> TaskSize:
    return replace(size, rules=size.rules.model_copy(update={"partial_rollout": False}))


def test_a_full_run_takes_less_than_the_formula_says(trained: AloneWorld) -> None:
    for _ in range(2):
        trained.admit(10)
        trained.put(trained.lease(10), tokens=2048, text="")
    assert trained.statuses() == {"completed": 20, "archived": 50}
    size = without_partial_rollout(trained.size)
    assert live_groups(size) == 80
    assert 8 * 2048 * 8 < size.payload_bytes < largest_payload(8, 2, 2048)
    trained.settle_below(used_bytes([size]))
    assert 0.6 * used_bytes([size]) < trained.bytes


def test_groups_that_are_salvaged_right_before_their_end_take_less_than_the_formula_says(trained: AloneWorld) -> None:
    trained.admit(30)
    for lease in trained.lease(30):
        assert set(trained.buffer.salvage(list(nearly_finished(lease)))) == {SalvageOutcome.KEPT}
    assert trained.statuses() == {"running": 30, "archived": 50}
    size = trained.size
    assert salvaged_groups(size) == 30
    trained.settle_below(used_bytes([size]))
    assert 0.6 * used_bytes([size]) < trained.bytes
    assert trained.bytes > used_bytes([without_partial_rollout(size)])


def nearly_finished(lease: Lease) -> Iterator[SamplePart]:
    """All samples in parts, and all but the last one whole too."""
    ends, number = range(REPORT_TOKENS, 2048, REPORT_TOKENS), 0
    finished = replace(make_sample(5, tokens=2048), sampling=Sampling(2048, 1.0).as_dict())
    growing = replace(finished, status=SampleStatus.ABORTED, reward=None)
    for index in range(len(lease.samples)):
        yield from in_parts(lease, growing, *ends, index=index, first=number)
        number += len(ends)
        if index + 1 < len(lease.samples):
            yield SamplePart(lease, number, index, 0, finished, tokens_again=ends[-1])
            number += 1


def test_sizing_says_what_it_measured_or_assumed(server_url: str, buffer: Buffer) -> None:
    with open_client(server_url) as client:
        facts = read_facts(client, Patience())
        facts = replace(facts, info={**facts.info, "maxmemory": 1})

        def sized(planned: dict[str, TaskSize] | None = None, weights: Weights | None = None) -> tuple[Level, str]:
            servers = OneServer(client)
            sizing = read_sizing(servers, buffer.run, planned)
            finding = examine_sizing(servers, client, buffer.run, facts, sizing, weights)
            return finding.level, finding.message

        planned = {"math": TaskSize(RULES, payload_bytes=5000, checkpoint_steps=5)}
        assert sized()[0] is Level.NOTE
        assert "90 groups of 5 KiB, if all samples reach their limits" in sized(planned)[1]
        world = World(buffer).start(math={"batch_groups": 10, "max_staleness": 2, "max_uncheckpointed_steps": 4})
        assert sized()[0] is Level.NOTE
        world.admit(3)
        world.put(world.lease(3), text="")
        level, message = sized(planned)
        assert (level, re.search("90 groups of .* as measured", message) is not None) == (Level.WARNING, True)
        assert re.search("80 groups of .* as measured", sized()[1])
        two = {**planned, "code": planned["math"]}
        assert "180 groups of 3 KiB, as measured in some tasks" in sized(two)[1]
        partial = {"math": replace(planned["math"], rules=RULES.model_copy(update={"partial_rollout": True}))}
        assert re.search("90 groups of .*, 40 of them in parts too, as measured", sized(partial)[1])
        with_weights = sized(planned, Weights(None, 2**30, 3))[1]
        assert "the run takes up to 4.0 GiB" in with_weights


def test_groups_that_may_not_be_read_count_at_their_limits(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        World(buffer).start().complete(2)
        rights = ["~*", "+ping", "+info", "+time", "+hget", "+smembers", "+hgetall", "+zrange"]
        client: Any = buffer.client
        client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", *rights)
    planned = {"math": TaskSize(RULES, payload_bytes=5000, checkpoint_steps=5)}
    with open_client(fresh_server.url.replace("redis://", "redis://reader:secret@")) as reader:
        assert read_sizing(OneServer(reader), run_name, planned) == Sizing(planned, measured=0)


def test_payloads_away_are_measured_where_they_are(any_server: AnyServer, run_name: str, tmp_path: Path) -> None:
    with Buffer.connect(any_server.url, run_name, payloads=payloads_in(tmp_path)) as buffer:
        world = World(buffer).start(math={"batch_groups": 4, "group_size": 1})
        world.complete(1)
        small = measured_tasks(buffer)["math"]
        assert (0 < small.payload_bytes < 10_000, small.away_bytes) == (True, 0)
        world.complete(3)  # one of them large, and one so large that it is outside
        size = measured_tasks(buffer)["math"]
        spread_bytes = MOST_INLINE_BYTES / 4 if buffer.servers.spread else 0
        assert size.spread_bytes == pytest.approx(spread_bytes, rel=0.1)
        assert size.outside_bytes == pytest.approx(OUTSIDE_BYTES / 4, rel=0.1)
        assert size.payload_bytes == pytest.approx((MOST_INLINE_BYTES + OUTSIDE_BYTES) / 4, rel=0.1)


def test_groups_with_payloads_outside_take_less_than_the_formula_says(
    fresh_server_of_each_kind: EmbeddedServer, run_name: str, tmp_path: Path
) -> None:
    with Buffer.connect(fresh_server_of_each_kind.url, run_name, payloads=payloads_in(tmp_path)) as buffer:
        world = AloneWorld(buffer)
        world.start(math={"batch_groups": 100, "group_size": 8})
        world.admit(100)
        world.put(world.lease(100), tokens=1024, text="")
        size = world.size
        assert size.outside_bytes > OUTSIDE_BYTES
        client: Any = buffer.client
        taken = sum(
            client.memory_usage(key, samples=0) for key in client.scan_iter(match=f"rollq:{{{run_name}:math}}:*")
        )
        formula = 100 * group_bytes(size.payload_bytes - size.outside_bytes)
        assert 0.4 * formula < taken < formula


def test_groups_that_were_inserted_are_counted_beyond_the_bound(buffer: Buffer) -> None:
    World(buffer).start(demos={"offline": True})
    buffer.insert("demos", finished_groups(50), source="expert")
    stored = measured_tasks(buffer)["demos"]
    planned = with_payload(replace(stored, surplus_groups=0), stored)
    assert (stored.surplus_groups, planned.surplus_groups) == (50, 50)
