"""Weights of a model in a form that workers can load. The tensors' bytes are safetensors; torch is imported late.

Invariant: a folder appears under its name only when it is complete and on disk.
"""

import hashlib
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollq.buffer.errors import ConfigError
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.manifest import WEIGHTS_FILE, describe_bytes, digest_of
from rollq.buffer.weights.store import StoredWeights, keep_weights, locate_weights, read_files, store_weights
from rollq.consumer.settings import ConsumerSettings, Transport
from rollq.consumer.weights.nccl import NcclRendezvous
from rollq.consumer.weights.sender import Sender

_PREFIX = "weights-"
_DIGITS = 16
_NOT_CONFIG = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


def to_safetensors(tensors: Mapping[str, Any]) -> bytes:
    """A state dict (name -> torch tensor) as the bytes of a safetensors file, with `shared_once`."""
    from safetensors.torch import save

    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in shared_once(tensors).items()}
    return save(kept, metadata={"format": "pt"})


def shared_once(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Of tensors that share memory (tied embeddings) only the first, as `save_pretrained` has it."""
    seen: set[tuple[int, int]] = set()
    kept: dict[str, Any] = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        kept[name] = tensor
    return kept


def write_model(folder: Path, weights: bytes, config_from: Path | None = None) -> Path:
    """Write `folder`/model.safetensors, with the configuration and tokenizer files of `config_from` beside it.

    `folder` is replaced when it exists, and appears whole or not at all.
    """
    unfinished = start_folder(folder)
    if config_from is not None:
        copy_config(config_from, unfinished)
    write_synced(unfinished / WEIGHTS_FILE, weights)
    return finish_folder(unfinished, folder)


def copy_config(source: Path, folder: Path) -> None:
    """Copy configuration and tokenizer files of a Hugging Face folder: all files but weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _NOT_CONFIG and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def start_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled and then renamed by `finish_folder`."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def finish_folder(unfinished: Path, folder: Path) -> Path:
    """Give a filled folder its name, once everything in it is on disk."""
    _sync_folder(unfinished)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    _sync_folder(folder.parent)
    return folder


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_sender(buffer: TrainerBuffer, settings: ConsumerSettings) -> Sender | None:
    """What sends weights straight into engines, if the settings want that. Raises `ConfigError` when it cannot work."""
    if settings.transport != "nccl" or settings.rank != 0:
        return None
    nccl = settings.nccl
    address = nccl.address or socket.gethostname()
    return Sender(buffer, NcclRendezvous(), address=address, join_s=nccl.join_s, timeout_s=nccl.timeout_s)


class WeightPublisher:
    """Puts weights where workers find them: into Redis, or into `folder`, which they share. The last `kept` stay.

    With a `sender`, state dicts go straight into engines instead. Without `writes` (ranks other than 0) it only says
    where rank 0 puts them.
    """

    def __init__(
        self,
        buffer: TrainerBuffer,
        transport: Transport,
        folder: Path | None,
        kept: int,
        *,
        writes: bool,
        sender: Sender | None = None,
    ) -> None:
        self._writes = writes
        self._buffer = buffer
        self._transport = transport
        self._folder = folder
        self._kept = kept
        self._sender = sender

    def put(self, weights: Path | Mapping[str, Any]) -> StoredWeights:
        """Store the weights of a folder (one safetensors file, shards with their index, or a LoRA adapter), or a state
        dict.

        A folder given for transport `path` is announced in place: it must stay until newer weights are published.
        Raises `WeightsError`, `ConfigError` for a state dict without a folder to write to.
        """
        if self._transport == "redis":
            files = read_files(weights) if isinstance(weights, Path) else {WEIGHTS_FILE: to_safetensors(weights)}
            return store_weights(self._buffer, files, kept=self._kept, writes=self._writes)
        if isinstance(weights, Path):
            return locate_weights(self._buffer, weights, kept=self._kept, writes=self._writes)
        data = to_safetensors(weights)
        folder = self._folder_for(data)
        if not self._writes:
            return StoredWeights(folder.absolute().as_uri(), digest_of(describe_bytes({WEIGHTS_FILE: data}).encode()))
        if folder.exists():
            folder.touch()  # the newest again
        else:
            write_model(folder, data)
        live = self._buffer.live_model()
        ours = f"{_PREFIX}{self._buffer.run}-{'[0-9a-f]' * _DIGITS}"
        keep_newest(folder.parent, ours, self._kept, "" if live is None else live.uri)
        return locate_weights(self._buffer, folder, kept=self._kept)

    def announce(self, weights: Path | Mapping[str, Any], version: int) -> StoredWeights:
        """As `put`; but what goes straight into engines is stored nowhere, and `send` follows."""
        if self._sender is None:
            return self.put(weights)
        if isinstance(weights, Path):
            self._sender.forget()
            return self.put(weights)
        return self._sender.announce(shared_once(weights), version)

    def send(self) -> None:
        """Have engines take what was announced, if they have not yet. Call it once it is published."""
        if self._sender is not None:
            self._sender.send()

    def serve_late(self) -> None:
        """Have engines take it that could not by then. Call it whenever the trainer waits."""
        if self._sender is not None:
            self._sender.serve_late()

    def keep(self) -> None:
        """Have what is in Redis live on."""
        keep_weights(self._buffer)
        if self._sender is not None:
            self._sender.keep()

    def _folder_for(self, data: bytes) -> Path:
        """A folder of its own for these weights."""
        if self._folder is None:
            raise ConfigError(
                f"transport {self._transport!r} needs weights_dir, a folder that the trainer and all workers share"
            )
        return self._folder / f"{_PREFIX}{self._buffer.run}-{hashlib.sha256(data).hexdigest()[:_DIGITS]}"


def keep_newest(parent: Path, pattern: str, count: int, live: str) -> None:
    """Remove all but the `count` last changed folders of `parent` whose name matches `pattern`, and the one at `live`:
    workers may be reading it until other weights are published."""
    for old in sorted(parent.glob(pattern), key=lambda path: path.stat().st_mtime_ns)[:-count]:
        if old.absolute().as_uri() != live:
            shutil.rmtree(old)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
