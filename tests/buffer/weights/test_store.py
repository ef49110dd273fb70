"""Weights arrive whole and as announced, or not at all."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from safetensors.numpy import save

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import StoreLost, WeightsError
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.weights.loading import KEPT_MODELS, load_weights
from rollq.buffer.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    EDGE_BYTES,
    INDEX_FILE,
    WEIGHTS_FILE,
    Manifest,
    Verify,
    describe_bytes,
    digest_of,
    weight_files,
)
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import (
    CHUNK_BYTES,
    KEPT_VERSIONS,
    MAX_REDIS_BYTES,
    PROBE_PART,
    TTL_S,
    StoredWeights,
    check_redis_size,
    keep_weights,
    locate_weights,
    read_files,
    read_probe,
    store_weights,
)


def model(seed: int = 0, values: int = 5) -> dict[str, bytes]:
    """A model of two tensors, as files."""
    made = np.random.default_rng(seed).standard_normal(values, np.float32)
    return {WEIGHTS_FILE: save({"layer.weight": made, "layer.bias": np.full(3, seed, np.float16)})}


LARGE = model(values=(CHUNK_BYTES + 1000) // 4)


@pytest.fixture(autouse=True)
def run(buffer: Buffer) -> None:
    buffer.create_run()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def chunks_in_redis(buffer: Buffer) -> list[bytes]:
    return list(buffer.client.scan_iter(match=f"rollq:{{{buffer.run}}}:weights:*", count=1000))


def test_weights_go_through_redis_in_chunks(buffer: Buffer, tmp_path: Path) -> None:
    stored = store_weights(buffer, LARGE)
    assert stored.digest == digest_of(describe_bytes(LARGE).encode())
    assert len(chunks_in_redis(buffer)) == 1 + 2, "the manifest, and the file in two"
    folder = load_weights(buffer, *stored, into=tmp_path / "new")
    assert content(folder) == LARGE
    assert list((tmp_path / "new").iterdir()) == [folder]


def test_shards_and_adapters_go_through_redis_too(buffer: Buffer, tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = orjson.dumps({"weight_map": {"a": first, "b": second}})
    shards = {INDEX_FILE: index, first: save({"a": np.zeros(3)}), second: save({"b": np.ones(4)})}
    folder = write(tmp_path / "shards", {**shards, "old.safetensors": b"not named"})
    arrived = load_weights(buffer, *store_weights(buffer, read_files(folder)), into=tmp_path / "in")
    assert content(arrived) == shards
    assert weight_files(arrived) == [arrived / first, arrived / second], "an engine finds them"
    adapter = {ADAPTER_CONFIG: b'{"r": 8}', ADAPTER_FILE: save({"lora_A": np.zeros(2, np.float32)})}
    stored = store_weights(buffer, read_files(write(tmp_path / "adapter", adapter)))
    assert content(load_weights(buffer, *stored, into=tmp_path / "in")) == adapter
    assert describe_bytes(adapter).kind == "lora"
    assert describe_bytes(shards).kind == "full"


def test_storing_the_same_weights_again_changes_nothing(buffer: Buffer) -> None:
    assert store_weights(buffer, LARGE) == store_weights(buffer, LARGE) == store_weights(buffer, LARGE)
    assert len(chunks_in_redis(buffer)) == 3


def test_the_last_few_versions_stay(buffer: Buffer, tmp_path: Path) -> None:
    stored = [store_weights(buffer, model(version)) for version in range(KEPT_VERSIONS + 2)]
    assert len(chunks_in_redis(buffer)) == 2 * KEPT_VERSIONS
    for kept in stored[-KEPT_VERSIONS:]:
        load_weights(buffer, *kept, into=tmp_path)
    for gone in stored[:-KEPT_VERSIONS]:
        with pytest.raises(WeightsError, match="chunk 0 is not, or no longer, in Redis"):
            load_weights(buffer, *gone, into=tmp_path)
    store_weights(buffer, model(99), kept=1)
    assert len(chunks_in_redis(buffer)) == 2


def test_live_weights_stay_until_others_are_live(buffer: Buffer, tmp_path: Path) -> None:
    """A trainer that was replaced stores weights before it hears that its publication is refused."""

    def publish(version: int) -> StoredWeights:
        stored = store_weights(buffer, model(version), kept=1)
        buffer.publish(held, version, uri=stored.uri, digest=stored.digest)
        return stored

    first = store_weights(buffer, model(0), kept=1)
    held = buffer.begin_epoch(trainer_id="a", launch_id="a", from_step=0, uri=first.uri, digest=first.digest)
    for refused in (97, 98, 99):
        store_weights(buffer, model(refused), kept=1)
    load_weights(buffer, *first, into=tmp_path)
    publish(1)
    second = publish(2)
    load_weights(buffer, *second, into=tmp_path)
    with pytest.raises(WeightsError, match="chunk 0 is not, or no longer, in Redis"):
        load_weights(buffer, *first, into=tmp_path / "later")


def test_weights_stored_again_count_as_new(buffer: Buffer, tmp_path: Path) -> None:
    first = store_weights(buffer, model(0))
    for version in range(1, KEPT_VERSIONS):
        store_weights(buffer, model(version))
    store_weights(buffer, model(0))
    store_weights(buffer, model(100))
    load_weights(buffer, *first, into=tmp_path)


def test_a_worker_keeps_a_few_downloads(buffer: Buffer, tmp_path: Path) -> None:
    for version in range(KEPT_MODELS + 3):
        newest = load_weights(buffer, *store_weights(buffer, model(version)), into=tmp_path)
        os.utime(newest, (version, version))
    assert len(list(tmp_path.iterdir())) == KEPT_MODELS
    assert content(newest) == model(KEPT_MODELS + 2)


def test_weights_of_a_run_that_was_left_alone_leave_redis_at_last(buffer: Buffer) -> None:
    store_weights(buffer, LARGE)
    for name in chunks_in_redis(buffer):
        assert 0 < buffer.client.ttl(name) <= TTL_S
        buffer.client.expire(name, 100)
    keep_weights(buffer)
    assert all(buffer.client.ttl(name) > 100 for name in chunks_in_redis(buffer))


def test_a_full_server_still_takes_weights_and_a_flushed_one_does_not(
    fresh_server: EmbeddedServer, run_name: str
) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        buffer.create_run()
        buffer.client.config_set("maxmemory", "1mb")
        store_weights(buffer, LARGE)
        buffer.client.flushall()
        with pytest.raises(StoreLost):
            store_weights(buffer, LARGE)
        assert buffer.client.dbsize() == 0, "nothing is created again"


def test_a_refused_download_leaves_the_folder_as_it_was(buffer: Buffer, tmp_path: Path) -> None:
    good = store_weights(buffer, model(1))
    folder = load_weights(buffer, *good, into=tmp_path)
    uri, digest = store_weights(buffer, LARGE)
    chunk = buffer.client.get(buffer.keys.weights(digest, 2))
    assert isinstance(chunk, bytes)
    for changed, message in ((chunk[:-1], "Redis holds"), (b"x" + chunk[1:], f"{WEIGHTS_FILE}.*found")):
        buffer.client.set(buffer.keys.weights(digest, 2), changed)
        with pytest.raises(WeightsError, match=message):
            load_weights(buffer, uri, digest, into=tmp_path)
    buffer.client.delete(buffer.keys.weights(digest, 2))
    with pytest.raises(WeightsError, match="chunk 2 is not, or no longer, in Redis"):
        load_weights(buffer, uri, digest, into=tmp_path)
    buffer.client.set(buffer.keys.weights(digest, 0), describe_bytes(model(1)).encode())
    with pytest.raises(WeightsError, match="not the one that was announced"):
        load_weights(buffer, uri, digest, into=tmp_path)
    with pytest.raises(WeightsError, match="the announced digest is"):
        load_weights(buffer, good.uri, digest, into=tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    assert content(folder) == model(1)


def test_what_is_too_large_for_redis_names_the_alternative() -> None:
    check_redis_size(MAX_REDIS_BYTES)
    with pytest.raises(WeightsError, match=r"limit 64 MiB.*transport = 'path'"):
        check_redis_size(MAX_REDIS_BYTES + 1)


def test_a_folder_both_sides_see_is_used_in_place(buffer: Buffer, tmp_path: Path) -> None:
    folder = write(tmp_path / "weights 7 %", LARGE)
    uri, digest = locate_weights(buffer, folder)
    assert locate_weights(buffer, folder) == (uri, digest)
    assert uri.startswith("file:///")
    for how in Verify:
        assert load_weights(buffer, uri, digest, tmp_path / "unused", how) == folder
    assert not (tmp_path / "unused").exists()
    assert content(folder) == LARGE, "nothing is written beside the weights"


def change(path: Path, offset: int) -> None:
    """Another byte there."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "seen_by"),
    [
        (lambda path: path.unlink(), {"full", "fast", "sizes"}),
        (lambda path: os.truncate(path, 1000), {"full", "fast", "sizes"}),
        (lambda path: os.truncate(path, 0), {"full", "fast", "sizes"}),
        (lambda path: path.write_bytes(model(1)[WEIGHTS_FILE]), {"full", "fast", "sizes"}),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), {"full", "fast", "sizes"}),
        (lambda path: change(path, 20), {"full", "fast", "sizes"}),  # in the header: a name, a shape
        (lambda path: change(path, -1), {"full", "fast"}),
        (lambda path: change(path, EDGE_BYTES + 5000), {"full"}),
    ],
    ids=["gone", "truncated", "empty", "another", "longer", "header", "last byte", "in the middle"],
)
@pytest.mark.parametrize("how", list(Verify))
def test_what_each_way_to_verify_sees(
    buffer: Buffer, tmp_path: Path, damage: Callable[[Path], object], seen_by: set[str], how: Verify
) -> None:
    folder = write(tmp_path / "shared", LARGE)
    uri, digest = locate_weights(buffer, folder)
    damage(folder / WEIGHTS_FILE)
    if how.value in seen_by:
        with pytest.raises(WeightsError, match=str(folder)):
            load_weights(buffer, uri, digest, tmp_path, how)
    else:
        load_weights(buffer, uri, digest, tmp_path, how)


