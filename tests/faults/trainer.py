"""A trainer of several ranks, one process each, which "trains" by hashing its batches into its weights.

Its weights are a hash of all batches that it was ever trained on, in order, so that no two histories look the same. It
saves a checkpoint to disk every few steps and resumes from the newest one. Ranks meet twice per step, as an all-reduce
and a barrier would have them do; a rank whose peer is gone exits.
"""

import hashlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from faults.digests import chained, samples_digest, versions_of
from faults.history import History
from faults.payloads import payloads_in
from faults.recording import recorded
from rollq.buffer.calls.claiming import ReleaseMode
from rollq.consumer import Batch, Connection, Consumer, ConsumerSettings

RANKS = 2
STREAM_EVERY = 2
"""Every second batch is taken in parts."""
PART_TOKENS = 1
"""Parts are as small as can be."""
INITIAL_WEIGHTS = "initial"


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the trainer: what all of its ranks are given. It ends after `last_step`, if there is one.

    It gives up the batch of every `release_every`-th step once, as if its loss were not finite; 0: of none. With
    `takeover`, it replaces a trainer that lives, such as one that was stopped and will come back.
    """

    url: str
    run: str
    folder: Path
    launch_id: str
    mode: str
    step: int
    weights: str
    last_step: int | None = None
    checkpoint_every: int = 3
    release_every: int = 4
    takeover: bool = False


class Peer:
    """The connection between the two ranks of a launch. Launches in other folders, of tests at the same time, may have
    the same id."""

    def __init__(self, folder: Path, launch_id: str, rank: int) -> None:
        launch = hashlib.sha256(f"{folder} {launch_id}".encode()).hexdigest()
        address = f"\0rollq-{launch}"
        if rank == 0:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                self._socket = listener.accept()[0]
        else:
            self._socket = _connect(address)

    def meet(self) -> None:
        """Wait for the other rank. Raises `ConnectionError` when it is gone."""
        self._socket.sendall(b".")
        if not self._socket.recv(1):
            raise ConnectionError("the other rank is gone")


def _connect(address: str) -> socket.socket:
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(address)
        except OSError:
            peer.close()
            time.sleep(0.01)
        else:
            return peer


def newest_checkpoint(folder: Path) -> tuple[int, str]:
    """Step and weights of the newest checkpoint; those of an untrained model without any."""
    saved = sorted((folder / "checkpoints").glob("*.json"))
    if not saved:
        return 0, INITIAL_WEIGHTS
    found = json.loads(saved[-1].read_text())
    return found["step"], found["weights"]


def run_rank(launch: Launch, rank: int) -> None:
    """Train until SIGTERM, an error, or the end of the other rank."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: _stop(stop, number, frame))
    history = History(launch.folder / "history", f"trainer{rank}")
    settings = ConsumerSettings(
        launch_id=launch.launch_id, rank=rank, world_size=RANKS, mode=launch.mode, takeover=launch.takeover  # type: ignore[arg-type]
    )  # fmt: skip
    began = {"launch": launch.launch_id, "from_step": launch.step, "mode": launch.mode, "weights": launch.weights}
    with recorded(history, "begin" if rank == 0 else "join", **began) as call:
        consumer = Consumer.connect(
            Connection(launch.url, launch.run, payloads=payloads_in(launch.folder)),
            weights=_weights(launch.folder, launch.weights), resume_from=launch.step, settings=settings, stop=stop,
        )  # fmt: skip
        call.ok(epoch=consumer.epoch)
    with consumer:
        _Rank(launch, rank, consumer, history).train()


def _stop(stop: threading.Event, number: int, frame: FrameType | None) -> None:
    stop.set()


