"""Versions published as deltas, through Redis, a shared folder and a real object store, as workers load them."""

import errno
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.weights.chain import Chain, is_chain
from rollq.buffer.weights.loading import KEPT_MODELS, load_weights
from rollq.buffer.weights.manifest import ADAPTER_CONFIG, ADAPTER_FILE
from rollq.buffer.weights.object_store import ObjectStore
from rollq.buffer.weights.store import CHAIN_PART, StoredWeights, read_chain
from rollq.consumer.settings import ConsumerSettings, Transport
from rollq.consumer.weights.places import BucketPlace, FolderPlace, RedisPlace
from rollq.consumer.weights.publisher import WeightPublisher
from rollq.consumer.weights.sources import weights_source
from support.s3_server import S3Server

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


@cache
def state(version: int) -> State:
    """A model of 128 KiB. A few values differ from version to version; one tensor never changes."""
    torch.manual_seed(version)
    if version == 0:
        weight = torch.randn(256, 256).to(torch.bfloat16)
    else:
        weight = torch.tensor(state(version - 1)["weight"].tolist(), dtype=torch.bfloat16)
        weight[torch.rand(256, 256) < 0.02] *= 1.01
    return {"weight": weight, "scale": torch.tensor(float(version)), "frozen": torch.arange(7)}


class Run:
    """A trainer's publisher, whose versions go live, and the folder of one worker."""

    def __init__(self, buffer: Buffer, transport: Transport, where: Path | str, folder: Path) -> None:
        self.buffer = buffer
        self.where = where
        self.folder = folder
        self.version = -1
        self.transport = transport
        self._epoch: TrainerEpoch | None = None
        self.publisher = self.restart()

    def restart(self, *, kept: int = 3, full_every: int = FULL_EVERY) -> WeightPublisher:
        self.publisher = WeightPublisher(self.buffer, self.transport, self.where, kept, full_every=full_every)
        return self.publisher

    def publish(self, weights: State | Path) -> StoredWeights:
        stored = self.publisher.put(weights_source(weights))
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
            stored = live(self)
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
        return {str(entry) for entry in run.buffer.client.lrange(run.buffer.keys.weights_held, 0, -1)}
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
        assert moved < 8_000 if is_chain(stored.uri) else moved > 128_000
        assert_same(run.load(), state(version))
        assert_same(run.load(folder=tmp_path / f"late-{version}"), state(version))


def test_the_last_versions_can_be_loaded_from_nothing_and_older_ones_are_removed(
    run: Run, s3_server: S3Server, tmp_path: Path
) -> None:
    stored, most = [], 0
    for version in range(3 * FULL_EVERY + 1):
        stored.append(run.publish(state(version)))
        for at in range(max(0, version - 2), version + 1):
            assert_same(run.load(stored[at], tmp_path / f"{version}-{at}"), state(at))
        most = max(most, len(stored_names(run, s3_server)))
    # two chains at most, which Redis lists with the manifest of each version
    assert most <= 2 * FULL_EVERY + (3 if run.transport == "redis" else 0)
    for gone in stored[:FULL_EVERY]:
        with pytest.raises(WeightsError, match="no longer, in Redis"):
            run.load(gone, tmp_path / "gone")


def test_a_base_that_changed_on_the_workers_disk_is_not_used(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for version in range(2):
        run.publish(state(version))
        run.load()
    (base,) = [path for path in run.folder.iterdir() if path.name == live(run).digest[:16]]
    weights = base / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1000] ^= 1
    weights.write_bytes(raw)
    run.publish(state(2))
    assert_same(run.load(), state(2))
    assert "starting again from the complete copy" in caplog.text
    assert not base.exists()
    run.publish(state(3))
    weights = run.folder / live(run).digest[:16]
    assert_same(run.load(), state(3))
    shutil.rmtree(weights)
    assert_same(run.load(), state(3))


def test_a_base_that_cannot_be_read_is_not_used(run: Run) -> None:
    for version in range(2):
        run.publish(state(version))
        run.load()
    weights = run.folder / live(run).digest[:16] / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    run.publish(state(2))
    assert_same(run.load(), state(2))


def test_a_damaged_delta_is_refused_and_leaves_nothing_behind(run: Run, s3_server: S3Server) -> None:
    for version, damage in enumerate((flip, truncate, lengthen, remove, empty), 1):
        run.restart()
        run.publish(state(version - 1))
        run.load()
        run.publish(state(version))
        damage_delta(run, s3_server, damage)
        before = sorted(run.folder.glob("*"))
        with pytest.raises(
            WeightsError, match=r"delta|no longer, in Redis|object or its bucket|do not have"
        ) as refused:
            run.load()
        assert "\n" not in str(refused.value)
        assert sorted(run.folder.glob("*")) == before, "the base stays, and nothing is left behind"
    run.restart()
    run.publish(state(9))
    assert_same(run.load(), state(9))


