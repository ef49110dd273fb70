"""Publishes weights where workers find them: in Redis, in a shared folder, or straight into engines."""

import hashlib
import shutil
import socket
from pathlib import Path

from rollq.buffer.errors import ConfigError
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.manifest import WEIGHTS_FILE
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import StoredWeights, keep_weights, locate_weights, read_files, store_weights
from rollq.consumer.settings import ConsumerSettings, Transport
from rollq.consumer.weights.checkpoint_format import (
    Shapes,
    Weights,
    check_format,
    is_model,
    model_shapes,
    publishable,
)
from rollq.consumer.weights.nccl import NcclRendezvous
from rollq.consumer.weights.safetensors import shared_once, to_safetensors, write_model
from rollq.consumer.weights.sender import Sender

_PREFIX = "weights-"
_DIGITS = 16
"""Hexadecimal digits of the weights' hash in a folder's name."""


def make_sender(buffer: TrainerBuffer, settings: ConsumerSettings) -> Sender | None:
    """Return the sender for transport `nccl` on rank 0, otherwise None. Raises `ConfigError` if NCCL cannot work."""
    if settings.transport != "nccl" or settings.rank != 0:
        return None
    nccl = settings.nccl
    address = nccl.address or socket.gethostname()
    return Sender(buffer, NcclRendezvous(), address=address, join_s=nccl.join_s, timeout_s=nccl.timeout_s)


class WeightPublisher:
    """Stores weights in Redis, or in `folder`, which the trainer and all workers share. The last `kept` versions stay.

    With a `sender`, models and state dicts are broadcast straight into engines instead. Models are published in
    checkpoint format; state dicts must have the format of the weights that training started from.
    """

    def __init__(
        self,
        buffer: TrainerBuffer,
        transport: Transport,
        folder: Path | None,
        kept: int,
        *,
        sender: Sender | None = None,
    ) -> None:
        self._buffer = buffer
        self._transport = transport
        self._folder = folder
        self._kept = kept
        self._sender = sender
        self._started_from: Shapes | None = None  # None: from an adapter, or not yet

    def start(self, weights: Weights, probe: Probe | None = None) -> StoredWeights:
        """Store the weights that training starts from, like `put`. `announce` compares later ones with them."""
        weights, probe = publishable(weights), probe or _probe_of(weights)
        self._started_from = model_shapes(weights)
        return self.put(weights, probe)

    def put(self, weights: Weights, probe: Probe | None = None) -> StoredWeights:
        """Store a model, a state dict, or a folder's weights: a safetensors file, shards with an index, or an adapter.

        With transport `path`, a folder is announced in place and must stay until newer weights are published.
        Workers compare their engines with `probe`, by default that of a model; folders and state dicts have none.
        Raises `WeightsError`, and `ConfigError` for a model or state dict without a folder to write to.
        """
        weights, probe = publishable(weights), probe or _probe_of(weights)
        if self._transport == "redis":
            files = read_files(weights) if isinstance(weights, Path) else {WEIGHTS_FILE: to_safetensors(weights)}
            return store_weights(self._buffer, files, kept=self._kept, probe=probe)
        if isinstance(weights, Path):
            return locate_weights(self._buffer, weights, kept=self._kept, probe=probe)
        return self._write_to_folder(to_safetensors(weights), probe)

    def _write_to_folder(self, data: bytes, probe: Probe | None) -> StoredWeights:
        """Store the bytes of a safetensors file in a folder named after their hash."""
        if self._folder is None:
            raise ConfigError(
                f"transport {self._transport!r} needs weights_dir, a folder that the trainer and all workers share"
            )
        prefix = f"{_PREFIX}{self._buffer.run}-"
        folder = self._folder / f"{prefix}{hashlib.sha256(data).hexdigest()[:_DIGITS]}"
        if folder.exists():
            folder.touch()  # the newest again
        else:
            write_model(folder, data)
        live = self._buffer.live_model()
        keep_newest(self._folder, prefix + "[0-9a-f]" * _DIGITS, self._kept, "" if live is None else live.uri)
        return locate_weights(self._buffer, folder, kept=self._kept, probe=probe)

    def announce(self, weights: Weights, version: int, probe: Probe | None = None) -> StoredWeights:
        """Store weights like `put`, or offer them as `version` for a broadcast; call `send` once they are published.

        Raises `WeightsError` also for tensors of other names or shapes than those that training started from.
        """
        content = publishable(weights)
        if self._started_from is not None and not isinstance(content, Path):
            check_format(content, self._started_from)
        probe = probe or _probe_of(weights)
        if self._sender is None:
            return self.put(content, probe)
        if isinstance(content, Path):
            self._sender.forget()
            return self.put(content, probe)
        return self._sender.announce(shared_once(content), version, probe)

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


def _probe_of(weights: Weights) -> Probe | None:
    """The probe of a model. One that `publishable` refuses is not run: its forward pass may wait for other ranks."""
    if not is_model(weights):
        return None
    from rollq.consumer.weights.probe import probe_of  # needs torch

    return probe_of(weights)


def keep_newest(parent: Path, pattern: str, count: int, live: str) -> None:
    """Remove the folders of `parent` that match `pattern`, except the `count` last changed and the one at URI `live`.

    Workers may be reading the live weights until others are published.
    """
    for old in sorted(parent.glob(pattern), key=lambda path: path.stat().st_mtime_ns)[:-count]:
        if old.absolute().as_uri() != live:
            shutil.rmtree(old)