class _Rank:
    """One rank in training."""

    def __init__(self, launch: Launch, rank: int, consumer: Consumer, history: History) -> None:
        self._launch = launch
        self._rank = rank
        self._consumer = consumer
        self._history = history
        self._weights = launch.weights
        self._peer = Peer(launch.folder, launch.launch_id, rank)
        self._released = 0  # the last step whose batch was given up

    def train(self) -> None:
        """Claim, train, publish, commit and checkpoint, step by step."""
        while (batch := self._claim()) is not None:
            self._peer.meet()
            if self._gives_up(batch.step):
                self._release(batch)
                continue
            digest = digest_of(batch)
            before, self._weights = self._weights, chained(self._weights, digest)
            if self._rank == 0:
                self._note_train(batch, digest, before)
                self._finish(batch)
            else:
                self._consumer.commit(batch)  # only moves this rank's step
            self._peer.meet()
            if batch.step == self._launch.last_step:
                break

    def _gives_up(self, step: int) -> bool:
        every = self._launch.release_every
        return every > 0 and step % every == 0 and step != self._released

    def _claim(self) -> Batch | None:
        step = self._consumer.step
        with self._call("claim", step=step, weights=self._weights, again=step == self._released) as call:
            batch = self._streamed() if step % STREAM_EVERY == 0 else next(self._consumer, None)
            if batch is not None:
                call.ok(digest=digest_of(batch))
            return batch

    def _streamed(self) -> Batch | None:
        """The step's batch, taken part by part while it fills."""
        stream = self._consumer.stream(PART_TOKENS)
        for _ in stream.parts():
            self._peer.meet()
        return stream.batch

    def _release(self, batch: Batch) -> None:
        """Give up the batch: return its groups or quarantine them, in turns. The step then gets a new one."""
        self._released = batch.step
        mode: ReleaseMode = "return" if batch.step % (2 * self._launch.release_every) else "quarantine"
        if self._rank > 0:  # only moves this rank's step
            self._consumer.release(batch, mode)
            return
        with self._call("release", step=batch.step, mode=mode) as call:
            self._consumer.release(batch, mode)
            call.ok()

    def _note_train(self, batch: Batch, digest: str, before: str) -> None:
        groups = [
            (group.task, group.group_id, samples_digest(group.samples), versions_of(group.samples))
            for group in batch.groups
        ]
        self._history.note(
            "train", epoch=self._consumer.epoch, step=batch.step, before=before, after=self._weights, digest=digest,
            groups=groups, tokens=sum(sample.response_tokens for group in batch.groups for sample in group.samples),
        )  # fmt: skip

    def _finish(self, batch: Batch) -> None:
        with self._call("publish", version=batch.step) as call:
            self._consumer.publish(_weights(self._launch.folder, self._weights), step=batch.step)
            call.ok()
        with self._call("commit", step=batch.step) as call:
            self._consumer.commit(batch)
            call.ok()
        if batch.step % self._launch.checkpoint_every == 0:
            self._save(batch.step)
            with self._call("checkpoint", step=batch.step) as call:
                self._consumer.checkpoint(batch.step)
                call.ok()

    def _save(self, step: int) -> None:
        """Write a checkpoint. Those of a later epoch come last, so that a zombie's is not resumed from."""
        folder = self._launch.folder / "checkpoints"
        name = f"{self._consumer.epoch:06d}-{step:08d}.json"
        unfinished = folder / f".{name}.{os.getpid()}"
        unfinished.write_text(json.dumps({"step": step, "weights": self._weights}))
        unfinished.rename(folder / name)
        self._history.note("save", epoch=self._consumer.epoch, step=step, weights=self._weights)

    def _call(self, what: str, **facts: Any) -> Any:
        return recorded(self._history, what, epoch=self._consumer.epoch, **facts)


def digest_of(batch: Batch) -> str:
    """A hash of a batch's groups, in their order."""
    digest = ""
    for group in batch.groups:
        digest = chained(digest, f"{group.task} {group.group_id} {samples_digest(group.samples)}")
    return digest


def _weights(folder: Path, weights: str) -> Path:
    """A folder with weights as workers load them."""
    made = folder / "weights" / weights
    made.mkdir(parents=True, exist_ok=True)
    file = made / "model.safetensors"
    if not file.exists():
        unfinished = file.with_suffix(f".{os.getpid()}")
        save_file({"hash": np.frombuffer(weights.encode(), dtype=np.uint8)}, unfinished)
        unfinished.rename(file)
    return made
