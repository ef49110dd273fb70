"""Versions published as deltas, through Redis, a shared folder and a real object store, as workers load them."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.replies import TrainerEpoch
from rollq.buffer.weights.chain import is_chain
from rollq.buffer.weights.loading import KEPT_MODELS, load_weights
from rollq.buffer.weights.manifest import ADAPTER_CONFIG, ADAPTER_FILE
from rollq.buffer.weights.store import StoredWeights, read_probe
from rollq.consumer.settings import ConsumerSettings, Transport
from rollq.consumer.weights.publisher import WeightPublisher
from support.s3_server import BUCKET, S3Server

State = dict[str, torch.Tensor]
FULL_EVERY = 4


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["redis", "path", "s3"])
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


def state(version: int, *, changed: float = 0.05) -> State:
    """A model whose values differ a little from version to version. 2 MiB; one tensor never changes."""
    torch.manual_seed(0)
    weight = torch.randn(1000, 1000).to(torch.bfloat16)
    for number in range(version):
        torch.manual_seed(number + 1)
        weight[torch.rand(1000, 1000) < changed] *= 1.01
    return {"weight": weight, "scale": torch.tensor(float(version)), "frozen": torch.arange(7)}


class Run:
    """A trainer's publisher, whose versions go live, and the folder of one worker."""

    def __init__(self, buffer: Buffer, transport: Transport, where: Path | str, folder: Path) -> None:
        self.buffer = buffer
        self.where = where
        self.folder = folder
        self.version = -1
        self._transport = transport
        self._epoch: TrainerEpoch | None = None
        self.publisher = self.restart()

    def restart(self, *, kept: int = 3, full_every: int = FULL_EVERY) -> WeightPublisher:
        self.publisher = WeightPublisher(self.buffer, self._transport, self.where, kept, full_every=full_every)
        return self.publisher

    def publish(self, weights: State | Path) -> StoredWeights:
        stored = self.publisher.put(weights)
        self.announce(stored)
        return stored

    def announce(self, stored: StoredWeights) -> None:
        self.version += 1
        if self._epoch is None:
            self._epoch = self.buffer.begin_epoch(
                trainer_id="t", launch_id="l", from_step=0, uri=stored.uri, digest=stored.digest
            )
        else:
            self.buffer.publish(self._epoch, self.version, uri=stored.uri, digest=stored.digest)

    def load(self, stored: StoredWeights | None = None, folder: Path | None = None) -> State:
        """The live weights, or others, as a worker gets them."""
        if stored is None:
            live = self.buffer.live_model()
            assert live is not None
            stored = StoredWeights(live.uri, live.digest)
        return load_file(load_weights(self.buffer, *stored, into=folder or self.folder) / "model.safetensors")


@pytest.fixture
def run(buffer: Buffer, transport: Transport, s3_server: S3Server, tmp_path: Path) -> Run:
    buffer.create_run()
    where = s3_server.url if transport == "s3" else tmp_path / "shared"
    return Run(buffer, transport, where, tmp_path / "worker")


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor), name


def stored_names(run: Run, s3_server: S3Server) -> set[str]:
    """Everything that is stored of this run, except manifests."""
    if isinstance(run.where, Path):
        if run.where.exists():
            return {path.name for path in run.where.iterdir()}
        held = run.buffer.client.lrange(run.buffer.keys.weights_held, 0, -1)
        return {entry.decode() for entry in held}
    folder = s3_server.bucket / "some/prefix" / run.buffer.run
    return {path.name for path in folder.iterdir()}


def test_a_worker_follows_deltas_and_a_late_one_takes_the_complete_copy_and_the_deltas(
    run: Run, tmp_path: Path
) -> None:
    for version in range(2 * FULL_EVERY + 1):
        before = run.publisher.stored_bytes
        stored = run.publish(state(version))
        moved = run.publisher.stored_bytes - before
        assert is_chain(stored.uri) == (version % FULL_EVERY != 0)
        assert moved < 300_000 if is_chain(stored.uri) else moved > 2_000_000
        assert_same(run.load(), state(version))
        assert_same(run.load(folder=tmp_path / f"late-{version}"), state(version))


def test_the_last_versions_can_be_loaded_from_nothing_and_older_ones_are_removed(
    run: Run, s3_server: S3Server, tmp_path: Path
) -> None:
    stored = []
    most = 0
    for version in range(4 * FULL_EVERY):
        stored.append(run.publish(state(version)))
        for at in range(max(0, version - 2), version + 1):
            assert_same(run.load(stored[at], tmp_path / f"{version}-{at}"), state(at))
            shutil.rmtree(tmp_path / f"{version}-{at}", ignore_errors=True)
        most = max(most, len(stored_names(run, s3_server)))
    assert most <= 2 * (2 * FULL_EVERY + 3)