def test_files_that_an_engine_would_read_instead_of_the_published_ones_are_noticed(
    buffer: Buffer, tmp_path: Path
) -> None:
    shard = "model-00001-of-00001.safetensors"
    files = {INDEX_FILE: orjson.dumps({"weight_map": {"a": shard}}), shard: save({"a": np.zeros(3)})}
    folder = write(tmp_path / "shards", files)
    uri, digest = locate_weights(buffer, folder)
    for extra in ({ADAPTER_CONFIG: b"{}"}, model()):
        write(folder, extra)
        for how in Verify:
            with pytest.raises(WeightsError, match=f"hold '.*{next(iter(extra))[-12:]}' now"):
                load_weights(buffer, uri, digest, tmp_path, how)
        (folder / next(iter(extra))).unlink()
    load_weights(buffer, uri, digest, tmp_path)
    (folder / INDEX_FILE).unlink()
    with pytest.raises(WeightsError, match=f"{INDEX_FILE}.*cannot be read"):
        load_weights(buffer, uri, digest, tmp_path)


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/model-1.safetensors", "model.bin"])
def test_an_index_names_only_safetensors_files_beside_it(buffer: Buffer, tmp_path: Path, name: str) -> None:
    write(tmp_path, {INDEX_FILE: orjson.dumps({"weight_map": {"a": name}})})
    with pytest.raises(WeightsError, match="which is not a safetensors file beside it"):
        locate_weights(buffer, tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": 1}x',
    ],
)
def test_what_is_no_safetensors_file_is_not_published(buffer: Buffer, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        store_weights(buffer, {WEIGHTS_FILE: data})
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        locate_weights(buffer, write(tmp_path, {WEIGHTS_FILE: data}))
    assert chunks_in_redis(buffer) == []


def test_folders_without_weights_and_strange_places_are_refused(buffer: Buffer, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"{WEIGHTS_FILE}.*cannot be read"):
        locate_weights(buffer, tmp_path)
    with pytest.raises(WeightsError, match=f"{WEIGHTS_FILE}.*cannot be read"):
        read_files(tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(b"{}")
    with pytest.raises(WeightsError, match="index"):
        locate_weights(buffer, tmp_path)
    for strange in ("http://host/weights", "file://host/weights", "redis:nonsense"):
        with pytest.raises(WeightsError, match="neither"):
            load_weights(buffer, strange, "0" * 64, into=tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", ".hidden", "a/b", "", "..", "a\0b"])
def test_a_manifest_names_no_file_outside_its_folder(name: str) -> None:
    content = orjson.loads(describe_bytes(model()).encode())
    content["files"] = {name: content["files"][WEIGHTS_FILE]}
    with pytest.raises(WeightsError, match="outside its folder"):
        Manifest.decode(orjson.dumps(content))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"schema": 2}', b'{"schema": 1, "files": {"a": {}}}'])
def test_a_manifest_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(WeightsError, match="manifest"):
        Manifest.decode(raw)


@pytest.mark.parametrize("size", [-1, "10", None, 1.5, [1]])
def test_a_manifest_with_a_strange_size_is_refused(size: object) -> None:
    content = orjson.loads(describe_bytes(model()).encode())
    content["files"][WEIGHTS_FILE]["bytes"] = size
    with pytest.raises(WeightsError, match="manifest of weights cannot be read"):
        Manifest.decode(orjson.dumps(content))


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = describe_bytes(LARGE)
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.tensors["layer.bias"].dtype == "F16"
    assert manifest.tensors["layer.bias"].shape == (3,)


PROBE = Probe("float32", [np.array([1, 2], np.int32)], [np.array([-1.5], np.float32)])


def test_weights_that_once_went_through_redis_have_no_probe_in_a_folder(buffer: Buffer, tmp_path: Path) -> None:
    store_weights(buffer, model())
    assert read_probe(buffer, locate_weights(buffer, write(tmp_path, model())).digest) is None


@pytest.mark.parametrize("first", [PROBE, None])
def test_weights_count_once_with_and_without_a_probe(buffer: Buffer, tmp_path: Path, first: Probe | None) -> None:
    """They are listed as the newest ones, and go with the oldest."""
    store_weights(buffer, model(0), probe=first)
    twice = store_weights(buffer, model(0), probe=None if first else PROBE)
    for seed in range(1, KEPT_VERSIONS):
        store_weights(buffer, model(seed))
    load_weights(buffer, *twice, tmp_path)
    probe = read_probe(buffer, twice.digest)
    assert probe is not None
    assert probe.encode() == PROBE.encode()
    store_weights(buffer, model(KEPT_VERSIONS))
    assert read_probe(buffer, twice.digest) is None
    with pytest.raises(WeightsError, match="no longer, in Redis"):
        load_weights(buffer, *twice, tmp_path / "again")


def test_a_probe_lives_as_long_as_its_weights(buffer: Buffer) -> None:
    stored = store_weights(buffer, model(), probe=PROBE)
    names = [buffer.keys.weights(stored.digest, part) for part in (0, 1, PROBE_PART)]
    for name in names:
        buffer.client.expire(name, 10)
    keep_weights(buffer)
    assert all(buffer.client.ttl(name) > TTL_S - 60 for name in names)
