"""Versions of a model in the place that workers read: complete, or as a delta to the previous version."""

import hashlib
import logging
import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.chain import Chain, Link
from rollq.buffer.weights.delta import can_encode, encode_delta
from rollq.buffer.weights.manifest import describe_folder, digest_of, weight_files
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import StoredWeights, record_chain
from rollq.consumer.weights.places import Place

log = logging.getLogger(__name__)


class VersionStore:
    """Stores versions at `place`. At most `full_every - 1` deltas follow a complete copy. The last `kept` versions
    stay. `stored_bytes` is the size of all complete copies and deltas. The store keeps a copy of the last version in
    unnamed files in `TMPDIR`, which disappear with the process.
    """

    def __init__(self, buffer: TrainerBuffer, place: Place, kept: int, full_every: int) -> None:
        self.stored_bytes = 0
        self._buffer = buffer
        self._place = place
        self._kept = kept
        self._most = full_every - 1
        self._chain: Chain | None = None  # leads to the last version
        self._last: Sequence[mmap.mmap] = ()

    def put(self, folder: Path, probe: Probe | None) -> StoredWeights:
        """Store the model in a folder of `UnfinishedModels`. Raises `WeightsError`."""
        manifest = describe_folder(folder).encode()
        files = [_mapped(path) for path in weight_files(folder)]
        if delta := self._delta_to(files, digest_of(manifest)):
            return self._put_delta(delta, files, manifest, probe)
        stored = self._place.put_model(folder, manifest, probe)
        self._note(Chain(complete=stored.uri, digest=stored.digest), files, sum(map(len, files)))
        return stored

    def forget(self) -> None:
        """Store the next version complete."""
        self._chain, self._last = None, ()

    def _delta_to(self, files: Sequence[mmap.mmap], digest: str) -> "_Delta | None":
        """The delta to a version's safetensors files; None if a complete copy is due or needed."""
        if self._chain is None or len(self._chain.deltas) >= self._most:
            return None
        if not can_encode(self._last, files):
            log.info(
                "weights %s have different tensors from the last version: they are published complete", digest[:12]
            )
            return None
        try:
            with tempfile.TemporaryFile() as file:
                encode_delta(self._last, files, (self._chain.versions[-1], digest), file)
                file.flush()
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            log.warning("no room for a delta in %s: %s; the weights are published complete", _where(), error)
            return None
        return _Delta(data, hashlib.sha256(data).hexdigest(), self._chain, digest)

    def _put_delta(
        self, delta: "_Delta", files: Sequence[mmap.mmap], manifest: bytes, probe: Probe | None
    ) -> StoredWeights:
        uri = self._place.delta_uri(delta.sha256, len(delta.data))
        chain = delta.at(uri)
        stored = record_chain(self._buffer, manifest, chain, kept=self._kept, probe=probe)
        if stored.uri != chain.uri:
            log.info("weights %s are already live: nothing was stored", stored.digest[:12])
            return stored
        self._place.put_delta(uri, memoryview(delta.data))
        self._note(chain, files, len(delta.data))
        return stored

    def _note(self, chain: Chain, files: Sequence[mmap.mmap], stored_bytes: int) -> None:
        """Note that the version in `files`, at the end of `chain`, took `stored_bytes`. The next delta follows it."""
        self.stored_bytes += stored_bytes
        kind = f"delta {len(chain.deltas)}" if chain.deltas else "complete"
        size_bytes = sum(map(len, files))
        log.info("weights %s stored (%s): %d bytes for %d", chain.versions[-1][:12], kind, stored_bytes, size_bytes)
        if self._most == 0:
            return
        try:
            self._last, self._chain = [_copied(file) for file in files], chain
        except OSError as error:
            log.warning(
                "no room for a copy of the weights in %s: %s; the next version is published complete", _where(), error
            )
            self.forget()


class _Delta(NamedTuple):
    """The bytes of a delta, their SHA-256, the chain that it continues, and the digest of the resulting version."""

    data: mmap.mmap
    sha256: str
    chain: Chain
    result: str

    def at(self, uri: str) -> Chain:
        """The chain extended by this delta, which is at `uri`."""
        base = self.chain.versions[-1]
        return self.chain.extended(
            Link(uri=uri, bytes=len(self.data), sha256=self.sha256, base=base, result=self.result)
        )


def _mapped(path: Path) -> mmap.mmap:
    """The bytes of a file. They stay readable after the file is moved or removed."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _copied(data: mmap.mmap) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _where() -> str:
    return tempfile.gettempdir()
