"""Worker processes that are killed in the middle of long samples, and others that continue them."""

import asyncio
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import SalvageOutcome
from rollq.buffer.errors import ServerRefused
from rollq.buffer.values.rollouts import (
    EMPTY_SAMPLE,
    FinishReason,
    Lease,
    Prompt,
    Sample,
    SamplePart,
    SampleStatus,
    Segment,
    Status,
    VersionSpan,
)
from rollq.buffer.weights.store import read_files, store_weights
from rollq.cli.demo.tiny_model import make_model, make_tokenizer, save
from rollq.workers.agents.loops import Rollout, finish, prompt_tokens
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.protocol import REPORT_TOKENS, Completion, Request, Sampling
from rollq.workers.engines.registry import make_engine
from rollq.workers.groups import salvage as salvage_module
from rollq.workers.groups.leases import HeldLease
from rollq.workers.groups.recipes import make_recipes
from rollq.workers.groups.salvage import GATHER_S, Salvage
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.run import Worker
from rollq.workers.settings import WorkerSettings
from rollq.workers.tokenizers.byte import EOS_ID
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, chat_tokenizer
from support.step_engine import answer
from support.talking_engine import TURNS
from support.worker_processes import Workers
from support.worker_run import Script, WorkerWorld

MOST_LOST = 256
STEPS = "support.step_engine.StepEngine"
TALKS = "support.talking_engine.TalkingEngine"
LENGTH = 2000
SHORT_LENGTH = 600
RULES: Mapping[str, Any] = {
    "batch_groups": 4, "group_size": 2, "max_tokens": LENGTH, "partial_rollout": True, "max_staleness": 4,
    "temperature": 1.0, "top_k": 1,
}  # fmt: skip


