"""The manifest of a weights folder: its files with their checksums, and every tensor's name, dtype and shape.

Invariant: a manifest's digest names the weights. A folder that matches its manifest holds all that the trainer
published.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.errors import WeightsError

MANIFEST_VERSION = 1
_SAFETENSORS = ".safetensors"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
LM_HEAD = "lm_head.weight"
"""The name of the head, which weights files may omit if the head is tied to the embedding."""
EDGE_BYTES = 1 << 20
MAX_HEADER_BYTES = 100 << 20
"""The safetensors library's limit."""


class Verify(StrEnum):
    """How much of a shared folder a worker reads before its engine does."""

    FULL = "full"  # every byte
    FAST = "fast"  # sizes, headers, the first and the last MiB of every file
    SIZES = "sizes"  # sizes and headers


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file: its size, its sha256, and the sha256 of its first and last `EDGE_BYTES` together."""

    bytes: int
    sha256: str
    edges: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's dtype, by its name in safetensors (`BF16`), and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """`kind` is `full` (a model) or `lora` (an adapter); files and tensors are keyed by name."""

    kind: str
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, Tensor]

    def encode(self) -> bytes:
        """The manifest as JSON: the same bytes for the same weights."""
        return orjson.dumps({"schema": MANIFEST_VERSION, **asdict(self)}, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def decode(cls, raw: bytes) -> "Manifest":
        """Decode a manifest that `encode` wrote. Raises `WeightsError` for anything else, and for a file outside the
        folder."""
        try:
            content = orjson.loads(raw)
            if content["schema"] != MANIFEST_VERSION:
                raise WeightsError(
                    f"weights were published with manifest schema {content['schema']!r}, not {MANIFEST_VERSION}"
                )
            files = {name: _facts_of(entry) for name, entry in content["files"].items()}
            tensors = {
                name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in content["tensors"].items()
            }
            kind = str(content["kind"])
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise WeightsError(f"the manifest of weights cannot be read: {error!r}; publish them again") from error
        for name in files:
            if not _is_plain(name):
                raise WeightsError(f"the manifest of weights names the file {name!r}, which is outside its folder")
        return cls(kind, files, tensors)


def _is_plain(name: str) -> bool:
    """Whether a name belongs to a visible file directly in the folder."""
    return bool(name) and name == Path(name).name and not name.startswith(".") and "\0" not in name


def _facts_of(content: Any) -> FileFacts:
    """Decode a file's facts. Raises `TypeError` for other fields, and for a size that is not a number of bytes."""
    facts = FileFacts(**content)
    if not isinstance(facts.bytes, int) or facts.bytes < 0:
        raise TypeError(f"a file of {facts.bytes!r} bytes")
    return facts


