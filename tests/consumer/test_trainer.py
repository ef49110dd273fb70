"""The reference trainer on a real server, fed by a hand-made worker: what it trains, keeps and refuses."""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from benchmarks.recorder import LogprobCheck, Recorder
from click.testing import CliRunner, Result
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, HistoryGone, InvalidGroup, ServerError
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.curves import LINES, numbers_of
from rollq.buffer.weights.loading import load_weights
from rollq.buffer.weights.manifest import describe_folder, digest_of
from rollq.cli.main import main
from rollq.consumer.batches.batch import Batch
from rollq.consumer.claims.connection import Connection
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.checkpoints import Checkpoint, newest_checkpoint, save_checkpoint
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.metrics_files import EVALUATIONS_FILE, METRICS_FILE, append, cut
from rollq.consumer.trainer.observers import Observer
from rollq.consumer.trainer.trainer import train
from support.manual_worker import TEMPERATURE, HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S

TASKS = ("math", "code")


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Callable[..., TrainerSettings]:
    """Settings of a short training into this test's folder."""

    def make(**changed: object) -> TrainerSettings:
        values = {
            "model": model_folder,
            "output": tmp_path / "out",
            "steps": 4,
            "learning_rate": 3e-3,
            "timeout_s": PATIENCE_S,
        }
        return TrainerSettings.model_validate({**values, "micro_batch_tokens": 64, **changed})

    return make


def test_an_output_that_is_a_file_is_refused_at_the_start(
    settings: Callable[..., TrainerSettings], tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"^\[trainer\] output: '.*out' cannot be created: .*exists"):
        train(Connection("redis://127.0.0.1:1/0", "none"), settings())


@contextmanager
def working(url: str, run: str, folder: Path, *, says: float = TEMPERATURE) -> Iterator[Buffer]:
    """A worker per task that keeps up with the trainer from one thread, one version behind on every other step."""
    stop = threading.Event()

    def work() -> None:
        patience = Patience(closed=stop)
        with suppress(ServerError), Buffer.connect(url, run, patience=patience) as buffer, buffer.events() as events:
            workers = {
                task: HandWorker(buffer, tiny_qwen3(1), folder / task, name=f"{task}-worker", says=says)
                for task in TASKS
            }
            while not stop.is_set():
                for task, worker in workers.items():
                    counts = buffer.counts(task)
                    if counts.clock.version >= 0 and counts.ready < 2:
                        worker.produce(2, task, follow=counts.clock.step % 2 == 1)
                events.wait(0.05)

    thread = threading.Thread(target=work)
    with Buffer.connect(url, run) as buffer:
        make_run(buffer, TASKS)
        thread.start()
        try:
            yield buffer
        finally:
            stop.set()
            thread.join()


def metrics(output: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (output / METRICS_FILE).read_bytes().splitlines()]


def test_it_trains_publishes_checkpoints_and_reports(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], tmp_path: Path
) -> None:
    chosen = settings(checkpoint_every=2)
    with working(server_url, run_name, tmp_path) as buffer:
        assert train(Connection(server_url, run_name), chosen) == 4
        live, counts, curves = buffer.live_model(), buffer.counts("math"), buffer.curves()
    assert live is not None
    assert (live.version, counts.clock.committed, counts.clock.checkpoint) == (4, 4, 4)
    lines = metrics(chosen.output)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert set(lines[0]["rewards"]) == set(TASKS)
    assert lines[0]["workers"] == {"math-worker": 8, "code-worker": 8}
    assert lines[0]["staleness_tokens"] == {"0": lines[0]["tokens"]}
    assert lines[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert lines[0]["on_policy_error"] < 1e-4
    assert lines[0]["effective_sample_size"]["0"] == pytest.approx(1.0)
    assert lines[0]["response_length"] == {"mean": 5.0, "p95": 5, "max": 5, "clip_ratio": 1.0}
    assert 0 <= lines[0]["frac_reward_zero_std"] <= 1
    assert [(row.step, row.numbers) for row in curves.steps] == [(line["step"], numbers_of(line)) for line in lines]
    expected = {line.name for line in LINES if "*" not in line.name} - {"entropy", "kl"}
    assert expected <= curves.steps[0].numbers.keys()
    checkpoint = newest_checkpoint(chosen.output)
    assert checkpoint is not None
    assert checkpoint.step == 4
    assert sorted(path.name for path in checkpoint.folder.parent.iterdir()) == ["step-00000002", "step-00000004"]
    trained = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    assert not trained.lm_head.weight.equal(tiny_qwen3().lm_head.weight)


def test_every_trained_token_has_the_logprob_of_the_weights_that_it_claims(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], tmp_path: Path
) -> None:
    """The check that finds wrong offsets, masks, temperatures and version stamps."""
    record = tmp_path / "record"
    with working(server_url, run_name, tmp_path):
        chosen = settings(steps=6, learning_rate=0.02, max_mismatch=None)
        train(Connection(server_url, run_name), chosen, observers=[Recorder(record, chosen)])
    ages: set[int] = set()
    checked = 0
    for path in sorted((record / "batches").iterdir()):
        arrays = load_file(path)
        for index, (start, end) in enumerate(zip(arrays["cu_seqlens"][:-1], arrays["cu_seqlens"][1:], strict=True)):
            span = slice(start, end)
            ids, mask = torch.from_numpy(arrays["ids"][span]).long(), arrays["loss_mask"][span]
            [(epoch, version)] = set(zip(arrays["epochs"][span][mask], arrays["versions"][span][mask], strict=True))
            model = weights_of(record, int(epoch), int(version))
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1] / float(arrays["temperature"][index])
            recomputed = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1).numpy()
            np.testing.assert_allclose(recomputed[mask[1:]], arrays["logprobs"][span][mask], atol=1e-4, rtol=0)
            ages |= set(arrays["staleness"][span][mask].tolist())
            checked += int(mask.sum())
    assert checked == 6 * 2 * 2 * 4 * 5  # steps, tasks, groups, samples, tokens
    assert ages == {0, 1}


