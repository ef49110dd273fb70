"""Interrupted and expired samples on their way through a real worker: what is kept, and what is made again."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.staleness import staleness
from rollq.buffer.values.rollouts import FinishReason, GroupResult, Sample, Status, VersionSpan
from rollq.buffer.weights.store import read_files, store_weights
from rollq.cli.demo.tiny_model import make_model, make_tokenizer, save
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Completion, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.run import Worker
from support.buffer_run import make_sample
from support.slow_engine import pass_time
from support.worker_run import Script, ScriptedEngine, WorkerWorld

TOKENS = {"simulated": 40, "transformers": 400}


class Taciturn(ScriptedEngine):
    """An engine that does not say which version made which token."""

    async def generate(self, request: Request) -> Completion:
        said = await super().generate(request)
        return Completion(said.ids, said.logprobs, (), said.finish_reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path, make_model(258, seed=0), make_tokenizer())
    return path


def swap_in_the_middle(
    buffer: Buffer, url: str, folder: Path, engine: str, mode: SwapMode, *, partial: bool
) -> list[Sample]:
    """Samples of one group whose generation met new weights (version 2 after 1), on a real engine."""
    tokens = TOKENS[engine]
    rules = {"partial_rollout": partial, "max_staleness": 4, "max_tokens": tokens, "temperature": 1.0, "top_k": 1}
    world = WorkerWorld(buffer, url, rules)
    stored = store_weights(buffer, read_files(folder))
    buffer.publish(world.world.held, 1, uri=stored.uri, digest=stored.digest)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        def swap() -> None:
            buffer.publish(world.world.held, 2, uri=stored.uri, digest=stored.digest)

        if engine == "simulated":
            await swap_a_slow_engine(world, script, swap, mode, tokens)
        else:
            await world.until(lambda: any(len(held.requests) == 2 for held in worker.table))
            swap()
            if mode is SwapMode.ABORT:
                await world.until_count(Status.ABORTED, 1)
                world.recycle(1)
        await world.until_count(Status.COMPLETED, 1)
        await world.until(lambda: worker.host.version is not None and worker.host.version.version == 2)

    if engine == "simulated":
        world.play(scene, engine="support.slow_engine.SlowEngine", lengths=[2 * tokens], swap=mode)
    else:
        world.play(scene, engine=engine, options={"model": folder, "device": "cpu"}, swap=mode)
    world.world.check()
    ((_, samples),) = world.results(1)
    return list(samples)


async def swap_a_slow_engine(
    world: WorkerWorld, script: Script, swap: Callable[[], None], mode: SwapMode, tokens: int
) -> None:
    """Swap when some of the tokens are made; the rest are made afterwards."""
    await world.until(lambda: script.running == 2)
    pass_time(tokens / 4)
    swap()
    await world.until(lambda: script.swaps[-1][0].version == 2)
    if mode is SwapMode.ABORT:
        await world.until_count(Status.ABORTED, 1)
        world.recycle(1)
        await world.until(lambda: script.running == 2)
    pass_time(tokens)


@pytest.mark.parametrize("engine", ["simulated", "transformers"])
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("mode", [SwapMode.WAIT, SwapMode.ABORT, SwapMode.KEEP])
def test_xp10_new_weights_in_the_middle_of_an_answer(
    buffer: Buffer, server_url: str, folder: Path, engine: str, mode: SwapMode, partial: bool
) -> None:
    for sample in swap_in_the_middle(buffer, server_url, folder, engine, mode, partial=partial):
        (segment,) = sample.segments
        versions = [span.version for span in segment.versions]
        expected = {
            SwapMode.WAIT: [1],
            SwapMode.KEEP: [1, 2],
            SwapMode.ABORT: [1, 2] if partial else [2],
        }[mode]
        assert versions == expected
        assert sample.response_tokens == len(segment.logprobs) == sum(span.tokens for span in segment.versions)
        assert sample.response_tokens == TOKENS[engine], "the second attempt had what the first one left"
        assert sample.finish_reason is FinishReason.LENGTH
        assert sample.sampling["max_tokens"] == TOKENS[engine]
        assert np.isfinite(segment.logprobs).all()


def test_xb04_tokens_of_an_engine_without_spans_are_of_the_version_at_the_request_s_start(
    buffer: Buffer, server_url: str
) -> None:
    """XTuner stamps when it puts, after a drain; here a swap may come between: the older version is the safe one."""
    world = WorkerWorld(buffer, server_url, {"max_staleness": 4})
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.publish(3)
        await world.until(lambda: worker.host.version == WeightsVersion(1, 3, "d3"))
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)
        world.admit(1)
        await world.until_count(Status.COMPLETED, 2)

    world.play(scene, open_gate=False, answer="4", engine=f"{__name__}.Taciturn")
    (_, before), (_, after) = world.results(2)
    assert before[0].segments[0].versions == (VersionSpan(1, 0, 2),)
    assert after[0].segments[0].versions == (VersionSpan(1, 3, 2),)
    assert staleness(5, [3, 3]) == 1


def test_xb04_the_engine_s_own_spans_win() -> None:
    async def scenario() -> None:
        script = Script(answer="4")
        script.gate.set()
        host = EngineHost(lambda: ScriptedEngine(script), 0)
        await host.start()
        await host.swap(Path(), WeightsVersion(2, 7, "d7"), SwapMode.WAIT)
        completion = await host.generate(Request(np.array([1], np.int32), Sampling(max_tokens=5)))
        assert completion.versions == (VersionSpan(2, 7, 2),)

    asyncio.run(scenario())


def test_xb08_a_re_roll_makes_the_reset_samples_only_and_judges_no_fresh_one_again(
    buffer: Buffer, server_url: str
) -> None:
    world = WorkerWorld(buffer, server_url, {"max_staleness": 0})
    world.admit(1)
    (lease,) = world.world.lease(1, worker="another")
    world.publish(1)
    buffer.put([GroupResult(lease, (make_sample(1, reward=0.25), make_sample(0, reward=0.75)))])
    assert world.count(Status.EXPIRED) == 1
    world.recycle(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 1)

    script = world.play(scene, answer="0")
    assert len(script.requests) == 1
    ((_, (fresh, again)),) = world.results(1)
    assert fresh.reward == 0.25, "exact_match would have given 0"
    assert fresh.segments[0].versions == (VersionSpan(1, 1, 3),)
    assert (again.reward, again.oldest_version) == (1.0, 1)
    world.world.check()


def test_xb10_a_group_that_is_aborted_and_too_old_is_filed_under_expired_and_made_again(
    buffer: Buffer, server_url: str
) -> None:
    world = WorkerWorld(buffer, server_url, {"partial_rollout": True, "max_staleness": 0})
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.publish(1)  # the tokens of version 0 are too old at once
        await world.until_count(Status.EXPIRED, 1)
        script.gate.set()
        world.recycle(1)
        await world.until_count(Status.COMPLETED, 1)

    script = world.play(scene, answer="123456", open_gate=False, swap=SwapMode.ABORT)
    assert [request.prefix_ids for request in script.requests] == [None] * 4
    ((_, samples),) = world.results(1)
    assert [sample.oldest_version for sample in samples] == [1, 1]
    world.world.check()
