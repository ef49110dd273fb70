"""Weights arrive whole and as announced, or not at all."""

import hashlib
import os
from pathlib import Path

import pytest

from rollq.buffer.errors import StoreLost, WeightsError
from rollq.buffer.replay import Buffer
from rollq.buffer.server import EmbeddedServer
from rollq.buffer.weights import (
    CHUNK_BYTES,
    KEPT_IN_REDIS,
    MAX_REDIS_BYTES,
    WEIGHTS_FILE,
    check_redis_size,
    load_weights,
    locate_weights,
    store_weights,
)

DATA = os.urandom(CHUNK_BYTES + 1000)


@pytest.fixture(autouse=True)
def run(buffer: Buffer) -> None:
    buffer.create_run()


def chunks_in_redis(buffer: Buffer) -> int:
    return sum(1 for _ in buffer.client.scan_iter(match=f"rollq:{{{buffer.run}}}:weights:*", count=1000))


def test_weights_go_through_redis_in_chunks(buffer: Buffer, tmp_path: Path) -> None:
    stored = store_weights(buffer, DATA)
    assert stored.digest == hashlib.sha256(DATA).hexdigest()
    assert chunks_in_redis(buffer) == 2
    folder = load_weights(buffer, *stored, into=tmp_path / "new" / "folder")
    assert folder == tmp_path / "new" / "folder"
    assert (folder / WEIGHTS_FILE).read_bytes() == DATA
    assert [path.name for path in folder.iterdir()] == [WEIGHTS_FILE]


def test_storing_the_same_weights_again_changes_nothing(buffer: Buffer) -> None:
    assert store_weights(buffer, DATA) == store_weights(buffer, DATA)
    assert chunks_in_redis(buffer) == 2


def test_the_last_few_versions_stay(buffer: Buffer, tmp_path: Path) -> None:
    stored = [store_weights(buffer, b"weights %d" % version) for version in range(KEPT_IN_REDIS + 2)]
    assert chunks_in_redis(buffer) == KEPT_IN_REDIS
    for kept in stored[-KEPT_IN_REDIS:]:
        load_weights(buffer, *kept, into=tmp_path)
    for gone in stored[:-KEPT_IN_REDIS]:
        with pytest.raises(WeightsError, match="chunk 0 of 1 is not in Redis"):
            load_weights(buffer, *gone, into=tmp_path)


def test_weights_stored_again_count_as_new(buffer: Buffer, tmp_path: Path) -> None:
    first = store_weights(buffer, b"first")
    for version in range(KEPT_IN_REDIS - 1):
        store_weights(buffer, b"weights %d" % version)
    store_weights(buffer, b"first")
    store_weights(buffer, b"last")
    load_weights(buffer, *first, into=tmp_path)


def test_a_full_server_still_takes_weights_and_a_flushed_one_does_not(
    fresh_server: EmbeddedServer, run_name: str
) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        buffer.create_run()
        buffer.client.config_set("maxmemory", "1mb")
        store_weights(buffer, DATA)
        buffer.client.flushall()
        with pytest.raises(StoreLost):
            store_weights(buffer, DATA)
        assert buffer.client.dbsize() == 0, "nothing is created again"


def test_a_refused_download_leaves_the_folder_as_it_was(buffer: Buffer, tmp_path: Path) -> None:
    good = store_weights(buffer, b"good")
    load_weights(buffer, *good, into=tmp_path)
    uri, digest = store_weights(buffer, DATA)
    buffer.client.set(buffer.keys.weights(digest, 1), b"changed")
    with pytest.raises(WeightsError, match="sha256"):
        load_weights(buffer, uri, digest, into=tmp_path)
    buffer.client.delete(buffer.keys.weights(digest, 1))
    with pytest.raises(WeightsError, match="chunk 1 of 2"):
        load_weights(buffer, uri, digest, into=tmp_path)
    with pytest.raises(WeightsError, match="sha256"):
        load_weights(buffer, good.uri, digest, into=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_FILE]
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == b"good"


def test_what_is_too_large_for_redis_names_the_alternative() -> None:
    check_redis_size(MAX_REDIS_BYTES)
    with pytest.raises(WeightsError, match=r"limit 64 MiB.*transport = 'path'"):
        check_redis_size(MAX_REDIS_BYTES + 1)


def test_a_folder_both_sides_see_is_used_in_place(buffer: Buffer, tmp_path: Path) -> None:
    folder = tmp_path / "weights 7 %"
    folder.mkdir()
    (folder / WEIGHTS_FILE).write_bytes(DATA)
    uri, digest = locate_weights(folder)
    assert uri.startswith("file:///")
    assert load_weights(buffer, uri, digest, into=tmp_path / "unused") == folder
    assert not (tmp_path / "unused").exists()


def test_a_folder_that_is_gone_truncated_or_remote_is_refused(buffer: Buffer, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read"):
        locate_weights(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(DATA)
    uri, digest = locate_weights(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(DATA[:-1])
    with pytest.raises(WeightsError, match="sha256"):
        load_weights(buffer, uri, digest, into=tmp_path)
    for strange in ("http://host/weights", "file://host/weights", "redis:nonsense"):
        with pytest.raises(WeightsError, match="neither"):
            load_weights(buffer, strange, digest, into=tmp_path)