@pytest.fixture
def workers(request: pytest.FixtureRequest, buffer: Buffer, server_url: str, tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(WorkerWorld(buffer, server_url, {**RULES, **getattr(request, "param", {})}), stack, tmp_path)


def reports(tokens: int) -> int:
    """Tokens that are reported of a request that has made so many, at the least."""
    return tokens // REPORT_TOKENS * REPORT_TOKENS


def test_killed_workers_lose_at_most_256_tokens_of_a_sample(workers: Workers) -> None:
    world = workers.world
    world.admit(1)
    stalls, kept, parts = (1000, 1500), 0, 0
    spans = []
    for version, stall_at in enumerate(stalls):
        if version:
            world.publish(version)
        worker = workers.start(STEPS, length=LENGTH, stall_at=stall_at)
        parts += 2 * (reports(stall_at - kept) // REPORT_TOKENS)
        workers.until_parts(parts)
        spans.append(VersionSpan(1, version, reports(stall_at - kept)))
        kept += reports(stall_at - kept)
        ids, logprobs = answer(kept)
        for sample in workers.kill(worker):
            (segment,) = sample.segments
            assert stall_at - sample.response_tokens <= MOST_LOST
            assert (segment.response_ids == ids).all()
            assert (segment.logprobs == logprobs).all()
            assert segment.versions == tuple(spans)
    world.publish(2)
    workers.start(STEPS, length=LENGTH, stall_at=LENGTH)
    ids, logprobs = answer(LENGTH)
    ids[-1] = EOS_ID
    for sample in workers.result():
        (segment,) = sample.segments
        assert (segment.response_ids == ids).all()
        assert (segment.logprobs == logprobs).all()
        assert segment.versions == (*spans, VersionSpan(1, 2, LENGTH - kept))
    assert world.buffer.counts("math").progress["tokens"] == 2 * LENGTH
    group = world.buffer.inspect("math", 1)
    assert (group["tries"], group.get("interruptions", "0"), group["deaths"]) == ("1", "0", "0")


def test_a_killed_agent_loses_at_most_one_turn(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    rules = {**RULES, "agent_loop": "tools", "agent_options": {"tools": {"calculator": {}}}}
    with ExitStack() as stack:
        workers = Workers(WorkerWorld(buffer, server_url, rules), stack, tmp_path)
        world = workers.world
        world.admit(1)
        worker = workers.start(TALKS, model=tmp_path, silent=3)
        workers.until_parts(2 * 3)
        for sample in workers.kill(worker):
            assert [message["role"] for message in sample.extra["messages"]] == ["assistant", "tool"] * 3
            assert sample.segments[0].versions == (VersionSpan(1, 0, sample.response_tokens),)
        world.publish(1)
        workers.start(TALKS, model=tmp_path, silent=len(TURNS))
        for sample in workers.result():
            assert tuple(message["content"] for message in sample.extra["messages"][::2]) == TURNS
            (segment,) = sample.segments
            assert segment.loss_mask is not None
            made = segment.response_ids[segment.loss_mask].tolist()
            assert made == [id for turn in TURNS for id in (*tokenizer.encode(turn), EOS)]
            turns = [len(tokenizer.encode(turn)) + 1 for turn in TURNS]
            logprobs = np.repeat([-(turn + 1) / 4 for turn in range(len(TURNS))], turns)
            assert segment.logprobs[segment.loss_mask].tolist() == logprobs.tolist()
            assert [span.version for span in segment.versions] == [0, 1]
            assert segment.versions[1].tokens == len(segment.response_ids) - segment.versions[0].tokens


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (SalvageOutcome.FULL, "tokens beyond 16384 parts or 67108864 bytes are not salvaged"),
        (SalvageOutcome.REFUSED, ""),  # its lease is over
        (ServerRefused("memory is full"), "tokens are not salvaged, for example of task 'math': memory is full"),
    ],
)
def test_parts_that_are_not_kept_end_the_salvage_of_their_lease_alone(
    outcome: SalvageOutcome | Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Stub:
        def __init__(self) -> None:
            self.parts: list[SamplePart] = []

        def salvage(self, parts: Sequence[SamplePart]) -> list[SalvageOutcome]:
            self.parts += parts
            if isinstance(outcome, Exception) and parts[0].lease.group_id == 1:
                raise outcome
            return [outcome if part.lease.group_id == 1 else SalvageOutcome.KEPT for part in parts]  # type: ignore[misc]

    async def scene(stub: Stub) -> None:
        calls = BufferCalls(stub)  # type: ignore[arg-type]
        salvage, first, second = Salvage(calls), lease_held(1), lease_held(2)
        for held in (first, second):
            kept = salvage.of(held, 0, EMPTY_SAMPLE)
            for tokens in (100, 200, 300):
                kept.keep(sample_of(tokens))
                await until_sent(salvage)
        assert (first.salvages, second.salvages) == (False, True)
        calls.close()

    stub = Stub()
    asyncio.run(scene(stub))
    assert [(part.lease.group_id, part.number, part.tokens_before) for part in stub.parts] == [
        (1, 0, 0), (2, 0, 0), (2, 1, 100), (2, 2, 200),
    ]  # fmt: skip
    assert [words in message for message in caplog.messages] == [True] * bool(words)


def test_a_call_that_fails_with_several_parts_leaves_asyncio_nothing_to_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salvage_module.log, "disabled", True)  # a record would keep the futures alive

    class Stub:
        def salvage(self, parts: Sequence[SamplePart]) -> list[SalvageOutcome]:
            raise ServerRefused("memory is full")

    async def scene() -> None:
        calls = BufferCalls(Stub())  # type: ignore[arg-type]
        salvage = Salvage(calls)
        kept = salvage.of(lease_held(1), 0, EMPTY_SAMPLE)
        for tokens in (100, 200, 300):
            kept.keep(sample_of(tokens))
        await until_sent(salvage)
        calls.close()

    asyncio.run(scene())
    gc.collect()
    assert caplog.messages == []


def test_a_sample_that_is_kept_whole_says_how_much_of_it_was_kept_before() -> None:
    class Stub:
        parts: Sequence[SamplePart] = ()

        def salvage(self, parts: Sequence[SamplePart]) -> list[SalvageOutcome]:
            self.parts = parts
            return [SalvageOutcome.REFUSED] * len(parts)

    async def scene(stub: Stub) -> None:
        calls = BufferCalls(stub)  # type: ignore[arg-type]
        salvage = Salvage(calls)
        kept = salvage.of(lease_held(1), 0, EMPTY_SAMPLE)
        for tokens in (100, 200):
            kept.keep(sample_of(tokens))
        kept.keep_whole(sample_of(300))
        await until_sent(salvage)
        calls.close()

    stub = Stub()
    asyncio.run(scene(stub))
    assert [(part.tokens_before, part.tokens_again) for part in stub.parts] == [(0, 0), (100, 0), (0, 200)]


async def until_sent(salvage: Salvage) -> None:
    """Wait until all parts have been sent and answered."""
    batcher = salvage._parts
    while batcher._gathering is not None or not batcher._idle:
        await asyncio.sleep(GATHER_S / 10)
    await asyncio.sleep(0)  # the callbacks of the last answers


class Stuck:
    """Finishes the first sample of a group at once; keeps 300 tokens of the others, and never ends."""

    resumable = True

    async def run(self, rollout: Rollout) -> Sample:
        segments = sample_of(300).segments
        if rollout.session.split("/")[2] == "0":
            return finish(rollout, segments, FinishReason.STOP, "42")
        assert rollout.keep is not None
        rollout.keep(finish(rollout, segments, FinishReason.ABORT, ""))
        await asyncio.Event().wait()
        raise AssertionError


def test_an_attempt_that_is_stopped_keeps_what_it_has_salvaged_of_a_sample_that_does_not_end(
    buffer: Buffer, server_url: str
) -> None:
    world = WorkerWorld(buffer, server_url, {**RULES, "agent_loop": f"{__name__}.Stuck"})
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.ABORTED, 1)

    world.play(scene, attempt_timeout_s=0.4)
    assert buffer.recycle("math", epoch=1, target=9, limit=9) == 1
    (lease,) = world.world.lease(1)
    assert [sample.status.value for sample in lease.samples] == ["c", "a"]
    assert [sample.response_tokens for sample in lease.samples] == [300, 300]
    assert buffer.counts("math").progress["tokens"] == 600


