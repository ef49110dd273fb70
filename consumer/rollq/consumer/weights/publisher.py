"""Publishes weights where workers find them: complete, as deltas, or straight into engines."""

import logging
import socket
from pathlib import Path

from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.chain import Chain
from rollq.buffer.weights.manifest import WEIGHTS_FILE, describe_bytes, digest_of
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import StoredWeights, keep_weights, record_chain
from rollq.consumer.settings import ConsumerSettings, Transport
from rollq.consumer.weights.checkpoint_format import (
    Shapes,
    Weights,
    check_format,
    is_model,
    model_shapes,
    publishable,
)
from rollq.consumer.weights.deltas import Delta, DeltaEncoder
from rollq.consumer.weights.nccl import NcclRendezvous
from rollq.consumer.weights.places import make_place
from rollq.consumer.weights.safetensors import shared_once, to_safetensors
from rollq.consumer.weights.sender import Sender

log = logging.getLogger(__name__)


def make_sender(buffer: TrainerBuffer, settings: ConsumerSettings) -> Sender | None:
    """Return the sender for transport `nccl` on rank 0, otherwise None. Raises `ConfigError` if NCCL cannot work."""
    if settings.transport != "nccl" or settings.rank != 0:
        return None
    nccl = settings.nccl
    address = nccl.address or socket.gethostname()
    return Sender(buffer, NcclRendezvous(), address=address, join_s=nccl.join_s, timeout_s=nccl.timeout_s)


class WeightPublisher:
    """Stores weights in Redis, in a folder that the trainer and all workers share, or in an object store.

    `where` is that folder, or the URL of the object store. The last `kept` versions stay. Every `full_every`-th
    version of a model or a state dict is stored complete, and those between as deltas. With a `sender`, models and
    state dicts are broadcast straight into engines instead. Models are published in checkpoint format; state dicts
    must have the format of the weights that training started from.
    """

    def __init__(
        self,
        buffer: TrainerBuffer,
        transport: Transport,
        where: Path | str | None,
        kept: int,
        *,
        full_every: int = 1,
        sender: Sender | None = None,
    ) -> None:
        self.stored_bytes = 0  # for models and state dicts, in all
        self._buffer = buffer
        self._place = make_place(buffer, transport, where, kept)
        self._kept = kept
        self._deltas = DeltaEncoder(full_every)
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
        if isinstance(weights, Path):
            self._deltas.forget()
            return self._place.put_folder(weights, probe)
        return self._put_bytes(to_safetensors(weights), probe)

    def _put_bytes(self, data: bytes, probe: Probe | None) -> StoredWeights:
        """Store the bytes of a safetensors file, as a delta unless a complete copy is due."""
        if not self._deltas.is_complete_due:  # otherwise nobody needs the digest yet, which takes time
            manifest = describe_bytes({WEIGHTS_FILE: data}).encode()
            if delta := self._deltas.encode(data, digest_of(manifest)):
                return self._put_delta(delta, data, manifest, probe)
        stored = self._place.put_model(data, probe)
        self._note(Chain(complete=stored.uri, digest=stored.digest), data, len(data))
        return stored

    def _put_delta(self, delta: Delta, data: bytes, manifest: bytes, probe: Probe | None) -> StoredWeights:
        uri = self._place.delta_uri(delta.sha256, len(delta.data))
        chain = delta.at(uri)
        stored = record_chain(self._buffer, manifest, chain, kept=self._kept, probe=probe)
        if stored.uri != chain.uri:
            log.info("weights %s are live already: nothing was stored", stored.digest[:12])
            return stored
        self._place.put_delta(uri, memoryview(delta.data))
        self._note(chain, data, len(delta.data))
        return stored

    def _note(self, chain: Chain, data: bytes, moved: int) -> None:
        """The version that `chain` leads to has been stored, for `moved` bytes."""
        self._deltas.note(chain, data)
        self.stored_bytes += moved
        kind = f"delta {len(chain.deltas)}" if chain.deltas else "complete"
        log.info("weights %s stored (%s): %d bytes for %d", chain.versions[-1][:12], kind, moved, len(data))

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
