"""Local Hugging Face data as a table: a `.parquet` or `.arrow` file, a folder written by `Dataset.save_to_disk`, or a
folder of `.parquet` files, in the order of their names.

The package `datasets`, an extra of rollq, reads it through a memory map: only the needed rows and columns are read. The
package copies a Parquet file once, as Arrow, to its cache (`HF_HOME`). The network is not used.
"""

import hashlib
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError
from rollq.buffer.wire.images import inline_image
from rollq.producer.columns import Columns

MAX_ROW_BYTES: Final = 10 * 2**20
_CHUNK_BYTES: Final = 8 * 2**20
PROGRESS_BYTES: Final = 256 * 2**20  # smaller files are read too fast for a progress bar

_SAVED: Final = ("state.json", "dataset_dict.json")
"""The files by which `datasets` knows a saved dataset, and several saved datasets."""


class DatasetRows:
    """The rows of an open `datasets.Dataset`."""

    def __init__(self, path: Path, data: Any, images_field: str) -> None:
        """Use `open`."""
        self._path = path
        self._data = data
        self._images_column = images_field.partition(".")[0]

    @classmethod
    def open(cls, path: Path, columns: Columns) -> Self:
        """Open the data at `path`. Raises `OSError` if it does not exist, `ConfigError` if it cannot be used."""
        size_bytes = path.stat().st_size
        if path.is_dir() and not shards_of(path) and not any((path / name).is_file() for name in _SAVED):
            raise ConfigError(
                f"prompts = {str(path)!r} is a folder without a dataset: .parquet files, or what Dataset.save_to_disk "
                "writes, are expected in it; or name a file of JSON Lines"
            )
        package = _package(path)
        quiet = size_bytes < PROGRESS_BYTES and not package.are_progress_bars_disabled()
        if quiet:
            package.disable_progress_bars()
        try:
            data = _load(package, path)
        finally:
            if quiet:
                package.enable_progress_bars()
        if not data.num_rows:
            raise ConfigError(f"prompts = {str(path)!r} is empty")
        used = [name for name in data.column_names if columns.uses(name)]
        return cls(path, data.select_columns(used).with_format("arrow"), columns.images_field)

    def close(self) -> None:
        """Release the data and its memory map."""
        self._data = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self._data.num_rows)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the file, or of the folder's Parquet or Arrow files in their order. The fingerprint of
        `datasets` would differ for a copy."""
        parts = shards_of(self._path) or [Path(part["filename"]) for part in self._data.cache_files]
        digest = hashlib.sha256()
        for part in parts:
            with part.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()

    @property
    def fills_gaps(self) -> bool:
        """True: Arrow has one type for all objects of a column."""
        return True

    def place(self, row: int) -> str:
        """The location of a row for error messages: the file and the row, from 0 as in `datasets`."""
        return f"{self._path}[{row}]"

    def read(self, row: int) -> dict[str, Any]:
        """Return the values of row `row` (from 0) as JSON types, with bytes in the image column as a `data:` URL.

        Raises `ValueError` for values without a JSON type.
        """
        (values,) = self._data[row].to_pylist()
        row_as_json = {
            name: _as_json(name, value, images=name == self._images_column) for name, value in values.items()
        }
        size_bytes = sum(map(len, row_as_json.values()))
        if size_bytes > MAX_ROW_BYTES:
            raise ValueError(f"{size_bytes} bytes in one row; at most {MAX_ROW_BYTES} are allowed")
        return {name: exact_json.loads(value) for name, value in row_as_json.items()}


def shards_of(path: Path) -> list[Path]:
    """The Parquet files at a path: the file itself, or a folder's by name; none for other data."""
    if not path.is_dir():
        return [path] if path.suffix == ".parquet" else []
    return sorted(path.glob("*.parquet"))


def _package(path: Path) -> ModuleType:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"prompts {str(path)!r} need the package {error.name!r}: pip install 'rollq[datasets]', or use JSON Lines"
        ) from error
    module: ModuleType = datasets
    return module


def _load(package: Any, path: Path) -> Any:
    try:
        if shards := shards_of(path):
            data = package.Dataset.from_parquet([str(shard) for shard in shards])
        elif path.is_dir():
            data = package.load_from_disk(str(path))
        else:
            data = package.Dataset.from_file(str(path))
    except (ValueError, LookupError, package.exceptions.DatasetsError) as error:  # Arrow's errors are ValueErrors
        reason = f"it is empty, or not data of this kind: {error.__cause__ or error}"
        raise ConfigError(f"prompts = {str(path)!r} cannot be read: {reason}") from error
    if isinstance(data, package.DatasetDict):
        split = f"{path.name}/{next(iter(data))}"
        raise ConfigError(f"prompts = {str(path)!r} holds the splits {', '.join(data)}: name one, such as {split!r}")
    return data


def _as_json(column: str, value: Any, *, images: bool) -> bytes:
    try:
        return exact_json.dumps(value, default=_image_url if images else None)
    except TypeError as error:
        raise ValueError(
            f"column {column!r} cannot be written as JSON ({error}); list the needed columns in rows.metadata_fields"
        ) from error


def _image_url(value: Any) -> str:
    """Return a `data:` URL for the column's image bytes. Raises `TypeError` for anything else."""
    if not isinstance(value, bytes):
        raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")
    return inline_image(value).url