def lease_held(group_id: int) -> HeldLease:
    return HeldLease(Lease("math", group_id, 1, "n", 1, Prompt(""), (EMPTY_SAMPLE,), 1), 0.0, 0.0)


def sample_of(tokens: int) -> Sample:
    ids, logprobs = answer(tokens)
    segment = Segment(np.zeros(1, np.int32), ids, logprobs, (VersionSpan(1, 0, tokens),))
    return Sample((segment,), SampleStatus.ABORTED, FinishReason.ABORT)


@pytest.mark.parametrize(
    ("partial", "max_tokens", "evaluation", "salvages"),
    [(True, 257, False, True), (True, 256, False, False), (False, 257, False, False), (True, 257, True, False)],
)
def test_short_answers_and_evaluations_are_not_salvaged(
    partial: bool, max_tokens: int, evaluation: bool, salvages: bool
) -> None:
    task = WorkerTask.model_validate({**RULES, "partial_rollout": partial, "max_tokens": max_tokens})
    (recipe,) = make_recipes({"math": task}, WorkerSettings(engine="simulated"), 7, JudgePool(1)).values()
    assert recipe.salvages(Lease("math", 1, 1, "n", 1, Prompt(""), (), 1, evaluation)) is salvages


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path, make_model(258, seed=0), make_tokenizer())
    return path


@pytest.mark.long
@pytest.mark.parametrize("workers", [{"max_tokens": SHORT_LENGTH}], indirect=True, ids=["600 tokens"])
def test_a_real_model_continues_as_if_nothing_had_happened(workers: Workers, buffer: Buffer, model: Path) -> None:
    world = workers.world
    stored = store_weights(buffer, read_files(model))
    buffer.publish(world.world.held, 1, uri=stored.uri, digest=stored.digest)
    world.admit(1)
    worker = workers.start("transformers", model=model, device="cpu")
    workers.until_parts(4)
    for sample in workers.kill(worker):
        assert sample.response_tokens >= REPORT_TOKENS
        assert sample.response_tokens % REPORT_TOKENS == 0
    workers.start("transformers", model=model, device="cpu")

    async def undisturbed() -> Completion:
        engine = make_engine("transformers", {"model": model, "device": "cpu"})
        await engine.start()
        try:
            prompt = prompt_tokens(Prompt("math 0"), HfTokenizer(model))
            return await engine.generate(Request(prompt, Sampling(max_tokens=SHORT_LENGTH, top_k=1)))
        finally:
            await engine.close()

    expected = asyncio.run(undisturbed())
    for sample in workers.result():
        (segment,) = sample.segments
        assert segment.response_ids.tolist() == expected.ids.tolist()
        assert np.abs(segment.logprobs - expected.logprobs).max() < 1e-4
        assert segment.versions == (VersionSpan(1, 1, len(expected.ids)),)
