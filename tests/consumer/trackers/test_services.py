"""What each tracker writes, read with the service's own reader. W&B is offline."""

import multiprocessing
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollq.consumer.tracker_settings import MlflowSettings, WandbSettings
from rollq.consumer.trackers.tracker import Entry, Rollout
from support.waiting import wait_until

ROLLOUT = Rollout("math", 7, 1, "1 + 1 =", "a | b <i>\n2", 0.5, {"correct": 1.0, "length": -0.5}, 0.25, 1, 5, "stop")
ENTRIES = [
    Entry(3, {"reward": 0.5, "rewards/math": 0.25}, (ROLLOUT,)),
    Entry(4, {"reward": 0.75, "rewards/math": 0.5}, (ROLLOUT,)),
    Entry(4, {"evaluation/held_out": 0.125}),
]


def wandb_history(data: bytes) -> Iterator[dict[str, Any]]:
    """The logged steps in W&B's file: a header, then records in LevelDB's format of logs."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    block, header, joined, place = 32_768, 7, b"", 7
    while place + header <= len(data):
        if block - place % block < header:  # the rest of a block is padding
            place += block - place % block
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        if place + header + size > len(data):  # it is still being written
            return
        joined += data[place + header : place + header + size]
        place += header + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(joined)
            joined = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): orjson.loads(item.value_json) for item in items}


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rollq.consumer.trackers.tensorboard import TensorBoard

    for first_step, entries in ((3, ENTRIES), (4, [Entry(4, {"reward": 0.875})])):  # step 4 is trained again
        tracker = TensorBoard(tmp_path, first_step)
        for entry in entries:
            tracker.log(entry)
        tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.5), (4, 0.875)]
    shown = events.Tensors("rollouts/text_summary")
    assert shown[0].step == 3
    table = shown[0].tensor_proto.string_val[0].decode().splitlines()
    assert len(table) == 3
    assert "| math | 7 | 1 + 1 = | a &#124; b &lt;i><br>2 | 0.5 |" in table[2]


def log_to_wandb(folder: Path) -> None:
    from rollq.consumer.trackers.wandb import Wandb

    tracker = Wandb(WandbSettings(mode="offline", project="sums"), folder, "run-1")
    for entry in ENTRIES:
        tracker.log(entry)
    tracker.close()


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that ends: W&B starts threads that every later fork of its process would have too."""
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    process = multiprocessing.get_context("fork").Process(target=log_to_wandb, args=(tmp_path / "out",))
    process.start()
    process.join()
    assert process.exitcode == 0

    [path] = (tmp_path / "out").rglob("*.wandb")
    wait_until(lambda: len(list(wandb_history(path.read_bytes()))) == len(ENTRIES))  # its process writes it
    history = list(wandb_history(path.read_bytes()))
    assert [(line["step"], line.get("reward")) for line in history] == [(3, 0.5), (4, 0.75), (4, None)]
    assert history[2]["evaluation/held_out"] == 0.125
    [table, *_] = sorted((tmp_path / "out").rglob("*.table.json"))
    rows: dict[str, Any] = orjson.loads(table.read_bytes())
    assert dict(zip(rows["columns"], rows["data"][0], strict=True))["text"] == ROLLOUT.text
    assert dict(zip(rows["columns"], rows["data"][0], strict=True))["parts"] == '{"correct":1.0,"length":-0.5}'


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    from rollq.consumer.trackers.mlflow import Mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs the whole of MLflow
    uri = f"file:{tmp_path / 'runs'}"
    for _ in range(2):  # the second one finds the experiment
        tracker = Mlflow(MlflowSettings(tracking_uri=uri, experiment="sums"), "run-1")
        for entry in ENTRIES:
            tracker.log(entry)
        tracker.close()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert [(run.info.status, run.info.run_name) for run in runs] == [("FINISHED", "run-1")] * 2
    history = client.get_metric_history(runs[0].info.run_id, "reward")
    assert [(metric.step, metric.value) for metric in history] == [(3, 0.5), (4, 0.75)]
    assert runs[0].data.metrics["evaluation/held_out"] == 0.125
    path = client.download_artifacts(runs[0].info.run_id, "rollouts/step-00000003.json", str(tmp_path))
    [row] = orjson.loads(Path(path).read_bytes())["rollouts"]
    assert (row["prompt"], row["parts"]) == (ROLLOUT.prompt, ROLLOUT.parts)