def digest_of(encoded: bytes) -> str:
    """The name of weights with this manifest: the manifest's SHA-256 in hex."""
    return hashlib.sha256(encoded).hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model or adapter in `folder`, in name order; they need not exist.

    Raises `WeightsError` for an index that cannot be read.
    """
    return [folder / name for name in _file_names(folder) if name.endswith(_SAFETENSORS)]


def published_files(folder: Path) -> list[Path]:
    """The files in `folder` that workers need: `weight_files`, and the shard index or an adapter's configuration.

    Raises `WeightsError` for an index that cannot be read.
    """
    return [folder / name for name in _file_names(folder)]


def _file_names(folder: Path) -> list[str]:
    if (folder / ADAPTER_CONFIG).exists():
        return [ADAPTER_CONFIG, ADAPTER_FILE]
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists() or not index.exists():
        return [WEIGHTS_FILE]
    return [INDEX_FILE, *_shards(index)]


def _shards(index: Path) -> list[str]:
    """The file names in an index."""
    try:
        shards = sorted(set(orjson.loads(index.read_bytes())["weight_map"].values()))
        for name in shards:
            if not name.endswith(_SAFETENSORS) or name != Path(name).name:
                raise WeightsError(
                    f"the index of weights {str(index)!r} names {name!r}, which is not a safetensors file beside it"
                )
    except (OSError, orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"the index of weights {str(index)!r} cannot be read: {error!r}") from error
    return shards


def describe_folder(folder: Path, how: Verify = Verify.FULL) -> Manifest:
    """The manifest of the weights in `folder`; reads files in parallel. Hashes that `how` omits are empty. Raises
    `WeightsError` if a file is missing, truncated, or not a safetensors file.
    """
    paths = published_files(folder)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        described = threads.map(lambda path: _describe_path(path, how), paths)
        return _manifest(dict(zip([path.name for path in paths], described, strict=True)))


def describe_bytes(files: Mapping[str, bytes]) -> Manifest:
    """The manifest of in-memory weights, file by file. Raises `WeightsError` like `describe_folder`."""
    return _manifest({name: _describe(BytesIO(data), name) for name, data in files.items()})


def verify_folder(folder: Path, manifest: Manifest, how: Verify) -> None:
    """Compare a folder with the published manifest; reads files in parallel.

    Raises `WeightsError`, naming the file and its problem.
    """
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        paths = [folder / name for name in manifest.files]
        described = dict(zip(manifest.files, threads.map(lambda path: _describe_path(path, how), paths), strict=True))
    for name, (facts, _) in described.items():
        _compare(folder / name, manifest.files[name], facts)
    if names := {path.name for path in published_files(folder)} - manifest.files.keys():
        raise WeightsError(
            f"weights {str(folder)!r} hold {min(names)!r} now, which was not published; publish them again, "
            "from a folder that nothing else writes to"
        )
    if _manifest(described).tensors != manifest.tensors:
        raise WeightsError(f"weights {str(folder)!r} do not hold the published tensors; publish them again")


def _compare(path: Path, wanted: FileFacts, found: FileFacts) -> None:
    """Raise `WeightsError` if two files differ. Hashes that were not computed are empty."""
    for what in ("bytes", "edges", "sha256"):
        announced, seen = getattr(wanted, what), getattr(found, what)
        if seen not in ("", announced):
            shown = (str(announced)[:12], str(seen)[:12])
            raise WeightsError(
                f"weights {str(path)!r}: {what} announced {shown[0]}, found {shown[1]}: the file is not the one that "
                "was published; publish it again"
            )


_Described = tuple[FileFacts, Mapping[str, Tensor]]


def _manifest(described: Mapping[str, _Described]) -> Manifest:
    tensors = {name: tensor for _, of_file in described.values() for name, tensor in of_file.items()}
    kind = "lora" if ADAPTER_CONFIG in described else "full"
    return Manifest(kind, {name: facts for name, (facts, _) in described.items()}, tensors)


def _describe_path(path: Path, how: Verify = Verify.FULL) -> _Described:
    try:
        with path.open("rb") as file:
            return _describe(file, str(path), how)
    except OSError as error:
        raise WeightsError(f"weights {str(path)!r} cannot be read: {error.strerror}; publish them again") from error


def _describe(file: BufferedReader | BytesIO, name: str, how: Verify = Verify.FULL) -> _Described:
    size = file.seek(0, os.SEEK_END)
    tensors = _read_header(file, name, size) if name.endswith(_SAFETENSORS) else {}
    edges = full = ""
    if how is not Verify.SIZES:
        file.seek(0)
        both = hashlib.sha256(file.read(EDGE_BYTES))
        file.seek(max(size - EDGE_BYTES, 0))
        both.update(file.read(EDGE_BYTES))
        edges = both.hexdigest()
    if how is Verify.FULL:
        file.seek(0)
        full = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(size, full, edges), tensors


def _read_header(file: BufferedReader | BytesIO, name: str, size: int) -> dict[str, Tensor]:
    """The tensors in a safetensors file, which holds a JSON object's length in 8 bytes, the object, and the data."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    try:
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header of {length} bytes does not fit into {size}")
        header: Any = orjson.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        ends = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + ends != size:
            raise ValueError(f"it has {size} bytes and should have {8 + length + ends}")
        return {key: Tensor(str(entry["dtype"]), tuple(entry["shape"])) for key, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"weights {name!r} are not a complete safetensors file: {error}; republish them") from error
