"""Batches with samples that no weights of the run have made: their tokens are never stale, may lack logprobs, and are
in no measure of the engines."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ServerError
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.scores import NO_TOKENS
from rollq.buffer.values.rollouts import Group, Prompt
from rollq.consumer import AdvantageSettings, Batch
from rollq.consumer.annotations import rows_of
from rollq.consumer.batches.sequences import TokenStaleness
from rollq.consumer.batches.worker_shares import INSERTED
from rollq.consumer.claims.connection import Connection
from rollq.consumer.claims.outlook import Outlook, explain_wait, outlook
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.policy_loss import policy_loss
from rollq.consumer.objective.token_logprobs import token_logprobs
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.batch_warnings import find_idle_tasks
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.metrics_files import METRICS_FILE
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.trainer.step_metrics import StepMetrics
from rollq.consumer.trainer.trainer import train
from support.buffer_run import World
from support.consumer_groups import make_group, make_sample, make_segment
from support.finished_groups import finished_groups, finished_sample
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import flat_gradient, tiny_qwen3
from support.waiting import PATIENCE_S

CURRENT = LossSettings(absent_logprobs="current")


def inserted(*, with_logprobs: bool = False, group_id: int = 9) -> Group:
    """Two samples of three tokens each, with the rewards 0 and 1."""
    logprobs = [-3.0, -3.5, -4.0] if with_logprobs else None
    samples = [finished_sample(float(i), response=[3, 4, 5 + i], logprobs=logprobs) for i in range(2)]
    return Group("demos", group_id, Prompt("?"), samples, oldest_version=NO_TOKENS, arrival=group_id, tries=0)


def sampled(version: int = 4) -> Group:
    """Two samples of four tokens each, with the rewards 0 and 1."""
    segments = [make_segment([1], [2, 3, 4, i], version=version) for i in (5, 6)]
    samples = [make_sample(segment, reward=float(i)) for i, segment in enumerate(segments)]
    return make_group(*samples, version=version)


def test_inserted_tokens_have_no_version_and_count_at_every_step() -> None:
    batch = Batch.build(
        500,
        [sampled(499), inserted()],
        staleness=[TokenStaleness(500, threshold=1), TokenStaleness(500, Floors(((3, 1),)), 1)],
    )
    assert (batch.counts.loss_tokens, batch.counts.samples, batch.counts.groups) == (14, 4, 2)
    sequence = batch.sequences[2]
    assert sequence.prompt_tokens == 2
    assert sequence.loss_mask.tolist() == [False, False, True, True, True]
    assert sequence.versions.tolist() == sequence.epochs.tolist() == [-1] * 5
    assert sequence.staleness.tolist() == [0] * 5
    assert np.isnan(sequence.logprobs[2:]).all()
    assert sequence.logprobs[:2].tolist() == [0, 0]
    micro = batch.to_torch()
    assert micro.versions[2].tolist() == [-1] * 5
    assert micro.behaviour_logprobs.isnan().sum() == 6


@pytest.mark.parametrize("old_logprobs", ["behaviour", "recomputed"])
def test_absent_logprobs_as_the_current_ones_give_ratios_of_1(old_logprobs: str) -> None:
    batch = Batch.build(5, [inserted()])
    settings = LossSettings.model_validate({"absent_logprobs": "current", "old_logprobs": old_logprobs})
    model, micro = tiny_qwen3(), batch.to_torch()
    policy_loss(model, micro, settings).backward()  # type: ignore[no-untyped-call]
    expected = tiny_qwen3()
    logprobs = token_logprobs(expected, micro).logprobs
    (-(logprobs * micro.advantages[micro.loss_mask]).sum() / batch.counts.loss_tokens).backward()  # type: ignore[no-untyped-call]
    assert flat_gradient(expected).abs().max() > 1e-3
    torch.testing.assert_close(flat_gradient(model), flat_gradient(expected))


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_inserted_tokens_are_counted_and_in_no_measure_of_the_engines(with_logprobs: bool) -> None:
    alone, mixed = LossMetrics(), LossMetrics()
    policy_loss(tiny_qwen3(), Batch.build(5, [sampled()]).to_torch(), metrics=alone)
    batch = Batch.build(5, [sampled(), inserted(with_logprobs=with_logprobs)])
    policy_loss(tiny_qwen3(), batch.to_torch(), CURRENT, metrics=mixed)
    one, other = alone.result(), mixed.result()
    assert "inserted_tokens" not in one
    assert (other["tokens"], other["inserted_tokens"]) == (14, 6)
    for name in ("mismatch_kl", "on_policy_error", "staleness_tokens", "effective_sample_size"):
        assert other[name] == pytest.approx(one[name]), name
    found = mixed.mismatch.labelled(batch)
    assert found.total() == alone.mismatch.labelled(batch).total()
    assert found.by().keys() == {"task", "worker", "version"}
    assert set(found.by()["version"]) == {"4"}
    assert np.isfinite([other["loss"], other["ratio"], other["clip_fraction"]]).all()
    assert StepMetrics.gather(batch, mixed, Ranks()).workers == {"w": 2, INSERTED: 2}


@pytest.mark.parametrize("settings", [AdvantageSettings(), AdvantageSettings(baseline="batch", scale="batch")], ids=str)
def test_what_is_imitated_is_in_no_baseline_and_never_stale(settings: AdvantageSettings) -> None:
    """Whatever its rewards and however old, it adds the same to the gradient, and the other tasks keep theirs."""
    loss = LossSettings(sft={"demos": 0.5})
    shown = inserted()
    dear = replace(shown, samples=[replace(sample, reward=100.0 * i) for i, sample in enumerate(shown.samples)])
    alone = Batch.build(5, [sampled(), sampled(3)], settings=settings, staleness=[TokenStaleness(5, threshold=2)] * 2)
    gradients = []
    for step, demos in ((5, shown), (5, dear), (500, dear)):
        version = step - 1
        groups = [sampled(version), sampled(version - 1), demos]
        ages = [TokenStaleness(step, threshold=threshold) for threshold in (2, 2, 1)]
        batch = Batch.build(step, groups, settings=settings, staleness=ages)
        np.testing.assert_array_equal(batch.advantages[:4], alone.advantages)
        assert (batch.task_counts["demos"].loss_tokens, batch.task_counts["demos"].samples) == (6, 2)
        model = tiny_qwen3()
        policy_loss(model, batch.to_torch(), loss).backward()  # type: ignore[no-untyped-call]
        gradients.append(flat_gradient(model))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=0)


def test_a_task_whose_inserted_groups_have_equal_rewards_is_idle() -> None:
    same = [finished_sample(1.0, response=[3, 4, 5 + i]) for i in range(2)]
    equal = Group("expert", 8, Prompt("?"), same, oldest_version=NO_TOKENS, arrival=8, tries=0)
    assert find_idle_tasks(Batch.build(5, [sampled(), equal, inserted()])) == ["expert"]


def test_a_batch_of_inserted_groups_alone_has_plain_numbers() -> None:
    metrics, batch = LossMetrics(), Batch.build(5, [inserted()])
    policy_loss(tiny_qwen3(), batch.to_torch(), CURRENT, metrics=metrics)
    found = metrics.result()
    assert (found["tokens"], found["inserted_tokens"], found["mismatch_kl"]) == (6, 6, 0)
    assert found["ratio"] == pytest.approx(1.0)
    assert (found["staleness_tokens"], metrics.mismatch.labelled(batch).total()) == ({}, None)


def test_arrays_and_annotations_of_inserted_samples_are_aligned_with_their_response() -> None:
    samples = [
        finished_sample(0.0),
        finished_sample(1.0),
    ]
    group = Group("demos", 9, Prompt("?"), samples, oldest_version=NO_TOKENS, arrival=9, tries=0)
    batch = Batch.build(5, [group])
    rows = rows_of("run", 1, batch, {"value": np.arange(6.0)}, np.array([0, 0, 0, 1, 1, 1]))
    assert [row["value"] for row in rows] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_trainer_that_waits_for_an_offline_task_says_what_to_do(buffer: Buffer) -> None:
    world = World(buffer).start(demos={"offline": True, "max_staleness": 0})
    buffer.insert("demos", finished_groups(1), source="expert")
    for step in range(1, 5):
        world.claim(step, demos=0)
        buffer.commit(world.held, step)
    shortfall = buffer.claim(world.held, 5, {"demos": 2})
    counts, fullness = [buffer.counts("demos")], buffer.fullness()
    assert outlook(shortfall, counts, fullness) is Outlook.WAIT  # type: ignore[arg-type]
    text = explain_wait(shortfall, counts, {}, fullness)  # type: ignore[arg-type]
    assert "1 of 2 ready: only imports fill it: `rollq import demos SAMPLES`" in text


@contextmanager
def online_and_offline(url: str, run: str, folder: Path, demos: int) -> Iterator[Buffer]:
    """A run with the task `math`, which a worker fills, and the task `demos` with that many groups without logprobs."""
    stop = threading.Event()

    def work() -> None:
        patience = Patience(closed=stop)
        with suppress(ServerError), Buffer.connect(url, run, patience=patience) as buffer, buffer.events() as events:
            worker = HandWorker(buffer, tiny_qwen3(1), folder / "worker")
            while not stop.is_set():
                counts = buffer.counts("math")
                if counts.clock.version >= 0 and counts.ready < 2:
                    worker.produce(2, "math")
                events.wait(0.05)

    thread = threading.Thread(target=work)
    with Buffer.connect(url, run) as buffer:
        make_run(buffer)
        buffer.register_task("demos", TaskRules(batch_groups=1, group_size=4, offline=True))
        buffer.insert("demos", finished_groups(demos, 4), source="expert")
        thread.start()
        try:
            yield buffer
        finally:
            stop.set()
            thread.join()


def trainer_settings(model: Path, output: Path, **more: object) -> TrainerSettings:
    values = {"model": model, "output": output, "steps": 3, "learning_rate": 3e-3, "timeout_s": PATIENCE_S}
    return TrainerSettings.model_validate({**values, "micro_batch_tokens": 64, **more})


def test_the_trainer_mixes_an_online_and_an_offline_task(
    server_url: str, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    settings = trainer_settings(model_folder, tmp_path / "out", loss={"absent_logprobs": "current"}, max_mismatch=0.5)
    with online_and_offline(server_url, run_name, tmp_path, demos=5) as buffer:
        assert train(Connection(server_url, run_name), settings) == 3
        counts = buffer.counts("demos")
        assert (counts.progress["consumed"], counts.ready, counts.unaccounted) == (3, 2, 0)
    lines = [orjson.loads(line) for line in (settings.output / METRICS_FILE).read_bytes().splitlines()]
    assert [line["groups"] for line in lines] == [3, 3, 3]
    assert [line["inserted_tokens"] for line in lines] == [12, 12, 12]
    assert all(set(line["rewards"]) == {"math", "demos"} for line in lines)
    assert all(sum(line["workers"].values()) == 8 for line in lines)
    assert all(line["mismatch"]["by_task"].keys() == {"math"} for line in lines)


def test_the_trainer_imitates_an_offline_task(
    server_url: str, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    settings = trainer_settings(model_folder, tmp_path / "out", loss={"sft": {"demos": 0.5}}, steps=2)
    with online_and_offline(server_url, run_name, tmp_path, demos=2) as buffer:
        assert train(Connection(server_url, run_name), settings) == 2
        assert buffer.counts("demos").progress["consumed"] == 2
    lines = [orjson.loads(line) for line in (settings.output / METRICS_FILE).read_bytes().splitlines()]
    assert [line["inserted_tokens"] for line in lines] == [12, 12]


def test_a_trainer_whose_loss_needs_logprobs_trains_on_without_the_samples_that_have_none(
    server_url: str, run_name: str, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = trainer_settings(model_folder, tmp_path / "out")
    with online_and_offline(server_url, run_name, tmp_path, demos=3) as buffer:
        assert train(Connection(server_url, run_name), settings) == 3
        assert buffer.counts("demos").progress["consumed"] == 3
    lines = [orjson.loads(line) for line in (settings.output / METRICS_FILE).read_bytes().splitlines()]
    assert [line["without_logprobs"] for line in lines] == [{"demos": 12}] * 3
    assert all("inserted_tokens" not in line and line["gradient_norm"] > 0 for line in lines)
    (warning,) = [record.message for record in caplog.records if "without logprobs" in record.message]
    assert warning.startswith("step 1: samples of task 'demos' were inserted without logprobs")
    assert 'set absent_logprobs = "current" in [trainer.loss]' in warning


def test_a_batch_of_which_all_is_left_out_changes_nothing_and_is_no_error(model_folder: Path, tmp_path: Path) -> None:
    learner = Learner(trainer_settings(model_folder, tmp_path), None, Ranks())
    metrics = LossMetrics()
    assert learner.gradients(Batch.build(1, [inserted()]), metrics, None, threading.Event())
    assert learner.update(1) == 0
    assert metrics.result()["tokens"] == 0
    assert metrics.result()["without_logprobs"] == {"demos": 6}