def test_a_trainer_that_dies_before_it_announces_a_delta_leaves_the_live_weights_whole(
    run: Run, tmp_path: Path
) -> None:
    for version in range(2):
        run.publish(state(version))
    run.publisher.put(weights_source(state(2)))  # and dies
    assert_same(run.load(), state(1))
    resumed = run.restart()
    before = resumed.stored_bytes
    assert not is_chain(run.publish(state(1)).uri), "the first publication after a start is complete"
    assert resumed.stored_bytes - before > 128_000
    assert is_chain(run.publish(state(2)).uri)
    assert_same(run.load(folder=tmp_path / "late"), state(2))


def test_a_trainer_that_was_replaced_removes_nothing_that_the_live_weights_need(run: Run, tmp_path: Path) -> None:
    old = run.restart(kept=1)
    for version in range(2):
        run.publish(state(version))
    run.restart(kept=1)
    for version in range(1, 4):
        run.publish(state(version))
        old.put(weights_source(state(20 + version)))
        assert_same(run.load(folder=tmp_path / f"late-{version}"), state(version))


def test_live_weights_that_are_published_again_stay_whole_if_their_delta_cannot_be_stored(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(2):
        run.publish(state(version))
    with monkeypatch.context() as patched:
        for place in (RedisPlace, FolderPlace, BucketPlace):
            patched.setattr(place, "put_delta", store_is_away)
        with suppress(WeightsError):
            run.publisher.put(weights_source(state(1)))
    assert_same(run.load(folder=tmp_path / "late"), state(1))
    run.publish(state(1))
    run.publish(state(2))
    assert_same(run.load(), state(2))


def store_is_away(*_: object) -> None:
    raise WeightsError("the store is away")


def test_a_trainer_that_was_replaced_and_has_the_live_weights_too_leaves_them_whole(run: Run, tmp_path: Path) -> None:
    old = run.publisher
    run.publish(state(0))
    run.publish(state(1))
    run.restart()
    run.publish(state(1))
    run.publish(state(2))
    old.put(weights_source(state(2)))
    assert_same(run.load(folder=tmp_path / "late"), state(2))


def test_going_back_to_older_weights_and_publishing_the_same_twice(run: Run, tmp_path: Path) -> None:
    for number, version in enumerate((0, 1, 1, 0, 1, 0, 0, 2, 0)):
        run.publish(state(version))
        assert_same(run.load(), state(version))
        assert_same(run.load(folder=tmp_path / f"late-{number}"), state(version))
        shutil.rmtree(run.folder / live(run).digest[:16], ignore_errors=True)


@pytest.mark.parametrize(
    "other",
    [
        {"weight": torch.ones(4, 4)},  # dtype
        {"weight": torch.ones(2, 8, dtype=torch.bfloat16)},
        {"renamed": torch.ones(4, 4, dtype=torch.bfloat16)},
        {"weight": torch.ones(4, 4, dtype=torch.bfloat16), "more": torch.ones(1)},
        {},
    ],
    ids=["dtype", "shape", "name", "one more", "none"],
)
def test_other_tensors_are_published_complete(run: Run, other: State) -> None:
    run.publish({"weight": torch.zeros(4, 4, dtype=torch.bfloat16)})
    assert not is_chain(run.publish(other).uri)
    assert_same(run.load(), other)
    assert is_chain(run.publish(other).uri)
    assert_same(run.load(), other)


def test_bits_are_kept_whatever_they_mean(run: Run) -> None:
    """Each pair of tensors is compared as bytes."""
    tied = torch.randn(5, 3)

    def odd(seed: int) -> State:
        torch.manual_seed(seed)

        def bits(count: int) -> torch.Tensor:
            return torch.randint(0, 256, (count,), dtype=torch.uint8)

        return {
            "empty": torch.zeros(0, 7),
            "scalar": bits(8).view(torch.float64).reshape(()),
            "fp8": bits(33).view(torch.float8_e4m3fn),
            "int8": bits(5).view(torch.int8),
            "int64": bits(40).view(torch.int64),
            "bool": bits(9) > 100,
            "nan": torch.tensor([float("nan"), -float("nan"), -0.0, float("-inf"), 1e-45 * seed]),
            "bf16": bits(40).view(torch.bfloat16),
            "complex": bits(40).view(torch.complex64),
            "embedding": tied,
            "head": tied,
        }

    def raw(tensors: State) -> dict[str, list[int]]:
        return {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors.items()}

    for seed in range(3):
        stored = run.publish(odd(seed))
        assert is_chain(stored.uri) == (seed > 0)
        expected = raw(odd(seed))
        del expected["head"]  # tied tensors are written once
        assert raw(run.load()) == expected


def test_folders_are_published_complete_and_so_is_what_follows(run: Run, tmp_path: Path) -> None:
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    folder.mkdir()
    adapter.mkdir()
    save_file(state(1), folder / "model.safetensors")
    save_file({"lora_A": torch.ones(3)}, adapter / ADAPTER_FILE)
    (adapter / ADAPTER_CONFIG).write_bytes(b'{"r": 8}')
    run.publish(state(0))
    assert not is_chain(run.publish(folder).uri)
    assert_same(run.load(), state(1))
    run.publish(adapter)
    arrived = load_weights(run.buffer, live(run).uri, live(run).digest, run.folder)
    assert (arrived / ADAPTER_CONFIG).read_bytes() == b'{"r": 8}'
    assert_same(load_file(arrived / ADAPTER_FILE), {"lora_A": torch.ones(3)})
    assert not is_chain(run.publish(state(2)).uri)
    assert is_chain(run.publish(state(3)).uri)
    assert_same(run.load(), state(3))


def test_a_worker_keeps_the_last_models(run: Run) -> None:
    for version in range(KEPT_MODELS + 3):
        run.publish(state(version))
        run.load()
    assert len(list(run.folder.iterdir())) == KEPT_MODELS


def test_without_room_for_a_copy_weights_are_published_complete(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.TemporaryFile", no_room)
        for version in range(2):
            assert not is_chain(run.publish(state(version)).uri)
    assert "No space left" in caplog.text
    run.publish(state(2))
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.TemporaryFile", no_room)
        assert not is_chain(run.publish(state(3)).uri)
    assert_same(run.load(), state(3))


def no_room() -> object:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "uri",
    ["s3://BAD", "s3://", "s3://weights/../x", "file:///%00", "file:///\0", "file://[x/y", "http://x", "../x", ""],
)
def test_strange_places_in_a_chain_are_refused(run: Run, tmp_path: Path, uri: str) -> None:
    run.publish(state(0))
    stored = run.publish(state(1))
    chain = read_chain(run.buffer, *stored)
    (link,) = chain.deltas
    for strange in (
        Chain(complete=uri, digest=chain.digest, deltas=chain.deltas),
        Chain(complete=chain.complete, digest=chain.digest, deltas=[link.model_copy(update={"uri": uri})]),
    ):
        run.buffer.client.set(run.buffer.keys.weights(stored.digest, CHAIN_PART), strange.encode())
        with pytest.raises(WeightsError, match="weights"):
            run.load(StoredWeights(strange.uri, stored.digest))
    assert list(run.folder.iterdir()) == []


class TestObjectStore:
    """What only happens with an object store."""

    @pytest.fixture
    def transport(self) -> Transport:
        return "s3"

    def test_errors_are_one_sentence(self, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        run.publish(state(0))
        missing = WeightPublisher(run.buffer, "s3", "s3://no-such-bucket/prefix", 3)
        with pytest.raises(WeightsError, match=r"the object or its bucket is not there$"):
            missing.put(weights_source(state(1)))
        for name, value, message in (
            ("AWS_SECRET_ACCESS_KEY", "wrong", "refuses these credentials"),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "no answer from the store"),
        ):
            with monkeypatch.context() as patched:
                patched.setenv(name, value)
                patched.setattr("rollq.buffer.common.s3.RETRIES", 0)
                with pytest.raises(WeightsError, match=message) as refused:
                    run.load(folder=tmp_path / name)
                assert "\n" not in str(refused.value)
                assert "rollq-tests-secret" not in str(refused.value)
                assert list((tmp_path / name).iterdir()) == []
        assert_same(run.load(), state(0))

    def test_credentials_stay_out_of_redis(self, run: Run, s3_server: S3Server) -> None:
        for version in range(2):
            run.publish(state(version))
        client = run.buffer.client
        for name in client.scan_iter(match=f"rollq:{{{run.buffer.run}}}*", count=1000):
            assert s3_server.environment["AWS_SECRET_ACCESS_KEY"].encode() not in (client.dump(name) or b"")

    def test_objects_of_other_runs_stay(self, run: Run, s3_server: S3Server) -> None:
        others = [s3_server.bucket / "some/prefix" / f"{run.buffer.run}{more}" for more in ("-2", "x")]
        for other in others:
            other.mkdir(parents=True)
            (other / "model.safetensors").write_bytes(b"x")
        run.restart(kept=1, full_every=1)
        for version in range(4):
            run.publish(state(version))
        assert all((other / "model.safetensors").exists() for other in others)
        assert len(stored_names(run, s3_server)) == 2

    def test_large_objects_take_several_requests(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rollq.buffer.weights.object_store.REQUEST_BYTES", 5 << 20)
        monkeypatch.setattr("rollq.consumer.weights.places.REQUEST_BYTES", 5 << 20)
        weights = {"large": torch.randn(4_000_000)}
        run.publish(weights)
        assert_same(run.load(), weights)

    @pytest.mark.parametrize(
        "url",
        [None, "bucket/prefix", "s3://", "s3://B/x", "https://host/bucket", "s3://bucket/a/../b", "s3://bucket/."],
    )
    def test_the_url_names_a_bucket(self, url: str | None) -> None:
        with pytest.raises(ValueError, match="s3_url = 's3://bucket/prefix'"):
            ConsumerSettings(transport="s3", s3_url=url)

    @pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
    @pytest.mark.parametrize(
        "endpoint",
        [
            "10.0.0.5:9000",
            "store",
            "ftp://store",
            "http://",
            "http://[::1",
            "http://[:::]",
            "https://store:99999",
            "http://a b",
            "http://u:p@store",
        ],
    )
    def test_an_endpoint_is_a_url(
        self, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, endpoint: str, variable: str
    ) -> None:
        monkeypatch.setenv(variable, endpoint)
        with pytest.raises(ConfigError, match=rf"^{variable} must begin with http://"):
            WeightPublisher(buffer, "s3", "s3://bucket/prefix", 3)

    @pytest.mark.parametrize("missing", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    def test_half_a_key_is_refused(self, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
        monkeypatch.delenv(missing)
        with pytest.raises(ConfigError, match=r"^s3://bucket/prefix: .*: set both AWS_ACCESS_KEY_ID and"):
            WeightPublisher(buffer, "s3", "s3://bucket/prefix", 3)

    def test_without_obstore_the_extra_is_named(self, buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "obstore.store", None)
        with pytest.raises(ConfigError, match=r"pip install 'rollq\[s3\]'"):
            WeightPublisher(buffer, "s3", "s3://bucket/prefix", 3)


def test_the_name_of_a_run_may_have_dots(
    server_url: str, run_name: str, transport: Transport, s3_server: S3Server, tmp_path: Path
) -> None:
    where = s3_server.url if transport == "s3" else tmp_path / "shared"
    with Buffer.connect(server_url, f"{run_name}.v1") as buffer:
        buffer.create_run()
        run = Run(buffer, transport, where, tmp_path / "worker")
        for version in range(3):
            run.publish(state(version))
            assert_same(run.load(folder=tmp_path / f"late-{version}"), state(version))


def test_broadcasts_have_no_deltas() -> None:
    with pytest.raises(ValueError, match="leave full_every out"):
        ConsumerSettings(transport="nccl", full_every=2)


def live(run: Run) -> StoredWeights:
    """The live weights."""
    found = run.buffer.live_model()
    assert found is not None
    return StoredWeights(found.uri, found.digest)


def flip(raw: bytes) -> bytes:
    return raw[:100] + bytes([raw[100] ^ 1]) + raw[101:]


def truncate(raw: bytes) -> bytes:
    return raw[:-1]


def lengthen(raw: bytes) -> bytes:
    return raw + b"x"


def remove(raw: bytes) -> None:
    return None


def empty(raw: bytes) -> bytes:
    return b""


def damage_delta(run: Run, s3_server: S3Server, damage: Callable[[bytes], bytes | None]) -> None:
    """Change the bytes of the newest delta."""
    (link,) = read_chain(run.buffer, *live(run)).deltas
    if link.uri.startswith("redis:"):
        name = run.buffer.keys.weights(link.uri.removeprefix("redis:").partition("/")[0], 0)
        raw = run.buffer.client.get(name)
        assert isinstance(raw, bytes)
        changed = damage(raw)
        run.buffer.client.delete(name) if changed is None else run.buffer.client.set(name, changed)
        return
    if link.uri.startswith("file:"):
        path = Path(urlsplit(link.uri).path)
        changed = damage(path.read_bytes())
        path.unlink() if changed is None else path.write_bytes(changed)
        return
    where, _, name = link.uri.rpartition("/")
    store = ObjectStore(where)
    changed = damage((s3_server.bucket.parent / link.uri.removeprefix("s3://")).read_bytes())
    store.remove([name]) if changed is None else store.upload(name, iter([changed]), len(changed))
