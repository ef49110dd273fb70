"""Trainers and their server: one that is down for long is waited for, as long as `max_outage_s` allows."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ServerUnavailable
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.consumer.batches.batch import Batch
from rollq.consumer.claims import connection
from rollq.consumer.claims.connection import Connection
from rollq.consumer.consumer import Consumer
from rollq.consumer.settings import ConsumerSettings, TrainerSettings
from rollq.consumer.trainer.observers import Observer
from rollq.consumer.trainer.trainer import train
from support.fed_trainer import fed
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S

SHORT_S = 0.2
"""The patience of roles without a setting, shortened from a minute."""
OUTAGES = [pytest.param(1.0, id="1 s"), pytest.param(65.0, id="65 s", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "Patience", partial(Patience, SHORT_S, SHORT_S))


@contextmanager
def own_loop(server: EmbeddedServer, model: Path, folder: Path, **settings: object) -> Iterator[tuple[Any, HandWorker]]:
    """A custom trainer of a run with a hand-made worker."""
    with Buffer.connect(server.url, "run") as buffer:
        buffer.client.config_set("appendfsync", "always")
        make_run(buffer)
        given = ConsumerSettings.model_validate(settings)
        with Consumer.connect(server.url, run="run", weights=model, settings=given) as consumer:
            yield consumer, HandWorker(buffer, tiny_qwen3(1), folder / "worker")


@pytest.mark.parametrize("outage_s", OUTAGES)
def test_an_own_loop_waits_out_an_outage_of_any_length(
    fresh_server: EmbeddedServer, model_folder: Path, tmp_path: Path, outage_s: float
) -> None:
    with own_loop(fresh_server, model_folder, tmp_path) as (consumer, worker):
        worker.produce(2)
        batch = next(consumer)
        fresh_server.kill()
        back = threading.Timer(outage_s, fresh_server.start)
        back.start()
        consumer.publish(model_folder, step=1)
        consumer.commit(batch)
        back.join()
        worker.produce(2)
        assert next(consumer).step == 2


def test_an_own_loop_gives_up_after_max_outage_s(
    fresh_server: EmbeddedServer, model_folder: Path, tmp_path: Path
) -> None:
    with own_loop(fresh_server, model_folder, tmp_path, max_outage_s=0.3) as (consumer, _):
        fresh_server.kill()
        with pytest.raises(ServerUnavailable, match="start it, or correct the URL"):
            next(consumer)


@pytest.mark.parametrize("outage_s", OUTAGES)
def test_the_reference_trainer_waits_out_an_outage_of_any_length(
    fresh_server: EmbeddedServer, model_folder: Path, tmp_path: Path, outage_s: float
) -> None:
    downs: list[threading.Timer] = []

    class Outage(Observer):
        def on_step(self, line: Mapping[str, Any], batch: Batch) -> None:
            if not downs:
                fresh_server.kill()
                downs.append(threading.Timer(outage_s, fresh_server.start))
                downs[0].start()

    with Buffer.connect(fresh_server.url, "run") as buffer:
        buffer.client.config_set("appendfsync", "always")
    settings = TrainerSettings.model_validate(
        {"model": model_folder, "output": tmp_path / "out", "steps": 3, "timeout_s": PATIENCE_S}
        | {"micro_batch_tokens": 64}
    )
    with fed(fresh_server.url, "run", tmp_path / "worker"):
        assert train(Connection(fresh_server.url, "run"), settings, observers=[Outage()]) == 3
    assert len(downs) == 1