@cache
def weights_of(record: Path, epoch: int, version: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(record / "weights" / f"epoch-{epoch}-version-{version}").eval()


def test_a_restart_trains_the_same_batch_to_the_same_weights(
    server_url: str,
    run_name: str,
    settings: Callable[..., TrainerSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 3 is trained twice, the second time from the checkpoint of step 2 with the optimizer's state of then."""
    real = Learner.gradients

    def crash(learner: Learner, batch: Any, *rest: Any) -> Any:
        if batch.step == 4:
            raise KeyboardInterrupt
        return real(learner, batch, *rest)

    record = tmp_path / "record"
    chosen = settings(checkpoint_every=2)
    connection, recorder = Connection(server_url, run_name), Recorder(record, chosen)
    with working(server_url, run_name, tmp_path) as buffer:
        monkeypatch.setattr(Learner, "gradients", crash)
        with pytest.raises(KeyboardInterrupt):
            train(connection, chosen, observers=[recorder])
        assert buffer.counts("math").clock.committed == 3
        trained = load_file(record / "batches" / "step-00000003.safetensors")
        assert [line["step"] for line in metrics(chosen.output)] == [1, 2, 3]
        monkeypatch.setattr(Learner, "gradients", real)
        assert train(connection, chosen, observers=[recorder]) == 4
        assert buffer.counts("math").unaccounted == 0
        assert [row.step for row in buffer.curves().steps] == [1, 2, 3, 4]
    lines = metrics(chosen.output)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["replayed"] for line in lines] == [False, False, True, True]
    again = load_file(record / "batches" / "step-00000003.safetensors")
    for name in ("ids", "logprobs", "group_ids"):
        np.testing.assert_array_equal(again[name], trained[name])
    first, second = weights_of(record, 1, 3), weights_of(record, 2, 3)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_lines_of_steps_that_are_trained_again_go_with_one_that_a_crash_cut_short(tmp_path: Path) -> None:
    for name in (METRICS_FILE, EVALUATIONS_FILE):
        for step in (0, 1, 2, 3):
            append(tmp_path, name, {"step": step})
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 4, "rew')
        for last, left in ((2, [0, 1, 2]), (-1, [])):
            cut(tmp_path, last)
            assert [orjson.loads(line)["step"] for line in (tmp_path / name).read_bytes().splitlines()] == left


def test_a_stop_between_micro_batches_leaves_the_batch_to_the_next_start(
    server_url: str,
    run_name: str,
    settings: Callable[..., TrainerSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = threading.Event()
    real, calls = Learner.gradients, []

    def interrupted(learner: Learner, batch: Any, *rest: Any) -> Any:
        calls.append([group.group_id for group in batch.groups])
        if batch.step == 3 and len(calls) == 3:
            stop.set()
        return real(learner, batch, *rest)

    monkeypatch.setattr(Learner, "gradients", interrupted)
    with working(server_url, run_name, tmp_path) as buffer:
        assert train(Connection(server_url, run_name), settings(), stop=stop) == 2
        checkpoint = newest_checkpoint(settings().output)
        assert checkpoint is not None
        assert checkpoint.step == buffer.counts("math").clock.checkpoint == 2
        assert train(Connection(server_url, run_name), settings()) == 4
    assert calls[2] == calls[3]
    assert [line["step"] for line in metrics(settings().output)] == [1, 2, 3, 4]


def test_a_stop_during_an_outage_still_saves_what_was_trained(
    fresh_server: EmbeddedServer,
    settings: Callable[..., TrainerSettings],
    tmp_path: Path,
) -> None:
    stop = threading.Event()

    class Outage(Observer):
        def on_step(self, line: Mapping[str, Any], batch: Batch) -> None:
            fresh_server.kill()
            threading.Timer(0.3, stop.set).start()

    with working(fresh_server.url, "run", tmp_path):
        assert train(Connection(fresh_server.url, "run"), settings(), stop=stop, observers=[Outage()]) == 1
    checkpoint = newest_checkpoint(settings().output)
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_batch_without_a_finite_loss_is_quarantined_and_replaced(
    server_url: str,
    run_name: str,
    settings: Callable[..., TrainerSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Learner.gradients
    spoiled: list[int] = []

    def spoil_once(learner: Learner, batch: Any, *rest: Any) -> Any:
        went_on = real(learner, batch, *rest)
        if batch.step == 2 and not spoiled:
            spoiled.extend(group.group_id for group in batch.groups if group.task == "math")
            next(learner.model.parameters()).grad.fill_(float("nan"))
        return went_on

    saved: list[int] = []

    def save(output: Path, step: int, *rest: Any, **options: Any) -> Checkpoint:
        saved.append(step)
        return save_checkpoint(output, step, *rest, **options)

    monkeypatch.setattr(Learner, "gradients", spoil_once)
    monkeypatch.setattr("rollq.consumer.trainer.trainer.save_checkpoint", save)
    with working(server_url, run_name, tmp_path) as buffer:
        assert train(Connection(server_url, run_name), settings(steps=3, checkpoint_every=1)) == 3
        assert saved == [1, 2, 3], "a batch that was not trained calls for no checkpoint"
        for group_id in spoiled:
            assert buffer.inspect("math", group_id)["status"] == "failed"
    checkpoint = newest_checkpoint(settings().output)
    assert checkpoint is not None
    for parameter in AutoModelForCausalLM.from_pretrained(checkpoint.folder).parameters():
        assert parameter.isfinite().all()


def test_batches_that_are_all_bad_end_the_training(
    server_url: str,
    run_name: str,
    settings: Callable[..., TrainerSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Learner, "update", lambda learner, step: None)
    with working(server_url, run_name, tmp_path), pytest.raises(InvalidGroup, match=r"step 1.*for 3 batches in a row"):
        train(Connection(server_url, run_name), settings())


@pytest.mark.parametrize(("says", "noticed"), [(0.7, False), (1.0, True)])
def test_a_wrong_temperature_is_noticed_before_it_is_trained(
    server_url: str,
    run_name: str,
    settings: Callable[..., TrainerSettings],
    tmp_path: Path,
    says: float,
    noticed: bool,
) -> None:
    """The worker samples at temperature 0.7 and says so, or claims another one."""
    expected = pytest.raises(InvalidGroup, match="staleness 0 differ by") if noticed else nullcontext()
    with working(server_url, run_name, tmp_path, says=says) as buffer:
        with expected:
            train(Connection(server_url, run_name), settings(steps=1), observers=[LogprobCheck(1e-4)])
        assert buffer.counts("math").clock.committed == (0 if noticed else 1)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_reference_and_recomputed_logprobs_change_the_gradient_but_not_what_is_reported(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], tmp_path: Path, layout: str
) -> None:
    loss = {"kl_coefficient": 0.1, "old_logprobs": "recomputed", "aggregation": "sequence", "entropy": True}
    with working(server_url, run_name, tmp_path):
        train(Connection(server_url, run_name), settings(steps=2, layout=layout, loss=loss))
    for line in metrics(settings().output):
        assert 0 < line["reward"] < 1
        assert line["entropy"] > 0


@pytest.mark.parametrize("loss", ["gspo", "mis"])
def test_the_trainer_takes_a_loss_by_its_name(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], tmp_path: Path, loss: str
) -> None:
    with working(server_url, run_name, tmp_path):
        train(Connection(server_url, run_name), settings(steps=2, loss=loss))
    for line in metrics(settings().output):
        assert line["gradient_norm"] > 0
        assert 0 <= line["masked_fraction"] < (1 if loss == "mis" else 1e-9)
        assert ("importance" in line) == (loss == "mis")


def settings_file(folder: Path, url: str, run: str, trainer: TrainerSettings) -> Path:
    """A rollq.toml of the run that these settings train."""
    file = folder / "rollq.toml"
    file.write_text(
        f'run = "{run}"\n[redis]\nbuffer_url = "{url}"\n[trainer]\nmodel = "{trainer.model}"\n'
        f'output = "{trainer.output}"\nsteps = 5\nmicro_batch_tokens = 8000\n'
        + "".join(f'[tasks.{task}]\nprompts = "p.jsonl"\nbatch_groups = 2\n' for task in TASKS)
    )
    return file


def test_a_run_whose_checkpoints_were_lost_continues_from_given_weights(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], tmp_path: Path
) -> None:
    chosen = settings(steps=3)
    file = settings_file(tmp_path, server_url, run_name, chosen)

    def recover(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["runs", "recover", str(file), *map(str, arguments)])

    with working(server_url, run_name, tmp_path) as buffer:
        assert train(Connection(server_url, run_name), chosen) == 3
        live = buffer.live_model()
        assert live is not None
        weights = load_weights(buffer, live.uri, live.digest, tmp_path / "weights")
        refused = recover("--weights", weights)
        assert refused.exit_code == 2
        assert "is a checkpoint of step 3: `rollq train` resumes from it" in refused.output
        shutil.rmtree(chosen.output / "checkpoints")
        with pytest.raises(HistoryGone, match="if its checkpoint is lost, `rollq runs recover` makes one from weights"):
            train(Connection(server_url, run_name), settings(steps=5))

        wrong = recover("--weights", weights, "--step", 9, "--relabel")
        assert "--step 9: the buffer can continue after steps 3 to 3; restore a snapshot" in wrong.output
        empty = recover("--weights", tmp_path / "out")
        assert "there are no weights, *.safetensors, in this folder" in empty.output
        dry = recover("--weights", weights, "--dry-run")
        assert "would make a checkpoint of step 3" in dry.output
        assert newest_checkpoint(chosen.output) is None
        made = recover("--weights", weights)
        assert made.output.splitlines() == [
            f"run '{run_name}', which published them, says that the weights are from step 3",
            f"made a checkpoint of step 3 in {chosen.output}",
            "`rollq train` continues with step 4: no step is trained again; the optimizer starts over",
        ]
        assert train(Connection(server_url, run_name), settings(steps=5)) == 5
        assert buffer.counts("math").clock.committed == 5
    assert [line["step"] for line in metrics(chosen.output)] == [1, 2, 3, 4, 5]


def test_the_step_of_weights_is_read_where_a_trainer_wrote_it(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], tmp_path: Path
) -> None:
    """A copy of a checkpoint, published weights that no checkpoint covers, and weights of which nobody knows more."""
    chosen = settings(steps=2)
    file = settings_file(tmp_path, server_url, run_name, chosen)

    def recover(*arguments: object) -> str:
        return CliRunner().invoke(main, ["runs", "recover", str(file), "--dry-run", *map(str, arguments)]).output

    backup, unknown = tmp_path / "backup", tmp_path / "unknown"
    with working(server_url, run_name, tmp_path) as buffer:
        train(Connection(server_url, run_name), chosen)
        shutil.copytree(chosen.output / "checkpoints" / "step-00000002", backup)
        train_without_a_checkpoint(server_url, run_name, settings(steps=4, transport="path"))
        shutil.rmtree(chosen.output / "checkpoints")
        found = recover("--weights", backup)
        assert f"{backup / 'trainer.json'} says that the weights are from step 2" in found
        assert "steps 3 to 4 are trained again, on the batches that they had" in found
        refused = recover("--weights", backup, "--step", 4)
        assert "the weights are those after step 2, as" in refused
        assert "give --step and --relabel" in refused
        assert recover("--weights", backup, "--step", 4, "--relabel").startswith("would make a checkpoint of step 4")
        assert "--relabel needs --step" in recover("--weights", backup, "--relabel")

        published = {digest_of(describe_folder(one).encode()): one for one in (chosen.output / "weights").iterdir()}
        for version in (3, 4):
            digest = buffer.recorded_digest(version)
            assert digest is not None
            copied = shutil.copytree(published[digest], tmp_path / f"copy-{version}")
            assert f"which published them, says that the weights are from step {version}\n" in recover(
                "--weights", copied
            )

        shutil.copytree(chosen.model, unknown)
        (unknown / "trainer.json").write_text("{}")
        assert "does not give the step of the weights beside it" in recover("--weights", unknown)
        (unknown / "trainer.json").write_text('{"step": 3, "lineage": "0123456789abcdef:1"}')
        assert "trainer.json of another run says: to let them count" in recover("--weights", unknown)
        (unknown / "trainer.json").unlink()
        tiny_qwen3(7).save_pretrained(unknown)
        assert "no step is recorded for the weights" in recover("--weights", unknown)


def train_without_a_checkpoint(url: str, run: str, settings: TrainerSettings) -> None:
    """Train to the end, and die where the last checkpoint would be saved."""

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("rollq.consumer.trainer.trainer.save_checkpoint", die)
        train(Connection(url, run), settings)
