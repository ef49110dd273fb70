"""Publishes weights to workers: complete, as deltas, or straight into engines."""

import socket
from pathlib import Path

from rollq.buffer.errors import WeightsError
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.manifest import LM_HEAD
from rollq.buffer.weights.store import StoredWeights, keep_weights
from rollq.consumer.settings import MAX_FILE_BYTES, ConsumerSettings, Transport
from rollq.consumer.weights.checkpoint_format import Shapes, shapes_of
from rollq.consumer.weights.model_folders import UnfinishedModels
from rollq.consumer.weights.nccl import NcclRendezvous
from rollq.consumer.weights.places import make_place
from rollq.consumer.weights.sender import Sender
from rollq.consumer.weights.sources import Folder, Source
from rollq.consumer.weights.versions import VersionStore


def make_sender(buffer: TrainerBuffer, settings: ConsumerSettings) -> Sender | None:
    """Return the sender for transport `nccl` on rank 0, otherwise None. Raises `ConfigError` if NCCL cannot work."""
    if settings.transport != "nccl" or settings.rank != 0:
        return None
    nccl = settings.nccl
    address = nccl.address or socket.gethostname()
    return Sender(buffer, NcclRendezvous(), address=address, join_s=nccl.join_s, timeout_s=nccl.timeout_s)


class WeightPublisher:
    """Stores weights in Redis, in a folder that the trainer and all workers share, or in an object store.

    `where` is that folder, or the URL of the object store. The last `kept` versions stay. Every `full_every`-th version
    of a model or a state dict is stored complete; versions in between are stored as deltas. With a `sender`, models and
    state dicts are broadcast straight into engines instead. Models are published in checkpoint format; state dicts must
    have the format of the weights that training started from. Both are written tensor by tensor, into files of
    `max_file_bytes`; for an object store in the folder `scratch`, or else `TMPDIR`, before they are uploaded.
    """

    def __init__(
        self,
        buffer: TrainerBuffer,
        transport: Transport,
        where: Path | str | None,
        kept: int,
        *,
        full_every: int = 1,
        max_file_bytes: int = MAX_FILE_BYTES,
        scratch: Path | None = None,
        sender: Sender | None = None,
    ) -> None:
        self._buffer = buffer
        self._place = make_place(buffer, transport, where, kept, scratch)
        self._unfinished = UnfinishedModels(buffer, self._place.scratch, max_file_bytes)
        self._versions = VersionStore(buffer, self._place, kept, full_every)
        self._sender = sender
        self._started_from: Shapes | None = None  # None: not started, or from an adapter

    def start(self, source: Source) -> StoredWeights:
        """Store the initial weights, like `put`. `announce` compares later weights with them.

        No other trainer must hold the run.
        """
        self._unfinished.clear()
        self._started_from = None if source.described is None else shapes_of(source.described)
        return self.put(source)

    def announce(self, source: Source, version: int) -> StoredWeights:
        """Store weights like `put`, or offer them as `version` for a broadcast; call `send` once they are published.

        Raises `WeightsError`, including for tensors whose names or shapes differ from the initial weights'.
        """
        if isinstance(source, Folder):
            if self._sender is not None:
                self._sender.forget()
            return self.put(source)
        if self._started_from is not None:
            _check_shapes(shapes_of(source.described), self._started_from)
        if self._sender is not None:
            return self._sender.announce(dict(source), version, source.probe)
        return self.put(source)

    def put(self, source: Source) -> StoredWeights:
        """Store weights: the files of a folder, or tensors, complete or as a delta.

        With transport `path`, a folder is announced in place and must stay until newer weights are published. Workers
        compare their engines with the source's probe. Raises `WeightsError`, and `ConfigError` for tensors without a
        folder to write to.
        """
        if isinstance(source, Folder):
            self._versions.forget()
            return self._place.put_folder(source.path, source.probe)
        self._place.check(source.size_bytes)
        with self._unfinished.written(source) as folder:
            return self._versions.put(folder, source.probe)

    @property
    def stored_bytes(self) -> int:
        """The total bytes of stored models and state dicts."""
        return self._versions.stored_bytes

    def send(self) -> None:
        """Broadcast the announced weights to engines that do not have them. Call it after publishing them."""
        if self._sender is not None:
            self._sender.send()

    def serve_late(self) -> None:
        """Broadcast to engines that missed the published weights. Call it whenever the trainer waits."""
        if self._sender is not None:
            self._sender.serve_late()

    def keep(self) -> None:
        """Renew the expiry of the weights in Redis. Callable from any thread."""
        keep_weights(self._buffer)
        if self._sender is not None:
            self._sender.keep()


def _check_shapes(shapes: Shapes, started_from: Shapes) -> None:
    """Raise `WeightsError` if names or shapes of tensors differ from the initial weights'.

    A head may be on one side only: some files contain a tied head, and others do not.
    """
    missing = sorted(name for name in started_from.keys() - shapes.keys() if not name.endswith(LM_HEAD))
    unknown = sorted(name for name in shapes.keys() - started_from.keys() if not name.endswith(LM_HEAD))
    if missing:
        difference = f"they lack {missing[0]!r}" + (f", and have {unknown[0]!r} instead" if unknown else "")
    elif unknown:
        difference = f"they also have {unknown[0]!r}"
    elif changed := sorted(name for name in shapes.keys() & started_from.keys() if shapes[name] != started_from[name]):
        difference = f"{changed[0]!r} has shape {shapes[changed[0]]}, not {started_from[changed[0]]}"
    else:
        return
    raise WeightsError(
        f"these weights do not match those that training started from: {difference}. Pass the model itself, or "
        "to_checkpoint_format(model, state_dict), to connect and publish: both have the names and shapes of files"
    )


def make_publisher(buffer: TrainerBuffer, settings: ConsumerSettings) -> WeightPublisher:
    """A publisher for the transport in the settings. Raises `ConfigError` if NCCL cannot work."""
    return WeightPublisher(
        buffer,
        settings.transport,
        settings.s3_url if settings.transport == "s3" else settings.weights_dir,
        settings.keep_versions,
        full_every=settings.full_every,
        max_file_bytes=settings.max_file_bytes,
        scratch=settings.weights_dir,
        sender=make_sender(buffer, settings),
    )
